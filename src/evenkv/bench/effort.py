"""How often a case is called, beside the timed replays: the device makes these calls, the plan counts them.

Kept in one place, so that a plan cannot promise another protocol than the one that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

# The timed replays of a case are spread over so many rounds, in which implementations take turns.
ROUNDS = 5
# On the stream that captures, before it does: kernels may keep scratch for every stream that they meet.
CAPTURE_WARM_UP_CALLS = 1

# Beyond it a call scatters by less than a percent, and repeating it costs the run's time.
LONG_US = 1000.0


@dataclass(frozen=True)
class Effort:
    """Calls of each kind that no median of 100 is asked for.

    Attributes
    ----------
    warm_up : not timed, before the eager calls and before the replays of every round but the first, which
        always has one: how long a call takes is not known then
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
_LONG = Effort(warm_up=0, eager=3, host=3, wall=2, trial=1, copies=2)


def effort(call_us: float) -> Effort:
    """For calls that take about `call_us` microseconds."""
    return _LONG if call_us > LONG_US else _SHORT
