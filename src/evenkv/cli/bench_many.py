"""`evenkv bench` on several GPUs: those of this machine, or a Ray cluster's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenkv.cli.bench_checks import check_rows, told_interruption
from evenkv.cli.bench_options import (
    Options,
    out_path,
    out_shown,
    planned,
    rows_files,
    share_of,
    source_of,
    unsettled,
)
from evenkv.cli.bench_output import Plan, announce_plan, finish
from evenkv.cli.output import progress_bar, stderr
from evenkv.errors import count_of
from evenkv.paths import Repository


def on_ray(address: str, cases: Sequence[Any], options: Options, repository: Repository) -> None:
    """Measure the cases on a cluster; exit code 1 when it gave groups up."""
    from evenkv.bench.ray_pool import Job, run_on_ray

    def files() -> list[Path]:
        return rows_files(options, repository)

    source = source_of(repository)
    earlier = _earlier(files(), options)
    before = [row for rows in earlier.values() for row in rows]
    waiting = unsettled(cases, before, options, source) if options.resume else list(cases)
    estimate = planned(options, waiting)
    where = f"Ray at {address}, one GPU's time"
    rows_to = out_shown(options, repository)
    announce_plan(
        Plan(len(cases), len(waiting), options.impl, where, estimate, rows_to, modelled=options.standin)
    )
    job = Job(options.device, tuple(options.impl), estimate.iterations, options.warm, source)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    with progress_bar() as show, told_interruption(files):
        report = run_on_ray(
            address,
            job,
            waiting,
            lambda gpu: out_path(options, repository, gpu),
            deadline=deadline,
            progress=show,
        )
    faults = [f"lost: {what}" for what in report.lost]
    reused = len(cases) - len(waiting)
    paths = {out_path(options, repository, row.gpu) for row in report.rows}
    paths |= set(earlier) if reused else set()
    facts = {"ray": address, "reused": reused, "lost": report.lost}
    failed = faults if report.given_up else []
    if not report.given_up:
        for fault in faults:
            stderr.print(f"{fault}; it ran again.", markup=False, soft_wrap=True)
    finish(cases, sorted(paths), before, report.rows, report.left, facts, options.as_json, failed)


def on_gpus(wanted: str, cases: Sequence[Any], options: Options, repository: Repository) -> None:
    """Measure the cases on GPUs of this machine, a process each; exit code 1 when one of them failed."""
    from evenkv.bench.plan import Estimate
    from evenkv.bench.run import settled_cases
    from evenkv.bench.shards import choose_gpus, run_shards, visible_gpus
    from evenkv.bench.standin import GPU
    from evenkv.evaluate.environment import gpu_names

    def files() -> list[Path]:
        return rows_files(options, repository)

    if options.standin:
        remedy = "The stand-in takes each core of this machine for a GPU: give no more than it has."
        chosen = choose_gpus(wanted, [str(n) for n in range(os.cpu_count() or 1)], remedy)
    else:
        chosen = choose_gpus(wanted, visible_gpus())
    source = source_of(repository)
    earlier = _earlier(files(), options)
    before = [row for rows in earlier.values() for row in rows]
    # Which implementations are missing, only the processes find out: rows that say so count for all.
    kinds = {GPU} if options.standin else set(gpu_names())
    own = [row for row in before if row.gpu in kinds] if options.resume else []
    there = settled_cases(own, options.impl, source, options.impl)
    waiting = [case for case in cases if case not in there]
    shares = [share_of(cases, number, len(chosen), options) for number in range(1, len(chosen) + 1)]
    each = [planned(options, [case for case in share if case not in there]) for share in shares]
    estimate = Estimate(max(e.seconds for e in each), min(e.iterations for e in each))
    where = f"{count_of(len(chosen), 'GPU')} ({'standin' if options.standin else ', '.join(chosen)})"
    rows_to = out_shown(options, repository)
    announce_plan(
        Plan(len(cases), len(waiting), options.impl, where, estimate, rows_to, modelled=options.standin)
    )
    with progress_bar() as show, told_interruption(files):
        results = run_shards(_arguments(options), chosen, show)
    new = {path: rows[len(earlier.get(path, [])) :] for path, rows in _read(files()).items()}
    rows = [row for rows in new.values() for row in rows]
    done = settled_cases([*own, *rows], options.impl, source, options.impl)
    left = [case for case in cases if case not in done]
    paths = [path for path in new if new[path] or (there and earlier.get(path))]
    faults = [f"GPU {r.gpu} (shard {r.index}): {r.said}" for r in results if r.exit_code]
    facts = {"gpus": chosen, "estimate_s": estimate.seconds, "cases_there": len(there)}
    finish(cases, paths, before, rows, left, facts, options.as_json, faults)


def _earlier(paths: Sequence[Path], options: Options) -> dict[Path, list[Any]]:
    """Rows by file, from before the run; a file that rows of this run must not go to is refused."""
    found = _read(paths)
    if options.out is not None or options.standin:
        for path, rows in found.items():
            check_rows(path, rows, options.standin)
    return found


def _read(paths: Sequence[Path]) -> dict[Path, list[Any]]:
    from evenkv.bench.record import load_rows

    return {path: load_rows(path) for path in paths}


def _arguments(options: Options) -> list[str]:
    """The options again, for a process that takes one shard."""
    values: list[tuple[str, Any]] = [
        ("--preset", options.preset if options.cases is None else None),
        ("--cases", options.cases),
        ("--only", options.only),
        ("--impl", ",".join(options.impl)),
        ("--minutes", options.minutes),
        ("--iterations", options.iterations),
        ("--out", options.out),
        ("--device", options.device),
    ]
    # With "=": a value may begin with a dash.
    words = [f"{name}={value}" for name, value in values if value is not None]
    flags = (("--resume", options.resume), ("--warm", options.warm))
    return words + [name for name, is_set in flags if is_set] + ["--json"]
