"""Tables of results: one row a workload, from traces (GPU) or from CPU results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashinfer_bench.data import EvaluationStatus, Trace
from rich.table import Table

from evenkv.evaluate.cpu import CpuReport
from evenkv.evaluate.load import kernel_name
from evenkv.numerics.bytes import problem_bytes
from evenkv.pack.compile import CompileResult
from evenkv.spec.family import parse_name

OURS = "evenkv_cuda"
BASELINE = "flashinfer_tc"
_OUR_PREFIX = "evenkv_"

# Bytes a second by the name that the driver gives; datasheet, full memory configuration.
DATASHEET_BANDWIDTH = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H20": 4.0e12,
    "NVIDIA GH200 480GB": 4.0e12,
    "NVIDIA B200": 8.0e12,
    "NVIDIA GB200": 8.0e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12,
}


@dataclass(frozen=True)
class Row:
    """One workload on one GPU. Latencies in microseconds; None where there is no passed evaluation.

    `ratio` is baseline / ours. `floor_us` is the bytes of the problem at the datasheet bandwidth.
    `max_abs_err` is that of ours. `latencies` has every solution that passed, by kernel name.
    """

    definition: str
    workload: str
    hardware: str
    batch: int
    tokens: int
    status: str
    ours_us: float | None
    best_ours_us: float | None
    best_ours: str | None
    baseline_us: float | None
    ratio: float | None
    floor_us: float | None
    max_abs_err: float | None
    latencies: dict[str, float]


def rows_from_traces(traces: Sequence[Trace], lengths: Mapping[tuple[str, str], Sequence[int]]) -> list[Row]:
    """One row for every (definition, workload, hardware), in the order of first appearance.

    Parameters
    ----------
    traces : sequence of Trace
        With evaluations; the last one of a (workload, solution, hardware) counts.
    lengths : mapping
        Tokens of each request by (definition, workload uuid).
    """
    groups: dict[tuple[str, str, str], dict[str, Trace]] = {}
    for trace in traces:
        key = (trace.definition, trace.workload.uuid, trace.evaluation.environment.hardware)
        groups.setdefault(key, {})[kernel_name(trace.solution, trace.definition)] = trace
    return [_row(*key, group, lengths[key[:2]]) for key, group in groups.items()]


def _row(
    definition: str, workload: str, hardware: str, by_kernel: Mapping[str, Trace], lengths: Sequence[int]
) -> Row:
    passed = {k: t.evaluation for k, t in by_kernel.items() if t.is_successful()}
    latencies = {kernel: 1e3 * e.performance.latency_ms for kernel, e in passed.items()}
    ours, baseline = latencies.get(OURS), latencies.get(BASELINE)
    best = min((k for k in latencies if k.startswith(_OUR_PREFIX)), key=latencies.__getitem__, default=None)
    bandwidth = DATASHEET_BANDWIDTH.get(hardware)
    moved = problem_bytes(parse_name(definition), lengths)
    failed = [
        f"{kernel}: {trace.evaluation.status.value}"
        for kernel, trace in by_kernel.items()
        if trace.evaluation.status != EvaluationStatus.PASSED
    ]
    return Row(
        definition,
        workload,
        hardware,
        len(lengths),
        sum(lengths),
        ", ".join(failed) or f"{len(passed)} PASSED",
        ours,
        latencies[best] if best else None,
        best,
        baseline,
        baseline / ours if ours and baseline else None,
        1e6 * moved / bandwidth if bandwidth else None,
        passed[OURS].correctness.max_absolute_error if OURS in passed else None,
        latencies,
    )


def gpu_table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    table = Table(title="Latency in us", caption="floor: bytes of the problem / datasheet bandwidth")
    for name in ("definition", "workload"):
        table.add_column(name, overflow="fold")
    for name in ("batch", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("status", overflow="fold")
    for name in (OURS, "best ours", BASELINE, "ratio", "floor", "max abs err"):
        table.add_column(name, justify="right")
    for row in rows:
        best = f"{row.best_ours_us:.1f} {row.best_ours.removeprefix(_OUR_PREFIX)}" if row.best_ours else "-"
        table.add_row(
            parse_name(row.definition).short_name,
            row.workload,
            str(row.batch),
            str(row.tokens),
            row.status,
            _number(row.ours_us, ".1f"),
            best,
            _number(row.baseline_us, ".1f"),
            _number(row.ratio, ".2f", "x"),
            _number(row.floor_us, ".1f"),
            _number(row.max_abs_err, ".1e"),
        )
    return table


def cpu_table(report: CpuReport) -> Table:
    """CPU results, one row a (workload, solution)."""
    table = Table(caption="host times: they say nothing about a GPU")
    for name in ("definition", "workload", "solution", "status"):
        table.add_column(name, overflow="fold")
    for name in ("host ms", "max abs err", "rel err"):
        table.add_column(name, justify="right")
    for result in report.results:
        table.add_row(
            parse_name(result.definition).short_name,
            result.workload,
            kernel_name(result.solution, result.definition),
            result.status,
            _number(result.latency_ms, ".2f"),
            _number(result.max_abs_err, ".1e"),
            _number(result.rel_err, ".1e"),
        )
    return table


def compile_table(report: CpuReport) -> Table:
    """CUDA compilations: one row a (source, geometry), one column a target with registers a thread."""
    rows: dict[tuple[str, str, tuple[str, ...]], dict[str, CompileResult]] = {}
    for result in report.compiled:
        rows.setdefault((result.kernel, result.source, result.specs), {})[result.arch] = result
    targets = list(dict.fromkeys(result.arch for result in report.compiled))
    left = report.compilations - len(report.compiled)
    table = Table(
        title=f"CUDA sources compiled, not run (registers a thread): {len(report.compiled)} of "
        f"{report.compilations} compilations",
        caption=f"{left} did not fit into this run's time; the next run goes on with them" if left else None,
    )
    for name in ("kernel", "source", "geometry", *targets):
        table.add_column(name, overflow="fold")
    for (kernel, source, specs), by_target in rows.items():
        more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
        geometry = parse_name(specs[0]).short_name + more
        table.add_row(kernel, source, geometry, *(_verdict(by_target.get(target)) for target in targets))
    return table


def _verdict(result: CompileResult | None) -> str:
    if result is None:
        return "-"
    if not result.compiled:
        return "FAILED"
    return f"ok ({result.registers})" if result.ok else f"spills {result.spill_stores + result.spill_loads} B"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
