"""Peers' solutions without a GPU: packing, the reference as a solution, wiring over stand-in libraries.

A stand-in takes the library's place and computes what the library documents, from the arguments it is given:
a wrong table, scale, base or order of arguments gives a wrong result.
"""

from __future__ import annotations

import ast
import importlib
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkv.kernels.fa3.page_table import build_lengths, build_page_table, longest_request
from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import call
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import reference
from evenkv.pack.manifest import Kernel, find_kernel
from evenkv.pack.render import pack_solution
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, DecodeSpec
from evenkv.spec.generate import render_reference

BASELINES = ("flashinfer_tc", "flashinfer_cc", "fa3", "torch_reference")
FP8 = "float8_e4m3fn"
LENGTHS = [33, 1, 0, 64, 17]


def kernel_named(name: str) -> Kernel:
    return find_kernel(Repository(Path()), name)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Any]]:
    """`load(name, spec)`: the packed solution's `run`, imported as flashinfer-bench imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load_run(name: str, spec: DecodeSpec) -> Callable[..., Any]:
        package = f"{tmp_path.name}_{name}_{spec.short_name}".replace("-", "_")
        for source in pack_solution(kernel_named(name), spec).sources:
            path = tmp_path / package / source.path
            path.parent.mkdir(exist_ok=True)
            path.write_text(source.content, encoding="utf-8")
        return importlib.import_module(f"{package}.main").run

    return load_run


@pytest.mark.parametrize("name", BASELINES)
def test_every_supported_definition_packs_to_python(name: str) -> None:
    kernel = kernel_named(name)
    assert kernel.author == "baseline"
    specs = [spec for spec in FAMILY if kernel.supports(spec)]
    assert len(specs) >= 15
    for spec in specs:
        for source in pack_solution(kernel, spec).sources:
            ast.parse(source.content, source.path)


def test_cuda_cores_are_offered_for_compiled_group_sizes_only() -> None:
    supported = {spec.group_size for spec in FAMILY if kernel_named("flashinfer_cc").supports(spec)}
    assert supported == {spec.group_size for spec in FAMILY} - {5}


def test_only_peers_that_are_no_dependency_are_optional() -> None:
    optional = {name for name in BASELINES if kernel_named(name).manifest.trace_set == "optional"}
    assert optional == {"fa3"}


@pytest.mark.parametrize(
    "spec",
    [DecodeSpec(5, 1, 128, 1), DecodeSpec(8, 2, 64, 16), DecodeSpec(8, 2, 128, 48, FP8)],
    ids=lambda spec: spec.short_name,
)
def test_torch_reference_is_the_definition_and_right(spec: DecodeSpec, load: Callable[..., Any]) -> None:
    (source,) = pack_solution(kernel_named("torch_reference"), spec).sources
    assert source.content.rstrip("\n") == render_reference(spec).rstrip("\n")
    problem = make_problem(spec, LENGTHS)
    assert faults_of(problem, load("torch_reference", spec)) == []


def faults_of(problem: Problem, run: Callable[..., Any]) -> list[str]:
    """Faults of a value-returning solution."""
    output, lse = run(*problem.inputs())
    return check_outputs(problem.spec, output, lse, *reference(problem))


class PagedDecode:
    """Stands in for flashinfer.BatchDecodeWithPagedKVCacheWrapper: plan, run, lse in base 2, no scales."""

    made: list[PagedDecode] = []

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        assert workspace.numel() >= 128 << 20
        assert not workspace[:: 1 << 20].any()
        self.options, self.plans = options, []
        self.made.append(self)

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, *sizes: int, **options: Any) -> None:
        self.plans.append((indptr, indices, last_page_len, sizes, options))

    def run(
        self, q: torch.Tensor, caches: Any, *, lse: torch.Tensor, return_lse: bool, out: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indptr, indices, last_page_len, sizes, options = self.plans[-1]
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        assert return_lse
        assert q.dtype == options["q_data_type"]
        assert caches[0].dtype == options["kv_data_type"]
        assert q.is_contiguous()
        pages = indptr[1:] - indptr[:-1]
        lengths = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
        tensors = dict(q=q, k_cache=caches[0], v_cache=caches[1], kv_indptr=indptr, kv_indices=indices)
        spec = DecodeSpec(num_qo_heads, num_kv_heads, head_dim, page_size, "bfloat16")
        tensors["sm_scale"] = options["sm_scale"]
        exact = reference(Problem(spec, tuple(lengths.tolist()), tensors))
        out = torch.empty_like(q) if out is None else out
        assert out.dtype == q.dtype
        out.copy_(exact[0])
        lse.copy_(exact[1])
        return out, lse


@pytest.mark.parametrize("name", ["flashinfer_tc", "flashinfer_cc"])
@pytest.mark.parametrize(
    "spec",
    [DecodeSpec(8, 2, 128, 1), DecodeSpec(12, 2, 64, 16), DecodeSpec(8, 2, 128, 16, FP8)],
    ids=lambda spec: spec.short_name,
)
def test_flashinfer_solutions(
    name: str, spec: DecodeSpec, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = types.ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = PagedDecode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(PagedDecode, "made", [])
    run = load(name, spec)
    # Other lengths and contents in the second call, same batch: a kept plan or a kept output would show.
    for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1])):
        problem = make_problem(spec, lengths, seed=seed)
        output, lse, found = call(problem, lambda spec, *arguments: run(*arguments))
        assert found + check_outputs(spec, output, lse, *reference(problem)) == []
    (wrapper,) = PagedDecode.made
    assert wrapper.options["use_tensor_cores"] == (name == "flashinfer_tc")
    assert len(wrapper.plans) == 2


def attend_over_table(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    num_splits: int,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, ...]:
    """Stands in for flash_attn_with_kvcache: q [batch, 1, heads, dim]; lse natural, [batch, heads, 1]."""
    assert return_softmax_lse
    assert num_splits == 0
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    assert page_table.is_contiguous()
    batch, one, num_qo_heads, head_dim = q.shape
    assert one == 1
    _, page_size, num_kv_heads, _ = k_cache.shape
    width = page_table.shape[1]
    tensors = dict(q=q[:, 0], k_cache=k_cache, v_cache=v_cache, sm_scale=softmax_scale)
    tensors["kv_indices"] = page_table.flatten()
    tensors["kv_indptr"] = torch.arange(batch + 1, dtype=torch.int32) * width
    spec = DecodeSpec(num_qo_heads, num_kv_heads, head_dim, page_size)
    output, lse = reference(Problem(spec, tuple(cache_seqlens.tolist()), tensors))
    return output.to(q.dtype).unsqueeze(1), (lse * math.log(2)).float().unsqueeze(-1), None, None


@pytest.mark.parametrize(
    "spec", [DecodeSpec(5, 1, 128, 1), DecodeSpec(8, 2, 64, 16)], ids=lambda spec: spec.short_name
)
def test_fa3_solution(spec: DecodeSpec, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("flash_attn_interface")
    library.flash_attn_with_kvcache = attend_over_table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    run = load("fa3", spec)
    for lengths in (LENGTHS, LENGTHS[::-1], [0, 0], [5]):
        assert faults_of(make_problem(spec, lengths), run) == []


@pytest.mark.parametrize("page_counts", [[3, 0, 1, 5], [0, 0], [1], [4, 4, 0]])
def test_page_table_against_a_naive_one(page_counts: list[int]) -> None:
    kv_indptr = torch.tensor([0, *page_counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # Longer than needed, as engines pad it; the pad must not be gathered past its end either.
    kv_indices = torch.randperm(sum(page_counts) + 2, generator=torch.Generator().manual_seed(1)).int()
    kv_indices = kv_indices[: sum(page_counts)]
    width = longest_request(kv_indptr)
    assert width == max(1, *page_counts)
    table = build_page_table(kv_indptr, kv_indices, width)
    assert table.shape == (len(page_counts), width)
    assert table.dtype == torch.int32
    starts = kv_indptr.tolist()
    for request, count in enumerate(page_counts):
        begin = starts[request]
        assert table[request, :count].tolist() == kv_indices[begin : begin + count].tolist()
    if len(kv_indices):
        assert torch.isin(table, kv_indices).all()


def test_lengths_of_requests() -> None:
    kv_indptr = torch.tensor([0, 3, 3, 4, 4], dtype=torch.int32)
    last = torch.tensor([16, 0, 1, 7], dtype=torch.int32)
    assert build_lengths(kv_indptr, last, 16).tolist() == [48, 0, 1, 0]
    assert build_lengths(kv_indptr, None, 1).tolist() == [3, 0, 1, 0]
