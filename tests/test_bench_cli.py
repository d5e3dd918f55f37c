"""`evenkv bench` itself, on the stand-in: options, output, exit codes, several processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_fixtures import case, row
from typer.testing import CliRunner

from evenkv.bench import devices, grid, shards
from evenkv.bench.protocol import Outcome
from evenkv.bench.record import append_rows, load_rows
from evenkv.bench.standin import StandIn
from evenkv.cli.main import app
from evenkv.errors import EvenkvError


def bench(*words: object):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def standin(path: Path, *words: object):
    return bench("--device", "standin", "--out", path, *words)


def test_help_and_the_list():
    assert "--resume" in bench("--help").output
    lines = bench("--list", "--preset", "protocol").output.splitlines()
    assert len(lines) == len(grid.protocol())
    assert sum("skipped: over 80 GB" in line for line in lines) == 18
    listed = json.loads(bench("--list", "--only", "h5/1", "--json").output)
    assert [entry["case"]["num_qo_heads"] for entry in listed] == [5, 5, 5]


def test_a_smoke_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    answer = standin(path)
    assert answer.exit_code == 0, answer.output
    assert len(load_rows(path)) == 12 * 6
    assert "Regimes of evenkv-cuda" in answer.output
    assert "(300 iterations; copy peak 4250 GB/s)" in answer.output
    again = standin(path)
    # xqa refuses nothing of the smoke cases: 72 times, all as before.
    assert "72 of 72 times within 5 %" in again.output


def test_json_and_resume(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = json.loads(standin(path, "--json", "--only", "h5/1", "--impl", "evenkv-cuda,fa3").stdout)
    assert first["ok"] and len(first["rows"]) == 6 and first["gpu"] == "standin"
    assert first["summary"][0]["impl"] == "evenkv-cuda" and first["left"] == []
    second = json.loads(standin(path, "--json", "--only", "h5/1", "--resume").stdout)
    assert second["reused"] == 6 and len(second["rows"]) == 12


def test_no_time_left_says_how_to_go_on(tmp_path):
    answer = standin(tmp_path / "rows.jsonl", "--minutes", 0)
    assert answer.exit_code == 0
    assert "12 cases left: the same command with --resume goes on" in answer.output


def test_cases_of_a_file(tmp_path):
    append_rows(tmp_path / "cases.jsonl", [row(case(2, 64), "fa3", 9.0)])
    answer = standin(tmp_path / "rows.jsonl", "--cases", tmp_path / "cases.jsonl", "--impl", "fa3")
    assert answer.exit_code == 0
    assert [r.the_case() for r in load_rows(tmp_path / "rows.jsonl")] == [case(2, 64)]


def test_shards_together_are_the_whole(tmp_path):
    for index in (1, 2, 3):
        assert standin(tmp_path / "rows.jsonl", "--shard", f"{index}/3").exit_code == 0
    rows = load_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 72 and {r.the_case() for r in rows} == set(grid.smoke())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "huge"], "--preset"),
        (["--shard", "3/2"], "--shard"),
        (["--shard", "x"], "--shard"),
        (["--only", "b7 "], "matches none"),
        (["--impl", "fa4"], "unknown fa4"),
        (["--cases", "/gone.json"], "no such file"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "many"], "--gpus"),
        (["--gpus", "1", "--shard", "1/2"], "at most one"),
        (["--device", "abacus"], "--device"),
    ],
)
def test_wrong_use_exits_2_with_one_line(tmp_path, words, said):
    answer = bench("--device", "standin", "--out", tmp_path / "rows.jsonl", *words)
    assert answer.exit_code == 2
    assert said in answer.stderr.splitlines()[-1] and "Traceback" not in answer.output


def test_fewer_than_100_iterations_are_refused(tmp_path):
    assert standin(tmp_path / "rows.jsonl", "--iterations", 99).exit_code == 2


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = bench()
    assert answer.exit_code == 2 and "torch sees none here" in answer.stderr


def test_a_results_file_of_another_schema_exits_2(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": 3}\n')
    answer = standin(path)
    assert answer.exit_code == 2 and "rows.jsonl, line 1: not a row of this schema" in answer.stderr
    assert path.read_text() == '{"tokens": 3}\n'


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (StandIn(faults=["copy is 30 % below its last value"]), "Self-test on standin failed: copy is 30 %"),
        (
            StandIn(outcomes={(grid.smoke()[0], "evenkv-cuda"): Outcome("wrong", "rel_err 0.9")}),
            "rel_err 0.9",
        ),
        (StandIn(outcomes={(grid.smoke()[0], "fa3"): KeyboardInterrupt()}), "Interrupted"),
    ],
)
def test_failed_checks_exit_1(tmp_path, monkeypatch, device, said):
    monkeypatch.setattr(devices, "StandIn", lambda: device)
    answer = standin(tmp_path / "rows.jsonl")
    assert answer.exit_code == 1 and said in answer.stderr
    assert device.log[-1] == "close"


def test_a_peer_that_is_wrong_or_missing_is_told_and_no_failure(tmp_path, monkeypatch):
    device = StandIn(
        missing={"fa3": "pip install tokenspeed-fa3"},
        outcomes={(grid.smoke()[0], "flashinfer-tc"): Outcome("wrong", "rel_err 0.9")},
    )
    monkeypatch.setattr(devices, "StandIn", lambda: device)
    answer = standin(tmp_path / "rows.jsonl")
    assert answer.exit_code == 0
    assert "Missing: fa3: pip install tokenspeed-fa3." in answer.output
    assert "12 refused" in answer.output and "1 wrong" in answer.output


def test_the_stand_in_does_not_write_into_results(tmp_path, monkeypatch):
    (tmp_path / "definitions" / "gqa_paged").mkdir(parents=True)
    monkeypatch.setenv("EVENKV_ROOT", str(tmp_path))
    assert bench("--device", "standin", "--impl", "fa3").exit_code == 0
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.jsonl")] == [
        "build/roofline/standin.jsonl"
    ]


def test_report_renders_and_measures_nothing(tmp_path, monkeypatch):
    (tmp_path / "definitions" / "gqa_paged").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text("<!-- roofline:begin -->\n<!-- roofline:end -->\n")
    (tmp_path / "docs" / "kernel.md").write_text("<!-- regimes:begin -->\n<!-- regimes:end -->\n")
    monkeypatch.setenv("EVENKV_ROOT", str(tmp_path))
    answer = bench("--report", "--json")
    assert answer.exit_code == 0
    files = [str(tmp_path / "docs" / name) for name in ("kernel.md", "results.md")]
    assert json.loads(answer.stdout)["files"] == files
    assert "not measured yet" in (tmp_path / "docs" / "results.md").read_text()


def test_one_process_a_gpu(tmp_path):
    answer = standin(tmp_path / "rows.jsonl", "--gpus", 2, "--only", "ps16", "--json")
    assert answer.exit_code == 0, answer.output
    rows = load_rows(tmp_path / "rows.jsonl")
    wanted = [c for c in grid.smoke() if c.page_size == 16]
    assert len(rows) == 6 * len(wanted) and {r.the_case() for r in rows} == set(wanted)
    assert len(json.loads(answer.stdout)["rows"]) == len(rows)


def test_a_gpu_whose_process_fails_is_named(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho more >&2; echo "GPU $CUDA_VISIBLE_DEVICES: $*" >&2; exit "$CUDA_VISIBLE_DEVICES"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(shards.sys, "executable", str(python))
    results = shards.run_shards(["--warm"], ["3", "0"], lambda what, share: None)
    assert [(r.gpu, r.exit_code) for r in results] == [("3", 3), ("0", 0)]
    assert results[0].said == "GPU 3: -m evenkv bench --warm --shard 1/2"


def test_processes_of_several_gpus_have_cores_of_their_own(monkeypatch, tmp_path):
    assert [shards.share_cores(range(9), number, 2) for number in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shards.share_cores([5, 3], 1, 2) == [3, 5], "one core each would be too few"
    asked = {}
    monkeypatch.setattr(shards.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(shards.os, "sched_setaffinity", asked.__setitem__, raising=False)
    monkeypatch.setattr(shards.sys, "executable", "/bin/true")
    shards.run_shards([], ["0", "1"], lambda what, share: None)
    assert list(asked.values()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_gpus_are_chosen_from_the_visible_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6")
    assert shards.visible_gpus() == ["4", "5", "6"]
    assert shards.choose_gpus("2", ["4", "5", "6"]) == ["4", "5"]
    assert shards.choose_gpus("all", ["4", "5"]) == ["4", "5"]
    for wanted, available in (("4", ["0"]), ("all", [])):
        with pytest.raises(EvenkvError, match="--gpus"):
            shards.choose_gpus(wanted, available)


def test_a_terminated_run_keeps_whole_rows_and_resumes(tmp_path):
    """The real signal on a real process, in the midst of its cases."""
    path = tmp_path / "rows.jsonl"
    script = (
        "import sys; from evenkv.bench import devices; from evenkv.bench.standin import StandIn\n"
        "devices.StandIn = lambda: StandIn(second_s=0.2)\n"
        "from evenkv.cli.main import main; main()"
    )
    words = ["bench", "--device", "standin", "--out", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "Interrupted" in said and "Traceback" not in said
    rows = load_rows(path)
    assert 0 < len(rows) < 72
    assert standin(path, "--resume").exit_code == 0
    assert len(load_rows(path)) == 72
