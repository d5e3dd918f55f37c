"""On a GPU: the kernel for small problems, chosen by shapes, against the reference and in a graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_stress_worker import load_cuda_function

from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

pytestmark = pytest.mark.gpu

LENGTHS = ([91], [1024], [1] * 200, [0, 5, 0, 900, 64, 33, 1], [1024] * 8, [300] * 63)
SPECS = [
    DecodeSpec(5, 1, 128, 1),
    DecodeSpec(32, 8, 128, 16),
    DecodeSpec(32, 32, 128, 64),
    DecodeSpec(16, 2, 64, 16),
    DecodeSpec(6, 2, 64, 16),  # three rows, two a warp: lanes leave the loop over them apart
    DecodeSpec(16, 4, 256, 16),
    DecodeSpec(64, 4, 128, 16),
    DecodeSpec(32, 4, 128, 16, "float8_e4m3fn"),
]


def _kernels(call: Callable[[], None]) -> list[str]:
    """Names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "decode_kernel" in event.name]


def test_which_kernel_runs() -> None:
    """Shapes choose: many short requests go to the kernel for small problems, long ones do not."""
    spec = DecodeSpec(32, 8, 128, 16)
    run = load_cuda_function(spec, "run")
    for lengths, is_small in (([91], True), ([1024] * 8, True), ([1] * 40, True), ([4096] * 16, False)):
        problem = make_problem(spec, lengths).to("cuda")
        arguments = (*problem.inputs(), *problem.empty_outputs())
        run(*arguments)
        torch.cuda.synchronize()
        (name,) = _kernels(lambda arguments=arguments: run(*arguments))
        assert ("small_decode_kernel" in name) == is_small, (len(lengths), lengths[0], name)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.short_name)
def test_small_problems(spec: DecodeSpec) -> None:
    run = load_cuda_function(spec, "run")
    for lengths in LENGTHS:
        problem = make_problem(spec, lengths, seed=len(lengths))
        on_device = problem.to("cuda")
        output, lse = on_device.empty_outputs()
        run(*on_device.inputs(), output, lse)
        torch.cuda.synchronize()
        first = output.cpu(), lse.cpu()
        assert check_outputs(spec, *first, *reference(problem)) == [], lengths
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(*on_device.inputs(), output, lse)
        for _ in range(20):
            output.fill_(float("nan"))
            lse.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert bit_equal((output.cpu(), lse.cpu()), first), lengths


FIRST_CALL = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from gpu_stress_worker import load_cuda_function
from evenkv.numerics.check import check_outputs
from evenkv.numerics.problem import make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

spec = DecodeSpec(32, 8, 128, 16)
problem = make_problem(spec, [300, 0, 17])
on_device = problem.to("cuda")
output, lse = on_device.empty_outputs()
run = load_cuda_function(spec, sys.argv[2])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # in the mode that forbids most
    run(*on_device.inputs(), output, lse)
graph.replay()
torch.cuda.synchronize()
faults = check_outputs(spec, output.cpu(), lse.cpu(), *reference(problem))
sys.exit("; ".join(faults) or 0)
"""


@pytest.mark.parametrize("symbol", ["run", "run_general", "run_batch_invariant"])
def test_the_first_call_of_a_process_may_be_captured(symbol: str) -> None:
    """What is asked once a device and kernel, and scratch, must not end a capture."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, here, symbol], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
