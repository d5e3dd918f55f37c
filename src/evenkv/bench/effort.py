"""How often a case is called, beside the timed replays: the device makes these calls, the plan counts them.

Kept in one place, so that a plan cannot promise another protocol than the one that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

# The timed replays of a case are spread over so many rounds, in which implementations take turns.
ROUNDS = 4
# On the stream that captures, before it does: kernels may keep scratch for every stream that they meet.
CAPTURE_WARM_UP_CALLS = 1
# Of the host's calls, which follow one another: the first finds the CPU's caches cold.
HOST_WARM_UP_CALLS = 1


@dataclass(frozen=True)
class Effort:
    """Calls of each kind that no median of 100 is asked for.

    Attributes
    ----------
    warm_up : not timed, before the eager calls and before each round's replays
    eager, host : of an implementation, timed on the device and on the CPU
    wall : replays that the host's clock cross-checks; the shortest of them counts
    trial : replays that choose between an implementation's settings
    copies : matched copies of one round
    """

    warm_up: int
    eager: int
    host: int
    wall: int
    trial: int
    copies: int


_SHORT = Effort(warm_up=1, eager=10, host=10, wall=5, trial=6, copies=6)
_LONG = Effort(warm_up=0, eager=3, host=5, wall=2, trial=1, copies=2)
_VERY_LONG = Effort(warm_up=0, eager=2, host=3, wall=1, trial=1, copies=1)
# Microseconds beyond which calls scatter by a percent, and by so little that a second one tells nothing new:
# repeating these is what a run's time goes into.
_LONG_US, _VERY_LONG_US = 300.0, 3000.0


def effort(call_us: float) -> Effort:
    """For calls that take about `call_us` microseconds."""
    if call_us > _VERY_LONG_US:
        return _VERY_LONG
    return _LONG if call_us > _LONG_US else _SHORT
