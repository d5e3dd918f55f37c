"""Thousands of random problems on a GPU, in a process that a watchdog ends; on a CPU, that this test works.

EVENKV_STRESS_PROBLEMS says how many (default 2000; evenkv_triton takes a tenth), EVENKV_STRESS_SEED where the
seeds begin (default 0). A fault names its seed; `python tests/gpu_stress_worker.py KERNEL SEED` repeats it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_library import COUNT, MOST_AT_ONCE, CutLibrary, choose_launch
from gpu_stress_worker import make_worker, run_stress, stress
from stress_fakes import BESIDE, CRASHES, HANGS, OTHER_BITS, WRONG
from stress_problems import (
    CACHE_LAYOUTS,
    E4M3,
    E5M2,
    QUERY_LAYOUTS,
    SPECS,
    WORKERS,
    Limits,
    Plan,
    build_problem,
    draw_plan,
    fast_reference,
    specs_of,
)

from evenkv.numerics.bytes import pages_of
from evenkv.numerics.reference import reference
from evenkv.pack.manifest import find_kernel
from evenkv.paths import find_repository
from evenkv.spec.family import DecodeSpec

SMALL = Limits(batch=6, tokens=150, huge=120)
SMALL_SPECS = (DecodeSpec(3, 1, 16, 1), DecodeSpec(4, 2, 16, 5), DecodeSpec(4, 2, 16, 16, E4M3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "share"),
    [
        ("evenkv_cuda", 1),
        ("evenkv_cuda general", 2),
        ("evenkv_cuda batch-invariant", 4),
        ("evenkv_triton", 10),
    ],
)
def test_random_problems(kernel: str, share: int, capsys: pytest.CaptureFixture[str]) -> None:
    count = max(1, int(os.environ.get("EVENKV_STRESS_PROBLEMS", "2000")) // share)
    first = int(os.environ.get("EVENKV_STRESS_SEED", "0"))
    faults, seconds = run_stress(kernel, range(first, first + count), specs_of(kernel))
    with capsys.disabled():
        print(f"\n{kernel}: {count} problems from seed {first} in {seconds:.1f} s")
    assert faults == [], "\n".join(faults)


def test_the_kernels_take_every_spec() -> None:
    for name in ("evenkv_cuda", "evenkv_triton"):
        for spec in specs_of(name):
            find_kernel(find_repository(), name).require(spec)


def test_plans_cover_what_they_should() -> None:
    plans = [draw_plan(seed) for seed in range(2000)]
    assert plans[:50] == [draw_plan(seed) for seed in range(50)]
    limits = Limits()
    for plan in plans:
        assert 1 <= len(plan.lengths) <= limits.batch and sum(plan.lengths) <= limits.tokens
        assert min(plan.lengths) >= 0 and plan.listed_slots < 1 << 30  # params.h: kMostSlots
    assert {plan.spec for plan in plans} == set(SPECS)
    assert {spec.page_size for spec in SPECS} >= {1, 5, 16, 48, 64, 256}
    assert {spec.num_kv_heads for spec in SPECS} == set(range(1, 9))
    assert {spec.group_size for spec in SPECS} >= {1, 2, 8, 9, 16, 24}
    assert {spec.head_dim for spec in SPECS} == {64, 128, 256}
    for kv_dtype in ("bfloat16", "float16", E4M3, E5M2):
        seen = [plan for plan in plans if plan.spec.kv_dtype == kv_dtype]
        assert {plan.cache_layout for plan in seen} == set(CACHE_LAYOUTS)
        assert {plan.query_layout for plan in seen} == set(QUERY_LAYOUTS)
        assert {plan.shared_pages for plan in seen} == {False, True}
        assert any(plan.listed_slots == plan.counted_slots for plan in seen)

    def count(condition: Any) -> int:
        return sum(map(condition, plans))

    assert count(lambda p: not any(p.lengths)) > 0, "nothing but empty requests"
    assert count(lambda p: max(p.lengths) > 10_000) > 100
    assert count(lambda p: len(p.lengths) > 200) > 100 and count(lambda p: len(p.lengths) == 1) > 100
    assert count(lambda p: 0 in p.lengths and max(p.lengths) > 1000) > 100


def _ways(library: CutLibrary, plan: Plan, always_cut: bool) -> set[str]:
    """Which ways evenkv_cuda goes with a plan's problem, on a device of WORKERS SMs."""
    spec = plan.spec
    counts = [pages_of(n, spec.page_size) for n in plan.lengths]
    kv_indptr = [0, *accumulate(counts)]
    listed = kv_indptr[-1] + plan.spare_ids
    launch = choose_launch(library, spec, len(counts), listed, WORKERS, always_cut=always_cut)
    choice = launch.choice
    found = library.visits(launch.shape, choice, kv_indptr, plan.lengths)
    is_cut = bool((found.rows[:, COUNT] > 1).any())
    numbering = "even" if found.even else "uneven"
    ways = {
        f"{launch.heads} heads a block, {'uncut' if choice.uncut else numbering}{', cut' if is_cut else ''}"
    }
    if launch.few:
        ways.add("two blocks an SM")
    if found.rows[:, COUNT].max(initial=0) > MOST_AT_ONCE:
        ways.add("groups of parts")
    if choice.splits > 1:
        ways.add("clusters" + (" of cut requests" if is_cut else ""))
    if found.part_tokens < choice.cut.part_tokens * 0.999:
        ways.add("parts are fitted")
    if choice.clusters < choice.cut.numbers:
        ways.add("clusters take several parts")
    return ways


def test_plans_go_every_way(tmp_path: Path) -> None:
    library = CutLibrary(tmp_path)
    seen: Counter[str] = Counter()
    for seed in range(2000):
        for always_cut in (False, True):
            seen.update(_ways(library, draw_plan(seed), always_cut))
    wanted = [
        "1 heads a block, uncut",
        *(f"1 heads a block, {n}{c}" for n in ("even", "uneven") for c in ("", ", cut")),
        *(f"2 heads a block, {n}" for n in ("even", "uneven, cut")),
        "two blocks an SM",
        "groups of parts",
        "clusters",
        "clusters of cut requests",
        "parts are fitted",
        "clusters take several parts",
    ]
    assert {way: seen[way] for way in wanted if seen[way] < 20} == {}, seen


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", E4M3, E5M2])
def test_problems_and_the_quick_reference(kv_dtype: str) -> None:
    """Against the reference of one request at a time; outside used slots there is NaN only."""
    seen = set()
    for seed in range(24):
        plan = draw_plan(seed, (DecodeSpec(6, 3, 16, (1, 5, 16, 48)[seed % 4], kv_dtype),), SMALL)
        problem = build_problem(plan, "cpu")
        seen |= {plan.cache_layout, plan.query_layout, plan.shared_pages}
        t = problem.tensors
        assert t["q"].isfinite().all() and t["q"].stride(-1) == 1
        ends = (t["kv_indptr"][1:] * plan.spec.page_size).tolist()
        assert len(t["kv_indices"]) == int(t["kv_indptr"][-1]) + plan.spare_ids
        for name in ("k_cache", "v_cache"):
            cache = t[name]
            strides = [cache.stride(d) * cache.element_size() % 16 for d in range(3) if cache.size(d) > 1]
            assert not any(strides) and cache.data_ptr() % 16 == 0 and cache.stride(-1) == 1
            finite = cache.float().isfinite().all(-1).all(-1)
            assert finite.any(-1).sum() < len(cache), "no page is left unlisted"
            if not plan.shared_pages:
                assert int(finite.sum()) == sum(plan.lengths) <= ends[-1]
        exact, quick = reference(problem), fast_reference(problem)
        assert torch.allclose(quick[0], exact[0], atol=1e-12) and torch.allclose(
            quick[1], exact[1], atol=1e-9
        )
        again = build_problem(plan, "cpu")
        assert torch.equal(t["kv_indices"], again.tensors["kv_indices"])
        assert torch.equal(fast_reference(again)[0], quick[0])
    assert seen == {*CACHE_LAYOUTS, *QUERY_LAYOUTS, False, True}


def _stress(fake: str, seeds: Sequence[int], silence_s: float = 30.0, most_faulty: int = 5) -> list[str]:
    worker = make_worker(f"stress_fakes:{fake}", "cpu", SMALL_SPECS, SMALL)
    describe = lambda seed: draw_plan(seed, SMALL_SPECS, SMALL)  # noqa: E731
    try:
        return stress(worker, seeds, describe, silence_s=silence_s, most_faulty=most_faulty)
    finally:
        worker.end()


def test_faults_are_named_with_seed_and_place_and_all_else_passes() -> None:
    faults = _stress("Faulty", range(40))
    wrong, bits, beside = faults
    plan = draw_plan(WRONG, SMALL_SPECS, SMALL)
    assert wrong.startswith(f"seed {WRONG} ({plan.spec.short_name}")
    assert f"output of request {len(plan.lengths) - 1} is off by" in wrong
    assert f"head {plan.spec.num_qo_heads - 1}, dim 5:" in wrong
    assert bits.startswith(f"seed {OTHER_BITS} (") and "has other bits" in bits
    assert beside.startswith(f"seed {BESIDE} (") and "memory beside output" in beside


def test_a_lost_process_costs_one_problem() -> None:
    """A hang is killed, a crash is reported, and a fresh process solves the problems after each."""
    hung, crashed = _stress("Lost", range(HANGS - 1, CRASHES + 2), silence_s=5.0)
    assert hung.startswith(f"seed {HANGS} (") and "killed: solve did not end" in hung
    assert crashed.startswith(f"seed {CRASHES} (") and "SIGSEGV" in crashed


class _AlwaysWrong:
    """In the place of a worker."""

    def start(self) -> None:
        pass

    def call(self, command: str, **arguments: Any) -> list[str]:
        return ["wrong", "in two ways"]


def test_it_stops_when_enough_is_wrong() -> None:
    faults = stress(_AlwaysWrong(), range(10, 90), str, most_faulty=2)  # type: ignore[arg-type]
    assert [f.partition(" (")[0] for f in faults[:4]] == ["seed 10"] * 2 + ["seed 11"] * 2
    assert faults[4:] == ["stopped after seed 11: 2 problems are wrong already"]
