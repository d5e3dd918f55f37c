"""The CPU job: real worker processes on small solutions that are right, wrong, raising, and crashing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from evaluate_fixtures import FLAT, LENGTHS, PAGED, add_solution, make_repository, tree
from pack_fixtures import make_folder, manifest
from typer.testing import CliRunner

from evenkv.cli.main import app
from evenkv.errors import EvenkvError
from evenkv.evaluate import cpu
from evenkv.evaluate.load import load_package, select_cases
from evenkv.evaluate.table import compile_table
from evenkv.library import toolchain
from evenkv.pack.compile import ARCHS, CompileResult
from evenkv.pack.manifest import load_kernel
from evenkv.spec.family import SEED_DEFINITION, DecodeSpec, parse_name
from evenkv.spec.generate import render_reference

RIGHT = """
def run(*args):
    *inputs, output, lse = args
    got, got_lse = reference(*inputs)
    output.copy_(got)
    lse.copy_(got_lse)
"""
ZEROS = """
def run(*args):
    args[-2].zero_()
    args[-1].zero_()
    print("kernels may print")
"""
STALE = "def run(*args): pass\n"
RAISES = "def run(*args): raise ValueError('q has the wrong mood')\n"
CRASHES = "import os\ndef run(*args): os.abort()\n"
HANGS = "import time\ndef run(*args): time.sleep(600)\n"


def right_source(definition: str) -> str:
    reference = render_reference(parse_name(definition)).replace("def run(", "def reference(")
    return reference + RIGHT


@pytest.fixture
def repository(tmp_path):
    repository = make_repository(tmp_path / "package")
    add_solution(repository, "right", PAGED, language="triton", source=right_source(PAGED))
    for kernel, source in {"zeros": ZEROS, "stale": STALE, "raises": RAISES, "crashes": CRASHES}.items():
        add_solution(repository, kernel, FLAT, language="triton", source=source)
    add_solution(repository, "hangs", FLAT, language="triton", source=HANGS)
    return repository


def test_run_tells_right_from_wrong_and_writes_no_traces(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = tree(repository.root)
    kernels = ["right", "zeros", "stale", "raises", "crashes"]
    result = CliRunner().invoke(app, ["run", "--json", "--minutes", "2", "--solutions", *kernels])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["mode"] == "cpu" and report["traces"] == [] and not report["ok"]
    status = {(r["solution"].split("_h5")[0], r["workload"]): r["status"] for r in report["results"]}
    assert status == {
        ("right", "short"): "PASSED",
        ("right", "mixed"): "PASSED",
        ("zeros", "other"): "INCORRECT_NUMERICAL",
        ("stale", "other"): "INCORRECT_NUMERICAL",
        ("raises", "other"): "RUNTIME_ERROR",
        ("crashes", "other"): "RUNTIME_ERROR",
    }
    faults = {r["solution"].split("_h5")[0]: r["faults"] for r in report["results"]}
    assert "wrong mood" in faults["raises"][0] and "code -6" in faults["crashes"][0]
    assert tree(repository.root) == before


def test_no_time_at_all_starts_nothing_and_says_what_is_left(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for built in (False, True):
        monkeypatch.setattr("evenkv.evaluate.builds.is_built", lambda solution, built=built: built)
        result = CliRunner().invoke(app, ["run", "--minutes", "0", "--solutions", "right", "evenkv_cpp"])
        assert result.exit_code == 0 and result.stderr == "", result.output
        assert "0 evaluations: none" in result.stdout
        assert "2 evaluations of right: no time left" in result.stdout
        cpp = "3 evaluations of evenkv_cpp: no time left" if built else "2 C++ solutions: no time to build"
        assert cpp in result.stdout


def test_solutions_that_all_need_a_gpu_are_refused(repository, monkeypatch):
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["run", "--solutions", "flashinfer_tc", "fa3", "--definitions", PAGED])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("evenkv: --solutions: wanted some for a machine without a CUDA GPU, got ")
    assert "flashinfer_tc, fa3, which need one." in result.stderr
    assert "what runs here: evenkv_cpp, evenkv_cuda (compiled, not run), right.\n" in result.stderr


def test_a_terminated_run_tells_what_it_had_and_ends_with_1(repository, tmp_path):
    """The real signal on a real process: `right` has passed on one workload, `hangs` never ends."""
    begun = tmp_path / "begun"
    source = f"import time\nfrom pathlib import Path\nPath({str(begun)!r}).touch()\n" + HANGS
    add_solution(repository, "hangs", FLAT, language="triton", source=source)
    before = tree(repository.root)
    process = subprocess.Popen(
        [sys.executable, "-m", "evenkv", "run", "--minutes", "inf", "--solutions", "right", "hangs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "EVENKV_ROOT": str(repository.root),
            "FIB_CACHE_PATH": str(tmp_path / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=30)
    assert process.returncode == 1, said
    assert "1 evaluations: 1 PASSED" in out and "2 evaluations: interrupted" in out
    assert said.startswith("evenkv: Interrupted after 1 evaluations; on a CPU nothing is filed")
    assert said.count("\n") == 1
    assert tree(repository.root) == before


def test_what_never_ends_is_stopped_and_told(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "_NOTABLE_S", 1.0)
    cases = select_cases(load_package(repository), [FLAT], ["hangs"])
    lengths = {(FLAT, "other"): LENGTHS["other"]}
    report = cpu.evaluate_on_cpu(cases, lengths, [], repository.root, budget_s=2.0)
    assert report.results == []
    assert not report.ok
    (what, why), *rest = report.left_out
    assert what == "hangs_h5_kv1_d128_ps1 on other" and "stopped after 2 s" in why and not rest


def test_order_and_what_is_left_out(repository, monkeypatch):
    report = cpu.CpuReport()
    add_solution(repository, "also", FLAT, language="triton", source=STALE)
    add_solution(repository, "also", PAGED, language="triton", source=STALE)
    cases = select_cases(load_package(repository), solutions=["also"])
    lengths = {(case.definition.name, case.workload.uuid): LENGTHS[case.workload.uuid] for case in cases}
    order = [job.case.workload.uuid for job in cpu.plan_jobs(cases, lengths, "triton", report)]
    assert order == ["short", "other", "mixed"]

    monkeypatch.setattr(cpu, "CACHE_LIMIT_BYTES", 5 * 16 * 2 * 128 * 2)
    left = cpu.plan_jobs(cases, lengths, "triton", report)
    assert [job.case.workload.uuid for job in left] == ["short", "other"]
    assert report.left_out[0][0].startswith("1 workloads")


def test_cuda_compilations_take_kinds_in_turn_and_the_next_run_goes_on(monkeypatch, tmp_path):
    fields = manifest(
        name="every",
        language="cuda",
        sources=["*.cu", "*.cpp"],
        supports={},
        config_templates={"shape.h": "shape.h.j2"},
    )
    shape = "constexpr int kHeads = {{ spec.num_qo_heads }}, kDim = {{ spec.head_dim }};\n"
    files = {"kernel.cu": '#include "shape.h"\n', "binding.cpp": "// nothing\n", "shape.h.j2": shape}
    kernel = load_kernel(make_folder(tmp_path, fields, files))
    specs = [DecodeSpec(8, 1, 128, 16), DecodeSpec(6, 1, 128, 16), DecodeSpec(16, 2, 64, 16)]
    specs += [DecodeSpec(6, 1, 128, 64), parse_name(SEED_DEFINITION)]
    calls: list[tuple[str, str]] = []
    cache: set[tuple[str, str]] = set()

    def nvcc(kernels, specs, archs, jobs):
        (spec,), (arch,) = specs, archs
        key = (spec.short_name, arch)
        calls.append(key)
        cached = key in cache
        cache.add(key)
        if not cached:
            time.sleep(0.05)
        return [CompileResult("every", "kernel.cu", (spec.name,), arch, True, (), 0.05, "", cached)]

    monkeypatch.setattr(cpu, "compile_check", nvcc)
    monkeypatch.setattr(cpu, "_COMPILERS", 1)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: tmp_path)

    def compile_for(seconds: float) -> cpu.CpuReport:
        report = cpu.CpuReport()
        cpu._compile([kernel], specs, time.monotonic() + seconds, report, lambda what: None)
        return report

    first = compile_for(0.3)
    count = len(first.compiled)
    assert first.compilations == 12 and 1 <= count <= 5 and len(calls) == count
    ((what, why),) = first.left_out
    assert what == f"{12 - count} of 12 CUDA compilations" and "next run goes on" in why
    assert (
        f"{count} of 12" in compile_table(first).title and f"{12 - count} did" in compile_table(first).caption
    )

    second = compile_for(60.0)
    assert len(second.compiled) == 12 and second.left_out == [] and compile_table(second).caption is None
    assert [result.cached for result in second.compiled] == [True] * count + [False] * (12 - count)
    # The seed definition first, then another head_dim, then the other heads; every target of each.
    order = ["h5_kv1_d128_ps1", "h16_kv2_d64_ps16", "h8_kv1_d128_ps16", "h6_kv1_d128_ps16"]
    assert [(r.specs[0], r.arch) for r in second.compiled] == [
        (f"gqa_paged_decode_{name}", arch) for name in order for arch in ARCHS
    ]
    assert len(second.compiled[-1].specs) == 2

    waits = []

    def interrupted(running, return_when):
        waits.append(running)
        if len(waits) == 3:
            raise KeyboardInterrupt
        return wait(running, return_when=return_when)

    wait, stopped = cpu.wait, cpu.CpuReport()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cpu, "wait", interrupted)
        cpu._compile([kernel], specs, time.monotonic() + 60.0, stopped, lambda what: None)
    assert len(stopped.compiled) == 2, "those that ended before it, and no more"

    def missing():
        raise EvenkvError("No nvcc here.", "Get one.")

    monkeypatch.setattr(toolchain, "find_nvcc", missing)
    without = compile_for(60.0)
    assert without.compiled == [] and without.left_out == [("12 CUDA compilations", "No nvcc here. Get one.")]
