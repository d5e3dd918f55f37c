"""Files traces as `traces/<author>/<op type>/<definition>.jsonl`, one line a (workload, solution, GPU)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

from flashinfer_bench.data import Definition, Evaluation, Solution, Trace, Workload
from pydantic import ValidationError

from evenkv.errors import EvenkvError
from evenkv.evaluate.load import read_text
from evenkv.files import write_atomic
from evenkv.paths import Repository

_LOG_CHARACTERS = 2000
HASH_KEY = "evenkv_solution"
"""Where a trace keeps the first 12 digits of its solution's hash."""

Key = tuple[str, str, str]
"""(workload uuid, solution name, hardware): a file has one line for each."""


def trace_path(repository: Repository, solution: Solution, definition: Definition) -> Path:
    """Where traces of this solution's author and definition lie."""
    return repository.traces / solution.author / definition.op_type / f"{definition.name}.jsonl"


def run_libraries(driver: str | None) -> dict[str, str]:
    """Versions and the timer's name, for the record of every evaluation in this run."""
    bench = importlib.metadata.version("flashinfer-bench")
    libs = {"flashinfer_bench": bench, "timer": timer_name(bench)}
    for key, distribution in (("flashinfer", "flashinfer-python"), ("fa3", "tokenspeed-fa3")):
        try:
            libs[key] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if driver:
        libs["driver"] = driver
    return libs


def timer_name(bench_version: str) -> str:
    """What upstream's timer measures, as far as known: times of different timers are never compared."""
    if bench_version == "0.1.2":
        return "flashinfer-bench 0.1.2 CUDA events, host time included"
    return f"flashinfer-bench {bench_version}'s own timer"


def make_trace(
    definition: Definition,
    workload: Workload,
    solution: Solution,
    evaluation: Evaluation,
    libs: Mapping[str, str],
) -> Trace:
    """The trace as it is filed: upstream's evaluation, with the solution's hash and `libs` in its
    environment, and the last 2000 characters of its log."""
    environment = evaluation.environment.model_copy(
        update={"libs": {**evaluation.environment.libs, **libs, HASH_KEY: solution.hash()[:12]}}
    )
    filed = evaluation.model_copy(
        update={"environment": environment, "log": evaluation.log[-_LOG_CHARACTERS:]}
    )
    return Trace(definition=definition.name, workload=workload, solution=solution.name, evaluation=filed)


def is_current(trace: Trace, workload: Workload, solution: Solution) -> bool:
    """Whether this very solution made the trace on this very workload: same contents, not only same names."""
    return (
        trace.solution == solution.name
        and trace.workload == workload
        and trace.evaluation is not None
        and trace.evaluation.environment.libs.get(HASH_KEY) == solution.hash()[:12]
    )


def key_of(trace: Trace) -> Key:
    """The line of the file that the trace takes."""
    assert trace.solution is not None and trace.evaluation is not None
    return trace.workload.uuid, trace.solution, trace.evaluation.environment.hardware


def load_traces(path: Path) -> list[Trace]:
    """Traces of one file, in its order; a missing file has none.

    Raises
    ------
    EvenkvError
        When a line is not a trace with an evaluation; it names the file and the line.
    """
    if not path.exists():
        return []
    traces = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            trace = Trace.model_validate_json(line)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise EvenkvError(
                f"{path}, line {number} is not a valid trace: {message}.", "Remove the line, then run again."
            ) from error
        if trace.evaluation is None:
            raise EvenkvError(
                f"{path}, line {number} is a workload, not a trace.", "Move it to workloads/, then run again."
            )
        traces.append(trace)
    return traces


def file_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Add traces to the file: a line with the same key is replaced where it stands.

    The file is exchanged as a whole, so an interrupted run leaves the lines filed before.
    """
    filed = {key_of(trace): trace for trace in load_traces(path)}
    filed |= {key_of(trace): trace for trace in traces}
    write_atomic(path, "".join(f"{trace.model_dump_json()}\n" for trace in filed.values()).encode())
