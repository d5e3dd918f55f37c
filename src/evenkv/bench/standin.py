"""A device that measures nothing: times from a roofline model with noise, the same in every run.

For tests of everything around the measurement, and for trying the command without a GPU. Its rows say that
they are of a GPU named "standin", which no table or plot of the docs shows.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evenkv.bench import plan
from evenkv.bench.case import Case
from evenkv.bench.protocol import DeviceFacts, Outcome
from evenkv.bench.record import IMPLEMENTATIONS, OURS

GPU = "standin"
_DATASHEET_GBPS = 4800.0
_COPY_GBPS = 4250.0
_LAUNCH_US = 4.0
# What the start and the end of a kernel cost beside its bytes.
_TAIL_US = 3.0


@dataclass
class StandIn:
    """The stand-in for a GPU.

    Attributes
    ----------
    missing : mapping
        Implementations to lack, with reasons.
    outcomes : mapping
        By (case, implementation): what `measure` answers instead of the model; an exception is raised.
    faults : sequence of str
        What the self-test answers.
    memory_bytes : int
        Larger caches answer "oom".
    second_s : float
        Seconds to sleep for each predicted second of a case.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    outcomes: Mapping[tuple[Case, str], Outcome | BaseException] = field(default_factory=dict)
    faults: Sequence[str] = ()
    memory_bytes: int = 141 * 10**9
    second_s: float = 0.0
    log: list[str] = field(default_factory=list)

    def facts(self) -> DeviceFacts:
        return DeviceFacts(GPU, None, None, None, datasheet_gbps=_DATASHEET_GBPS)

    def self_test(self) -> list[str]:
        return list(self.faults)

    def implementations(self) -> dict[str, str | None]:
        return {name: self.missing.get(name) for name in IMPLEMENTATIONS}

    def copy_peak_gbps(self) -> float:
        return _COPY_GBPS

    def launch_floor_us(self) -> float:
        return _LAUNCH_US

    def read_peak_gbps(self) -> float:
        return _COPY_GBPS

    def build(
        self, cases: Sequence[Case], progress: Callable[[str, float], None], implementations: Sequence[str]
    ) -> None:
        self.log.append(f"build {len(cases)} for {','.join(implementations)}")

    def begin_family(self, cases: Sequence[Case]) -> None:
        self.log.append(f"begin {cases[0].family} {len(cases)}")

    def measure(
        self, case: Case, implementations: Sequence[str], iterations: int, warm: bool
    ) -> dict[str, Outcome]:
        self.log.append(f"measure {case.name} {','.join(implementations)}")
        if self.second_s:
            seconds = plan.case_seconds(case, implementations, iterations, _COPY_GBPS)
            time.sleep(self.second_s * seconds)
        answers = {}
        for name in implementations:
            answer = self.outcomes.get((case, name)) or self._model(case, name, iterations)
            if isinstance(answer, BaseException):
                raise answer
            answers[name] = answer
        return answers

    def end_family(self) -> None:
        self.log.append("end")

    def close(self) -> None:
        self.log.append("close")

    def _model(self, case: Case, impl: str, iterations: int) -> Outcome:
        if case.kv_bytes() > self.memory_bytes:
            return Outcome("oom", f"{case.kv_bytes() / 1e9:.1f} GB of {self.memory_bytes / 1e9:.1f} GB")
        rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{case.name} {impl}".encode())))
        bytes_us = case.kv_bytes() / _COPY_GBPS * 1e-3
        median = (_LAUNCH_US + _TAIL_US + plan.slowness(impl, case) * bytes_us) * (1 + 0.01 * rng.random())
        error = 2e-4 * (1 + rng.random())
        return Outcome(
            status="ok",
            graph_us=median,
            eager_us=median + 5.0,
            host_us=4.0,
            iterations=iterations,
            spread=(0.99 * median, 1.01 * median),
            max_abs_err=error,
            rel_err=10 * error,
            matched_copy_us=_LAUNCH_US + bytes_us,
            timer="events",
            sm_clock_mhz_before=1980.0,
            sm_clock_mhz_after=1980.0,
            peer_version=None if impl in OURS else "standin",
        )
