"""The problem builder: tables, poison, layouts, determinism; and the oracle on cases known by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkv.errors import EvenkvError
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import FAMILY, DecodeSpec

SPEC = DecodeSpec(4, 2, 64, 16)
FP8 = DecodeSpec(4, 2, 64, 16, "float8_e4m3fn")


def _used(problem: Problem, request: int) -> torch.Tensor:
    """The request's K tokens, float32 `[length, num_kv_heads, head_dim]`, straight from the tables."""
    t = problem.tensors
    begin, end = t["kv_indptr"][request : request + 2].tolist()
    rows = t["k_cache"].float()[t["kv_indices"][begin:end].long()].flatten(0, 1)
    return rows[: problem.lengths[request]]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16, 48]),
    kv_dtype=st.sampled_from(["bfloat16", "float8_e4m3fn", "float8_e5m2"]),
    seed=st.integers(0, 2**31),
)
def test_every_token_is_finite_and_all_else_is_nan(
    lengths: list[int], page_size: int, kv_dtype: str, seed: int
) -> None:
    problem = make_problem(DecodeSpec(2, 1, 8, page_size, kv_dtype), lengths, seed=seed)
    t = problem.tensors
    assert t["kv_indices"].numel() == int(t["kv_indptr"][-1])
    assert len(set(t["kv_indices"].tolist())) == t["kv_indices"].numel()
    finite = 0
    for request, length in enumerate(lengths):
        rows = _used(problem, request)
        assert rows.shape[0] == length and rows.isfinite().all()
        finite += rows.numel()
    for cache in (t["k_cache"], t["v_cache"]):
        assert int(cache.float().isfinite().sum()) == finite
        assert cache.shape[0] > t["kv_indices"].numel()


def test_inputs_follow_the_definition() -> None:
    for spec in FAMILY[::5]:
        problem = make_problem(spec, [spec.page_size + 1, 0])
        inputs = dict(zip(spec.input_names, problem.inputs(), strict=True))
        assert inputs["q"].shape == (2, spec.num_qo_heads, spec.head_dim)
        assert inputs["k_cache"].shape[1:] == (spec.page_size, spec.num_kv_heads, spec.head_dim)
        assert str(inputs["v_cache"].dtype) == f"torch.{spec.kv_dtype}"
        assert {inputs[n].dtype for n in spec.input_names if n.startswith("kv_")} == {torch.int32}
        assert isinstance(inputs["sm_scale"], float)
        if spec.is_fp8:
            assert inputs["k_scale"].shape == (spec.num_kv_heads,)


def test_same_seed_same_bits_and_another_seed_others() -> None:
    def bits(seed: int) -> list[bytes]:
        tensors = make_problem(FP8, [5, 40], seed=seed).tensors
        return [
            t.view(torch.uint8).numpy().tobytes() for t in tensors.values() if isinstance(t, torch.Tensor)
        ]

    assert bits(1) == bits(1)
    assert bits(1)[0] != bits(2)[0]


def test_ordered_pages_and_unpoisoned_pool() -> None:
    problem = make_problem(SPEC, [30, 17], page_order="ordered", poison_unused=False, num_pages=9)
    assert problem.tensors["kv_indices"].tolist() == [0, 1, 2, 3]
    assert problem.tensors["k_cache"].shape[0] == 9
    assert problem.tensors["k_cache"].isfinite().all()


@pytest.mark.parametrize("spec", [SPEC, FP8], ids=lambda spec: spec.short_name)
def test_interleaved_halves_share_one_buffer_and_hold_the_same_numbers(spec: DecodeSpec) -> None:
    apart, halves = (make_problem(spec, [40], interleaved=i).tensors for i in (False, True))
    page = 2 * 16 * 2 * 64
    assert halves["k_cache"].stride() == (page, 128, 64, 1) == halves["v_cache"].stride()
    offset = halves["v_cache"].data_ptr() - halves["k_cache"].data_ptr()
    assert offset == page // 2 * halves["k_cache"].element_size()
    for name in ("k_cache", "v_cache"):
        left, right = apart[name].float().nan_to_num(), halves[name].float().nan_to_num()
        assert torch.equal(left, right)


def test_moving_keeps_strides_and_shared_storage() -> None:
    problem = make_problem(SPEC, [40], interleaved=True)
    moved = problem.to("meta")
    k, v = moved.tensors["k_cache"], moved.tensors["v_cache"]
    assert k.device.type == "meta" and k.stride() == problem.tensors["k_cache"].stride()
    assert v.storage_offset() == problem.tensors["v_cache"].storage_offset()
    assert k.untyped_storage()._cdata == v.untyped_storage()._cdata


def test_outputs_are_poisoned() -> None:
    output, lse = make_problem(SPEC, [3, 4]).empty_outputs()
    assert output.dtype == torch.bfloat16 and output.isnan().all()
    assert lse.dtype == torch.float32 and lse.isnan().all() and lse.shape == (2, 4)


def test_queries_and_outputs_of_an_fp16_cache_are_fp16() -> None:
    for kv_dtype, wanted in (("float16", torch.float16), ("float8_e5m2", torch.bfloat16)):
        problem = make_problem(DecodeSpec(4, 2, 64, 16, kv_dtype), [3])
        assert problem.tensors["q"].dtype == wanted == problem.empty_outputs()[0].dtype


def test_bad_options_are_named() -> None:
    with pytest.raises(EvenkvError, match="num_pages is 1: wanted at least the 3"):
        make_problem(SPEC, [33], num_pages=1)
    with pytest.raises(EvenkvError, match="v_scale has 3 values"):
        make_problem(FP8, [3], v_scale=[1.0, 2.0, 3.0])


def test_oracle_by_hand() -> None:
    """q = 0 weighs every token alike; one token gives its V; scales act where they must."""
    problem = make_problem(FP8, [1, 40, 0], k_scale=0.25, v_scale=[0.5, 2.0])
    output, lse = reference(problem)
    t = problem.tensors
    v = t["v_cache"][t["kv_indices"][0].item(), 0].double() * t["v_scale"].double()[:, None]
    assert torch.equal(output[0], v.repeat_interleave(2, 0))
    k = t["k_cache"][t["kv_indices"][0].item(), 0].double()
    logits = (t["q"][0].double() * k.repeat_interleave(2, 0)).sum(-1) * t["sm_scale"] * 0.25
    assert torch.allclose(lse[0], logits / math.log(2.0), atol=1e-12)
    assert (output[2] == 0).all() and (lse[2] == -math.inf).all()

    flat = problem.with_tensors(q=torch.zeros_like(t["q"]))
    output, lse = reference(flat)
    assert torch.allclose(lse[1], torch.full((4,), math.log2(40.0), dtype=torch.float64))
