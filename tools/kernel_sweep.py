#!/usr/bin/env python3
"""Measure many ways to cut a batch on a GPU, hundreds a second: what docs/kernel-log.md calls sweeps.

The kernel is built once for each geometry, with choose.h asking the environment (kernel_knobs.py). Calls are
eager, between CUDA events, L2 flushed by reading before each, as in kernel_lab.py: about 3 us of each time
are the timer's. Good for ranking cuts, not a record.

    python tools/kernel_sweep.py --cases "b32 L4096 kv8 fp8,logn b8 mean8192 sigma1 kv4 bf16"
    python tools/kernel_sweep.py --out sweep.jsonl --minutes 2          all lab cases, every cut kept
    python tools/kernel_sweep.py --versus "kWorstTiles=28;kTailTokens=512,H=2" --rounds 8

A sweep tries every cut that makes sense for a case, 5 calls each, then the best five and the default again,
40 calls each by turns, and compares their outputs with the default's. It prints time and share of copy speed
of the default and of the best cut. `--versus` compares settings with the default over all cases, in random
order each round: in a fixed one, whoever is first in a round seems up to 5 % faster in small problems. It
prints each setting's geometric mean against the default (the timer's 3 us left out), how many cases are over
1.5 % better or worse, and the best and the worst. What cannot be launched or computes something else is told,
and has no time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import kernel_lab
from kernel_cases import LabCase, choose_cases
from kernel_knobs import STRUCTURE, VARIANT, numbers, parse_setting, setting

from evenkv.library.build import build_solution
from evenkv.numerics.bytes import kv_bytes
from evenkv.spec.family import DecodeSpec

Knobs = dict[str, Any]
Timing = list[float | None]  # of each setting; None: it has none
TIMER_US = 3.0  # of each time, left out of ratios
_CALLS, _AGAIN, _ROUNDS = 5, 10, 4
_BLOCKS = 396  # three an SM of an H200: what cuts are laid out for


def cuts_of(case: LabCase) -> Iterator[Knobs]:
    """The cuts that are tried on a case."""
    spec, batch, tokens = case.spec, len(case.lengths), sum(case.lengths)
    average = tokens / batch
    even = max(case.lengths) <= int(numbers()["kEven100"]) / 100 * average
    has_pairs = spec.head_dim * (1 if spec.is_fp8 else 2) <= 128 and spec.num_kv_heads % 2 == 0
    widths = (1, 2, 3) if has_pairs else (1,)
    for width in widths:
        units = spec.num_kv_heads // (1 if width == 1 else 2)
        if even:
            for splits, parts in itertools.product(
                (1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96)
            ):
                if parts == 1 or (units * batch * parts * splits <= 6 * _BLOCKS and average >= 64 * parts):
                    yield {"W": width, "S": splits, "P": parts}
        for splits, fair in itertools.product((1, 2), (45, 60, 80, 100, 130)):
            cells = {"W": width, "S": splits, "U": 1, "D": 0, "kFair100": fair, "kFairTiles": 0}
            yield cells | {"H": 0}
            for halvings, tail in itertools.product((1, 2, 3, 4), (25, 50, 75)):
                yield cells | {"H": halvings, "TS": tail, "TT": 64}
        if not even and batch <= 32:
            for (splits, alone), share in itertools.product(
                ((1, 0), (2, 0), (2, 1)), (0.5, 0.67, 0.8, 1.0, 1.33, 2.0, 3.0)
            ):
                dealt = int(share * _BLOCKS / units / (1 if alone else splits))
                if dealt > batch:
                    yield {"W": width, "S": splits, "U": 1, "D": dealt, "A": alone}


def build(spec: DecodeSpec) -> Any:
    """The kernel with knobs."""
    return build_solution(kernel_lab.variant_solution(VARIANT, spec))


def times(call: Any, arguments: list[Any], buffer: torch.Tensor, count: int, knobs: Knobs) -> list[float]:
    """Microseconds of `count` calls with the knobs."""
    with setting(knobs):
        return kernel_lab.call_times(lambda: call(*arguments), buffer, count)


def outputs(call: Any, arguments: list[Any], knobs: Knobs) -> list[torch.Tensor]:
    """Output and lse of a call, which held NaN before."""
    for result in arguments[-2:]:
        result.fill_(float("nan"))
    with setting(knobs):
        call(*arguments)
    return [result.float().clone() for result in arguments[-2:]]


def tried(call: Any, arguments: list[Any], buffer: torch.Tensor, cut: Knobs) -> float | None:
    """Microseconds of a few calls; None where the launch is refused: not every device takes every cluster."""
    try:
        return round(statistics.median(times(call, arguments, buffer, _CALLS, cut)), 2)
    except RuntimeError:
        return None


def fault(call: Any, arguments: list[Any], first: list[torch.Tensor], knobs: Knobs) -> str | None:
    """What is wrong with a call's outputs, as against the default's."""
    try:
        verdict = kernel_lab.judged(outputs(call, arguments, knobs), first, 0.0)
    except RuntimeError as error:
        return f"FAILED {error}"
    return verdict if verdict.startswith("WRONG") else None


def by_turns(
    call: Any, arguments: list[Any], buffer: torch.Tensor, ways: list[Knobs], rounds: int, calls: int
) -> list[float]:
    """Medians of all ways, in another order each round."""
    found: list[list[float]] = [[] for _ in ways]
    order = list(range(len(ways)))
    for _ in range(rounds):
        random.shuffle(order)
        for way in order:
            found[way] += times(call, arguments, buffer, calls, ways[way])
    return [statistics.median(own) for own in found]


def sweep(case: LabCase, peak: float, buffer: torch.Tensor) -> dict[str, Any]:
    """All cuts of a case."""
    call, arguments = build(case.spec), kernel_lab.draw(case)
    first = outputs(call, arguments, {})
    every = [(tried(call, arguments, buffer, cut), cut) for cut in cuts_of(case)]
    timed = [(micros, cut) for micros, cut in every if micros is not None]
    few = [cut for _, cut in sorted(timed, key=lambda own: own[0])[:5]]
    faults = [fault(call, arguments, first, cut) for cut in few]
    best = [cut for cut, wrong in zip(few, faults, strict=True) if wrong is None]
    medians = by_turns(call, arguments, buffer, [{}, *best], _ROUNDS, _AGAIN)
    return {
        "case": case.name,
        "us": medians[0],
        "limit_us": kv_bytes(case.spec, case.lengths) / peak,
        "best": sorted(zip(medians[1:], best, strict=True), key=lambda own: own[0]),
        "wrong": [(wrong, cut) for wrong, cut in zip(faults, few, strict=True) if wrong is not None],
        "all": every,
    }


def describe(found: dict[str, Any]) -> str:
    """A case's line."""
    count, failed = len(found["all"]), sum(micros is None for micros, _ in found["all"])

    def shown(micros: float) -> str:
        return f"{micros:8.1f} us {100 * found['limit_us'] / micros:5.1f}%"

    cells = [f"{found['case']:34s} {shown(found['us'])}   best of {count:3d}:"]
    for micros, knobs in found["best"][:1]:
        cells.append(f"{shown(micros)}  " + " ".join(f"{name}={value}" for name, value in knobs.items()))
    cells += [f"{failed} not launched"] if failed else []
    cells += [f"{wrong}: {cut}" for wrong, cut in found["wrong"]]
    return "  ".join(cells)


def compare(
    case: LabCase, ways: list[Knobs], rounds: int, buffer: torch.Tensor
) -> tuple[Timing, list[str | None]]:
    """Times of the default and of each setting, and what is wrong with them."""
    call, arguments = build(case.spec), kernel_lab.draw(case)
    first = outputs(call, arguments, {})
    faults = [fault(call, arguments, first, way) for way in ways]
    right = [way for way, wrong in zip(ways, faults, strict=True) if wrong is None]
    medians = iter(by_turns(call, arguments, buffer, right, rounds, 9))
    return [next(medians) if wrong is None else None for wrong in faults], faults


def summarise(names: list[str], rows: list[tuple[str, Timing]]) -> list[str]:
    """A line for each setting: its mean against the default, and what moved."""
    lines = []
    for index, name in enumerate(names, start=1):
        ratios = sorted(
            ((own - TIMER_US) / (default - TIMER_US), case)
            for case, micros in rows
            if (own := micros[index]) is not None and (default := micros[0]) is not None
        )
        wrong = f"  {len(rows) - len(ratios)} wrong or not launched" if len(ratios) < len(rows) else ""
        if not ratios:
            lines.append(f"{name:32s} no times{wrong}")
            continue
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
        better, worse = sum(r < 0.985 for r, _ in ratios), sum(r > 1.015 for r, _ in ratios)
        ends = "  ".join(f"{ratio:.3f} {case}" for ratio, case in (ratios[0], ratios[-1]))
        lines.append(f"{name:32s} {mean:.4f}  {better} better {worse} worse  {ends}{wrong}")
    return lines


def at_least_one(text: str) -> int:
    """A number of rounds."""
    if (count := int(text)) < 1:
        raise ValueError(text)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Knobs: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in STRUCTURE.items())
        + f"; and the numbers of choose.h: {', '.join(numbers())}.",
    )
    parser.add_argument("--cases", default="", help="as kernel_lab.py takes them; default: its own")
    parser.add_argument("--versus", default="", help='settings to compare, e.g. "kWorstTiles=28;W=1,S=2"')
    parser.add_argument("--rounds", type=at_least_one, default=6, help="of --versus, 9 calls of each setting")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no case after so many, builds included"
    )
    parser.add_argument("--out", type=Path, help="JSON lines with all that was measured")
    chosen = parser.parse_args()
    cases = choose_cases([part for part in chosen.cases.split(",") if part])
    names = [part.strip() for part in chosen.versus.split(";") if part.strip()]
    ways = [{}, *(parse_setting(name) for name in names)]
    if not torch.cuda.is_available():
        raise SystemExit("kernel_sweep: wanted a CUDA GPU, found none.")
    until = time.monotonic() + 60 * chosen.minutes
    rows: list[tuple[str, Timing]] = []
    left = list(cases)
    with ExitStack() as stack:
        file = stack.enter_context(chosen.out.open("w", encoding="utf-8")) if chosen.out else None
        specs = {case.spec for case in cases}
        print(f"{len(cases)} cases; building {len(specs)} kernels", flush=True)
        kernel_lab.build_all({(VARIANT, spec) for spec in specs})
        buffer = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
        peak = kernel_lab.copy_peak(buffer)
        while left and time.monotonic() < until:
            case = left.pop(0)
            if names:
                micros, faults = compare(case, ways, chosen.rounds, buffer)
                rows.append((case.name, micros))
                labels = ["default", *names]
                wrong = {name: why for name, why in zip(labels, faults, strict=True) if why is not None}
                found: dict[str, Any] = {
                    "case": case.name,
                    "us": dict(zip(labels, micros, strict=True)),
                    "wrong": wrong,
                }
                cells = [f"{own:9.1f}" if own is not None else f"{'-':>9s}" for own in micros]
                print("".join([f"{case.name:34s}", *cells]) + (f"  {wrong}" if wrong else ""), flush=True)
            else:
                found = sweep(case, peak, buffer)
                print(describe(found), flush=True)
            if file is not None:
                file.write(json.dumps(found) + "\n")
                file.flush()
            torch.cuda.empty_cache()
    for line in summarise(names, rows) if rows else []:
        print(line)
    if left:
        print(f"{len(left)} of {len(cases)} cases left.")


if __name__ == "__main__":
    main()
