"""Warm-ups before the GPU job: what is called, how often, in which order, within what time, and failures."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
from evaluate_fixtures import FLAT, PAGED, make_repository
from flashinfer_bench.data import BuildSpec, Definition, Solution, SourceFile

from evenkv.evaluate import warm
from evenkv.evaluate.load import load_package
from evenkv.paths import find_repository
from evenkv.spec.family import parse_name

# In place of the process that calls a solution on a GPU: notes the call, then does what the source says.
STAND_IN = """
import json, os, sys, time
job = json.load(sys.stdin)
name = job["solution"]["name"]
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([name, job["definition"]["name"], job["device"], os.environ["MAX_JOBS"]]) + "\\n")
exec(job["solution"]["sources"][0]["content"])
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The calls that stand-ins made, in order: solution, definition, device, MAX_JOBS."""
    path = tmp_path / "calls"
    path.touch()
    monkeypatch.setenv("CALLS", str(path))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(warm, "_COMMAND", (sys.executable, "-c", STAND_IN))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def pair(kernel: str, definition: str = FLAT, source: str = "", language: str = "triton"):
    solution = Solution(
        name=f"{kernel}_{parse_name(definition).short_name}",
        definition=definition,
        author="evenkv",
        spec=BuildSpec(language=language, target_hardware=["NVIDIA H200"], entry_point="main.py::run"),
        sources=[SourceFile(path="main.py", content=source or "pass")],
    )
    path = find_repository().definitions / f"{definition}.json"
    return Definition.model_validate_json(path.read_text(encoding="utf-8")), solution


def names(pairs) -> list[str]:
    return [solution.name for _, solution in pairs]


def test_one_call_for_each_thing_that_compiles_in_the_order_of_the_run():
    grouped = "gqa_paged_decode_h32_kv8_d128_ps16"
    pairs = [
        pair("flashinfer_tc", PAGED, language="python"),
        pair("evenkv_cuda", PAGED, language="cuda"),
        pair("evenkv_triton", PAGED),
        pair("fa3", PAGED, language="python"),
        pair("torch_reference", PAGED, language="python"),
        pair("flashinfer_tc", FLAT, language="python"),  # other page size: the same module
        pair("evenkv_triton", FLAT),
        pair("evenkv_triton", FLAT),  # of another workload
        pair("flashinfer_tc", grouped, language="python"),
        pair("flashinfer_cc", grouped, language="python"),
        pair("flashinfer_tc", "gqa_paged_decode_h16_kv2_d64_ps16", language="python"),
        pair("flashinfer_tc", "gqa_paged_decode_fp8_h5_kv1_d128_ps1", language="python"),
        pair("flashinfer_cc", "gqa_paged_decode_h32_kv4_d128_ps64", language="python"),
        pair("mine", PAGED, language="python"),  # who knows what it compiles
        pair("mine", FLAT, language="python"),
    ]
    assert names(warm.to_warm(pairs)) == [
        "flashinfer_tc_h5_kv1_d128_ps16",
        "evenkv_triton_h5_kv1_d128_ps16",
        "evenkv_triton_h5_kv1_d128_ps1",
        "flashinfer_cc_h32_kv8_d128_ps16",
        "flashinfer_tc_h16_kv2_d64_ps16",
        "flashinfer_tc_fp8_h5_kv1_d128_ps1",
        "mine_h5_kv1_d128_ps16",
        "mine_h5_kv1_d128_ps1",
    ]


def test_the_whole_package_takes_few_calls():
    package = load_package(find_repository())
    pairs = [(package.definitions[d], s) for d, found in package.solutions.items() for s in found]
    chosen = names(warm.to_warm(pairs))
    peers = [name for name in chosen if name.startswith("flashinfer")]
    # On tensor cores bf16 of head_dim 64, 128, 256 and fp8 of 128; on CUDA cores the same.
    assert len(peers) == 8 and len(set(peers)) == 8
    assert len(chosen) - len(peers) == len(package.definitions)
    assert all(name.startswith("evenkv_triton") for name in chosen if name not in peers)


def test_a_failing_call_is_told_and_the_others_go_on_and_are_not_repeated(calls):
    pairs = [
        pair("crashes", source="os.kill(os.getpid(), 11)"),
        pair("fails", source="print('compiling'); sys.exit('ValueError: no such tile')"),
        pair("works"),
    ]
    done: list[str] = []
    failures, left = warm.warm_all(pairs, done.append, processes=1)
    assert done == names(pairs) and left == []
    assert [call[:3] for call in calls()] == [[name, FLAT, "cuda"] for name in done]
    assert list(failures) == done[:2]
    assert failures[done[0]] == "no message (exit code -11)"
    assert failures[done[1]] == "ValueError: no such tile (exit code 1)"

    changed = [*pairs, pair("works", PAGED), pair("works", FLAT, source="x = 1")]
    again: list[str] = []
    failures, _ = warm.warm_all(changed, again.append, processes=1)
    assert sorted(again) == sorted([*done, "works_h5_kv1_d128_ps16"]) and list(failures) == done[:2]
    assert [call[0] for call in calls()[3:]] == [*done[:2], "works_h5_kv1_d128_ps16"]
    warm.warm_all(changed[-1:], processes=1)
    assert [call[0] for call in calls()[6:]] == ["works_h5_kv1_d128_ps1"], "other sources are called again"


def test_calls_run_side_by_side_and_share_the_cores(calls, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    # Each waits for the other: one after another, both would fail.
    meet = (
        "end = time.monotonic() + 20\n"
        "while len(open(os.environ['CALLS']).readlines()) < 2 and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(time.monotonic() >= end)"
    )
    failures, left = warm.warm_all([pair("one", source=meet), pair("two", source=meet)])
    assert failures == {} and left == []
    assert [call[3] for call in calls()] == ["4", "4"]

    monkeypatch.setenv("MAX_JOBS", "3")
    warm.warm_all([pair("three")])
    assert calls()[-1][3] == "3", "what the user has set stays"


def test_none_starts_that_would_end_after_the_deadline(calls):
    pairs = [pair("slow", source="time.sleep(0.6)"), pair("second"), pair("third")]
    assert warm.warm_all(pairs, deadline=time.monotonic() - 1) == ({}, names(pairs))
    assert calls() == []
    # The first takes longer than what is left after it.
    failures, left = warm.warm_all(pairs, deadline=time.monotonic() + 1.0, processes=1)
    assert failures == {} and left == names(pairs)[1:]
    assert [call[0] for call in calls()] == names(pairs)[:1]


def test_a_call_that_hangs_ends_with_what_it_started(calls, tmp_path):
    child = tmp_path / "child"
    hangs = (
        "import subprocess\n"
        "process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(process.pid))\n"
        "time.sleep(60)"
    )
    failures, left = warm.warm_all([pair("hangs", source=hangs)], limit_s=3.0)
    assert failures == {"hangs_h5_kv1_d128_ps1": "ended after 3 s"} and left == []
    pid = int(child.read_text())
    end = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether the process still does something: one that nobody has waited for is over, too."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_interruption_ends_what_runs(calls):
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        warm.warm_all([pair("quick"), pair("hangs", source="time.sleep(60)")], interrupt, processes=2)
    assert time.monotonic() - start < 30


def test_the_process_calls_the_solution_once_with_a_tiny_problem(tmp_path, monkeypatch):
    """The real one, on CPU tensors: the definition's arguments go in, what it raises comes out as a line."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    package = load_package(make_repository(tmp_path / "package"))
    noted = tmp_path / "noted"
    source = f"""
def run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, output, lse):
    with open({str(noted)!r}, "a") as file:
        print(list(q.shape), kv_indptr.tolist(), kv_last_page_len.tolist(), list(lse.shape), file=file)
"""
    fails = "def run(*arguments):\n    raise ValueError('no\\nsuch tile')\n"
    pairs = []
    for kernel, content in (("notes", source), ("fails", fails)):
        _, solution = pair(kernel, PAGED, content, "python")
        pairs.append((package.definitions[PAGED], solution))
    failures, left = warm.warm_all(pairs, processes=1, device="cpu")
    assert noted.read_text() == "[1, 5, 128] [0, 1] [16] [1, 5]\n"
    assert failures == {"fails_h5_kv1_d128_ps16": "ValueError: no such tile (exit code 1)"} and left == []
