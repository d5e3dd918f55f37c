"""On a GPU: with batch-invariant bits a request's result is the same alone and among others."""

from __future__ import annotations

import pytest
import torch
from batch_parts import take_requests
from gpu_stress_worker import load_cuda_function

from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import parse_name

pytestmark = pytest.mark.gpu

NAMES = [
    "gqa_paged_decode_h5_kv1_d128_ps1",
    "gqa_paged_decode_h32_kv8_d128_ps16",
    "gqa_paged_decode_h16_kv4_d256_ps16",
    "gqa_paged_decode_fp8_h32_kv32_d128_ps64",
]
# Parts have 2048 tokens: one, one that is full, two, and many.
LENGTHS = [1, 0, 70_000, 17, 2048, 2049, 0, 333, 5000]


def _outputs(call, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = problem.to("cuda")
    output, lse = on_device.empty_outputs()
    call(*on_device.inputs(), output, lse)
    torch.cuda.synchronize()
    return output.cpu(), lse.cpu()


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    spec = parse_name(name)
    call = load_cuda_function(spec, "run_batch_invariant")
    problem = make_problem(spec, LENGTHS, seed=3)
    output, lse = _outputs(call, problem)
    assert check_outputs(spec, output, lse, *reference(problem)) == []
    for first, last in ((2, 3), (3, 6), (7, 9), (1, 9), (0, 1)):
        part = _outputs(call, take_requests(problem, range(first, last)))
        assert bit_equal(part, (output[first:last], lse[first:last])), (first, last)
