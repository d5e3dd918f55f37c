"""evenkv_cpp against the oracle: all G-cases on one build that takes every geometry; packed builds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkv.library.build import build_kernel, build_solution
from evenkv.numerics.cases import BASE, GCase, g_cases, run_case
from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import Mode, bit_equal, call
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import reference
from evenkv.pack.manifest import find_kernel
from evenkv.pack.render import pack_solution
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec

CASES = {case.name: case for case in g_cases()}
MODE = Mode(checked=True, invariant=True)
SEED = DecodeSpec(5, 1, 128, 1)
FP8 = DecodeSpec(32, 8, 128, 16, "float8_e4m3fn")

# Zeros leave a number to the tensors: one build serves every geometry, so the cases cost one compilation.
ANY_GEOMETRY = """#pragma once
#define EVENKV_NUM_QO_HEADS 0
#define EVENKV_NUM_KV_HEADS 0
#define EVENKV_HEAD_DIM 0
#define EVENKV_PAGE_SIZE 0
#define EVENKV_KV_DTYPE 0
#define EVENKV_HAS_LAST_PAGE_LEN 1
#define EVENKV_HAS_SCALES 1
"""


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The oracle's operations are small: threads that wait for each other only slow them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kernel() -> Callable[..., None]:
    """`kernel(spec, *inputs, output, lse)` for any spec."""
    solution = pack_solution(find_kernel(Repository(Path()), "evenkv_cpp"), BASE)
    sources = [
        source.model_copy(update={"content": ANY_GEOMETRY}) if source.path == "definition.h" else source
        for source in solution.sources
    ]
    run = build_solution(solution.model_copy(update={"sources": sources}))

    def for_any(spec: DecodeSpec, *arguments: Any) -> None:
        tensors = dict(zip(spec.input_names, arguments, strict=False))
        ones = torch.ones(spec.num_kv_heads)
        run(
            *(tensors[n] for n in ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices")),
            tensors.get("kv_last_page_len", torch.ones(tensors["q"].shape[0], dtype=torch.int32)),
            tensors.get("k_scale", ones),
            tensors.get("v_scale", ones),
            tensors["sm_scale"],
            *arguments[-2:],
        )

    return for_any


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads the next calls use."""
    before = os.environ.get("EVENKV_CPU_THREADS")

    def use(count: int) -> None:
        os.environ["EVENKV_CPU_THREADS"] = str(count)

    yield use
    if before is None:
        os.environ.pop("EVENKV_CPU_THREADS", None)
    else:
        os.environ["EVENKV_CPU_THREADS"] = before


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_g_case(case: GCase, kernel: Callable[..., None]) -> None:
    assert run_case(case, kernel, mode=MODE) == []


@pytest.mark.parametrize("spec", [SEED, FP8], ids=lambda spec: spec.short_name)
def test_packed_specialisation_is_right_and_has_the_bits_of_the_general_build(
    spec: DecodeSpec, kernel: Callable[..., None]
) -> None:
    run = build_kernel("evenkv_cpp", spec)
    problem = make_problem(spec, [0, 1, 37, 700, 3000], seed=3)
    output, lse, faults = call(problem, lambda _, *arguments: run(*arguments))
    assert faults + check_outputs(spec, output, lse, *reference(problem)) == []
    assert bit_equal((output, lse), call(problem, kernel)[:2])


def test_twenty_calls_and_any_number_of_threads_give_the_same_bits(
    kernel: Callable[..., None], threads: Callable[[int], None]
) -> None:
    problem = make_problem(BASE, [3000, 1, 0, 257, 20_000], seed=20)
    threads(1)
    first = call(problem, kernel)[:2]
    for repeat in range(20):
        threads(1 + repeat % 5)
        assert bit_equal(call(problem, kernel)[:2], first), f"repeat {repeat}"


@pytest.mark.parametrize("lanes", ["4", "8", "16"])
def test_every_vector_width_is_right(
    lanes: str, kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 falls back to 8, and 8 to 4, where the processor has no such registers."""
    monkeypatch.setenv("EVENKV_CPU_LANES", lanes)
    for case in ("G2-d72", "G3-ps48", "G5-peaked", "G10-base", "G13-e4m3fn-by-head", "G13-e5m2-by-head"):
        assert run_case(CASES[case], kernel, mode=MODE) == [], case
    spec = DecodeSpec(7, 1, 12, 8)  # a head_dim of less than one wide vector
    problem = make_problem(spec, [5, 100])
    assert check_outputs(spec, *call(problem, kernel)[:2], *reference(problem)) == []


def test_calls_from_several_host_threads_do_not_share_scratch(kernel: Callable[..., None]) -> None:
    problems = [make_problem(BASE, [900 + 100 * i, 5], seed=i) for i in range(4)]
    wanted = [call(problem, kernel)[:2] for problem in problems]
    wrong: list[int] = []

    def repeat(number: int) -> None:
        for _ in range(5):
            if not bit_equal(call(problems[number], kernel)[:2], wanted[number]):
                wrong.append(number)

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(len(problems))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_large_group_and_every_fp8_code(kernel: Callable[..., None]) -> None:
    wide = make_problem(DecodeSpec(37, 1, 64, 16), [100, 300])
    assert check_outputs(wide.spec, *call(wide, kernel)[:2], *reference(wide)) == []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        spec = DecodeSpec(1, 1, 256, 1, name)
        problem = make_problem(spec, [1], k_scale=1.0, v_scale=1.0, num_pages=1)
        cache = codes.view(torch.uint8).view(1, 1, 1, 256).view(dtype)
        # Zero logits whatever K holds that is finite: a single token's output is its V, code for code.
        problem = problem.with_tensors(v_cache=cache, k_cache=torch.zeros(256).to(dtype).view(1, 1, 1, 256))
        output, _, _ = call(problem, kernel)
        expected = codes.to(torch.bfloat16)
        assert torch.equal(output.flatten().nan_to_num(nan=7e30), expected.nan_to_num(nan=7e30)), name
        assert torch.equal(output.flatten().isnan(), expected.isnan()), name


def _refused(problem: Problem, kernel: Callable[..., None], outputs: Any = None) -> str:
    """The error's text; nothing may have been written."""
    output, lse = outputs or problem.empty_outputs()
    before = output.clone(), lse.clone()
    with pytest.raises((ValueError, TypeError)) as error:
        kernel(problem.spec, *problem.inputs(), output, lse)
    assert bit_equal((output, lse), before)
    return str(error.value)


def test_errors_name_argument_wanted_and_got(kernel: Callable[..., None]) -> None:
    problem = make_problem(BASE, [37, 20])
    t = problem.tensors
    cases = [
        ({"q": t["q"][0]}, ("q", "[8, 128]", "3 dimensions")),
        ({"q": t["q"].transpose(1, 2).contiguous().transpose(1, 2)}, ("q", "last dimension", "wanted 1")),
        ({"q": t["q"][:, :7]}, ("q", "[2, 7, 128]", "groups")),
        ({"k_cache": t["k_cache"][..., :64]}, ("k_cache", "128", "head_dim")),
        ({"v_cache": t["v_cache"][1:]}, ("v_cache", "num_pages")),
        ({"v_cache": t["v_cache"].to(torch.float8_e5m2)}, ("v_cache", "float8_e5m2", "bfloat16")),
        ({"kv_indptr": t["kv_indptr"][:-1]}, ("kv_indptr", "2 entries", "3")),
        ({"kv_indices": t["kv_indices"][:-1]}, ("kv_indptr of request 1", "ends at 5", "to 4")),
        ({"kv_indptr": torch.tensor([0, 5, 3], dtype=torch.int32)}, ("kv_indptr of request 1", "ends at 3")),
        ({"kv_last_page_len": t["kv_last_page_len"][:1]}, ("kv_last_page_len", "wanted 2")),
    ]
    for change, words in cases:
        text = _refused(problem.with_tensors(**change), kernel)
        assert all(word in text for word in words), text
    output, lse = problem.empty_outputs()
    for outputs, name in (((output.float(), lse), "output"), ((output, lse.t().contiguous().t()), "lse")):
        assert name in _refused(problem, kernel, outputs)


def test_a_packed_build_refuses_another_geometry() -> None:
    run = build_kernel("evenkv_cpp", SEED)
    problem = make_problem(DecodeSpec(6, 1, 128, 1), [5])
    with pytest.raises(ValueError, match=r"q has shape \[1, 6, 128\]: wanted 5 \(num_qo_heads\)"):
        run(*problem.inputs(), *problem.empty_outputs())
