#!/usr/bin/env python3
"""Compare variants of the CUDA kernel's source on a GPU, in one call: the loop behind docs/kernel-log.md.

A variant is a list of (file, text, replacement) over the authored sources, in `kernel_variants.py` beside
this file. Every variant is built first, in parallel; then each case is measured with all variants in turn,
so that a row compares like with like. Times are CUDA-graph replays between CUDA events, with L2 flushed by
READING a buffer before each (a flush that writes leaves dirty lines, whose write-back slows the kernel by
10 us): good for ranking variants, not a record. The record is `evenkv bench`.

    python tools/kernel_lab.py                              the source as it is, all cases
    python tools/kernel_lab.py --variants base,kGrowTiles,loops --cases "b32 L4096,h5 91+5668"
    python tools/kernel_lab.py --stamps --cases "b32 L4096 kv8 bf16"      when the blocks reached each stage
    python tools/kernel_lab.py --trace 12 --cases "b32 L4096 kv8 bf16"    the steps of block 12's warps

"base@FOLDER" is the variant of FOLDER/evenkv_cuda (sources with a change, say). Cases are those of
`kernel_cases.py` whose names hold a part, or spelled out: "b16 L2048 kv8 fp8", "jitter b32 L4096 kv8 bf16"
(lengths within 20 %), "logn b32 mean8192 sigma1 kv8 bf16" (log-normal lengths), "91+5668 kv4 bf16" (these
lengths), "h5 b64 L8192", "h5 91+5668" (5 query heads, page_size 1), "padded 1.9 b8 L4096 kv8 bf16" (a list of
page ids that is 1.9 times too long).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.data import Solution

sys.path.insert(0, str(Path(__file__).parent))
import kernel_edits
import kernel_notes
import kernel_variants
from kernel_cases import LabCase, choose_cases
from kernel_edits import Edit

from evenkv.library.build import build_solution
from evenkv.numerics.bytes import kv_bytes
from evenkv.pack.manifest import find_kernel, load_kernel
from evenkv.pack.render import pack_solution
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec

ITERATIONS = 20
MOST_ERROR = 5e-3

STAMPED, TRACED = ", stamped", ", traced "  # a traced one's name goes on with the block
_FOLDER = re.compile(r"@([^,]+)")


def edits_of(variant: str) -> list[Edit]:
    """A variant's edits; its name may end in a folder and in the name of an instrument."""
    variant = _FOLDER.sub("", variant)
    if variant.endswith(STAMPED):
        return [*kernel_variants.edits_of(variant.removesuffix(STAMPED)), *kernel_notes.STAMPS]
    variant, traced, block = variant.partition(TRACED)
    return [*kernel_variants.edits_of(variant), *(kernel_notes.trace(int(block)) if traced else [])]


def variant_solution(
    variant: str, spec: DecodeSpec, kernel: str = "evenkv_cuda", edits: list[Edit] | None = None
) -> Solution:
    """The packed solution with the variant's edits. An edit that hits nothing is an error."""
    folder = _FOLDER.search(variant)
    manifest = load_kernel(Path(folder[1]) / kernel) if folder else find_kernel(Repository(Path()), kernel)
    solution = pack_solution(manifest, spec)
    fields = solution.model_dump(mode="json")
    fields["name"] += f"_{variant}"
    contents = {source["path"]: source["content"] for source in fields["sources"]}
    kernel_edits.apply(variant, edits_of(variant) if edits is None else edits, contents)
    for source in fields["sources"]:
        source["content"] = contents[source["path"]]
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
    listed = int(int(pages.sum()) * case.padding)
    pool = listed + 8
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
        torch.randperm(pool, device=device, generator=generator)[:listed].int(),
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


def call_times(call: Any, buffer: torch.Tensor, count: int) -> list[float]:
    """Microseconds of each of `count` calls, L2 flushed before."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    for start, end in events:
        flush(buffer)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def _median(call: Any, buffer: torch.Tensor) -> float:
    return sorted(call_times(call, buffer, ITERATIONS))[ITERATIONS // 2]


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
    print(f"{'case':34s}" + "".join(f"{variant:>16s}" for variant in variants))
    for case in cases:
        arguments = draw(case)
        limit = kv_bytes(case.spec, case.lengths) / peak
        first, cells = None, []
        for variant in variants:
            call = build_solution(variant_solution(variant, case.spec))
            micros, found = measure(call, arguments, buffer)
            first = found if first is None else first
            cells.append(f"{micros:8.1f} {judged(found, first, limit / micros):>6s}")
        print(f"{case.name:34s}" + "".join(f"{cell:>16s}" for cell in cells), flush=True)
        del arguments
        torch.cuda.empty_cache()


def _take(call: Any, arguments: list[Any], count: int) -> list[int]:
    """What the launch before noted: see kernel_notes.py."""
    keys = arguments[1]
    pages = -(-count * 8 // (keys[0].numel() * keys.element_size()))
    place = torch.zeros((pages, *keys.shape[1:]), dtype=keys.dtype, device=keys.device)
    call(arguments[0], place, place, *arguments[3:-3], kernel_notes.TAKE, *arguments[-2:])
    return place.view(torch.uint8).flatten().view(torch.int64)[:count].tolist()


def show_noted(variants: list[str], cases: list[LabCase], buffer: torch.Tensor) -> None:
    """Prints what the blocks, or the warps of one, of a launch noted."""
    for case in cases:
        arguments = draw(case)
        for variant in variants:
            stamped = variant.endswith(STAMPED)
            count = kernel_notes.STAMP_NOTES if stamped else kernel_notes.TRACE_NOTES
            call = build_solution(variant_solution(variant, case.spec))
            for _ in range(2):  # the first launch pays for loading the module
                flush(buffer)
                call(*arguments)
                notes = _take(call, arguments, count)
            table = kernel_notes.stamp_table if stamped else kernel_notes.trace_table
            print(f"{variant}: {case.name}\n{table(notes)}", flush=True)
        del arguments
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variants",
        default="base",
        help='comma-separated, or joined by "+" to one; "kGrowTiles=3" gives a number another value, '
        f'"kGrowTiles" stands for several. Named: {", ".join(kernel_variants.NAMED)}; '
        f"numbers: {', '.join(kernel_variants.NUMBERS)}",
    )
    parser.add_argument(
        "--cases", default="", help="parts of case names or cases spelled out, comma-separated; default: all"
    )
    parser.add_argument("--warm", action="store_true", help="no flush of L2 between replays")
    noted = parser.add_mutually_exclusive_group()
    noted.add_argument("--stamps", action="store_true", help="when the blocks reached each stage")
    noted.add_argument(
        "--trace",
        type=int,
        nargs="?",
        const=0,
        metavar="BLOCK",
        help="each step of one block's warps; blocks count along splits first, then units; default: block 0",
    )
    chosen = parser.parse_args()
    cases = choose_cases([part for part in chosen.cases.split(",") if part])
    traced = chosen.trace is not None
    suffix = STAMPED if chosen.stamps else f"{TRACED}{chosen.trace}" if traced else ""
    variants = [variant + suffix for variant in kernel_variants.choose_variants(chosen.variants)]
    for variant in variants:
        edits_of(variant)  # a name that is unknown ends here, not in the workers that build
    if not torch.cuda.is_available():
        raise SystemExit("kernel_lab: wanted a CUDA GPU, found none.")
    buffer = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    build_all({(variant, case.spec) for variant in variants for case in cases})
    flushed = buffer[:1] if chosen.warm else buffer
    if suffix:
        show_noted(variants, cases, flushed)
    else:
        compare(variants, cases, flushed)


if __name__ == "__main__":
    main()
