"""The tables of a summary, as plain cells: the terminal and the documents print the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from evenkv.bench.case import Case
from evenkv.bench.record import OURS, Row
from evenkv.bench.regimes import regime_table
from evenkv.bench.summary import (
    CaseRows,
    Compared,
    geometric_mean,
    implementations_of,
    summarise,
    usable,
    worst_against_copy,
    worst_against_peer,
)

NONE = "-"


@dataclass(frozen=True)
class Cells:
    """A table: the first `left` columns are text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    note: str = ""


def all_tables(cases: CaseRows) -> list[Cells]:
    """Everything that a summary of one GPU shows; tables without a row are left out."""
    tables = [implementations_table(cases), regimes_cells(cases), geometries_table(cases)]
    for impl in (name for name in OURS if name in implementations_of(cases)):
        tables += [
            worst_table(f"{impl}: the ten worst against the best peer", worst_against_peer(cases, impl)),
            worst_table(
                f"{impl}: the ten worst against a copy of the same bytes", worst_against_copy(cases, impl)
            ),
        ]
    tables.append(trouble_table(cases))
    return [table for table in tables if table.rows]


def implementations_table(cases: CaseRows) -> Cells:
    rows = []
    for s in summarise(cases):
        trouble = [
            f"{n} {status}" for status, n in sorted(s.counts.items()) if status not in ("ok", "skipped")
        ]
        if s.unstable:
            trouble.append(f"{s.unstable} unstable")
        rows.append(
            (
                f"{s.impl} {'; '.join(s.peer_versions)}".rstrip(),
                f"{s.counts.get('ok', 0)} of {s.asked}",
                _share(s.share_copy_peak),
                _share(s.share_matched_copy),
                _share(s.share_fastest),
                _number(s.mean_copy_peak, ".1f", " %"),
                _number(s.mean_matched_copy, ".1f", " %"),
                _number(s.mean_vs_peer, ".2f", "x"),
                ", ".join(trouble) or NONE,
            )
        )
    columns = (
        "implementation",
        "measured",
        "cases at 90 % of copy peak",
        "at 90 % of matched copy",
        "faster than best peer",
        "mean % of copy peak",
        "mean % of matched copy",
        "mean speed-up over best peer",
        "not measured",
    )
    note = (
        "Shares are of all cases within 80 GB, those not measured included (faster: of cases with a peer's "
        "time); means are geometric, over stable times. A peer is held against the best of the others."
    )
    return Cells("Implementations", columns, tuple(rows), note=note)


def regimes_cells(cases: CaseRows) -> Cells:
    rows = []
    for regime in regime_table(cases):
        form = ".2f" if regime.unit.startswith("x") else ".1f"
        rows.append(
            (
                regime.name,
                regime.unit,
                f"{regime.must:g}",
                f"{regime.aim:g}",
                _number(regime.worst, form),
                _number(regime.typical, form),
                str(regime.cases),
                regime.verdict,
                regime.worst_case or NONE,
            )
        )
    columns = ("regime", "unit", "must", "aim", "worst", "median", "cases", "verdict", "worst case")
    return Cells(f"Regimes of {OURS[0]}", columns, tuple(rows), left=2)


def geometries_table(cases: CaseRows) -> Cells:
    """Geometric mean of % of copy peak by geometry, uniform and skewed, over caches of 128 MiB and more."""
    names = implementations_of(cases)
    groups: dict[tuple, list[Case]] = {}
    for case, measured in cases.items():
        if case.kv_bytes() >= 128 * 2**20 and any(usable(row) for row in measured.values()):
            groups.setdefault((*case.family, case.lengths is not None), []).append(case)
    rows = []
    for members in groups.values():
        case = members[0]
        shares = [[row.pct_copy_peak for c in members if usable(row := cases[c].get(name))] for name in names]  # type: ignore[union-attr]
        kind = "uniform" if case.lengths is None else "skewed"
        label = f"h{case.num_qo_heads}/{case.num_kv_heads} ps{case.page_size} {case.kv_dtype}"
        means = [_number(geometric_mean(own), ".1f") for own in shares]
        fewer = [f" ({len(own)})" if 0 < len(own) < len(members) else "" for own in shares]
        rows.append((label, kind, str(len(members)), *map("".join, zip(means, fewer, strict=True))))
    columns = ("geometry", "lengths", "cases", *names)
    note = (
        "Geometric mean of % of copy peak, caches of 128 MiB and more, over cases with a stable time. "
        "In brackets: how many these are, where it is not all."
    )
    return Cells("Geometries", columns, tuple(rows), left=2, note=note)


def worst_table(title: str, worst: Sequence[Compared]) -> Cells:
    rows = [
        (
            c.case.name,
            _number(c.row.graph_us, ".1f"),
            _number(c.row.pct_copy_peak, ".1f"),
            _number(c.row.pct_matched_copy, ".1f"),
            c.peer.impl if c.peer else NONE,
            _number(c.peer.graph_us if c.peer else None, ".1f"),
            _number(c.ratio, ".2f", "x"),
        )
        for c in worst
    ]
    columns = ("case", "us", "% of copy peak", "% of matched copy", "best peer", "its us", "speed-up")
    return Cells(title, columns, tuple(rows))


def trouble_table(cases: CaseRows) -> Cells:
    """What has no time, by implementation and reason; skipped cases are one line for all."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for case, rows in cases.items():
        for impl, row in rows.items():
            if row.status == "skipped":
                found.setdefault(("all", "skipped", "cache over 80 GB"), []).append(case.name)
            elif row.status != "ok" or row.unstable:
                status = "unstable" if row.unstable else row.status
                found.setdefault((impl, status, _kind(row)), []).append(case.name)
    rows = tuple(
        (impl, status, reason, str(len(set(names))), names[0])
        for (impl, status, reason), names in sorted(found.items())
    )
    columns = ("implementation", "status", "reason", "cases", "for example")
    return Cells("Without a time", columns, rows, left=3)


def rich_table(cells: Cells) -> Table:
    """For the terminal."""
    table = Table(title=cells.title, caption=cells.note or None)
    for place, name in enumerate(cells.columns):
        table.add_column(name, justify="left" if place < cells.left else "right", overflow="fold")
    for row in cells.rows:
        table.add_row(*row)
    return table


def markdown_table(cells: Cells, heading: str = "###") -> str:
    """For a document: heading, table, note."""
    rule = ["---" if place < cells.left else "---:" for place in range(len(cells.columns))]
    lines = [cells.columns, rule, *cells.rows]
    table = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)
    parts = [f"{heading} {cells.title}", table]
    return "\n\n".join(parts + [cells.note] if cells.note else parts)


def _kind(row: Row) -> str:
    """A reason without its numbers, so that alike ones fall together."""
    reason = "".join("#" if sign.isdigit() else sign for sign in row.reason or "")
    while "##" in reason or "#.#" in reason:
        reason = reason.replace("##", "#").replace("#.#", "#")
    return reason if len(reason) <= 120 else f"{reason[:117]}..."


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _share(value: float | None) -> str:
    # Rounded down: 100 % only where it is all of them.
    return NONE if value is None else f"{math.floor(1000 * value + 1e-9) / 10:.1f} %"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NONE if value is None else f"{value:{form}}{unit}"
