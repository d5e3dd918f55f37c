"""The CPU job: real worker processes on small solutions that are right, wrong, raising, and crashing."""

from __future__ import annotations

import json

import pytest
from evaluate_fixtures import FLAT, LENGTHS, PAGED, add_solution, make_repository, tree
from typer.testing import CliRunner

from evenkv.cli.main import app
from evenkv.evaluate import cpu
from evenkv.evaluate.load import load_package, select_cases
from evenkv.spec.family import parse_name
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
