"""The committed solutions: what the kernel folders give, loadable by flashinfer-bench, byte for byte."""

from __future__ import annotations

from collections import Counter

import pytest
from flashinfer_bench.compile.utils import write_sources_to_path
from flashinfer_bench.data import Solution, TraceSet
from flashinfer_bench.data.json_utils import load_json_file

from evenkv.pack.manifest import load_kernels
from evenkv.pack.render import pack_solution, source_hash
from evenkv.pack.write import drift, solution_path
from evenkv.paths import find_repository
from evenkv.spec.family import FAMILY

REPO = find_repository()
KERNELS = {kernel.name: kernel for kernel in load_kernels(REPO)}


@pytest.fixture(scope="module")
def trace_sets():
    return TraceSet.from_path(str(REPO.root)), TraceSet.from_path(str(REPO.optional))


def test_no_drift():
    assert drift(REPO) == [], "run `evenkv pack` and commit what it writes"


def test_the_package_ships_the_kernels_it_speaks_of():
    ours = {"evenkv_cuda", "evenkv_triton", "evenkv_cpp"}
    peers = {"flashinfer_tc", "flashinfer_cc", "fa3", "torch_reference"}
    assert ours | peers <= set(KERNELS)
    assert {KERNELS[name].author for name in ours} == {"evenkv"}
    assert {KERNELS[name].author for name in peers} == {"baseline"}
    optional = {name for name, kernel in KERNELS.items() if kernel.manifest.trace_set == "optional"}
    assert optional == {"evenkv_cpp", "fa3"}


@pytest.mark.parametrize("name", ["evenkv_cuda", "evenkv_triton", "evenkv_cpp", "torch_reference"])
def test_these_kernels_support_the_whole_family(name):
    assert [spec.name for spec in FAMILY if not KERNELS[name].supports(spec)] == []


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_round_trip_of_every_packed_solution(name, tmp_path):
    kernel = KERNELS[name]
    specs = [spec for spec in FAMILY if kernel.supports(spec)]
    assert specs, f"{name} supports no definition"
    for spec in specs:
        packed = load_json_file(Solution, solution_path(REPO, kernel, pack_solution(kernel, spec)))
        assert (packed.definition, packed.author) == (spec.name, kernel.manifest.author)
        assert packed.spec.destination_passing_style is kernel.manifest.destination_passing_style
        binding = packed.spec.binding.value if packed.spec.binding else None
        assert binding == kernel.manifest.binding
        assert packed.spec.entry_point == kernel.manifest.entry_point
        assert source_hash(kernel) in packed.description

        folder = tmp_path / spec.name
        write_sources_to_path(folder, packed.sources)
        written = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert written == {*kernel.sources, *kernel.manifest.config_templates}
        for path in kernel.sources:
            assert (folder / path).read_bytes() == (kernel.folder / path).read_bytes(), path


def test_a_packed_python_source_parses(tmp_path):
    checked = 0
    for kernel in KERNELS.values():
        for spec in FAMILY:
            if kernel.manifest.language in ("python", "triton") and kernel.supports(spec):
                for source in pack_solution(kernel, spec).sources:
                    if source.path.endswith(".py"):
                        compile(source.content, f"{kernel.name}/{source.path}", "exec")
                        checked += 1
    assert checked > 0


def test_both_trace_sets_load_and_every_solution_has_its_definition(trace_sets):
    for trace_set in trace_sets:
        assert set(trace_set.definitions) == {spec.name for spec in FAMILY}
        assert trace_set.solutions
        assert set(trace_set.solutions) <= set(trace_set.definitions)


def test_solution_names_are_unique_over_both_trace_sets(trace_sets):
    names = Counter(s.name for ts in trace_sets for found in ts.solutions.values() for s in found)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) == sum(kernel.supports(spec) for kernel in KERNELS.values() for spec in FAMILY)


def test_a_plain_gpu_run_meets_no_solution_of_the_optional_set(trace_sets):
    main, _ = trace_sets
    kernels = {s.name.split("_h")[0].removesuffix("_fp8") for v in main.solutions.values() for s in v}
    assert kernels == {name for name, k in KERNELS.items() if k.manifest.trace_set == "main"}


def test_generated_solutions_stay_small():
    roots = (REPO.solutions, REPO.optional / "solutions")
    size = sum(p.stat().st_size for root in roots for p in root.rglob("*.json"))
    assert 0 < size < 12_000_000
