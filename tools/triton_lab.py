#!/usr/bin/env python3
"""Compare variants of the Triton kernel's source on a GPU, in one call; cases and timing of kernel_lab.py.

A variant is a list of (file, text, replacement) over the authored sources, most of them numbers of tuning.py.
All variants are compiled first, each by a tiny call in one of many processes (Triton's cache on disk is
shared); then each case is measured with all of them in turn. "WRONG" marks an output that is not the first
variant's. The last number of a cell is the host's time for a call, in microseconds.

    python tools/triton_lab.py                                              all variants, all cases
    python tools/triton_lab.py --variants base@OLD,base --cases "b32 L4096"
    python tools/triton_lab.py --check          on a CPU: every variant packs and is right in the interpreter

"base@FOLDER" is the variant of FOLDER/evenkv_triton.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kernel_edits import Edit
from kernel_lab import LabCase, choose_cases, copy_peak, draw, judged, measure, variant_solution

from evenkv.library.build import build_solution
from evenkv.numerics.bytes import kv_bytes
from evenkv.spec.family import DecodeSpec

CASES = (
    "b32 L4096 kv8 bf16",
    "b32 L4096 kv8 fp8",
    "b32 L4096 kv4 bf16",
    "128k+63x1k kv8 bf16",
    "h5 b64 L8192",
    "b256 L8192 kv8 bf16",
    "b8 L1024 kv8 bf16",
    "63 requests h5",
)
HOST_CALLS = 60
_PROCESSES = 16
WARM_TOKENS = (32, 4096)


def number(name: str, value: int, file: str = "tuning.py") -> Edit:
    """The edit that gives a number of tuning.py another value; what it is now does not matter."""
    text = (Path(__file__).parents[1] / "src/evenkv/kernels/evenkv_triton" / file).read_text()
    (line,) = re.findall(rf"^{name} = .*$", text, re.MULTILINE)
    written = f"tl.constexpr({value})" if "constexpr" in line else str(value)
    return (file, line, f"{name} = {written}")


VARIANTS: dict[str, list[Edit]] = {
    "base": [],
    "3 buffers": [number("MOST_BUFFERS", 3)],
    "8 x 1 warp": [number("PROGRAMS_PER_SM", 8), number("WARPS", 1)],
    "parts of 2 steps": [number("PART_STEPS", 2)],
    "parts of 4 steps": [number("PART_STEPS", 4), number("UNCUT_STEPS", 8)],
    "parts of 16 steps": [number("PART_STEPS", 16), number("UNCUT_STEPS", 32)],
    "uncut to 28": [number("WORST_STEPS", 28)],
    "uncut to 0": [number("WORST_STEPS", 0)],
    "most parts 64": [number("MOST_PARTS", 64)],
    "most parts 512": [number("MOST_PARTS", 512)],
    "even to twice": [number("EVEN_100", 200)],
    "parts of a half": [number("FAIR_PARTS", 2)],
    "parts from 1024": [number("UNEVEN_TOKENS", 1024)],
    "no waves": [number("WAVES_10", 10)],
    "merges of 64": [number("MERGE_REGISTERS", 64)],
}


def solution(variant: str, spec: DecodeSpec) -> Any:
    return variant_solution(variant, spec, "evenkv_triton", VARIANTS[variant.partition("@")[0]])


def _warm(job: tuple[str, DecodeSpec]) -> tuple[float, str | None]:
    """Compiles by calls of one request that stays whole and of one that is cut: all that decides the code."""
    variant, spec = job
    start = time.monotonic()
    try:
        call = build_solution(solution(*job))
        for tokens in WARM_TOKENS:
            call(*draw(LabCase("warm", spec, (tokens,))))
        torch.cuda.synchronize()
    except BaseException as error:
        return 0.0, f"{variant} {spec.short_name}: {type(error).__name__}: {str(error)[-1500:]}"
    return time.monotonic() - start, None


def warm_all(jobs: list[tuple[str, DecodeSpec]]) -> set[tuple[str, DecodeSpec]]:
    """The jobs that compiled and ran; the others are printed."""
    count = max(1, min(_PROCESSES, os.cpu_count() or 1, len(jobs)))
    good, seconds, start = set(), [], time.monotonic()
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_warm, job): job for job in jobs}
        for future in as_completed(running):
            took, fault = future.result()
            seconds.append(took)
            if fault:
                print(fault, flush=True)
            else:
                good.add(running[future])
    print(f"{len(jobs)} compiled in {time.monotonic() - start:.0f} s, the slowest {max(seconds):.0f} s")
    return good


def host_micros(call: Any, arguments: list[Any]) -> float:
    """Median microseconds that a call keeps the host; the device is idle before each."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(*arguments)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def compare(variants: list[str], cases: list[LabCase]) -> None:
    good = warm_all(sorted({(v, c.spec) for v in variants for c in cases}, key=str))
    buffer = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    peak = copy_peak(buffer)
    print(f"{torch.cuda.get_device_name()}, copy {peak / 1e6:.3f} TB/s; us, % of copy speed, host us")
    print(f"{'case':20s}" + "".join(f"{v.partition('@')[0][:15] + '@' * ('@' in v):>19s}" for v in variants))
    for case in cases:
        arguments = draw(case)
        limit = kv_bytes(case.spec, case.lengths) / peak
        first, cells = None, []
        for variant in variants:
            if (variant, case.spec) not in good:
                cells.append("failed")
                continue
            call = build_solution(solution(variant, case.spec))
            micros, found = measure(call, arguments, buffer)
            first = found if first is None else first
            verdict = judged(found, first, limit / micros)
            cells.append(f"{micros:7.1f}{verdict:>5s}{host_micros(call, arguments):5.0f}")
        print(f"{case.name:20s}" + "".join(f"{cell:>19s}" for cell in cells), flush=True)
        del arguments
        torch.cuda.empty_cache()


def check(variants: list[str]) -> int:
    """Every variant packs, and gives the reference's outputs in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from evenkv.numerics.check import check_outputs
    from evenkv.numerics.judge import call
    from evenkv.numerics.problem import make_problem
    from evenkv.numerics.reference import reference

    base = DecodeSpec(8, 2, 64, 16)
    specs = (base, replace(base, page_size=1), replace(base, kv_dtype="float8_e4m3fn"))
    faults = 0
    for variant in variants:
        for spec in specs:
            problem = make_problem(spec, [70, 0, 300, 5], seed=1)
            run = build_solution(solution(variant, spec))
            output, lse, found = call(problem, lambda _, *a, run=run: run(*a))
            found = found + check_outputs(spec, output, lse, *reference(problem))
            faults += bool(found)
            print(f"{variant:20s} {spec.short_name:24s} {'; '.join(found) or 'right'}", flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--cases", default=",".join(CASES), help="as kernel_lab.py takes them")
    parser.add_argument("--check", action="store_true", help="in the interpreter, without a GPU")
    chosen = parser.parse_args()
    variants = chosen.variants.split(",")
    if chosen.check:
        raise SystemExit(min(check(variants), 1))
    if not torch.cuda.is_available():
        raise SystemExit("triton_lab: wanted a CUDA GPU, found none.")
    compare(variants, choose_cases([part for part in chosen.cases.split(",") if part]))


if __name__ == "__main__":
    main()
