"""`evenkv run`: evaluate the package here, on the GPU or as far as a CPU can."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenkv.cli.output import print_json, progress_bar, stderr, stdout
from evenkv.errors import EvenkvError
from evenkv.paths import Repository, find_repository

if TYPE_CHECKING:
    from evenkv.evaluate.gpu import GpuReport
    from evenkv.evaluate.load import Case, Package
    from evenkv.evaluate.table import Row

# What needs torch is imported where it is used: it takes seconds, and `--help` does not need it.
Lengths = Mapping[tuple[str, str], Sequence[int]]

# Of the time that is left of --minutes, what builds may take, and then what warm-ups may: the rest is for
# evaluating what they made.
_BUILD_SHARE = 0.5


def run(
    definitions: Annotated[
        list[str] | None, typer.Option(help="Definitions to run, one or more; all if not given.")
    ] = None,
    solutions: Annotated[
        list[str] | None, typer.Option(help="Solutions or kernels (evenkv_cuda) to run, one or more.")
    ] = None,
    workloads: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many workloads of each definition.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what this GPU has evaluated with the same solution.")
    ] = False,
    warmup_runs: Annotated[int, typer.Option(min=0, help="Warmup calls before timing.")] = 10,
    iterations: Annotated[int, typer.Option(min=1, help="Timed calls of each trial.")] = 50,
    num_trials: Annotated[int, typer.Option(min=1, help="Trials, each with new inputs.")] = 3,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for one solution on one workload.")] = 300,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop cleanly after so many minutes.")
    ] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write GPU traces to traces/.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Evaluate the package: on a GPU through flashinfer-bench, without one as far as a CPU can."""
    started = time.monotonic()
    from evenkv.evaluate.load import load_package, select_cases

    repository = find_repository()
    with progress_bar() as show:
        show("reading the package", 0.0)
        package = load_package(repository)
        cases = select_cases(package, definitions or [], solutions or [], workloads)
        lengths = _check_workloads(cases, repository, show)
    import torch

    if not torch.cuda.is_available():
        _require_work_for_cpu(package, cases, solutions or [])
        _on_cpu(cases, lengths, repository, None if minutes is None else 60 * minutes, as_json)
        return
    from flashinfer_bench.bench import BenchmarkConfig

    from evenkv.evaluate import builds

    builds.use_keyed_cache(for_gpu=True)
    config = BenchmarkConfig(
        warmup_runs=warmup_runs, iterations=iterations, num_trials=num_trials, timeout_seconds=timeout
    )
    deadline = None if minutes is None else started + 60 * minutes
    _on_gpu(cases, lengths, repository, config, deadline, resume, save, as_json)


def _check_workloads(cases: Sequence[Case], repository: Repository, show: Any) -> Lengths:
    from evenkv.evaluate.validate import request_lengths

    lengths = {}
    for number, case in enumerate(cases):
        show(f"checking {case.definition.name}", number / len(cases))
        found = request_lengths(case.definition, case.workload, repository.root)
        lengths[case.definition.name, case.workload.uuid] = found
    return lengths


def _require_work_for_cpu(package: Package, cases: Sequence[Case], asked: Sequence[str]) -> None:
    """Refuse a choice of solutions of which a CPU can neither run nor compile any."""
    from evenkv.evaluate.cpu import needs_gpu
    from evenkv.evaluate.load import kernel_of

    chosen = [solution for case in cases for solution in case.solutions]
    if not chosen or not all(needs_gpu(solution) for solution in chosen):
        return
    names = asked or dict.fromkeys(map(kernel_of, chosen))
    here: dict[str, str] = {}
    for definition in dict.fromkeys(case.definition.name for case in cases):
        for solution in package.solutions[definition]:
            if not needs_gpu(solution):
                compiled_only = solution.spec.language.value == "cuda"
                here[kernel_of(solution)] = " (compiled, not run)" if compiled_only else ""
    found = ", ".join(name + remark for name, remark in sorted(here.items())) or "none"
    raise EvenkvError(
        f"--solutions: wanted some for a machine without a CUDA GPU, got {', '.join(names)}, which need one.",
        f"Run it on a machine with a GPU, or choose of what runs here: {found}.",
    )


def _on_cpu(
    cases: Sequence[Case], lengths: Lengths, repository: Repository, budget_s: float | None, as_json: bool
) -> None:
    from evenkv.evaluate.cpu import evaluate_on_cpu
    from evenkv.evaluate.load import kernel_of
    from evenkv.evaluate.table import compile_table, cpu_table
    from evenkv.pack.manifest import load_kernels

    chosen = {kernel_of(solution) for case in cases for solution in case.solutions}
    kernels = [kernel for kernel in load_kernels(repository) if kernel.name in chosen]
    with progress_bar() as show:
        report = evaluate_on_cpu(cases, lengths, kernels, repository.root, budget_s, show)
    if as_json:
        compiled = [
            {
                "kernel": c.kernel,
                "source": c.source,
                "definitions": c.specs,
                "target": c.arch,
                "ok": c.ok,
                "registers": c.registers,
                "spilled_bytes": c.spill_stores + c.spill_loads,
            }
            for c in report.compiled
        ]
        print_json(
            {
                "mode": "cpu",
                "ok": report.ok,
                "interrupted": report.interrupted,
                "results": [asdict(r) for r in report.results],
                "compiled": compiled,
                "compilations": report.compilations,
                "left_out": [{"what": what, "why": why} for what, why in report.left_out],
                "traces": [],
            }
        )
    else:
        stdout.print("No CUDA GPU: correctness on the CPU, no traces. CPU times say nothing about a GPU.")
        if report.results:
            stdout.print(cpu_table(report))
        if report.compiled:
            stdout.print(compile_table(report))
        counts = Counter(result.status for result in report.results)
        stdout.print(
            f"{len(report.results)} evaluations: "
            + (", ".join(f"{count} {status}" for status, count in counts.items()) or "none")
            + f"; {sum(c.ok for c in report.compiled)} of {len(report.compiled)} CUDA compilations ok, "
            f"{report.compilations - len(report.compiled)} left."
        )
        for what, why in report.left_out:
            stdout.print(f"Left out: {what}: {why.rstrip('.')}.", soft_wrap=True, markup=False)
        for result in report.results:
            for fault in result.faults:
                line = f"{result.status}: {result.solution} on {result.workload}: {fault}"
                stderr.print(line, soft_wrap=True, markup=False)
        for compilation in report.compiled:
            if not compilation.compiled:
                line = f"{compilation.kernel} did not compile for {compilation.arch}: {compilation.log}"
                stderr.print(line, soft_wrap=True, markup=False)
    if report.interrupted:
        raise EvenkvError(
            f"Interrupted after {len(report.results)} evaluations; on a CPU nothing is filed, what was built "
            "or compiled is kept.",
            "The same command evaluates anew.",
            exit_code=1,
        )
    if report.planned and not report.results:
        raise EvenkvError(
            "Nothing was evaluated in the time given.", "Give more with --minutes.", exit_code=1
        )
    if not report.ok:
        raise typer.Exit(1)


def _share_of(deadline: float | None) -> float | None:
    """When builds, or warm-ups, that start now should have ended."""
    now = time.monotonic()
    return None if deadline is None else now + _BUILD_SHARE * max(0.0, deadline - now)


@dataclass
class _GpuRun:
    """What a run on a GPU has done so far: an interruption leaves it as it stands."""

    report: GpuReport
    missing: dict[str, str]
    build_failures: dict[str, str] = field(default_factory=dict)
    unbuilt: list[str] = field(default_factory=list)
    warm_failures: dict[str, str] = field(default_factory=dict)
    not_warmed: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.interrupted


def _on_gpu(
    cases: Sequence[Case],
    lengths: Lengths,
    repository: Repository,
    config: Any,
    deadline: float | None,
    resume: bool,
    save: bool,
    as_json: bool,
) -> None:
    import torch

    from evenkv.evaluate.gpu import GpuReport, runnable_on_gpu
    from evenkv.evaluate.table import rows_from_traces

    cases, missing = runnable_on_gpu(cases)
    hardware = torch.cuda.get_device_name(0)
    run = _GpuRun(GpuReport(), missing)
    try:
        _evaluate(run, cases, repository, hardware, config, deadline, resume, save)
    except KeyboardInterrupt:
        run.interrupted = True
    rows = rows_from_traces(run.report.traces, lengths)
    if as_json:
        _print_gpu_json(run, hardware, rows)
    else:
        _print_gpu(run, rows)
    if run.interrupted:
        kept = "the workloads that were done are in traces/" if save else "with --no-save nothing is filed"
        remedy = "Go on with the same command and --resume." if save else "The same command evaluates anew."
        raise EvenkvError(f"Interrupted; {kept}.", remedy, exit_code=1)
    if not run.ok:
        raise typer.Exit(1)


def _evaluate(
    run: _GpuRun,
    cases: Sequence[Case],
    repository: Repository,
    hardware: str,
    config: Any,
    deadline: float | None,
    resume: bool,
    save: bool,
) -> None:
    """Build, warm up and evaluate what is to be evaluated; `run` is filled on the way."""
    from evenkv.evaluate import builds, warm
    from evenkv.evaluate.environment import driver_version
    from evenkv.evaluate.gpu import BenchmarkRunner, evaluate_on_gpu, split_current
    from evenkv.evaluate.traces import run_libraries

    with progress_bar() as show:
        split = split_current(cases, repository, hardware, resume)
        pairs = {
            solution.name: (case.definition, solution)
            for case, _, waiting in split
            for solution in waiting
            if builds.is_compiled(solution)
        }
        built: list[str] = []

        def on_built(name: str) -> None:
            built.append(name)
            show(f"built {name}", len(built) / len(pairs))

        show("building CUDA solutions", 0.0)
        run.build_failures, run.unbuilt = builds.build_all(
            list(pairs.values()), on_built, deadline=_share_of(deadline)
        )
        # What waits for a build that is left for another run is not evaluated now.
        to_warm = warm.to_warm(
            [
                (case.definition, solution)
                for case, _, waiting in split
                if not any(other.name in run.unbuilt for other in waiting)
                for solution in waiting
            ]
        )
        warmed: list[str] = []

        def on_warmed(name: str) -> None:
            warmed.append(name)
            show(f"warmed up {name}", len(warmed) / len(to_warm))

        show("warming up what compiles at its first call", 0.0)
        run.warm_failures, run.not_warmed = warm.warm_all(to_warm, on_warmed, deadline=_share_of(deadline))
        show("starting flashinfer-bench", 0.0)
        runner = BenchmarkRunner(repository, config)
        try:
            evaluate_on_gpu(
                cases,
                runner,
                repository,
                run_libraries(driver_version()),
                hardware,
                resume=resume,
                save=save,
                deadline=deadline,
                unbuilt=run.unbuilt,
                progress=lambda what, done, total: show(what, done / max(total, 1)),
                report=run.report,
            )
        finally:
            runner.close()


def _print_gpu_json(run: _GpuRun, hardware: str, rows: Sequence[Row]) -> None:
    report = run.report
    print_json(
        {
            "mode": "gpu",
            "ok": run.ok,
            "interrupted": run.interrupted,
            "gpu": hardware,
            "rows": [asdict(row) for row in rows],
            "evaluated": len(report.traces) - report.reused,
            "reused": report.reused,
            "missing": run.missing,
            "build_failures": run.build_failures,
            "unbuilt": run.unbuilt,
            "warm_up_failures": run.warm_failures,
            "not_warmed_up": run.not_warmed,
            "not_evaluated": [
                {"definition": d, "workload": w, "why": why} for d, w, why in report.not_evaluated
            ],
            "workloads_left": report.left,
        }
    )


def _print_gpu(run: _GpuRun, rows: Sequence[Row]) -> None:
    from evenkv.evaluate.table import gpu_table

    stdout.print(gpu_table(rows))
    for kernel, what in run.missing.items():
        stdout.print(f"Missing: {kernel}: {what}.", markup=False, soft_wrap=True)
    for name, error in run.build_failures.items():
        stderr.print(f"{name} did not build: {error}", markup=False, soft_wrap=True)
    for name, error in run.warm_failures.items():
        stderr.print(f"{name} failed when it was warmed up: {error}", markup=False, soft_wrap=True)
    for trace in run.report.traces:
        if not trace.is_successful():
            said = (trace.evaluation.log.strip().splitlines() or ["no log"])[-1]
            line = f"{trace.evaluation.status.value}: {trace.solution} on {trace.workload.uuid}: {said}"
            stderr.print(line, markup=False, soft_wrap=True)
    for definition, workload, why in run.report.not_evaluated:
        stderr.print(f"Not evaluated: {workload} of {definition}: {why}", markup=False, soft_wrap=True)
    if run.unbuilt:
        stdout.print(f"{len(run.unbuilt)} solutions were not built: no time left.")
    if run.report.left:
        stdout.print(f"{run.report.left} workloads left: the same command with --resume goes on.")
