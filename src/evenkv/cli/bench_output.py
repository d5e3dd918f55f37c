"""What `evenkv bench` prints: the list of cases, the plan, the tables at the end."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from evenkv.cli.output import print_json, stderr, stdout

_SHOWN = 10


def print_cases(cases: Sequence[Any], as_json: bool) -> None:
    from evenkv.bench.grid import is_skipped

    if as_json:
        print_json([{"name": c.name, "case": c.to_json(), "kv_bytes": c.kv_bytes()} for c in cases])
        return
    for case in cases:
        remark = "  (skipped: over 80 GB)" if is_skipped(case) else ""
        line = f"{case.kv_bytes() / 2**20:10.1f} MiB  {case.name}{remark}"
        stdout.print(line, markup=False, highlight=False, soft_wrap=True)


def announce_plan(
    estimate: Any, cases: int, names: Sequence[str], where: str, copy_gbps: float, path: Path | None
) -> None:
    to = f" Rows go to {path}." if path else ""
    line = (
        f"{cases} cases, {len(names)} implementations on {where}: about {_duration(estimate.seconds)} "
        f"({estimate.iterations} iterations; copy peak {copy_gbps:.0f} GB/s).{to}"
    )
    stderr.print(line, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def finish(
    cases: Sequence[Any],
    paths: Sequence[Path],
    earlier: Sequence[Any],
    new: Sequence[Any],
    left: Sequence[Any],
    facts: dict[str, Any],
    as_json: bool,
    faults: Sequence[str],
) -> None:
    """Tables of everything that the files have of these cases, and the exit code."""
    from evenkv.bench.record import load_rows
    from evenkv.bench.run import failures
    from evenkv.bench.summary import groups_of, reproduction, summarise
    from evenkv.bench.tables import all_tables, rich_table

    wanted = set(cases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row for path in paths for row in load_rows(path) if row.the_case() in wanted]
    again = reproduction(earlier, new)
    failed = failures(new)
    ok = not failed and not faults
    if as_json:
        print_json(
            {
                "ok": ok,
                **facts,
                "paths": [str(path) for path in paths],
                "rows": [row.model_dump(mode="json") for row in new],
                "left": [case.name for case in left],
                "faults": list(faults),
                "summary": [
                    {"gpu": group.gpu, "timer": group.timer, **asdict(line)}
                    for group in groups_of(rows)
                    for line in summarise(group.cases)
                ],
                "reproduced": {"compared": len(again.changes), "within_5_percent": again.within},
            }
        )
    else:
        for group in groups_of(rows):
            stdout.print(f"{group.gpu}, timer: {group.timer}", markup=False, highlight=False)
            for cells in all_tables(group.cases):
                stdout.print(rich_table(cells))
        if again.worst is not None:
            case, impl = again.worst
            stdout.print(
                f"Against the earlier rows: {again.within} of {len(again.changes)} times within 5 %, largest "
                f"change {100 * again.changes[again.worst]:+.1f} % ({impl}, {case}).",
                markup=False,
                soft_wrap=True,
            )
        for name, why in facts.get("missing", {}).items():
            stdout.print(f"Missing: {name}: {why.rstrip('.')}.", markup=False, soft_wrap=True)
        for row in failed[:_SHOWN]:
            line = f"{row.impl}: {row.status}: {row.the_case().name}: {row.reason}"
            stderr.print(line, markup=False, soft_wrap=True)
        for fault in faults:
            stderr.print(fault, markup=False, soft_wrap=True)
        if left:
            stdout.print(f"{len(left)} cases left: the same command with --resume goes on.", soft_wrap=True)
    if not ok:
        raise typer.Exit(1)
