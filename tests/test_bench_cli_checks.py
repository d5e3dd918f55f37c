"""What `evenkv bench` refuses before it measures, what it tells, and what it does when a device is lost."""

from __future__ import annotations

import json
import os
import time

import pytest
from bench_fixtures import H200, case, row
from typer.testing import CliRunner

from evenkv.bench import devices, grid, plan
from evenkv.bench.protocol import DeviceFacts, DeviceLost
from evenkv.bench.record import append_rows, load_rows
from evenkv.bench.standin import GPU, StandIn
from evenkv.cli.main import app

STANDIN = DeviceFacts(GPU, None, None, None)


def bench(*words: object):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def standin(path, *words: object):
    return bench("--device", "standin", "--out", path, *words)


@pytest.fixture
def device(monkeypatch):
    """The stand-in that the command opens."""
    made = StandIn()
    monkeypatch.setattr(devices, "StandIn", lambda: made)
    return made


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "definitions" / "gqa_paged").mkdir(parents=True)
    monkeypatch.setenv("EVENKV_ROOT", str(tmp_path))
    return tmp_path


def test_help_says_what_a_pattern_matches_and_which_clusters_there_are():
    said = " ".join(bench("--help").output.split())
    assert "contains this or, with * or ?, matches it from end to end" in said
    assert '"auto"' in said


@pytest.mark.parametrize("way", [(), ("--gpus", 1), ("--ray", "local")])
def test_out_that_is_a_directory_is_refused_before_anything_is_measured(tmp_path, device, way):
    answer = standin(tmp_path, *way)
    assert answer.exit_code == 2 and not device.log
    assert answer.stderr.count("\n") == 1 and f"--out {tmp_path}: wanted a file" in answer.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a-file/rows.jsonl", "a-file is a file"),
        ("x" * 300, "cannot be written"),
        ("pipe", "got a pipe"),
        ("loop", "cannot be written"),
        ("link", "a-file is a file"),
    ],
)
def test_out_that_cannot_be_written_is_refused(tmp_path, device, name, said):
    (tmp_path / "a-file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(tmp_path / "a-file" / "x")
    before = sorted(tmp_path.iterdir())
    answer = standin(tmp_path / name)
    assert answer.exit_code == 2 and not device.log and "Traceback" not in answer.output
    assert f"--out {tmp_path / name}: " in answer.stderr and said in answer.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_out_without_the_right_to_write_is_refused(tmp_path, device):
    for place, mode in ((tmp_path / "closed", 0o500), (tmp_path / "rows.jsonl", 0o400)):
        if place.suffix:
            place.touch()
        else:
            place.mkdir()
        place.chmod(mode)
        path = place if place.suffix else place / "new" / "rows.jsonl"
        answer = standin(path)
        assert answer.exit_code == 2 and "Permission denied" in answer.stderr and not device.log


def test_a_results_folder_that_cannot_be_made_is_refused(root, device):
    (root / "build").touch()
    answer = bench("--device", "standin")
    assert answer.exit_code == 2 and "build is a file" in answer.stderr
    assert not any(line.startswith("measure") for line in device.log)


def test_warm_rows_lie_in_a_folder_named_warm_and_no_others(tmp_path, device):
    cold, warm = tmp_path / "rows.jsonl", tmp_path / "warm" / "rows.jsonl"
    answer = standin(cold, "--warm")
    assert answer.exit_code == 2 and f"For example --out {warm}." in answer.stderr
    answer = standin(warm)
    assert answer.exit_code == 2 and "Add --warm" in answer.stderr
    assert not device.log and not warm.parent.exists()
    assert standin(warm, "--warm", "--only", "h5/1").exit_code == 0
    assert len(load_rows(warm)) == 18


def test_the_stand_ins_warm_rows_have_a_folder_too(root):
    assert bench("--device", "standin", "--warm", "--only", "h5/1").exit_code == 0
    assert bench("--device", "standin", "--warm", "--only", "h5/1", "--gpus", 1, "--resume").exit_code == 0
    found = [path.relative_to(root).as_posix() for path in root.rglob("*.jsonl")]
    assert found == ["build/roofline/warm/standin.jsonl"]


@pytest.mark.parametrize("way", [(), ("--gpus", 1), ("--ray", "local")])
def test_modelled_rows_do_not_go_among_measured_ones(tmp_path, device, way):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(case(), "fa3", 900.0, H200)])
    before = path.read_bytes()
    answer = standin(path, *way)
    assert answer.exit_code == 2 and f"{path}: wanted a file of the stand-in's rows" in answer.stderr
    assert "NVIDIA H200" in answer.stderr and path.read_bytes() == before


@pytest.mark.parametrize("way", [(), ("--gpus", 1), ("--ray", "local")])
def test_measured_rows_do_not_go_among_modelled_ones(tmp_path, monkeypatch, way):
    class Card(StandIn):
        def facts(self):
            return H200

    path, card = tmp_path / "rows.jsonl", Card()
    append_rows(path, [row(case(), "fa3", 900.0, STANDIN)])
    before = path.read_bytes()
    monkeypatch.setattr(devices, "open_device", lambda kind: card)
    monkeypatch.setattr("evenkv.bench.shards.visible_gpus", lambda: ["0"])
    answer = bench("--out", path, *way)
    assert answer.exit_code == 2 and f"{path}: wanted a file of measured rows" in answer.stderr
    assert path.read_bytes() == before and "measure" not in "".join(card.log)


def test_a_case_beyond_all_memory_is_skipped_at_once(tmp_path):
    huge = case(100_000_000, 131072)
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(huge.to_json()))
    started = time.monotonic()
    answer = standin(tmp_path / "rows.jsonl", "--cases", path)
    # Lists of its lengths would be 800 MB each, and a minute.
    assert answer.exit_code == 0 and time.monotonic() - started < 10
    assert {r.status for r in load_rows(tmp_path / "rows.jsonl")} == {"skipped"}
    assert "1 case, 6 implementations" in answer.stderr


def test_an_interruption_says_whether_rows_were_written(tmp_path, device):
    path = tmp_path / "rows.jsonl"
    first, second = plan.order(grid.smoke(), in_rounds=False)[:2]
    device.outcomes = {(first, "fa3"): KeyboardInterrupt()}
    answer = standin(path)
    assert answer.exit_code == 1 and "no row was written" in answer.stderr
    assert "rows are in" not in answer.stderr and not path.exists()
    device.outcomes = {(second, "fa3"): KeyboardInterrupt()}
    answer = standin(path)
    assert answer.exit_code == 1 and f"Interrupted; finished rows are in {path}." in answer.stderr


def test_an_interruption_before_the_run_is_told_too(monkeypatch):
    def interrupt(kind):
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "open_device", interrupt)
    answer = bench()
    assert answer.exit_code == 1 and "no row was written" in answer.stderr


def test_a_lost_device_exits_1_and_keeps_rows(tmp_path, device):
    path = tmp_path / "rows.jsonl"
    first, second = plan.order(grid.smoke(), in_rounds=False)[:2]
    device.outcomes = {(second, "fa3"): DeviceLost("GPU 0 fell off the bus.")}
    answer = standin(path)
    assert answer.exit_code == 1
    assert "evenkv: GPU 0 fell off the bus. Mend the GPU, then go on" in answer.stderr
    assert {r.the_case() for r in load_rows(path)} == {first}
    assert device.log[-1] == "close"


def test_a_disk_that_fills_up_ends_the_run_with_a_line(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evenkv.bench.record.os.fsync", full)
    answer = standin(tmp_path / "rows.jsonl")
    assert answer.exit_code == 1 and "Traceback" not in answer.output
    assert ": cannot be written: No space left on device. Free space" in answer.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--impl", ""], "--impl: wanted some of evenkv-cuda"),
        (["--impl", " , "], "--impl: wanted some of evenkv-cuda"),
        (["--ray", "local", "--impl", "fa4"], "unknown fa4"),
        (["--gpus", "1", "--impl", "fa4"], "unknown fa4"),
        (["--cases", "x.json", "--preset", "smoke"], "--cases and --preset"),
        (["--shard", "1/2", "--ray", "local"], "got --shard and --ray"),
        (["--shard", "²/2"], "--shard: wanted i/n"),
        (["--report"], "--report: wanted alone or with --json, got --out, --device too"),
        (["--cases", "."], "--cases .: wanted a file, got a directory"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, device, words, said):
    answer = standin(tmp_path / "rows.jsonl", *words)
    assert answer.exit_code == 2 and said in answer.stderr and "Traceback" not in answer.output
    assert not device.log


def test_report_and_list_are_not_both_done():
    answer = bench("--report", "--list", "--resume")
    assert answer.exit_code == 2 and "got --resume, --list too" in answer.stderr


def test_names_may_be_given_twice_and_with_blanks(tmp_path):
    assert standin(tmp_path / "x.jsonl", "--impl", "fa3, evenkv-cuda,fa3", "--only", "ps1 ").exit_code == 0
    assert len(load_rows(tmp_path / "x.jsonl")) == 2 * len(
        {r.the_case() for r in load_rows(tmp_path / "x.jsonl")}
    )


def test_the_list_leaves_out_what_is_there(tmp_path, device):
    path = tmp_path / "rows.jsonl"
    device.missing = {"fa3": "not installed"}
    assert standin(path, "--only", "h5/1").exit_code == 0
    append_rows(path, [row(grid.smoke()[0], "fa3", 900.0, STANDIN)])
    answer = standin(path, "--list", "--resume")
    assert answer.exit_code == 0 and len(answer.stdout.splitlines()) == 9
    assert "3 of 12 cases are there already." in answer.stderr
    device.missing = {}  # it has come since: those rows settle nothing for it
    assert len(json.loads(standin(path, "--list", "--resume", "--json").stdout)) == 12
    ours = ("--impl", "evenkv-cuda")
    assert len(standin(path, "--list", "--resume", *ours, "--ray", "local").stdout.splitlines()) == 9
    assert len(standin(path, "--list").stdout.splitlines()) == 12


def test_the_header_counts_what_is_measured(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert "3 cases, 6 implementations on standin" in standin(path, "--only", "h5/1").stderr
    answer = standin(path, "--resume")
    assert "9 of 12 cases (3 are there), 6 implementations on standin: about " in answer.stderr
    assert "Times are a model's: nothing is measured." in answer.stderr
    assert "Times are a model's: nothing was measured." in answer.stdout
    answer = standin(path, "--cases", path, "--only", "ps64", "--impl", "fa3", "--minutes", 0)
    assert "1 case, 1 implementation on" in answer.stderr
    assert "1 case left: the same command" in answer.stdout


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_torn_line_is_told_once(tmp_path, resume):
    path = tmp_path / "rows.jsonl"
    assert standin(path, "--only", "h5/1").exit_code == 0
    with path.open("a") as file:
        file.write('{"case": {"ba')
    answer = standin(path, *resume)
    assert answer.exit_code == 0
    assert answer.output.count("cut off") == 1
    load_rows(path)
