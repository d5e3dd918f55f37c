"""What the rows of one GPU say on the whole: shares, means, worst cases, and how a second run agrees."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenkv.bench.case import Case
from evenkv.bench.record import IMPLEMENTATIONS, OURS, Row, by_case, latest

REACHED_PCT = 90.0
# A tie within the noise of a median is no loss.
TIE = 0.99
WORST = 10
REPRODUCED = 0.05

CaseRows = Mapping[Case, Mapping[str, Row]]


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: one GPU, one timer. Rows without a time belong to each of its timers."""

    gpu: str
    timer: str
    cases: CaseRows

    def rows(self) -> list[Row]:
        return [row for rows in self.cases.values() for row in rows.values()]


@dataclass(frozen=True)
class ImplementationSummary:
    """One implementation over all cases that the protocol does not skip.

    Shares are of `asked` cases: what was refused or failed has not reached anything. Means are geometric,
    over cases with a stable time. `mean_vs_peer` is of best peer's time / own time; for a peer, the best of
    the others.
    """

    impl: str
    asked: int
    counts: Mapping[str, int]
    unstable: int
    share_copy_peak: float | None
    share_matched_copy: float | None
    share_fastest: float | None
    mean_copy_peak: float | None
    mean_matched_copy: float | None
    mean_vs_peer: float | None
    peer_versions: tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    """A case of one implementation beside its best peer."""

    case: Case
    row: Row
    peer: Row | None

    @property
    def ratio(self) -> float | None:
        """Best peer's time / own time."""
        if self.peer is None or self.peer.graph_us is None or self.row.graph_us is None:
            return None
        return self.peer.graph_us / self.row.graph_us


@dataclass(frozen=True)
class Reproduction:
    """How times of a new run agree with earlier ones of the same sources: relative change by (case, impl)."""

    changes: Mapping[tuple[str, str], float]

    @property
    def within(self) -> int:
        return sum(abs(change) <= REPRODUCED for change in self.changes.values())

    @property
    def worst(self) -> tuple[str, str] | None:
        return max(self.changes, key=lambda key: abs(self.changes[key]), default=None)


def groups_of(rows: Iterable[Row]) -> list[Group]:
    """The rows that count, by GPU and timer."""
    by_gpu: dict[str, list[Row]] = {}
    for row in latest(rows):
        by_gpu.setdefault(row.gpu, []).append(row)
    found = []
    for gpu, own in sorted(by_gpu.items()):
        timers = sorted({row.timer for row in own if row.status == "ok" and row.timer})
        for timer in timers or ["none"]:
            cases = by_case([row for row in own if row.timer in (timer, None) or row.status != "ok"])
            found.append(Group(gpu, timer, cases))
    return found


def usable(row: Row | None) -> bool:
    """Whether the row's time is a result: measured, right and stable."""
    return row is not None and row.status == "ok" and not row.unstable


def implementations_of(cases: CaseRows) -> list[str]:
    """Implementations that have rows, ours first."""
    names = {name for rows in cases.values() for name in rows}
    return [name for name in IMPLEMENTATIONS if name in names] + sorted(names - set(IMPLEMENTATIONS))


def compare(cases: CaseRows, impl: str) -> list[Compared]:
    """The implementation's usable cases, each beside the fastest usable peer (other than itself)."""
    compared = []
    for case, rows in cases.items():
        row = rows.get(impl)
        if row is None or not usable(row):
            continue
        best = min(_stable_peers(rows, impl), key=lambda r: r.graph_us or math.inf, default=None)
        compared.append(Compared(case, row, best))
    return compared


def _stable_peers(rows: Mapping[str, Row], impl: str) -> list[Row]:
    """Rows of one case with a stable time, of peers other than the implementation itself."""
    return [row for name, row in rows.items() if name not in (*OURS, impl) and usable(row)]


def summarise(cases: CaseRows) -> list[ImplementationSummary]:
    """One line an implementation."""
    return [_summary(cases, impl) for impl in implementations_of(cases)]


def _summary(cases: CaseRows, impl: str) -> ImplementationSummary:
    own = [rows[impl] for rows in cases.values() if impl in rows]
    asked = [row for row in own if row.status != "skipped"]
    compared = compare(cases, impl)
    rows = [c.row for c in compared]
    ratios = [c.ratio for c in compared if c.ratio is not None]
    met = {
        field: sum((getattr(row, field) or 0.0) >= REACHED_PCT for row in rows)
        for field in ("pct_copy_peak", "pct_matched_copy")
    }
    return ImplementationSummary(
        impl,
        len(asked),
        dict(Counter(row.status for row in own)),
        sum(row.unstable for row in own),
        _share(met["pct_copy_peak"], asked),
        _share(met["pct_matched_copy"], asked),
        # Where no other has a time, nobody was beaten; where only others have one, they were not.
        _share(sum(ratio > 1.0 for ratio in ratios), _contested(cases, impl)),
        geometric_mean(row.pct_copy_peak for row in rows),
        geometric_mean(row.pct_matched_copy for row in rows),
        geometric_mean(ratios),
        tuple(sorted({row.peer_version for row in own if row.peer_version})),
    )


def _contested(cases: CaseRows, impl: str) -> list[Case]:
    """Cases asked of the implementation in which a peer (other than itself) has a stable time."""
    return [
        case
        for case, rows in cases.items()
        if impl in rows and rows[impl].status != "skipped" and _stable_peers(rows, impl)
    ]


def worst_by(cases: CaseRows, impl: str, key: Callable[[Compared], float | None]) -> list[Compared]:
    """The ten cases with the smallest key, the worst first; those without one are left out."""
    keyed = [(value, c) for c in compare(cases, impl) if (value := key(c)) is not None]
    return [c for _, c in sorted(keyed, key=lambda pair: (pair[0], pair[1].case.name))[:WORST]]


def worst_against_peer(cases: CaseRows, impl: str) -> list[Compared]:
    return worst_by(cases, impl, lambda c: c.ratio)


def worst_against_copy(cases: CaseRows, impl: str) -> list[Compared]:
    """By share of the copy of the same bytes: what a case could have reached at its own size."""
    return worst_by(cases, impl, lambda c: c.row.pct_matched_copy)


def reproduction(earlier: Sequence[Row], new: Sequence[Row]) -> Reproduction:
    """New times against the last earlier ones of the same case, implementation, GPU, timer and sources."""
    old = {(row.the_case(), row.impl, row.gpu): row for row in latest(earlier)}
    changes = {}
    for row in latest(new):
        before = old.get((row.the_case(), row.impl, row.gpu))
        if before is None or not (usable(row) and usable(before)):
            continue
        # Our source's hash stands in peers' rows too, where it says nothing about what ran.
        if row.impl in OURS and before.source_hash != row.source_hash:
            continue
        if before.peer_version != row.peer_version or before.timer != row.timer:
            continue
        assert row.graph_us and before.graph_us
        changes[row.the_case().name, row.impl] = row.graph_us / before.graph_us - 1.0
    return Reproduction(changes)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of positive values; None where there are none."""
    logs = [math.log(value) for value in values if value]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def _share(count: int, of: Sequence[object]) -> float | None:
    return count / len(of) if of else None
