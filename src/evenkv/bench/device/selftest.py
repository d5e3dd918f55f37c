"""Can this harness be trusted on this machine? Probes that a broken timer, flush or cross-check fails."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenkv.bench.device.worker import WorkerFault
from evenkv.files import write_atomic

COLD_BYTES = 32 << 20  # fits every L2 of today: read warm it passes the memory's peak
_WALL_BYTES = 1 << 30
_CALLS = 50
_ATTEMPTS = 3

# Of a kernel that does nothing, in microseconds: 2 to 3 by CUPTI, 4.7 by events on an H200.
_EMPTY_US = {"cupti": 6.0, "events": 15.0}
_COPY_CHANGE = 0.05
_TIMERS_APART = 0.05
_TIMERS_APART_US = 15.0
_WALL_SHORT = 0.95


@dataclass(frozen=True)
class Probes:
    """What the probes gave: microseconds, and 1e9 bytes a second for copies.

    Attributes
    ----------
    empty_us : a kernel that does nothing, flush on
    cold_us, warm_us : reading COLD_BYTES
    copy_gbps, last_copy_gbps : at peak size now, and in the last run on this GPU (None: none)
    copy_us, copy_events_us, copy_wall_us : one large copy by the timer, by events, by the host's clock
    hidden : None when work on another stream was caught
    """

    empty_us: float
    cold_us: float
    warm_us: float
    copy_gbps: float
    last_copy_gbps: float | None
    copy_us: float
    copy_events_us: float
    copy_wall_us: float
    hidden: str | None


def faults_of(probes: Probes, timer: str, peak_gbps: float | None) -> list[str]:
    """What is wrong, one sentence each."""
    faults = []
    limit = _EMPTY_US[timer]
    if not 0 < probes.empty_us <= limit:
        faults.append(
            f"an empty kernel takes {probes.empty_us:.2f} us with the flush on, wanted at most {limit:g}: "
            "the flush or the timer adds to what it measures"
        )
    cold_gbps = COLD_BYTES / probes.cold_us / 1e3
    if peak_gbps is not None and cold_gbps > peak_gbps:
        faults.append(
            f"reading 32 MiB cold runs at {cold_gbps:.0f} GB/s, over the memory's {peak_gbps:.0f}: not cold"
        )
    if peak_gbps is None and probes.cold_us < 1.2 * probes.warm_us:
        faults.append(
            f"reading 32 MiB takes {probes.cold_us:.1f} us cold and {probes.warm_us:.1f} us warm: not cold"
        )
    last = probes.last_copy_gbps
    if last is not None and abs(probes.copy_gbps - last) > _COPY_CHANGE * last:
        faults.append(
            f"the copy runs at {probes.copy_gbps:.0f} GB/s, in the last run here at {last:.0f}: "
            "the GPU is shared, throttled or another one"
        )
    if peak_gbps is not None and probes.copy_gbps > peak_gbps:
        faults.append(f"the copy runs at {probes.copy_gbps:.0f} GB/s, over the memory's {peak_gbps:.0f}")
    apart = abs(probes.copy_us - probes.copy_events_us)
    if apart > _TIMERS_APART * probes.copy_events_us + _TIMERS_APART_US:
        faults.append(
            f"a copy takes {probes.copy_us:.1f} us by {timer} and {probes.copy_events_us:.1f} us by events"
        )
    if probes.copy_wall_us < _WALL_SHORT * probes.copy_us:
        faults.append(
            f"a copy takes {probes.copy_us:.1f} us by {timer}, but {probes.copy_wall_us:.1f} us by the clock "
            f"({probes.copy_events_us:.1f} us by events (behind the flush, as by {timer}) and "
            f"{2 * _WALL_BYTES / probes.copy_gbps / 1e3:.1f} us at the copy peak)"
        )
    if probes.hidden is not None:
        faults.append(probes.hidden)
    return faults


def run_probes(call: Callable[..., Any], copy_gbps: float, last_copy_gbps: float | None) -> Probes:
    """Take the probes through the owner's process (`call(command, **arguments)`)."""
    ours, events, wall = call("probe_walls", num_bytes=_WALL_BYTES, count=10)
    return Probes(
        empty_us=statistics.median(call("probe_empty", count=_CALLS)),
        cold_us=statistics.median(call("probe_read", num_bytes=COLD_BYTES, count=_CALLS, cold=True)),
        warm_us=statistics.median(call("probe_read", num_bytes=COLD_BYTES, count=_CALLS, cold=False)),
        copy_gbps=copy_gbps,
        last_copy_gbps=last_copy_gbps,
        copy_us=ours,
        copy_events_us=events,
        copy_wall_us=wall,
        hidden=call("probe_hidden", num_bytes=_WALL_BYTES),
    )


def self_test(
    call: Callable[..., Any], copy_gbps: float, timer: str, peak_gbps: float | None, memory: CopyMemory
) -> list[str]:
    """Probe and judge, again when something is wrong; remembers the copy's speed when all is well.

    A GPU that is disturbed for a second passes at the next attempt; a broken timer or flush never does.
    """
    faults: list[str] = []
    for _ in range(_ATTEMPTS):
        try:
            probes = run_probes(call, copy_gbps, memory.last())
        except WorkerFault as fault:
            return [f"the probes do not run: {fault.reason}"]
        faults = faults_of(probes, timer, peak_gbps)
        if not faults:
            memory.remember(copy_gbps)
            break
    return [
        f"{fault} (remembered in {memory.path}: remove it when the GPU or driver has changed)"
        if "in the last run here" in fault
        else fault
        for fault in faults
    ]


@dataclass(frozen=True)
class CopyMemory:
    """The copy's speed in the last run that passed, by GPU and timer."""

    path: Path
    key: str

    def last(self) -> float | None:
        """1e9 bytes a second, or None. An unreadable file counts as none."""
        value = self._all().get(self.key)
        return float(value) if isinstance(value, int | float) else None

    def remember(self, gbps: float) -> None:
        write_atomic(self.path, json.dumps({**self._all(), self.key: gbps}, indent=2).encode() + b"\n")

    def _all(self) -> dict[str, Any]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}
