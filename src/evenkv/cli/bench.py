"""`evenkv bench`: measure the kernel and its peers against a plain copy, on any GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from evenkv.cli.bench_checks import (
    check_device,
    check_out,
    check_rows,
    check_together,
    check_writable,
    given_options,
    interrupted,
    told_interruption,
)
from evenkv.cli.bench_many import on_gpus, on_ray
from evenkv.cli.bench_options import (
    Options,
    budget_s,
    chosen_cases,
    out_path,
    parse_implementations,
    parse_shard,
    rows_files,
    source_of,
    unsettled,
)
from evenkv.cli.bench_output import Plan, announce_plan, finish, print_cases
from evenkv.cli.output import print_json, progress_bar, stderr, stdout
from evenkv.errors import count_of
from evenkv.paths import Repository, find_repository


def bench(
    context: typer.Context,
    preset: Annotated[
        str, typer.Option(help="smoke (12 cases), regimes (the table of goals) or protocol (everything).")
    ] = "smoke",
    cases: Annotated[
        Path | None, typer.Option(help="Measure the cases of this file instead: JSON, JSON lines or rows.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Only cases whose name contains this or, with * or ?, matches it from end to end."),
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
        typer.Option("--warm", help='Leave L2 as it is between calls; rows go to a folder named "warm".'),
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(help='Share the cases over so many GPUs of this machine, or "all".')
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help='Share them over a Ray cluster: host:port, "auto" (that of this node) or "local".'),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append rows to this file; results/roofline/<gpu>.jsonl if not given (standin: in build)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or standin: a model that measures nothing.")] = "cuda",
    list_cases: Annotated[
        bool, typer.Option("--list", help="Print the cases (with --resume what is left), measure nothing.")
    ] = False,
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
    check_together(given_options(context))
    options = Options(
        preset,
        cases,
        only,
        parse_implementations(impl),
        resume,
        parse_shard(shard),
        minutes,
        iterations,
        warm,
        out,
        device,
        as_json,
    )
    check_device(device)
    with warnings.catch_warnings():
        warnings.showwarning = _remarks()
        _bench(options, gpus, ray, list_cases, report)


def _bench(options: Options, gpus: str | None, ray: str | None, list_cases: bool, report: bool) -> None:
    repository = find_repository()
    try:
        if report:
            _write_report(repository, options.as_json)
            return
        cases = chosen_cases(options)
        if list_cases:
            _list(cases, options, repository, on_cluster=ray is not None)
            return
        check_out(options)
        if ray is not None:
            on_ray(ray, cases, options, repository)
        elif gpus is not None:
            on_gpus(gpus, cases, options, repository)
        else:
            _here(cases, options, repository)
    except KeyboardInterrupt:
        raise interrupted() from None


def _remarks() -> Callable[..., None]:
    """Shows warnings to the user without the place in the code, and of a torn file only the first."""
    from evenkv.bench.record import TornLineWarning

    torn = set()

    def show(message: Any, *rest: Any, **more: Any) -> None:
        if isinstance(message, TornLineWarning):
            # It is read before and in the run, then mended: that is one thing to tell.
            if message.path in torn:
                return
            torn.add(message.path)
        stderr.print(str(message), markup=False, highlight=False, soft_wrap=True)

    return show


def _list(cases: Sequence[Any], options: Options, repository: Repository, on_cluster: bool) -> None:
    left = _left(cases, options, repository, on_cluster) if options.resume else cases
    if len(left) < len(cases):
        line = f"{len(cases) - len(left)} of {count_of(len(cases), 'case')} are there already."
        stderr.print(line, markup=False, highlight=False, soft_wrap=True)
    print_cases(left, options.as_json)


def _left(cases: Sequence[Any], options: Options, repository: Repository, on_cluster: bool) -> list[Any]:
    """What --resume would measure: the device says whose rows count."""
    from evenkv.bench.devices import open_device
    from evenkv.bench.record import load_rows
    from evenkv.bench.run import settled_cases

    source = source_of(repository)
    if on_cluster:
        rows = [row for path in rows_files(options, repository) for row in load_rows(path)]
        return unsettled(cases, rows, options, source)
    device = open_device(options.device)
    try:
        gpu = device.facts().gpu
        missing = [name for name, reason in device.implementations().items() if reason is not None]
    finally:
        device.close()
    rows = [row for row in load_rows(out_path(options, repository, gpu)) if row.gpu == gpu]
    there = settled_cases(rows, options.impl, source, missing)
    return [case for case in cases if case not in there]


def _here(cases: Sequence[Any], options: Options, repository: Repository) -> None:
    from evenkv.bench.devices import open_device
    from evenkv.bench.record import load_rows
    from evenkv.bench.run import run_bench, settled_cases

    source = source_of(repository)
    device = open_device(options.device)
    try:
        gpu = device.facts().gpu
        path = out_path(options, repository, gpu)
        check_writable(path, str(path) if options.out is None else f"--out {path}")
        earlier = load_rows(path)
        check_rows(path, earlier, options.standin)

        def announce(report: Any) -> None:
            own = [row for row in earlier if row.gpu == gpu] if options.resume else []
            there = settled_cases(own, options.impl, source, report.missing)
            waiting = sum(case not in there for case in cases)
            more = {"copy_gbps": report.copy_peak_gbps, "modelled": options.standin}
            announce_plan(Plan(len(cases), waiting, options.impl, gpu, report.estimate, path, **more))

        with progress_bar() as show, told_interruption(lambda: [path]):
            report = run_bench(
                device,
                cases,
                options.impl,
                path,
                provenance=source,
                resume=options.resume,
                minutes=options.minutes,
                warm=options.warm,
                iterations=options.iterations,
                budget_s=budget_s(options),
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


def _write_report(repository: Repository, as_json: bool) -> None:
    from evenkv.bench.report import write_report

    with progress_bar() as show:
        written = write_report(repository, show)
    if as_json:
        print_json({"ok": True, "files": [str(path) for path in written]})
        return
    for path in written:
        stdout.print(str(path), markup=False, highlight=False, soft_wrap=True)
