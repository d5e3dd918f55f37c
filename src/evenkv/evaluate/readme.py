"""The README's tables, rendered from the traces on disk: `python -m evenkv.evaluate.readme [--check]`.

Times are compared inside one group only, of one GPU and one timer. A trace that names no timer, such as those
that flashinfer-bench files when it runs by itself, is counted and left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import typer
from flashinfer_bench.data import Definition, EvaluationStatus, Trace

from evenkv.errors import EvenkvError
from evenkv.evaluate.load import kernel_name, load_package, read_text
from evenkv.evaluate.table import BASELINE, OURS, Row, rows_from_traces
from evenkv.evaluate.traces import HASH_KEY, load_traces
from evenkv.evaluate.validate import request_lengths
from evenkv.files import replace_block, write_atomic
from evenkv.paths import OP_TYPE, Repository, find_repository
from evenkv.spec.family import SEED_DEFINITION, parse_name

BEGIN = "<!-- traces:begin -->"
END = "<!-- traces:end -->"
COMMAND = "python -m evenkv.evaluate.readme"
PLACEHOLDER = (
    "No traces are committed yet: `evenkv run` on a machine with a GPU writes them, "
    f"`{COMMAND}` then puts their tables here."
)

# Kernels in the order of their columns; others stand before the reference, sorted.
_FIRST = (OURS, "evenkv_triton", BASELINE)
_LAST = "torch_reference"

# What a caption names: the key in a trace's environment and how it is written.
_VERSIONS = (
    ("driver", "driver"),
    ("cuda", "CUDA"),
    ("torch", "torch"),
    ("triton", "triton"),
    ("flashinfer_bench", "flashinfer-bench"),
    ("flashinfer", "flashinfer"),
    ("fa3", "tokenspeed-fa3"),
)

Group = tuple[str, str]
"""(GPU, timer): what times may be compared within."""

Lengths = Mapping[tuple[str, str], Sequence[int]]
"""Tokens of each request by (definition, workload uuid)."""


def filed_traces(repository: Repository) -> list[Trace]:
    """All traces under `traces/`, files in the order of their paths."""
    paths = sorted(repository.traces.glob(f"*/{OP_TYPE}/*.jsonl"))
    return [trace for path in paths for trace in load_traces(path)]


def render_block(traces: Sequence[Trace], repository: Repository) -> str:
    """What stands between the markers: for each GPU and timer the seed definition's table and a summary.

    Parameters
    ----------
    traces : sequence of Trace
        With evaluations; the last one of a (workload, solution, GPU, timer) counts.
    repository : Repository
        Where the traces' definitions and blobs lie.

    Raises
    ------
    EvenkvError
        When a trace's definition or blob is not there or does not fit.
    """
    groups: dict[Group, list[Trace]] = {}
    for trace in traces:
        environment = trace.evaluation.environment
        if "timer" in environment.libs:
            groups.setdefault((environment.hardware, environment.libs["timer"]), []).append(trace)
    lengths = _lengths((trace for group in groups.values() for trace in group), repository)
    parts = [part for group in sorted(groups) for part in _group_parts(group, groups[group], lengths)]
    parts += _outdated((trace for group in groups.values() for trace in group), repository)
    unnamed = len(traces) - sum(map(len, groups.values()))
    if unnamed:
        parts.append(f"Left out: {unnamed} traces that name no timer.")
    return "\n\n".join(parts) or PLACEHOLDER


def put_block(text: str, block: str) -> str:
    """`text` with `block` between the markers."""
    return replace_block("README.md", text, (BEGIN, END), block)


def _group_parts(group: Group, traces: Sequence[Trace], lengths: Lengths) -> Iterator[str]:
    hardware, timer = group
    rows = rows_from_traces(traces, lengths)
    seed_rows = [row for row in rows if row.definition == SEED_DEFINITION]
    if seed_rows:
        seed = [trace for trace in traces if trace.definition == SEED_DEFINITION]
        yield f"**`{SEED_DEFINITION}` on {hardware}**: latency of one call in us"
        yield _seed_table(seed_rows, seed)
        yield (
            f"{hardware}; {_versions(seed)}; timer: {timer}; {_count(seed_rows, 'workload')}; "
            f"evaluated {_dates(seed)}. Ratio: {BASELINE} / {OURS}. Errors: the largest absolute one over "
            "output and lse, as flashinfer-bench reports it."
        )
    yield f"**All definitions on {hardware}**: {BASELINE} / {OURS}"
    yield _summary_table(rows, traces)
    yield f"{hardware}; {_versions(traces)}; timer: {timer}; evaluated {_dates(traces)}."


def _outdated(traces: Iterable[Trace], repository: Repository) -> Iterator[str]:
    """A line for evaluations of another source than the solution that is packed now."""
    counts: dict[str, int] = {}
    hashes: dict[str, str] = {}
    for trace in traces:
        hashes = hashes or {
            solution.name: solution.hash()
            for found in load_package(repository).solutions.values()
            for solution in found
        }
        evaluated = trace.evaluation.environment.libs.get(HASH_KEY, "")
        if not evaluated or not hashes.get(trace.solution, "").startswith(evaluated):
            kernel = kernel_name(trace.solution, trace.definition)
            counts[kernel] = counts.get(kernel, 0) + 1
    if counts:
        named = ", ".join(f"{kernel} ({count} evaluations)" for kernel, count in sorted(counts.items()))
        yield f"Evaluated with another source than the one packed now, to be evaluated again: {named}."


def _lengths(traces: Iterable[Trace], repository: Repository) -> Lengths:
    definitions: dict[str, Definition] = {}
    lengths: dict[tuple[str, str], Sequence[int]] = {}
    for trace in traces:
        definitions = definitions or load_package(repository).definitions
        key = (trace.definition, trace.workload.uuid)
        if trace.definition not in definitions:
            raise EvenkvError(
                f"Traces are for definition {trace.definition!r}, which is not in {repository.definitions}.",
                "Remove the traces, or restore the definition.",
            )
        if key not in lengths:
            lengths[key] = request_lengths(definitions[trace.definition], trace.workload, repository.root)
    return lengths


def _seed_table(rows: Sequence[Row], traces: Sequence[Trace]) -> str:
    found = {(trace.workload.uuid, kernel_name(trace.solution, trace.definition)): trace for trace in traces}
    kernels = _columns({kernel for _, kernel in found})
    table = [
        ("workload", "batch", "kv tokens", *kernels, "ratio", f"{OURS} error", f"{BASELINE} error"),
    ]
    for row in sorted(rows, key=lambda row: (row.tokens, row.workload)):
        traces_of = {kernel: found.get((row.workload, kernel)) for kernel in (*kernels, OURS, BASELINE)}
        table.append(
            (
                f"`{short_uuid(row.workload, row.definition)}`",
                str(row.batch),
                f"{row.tokens:,}",
                *(_latency(traces_of[kernel]) for kernel in kernels),
                _ratio(row.ratio),
                *(_error(traces_of[kernel]) for kernel in (OURS, BASELINE)),
            )
        )
    return _markdown(table)


def _summary_table(rows: Sequence[Row], traces: Sequence[Trace]) -> str:
    table = [
        ("definition", "workloads", "evaluations PASSED", "ratio, geometric mean", "lowest", "highest"),
    ]
    latest = {(trace.definition, trace.workload.uuid, trace.solution): trace for trace in traces}
    for name in sorted({row.definition for row in rows}):
        mine = [row for row in rows if row.definition == name]
        evaluated = [trace for trace in latest.values() if trace.definition == name]
        table.append((parse_name(name).short_name, *_summary(mine, evaluated)))
    table.append(("all", *_summary(rows, list(latest.values()))))
    return _markdown(table)


def _summary(rows: Sequence[Row], traces: Sequence[Trace]) -> tuple[str, ...]:
    failed: dict[str, int] = {}
    for trace in traces:
        if not trace.is_successful():
            what = f"{kernel_name(trace.solution, trace.definition)}: {trace.evaluation.status.value}"
            failed[what] = failed.get(what, 0) + 1
    passed = len(traces) - sum(failed.values())
    verdict = f"all {passed}" if not failed else f"{passed} of {len(traces)}"
    faults = "".join(f", {what} x {count}" for what, count in failed.items())
    ratios = [row.ratio for row in rows if row.ratio]
    spread = (statistics.geometric_mean(ratios), min(ratios), max(ratios)) if ratios else (None,) * 3
    return str(len(rows)), verdict + faults, *map(_ratio, spread)


def short_uuid(uuid: str, definition: str) -> str:
    """Drawn workloads without the definition's name, upstream's uuids by their first 8 digits."""
    if uuid.startswith(("synth-", "capture-", "captured-")):
        return uuid.replace(f"{parse_name(definition).short_name}-", "", 1)
    return uuid[:8]


def _columns(kernels: set[str]) -> list[str]:
    known = [*_FIRST, *sorted(kernels - {*_FIRST, _LAST}), _LAST]
    return [kernel for kernel in known if kernel in kernels | {OURS, BASELINE}]


def _latency(trace: Trace | None) -> str:
    if trace is None:
        return "-"
    if trace.evaluation.status != EvaluationStatus.PASSED:
        return trace.evaluation.status.value
    return f"{1e3 * trace.evaluation.performance.latency_ms:.1f}"


def _error(trace: Trace | None) -> str:
    if trace is None or trace.evaluation.correctness is None:
        return "-"
    return f"{trace.evaluation.correctness.max_absolute_error:.1e}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _versions(traces: Sequence[Trace]) -> str:
    """Every version that occurs, so that mixed traces show as such."""
    named = []
    for key, label in _VERSIONS:
        recorded = [trace.evaluation.environment.libs.get(key) for trace in traces]
        values = sorted({value for value in recorded if value})
        if values:
            part = "" if all(recorded) else " (in the runs that had it)"
            named.append(f"{label} {' and '.join(values)}{part}")
    return ", ".join(named)


def _dates(traces: Sequence[Trace]) -> str:
    days = sorted({trace.evaluation.timestamp[:10] for trace in traces})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _count(rows: Sequence[Row], what: str) -> str:
    return f"{len(rows)} {what}{'' if len(rows) == 1 else 's'}"


def _markdown(table: Sequence[Sequence[str]]) -> str:
    head, *body = table
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when README.md differs.")
    ] = False,
) -> None:
    """Put the tables of the traces on disk into README.md."""
    try:
        repository = find_repository()
        path = repository.root / "README.md"
        old = read_text(path)
        new = put_block(old, render_block(filed_traces(repository), repository))
    except EvenkvError as error:
        typer.echo(f"evenkv: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    if new == old:
        typer.echo("README.md shows what the traces hold.")
    elif check:
        typer.echo(f"README.md differs from the traces: run `{COMMAND}`.", err=True)
        raise typer.Exit(1)
    else:
        write_atomic(path, new.encode())
        typer.echo("README.md: tables written.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app(prog_name=COMMAND)
