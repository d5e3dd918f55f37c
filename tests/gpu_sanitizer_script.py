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
from stress_problems import E4M3, Plan, build_problem, fast_reference

from evenkv.numerics.check import check_outputs
from evenkv.numerics.problem import Problem
from evenkv.spec.family import DecodeSpec

# All of them among the stress test's, so that no build is for this alone.
PAGE1 = DecodeSpec(5, 1, 128, 1)
PAGE16 = DecodeSpec(8, 2, 128, 16)
D256 = DecodeSpec(20, 2, 256, 16, "float16")
PAIRS = DecodeSpec(64, 8, 128, 16, E4M3)
PAIRS_GROUP12 = DecodeSpec(24, 2, 64, 64, E4M3)
SPECS = (PAGE1, PAGE16, D256, PAIRS, PAIRS_GROUP12)
SYMBOLS = ("run", "run_always_cut", "run_batch_invariant")


def make_plans(sm_count: int) -> dict[str, Plan]:
    """The problems by name; `tests/test_gpu_sanitizer.py` checks that each is what its name says."""

    def plan(spec: DecodeSpec, lengths: list[int], cache_layout: str = "nhd", spare_ids: int = 0) -> Plan:
        return Plan(7, spec, tuple(lengths), cache_layout, "fused", spare_ids, False, 1.0, (0xFF, 0xFF))

    def pairs(spec: DecodeSpec, first: list[int]) -> Plan:
        """3.5 items an SM: more than there are blocks at once, and no more than two heads a block take."""
        batch = sm_count * 7 // (2 * spec.num_kv_heads)
        return plan(spec, [*first, *(1 + 7 * i % 40 for i in range(batch - len(first)))])

    waves = [1 + 7 * i % 40 for i in range(2 * sm_count)]
    return {
        "whole requests, empty ones": plan(PAGE16, [5, 0, 17, 0]),
        "whole requests in clusters": plan(PAGE16, [0, 1000, 40], "interleaved"),
        "even parts of clusters": plan(PAGE16, [9000]),
        "uneven parts of clusters": plan(PAGE16, [0, 32_000, 1, 40], "interleaved"),
        "uneven parts, page 1": plan(PAGE1, [0, *[7] * 60, 300, 0, 13, 90, 14_000]),
        "fitted parts": plan(PAGE16, [30_000, 0, 40], spare_ids=40_000),
        "group in two units, head_dim 256": plan(D256, [16_000, 3, 0, 33], "hnd"),
        "more requests than blocks": plan(PAGE16, [*waves[:20], 0, 4000, *waves[20:]]),
        "two fp8 heads a block": pairs(PAIRS, [64, 0, 5, 33]),
        "two fp8 heads a block, uneven parts": pairs(PAIRS_GROUP12, [3000, 0, 1, 65]),
    }


def solve(plan: Plan) -> list[str]:
    """Faults of one problem's results, of every function that the library exports.

    Outputs have memory of their own, so that its end is watched.
    """
    problem = build_problem(plan, "cpu")
    wanted = fast_reference(problem)
    on_device = problem.to("cuda")
    faults = []
    for symbol in SYMBOLS:
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
    problem: Problem = build_problem(make_plans(1)["whole requests, empty ones"], "cpu").to("cuda")
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
