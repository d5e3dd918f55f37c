"""The GPU job's logic with a stand-in for flashinfer-bench: choice, filing, resume, peers, interruption."""

from __future__ import annotations

import importlib.util
import json
import sys
import time

import pytest
from evaluate_fixtures import FLAT, LENGTHS, PAGED, FakeGpu, add_solution, make_repository
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import EvaluationStatus, TraceSet
from typer.testing import CliRunner

from evenkv.cli.main import app
from evenkv.errors import EvenkvError
from evenkv.evaluate.gpu import BenchmarkRunner, evaluate_on_gpu, runnable_on_gpu
from evenkv.evaluate.load import load_package, select_cases
from evenkv.evaluate.table import rows_from_traces
from evenkv.evaluate.traces import file_traces, load_traces, make_trace

LIBS = {"timer": "a timer", "driver": "580.1"}
H200 = "NVIDIA H200"


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path)


def chosen(repository, *solutions: str, definitions: tuple[str, ...] = ()):
    return select_cases(load_package(repository), definitions, solutions)


def lines(repository, author: str, definition: str):
    return load_traces(repository.traces / author / "gqa_paged" / f"{definition}.jsonl")


def test_cpu_solutions_and_missing_peers_stay_out(repository, monkeypatch):
    cases = chosen(repository)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "flash_attn_interface" or None)
    kept, missing = runnable_on_gpu(cases)
    assert list(missing) == ["fa3"] and "tokenspeed-fa3" in missing["fa3"]
    kernels = {solution.name.split("_h5")[0] for case in kept for solution in case.solutions}
    assert kernels == {"evenkv_cuda", "flashinfer_tc"}

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    kept, missing = runnable_on_gpu(cases)
    assert not missing
    assert any(solution.name.startswith("fa3") for case in kept for solution in case.solutions)
    assert runnable_on_gpu(chosen(repository, "evenkv_cpp")) == ([], {})


def test_traces_are_filed_by_author_and_load_as_a_trace_set(repository):
    runner = FakeGpu()
    report = evaluate_on_gpu(
        chosen(repository, "evenkv_cuda", "flashinfer_tc"), runner, repository, LIBS, H200
    )
    assert report.ok and len(report.traces) == 6
    ours = lines(repository, "evenkv", PAGED)
    assert [trace.workload.uuid for trace in ours] == ["short", "mixed"]
    assert {trace.solution for trace in lines(repository, "baseline", FLAT)} == {
        "flashinfer_tc_h5_kv1_d128_ps1"
    }
    libs = ours[0].evaluation.environment.libs
    assert libs["driver"] == "580.1" and libs["torch"] == "2.11.0"
    solution = next(s for s in load_package(repository).solutions[PAGED] if s.name == ours[0].solution)
    assert libs["evenkv_solution"] == solution.hash()[:12]

    upstream = TraceSet.from_path(str(repository.root))
    assert len(upstream.traces[PAGED]) == 4 and len(upstream.traces[FLAT]) == 2
    assert upstream.summary()["passed"] == 6


def test_a_rerun_replaces_lines_where_they_stand(repository):
    cases = chosen(repository, "evenkv_cuda")
    evaluate_on_gpu(cases, FakeGpu(latency_ms=0.02), repository, LIBS, H200)
    evaluate_on_gpu(
        [c for c in cases if c.workload.uuid == "short"], FakeGpu(latency_ms=0.01), repository, LIBS, H200
    )
    found = [
        (t.workload.uuid, t.evaluation.performance.latency_ms) for t in lines(repository, "evenkv", PAGED)
    ]
    assert found == [("short", 0.01), ("mixed", 0.02)]


def test_traces_of_another_gpu_stay_and_are_not_resumed_from(repository):
    cases = chosen(repository, "evenkv_cuda", definitions=(FLAT,))
    evaluate_on_gpu(cases, FakeGpu(), repository, LIBS, H200)
    other = FakeGpu(hardware="NVIDIA GB200")
    report = evaluate_on_gpu(cases, other, repository, LIBS, "NVIDIA GB200", resume=True)
    assert report.reused == 0 and other.ran == [("other", "evenkv_cuda_h5_kv1_d128_ps1")]
    hardware = [t.evaluation.environment.hardware for t in lines(repository, "evenkv", FLAT)]
    assert hardware == [H200, "NVIDIA GB200"]


def test_resume_skips_only_what_the_same_solution_did(repository):
    evaluate_on_gpu(chosen(repository, "evenkv_cuda"), FakeGpu(), repository, LIBS, H200)
    again = FakeGpu()
    report = evaluate_on_gpu(chosen(repository, "evenkv_cuda"), again, repository, LIBS, H200, resume=True)
    assert again.ran == [] and report.reused == 3 and len(report.traces) == 3

    add_solution(repository, "evenkv_cuda", PAGED, source="def run(*args): return None\n")
    changed = FakeGpu(latency_ms=0.5)
    evaluate_on_gpu(chosen(repository, "evenkv_cuda"), changed, repository, LIBS, H200, resume=True)
    name = "evenkv_cuda_h5_kv1_d128_ps16"
    assert changed.ran == [("short", name), ("mixed", name)]
    assert [t.evaluation.performance.latency_ms for t in lines(repository, "evenkv", PAGED)] == [0.5, 0.5]

    missing = FakeGpu()
    evaluate_on_gpu(
        chosen(repository, "evenkv_cuda", "flashinfer_tc"), missing, repository, LIBS, H200, resume=True
    )
    assert {name for _, name in missing.ran} == {
        "flashinfer_tc_h5_kv1_d128_ps16",
        "flashinfer_tc_h5_kv1_d128_ps1",
    }


def test_an_interrupted_run_keeps_finished_traces(repository):
    with pytest.raises(KeyboardInterrupt):
        evaluate_on_gpu(
            chosen(repository, "evenkv_cuda", definitions=(PAGED,)),
            FakeGpu(interrupt_on="mixed"),
            repository,
            LIBS,
            H200,
        )
    assert [t.workload.uuid for t in lines(repository, "evenkv", PAGED)] == ["short"]


def test_a_workload_that_could_not_run_is_told_and_the_rest_goes_on(repository):
    report = evaluate_on_gpu(
        chosen(repository, "evenkv_cuda"), FakeGpu(fails_on="short"), repository, LIBS, H200
    )
    assert not report.ok
    assert [(w, "healthy" in why) for _, w, why in report.not_evaluated] == [("short", True)]
    assert [t.workload.uuid for t in lines(repository, "evenkv", PAGED)] == ["mixed"]


def test_the_time_budget_stops_between_workloads(repository):
    runner = FakeGpu()
    report = evaluate_on_gpu(
        chosen(repository), runner, repository, LIBS, H200, deadline=time.monotonic() - 1
    )
    assert report.left == 3 and runner.ran == [] and report.ok


def test_workloads_whose_solutions_were_not_built_in_time_are_left_for_the_next_run(repository):
    cases = chosen(repository, "evenkv_cuda", "flashinfer_tc")
    late = "evenkv_cuda_h5_kv1_d128_ps16"
    runner = FakeGpu()
    report = evaluate_on_gpu(cases, runner, repository, LIBS, H200, unbuilt=[late])
    assert report.left == 2 and report.ok
    assert [workload for workload, _ in runner.ran] == ["other", "other"]

    again = FakeGpu()
    report = evaluate_on_gpu(cases, again, repository, LIBS, H200, resume=True)
    assert report.left == 0 and report.reused == 2
    assert [workload for workload, _ in again.ran] == ["short", "short", "mixed", "mixed"]


def test_no_save_writes_nothing(repository):
    report = evaluate_on_gpu(chosen(repository), FakeGpu(), repository, LIBS, H200, save=False)
    assert len(report.traces) == 12 and not repository.traces.exists()


def test_long_logs_keep_their_end(repository):
    case = chosen(repository, "evenkv_cuda")[0]
    trace = make_trace(
        case.definition, case.workload, case.solutions[0], FakeGpu().evaluation("a" * 5000 + "end"), {}
    )
    assert len(trace.evaluation.log) == 2000 and trace.evaluation.log.endswith("end")


def test_a_broken_trace_file_is_named_and_left_alone(repository):
    path = repository.traces / "evenkv" / "gqa_paged" / f"{PAGED}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"definition": "cut o')
    cases = chosen(repository, "evenkv_cuda", definitions=(PAGED,))
    with pytest.raises(EvenkvError, match=f"{PAGED}.jsonl, line 1"):
        evaluate_on_gpu(cases, FakeGpu(), repository, LIBS, H200)
    assert path.read_text() == '{"definition": "cut o'


def test_table_has_ours_baseline_ratio_floor_and_failures(repository):
    cases = chosen(repository, "evenkv_cuda", "flashinfer_tc", definitions=(PAGED,))
    traces = []
    for case in cases:
        for solution in case.solutions:
            fake = FakeGpu(latency_ms=0.010 if solution.author == "evenkv" else 0.060)
            traces.append(make_trace(case.definition, case.workload, solution, fake.evaluation(), {}))
    failed = traces[-1].evaluation.model_copy(
        update={"status": EvaluationStatus.TIMEOUT, "performance": None, "correctness": None}
    )
    traces[-1] = traces[-1].model_copy(update={"evaluation": failed})
    lengths = {(PAGED, uuid): LENGTHS[uuid] for uuid in ("short", "mixed")}

    short, mixed = rows_from_traces(traces, lengths)
    assert (short.batch, short.tokens, mixed.batch, mixed.tokens) == (1, 5, 3, 50)
    assert (short.ours_us, short.baseline_us) == (pytest.approx(10), pytest.approx(60))
    assert short.ratio == pytest.approx(6) and short.best_ours == "evenkv_cuda"
    assert short.status == "2 PASSED" and short.max_abs_err == pytest.approx(2e-4)
    # q, output and lse of 5 heads; K and V of 5 tokens; kv_indptr, one page id, one last-page length.
    moved = 2 * 5 * 128 * 2 + 5 * 4 + 2 * 5 * 128 * 2 + (2 + 1 + 1) * 4
    assert short.floor_us == pytest.approx(1e6 * moved / 4.8e12)
    failing = "flashinfer_tc" if traces[-1].solution.startswith("flashinfer") else "evenkv_cuda"
    assert mixed.status == f"{failing}: TIMEOUT" and mixed.ratio is None

    unknown = FakeGpu(hardware="Some GPU").evaluation()
    trace = make_trace(cases[0].definition, cases[0].workload, cases[0].solutions[0], unknown, {})
    assert rows_from_traces([trace], lengths)[0].floor_us is None


def test_filing_repairs_doubled_lines(repository, tmp_path):
    case = chosen(repository, "evenkv_cuda")[0]
    old, new = (
        make_trace(case.definition, case.workload, case.solutions[0], FakeGpu(latency_ms=t).evaluation(), {})
        for t in (0.3, 0.2)
    )
    path = tmp_path / "doubled.jsonl"
    path.write_text(f"{old.model_dump_json()}\n{old.model_dump_json()}\n")
    file_traces(path, [new])
    assert [t.evaluation.performance.latency_ms for t in load_traces(path)] == [0.2]


class FakeWorkers:
    """In place of upstream's runner of GPU processes: Benchmark itself stays real."""

    closed = False

    def __init__(self, log_dir: str) -> None: ...

    def run_workload(self, definition, workload, solutions, config, root):
        if workload.uuid == "mixed":
            raise RuntimeError("No CUDA devices left")
        assert (root / workload.inputs["kv_indptr"].path).is_file() and config.num_trials == 2
        return {solution.name: FakeGpu().evaluation() for solution in solutions}

    def close(self) -> None:
        FakeWorkers.closed = True


def test_upstreams_benchmark_runs_one_workload_at_a_time(repository, monkeypatch):
    monkeypatch.setattr("flashinfer_bench.bench.benchmark.PersistentRunner", FakeWorkers)
    runner = BenchmarkRunner(repository, BenchmarkConfig(num_trials=2))
    cases = chosen(repository, "evenkv_cuda", "flashinfer_tc")
    found = runner.run(cases[1], cases[1].solutions[:1])
    assert cases[1].workload.uuid == "short" and list(found) == [cases[1].solutions[0].name]
    with pytest.raises(RuntimeError, match="No CUDA devices left"):
        runner.run(cases[2], cases[2].solutions)
    assert len(runner.run(cases[0], cases[0].solutions)) == 2
    runner.close()
    assert FakeWorkers.closed and not repository.traces.exists()


# A warm-up that fails for one definition.
WARMED = f"""
import json, sys
sys.exit("no such tile" if json.load(sys.stdin)["definition"]["name"] == {FLAT!r} else 0)
"""


@pytest.fixture
def gpu_command(repository, monkeypatch, tmp_path):
    """The command with a GPU that is not there: upstream's worker processes and ours have stand-ins."""
    monkeypatch.setattr("evenkv.evaluate.warm._COMMAND", (sys.executable, "-c", WARMED))
    monkeypatch.setattr("flashinfer_bench.bench.benchmark.PersistentRunner", FakeWorkers)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: H200)
    monkeypatch.setattr("evenkv.evaluate.builds.use_keyed_cache", lambda for_gpu: None)
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    return ["run", "--num-trials", "2", "--solutions"]


def test_run_command_prints_the_table_files_traces_and_fails_on_a_failed_workload(repository, gpu_command):
    for path in repository.solutions.rglob("evenkv_cuda*.json"):
        path.unlink()
    command = [*gpu_command, "flashinfer_tc"]
    result = CliRunner().invoke(app, [*command, "--definitions", FLAT, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["mode"] == "gpu" and document["evaluated"] == 1
    # The evaluation is what decides: it goes on after a warm-up that fails.
    assert document["warm_up_failures"] == {"flashinfer_tc_h5_kv1_d128_ps1": "no such tile (exit code 1)"}
    assert document["not_warmed_up"] == []
    (row,) = document["rows"]
    assert row["workload"] == "other" and row["baseline_us"] == pytest.approx(20) and row["ours_us"] is None

    result = CliRunner().invoke(app, [*command, "--resume"])
    assert result.exit_code == 1
    assert "Not evaluated: mixed" in result.stderr and "No CUDA devices left" in result.stderr
    assert "warmed up" not in result.stderr, "what is resumed from needs no warm-up"
    assert "short" in result.stdout and "20.0" in result.stdout
    assert [t.workload.uuid for t in lines(repository, "baseline", PAGED)] == ["short"]


def test_run_commands_minutes_limit_the_builds_too(repository, gpu_command, monkeypatch, tmp_path):
    monkeypatch.setattr("evenkv.evaluate.builds.is_compiled", lambda solution: "cuda" in solution.name)
    result = CliRunner().invoke(app, [*gpu_command, "evenkv_cuda", "--minutes", "0", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert sorted(document["unbuilt"]) == ["evenkv_cuda_h5_kv1_d128_ps1", "evenkv_cuda_h5_kv1_d128_ps16"]
    assert document["build_failures"] == {} and document["evaluated"] == 0
    assert document["workloads_left"] == 3
    assert document["not_warmed_up"] == [], "nothing whose workloads wait for a build"
    assert not (tmp_path / "cache").exists()

    result = CliRunner().invoke(app, [*gpu_command, "flashinfer_tc", "--minutes", "0", "--json"])
    document = json.loads(result.stdout)
    assert document["not_warmed_up"] == ["flashinfer_tc_h5_kv1_d128_ps1"] and document["evaluated"] == 0


class InterruptedWorkers(FakeWorkers):
    def run_workload(self, definition, workload, solutions, config, root):
        if workload.uuid == "mixed":
            raise KeyboardInterrupt
        return super().run_workload(definition, workload, solutions, config, root)


@pytest.mark.parametrize("save", [True, False])
def test_an_interrupted_command_shows_what_was_done_and_how_to_go_on(
    repository, gpu_command, monkeypatch, save
):
    monkeypatch.setattr("flashinfer_bench.bench.benchmark.PersistentRunner", InterruptedWorkers)
    command = [*gpu_command, "flashinfer_tc", "--definitions", PAGED]
    result = CliRunner().invoke(app, command if save else [*command, "--no-save"])
    assert result.exit_code == 1
    assert "short" in result.stdout and "20.0" in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("evenkv: ")]
    assert line.startswith("evenkv: Interrupted")
    assert ("--resume" in line) == save and ("--no-save" in line) != save
    assert [t.workload.uuid for t in lines(repository, "baseline", PAGED)] == ["short"] * save
