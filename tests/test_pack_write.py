"""Writing solutions and finding drift, on a folder of its own."""

from __future__ import annotations

import json
import os

import pytest
from flashinfer_bench.compile.utils import write_sources_to_path
from flashinfer_bench.data import Solution, TraceSet
from pack_fixtures import make_folder, manifest

from evenkv.errors import EvenkvError
from evenkv.pack.manifest import load_kernel
from evenkv.pack.render import pack_solution, source_hash
from evenkv.pack.write import drift, to_json, write_solutions
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, parse_name

SEED = parse_name("gqa_paged_decode_h5_kv1_d128_ps1")
SEED_FILE = f"solutions/evenkv/gqa_paged/{SEED.name}/adder_h5_kv1_d128_ps1.json"


@pytest.fixture
def kernel(tmp_path):
    return load_kernel(make_folder(tmp_path / "kernels"))


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    root.mkdir()
    return Repository(root)


def test_one_file_for_each_supported_definition_at_upstreams_depth(repo, kernel):
    result = write_solutions(repo, [kernel])
    wanted = {
        f"solutions/evenkv/gqa_paged/{spec.name}/adder_{spec.short_name}.json"
        for spec in FAMILY
        if kernel.supports(spec)
    }
    assert {str(p.relative_to(repo.root)) for p in repo.solutions.rglob("*") if p.is_file()} == wanted
    assert wanted <= set(result.written)
    assert SEED_FILE in wanted and len(wanted) > 5
    assert drift(repo, [kernel]) == []


def test_packing_twice_changes_nothing_and_gives_equal_bytes_elsewhere(repo, kernel, tmp_path):
    write_solutions(repo, [kernel])
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in repo.solutions.rglob("*.json")}
    again = write_solutions(repo, [kernel])
    assert again.written == again.removed == [] and again.unchanged == len(before)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in repo.solutions.rglob("*.json")} == before

    elsewhere = Repository(tmp_path / "elsewhere")
    write_solutions(elsewhere, [load_kernel(make_folder(tmp_path / "copy"))])
    for path, (content, _) in before.items():
        assert (elsewhere.root / path.relative_to(repo.root)).read_bytes() == content
        assert content.endswith(b"}\n")


def test_round_trip_keeps_bytes_folders_style_and_binding(repo, kernel, tmp_path):
    write_solutions(repo, [kernel])
    solution = Solution.model_validate_json((repo.root / SEED_FILE).read_text(encoding="utf-8"))
    write_sources_to_path(tmp_path / "out", solution.sources)
    for path in kernel.sources:
        assert (tmp_path / "out" / path).read_bytes() == (kernel.folder / path).read_bytes()
    assert (tmp_path / "out" / "definition.h").read_text() == "#pragma once\nconstexpr int kGroupSize = 5;\n"
    assert not (tmp_path / "out" / "notes.md").exists()
    assert [s.path for s in solution.sources] == list(kernel.packed_paths)
    assert solution.spec.destination_passing_style is True
    assert solution.spec.binding.value == "tvm-ffi"
    assert "-std=c++17 -O2" in solution.description
    assert source_hash(kernel) in solution.description


def test_value_returning_style_is_written_down(tmp_path, repo):
    # Upstream's default is True: a flag that is left out would turn the calling convention round.
    fields = manifest(destination_passing_style=False)
    kernel = load_kernel(make_folder(tmp_path / "kernels", fields))
    text = json.loads(to_json(pack_solution(kernel, SEED)))
    assert text["spec"]["destination_passing_style"] is False
    assert Solution.model_validate(text).spec.destination_passing_style is False


def test_drift_names_edited_deleted_and_extra_files(repo, kernel):
    write_solutions(repo, [kernel])
    edited = repo.root / SEED_FILE
    solution = json.loads(edited.read_text(encoding="utf-8"))
    solution["sources"][0]["content"] += "// edited in the wrong place\n"
    edited.write_text(json.dumps(solution), encoding="utf-8")
    others = sorted(p for p in repo.solutions.rglob("*.json") if p != edited)
    others[0].unlink()
    restyled = json.loads(others[1].read_text(encoding="utf-8"))
    others[1].write_text(json.dumps(restyled, indent=1), encoding="utf-8")
    flipped = json.loads(others[2].read_text(encoding="utf-8"))
    flipped["spec"]["destination_passing_style"] = False
    others[2].write_text(to_json(Solution.model_validate(flipped)), encoding="utf-8")
    extra = edited.with_name("adder_old.json")
    extra.write_bytes(others[3].read_bytes())

    lines = dict(line.split(": ", 1) for line in drift(repo, [kernel]))
    assert lines == {
        SEED_FILE: "differs in source binding.cpp",
        str(others[0].relative_to(repo.root)): "missing",
        str(others[1].relative_to(repo.root)): "differs in formatting",
        str(others[2].relative_to(repo.root)): "differs in field spec",
        str(extra.relative_to(repo.root)): "extra, no kernel packs to it",
    }

    result = write_solutions(repo, [kernel])
    assert result.removed == [str(extra.relative_to(repo.root))]
    assert drift(repo, [kernel]) == []


def test_drift_sees_an_edited_source_and_a_file_that_is_no_json(repo, kernel):
    write_solutions(repo, [kernel])
    (repo.root / SEED_FILE).write_text("{ half a fi", encoding="utf-8")
    assert drift(repo, [kernel]) == [f"{SEED_FILE}: differs in structure (not a solution file)"]
    write_solutions(repo, [kernel])
    with (kernel.folder / "detail" / "offset.h").open("ab") as file:
        file.write(b"// one more line\n")
    lines = drift(repo, [kernel])
    assert len(lines) == len(list(repo.solutions.rglob("*.json")))
    assert all(line.endswith("differs in source detail/offset.h") for line in lines)


def test_a_kernel_that_is_gone_takes_its_files_and_folders_along(repo, kernel):
    write_solutions(repo, [kernel])
    assert all("extra" in line for line in drift(repo, [])) and drift(repo, [])
    write_solutions(repo, [])
    assert not repo.solutions.exists()


def test_files_that_pack_did_not_write_are_kept(repo, kernel):
    write_solutions(repo, [kernel])
    foreign = (repo.root / SEED_FILE).with_name("by_hand.json")
    foreign.write_text("{}", encoding="utf-8")
    stranger = repo.solutions / "stranger" / "gqa_paged" / SEED.name / "fast.json"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("{}", encoding="utf-8")
    before = (repo.root / SEED_FILE).read_bytes()
    with pytest.raises(EvenkvError, match="by_hand.json"):
        write_solutions(repo, [kernel])
    assert foreign.exists() and (repo.root / SEED_FILE).read_bytes() == before
    foreign.unlink()
    write_solutions(repo, [kernel])
    assert stranger.read_text(encoding="utf-8") == "{}"
    assert drift(repo, [kernel]) == []


def test_a_broken_kernel_leaves_the_disk_as_it_was(repo, kernel, tmp_path):
    write_solutions(repo, [kernel])
    before = {p: p.read_bytes() for p in repo.root.rglob("*.json")}
    broken = make_folder(tmp_path / "kernels", manifest(name="broken"))
    (broken / "definition.h.j2").write_text("{{ spec.absent }}", encoding="utf-8")
    with (kernel.folder / "binding.cpp").open("ab") as file:
        file.write(b"// newer\n")
    with pytest.raises(EvenkvError, match="absent"):
        write_solutions(repo, [kernel, load_kernel(broken)])
    assert {p: p.read_bytes() for p in repo.root.rglob("*.json")} == before


def test_optional_kernels_go_to_a_trace_set_that_shares_the_rest(repo, kernel, tmp_path):
    optional = load_kernel(make_folder(tmp_path / "kernels", manifest(name="peer", trace_set="optional")))
    (repo.definitions).mkdir(parents=True)
    write_solutions(repo, [kernel, optional])
    assert not list(repo.solutions.rglob("peer_*")) and list((repo.optional / "solutions").rglob("peer_*"))
    for name in ("definitions", "workloads", "blob"):
        assert os.readlink(repo.optional / name) == f"../{name}"
    assert (repo.optional / "definitions" / "gqa_paged").is_dir()
    main, other = TraceSet.from_path(str(repo.root)), TraceSet.from_path(str(repo.optional))
    assert {s.name for s in main.solutions[SEED.name]} == {"adder_h5_kv1_d128_ps1"}
    assert {s.name for s in other.solutions[SEED.name]} == {"peer_h5_kv1_d128_ps1"}

    (repo.optional / "blob").unlink()
    assert drift(repo, [kernel, optional]) == ["optional/blob: missing link to ../blob"]
