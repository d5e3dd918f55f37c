"""tools/triton_lab.py: its edits must keep hitting the sources they name, and its check must run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import triton_lab  # noqa: E402
from kernel_lab import choose_cases  # noqa: E402

from evenkv.spec.family import SEED_DEFINITION, parse_name  # noqa: E402


@pytest.mark.parametrize("variant", triton_lab.VARIANTS)
def test_every_edit_hits_and_changes_the_solution(variant: str) -> None:
    spec = parse_name(SEED_DEFINITION)
    packed = triton_lab.solution(variant, spec)
    assert packed.name == f"evenkv_triton_h5_kv1_d128_ps1_{variant}"
    sources = {source.path: source.content for source in packed.sources}
    for file, text, replacement in triton_lab.VARIANTS[variant]:
        assert text not in sources[file].splitlines()
        assert replacement in sources[file].splitlines()


def test_an_edit_that_misses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(triton_lab.VARIANTS, "stale", [("tuning.py", "no such text", "")])
    with pytest.raises(SystemExit, match=r"stale: tuning\.py does not hold 'no such text'"):
        triton_lab.solution("stale", parse_name(SEED_DEFINITION))
    with pytest.raises(ValueError, match="not enough values"):
        triton_lab.number("NO_SUCH_NUMBER", 1)


def test_every_case_is_one_that_the_lab_knows() -> None:
    assert [case.name for case in choose_cases(list(triton_lab.CASES))] == list(triton_lab.CASES)


def test_check_runs_in_the_interpreter() -> None:
    """In a process of its own: Triton reads its switch when it is imported."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, str(TOOLS / "triton_lab.py"), "--check", "--variants", "base"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert len(ran.stdout.splitlines()) == ran.stdout.count("right") == 3
