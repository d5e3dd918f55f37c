"""Small problems of evenkv_cuda, one for each way through the kernel: what compute-sanitizer watches.

    PYTHONPATH=src python tests/gpu_sanitizer_script.py            # all of them
    PYTHONPATH=src python tests/gpu_sanitizer_script.py plant q    # a read past the end of q's memory

Prints a line a problem; exits with 3 when a result is wrong. Problems and references are made on the CPU, so
that the kernel is nearly all that runs on the device.
"""

from __future__ import annotations

import sys
import time

import torch
from gpu_stress_worker import load_cuda_kernel
from stress_problems import E4M3, PAIR_SLOTS, Plan, build_problem, fast_reference

from evenkv.numerics.check import check_outputs
from evenkv.numerics.problem import Problem
from evenkv.spec.family import DecodeSpec

ROUND_SLOTS = 16384  # tuning.cuh, kScheduleTuning: beyond these a worker, chunks are handed out by tickets
SMALL_SLOTS = 100_000  # fewer than tuning.cuh's kSmallSlotsPerWorker on 132 SMs

# All of them among the stress test's, so that no build is for this alone.
PAGE1 = DecodeSpec(5, 1, 128, 1)
PAGE16 = DecodeSpec(8, 2, 128, 16)
D256 = DecodeSpec(20, 2, 256, 16, "float16")
PAIRS = DecodeSpec(64, 8, 128, 16, E4M3)
PAIRS_GROUP12 = DecodeSpec(24, 2, 64, 64, E4M3)
HUGE_PAGES = DecodeSpec(16, 8, 64, 2048)
SPECS = (PAGE1, PAGE16, D256, PAIRS, PAIRS_GROUP12, HUGE_PAGES)


def make_plans(sm_count: int) -> dict[str, Plan]:
    """The problems by name; `tests/test_gpu_sanitizer.py` checks that each is what its name says."""

    def plan(spec: DecodeSpec, lengths: list[int], cache_layout: str = "nhd", spare_ids: int = 0) -> Plan:
        return Plan(7, spec, tuple(lengths), cache_layout, "fused", spare_ids, False, 1.0, (0xFF, 0xFF))

    def pairs(spec: DecodeSpec, lengths: list[int]) -> Plan:
        return plan(spec, lengths, spare_ids=PAIR_SLOTS // (spec.page_size * spec.num_kv_heads))

    page_slots = HUGE_PAGES.page_size * HUGE_PAGES.num_kv_heads
    short = [1 + 7 * i % 40 for i in range(sm_count * ROUND_SLOTS // page_slots + 1)]
    return {
        "one chunk, empty requests": plan(PAGE16, [5, 0, 17, 0]),
        "requests cut by chunks, merges in two steps": plan(PAGE16, [0, 3000, 1, 40], "interleaved"),
        "early pieces, page 1": plan(PAGE1, [0, *[7] * 60, 300, 0, 13, 90, 2500]),
        "group in two parts, head_dim 256": plan(D256, [500, 3, 0, 33], "hnd"),
        "two fp8 heads a block": pairs(PAIRS, [700, 0, 5, 64, 33]),
        "two fp8 heads a block, pieces in scratch": pairs(PAIRS_GROUP12, [900, 0, 1, 65]),
        "tickets": plan(HUGE_PAGES, [*short[:20], 20_000, 0, *short[20:]]),
    }


def solve(plan: Plan) -> list[str]:
    """Faults of one problem's results: those of the general kernel and, of small ones, of theirs.

    Outputs have memory of their own, so that its end is watched.
    """
    problem = build_problem(plan, "cpu")
    wanted = fast_reference(problem)
    on_device = problem.to("cuda")
    faults = []
    for symbol in ("run_general", "run") if plan.listed_slots <= SMALL_SLOTS else ("run_general",):
        run, fill_scratch = load_cuda_kernel(plan.spec, symbol)
        output, lse = on_device.empty_outputs()
        fill_scratch(plan.scratch[0])
        run(*on_device.inputs(), output, lse)
        torch.cuda.synchronize()
        found = check_outputs(plan.spec, output.cpu(), lse.cpu(), *wanted)
        faults += [f"{symbol}: {fault}" for fault in found]
    return faults


def read_past_the_end(name: str) -> None:
    """A call with a tensor whose memory is cut off behind the first bytes: the tool must say so."""
    problem: Problem = build_problem(make_plans(1)["one chunk, empty requests"], "cpu").to("cuda")
    output, lse = problem.empty_outputs()
    run, _ = load_cuda_kernel(problem.spec)
    problem.tensors[name].untyped_storage().resize_(512)
    run(*problem.inputs(), output, lse)
    torch.cuda.synchronize()


def main() -> int:
    if sys.argv[1:2] == ["plant"]:
        read_past_the_end(sys.argv[2])
        return 0
    faults = []
    for name, plan in make_plans(torch.cuda.get_device_properties(0).multi_processor_count).items():
        begun = time.monotonic()
        found = solve(plan)
        print(f"{name}: {'; '.join(found) or 'right'} ({time.monotonic() - begun:.1f} s)", flush=True)
        faults += found
    return 3 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
