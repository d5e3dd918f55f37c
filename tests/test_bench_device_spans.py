"""From activity records to times: what belongs to a call, and what gives a call away."""

from __future__ import annotations

import random

import pytest

from evenkv.bench.device.spans import LostRecords, Record, StrayWork, spans, summary

OURS, OTHER = 7, 13


def record(name: str, start_us: float, us: float, stream: int = OURS) -> Record:
    return Record(name, round(1000 * start_us), round(1000 * (start_us + us)), stream)


def marker(at_us: float) -> Record:
    return record("at::cuda::(anonymous namespace)::spin_kernel(long)", at_us, 1.0)


# Two calls of two kernels with a gap; a flush and new inputs between.
TWO_CALLS = [
    record("flush", 0, 60),
    marker(60),
    record("attend", 62, 10),
    record("merge", 75, 3),
    marker(80),
    record("copy or memset", 82, 2),
    record("flush", 85, 60),
    marker(150),
    record("attend", 152, 8),
    record("merge", 161, 2),
    marker(164),
    record("isfinite", 170, 2),
]


@pytest.mark.parametrize("seed", range(3))
def test_a_call_lasts_from_its_first_start_to_its_last_end(seed: int) -> None:
    records = list(TWO_CALLS)
    random.Random(seed).shuffle(records)
    assert spans(records, 2) == [16.0, 11.0]


def test_a_call_may_use_other_streams_that_it_waits_for() -> None:
    records = [*TWO_CALLS, record("half", 63, 16.5, OTHER), record("half", 153, 5, OTHER)]
    assert spans(records, 2) == [17.5, 11.0]


def test_a_kernel_that_the_profiler_dropped_is_noticed() -> None:
    with pytest.raises(LostRecords, match="between 1 and 2 records"):
        spans([r for r in TWO_CALLS if r.start != 161_000], 2)


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_missing_markers_mean_lost_records(missing: int) -> None:
    markers = [r for r in TWO_CALLS if "spin" in r.name]
    records = [r for r in TWO_CALLS if r is not markers[missing]]
    with pytest.raises(LostRecords, match="3 markers were recorded, wanted 4"):
        spans(records, 2)


def test_markers_of_a_call_itself_are_not_taken_for_ours() -> None:
    with pytest.raises(LostRecords):
        spans([*TWO_CALLS, record("spin_kernel", 65, 1), record("spin_kernel", 70, 1)], 2)


@pytest.mark.parametrize(
    "stray",
    [
        record("late", 77, 30, OTHER),  # begins in the call, ends after it
        record("between", 90, 30, OTHER),  # while the next call's flush runs
        record("after all", 200, 30, OTHER),
        record("before all", 1, 30, OTHER),
    ],
)
def test_work_that_a_call_does_not_wait_for_is_caught(stray: Record) -> None:
    with pytest.raises(StrayWork, match="another stream"):
        spans([*TWO_CALLS, stray], 2)


def test_a_call_that_launches_nothing_has_no_time() -> None:
    with pytest.raises(StrayWork, match="launched nothing"):
        spans([r for r in TWO_CALLS if not 151_000 < r.start < 164_000], 2)


def test_summary_is_median_and_nearest_ranks() -> None:
    assert summary([float(n) for n in range(1, 102)]) == (51.0, 11.0, 91.0)
    assert summary([3.0]) == (3.0, 3.0, 3.0)
