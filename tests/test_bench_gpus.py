"""`evenkv bench --gpus`: what it says before and after, a process that fails, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenkv.bench import grid, shards
from evenkv.bench.record import load_rows
from evenkv.cli.main import app

SOURCES = Path(__file__).resolve().parents[1] / "src"
# Stands for `python -m evenkv`, on a stand-in that sleeps for the time that a GPU would take.
SLOW = """#!/bin/sh
shift 2
echo $$ >>{log}
exec {python} -c "
from evenkv.bench import devices
from evenkv.bench.standin import StandIn
devices.StandIn = lambda: StandIn(second_s=0.3)
from evenkv.cli.main import main
main()" "$@"
"""


def gpus(path: Path, *words: object):
    words = ("bench", "--device", "standin", "--out", path, "--gpus", 2, *words)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_the_header_says_what_is_measured_where_and_how_long(tmp_path):
    path = tmp_path / "rows.jsonl"
    answer = gpus(path, "--only", "ps16 bf16")
    assert answer.exit_code == 0, answer.output
    assert "5 cases, 6 implementations on 2 GPUs (standin): about " in answer.stderr
    assert f"Rows go to {path}." in answer.stderr
    assert "Times are a model's: nothing is measured." in answer.stderr
    assert "Times are a model's: nothing was measured." in answer.stdout
    again = gpus(path, "--resume", "--json")
    assert "7 of 12 cases (5 are there)" in again.stderr
    assert json.loads(again.stdout)["cases_there"] == 5 and len(load_rows(path)) == 72


def test_what_the_time_did_not_suffice_for_is_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert gpus(path, "--only", "h5/1").exit_code == 0
    answer = gpus(path, "--minutes", 0, "--resume")
    assert answer.exit_code == 0, answer.output
    assert "9 cases left: the same command with --resume goes on." in answer.stdout
    # Earlier rows are no part of a run that measures anew.
    left = json.loads(gpus(path, "--minutes", 0, "--json").stdout)["left"]
    assert sorted(left) == sorted(c.name for c in grid.smoke())


def test_a_gpu_whose_process_fails_fails_the_run_and_leaves_its_cases(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in *2/2*) echo "GPU 1 fell off the bus." >&2; exit 1;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(shards.sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    path = tmp_path / "rows.jsonl"
    answer = gpus(path)
    assert answer.exit_code == 1
    assert "GPU 1 (shard 2): GPU 1 fell off the bus." in answer.stderr
    done = len({r.the_case() for r in load_rows(path)})
    assert 0 < done < 12
    assert f"{12 - done} case" in answer.stdout and "left: the same command" in answer.stdout


def test_too_many_stand_ins_are_told_what_they_are(tmp_path):
    answer = gpus(tmp_path / "rows.jsonl", "--gpus", 99)
    assert answer.exit_code == 2 and "got '99'" in answer.stderr
    assert "each core of this machine for a GPU" in answer.stderr and "doctor" not in answer.stderr


def test_shards_get_every_option(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shards, "run_shards", lambda words, *rest: asked.append(words) or [])
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([grid.smoke()[0].to_json()]))
    words = ("--cases", cases, "--impl", "fa3,evenkv-cuda", "--minutes", 2, "--iterations", 150, "--resume")
    path = tmp_path / "warm" / "rows.jsonl"
    assert gpus(path, *words, "--warm").exit_code == 0
    # A process must take them: none may be left out, and none contradict another.
    assert asked == [
        [
            f"--cases={cases}",
            "--impl=fa3,evenkv-cuda",
            "--minutes=2.0",
            "--iterations=150",
            f"--out={path}",
            "--device=standin",
            "--resume",
            "--warm",
            "--json",
        ]
    ]
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    answer = gpus(path, *words, "--warm", "--json")
    assert answer.exit_code == 0, answer.output
    assert len(load_rows(path)) == 2


def test_a_terminated_parent_stops_its_processes_and_keeps_their_rows(tmp_path):
    """The real signal on a real process whose children are in the midst of their cases."""
    path, log, python = tmp_path / "rows.jsonl", tmp_path / "pids", tmp_path / "python"
    python.write_text(SLOW.format(log=log, python=sys.executable))
    python.chmod(0o755)
    script = (
        "import os, sys; os.cpu_count = lambda: 2; from evenkv.bench import shards\n"
        f"shards.sys.executable = {str(python)!r}\n"
        "from evenkv.cli.main import main; main()"
    )
    words = ["bench", "--device", "standin", "--out", str(path), "--gpus", "2"]
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    said = parent.communicate(timeout=60)[1]
    assert parent.returncode == 1 and "Traceback" not in said
    assert f"Interrupted; finished rows are in {path}." in said and "--resume" in said
    children = [int(line) for line in log.read_text().split()]
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    rows = load_rows(path)
    assert 0 < len(rows) < 72 and len(rows) % 6 == 0


def _stubborn(folder: Path) -> Path:
    python = folder / "stubborn"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f'open("{folder}/ready", "w").close()\ntime.sleep(600)\'\n'
    )
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("second_time", [False, True])
def test_processes_that_do_not_stop_are_made_to(tmp_path, monkeypatch, second_time):
    started = []
    real = subprocess.Popen

    class Noted(real):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

        def wait(self, timeout=None):
            if second_time and timeout:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(shards.subprocess, "Popen", Noted)
    monkeypatch.setattr(shards, "_STOP_S", 60.0 if second_time else 0.2)
    monkeypatch.setattr(shards.sys, "executable", str(_stubborn(tmp_path)))

    def interrupt(what, share):
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shards.run_shards([], ["0"], interrupt)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_an_interruption_while_processes_start_stops_the_first_ones(monkeypatch):
    started = []
    real = subprocess.Popen

    def start(*arguments, **options):
        if started:
            raise KeyboardInterrupt
        started.append(real(["sleep", "600"]))
        return started[0]

    monkeypatch.setattr(shards.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        shards.run_shards([], ["0", "1"], lambda what, share: None)
    assert started[0].returncode == -signal.SIGTERM
