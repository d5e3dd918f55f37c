"""tools/kernel_lab.py: its edits must keep hitting the sources they name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import kernel_lab  # noqa: E402
import kernel_stamps  # noqa: E402
import kernel_trace  # noqa: E402
import kernel_variants  # noqa: E402

from evenkv.spec.family import SEED_DEFINITION, parse_name  # noqa: E402

INSTRUMENTS = [f"base{kernel_lab.STAMPED}", f"base{kernel_lab.TRACED}"]


@pytest.mark.parametrize("variant", [*kernel_variants.VARIANTS, *INSTRUMENTS])
def test_every_edit_hits_and_changes_the_solution(variant: str) -> None:
    spec = parse_name(SEED_DEFINITION)
    solution = kernel_lab.variant_solution(variant, spec)
    assert solution.name == f"evenkv_cuda_h5_kv1_d128_ps1_{variant}"
    sources = {source.path: source.content for source in solution.sources}
    for file, _, replacement in kernel_lab.edits_of(variant):
        assert replacement in sources[file]


def test_an_edit_that_misses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_variants.VARIANTS, "stale", [("tuning.cuh", "no such text", "")])
    with pytest.raises(SystemExit, match=r"stale: tuning\.cuh does not hold 'no such text'"):
        kernel_lab.variant_solution("stale", parse_name(SEED_DEFINITION))


def test_a_variant_of_a_kernel_folder_elsewhere(tmp_path: Path) -> None:
    spec = parse_name(SEED_DEFINITION)
    authored = kernel_lab.find_kernel(kernel_lab.Repository(Path()), "evenkv_cuda").folder
    shutil.copytree(authored, tmp_path / "evenkv_cuda")
    tuning = tmp_path / "evenkv_cuda" / "tuning.cuh"
    tuning.write_text(tuning.read_text() + "// elsewhere\n")
    solution = kernel_lab.variant_solution(f"base@{tmp_path}{kernel_lab.STAMPED}", spec)
    (source,) = (s.content for s in solution.sources if s.path == "tuning.cuh")
    assert source.endswith("// elsewhere\n")


def test_a_wrong_output_is_told_beside_a_right_lse() -> None:
    output, lse = torch.full((4, 128), 0.01), torch.full((4,), 12.0)
    assert kernel_lab.judged([output, lse], [output, lse], 0.876) == "88%"
    assert kernel_lab.judged([output * 1.01, lse], [output, lse], 0.876) == "WRONG 1e-02"
    assert kernel_lab.judged([output, lse + 1], [output, lse], 0.876) == "WRONG 8e-02"
    assert kernel_lab.judged([output * float("nan"), lse], [output, lse], 0.876) == "WRONG nan"


def test_cases_by_part_and_spelled_out() -> None:
    assert kernel_lab.choose_cases([]) == kernel_lab.lab_cases()
    names = [case.name for case in kernel_lab.choose_cases(["91 tokens", "b3 L77 kv4 fp8"])]
    assert names == ["91 tokens h5", "b3 L77 kv4 fp8"]
    with pytest.raises(ValueError, match="case '92 tokens': wanted one of the list"):
        kernel_lab.choose_cases(["92 tokens"])


def test_cases_are_distinct_and_the_captured_step_is_whole() -> None:
    cases = {case.name: case for case in kernel_lab.lab_cases()}
    assert len(cases) == len(kernel_lab.lab_cases())
    assert sum(cases["63 requests h5"].lengths) == 19134


def test_stamps_become_a_table_of_microseconds() -> None:
    printed = "\n".join(
        f"stamp {block} entry={1000 + block} schedule={2500 + 1000 * block} first_end={2**64 - 1}"
        for block in range(5)
    )
    for stage in kernel_stamps.STAGES:
        if f"{stage}=" not in printed:
            printed = printed.replace("entry=", f"{stage}=0 entry=")
    table = kernel_stamps.summarise(printed)
    assert "5 blocks" in table
    assert "     1.5     2.5     3.5     4.5     5.5" in table
    assert kernel_stamps.summarise("") == "no stamps"


def test_traces_become_a_list_of_cycles() -> None:
    assert kernel_trace.NAMES[:2] == ["entry", "ready"]
    printed = "trace 3 0 4294967290\ntrace 3 1 4\ntrace 0 0 7\n"
    wanted = "warp 0: entry 0 (+0)\nwarp 3: entry 0 (+0), ready 10 (+10)"
    assert kernel_trace.summarise(printed) == wanted
    assert kernel_trace.summarise("") == "no events"
