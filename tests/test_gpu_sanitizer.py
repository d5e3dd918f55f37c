"""evenkv_cuda under compute-sanitizer: memcheck, racecheck, synccheck; on a CPU, which ways its problems go.

The tools need a GPU that allows debugging: some virtual machines do not, and there the tests skip.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cut_library import COUNT, MOST_AT_ONCE, CutLibrary, choose_launch
from gpu_sanitizer_script import D256, PAIRS, PAIRS_GROUP12, SPECS, make_plans, solve
from gpu_stress_worker import build_side_by_side
from stress_problems import Plan

from evenkv.library.toolchain import find_nvcc
from evenkv.numerics.bytes import pages_of

SCRIPT = Path(__file__).with_name("gpu_sanitizer_script.py")
LIMIT_S = 240.0
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


class _Way:
    """How a device of `workers` SMs goes through a problem."""

    def __init__(self, library: CutLibrary, plan: Plan, workers: int) -> None:
        counts = [pages_of(n, plan.spec.page_size) for n in plan.lengths]
        kv_indptr = [0, *accumulate(counts)]
        listed = kv_indptr[-1] + plan.spare_ids
        launch = choose_launch(library, plan.spec, len(counts), listed, workers)
        self.heads, shape, choice = launch.heads, launch.shape, launch.choice
        found = library.visits(shape, choice, kv_indptr, plan.lengths)
        self.uncut, self.splits = choice.uncut, choice.splits
        self.even, self.fitted = found.even, found.part_tokens < choice.cut.part_tokens * 0.999
        self.most_parts = int(found.rows[:, COUNT].max())
        self.items = shape.units * shape.batch


@pytest.mark.parametrize("workers", [80, 108, 132, 148])
def test_problems_go_every_way(tmp_path: Path, workers: int) -> None:
    library = CutLibrary(tmp_path)
    plans = make_plans(workers)
    ways = {name: _Way(library, plan, workers) for name, plan in plans.items()}
    whole, clusters, even, uneven, page1, fitted, d256, waves, pairs, pairs_cut = ways.values()
    assert whole.uncut and whole.splits == 1
    assert clusters.uncut and clusters.splits > 1
    assert even.even and even.most_parts > 1 and even.splits > 1
    assert not uneven.even and uneven.most_parts > 8 and uneven.splits > 1
    assert not page1.even and page1.most_parts > MOST_AT_ONCE
    assert fitted.fitted and fitted.most_parts > 1
    assert D256.group_size > 8 and d256.most_parts > 1
    assert not waves.even and waves.items > 3 * workers and waves.most_parts > 1
    assert pairs.heads == 2 and pairs_cut.heads == 2 and pairs_cut.most_parts > 1
    assert PAIRS.group_size <= 8 < PAIRS_GROUP12.group_size, "one column block, and two"
    assert all(plan.spec in SPECS for plan in plans.values())
    assert all(0 in plan.lengths for name, plan in plans.items() if name != "even parts of clusters")
    assert {plan.spec.page_size for plan in plans.values()} >= {1, 16, 64}
    assert all(1 <= plan.counted_slots <= plan.listed_slots < 1 << 30 for plan in plans.values())
