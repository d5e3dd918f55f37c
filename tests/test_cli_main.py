"""The command line itself: help, exit codes, several values to one option, doctor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from evenkv.cli import output
from evenkv.cli.main import app, repeat_options
from evenkv.evaluate import environment


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("doctor", "run", "pack", "workloads"):
        assert f"  {command} " in result.output


@pytest.mark.parametrize("command", [["doctor"], ["run"], ["pack"]])
def test_every_command_has_help_and_json(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "--json" in result.output


def test_wrong_use_exits_2():
    assert CliRunner().invoke(app, ["run", "--workloads", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["run", "--no-such-option"]).exit_code == 2
    assert CliRunner().invoke(app, ["run", "--definitions"]).exit_code == 2
    assert CliRunner().invoke(app, ["no-such-command"]).exit_code == 2


def test_no_package_is_one_line_without_a_traceback(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "evenkv", "run"],
        capture_output=True,
        text=True,
        env={"EVENKV_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
    )
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.startswith("evenkv: No evenkv package found") and answer.stderr.count("\n") == 1


def test_options_take_several_values():
    assert repeat_options(["--definitions", "a", "b", "--resume", "--solutions", "c"]) == [
        "--definitions",
        "a",
        "--definitions",
        "b",
        "--resume",
        "--solutions",
        "c",
    ]
    assert repeat_options(["--workloads", "2", "x"]) == ["--workloads", "2", "x"]


def test_doctor_json_names_every_part_and_how_to_get_what_is_missing():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"]
    parts = {part["name"]: part for part in report["parts"]}
    wanted = "python GPU driver nvcc g++ torch triton flashinfer flashinfer-bench tvm-ffi fa3 cupti-python"
    assert set(wanted.split()) <= set(parts)
    assert all(part["found"] or part["remedy"] for part in report["parts"])
    assert parts["flashinfer-bench"]["found"].startswith("0.")


def test_doctor_says_when_nothing_can_run(monkeypatch):
    parts = [environment.Part("torch", None, "everything", "pip install torch")]
    monkeypatch.setattr("evenkv.cli.doctor.inspect_machine", lambda: parts)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "pip install torch" in result.stdout


def test_json_has_no_nan(capsys):
    output.print_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5]}


def test_help_does_not_wait_for_torch() -> None:
    """Importing it takes seconds."""
    check = "import sys, evenkv.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
