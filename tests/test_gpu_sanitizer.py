"""evenkv_cuda under compute-sanitizer: memcheck, racecheck, synccheck; on a CPU, which ways its problems go.

The tools need a GPU that allows debugging: some virtual machines do not, and there the tests skip.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from decode_model import GROUP_CHUNKS, Batch, stream_chunk
from gpu_sanitizer_script import D256, PAIRS, PAIRS_GROUP12, SPECS, make_plans, solve
from gpu_stress_worker import build_side_by_side
from stress_problems import PAIR_SLOTS, Plan
from test_schedule import Schedule, library  # noqa: F401 (a fixture: the compiled schedule)

from evenkv.library.toolchain import find_nvcc
from evenkv.numerics.bytes import pages_of
from evenkv.spec.family import DecodeSpec

SCRIPT = Path(__file__).with_name("gpu_sanitizer_script.py")
LIMIT_S = 120.0
FOUND = 86  # the tool's exit code when it reports something; 3 is the script's for a wrong result
SUMMARY = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}
REFUSALS = ("Device not supported", "Unable to find injection library", "debugger is already attached")


def _find_tool() -> str:
    beside = find_nvcc().resolve().with_name("compute-sanitizer")
    tool = shutil.which("compute-sanitizer") or (str(beside) if beside.is_file() else None)
    return tool or pytest.skip("no compute-sanitizer on PATH or beside nvcc")


@pytest.fixture(scope="module")
def sanitizer() -> list[str]:
    """The tool's command line up to `--tool`, for our kernel alone; builds are in the cache."""
    tool = _find_tool()
    faults = build_side_by_side(SPECS)
    assert faults == [], "\n".join(faults)
    listed = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=60).stdout
    by_name = "--kernel-name" if "--kernel-name" in listed else "--kernel-regex"
    only_ours = [by_name, "kns=decode_kernel", "--target-processes", "application-only"]
    return [tool, *only_ours, "--error-exitcode", str(FOUND), "--print-limit", "20"]


def run_limited(command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit code and output of a command; at the limit it and its children are killed, and the test fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # Each tensor its own allocation: else an access behind one lands in the allocator's block, unseen.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        pytest.fail(f"killed after {limit_s:.0f} s; its output:\n{output[-4000:]}")
    return process.returncode, output


def _run_script(sanitizer: list[str], tool: str, *arguments: str) -> tuple[int, str]:
    command = [*sanitizer, "--tool", tool, sys.executable, str(SCRIPT), *arguments]
    code, output = run_limited(command, LIMIT_S)
    for refusal in REFUSALS:
        if refusal in output:
            pytest.skip(f"compute-sanitizer cannot work on this machine: {refusal}")
    return code, output


@pytest.mark.gpu
@pytest.mark.parametrize("tool", SUMMARY)
def test_nothing_is_reported(sanitizer: list[str], tool: str) -> None:
    code, output = _run_script(sanitizer, tool)
    names = make_plans(1)
    assert code == 0 and SUMMARY[tool] in output, f"exit code {code}:\n{output[:3000]}\n...\n{output[-6000:]}"
    assert [name for name in names if f"{name}: right" not in output] == []


@pytest.mark.gpu
@pytest.mark.parametrize("tensor", ["q", "k_cache"])
def test_memcheck_sees_a_read_past_the_end(sanitizer: list[str], tensor: str) -> None:
    """That the tool looks at our kernel at all, at its plain loads and at its asynchronous copies."""
    _, output = _run_script(sanitizer, "memcheck", "plant", tensor)
    assert "Invalid __global__ read" in output and "decode_kernel" in output, output[-6000:]


@pytest.mark.gpu
def test_the_problems_are_right_without_a_tool() -> None:
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    assert {name: solve(plan) for name, plan in make_plans(sm_count).items()} == {
        name: [] for name in make_plans(1)
    }


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    child = "import time, pathlib, sys; time.sleep(3); pathlib.Path(sys.argv[1]).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])"
    mark = tmp_path / "the child lives"
    with pytest.raises(pytest.fail.Exception, match="killed after 1 s"):
        run_limited([sys.executable, "-c", parent, str(mark)], 1.0)
    time.sleep(3.0)  # by then the child would have made the mark
    assert not mark.exists()


# tuning.cuh on sm_90: streaming warps by geometry, and the slots of a tile.
WARPS = {spec: 8 for spec in SPECS} | {D256: 4, PAIRS_GROUP12: 6}
WORKERS = 132


def _tile(spec: DecodeSpec) -> int:
    return 16 if spec.head_dim * (1 if spec.is_fp8 else 2) > 128 else 32


class _Walk:
    """How an H200 cuts a problem."""

    def __init__(self, compiled: ctypes.CDLL, plan: Plan) -> None:
        spec = plan.spec
        self.heads = 2 if spec.is_fp8 and plan.listed_slots >= PAIR_SLOTS else 1
        most = 8 if spec.head_dim > 128 else 16
        units = spec.num_kv_heads * -(-spec.group_size // most) // self.heads
        counts = [pages_of(n, spec.page_size) for n in plan.lengths]
        indptr = [sum(counts[:i]) for i in range(len(counts) + 1)]
        last = [n - (c - 1) * spec.page_size if c else 0 for n, c in zip(plan.lengths, counts, strict=True)]
        batch = Batch(indptr, last, spec.page_size)
        tuning = (_tile(spec) * WARPS[spec], 16384, 512)
        schedule = Schedule(compiled, units * batch.unit_slots, WORKERS, tuning)
        self.num_chunks = schedule.num_chunks
        self.most_chunks_of_a_request = 0
        for request, length in enumerate(plan.lengths):
            for unit in range(units) if length else ():
                begin = unit * batch.unit_slots + batch.begin(request)
                first, final = schedule.chunk_of(begin), schedule.chunk_of(begin + length - 1)
                self.most_chunks_of_a_request = max(self.most_chunks_of_a_request, final - first + 1)
        parts = WARPS[spec] // self.heads
        pieces = [
            p for begin, end in schedule.ranges for p in stream_chunk(batch, int(begin), int(end), parts)
        ]
        self.early_pieces = sum(len(p) > 1 and p[0].starts_before for p in pieces)
        self.whole_pieces = sum(not piece.cut for p in pieces for piece in p)


def test_problems_go_every_way(library: ctypes.CDLL) -> None:  # noqa: F811
    plans = make_plans(WORKERS)
    one, two_steps, early, d256, pairs, pairs12, tickets = (_Walk(library, plan) for plan in plans.values())
    assert one.num_chunks == 1 and one.whole_pieces
    assert two_steps.most_chunks_of_a_request > GROUP_CHUNKS and two_steps.num_chunks <= WORKERS
    assert early.early_pieces > 3 and early.most_chunks_of_a_request > GROUP_CHUNKS
    assert D256.group_size > 8 and d256.most_chunks_of_a_request > 1
    for walk in (pairs, pairs12):
        assert walk.heads == 2 and walk.most_chunks_of_a_request > 1
    assert PAIRS.group_size <= 8 < PAIRS_GROUP12.group_size, "pieces in shared memory, and in scratch"
    assert tickets.num_chunks > 2 * WORKERS and tickets.most_chunks_of_a_request > 1
    assert all(0 in plan.lengths for plan in plans.values())
    assert {plan.spec.page_size for plan in plans.values()} >= {1, 16, 64}
    for plan in plans.values():
        assert all(a <= b for a, b in pairwise((1, plan.line_slots, plan.listed_slots, 1 << 30)))
    # Other GPUs: the number of requests follows the number of SMs.
    assert make_plans(80)["tickets"].line_slots > 80 * 16384
