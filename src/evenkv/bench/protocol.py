"""What a device offers to the harness: the one boundary between measuring and everything around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from evenkv.bench.case import Case
from evenkv.bench.record import Status, Timer
from evenkv.errors import EvenkvError

_MOST_MOVED = 1.03  # the largest median of a round over the smallest


def keeps_time(moved: float | None) -> bool:
    """Whether times did not move, as `Outcome.moved` has it: then a falling clock is no fault.

    What memory bounds keeps its time at two thirds of the clock, and a GPU at its power limit lowers it.
    """
    return moved is not None and moved <= _MOST_MOVED


@dataclass(frozen=True)
class DeviceFacts:
    """What every row says about the device. `gpu` is the driver's name, e.g. "NVIDIA H200".

    `datasheet_gbps` is only needed where the harness has no entry for the GPU (1e9 bytes a second).
    """

    gpu: str
    driver: str | None
    cuda: str | None
    torch: str | None
    datasheet_gbps: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What one implementation did on one case. Status "ok" has every number, others have a `reason`.

    Times in microseconds (medians); `spread` is (p10, p90) of `graph_us`; `moved` the largest median of a
    round over the smallest, None where there were no rounds; `reason` of an "ok" outcome may say why its
    number is shaky (throttle reasons). `temperature_c` is the least and the most beside the rounds, `plan_us`
    the host's time of planning (None: it does not plan), `setting` the one that was chosen.
    """

    status: Status
    reason: str | None = None
    graph_us: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    iterations: int | None = None
    spread: tuple[float, float] | None = None
    max_abs_err: float | None = None
    rel_err: float | None = None
    matched_copy_us: float | None = None
    timer: Timer | None = None
    sm_clock_mhz_before: float | None = None
    sm_clock_mhz_after: float | None = None
    peer_version: str | None = None
    moved: float | None = None
    # For the machine's log alone.
    temperature_c: tuple[float, float] | None = None
    throttle_reasons: tuple[str, ...] = ()
    plan_us: float | None = None
    setting: str | None = None


class DeviceLost(EvenkvError):
    """The device, not one implementation, is gone: the run cannot go on. Finished rows stay."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, "Mend the GPU, then go on with the same command and --resume.", exit_code=1)


class Device(Protocol):
    """A GPU (`evenkv.bench.device`) or the stand-in (`evenkv.bench.standin`)."""

    def facts(self) -> DeviceFacts: ...

    def self_test(self) -> list[str]:
        """Faults of the harness on this machine, one sentence each; none when it can be trusted."""
        ...

    def implementations(self) -> Mapping[str, str | None]:
        """Every implementation that it knows; None: can run, else why it cannot."""
        ...

    def copy_peak_gbps(self) -> float:
        """Device-to-device copy at peak size, read and write counted, measured in this run."""
        ...

    def launch_floor_us(self) -> float | None:
        """Microseconds of a kernel that does nothing, by the timer of the rows, L2 cold."""
        ...

    def read_peak_gbps(self) -> float | None:
        """1e9 bytes a second that a plain reduction reads at peak size: cards of one name differ in it."""
        ...

    def build(
        self, cases: Sequence[Case], progress: Callable[[str, float], None], implementations: Sequence[str]
    ) -> None:
        """Compile what they need for the cases, side by side; `measure` tells what failed."""
        ...

    def begin_family(self, cases: Sequence[Case]) -> None:
        """Allocate once what the cases, all of one family, share.

        When the memory does not suffice for the largest, it allocates what it can and `measure` answers "oom"
        for the cases beyond.
        """
        ...

    def measure(
        self, case: Case, implementations: Sequence[str], iterations: int, warm: bool
    ) -> Mapping[str, Outcome]:
        """Check, then time the implementations, interleaved: an outcome for each, whatever it did.

        Raises
        ------
        DeviceLost
            When the device itself is gone.
        """
        ...

    def end_family(self) -> None:
        """Free what `begin_family` allocated, and check that it is free."""
        ...

    def close(self) -> None:
        """End every process it started."""
        ...
