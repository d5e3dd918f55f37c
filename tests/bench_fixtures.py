"""Cases, rows and a run on the stand-in, for the tests of `evenkv bench`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from evenkv.bench.case import Case
from evenkv.bench.judge import Judge, Provenance
from evenkv.bench.protocol import DeviceFacts, Outcome
from evenkv.bench.record import IMPLEMENTATIONS, Row
from evenkv.bench.run import RunReport, run_bench
from evenkv.bench.standin import StandIn

SOURCE = Provenance({"evenkv-cuda": "c" * 64, "evenkv-triton": "d" * 64}, "f" * 40)
H200 = DeviceFacts("NVIDIA H200", "580.1", "13.0", "2.11.0")
COPY_GBPS = 4250.0


def case(batch: int = 32, context: int | None = 4096, lengths: Any = None, **more: Any) -> Case:
    values = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, **more}
    return Case(batch, context, lengths, **values)


def outcome(graph_us: float, **more: Any) -> Outcome:
    values: dict[str, Any] = {
        "status": "ok",
        "graph_us": graph_us,
        "eager_us": graph_us + 5,
        "host_us": 4.0,
        "iterations": 100,
        "spread": (0.99 * graph_us, 1.01 * graph_us),
        "max_abs_err": 1e-4,
        "rel_err": 1e-3,
        "matched_copy_us": 130.0,
        "timer": "cupti",
        "sm_clock_mhz_before": 1980.0,
        "sm_clock_mhz_after": 1980.0,
    }
    return Outcome(**{**values, **more})


def row(the_case: Case, impl: str, graph_us: float, facts: DeviceFacts = H200, **more: Any) -> Row:
    return Judge(facts, COPY_GBPS, SOURCE).row(the_case, impl, outcome(graph_us, **more))


def bench(path: Path, cases: list[Case], device: StandIn | None = None, **more: Any) -> RunReport:
    options = {"implementations": IMPLEMENTATIONS, "provenance": SOURCE, **more}
    names = options.pop("implementations")
    return run_bench(device or StandIn(), cases, names, path, **options)


class Clock:
    """A clock that moves on by `step_s` at each look."""

    def __init__(self, step_s: float) -> None:
        self._times = itertools.count(0.0, step_s)

    def __call__(self) -> float:
        return next(self._times)
