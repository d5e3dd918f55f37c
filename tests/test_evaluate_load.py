"""Reading and choosing: every bad input is one line that names the thing, exit code 2, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from evaluate_fixtures import (
    FLAT,
    LENGTHS,
    PAGED,
    add_solution,
    blob_file,
    make_repository,
    page_table,
    tree,
    workload_file,
)
from safetensors.numpy import save_file
from typer.testing import CliRunner

from evenkv.cli.main import app
from evenkv.evaluate.load import kernel_name, load_package, select_cases
from evenkv.evaluate.validate import request_lengths
from evenkv.paths import Repository
from evenkv.spec.family import parse_name


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(tmp_path)


def names(cases) -> set[str]:
    return {solution.name for case in cases for solution in case.solutions}


def test_both_trace_sets_are_loaded(repository):
    package = load_package(repository)
    assert sorted(package.definitions) == sorted([PAGED, FLAT])
    kernels = {kernel_name(s.name, PAGED) for s in package.solutions[PAGED]}
    assert kernels == {"evenkv_cuda", "flashinfer_tc", "evenkv_cpp", "fa3"}
    assert [w.uuid for w in package.workloads[PAGED]] == ["short", "mixed"]


def test_lengths_are_those_drawn(repository):
    package = load_package(repository)
    for definition, workloads in package.workloads.items():
        for workload in workloads:
            found = request_lengths(package.definitions[definition], workload, repository.root)
            assert found == LENGTHS[workload.uuid]


def test_choose_by_kernel_by_name_and_by_count(repository):
    package = load_package(repository)
    everything = select_cases(package)
    assert [case.workload.uuid for case in everything] == ["other", "short", "mixed"]
    assert names(select_cases(package, solutions=["evenkv_cuda"])) == {
        "evenkv_cuda_h5_kv1_d128_ps16",
        "evenkv_cuda_h5_kv1_d128_ps1",
    }
    one = select_cases(package, [PAGED], ["evenkv_cuda_h5_kv1_d128_ps16", "fa3"], 1)
    assert [case.workload.uuid for case in one] == ["short"]
    assert names(one) == {"evenkv_cuda_h5_kv1_d128_ps16", "fa3_h5_kv1_d128_ps16"}


def edit_workload(repository: Repository, change: Callable[[dict], None]) -> None:
    """Change the line of the workload `short`."""
    path = workload_file(repository, PAGED)
    first, *rest = path.read_text().splitlines()
    record = json.loads(first)
    change(record["workload"])
    path.write_text("\n".join([json.dumps(record), *rest]) + "\n")


def axis(name: str, value: int) -> Callable[[Repository], None]:
    return lambda repository: edit_workload(repository, lambda w: w["axes"].update({name: value}))


def table(name: str, values: list[int], dtype: str = "int32") -> Callable[[Repository], None]:
    def change(repository: Repository) -> None:
        tables = page_table(parse_name(PAGED), LENGTHS["short"])
        save_file({**tables, name: np.array(values, dtype)}, blob_file(repository, PAGED, "short"))

    return change


def write_blob(content: bytes) -> Callable[[Repository], None]:
    return lambda repository: blob_file(repository, PAGED, "short").write_bytes(content)


def solution_twice(repository: Repository) -> None:
    path = add_solution(repository, "evenkv_cuda", PAGED)
    path.with_name("copy.json").write_text(path.read_text())


def random_table(repository: Repository) -> None:
    edit_workload(repository, lambda w: w["inputs"].update(kv_indptr={"type": "random"}))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 120\n"
BLOB = f"{PAGED}_short.safetensors"
BAD = {
    "definition is no JSON": (
        lambda r: (r.definitions / f"{FLAT}.json").write_text("{"),
        [f"{FLAT}.json", "definition"],
    ),
    "solution breaks the schema": (
        lambda r: add_solution(r, "evenkv_cuda", PAGED).write_text('{"name": "x"}'),
        ["evenkv_cuda_h5_kv1_d128_ps16.json", "solution"],
    ),
    "solution is there twice": (
        solution_twice,
        ["solution evenkv_cuda_h5_kv1_d128_ps16 is there twice", "solutions/evenkv"],
    ),
    "definition of a solution is gone": (
        lambda r: (r.definitions / f"{FLAT}.json").unlink(),
        [f"{FLAT!r}", "flashinfer_tc_h5_kv1_d128_ps1.json"],
    ),
    "no definitions": (lambda r: [p.unlink() for p in r.definitions.iterdir()], ["definitions/gqa_paged"]),
    "workload file is gone": (lambda r: workload_file(r, PAGED).unlink(), [f"{PAGED}.jsonl"]),
    "workload line is cut off": (
        lambda r: workload_file(r, PAGED).write_text('{"definition": "'),
        [f"{PAGED}.jsonl", "line 1"],
    ),
    "definition is an LFS pointer": (
        lambda r: (r.definitions / f"{FLAT}.json").write_bytes(POINTER),
        [f"{FLAT}.json", "git lfs pull"],
    ),
    "blob is gone": (lambda r: blob_file(r, PAGED, "short").unlink(), ["short", BLOB]),
    "blob is an LFS pointer": (write_blob(POINTER), ["short", BLOB, "git lfs pull"]),
    "blob is cut off": (write_blob(b"\x50\0\0\0\0\0\0\0{"), ["short", BLOB]),
    "axis is missing": (
        lambda r: edit_workload(r, lambda w: w["axes"].pop("num_pages")),
        ["short", "num_pages"],
    ),
    "input is missing": (lambda r: edit_workload(r, lambda w: w["inputs"].pop("q")), ["short", "'q'"]),
    "sm_scale is random": (
        lambda r: edit_workload(r, lambda w: w["inputs"].update(sm_scale={"type": "random"})),
        ["short", "sm_scale"],
    ),
    "table is random": (random_table, ["short", "kv_indptr"]),
    "len_indptr disagrees with the file": (axis("len_indptr", 3), ["short", "kv_indptr", "[3]"]),
    "batch disagrees with kv_indptr": (axis("batch_size", 2), ["short", "kv_last_page_len", "[2]"]),
    "num_kv_indices disagrees with the file": (axis("num_kv_indices", 4), ["short", "kv_indices", "[4]"]),
    "num_kv_indices disagrees with kv_indptr": (table("kv_indptr", [0, 9]), ["short", "kv_indptr[-1] = 9"]),
    "kv_indptr falls": (table("kv_indptr", [1, 0]), ["short", "kv_indptr"]),
    "page id outside the pool": (table("kv_indices", [99]), ["short", "kv_indices", "99"]),
    "last page too long": (table("kv_last_page_len", [17]), ["short", "kv_last_page_len[0] is 17"]),
    "last page empty": (table("kv_last_page_len", [0]), ["short", "kv_last_page_len[0] is 0"]),
    "table of another dtype": (table("kv_indptr", [0, 1], "int64"), ["short", "kv_indptr", "I64"]),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_named_and_nothing_is_written(repository, monkeypatch, fault):
    spoil, wanted = BAD[fault]
    spoil(repository)
    before = tree(repository.root)
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    result = CliRunner().invoke(app, ["run", "--json"])
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(part in lines[0] for part in wanted), lines[0]
    assert result.stdout == ""
    assert tree(repository.root) == before


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--definitions", "gqa_paged_decode_h9_kv1_d128_ps1"], "gqa_paged_decode_h9_kv1_d128_ps1"),
        (["--solutions", "evenkv_rocm"], "evenkv_rocm"),
        (
            ["--definitions", PAGED, "--solutions", "evenkv_cuda_h5_kv1_d128_ps1"],
            "evenkv_cuda_h5_kv1_d128_ps1",
        ),
    ],
)
def test_unknown_names_exit_2(repository, monkeypatch, arguments, wanted):
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert wanted in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_fault_in_what_is_not_chosen_does_not_stop_a_run(repository):
    blob_file(repository, PAGED, "mixed").unlink()
    package = load_package(repository)
    for case in select_cases(package, [PAGED], workloads_per_definition=1):
        assert request_lengths(case.definition, case.workload, repository.root) == LENGTHS["short"]
