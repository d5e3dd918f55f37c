"""What `evenkv bench` prints: the list of cases, the plan, the tables at the end."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from evenkv.cli.output import print_json, stderr, stdout
from evenkv.errors import count_of

_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """What a run is about to do. `waiting` of its `cases` have to be measured, the others have rows.

    `copy_gbps` is None before it is measured; `modelled`: a stand-in's run, which measures nothing.
    """

    cases: int
    waiting: int
    implementations: Sequence[str]
    where: str
    estimate: Any
    path: Path
    copy_gbps: float | None = None
    modelled: bool = False


def print_cases(cases: Sequence[Any], as_json: bool) -> None:
    """The list of cases, with the bytes of their caches."""
    from evenkv.bench.grid import is_skipped

    if as_json:
        print_json([{"name": c.name, "case": c.to_json(), "kv_bytes": c.kv_bytes()} for c in cases])
        return
    for case in cases:
        remark = "  (skipped: over 80 GB)" if is_skipped(case) else ""
        line = f"{case.kv_bytes() / 2**20:10.1f} MiB  {case.name}{remark}"
        stdout.print(line, markup=False, highlight=False, soft_wrap=True)


def announce_plan(plan: Plan) -> None:
    """The header, on stderr."""
    cases = count_of(plan.cases, "case")
    if there := plan.cases - plan.waiting:
        cases = f"{plan.waiting} of {cases} ({there} {'is' if there == 1 else 'are'} there)"
    copy = "" if plan.copy_gbps is None else f"; copy peak {plan.copy_gbps:.0f} GB/s"
    line = (
        f"{cases}, {count_of(len(plan.implementations), 'implementation')} on {plan.where}: about "
        f"{_duration(plan.estimate.seconds)} ({plan.estimate.iterations} iterations{copy}). "
        f"Rows go to {plan.path}."
    )
    stderr.print(line, markup=False, highlight=False, soft_wrap=True)
    if plan.modelled:
        stderr.print("Times are a model's: nothing is measured.", markup=False, highlight=False)


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
    from evenkv.bench.standin import GPU
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
        if any(group.gpu == GPU for group in groups_of(rows)):
            stdout.print("Times are a model's: nothing was measured.", markup=False, highlight=False)
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
            line = f"{count_of(len(left), 'case')} left: the same command with --resume goes on."
            stdout.print(line, markup=False, highlight=False, soft_wrap=True)
    if not ok:
        raise typer.Exit(1)
