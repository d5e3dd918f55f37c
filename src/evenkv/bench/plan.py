"""Plans a run: what each case will take, how often to time it, in which order, and how to share it out.

Predictions only steer budgets and shares; no number here reaches a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenkv.bench import grid
from evenkv.bench.case import Case, Family
from evenkv.bench.effort import CAPTURE_WARM_UP_CALLS, HOST_WARM_UP_CALLS, ROUNDS, effort
from evenkv.bench.record import MIN_ITERATIONS
from evenkv.errors import EvenkvError

DEFAULT_COPY_GBPS = 4250.0
# Time that a plan without --minutes aims at: the whole protocol in under 25 minutes, the smoke test in one.
# What is left of them is for the start (processes, self-test, builds: 26 to 72 s) and what estimates miss.
FULL_BUDGET_S = 22 * 60.0
SMOKE_BUDGET_S = 45.0

# Timed calls of a case, by what the budget allows; the protocol's floor comes last.
_ITERATIONS = (300, 200, MIN_ITERATIONS)
# Calls this long scatter by less than a percent: more than the floor would tell nothing new, nor would
# measuring them once more. What makes them unstable is a clock that they pull down themselves.
LONG_US = 1000.0

# On an H200, beside the bytes: launch and exit of a kernel; and before each call its new inputs, the poison
# in its outputs and the markers (12 us together) and the flush of L2 (60 us).
_LAUNCH_US = 12.0
_BEFORE_CALL_US = 72.0

# Seconds of the host while the GPU waits, of one implementation and case. Implementations prepare side by
# side, and a round's rows are compared while the GPU works. With these the whole protocol's 1,236 s of
# measuring on an H200 (893 cases, 6 implementations, three starts not counted) are predicted as 1,260.
_PREPARE_S = 0.003  # of a setting: inputs, plan() or metadata, a capture
_CHECK_S = 0.002  # of the check before timing: rows handed over and compared
_ROUND_S = 0.002  # of a timed command beside its calls: CUPTI on and off, 160 records read, rows handed over
_HOST_CALL_S = 0.0003  # of a call that is launched by hand or ends with an idle device
# The same of a case, for all implementations; and of a family: its pools freed, made, filled and shared.
_CASE_S = 0.012  # the reference, rows on the disk
_COPY_ROUND_S = 0.002
_FAMILY_S = 0.6

# Ways to call it that are tried in every case; one where nothing stands here.
_SETTINGS = {"fa3": 2}


@dataclass(frozen=True)
class Estimate:
    """Seconds of a whole run, and the iterations that it was made for."""

    seconds: float
    iterations: int


def roofline_us(case: Case, copy_gbps: float) -> float:
    """The case's bytes at copy speed, and a launch."""
    return case.kv_bytes() / copy_gbps * 1e-3 + _LAUNCH_US


def slowness(impl: str, case: Case) -> float:
    """About how many times longer than copy speed an implementation takes, from an H200's measurements."""
    group = case.num_qo_heads // case.num_kv_heads
    fp8 = case.kv_dtype.startswith("float8")
    if impl == "flashinfer-cc":
        return max(1.0, group * (0.88 if fp8 else 0.33))
    skew = 1.0
    if impl in ("flashinfer-tc", "flashinfer-xqa"):
        # A long request among short ones is cut into too few pieces.
        skew += 0.1 * (case.longest() * case.batch / max(case.total_tokens(), 1) - 1.0)
    plain = {"flashinfer-tc": (1.05, 1.6), "flashinfer-xqa": (1.15, 1.1), "fa3": (1.2, 1.75)}
    plain |= {"evenkv-cuda": (1.0, 1.05), "evenkv-triton": (1.33, 1.4)}
    return plain.get(impl, (1.5, 1.5))[fp8] * skew


def iterations_for(case: Case, wanted: int, copy_gbps: float) -> int:
    """Timed calls of a case: as wanted, but the floor for long ones."""
    return MIN_ITERATIONS if roofline_us(case, copy_gbps) > LONG_US else max(wanted, MIN_ITERATIONS)


def implementation_seconds(impl: str, case: Case, iterations: int, copy_gbps: float) -> float:
    """Seconds that one implementation takes of a case, from its preparation to its last call."""
    call_us = roofline_us(case, copy_gbps) * slowness(impl, case)
    more, settings = effort(call_us), _SETTINGS.get(impl, 1)
    # A call of its own before the graph is captured, and what the capture itself takes.
    calls = settings * (1 + CAPTURE_WARM_UP_CALLS)
    calls += settings * more.trial if settings > 1 else 0
    calls += 1 + ROUNDS * more.warm_up + iterations  # the check, the rounds
    by_hand = more.warm_up + more.eager + HOST_WARM_UP_CALLS + more.host
    calls += by_hand + more.wall
    host = settings * _PREPARE_S + _CHECK_S + (ROUNDS + 1) * _ROUND_S
    host += (by_hand + more.wall) * _HOST_CALL_S
    return calls * (call_us + _BEFORE_CALL_US) * 1e-6 + host


def case_seconds(case: Case, implementations: Sequence[str], wanted: int, copy_gbps: float) -> float:
    """Seconds that measuring one case takes, preparation and checks included."""
    if grid.is_skipped(case) or not implementations:
        return 0.0
    iterations = iterations_for(case, wanted, copy_gbps)
    copy_us = roofline_us(case, copy_gbps)
    copies = ROUNDS * (1 + effort(copy_us).copies)
    shared = _CASE_S + ROUNDS * _COPY_ROUND_S + copies * (copy_us + _BEFORE_CALL_US) * 1e-6
    return shared + sum(implementation_seconds(impl, case, iterations, copy_gbps) for impl in implementations)


def total_seconds(
    cases: Sequence[Case], implementations: Sequence[str], wanted: int, copy_gbps: float
) -> float:
    """Seconds that a run of the cases in their order takes."""
    measured = [case for case in cases if not grid.is_skipped(case)]
    families = sum(1 for _ in by_family(measured))
    return _FAMILY_S * families + sum(
        case_seconds(case, implementations, wanted, copy_gbps) for case in measured
    )


def estimate(
    cases: Sequence[Case], implementations: Sequence[str], budget_s: float, copy_gbps: float
) -> Estimate:
    """The most iterations that fit the budget, the floor where none do, and the seconds they take."""
    for wanted in _ITERATIONS:
        seconds = total_seconds(cases, implementations, wanted, copy_gbps)
        if seconds <= budget_s or wanted == _ITERATIONS[-1]:
            return Estimate(seconds, wanted)
    raise AssertionError("unreachable: the floor always answers")


def order(cases: Sequence[Case], in_rounds: bool) -> list[Case]:
    """Families together, the telling ones first.

    `in_rounds` is for runs that will not end in time: every family's most informative cases come before any
    family's others, at the price of allocating its caches up to three times.
    """
    first, second = set(grid.smoke()), set(grid.regimes())

    def rank(case: Case) -> int:
        return 0 if case in first else 1 if case in second else 2

    def key(case: Case) -> tuple:
        within = (*_family_rank(case.family), rank(case), case.kv_bytes(), case.name)
        return (rank(case), *within) if in_rounds else within

    return sorted(cases, key=key)


def by_family(cases: Sequence[Case]) -> itertools.groupby:
    """(family, its cases) of neighbours in the list."""
    return itertools.groupby(cases, key=lambda case: case.family)


def shard(cases: Sequence[Case], index: int, count: int, cost: Callable[[Case], float]) -> list[Case]:
    """Part `index` of `count` (from 1) of an ordered list: neighbours, all parts of about equal cost.

    Neighbours share a family, so that few families are allocated on more than one GPU. Every case is in
    exactly one part.

    Raises
    ------
    EvenkvError
        When `index` is not within 1 and `count`.
    """
    if not 1 <= index <= count:
        raise EvenkvError(f"--shard: wanted i/n with 1 <= i <= n, got {index}/{count}.", "For example 1/2.")
    costs = [cost(case) for case in cases]
    if not any(costs):
        costs = [1.0] * len(costs)
    total, before = sum(costs), 0.0
    chosen = []
    for case, own in zip(cases, costs, strict=True):
        middle = (before + own / 2) / total
        if min(int(middle * count), count - 1) == index - 1:
            chosen.append(case)
        before += own
    return chosen


def groups(cases: Sequence[Case], cost: Callable[[Case], float], group_s: float) -> list[list[Case]]:
    """The ordered list cut into tasks: never across families, and none much longer than `group_s` seconds
    unless a single case is."""
    found: list[list[Case]] = []
    for _, members in by_family(cases):
        current: list[Case] = []
        seconds = 0.0
        for case in members:
            own = cost(case)
            if current and seconds + own > group_s:
                found.append(current)
                current, seconds = [], 0.0
            current.append(case)
            seconds += own
        found.append(current)
    return found


def _family_rank(family: Family) -> tuple:
    heads = (family.num_qo_heads, family.num_kv_heads)
    known = ((32, 8), (5, 1), (32, 4), (32, 32))
    place = known.index(heads) if heads in known else len(known)
    return (family.page_size == 64, place, family.kv_dtype, *family)
