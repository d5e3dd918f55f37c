#!/usr/bin/env python3
"""Compare variants of the CUDA kernel's source on a GPU, in one call: the loop behind docs/kernel-log.md.

A variant is a list of (file, text, replacement) over the authored sources, in `kernel_variants.py` beside
this file. Every variant is built first, in parallel; then each case is measured with all variants in turn,
so that a row compares like with like. Times are CUDA-graph replays between CUDA events, with L2 flushed by
READING a buffer before each (a flush that writes leaves dirty lines, whose write-back slows the kernel by
10 us): good for ranking variants, not a record. The record is `evenkv bench`.

    python tools/kernel_lab.py                              all variants, all cases
    python tools/kernel_lab.py --variants base,rounds --cases "b32 L4096"
    python tools/kernel_lab.py --trace --variants rounds --cases "b32 L4096"    one block, step by step
    python tools/kernel_lab.py --stamps --cases "b32 L4096"   when the blocks reached each stage

"base@FOLDER" is the variant of FOLDER/evenkv_cuda (sources with a change, say). A case
that is spelled out, like "b16 L2048 kv8 fp8", need not be in the list.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.data import Solution

sys.path.insert(0, str(Path(__file__).parent))
import kernel_edits
import kernel_stamps
import kernel_trace
import kernel_variants

from evenkv.library.build import build_solution
from evenkv.numerics.bytes import kv_bytes
from evenkv.pack.manifest import find_kernel, load_kernel
from evenkv.pack.render import pack_solution
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec

ITERATIONS = 20
MOST_ERROR = 5e-3


@dataclass(frozen=True)
class LabCase:
    name: str
    spec: DecodeSpec
    lengths: tuple[int, ...]


KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def uniform_case(name: str) -> LabCase:
    """The case that "b8 L1024 kv8 bf16" spells: 32 query heads, page_size 16. Else ValueError."""
    match = re.fullmatch(r"b(\d+) L(\d+) kv(\d+) (bf16|fp8)", name)
    if match is None:
        raise ValueError(f"case {name!r}: wanted one of the list or, say, 'b8 L1024 kv8 bf16'")
    batch, context, kv = (int(number) for number in match.groups()[:3])
    return LabCase(name, DecodeSpec(32, kv, 128, 16, KV_DTYPES[match[4]]), (context,) * batch)


def choose_cases(parts: list[str]) -> list[LabCase]:
    """Cases whose names hold a part, and those that are spelled out; all when nothing is asked."""
    chosen: dict[str, LabCase] = {}
    for part in parts:
        hits = [case for case in lab_cases() if part in case.name] or [uniform_case(part)]
        chosen |= {case.name: case for case in hits}
    return list(chosen.values()) or lab_cases()


def lab_cases() -> list[LabCase]:
    """Where versions differ: tiny, small, mid-size, large, one long request among short ones."""
    cases = []
    for label, kv_dtype in KV_DTYPES.items():
        for batch, context, kv in (
            (1, 1024, 8),
            (8, 1024, 8),
            (1, 131072, 8),
            (32, 4096, 4),
            (32, 4096, 8),
            (128, 2048, 8),
            (256, 8192, 8),
        ):
            cases.append(uniform_case(f"b{batch} L{context} kv{kv} {label}"))
        skewed = (131072, *[1024] * 63)
        cases.append(LabCase(f"128k+63x1k kv8 {label}", DecodeSpec(32, 8, 128, 16, kv_dtype), skewed))
    scout = DecodeSpec(5, 1, 128, 1)
    cases += [
        LabCase("91 tokens h5", scout, (91,)),
        LabCase("63 requests h5", scout, _captured_lengths()),
        LabCase("b64 L8192 h5 ps1", scout, (8192,) * 64),
    ]
    return cases


def _captured_lengths() -> tuple[int, ...]:
    """Tokens of the requests of the captured Llama 4 Scout step."""
    text = (Path(__file__).parents[1] / "src/evenkv/workloads/captured.json").read_text()
    indptr = next(w["kv_indptr"] for w in json.loads(text)["workloads"] if len(w["kv_indptr"]) == 64)
    return tuple(after - before for before, after in zip(indptr, indptr[1:], strict=False))


STAMPED, TRACED = ", stamped", ", traced"
_FOLDER = re.compile(r"@([^,]+)")


def edits_of(variant: str) -> list[kernel_edits.Edit]:
    """A variant's edits; its name may end in a folder and in the name of an instrument."""
    variant = _FOLDER.sub("", variant)
    for suffix, instrument in ((STAMPED, kernel_stamps.STAMPS), (TRACED, kernel_trace.TRACE)):
        if variant.endswith(suffix):
            return [*kernel_variants.VARIANTS[variant.removesuffix(suffix)], *instrument]
    return kernel_variants.VARIANTS[variant]


def variant_solution(
    variant: str, spec: DecodeSpec, kernel: str = "evenkv_cuda", edits: list[kernel_edits.Edit] | None = None
) -> Solution:
    """The packed solution with the variant's edits. An edit that hits nothing is an error."""
    folder = _FOLDER.search(variant)
    manifest = load_kernel(Path(folder[1]) / kernel) if folder else find_kernel(Repository(Path()), kernel)
    solution = pack_solution(manifest, spec)
    fields = solution.model_dump(mode="json")
    fields["name"] += f"_{variant}"
    for file, text, replacement in edits_of(variant) if edits is None else edits:
        (source,) = (s for s in fields["sources"] if s["path"] == file)
        if text not in source["content"]:
            raise SystemExit(f"variant {variant}: {file} does not hold {text!r}; amend its edits")
        source["content"] = source["content"].replace(text, replacement)
    return Solution.model_validate(fields)


def _build(job: tuple[str, DecodeSpec]) -> str | None:
    try:
        build_solution(variant_solution(*job))
    except Exception as error:
        return f"{job[0]} {job[1].short_name}: {str(error)[-2000:]}"
    return None


def build_all(jobs: set[tuple[str, DecodeSpec]]) -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(_build, jobs) if fault]
    if faults:
        raise SystemExit("\n".join(faults))


def draw(case: LabCase) -> list[Any]:
    """Arguments of one call, drawn on the device; pages in random order."""
    spec, device = case.spec, "cuda"
    generator = torch.Generator(device=device).manual_seed(1)
    pages = torch.tensor([-(-n // spec.page_size) for n in case.lengths], device=device)
    pool = int(pages.sum()) + 8
    dtype = torch.float8_e4m3fn if spec.is_fp8 else torch.bfloat16
    shape = (pool, spec.page_size, spec.num_kv_heads, spec.head_dim)

    def cache() -> torch.Tensor:
        filled = torch.empty(shape, dtype=dtype, device=device)
        for part in filled.split(max(1, (1 << 26) // (shape[1] * shape[2] * shape[3]))):
            part.copy_(torch.randn(part.shape, device=device, generator=generator).to(dtype))
        return filled

    arguments = [
        torch.randn(
            len(case.lengths), spec.num_qo_heads, spec.head_dim, device=device, generator=generator
        ).to(torch.bfloat16),
        cache(),
        cache(),
        torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
        torch.randperm(pool, device=device, generator=generator)[: pool - 8].int(),
    ]
    if spec.has_last_page_len:
        arguments.append((torch.tensor(case.lengths, device=device) - (pages - 1) * spec.page_size).int())
    if spec.is_fp8:
        arguments += [torch.ones(spec.num_kv_heads, device=device) for _ in range(2)]
    output = torch.empty_like(arguments[0])
    return [*arguments, spec.head_dim**-0.5, output, torch.empty(output.shape[:2], device=device)]


def flush(buffer: torch.Tensor) -> None:
    torch.amax(buffer, 0)


def time_graph(call: Any, arguments: list[Any], buffer: torch.Tensor) -> float:
    """Median microseconds of a replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(*arguments)
    return _median(graph.replay, buffer)


def _median(call: Any, buffer: torch.Tensor) -> float:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(ITERATIONS)
    ]
    for start, end in events:
        flush(buffer)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) * 1e3 for start, end in events)[ITERATIONS // 2]


def copy_peak(buffer: torch.Tensor) -> float:
    """Bytes per microsecond of a 2 GiB device-to-device copy, read and write counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _median(lambda: target.copy_(source), buffer)


def measure(call: Any, arguments: list[Any], buffer: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Microseconds of a replay, and output and lse, which held NaN before."""
    for result in arguments[-2:]:
        result.fill_(float("nan"))
    micros = time_graph(call, arguments, buffer)
    return micros, [result.float().clone() for result in arguments[-2:]]


def judged(found: list[torch.Tensor], first: list[torch.Tensor], share: float) -> str:
    """The share of copy speed in %, or how far output or lse is from the first variant's.

    Each by its own norm: in one, lse would hide the outputs, which are far smaller.
    """
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, first, strict=True)]
    wrong = next((error for error in errors if not error < MOST_ERROR), None)
    return f"{100 * share:.0f}%" if wrong is None else f"WRONG {wrong:.0e}"


def compare(variants: list[str], cases: list[LabCase], buffer: torch.Tensor) -> None:
    peak = copy_peak(buffer)
    one = torch.empty(1, device="cuda")
    launch = _median(one.zero_, buffer)
    print(
        f"{torch.cuda.get_device_name()}, copy {peak / 1e6:.3f} TB/s, a kernel of one element {launch:.1f} us"
    )
    print(f"{'case':24s}" + "".join(f"{variant:>16s}" for variant in variants))
    for case in cases:
        arguments = draw(case)
        limit = kv_bytes(case.spec, case.lengths) / peak
        first, cells = None, []
        for variant in variants:
            call = build_solution(variant_solution(variant, case.spec))
            micros, found = measure(call, arguments, buffer)
            first = found if first is None else first
            cells.append(f"{micros:8.1f} {judged(found, first, limit / micros):>6s}")
        print(f"{case.name:24s}" + "".join(f"{cell:>16s}" for cell in cells), flush=True)
        del arguments
        torch.cuda.empty_cache()


def _printed(call: Any, arguments: list[Any], buffer: torch.Tensor) -> str:
    """What a launch printed from the device."""
    flush(buffer)
    torch.cuda.synchronize()
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            call(*arguments)
            torch.cuda.synchronize()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read()


def show_noted(variants: list[str], cases: list[LabCase], buffer: torch.Tensor, raw: bool) -> None:
    """Prints what the blocks of a launch noted: see kernel_stamps.py and kernel_trace.py."""
    for case in cases:
        arguments = draw(case)
        printing = [*arguments[:-3], kernel_edits.PRINT, *arguments[-2:]]
        for variant in variants:
            tool = kernel_stamps if variant.endswith(STAMPED) else kernel_trace
            call = build_solution(variant_solution(variant, case.spec))
            for _ in range(2):  # the first launch pays for loading the module
                flush(buffer)
                call(*arguments)
                printed = _printed(call, printing, buffer)
            print(f"{variant}: {case.name}\n{printed if raw else tool.summarise(printed)}", flush=True)
        del arguments
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(kernel_variants.VARIANTS))
    parser.add_argument(
        "--cases", default="", help="parts of case names or cases spelled out, comma-separated"
    )
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--warm", action="store_true", help="no flush of L2 between replays")
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--raw", action="store_true", help="stamps and traces as they were noted")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernel_lab: wanted a CUDA GPU, found none.")
    parts = [part for part in chosen.cases.split(",") if part]
    cases = choose_cases(parts)
    buffer = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    variants = chosen.variants.split(",")
    suffix = STAMPED if chosen.stamps else TRACED if chosen.trace else ""
    variants = [variant + suffix for variant in variants]
    build_all({(variant, case.spec) for variant in variants for case in cases})
    flushed = buffer[:1] if chosen.warm else buffer
    if suffix:
        show_noted(variants, cases, flushed, chosen.raw)
    else:
        compare(variants, cases, flushed)


if __name__ == "__main__":
    main()
