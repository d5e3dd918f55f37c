"""The G-cases themselves: a right kernel passes all, and each fault is caught by the case made for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from numerics_oracle import make_kernel

from evenkv.numerics import judge
from evenkv.numerics.cases import BASE, GCase, g_cases, run_case
from evenkv.numerics.judge import Mode
from evenkv.numerics.problem import make_problem
from evenkv.spec.family import DecodeSpec

SMALL = {case.name: case for case in g_cases(small=True)}


def test_names_are_unique_and_specs_are_declared() -> None:
    cases = g_cases()
    assert len({case.name for case in cases}) == len(cases) >= len(SMALL)
    for case in SMALL.values():
        assert {p.spec for p in case.build("cpu")} == set(case.specs), case.name


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("case", SMALL.values(), ids=lambda case: case.name)
def test_a_right_kernel_passes(case: GCase, checked: bool) -> None:
    mode = Mode(checked=checked, invariant=True)
    assert run_case(case, make_kernel(checked=checked), mode=mode) == []


def test_far_pages_are_where_they_say() -> None:
    """Built without running: pages past 2^31 elements, and only the listed ones are touched."""
    for case in (c for c in g_cases() if c.huge):
        (problem,) = case.build("cpu")
        cache = problem.tensors["v_cache"]
        far = problem.tensors["kv_indices"].long() * cache.stride(0)
        assert int(far.max()) >= 2**31
        assert run_case(case, make_kernel()) == []


def _scale_q_in_place(tensors: dict[str, Any], *_: torch.Tensor) -> None:
    tensors["q"].mul_(tensors["sm_scale"])


def _write_past_the_end(_: dict[str, Any], output: torch.Tensor, lse: torch.Tensor) -> None:
    output.as_strided((1,), (1,), output.storage_offset() + output.numel()).fill_(0.0)


def _write_before_lse(_: dict[str, Any], output: torch.Tensor, lse: torch.Tensor) -> None:
    lse.as_strided((1,), (1,), lse.storage_offset() - 1).fill_(0.0)


def _whole_pages(spec: DecodeSpec, pages: int, last: int) -> int:
    return pages * spec.page_size


def _one_less_past_64(spec: DecodeSpec, pages: int, last: int) -> int:
    length = (pages - 1) * spec.page_size + last if pages else 0
    return length - (length > 64)


def _tile_of_16_only(spec: DecodeSpec, pages: int, last: int) -> int:
    length = (pages - 1) * spec.page_size + last if pages else 0
    return length if spec.page_size % 16 == 0 or length <= 16 else length // 16 * 16


FAULTS = {
    "reads-the-whole-last-page": ({"lengths": _whole_pages}, "G5-tail-of-4"),
    "masks-by-zero": ({"mask_by_zero": True, "lengths": _whole_pages}, "G3-ps48"),
    "drops-a-token-of-long-requests": ({"lengths": _one_less_past_64}, "G18-ps16"),
    "whole-tiles-only": ({"lengths": _tile_of_16_only}, "G3-ps8"),
    "lse-base-e": ({"lse_base": math.e}, "G10-base"),
    "lse-without-k-scale": ({"k_scale_in_lse": False}, "G13-e4m3fn-uniform"),
    "leaves-empty-requests": ({"write_empty": False}, "G5-zero"),
    "no-softmax-weights": ({"logits": torch.zeros_like}, "G14-alone"),
    "logits-in-bf16": ({"logits": lambda x: x.bfloat16().float()}, "G10-base"),
    "scales-q-in-place": ({"after": _scale_q_in_place}, "G19-h5_kv1_d64_ps16"),
    "writes-past-output": ({"after": _write_past_the_end}, "G19-h7_kv1_d128_ps1"),
    "writes-before-lse": ({"after": _write_before_lse}, "G19-h7_kv1_d128_ps1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str) -> None:
    options, case = FAULTS[name]
    assert run_case(SMALL[case], make_kernel(**options))


def _accept_all(spec: DecodeSpec, *arguments: Any) -> None:
    """Clamps every table into range: bad entries become other requests' pages, in silence."""
    tensors = dict(zip(spec.input_names, arguments, strict=False))
    tables = {
        "kv_indices": tensors["kv_indices"].int().clamp(0, tensors["k_cache"].shape[0] - 1),
        "kv_indptr": tensors["kv_indptr"].int(),
    }
    if spec.has_last_page_len:
        tables["kv_last_page_len"] = tensors["kv_last_page_len"].int().clamp(1, spec.page_size)
    tables["q"] = tensors["q"].bfloat16()
    make_kernel()(spec, *({**tensors, **tables}[n] for n in spec.input_names), *arguments[-2:])


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize(
    "name",
    ["G7-page-ids", "G7-last-page-len", "G7-empty-last-page", "G7-deep-ps16", "G7-deep-ps1", "G16-misuse"],
)
def test_silent_clamping_is_caught(name: str, checked: bool) -> None:
    assert run_case(SMALL[name], _accept_all, mode=Mode(checked=checked))


def test_an_error_that_names_nothing_is_not_enough() -> None:
    def vague(spec: DecodeSpec, *arguments: Any) -> None:
        raise ValueError("bad input")

    for name in ("G7-page-ids", "G16-misuse"):
        assert run_case(SMALL[name], vague, mode=Mode(checked=True))


def test_bits_that_depend_on_the_batch_are_caught_in_invariant_mode_only() -> None:
    def depends(spec: DecodeSpec, *arguments: Any) -> None:
        make_kernel()(spec, *arguments)
        arguments[-1].add_(1e-6 * arguments[0].shape[0])

    case = SMALL["G14-alone"]
    assert run_case(case, depends, mode=Mode(invariant=False)) == []
    assert run_case(case, depends, mode=Mode(invariant=True))


def test_take_requests_keeps_their_results() -> None:
    problem = make_problem(BASE, [5, 0, 40, 17])
    part = judge.take_requests(problem, [3, 1])
    assert part.lengths == (17, 0)
    whole, taken = judge.reference(problem), judge.reference(part)
    assert torch.equal(taken[0], whole[0][[3, 1]]) and torch.equal(taken[1], whole[1][[3, 1]])
