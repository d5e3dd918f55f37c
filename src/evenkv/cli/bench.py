"""`evenkv bench`: measure the kernel and its peers against a plain copy, on any GPU."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from evenkv.cli.bench_output import announce_plan, finish, print_cases
from evenkv.cli.output import print_json, progress_bar, stderr, stdout
from evenkv.errors import EvenkvError
from evenkv.paths import Repository, find_repository

# A run on a GPU machine without git says its commit so.
COMMIT_VARIABLE = "EVENKV_COMMIT"
_STANDIN_OUT = "build/roofline/standin.jsonl"


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    preset: str
    cases: Path | None
    only: str | None
    impl: list[str]
    resume: bool
    shard: tuple[int, int] | None
    minutes: float | None
    iterations: int | None
    warm: bool
    out: Path | None
    device: str
    as_json: bool


def bench(
    preset: Annotated[
        str, typer.Option(help="smoke (12 cases), regimes (the table of goals) or protocol (everything).")
    ] = "smoke",
    cases: Annotated[
        Path | None, typer.Option(help="Measure the cases of this file instead: JSON, JSON lines or rows.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only cases whose name contains this, or matches it (* and ?).")
    ] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementations, separated by commas; all if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what this GPU has rows of, from the same sources.")
    ] = False,
    shard: Annotated[str | None, typer.Option(help="Part i of n of the cases, as i/n, e.g. 1/2.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop cleanly after so many minutes.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=100, help="Timed calls a case; what the time allows if not given.")
    ] = None,
    warm: Annotated[
        bool,
        typer.Option("--warm", help="Leave L2 as it is between calls; rows go to a folder of their own."),
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(help='Share the cases over so many GPUs of this machine, or "all".')
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help='Share them over a Ray cluster: its address, or "local".')
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Append rows to this file; results/roofline/<gpu>.jsonl if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or standin: a model that measures nothing.")] = "cuda",
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases, measure nothing.")] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Render docs/results.md, docs/plots and a table of docs/kernel.md from the rows, no more.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure the kernels and their peers against a plain copy: the roofline protocol, on any GPU."""
    if sum((gpus is not None, ray is not None, shard is not None)) > 1:
        raise EvenkvError("--gpus, --ray and --shard: wanted at most one of them.", "Choose one.")
    names = [name for value in impl or [] for name in value.split(",") if name]
    options = Options(
        preset, cases, only, names, resume, _shard(shard), minutes, iterations, warm, out, device, as_json
    )
    # A batch system ends a run so: finished rows stay and the workers end, as with Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    with warnings.catch_warnings():
        warnings.showwarning = _plain_warning
        _bench(options, gpus, ray, list_cases, report)


def _bench(options: Options, gpus: str | None, ray: str | None, list_cases: bool, report: bool) -> None:
    repository = find_repository()
    if report:
        _write_report(repository, options.as_json)
        return
    chosen = _cases(options)
    if list_cases:
        print_cases(chosen, options.as_json)
        return
    try:
        if ray is not None:
            _on_ray(ray, chosen, options, repository)
        elif gpus is not None:
            _on_gpus(gpus, chosen, options, repository)
        else:
            _here(chosen, options, repository)
    except KeyboardInterrupt:
        raise EvenkvError(
            "Interrupted; finished rows are in the results file.",
            "Go on with the same command and --resume.",
            exit_code=1,
        ) from None


def _plain_warning(message: Any, *rest: Any, **more: Any) -> None:
    """A remark for the user, without the place in the code."""
    stderr.print(str(message), markup=False, highlight=False, soft_wrap=True)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise EvenkvError(f"--shard: wanted i/n with 1 <= i <= n, got {text!r}.", "For example 1/2.")
    return int(index), int(count)


def _cases(options: Options) -> list[Any]:
    """The chosen cases in measuring order, this shard's only."""
    from evenkv.bench import grid, plan

    if options.cases is not None:
        chosen = grid.load_cases(options.cases)
    elif options.preset in grid.PRESETS:
        chosen = grid.PRESETS[options.preset]()
    else:
        raise EvenkvError(
            f"--preset: wanted one of {', '.join(grid.PRESETS)}, got {options.preset!r}.", "Correct it."
        )
    ordered = plan.order(grid.select(chosen, options.only), in_rounds=False)
    if options.shard is None:
        return ordered

    def cost(case: Any) -> float:
        return plan.case_seconds(case, _names(options), 100, plan.DEFAULT_COPY_GBPS)

    return plan.shard(ordered, *options.shard, cost)


def _names(options: Options) -> list[str]:
    from evenkv.bench.record import IMPLEMENTATIONS

    return options.impl or list(IMPLEMENTATIONS)


def _out_path(options: Options, repository: Repository, gpu: str) -> Path:
    from evenkv.bench.markdown import rows_folder
    from evenkv.bench.record import gpu_file_name
    from evenkv.bench.standin import GPU

    if options.out is not None:
        return options.out
    if gpu == GPU:
        return repository.root / _STANDIN_OUT
    # Warm times beside cold ones would be taken for them: a row does not say which it is.
    folder = rows_folder(repository) / ("warm" if options.warm else "")
    return folder / f"{gpu_file_name(gpu)}.jsonl"


def _budget_s(options: Options) -> float:
    from evenkv.bench import plan

    small = options.preset == "smoke" and options.cases is None
    return plan.SMOKE_BUDGET_S if small else plan.FULL_BUDGET_S


def _here(cases: Sequence[Any], options: Options, repository: Repository) -> None:
    from evenkv.bench.devices import open_device
    from evenkv.bench.judge import provenance
    from evenkv.bench.record import load_rows
    from evenkv.bench.run import run_bench

    source = provenance(repository, os.environ.get(COMMIT_VARIABLE))
    device = open_device(options.device)
    try:
        gpu = device.facts().gpu
        path = _out_path(options, repository, gpu)
        earlier = load_rows(path)

        def announce(report: Any) -> None:
            announce_plan(report.estimate, len(cases), _names(options), gpu, report.copy_peak_gbps, path)

        with progress_bar() as show:
            report = run_bench(
                device,
                cases,
                _names(options),
                path,
                provenance=source,
                resume=options.resume,
                minutes=options.minutes,
                warm=options.warm,
                iterations=options.iterations,
                budget_s=_budget_s(options),
                progress=show,
                announce=announce,
            )
    finally:
        device.close()
    facts = {
        "gpu": gpu,
        "estimate_s": report.estimate.seconds,
        "iterations": report.estimate.iterations,
        "copy_peak_gbps": report.copy_peak_gbps,
        "reused": report.reused,
        "missing": report.missing,
    }
    finish(cases, [path], earlier, report.rows, report.left, facts, options.as_json, faults=[])


def _on_ray(address: str, cases: Sequence[Any], options: Options, repository: Repository) -> None:
    from evenkv.bench import plan
    from evenkv.bench.judge import provenance
    from evenkv.bench.ray_pool import Job, run_on_ray
    from evenkv.bench.record import load_rows
    from evenkv.bench.run import settled_cases

    source = provenance(repository, os.environ.get(COMMIT_VARIABLE))
    folder = _out_path(options, repository, "x").parent
    paths = [options.out] if options.out else sorted(folder.glob("*.jsonl"))
    earlier = [row for path in paths for row in load_rows(path)]
    waiting = list(cases)
    if options.resume:
        settled = settled_cases(earlier, _names(options), source)
        waiting = [case for case in cases if case not in settled]
    limit = 60 * options.minutes if options.minutes is not None else _budget_s(options)
    planned = plan.estimate(waiting, _names(options), limit, plan.DEFAULT_COPY_GBPS)
    wanted = options.iterations or planned.iterations
    job = Job(options.device, tuple(_names(options)), wanted, options.warm, source)
    where = f"Ray at {address}, one GPU's time"
    announce_plan(planned, len(waiting), _names(options), where, plan.DEFAULT_COPY_GBPS, options.out)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    with progress_bar() as show:
        report = run_on_ray(
            address,
            job,
            waiting,
            lambda gpu: _out_path(options, repository, gpu),
            deadline=deadline,
            progress=show,
        )
    faults = [f"lost: {what}" for what in report.lost]
    paths = sorted({_out_path(options, repository, row.gpu) for row in report.rows})
    facts = {"ray": address, "reused": len(cases) - len(waiting), "lost": report.lost}
    failed = faults if report.given_up else []
    if not report.given_up:
        for fault in faults:
            stderr.print(f"{fault}; it ran again.", markup=False, soft_wrap=True)
    finish(cases, paths, earlier, report.rows, report.left, facts, options.as_json, failed)


def _on_gpus(wanted: str, cases: Sequence[Any], options: Options, repository: Repository) -> None:
    from evenkv.bench.markdown import rows_folder
    from evenkv.bench.record import load_rows
    from evenkv.bench.shards import choose_gpus, run_shards, visible_gpus

    standin = options.device == "standin"
    available = [str(n) for n in range(os.cpu_count() or 1)] if standin else visible_gpus()
    chosen = choose_gpus(wanted, available)

    def files() -> list[Path]:
        folder = rows_folder(repository) / ("warm" if options.warm else "")
        if standin and options.out is None:
            return [_out_path(options, repository, "standin")]
        return [options.out] if options.out else sorted(folder.glob("*.jsonl"))

    earlier = {path: load_rows(path) for path in files()}
    with progress_bar() as show:
        results = run_shards(_arguments(options), chosen, show)
    paths, new = [], []
    for path in files():
        own = load_rows(path)[len(earlier.get(path, [])) :]
        new += own
        if own:
            paths.append(path)
    faults = [f"GPU {r.gpu} (shard {r.index}): {r.said}" for r in results if r.exit_code]
    before = [row for rows in earlier.values() for row in rows]
    facts = {"gpus": chosen}
    finish(cases, paths, before, new, [], facts, options.as_json, faults)


def _arguments(options: Options) -> list[str]:
    """The options again, for a process that takes one shard."""
    values: list[tuple[str, Any]] = [
        ("--preset", options.preset),
        ("--cases", options.cases),
        ("--only", options.only),
        ("--impl", ",".join(options.impl) or None),
        ("--minutes", options.minutes),
        ("--iterations", options.iterations),
        ("--out", options.out),
        ("--device", options.device),
    ]
    words = [word for name, value in values if value is not None for word in (name, str(value))]
    flags = (("--resume", options.resume), ("--warm", options.warm))
    return words + [name for name, is_set in flags if is_set] + ["--json"]


def _write_report(repository: Repository, as_json: bool) -> None:
    from evenkv.bench.report import write_report

    with progress_bar() as show:
        written = write_report(repository, show)
    if as_json:
        print_json({"ok": True, "files": [str(path) for path in written]})
        return
    for path in written:
        stdout.print(str(path), markup=False, highlight=False, soft_wrap=True)
