"""The main job on a GPU: flashinfer-bench's own Benchmark, workload by workload, traces filed after each."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flashinfer_bench.bench import Benchmark, BenchmarkConfig
from flashinfer_bench.data import Evaluation, Solution, Trace, TraceSet

from evenkv.evaluate.environment import INSTALL, INSTALL_FA3
from evenkv.evaluate.load import Case, kernel_of, trace_set_of
from evenkv.evaluate.traces import (
    Key,
    file_traces,
    is_current,
    key_of,
    load_traces,
    make_trace,
    trace_path,
)
from evenkv.paths import Repository

# What each peer's solution imports, and how to get it. A peer that is not there is missing, not failed.
_PEER_MODULES = {
    "fa3": ("flash_attn_interface", INSTALL_FA3),
    "flashinfer_tc": ("flashinfer", INSTALL),
    "flashinfer_cc": ("flashinfer", INSTALL),
}

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)` in workloads."""


class Runner(Protocol):
    """Evaluates solutions on one workload."""

    def run(self, case: Case, solutions: Sequence[Solution]) -> dict[str, Evaluation]:
        """Evaluations by solution name; raises RuntimeError when the workload could not be run at all."""
        ...

    def close(self) -> None: ...


class BenchmarkRunner:
    """flashinfer-bench's Benchmark, given one workload at a time so that its traces can be kept at once."""

    def __init__(self, repository: Repository, config: BenchmarkConfig) -> None:
        self._root = repository.root
        self._view = TraceSet(root=repository.root)
        self._benchmark = Benchmark(self._view, config)

    def run(self, case: Case, solutions: Sequence[Solution]) -> dict[str, Evaluation]:
        one = trace_set_of(Case(case.definition, case.workload, tuple(solutions)), self._root)
        self._view.definitions = one.definitions
        self._view.solutions = one.solutions
        self._view.workloads = one.workloads
        with _ErrorCollector() as errors:
            traces = self._benchmark.run_all(dump_traces=False).traces.get(case.definition.name, [])
        if not traces:
            raise RuntimeError("; ".join(errors.messages) or "flashinfer-bench gave no evaluation")
        return {trace.solution: trace.evaluation for trace in traces}

    def close(self) -> None:
        self._benchmark.close()


@dataclass
class GpuReport:
    """`traces` holds what was evaluated now and, with resume, what was current already."""

    traces: list[Trace] = field(default_factory=list)
    reused: int = 0
    not_evaluated: list[tuple[str, str, str]] = field(default_factory=list)
    """(definition, workload uuid, reason)."""
    left: int = 0
    """Workloads that the time budget left out."""

    @property
    def ok(self) -> bool:
        return not self.not_evaluated and all(trace.is_successful() for trace in self.traces)


def runnable_on_gpu(cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """Cases without solutions for the CPU and without peers that are not installed.

    Returns
    -------
    cases : list of Case
        Those with a solution left.
    missing : dict
        Kernel name to what to install.
    """
    missing: dict[str, str] = {}
    kept = []
    for case in cases:
        solutions = []
        for solution in case.solutions:
            if all(hardware.lower() == "cpu" for hardware in solution.spec.target_hardware):
                continue
            module, remedy = _PEER_MODULES.get(kernel_of(solution), ("", ""))
            if module and importlib.util.find_spec(module) is None:
                missing[kernel_of(solution)] = f"{module} is not installed: {remedy}"
                continue
            solutions.append(solution)
        if solutions:
            kept.append(Case(case.definition, case.workload, tuple(solutions)))
    return kept, missing


def split_current(
    cases: Sequence[Case], repository: Repository, hardware: str, resume: bool
) -> list[tuple[Case, list[Trace], list[Solution]]]:
    """For each case, the traces that stand, and the solutions that are to be evaluated.

    A trace stands when `resume` is set and the same solution made it on the same workload and GPU.
    """
    known = _filed_traces(cases, repository) if resume else {}
    split = []
    for case in cases:
        current: list[Trace] = []
        waiting: list[Solution] = []
        for solution in case.solutions:
            trace = known.get((case.workload.uuid, solution.name, hardware))
            if trace is not None and is_current(trace, case.workload, solution):
                current.append(trace)
            else:
                waiting.append(solution)
        split.append((case, current, waiting))
    return split


def evaluate_on_gpu(
    cases: Sequence[Case],
    runner: Runner,
    repository: Repository,
    libs: Mapping[str, str],
    hardware: str,
    *,
    resume: bool = False,
    save: bool = True,
    deadline: float | None = None,
    unbuilt: Collection[str] = (),
    progress: Progress = lambda what, done, total: None,
    report: GpuReport | None = None,
) -> GpuReport:
    """Evaluate every case and file its traces before the next one starts.

    Parameters
    ----------
    libs : mapping
        Versions and timer that go into each trace's environment.
    hardware : str
        The GPU's name: traces of another GPU are neither resumed from nor replaced.
    resume : bool
        Skip what was evaluated before with the same packed solution; else newer traces replace older ones.
    save : bool
        Write traces.
    deadline : float, optional
        `time.monotonic()` after which no further workload starts.
    unbuilt : collection of str
        Solutions that there was no time to build: workloads that need one are left, as after the deadline.
    report : GpuReport, optional
        Filled and returned: whoever gave it has what was done when the run is interrupted.
    """
    report = GpuReport() if report is None else report
    for number, (case, current, waiting) in enumerate(split_current(cases, repository, hardware, resume)):
        progress(f"{case.definition.name} {case.workload.uuid[:13]}", number, len(cases))
        report.traces += current
        report.reused += len(current)
        if not waiting:
            continue
        late = deadline is not None and time.monotonic() > deadline
        if late or any(solution.name in unbuilt for solution in waiting):
            report.left += 1
            continue
        try:
            evaluations = runner.run(case, waiting)
        except RuntimeError as error:
            report.not_evaluated.append((case.definition.name, case.workload.uuid, str(error)))
            continue
        by_path: dict[Path, list[Trace]] = {}
        for solution in waiting:
            trace = make_trace(case.definition, case.workload, solution, evaluations[solution.name], libs)
            by_path.setdefault(trace_path(repository, solution, case.definition), []).append(trace)
        for path, traces in by_path.items():
            report.traces += traces
            if save:
                file_traces(path, traces)
    progress("done", len(cases), len(cases))
    return report


def _filed_traces(cases: Sequence[Case], repository: Repository) -> dict[Key, Trace]:
    paths = {trace_path(repository, s, case.definition) for case in cases for s in case.solutions}
    return {key_of(trace): trace for path in sorted(paths) for trace in load_traces(path)}


class _ErrorCollector(logging.Handler):
    """Keeps what upstream only logs: why a workload gave no evaluation."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> _ErrorCollector:
        logging.getLogger("flashinfer_bench").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("flashinfer_bench").removeHandler(self)
