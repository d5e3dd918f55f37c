"""From activity records to the time of each call: which records belong to a call, and what does not fit.

Pure: records in, microseconds out. A call is what lies between its two markers, tiny kernels that the timer
launches on the call's stream right before and after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# torch.cuda._sleep's kernel. No attention library launches it; one that did would break the count of markers.
MARKER = "spin_kernel"

# Two kernels of one stream may overlap by as much in the records, and a call gains nothing by it.
_CLOCK_SLACK_NS = 500


class Record(NamedTuple):
    """One kernel, copy or memset on the device; times in ns of one clock."""

    name: str
    start: int
    end: int
    stream: int


class LostRecords(Exception):
    """The records are incomplete: no time, through no fault of the call."""


class StrayWork(Exception):
    """A call did what a call must not: its work goes on when it is over, or is nowhere."""


def spans(records: Sequence[Record], calls: int) -> list[float]:
    """Microseconds from the first start to the last end of each call's records, in order.

    Parameters
    ----------
    records : sequence of Record
        Everything that ran, in any order. What ran between a call's closing marker and the next one's opening
        marker on the markers' stream (flush, new inputs) is not counted.
    calls : int
        How many were made.

    Raises
    ------
    LostRecords
        Markers are missing or too many, or calls differ in how many records they have.
    StrayWork
        A call launched nothing, or its work went on after it: records that run past the closing marker, or
        begin outside of every call on another stream.
    """
    ordered = sorted(records, key=lambda record: record.start)
    markers = [record for record in ordered if MARKER in record.name]
    if len(markers) != 2 * calls:
        raise LostRecords(f"{len(markers)} markers were recorded, wanted {2 * calls}: records are lost")
    if len({marker.stream for marker in markers}) > 1:
        raise LostRecords("markers ran on several streams")
    times: list[float] = []
    sizes: set[int] = set()
    position = 0
    work = [record for record in ordered if MARKER not in record.name]
    for opening, closing in zip(markers[::2], markers[1::2], strict=True):
        while position < len(work) and work[position].start < opening.start:
            _demand_between_calls(work[position], opening.stream)
            position += 1
        inside = []
        while position < len(work) and work[position].start < closing.start:
            inside.append(work[position])
            position += 1
        if not inside:
            raise StrayWork("a call launched nothing on the device before it ended")
        last = max(record.end for record in inside)
        if last > closing.start + _CLOCK_SLACK_NS:
            late = next(record.name for record in inside if record.end == last)
            raise StrayWork(f"work goes on after the call has ended: {late[:80]} on another stream")
        sizes.add(len(inside))
        times.append((last - inside[0].start) / 1e3)
    for record in work[position:]:
        _demand_between_calls(record, markers[-1].stream if markers else record.stream)
    if len(sizes) > 1:
        # The same call every time: where one has fewer kernels, the profiler dropped some.
        raise LostRecords(f"calls have between {min(sizes)} and {max(sizes)} records")
    return times


def _demand_between_calls(record: Record, stream: int) -> None:
    if record.stream != stream:
        raise StrayWork(f"work outside of every call: {record.name[:80]} on another stream")


def summary(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, p10 and p90 (nearest rank)."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]
