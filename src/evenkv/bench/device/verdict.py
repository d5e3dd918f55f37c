"""Rules that decide whether a time may stand. Pure: numbers in, a sentence or None out."""

from __future__ import annotations

from collections.abc import Sequence

from evenkv.bench.device.clocks import ClockState
from evenkv.bench.protocol import keeps_time

_WALL_FACTOR = 1.5
_WALL_SLACK_US = 60.0  # launch, wake-up of the host and their jitter
_CLOCK_DROP = 0.1


def hidden_work(device_us: float, wall_us: float) -> str | None:
    """Whether the device was busy for much longer than the timer saw.

    Parameters
    ----------
    device_us : float
        The timer's median.
    wall_us : float
        Host time from the launch until the whole device is idle; the smallest of several.
    """
    if wall_us > _WALL_FACTOR * device_us + _WALL_SLACK_US:
        return (
            f"the device was busy for {wall_us:.1f} us, the timer saw {device_us:.1f} us: "
            "work is hidden on another stream"
        )
    return None


def throttling(states: Sequence[ClockState | None], moved: float | None = None) -> str | None:
    """What held the clock down in any of the states, or how far it fell where times `moved` with it."""
    known = [state for state in states if state is not None]
    reasons = []
    seen = sorted({reason for state in known for reason in state.throttle_reasons})
    if seen:
        reasons.append(f"throttled by {', '.join(seen)}")
    speeds = [state.sm_clock_mhz for state in known]
    # From the first on: a clock that rises from idle is no fault.
    if speeds and min(speeds) < (1 - _CLOCK_DROP) * speeds[0] and not keeps_time(moved):
        reasons.append(f"the SM clock fell from {speeds[0]:.0f} to {min(speeds):.0f} MHz")
    return "; ".join(reasons) or None
