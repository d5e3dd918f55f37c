"""`evenkv pack`: exit codes, messages and JSON."""

from __future__ import annotations

import json
import shutil

import pytest
import typer
from pack_fixtures import make_folder
from typer.testing import CliRunner

from evenkv.cli.pack import pack
from evenkv.pack import write
from evenkv.pack.manifest import load_kernel
from evenkv.spec.family import FAMILY

SOLUTION = "solutions/evenkv/gqa_paged/gqa_paged_decode_h5_kv1_d128_ps1/adder_h5_kv1_d128_ps1.json"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command on a repository of its own whose one kernel is a small one."""
    kernel = load_kernel(make_folder(tmp_path / "kernels"))
    monkeypatch.setattr(write, "load_kernels", lambda repo: [kernel])
    root = tmp_path / "repo"
    (root / "definitions" / "gqa_paged").mkdir(parents=True)
    monkeypatch.setenv("EVENKV_ROOT", str(root))
    app = typer.Typer()
    app.command()(pack)

    def invoke(*arguments):
        return CliRunner().invoke(app, list(arguments))

    invoke.root = root
    return invoke


def test_check_fails_before_pack_and_passes_after(run):
    before = run("--check")
    assert before.exit_code == 1 and f"{SOLUTION}: missing" in before.output
    assert not (run.root / "solutions").exists(), "--check writes nothing"
    assert run().exit_code == 0
    after = run("--check")
    assert after.exit_code == 0 and "No drift" in after.output


def test_check_names_what_drifted_and_what_to_do(run):
    run()
    (run.root / SOLUTION).write_text("{}", encoding="utf-8")
    definition = run.root / "definitions/gqa_paged/gqa_paged_decode_h6_kv1_d128_ps64.json"
    definition.unlink()
    result = run("--check")
    assert result.exit_code == 1
    assert f"{SOLUTION}: differs" in result.output
    assert "gqa_paged_decode_h6_kv1_d128_ps64.json: missing" in result.output
    assert "2 generated files drifted" in result.output and "run `evenkv pack`" in result.output

    report = json.loads(run("--check", "--json").stdout)
    assert report["ok"] is False
    assert [len(report["drift"][part]) for part in ("definitions", "solutions")] == [1, 1]
    assert run("--check", "--only", "solutions").output.count("differs") == 1
    assert "missing" not in run("--check", "--only", "solutions").output

    assert run("--only", "definitions").exit_code == 0
    assert definition.exists() and (run.root / SOLUTION).read_text() == "{}"
    assert run("--check").exit_code == 1
    assert run("--only", "solutions").exit_code == 0
    assert run("--check").exit_code == 0


def test_json_report_lists_what_was_written_and_removed(run):
    first = json.loads(run("--json").stdout)
    assert SOLUTION in first["solutions"]["written"]
    assert len(first["definitions"]["written"]) == len(FAMILY)
    stale = (run.root / SOLUTION).with_name("adder_gone.json")
    shutil.copy(run.root / SOLUTION, stale)
    second = json.loads(run("--json").stdout)
    assert second["definitions"]["written"] == [] and second["solutions"]["written"] == []
    assert second["solutions"]["removed"] == [str(stale.relative_to(run.root))]
    assert second["solutions"]["unchanged"] == len(first["solutions"]["written"]) - 3


def test_an_unknown_part_is_wrong_use(run):
    assert run("--only", "kernels").exit_code == 2
