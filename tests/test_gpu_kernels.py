"""On a GPU: which kernel runs, chosen by shapes; each way of cutting against a reference and in a graph."""

from __future__ import annotations

import re
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

# Whole requests, in clusters and not; then such as are cut in even parts, in uneven ones, or wait for SMs.
LENGTHS = (
    *([91], [1024], [1] * 200, [0, 5, 0, 900, 64, 33, 1], [1024] * 8, [300] * 63),
    *([40_000], [20_000, 0, 1, 333], [5000] * 9, [1 + 37 * i % 700 for i in range(700)]),
)
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
# decode_kernel<kHeads, kUncut, kTensor>, as the profiler writes it.
_KERNEL = re.compile(
    r"decode_kernel(?:<(?:\(int\))?(\d), *(?:\(bool\))?(true|false|0|1), *(?:\(bool\))?(?:true|false|0|1)>"
    r"|ILi(\d)ELb([01])ELb[01]E)"
)


def _kernels(call: Callable[[], None]) -> list[tuple[int, bool]]:
    """KV heads a block of the kernels that a call launches, and whether requests stay whole."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = []
    for name in [event.name for event in profile.events() if "decode_kernel" in event.name]:
        match = _KERNEL.search(name)
        assert match is not None, name
        heads, uncut = match[1] or match[3], match[2] or match[4]
        found.append((int(heads), uncut in ("true", "1")))
    return found


def _which(spec: DecodeSpec, lengths: list[int], symbol: str) -> tuple[int, bool]:
    run = load_cuda_function(spec, symbol)
    problem = make_problem(spec, lengths).to("cuda")
    arguments = (*problem.inputs(), *problem.empty_outputs())
    run(*arguments)
    torch.cuda.synchronize()
    (kernel,) = _kernels(lambda: run(*arguments))
    return kernel


def test_which_kernel_runs() -> None:
    """Shapes choose: short requests stay whole in a kernel of their own, long ones do not."""
    spec = DecodeSpec(32, 8, 128, 16)
    for lengths, uncut in (([91], True), ([1024] * 8, True), ([1] * 30, True), ([4096] * 16, False)):
        assert _which(spec, lengths, "run") == (1, uncut), (len(lengths), lengths[0])
        for symbol in ("run_always_cut", "run_batch_invariant"):
            assert _which(spec, lengths, symbol) == (1, False), (symbol, len(lengths), lengths[0])


def test_which_fp8_problems_take_two_heads_a_block() -> None:
    """More items than blocks at once (three an SM), up to four an SM; never with batch-invariant bits."""
    spec = DecodeSpec(32, 4, 128, 16, "float8_e4m3fn")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for halves, heads in ((2, 1), (7, 2), (9, 1)):  # halves of an item an SM
        batch = sm_count * halves // (2 * spec.num_kv_heads)
        lengths = [100 + i % 50 for i in range(batch)]
        assert _which(spec, lengths, "run")[0] == heads, batch
        assert _which(spec, lengths, "run_batch_invariant") == (1, False), batch


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.short_name)
@pytest.mark.parametrize("symbol", ["run", "run_always_cut"])
def test_every_way_of_cutting(spec: DecodeSpec, symbol: str) -> None:
    """Right, and the same bits whenever the graph is replayed."""
    run = load_cuda_function(spec, symbol)
    for lengths in LENGTHS:
        problem = make_problem(spec, lengths, seed=len(lengths))
        on_device = problem.to("cuda")
        output, lse = on_device.empty_outputs()
        run(*on_device.inputs(), output, lse)
        torch.cuda.synchronize()
        first = output.cpu(), lse.cpu()
        assert check_outputs(spec, output, lse, *reference(on_device)) == [], lengths
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(*on_device.inputs(), output, lse)
        for _ in range(20):
            output.fill_(float("nan"))
            lse.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert bit_equal((output.cpu(), lse.cpu()), first), lengths


TENSOR_SPECS = (
    DecodeSpec(8, 2, 128, 16, "float8_e4m3fn"),
    DecodeSpec(8, 2, 64, 16),
    DecodeSpec(24, 2, 64, 64, "float8_e4m3fn"),
    DecodeSpec(8, 2, 128, 16),
)


@pytest.mark.parametrize("spec", [*TENSOR_SPECS, SPECS[0]], ids=lambda spec: spec.short_name)
def test_tensor_copies_are_used_and_right(spec: DecodeSpec) -> None:
    """Where pages hold 16 rows of up to 128 bytes, in every layout; page ids out of range amid a walk."""
    run, used = load_cuda_function(spec, "run_always_cut"), load_cuda_function(spec, "last_tensor_copies")
    row_bytes = spec.head_dim * (1 if spec.is_fp8 else 2)
    wanted = torch.cuda.get_device_capability()[0] >= 9 and spec.page_size % 16 == 0 and row_bytes <= 128
    for interleaved in (False, True):
        problem = make_problem(spec, [2000, 0, 96, 7, 300], interleaved=interleaved).to("cuda")
        heads_outside = {
            name: problem.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
            for name in ("k_cache", "v_cache")
        }
        for given in (problem, problem.with_tensors(**heads_outside)):
            outputs = given.empty_outputs()
            run(*given.inputs(), *outputs)
            torch.cuda.synchronize()
            assert (used() > 0) == wanted, "by lanes or by tensor"
            assert check_outputs(spec, *outputs, *reference(problem)) == []
    ids = problem.tensors["kv_indices"].clone()
    ids[3] = len(problem.tensors["k_cache"])
    bad = problem.with_tensors(kv_indices=ids)
    output, lse = bad.empty_outputs()
    run(*bad.inputs(), output, lse)
    torch.cuda.synchronize()
    right = reference(problem)
    assert output[0].isnan().all() and lse[0].isnan().all()
    assert check_outputs(spec, output[1:], lse[1:], right[0][1:], right[1][1:]) == []


@pytest.mark.parametrize("symbol", ["run", "run_batch_invariant"])
def test_the_same_bits_on_both_sides_of_the_tensor_threshold(symbol: str) -> None:
    """A list of page ids as long as shapes ask for, and a page less: with tensor copies, and without."""
    spec = DecodeSpec(8, 2, 128, 16, "float8_e4m3fn")
    run, used = load_cuda_function(spec, symbol), load_cuda_function(spec, "last_tensor_copies")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    pages = -(-24_576 * sm_count // (spec.num_kv_heads * spec.page_size))
    problem = make_problem(spec, [2000, 0, 96, 7, 300])
    ids, wanted, found = problem.tensors["kv_indices"], reference(problem), []
    for listed in (pages - 1, pages):
        more = problem.with_tensors(kv_indices=torch.cat([ids, ids.new_zeros(listed - len(ids))])).to("cuda")
        output, lse = more.empty_outputs()
        run(*more.inputs(), output, lse)
        torch.cuda.synchronize()
        is_hopper = torch.cuda.get_device_capability()[0] >= 9
        assert (used() > 0) == (is_hopper and listed == pages)
        found.append((output.cpu(), lse.cpu()))
        assert check_outputs(spec, *found[-1], *wanted) == [], listed
    # Shapes cut both alike but for a page's share of fairness; batch-invariant parts do not depend on it.
    if symbol == "run_batch_invariant":
        assert bit_equal(*found)


FIRST_CALL = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from gpu_stress_worker import load_cuda_function
from evenkv.numerics.check import check_outputs
from evenkv.numerics.problem import make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

spec = DecodeSpec(32, 8, 128, 16, sys.argv[3])
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


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("symbol", ["run", "run_always_cut", "run_batch_invariant"])
def test_the_first_call_of_a_process_may_be_captured(symbol: str, kv_dtype: str) -> None:
    """What is asked once a device and kernel, tensor maps, and scratch, must not end a capture."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, here, symbol, kv_dtype],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
