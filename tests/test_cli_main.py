"""The command line itself: help, exit codes, several values to one option, doctor."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import evenkv
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


@pytest.mark.parametrize(
    ("words", "wanted", "got"),
    [
        (["run", "--minutes", "-1"], "0 or more", "-1"),
        (["run", "--minutes", "nan"], "0 or more", "nan"),
        (["run", "--minutes", "abc"], "a number", "abc"),
        (["run", "--workloads", "1.5"], "a whole number", "1.5"),
        (["bench", "--iterations", "5"], "100 or more", "5"),
        (["pack", "--only", "x"], "one of 'definitions', 'solutions'", "x"),
        (["workloads", "synth", "--count", "a"], "a whole number", "a"),
    ],
)
def test_a_bad_value_is_one_line_with_option_wanted_got_and_help(words, wanted, got):
    result = CliRunner().invoke(app, words)
    *command, option, _ = words
    assert result.exit_code == 2 and result.stdout == ""
    line = f"evenkv: {option}: wanted {wanted}, got {got!r}. See `evenkv {' '.join(command)} --help`.\n"
    assert result.stderr == line


def test_a_missing_argument_is_still_named():
    result = CliRunner().invoke(app, ["workloads", "import"])
    assert result.exit_code == 2 and "Missing argument" in result.stderr


def test_version_is_the_package_s(monkeypatch):
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"evenkv {importlib.metadata.version('evenkv')}\n")
    assert importlib.metadata.version("evenkv") == evenkv.__version__, "pyproject.toml and __init__.py"

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("evenkv.cli.main.importlib.metadata.version", not_installed)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"evenkv {evenkv.__version__}\n"


def test_an_interruption_is_one_line_in_every_command(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("evenkv.cli.doctor.inspect_machine", interrupted)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("evenkv: Interrupted") and result.stderr.count("\n") == 1


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
    wanted += " NVML matplotlib ray"
    assert set(wanted.split()) <= set(parts)
    assert all(part["found"] or part["remedy"] for part in report["parts"])
    assert parts["flashinfer-bench"]["found"].startswith("0.")


def test_doctor_says_when_nothing_can_run(monkeypatch):
    parts = [environment.Part("torch", None, "everything", "pip install torch")]
    monkeypatch.setattr("evenkv.cli.doctor.inspect_machine", lambda: parts)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "pip install torch" in result.stdout


def test_doctor_installs_as_the_page_does(monkeypatch):
    """Pinned versions, and brackets that the table shows as they are."""
    page = (Path(__file__).parents[1] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    for command in (environment.INSTALL, environment.INSTALL_FA3):
        assert command in page
    monkeypatch.setattr(environment, "_package", lambda distribution, module: None)
    parts = environment.inspect_machine()
    remedies = [part.remedy for part in parts if part.remedy.startswith("pip install")]
    assert len(remedies) >= 9
    assert all("-c constraints.txt" in remedy or "==" in remedy for remedy in remedies)
    monkeypatch.setattr("evenkv.cli.doctor.inspect_machine", lambda: parts)
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert environment.INSTALL in shown and environment.INSTALL_FA3 in shown and "'.[ray]'" in shown


def test_json_has_no_nan(capsys):
    output.print_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5]}


def test_help_does_not_wait_for_torch() -> None:
    """Importing it takes seconds."""
    check = "import sys, evenkv.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
