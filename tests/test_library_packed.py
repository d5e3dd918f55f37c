"""On a CPU: a packed file built by flashinfer-bench and the library's build of its kernel give equal bits."""

from __future__ import annotations

import pytest
import torch
from flashinfer_bench.compile.builders import PythonBuilder, TVMFFIBuilder
from flashinfer_bench.data import Definition, Solution
from flashinfer_bench.data.json_utils import load_json_file

from evenkv.library import build
from evenkv.numerics.problem import make_problem
from evenkv.pack.manifest import find_kernel
from evenkv.pack.render import pack_solution
from evenkv.pack.write import solution_path
from evenkv.paths import find_repository
from evenkv.spec.family import parse_name

REPO = find_repository()


@pytest.mark.parametrize(
    "kernel_name, definition_name, builder",
    [
        ("evenkv_cpp", "gqa_paged_decode_fp8_h32_kv4_d128_ps16", TVMFFIBuilder),
        ("torch_reference", "gqa_paged_decode_h5_kv1_d128_ps1", PythonBuilder),
    ],
)
def test_packed_and_library_builds_give_equal_bits(
    kernel_name, definition_name, builder, tmp_path, monkeypatch
):
    monkeypatch.setenv("EVENKV_CACHE", str(tmp_path / "evenkv"))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "flashinfer_bench"))
    monkeypatch.setattr(build, "_built", {})
    kernel, spec = find_kernel(REPO, kernel_name), parse_name(definition_name)
    definition = load_json_file(Definition, REPO.definitions / f"{spec.name}.json")
    solution = load_json_file(Solution, solution_path(REPO, kernel, pack_solution(kernel, spec)))
    problem = make_problem(spec, [3, 0, 700, 33], seed=5)
    outputs = []
    for call in (
        builder().build(definition, solution).call_destination_passing,
        build.build_kernel(kernel_name, spec),
    ):
        output, lse = problem.empty_outputs()
        call(*problem.inputs(), output, lse)
        outputs.append((output, lse))
    for name, packed, library in zip(("output", "lse"), *outputs, strict=True):
        assert not packed.isnan().any(), f"{name} is written everywhere"
        assert torch.equal(packed.view(torch.uint8), library.view(torch.uint8)), name
