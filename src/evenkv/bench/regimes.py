"""The table of regimes: what evenkv_cuda must reach, what it should, and what the rows of a GPU say.

The numbers are for an H200; on another GPU the percentages stay meaningful, the microseconds are only shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evenkv.bench import grid
from evenkv.bench.case import Case
from evenkv.bench.record import ERROR_PEER, OURS, Row
from evenkv.bench.summary import TIE, CaseRows, compare, geometric_mean, usable

IMPL = OURS[0]
_MIB = 2**20


@dataclass(frozen=True)
class Regime:
    """One line of the table. `worst` is the number that the wanted ones are held against.

    `higher` says whether larger is better; `cases` counts what was measured, `missed` what falls short of
    `must`.
    """

    name: str
    unit: str
    higher: bool
    must: float
    aim: float
    worst: float | None
    typical: float | None
    cases: int
    missed: int
    worst_case: str

    @property
    def verdict(self) -> str:
        if self.worst is None:
            return "not measured"
        if self._holds(self.aim):
            return "aim reached"
        return "met" if self._holds(self.must) else f"missed in {self.missed} of {self.cases}"

    def _holds(self, wanted: float) -> bool:
        assert self.worst is not None
        return self.worst >= wanted if self.higher else self.worst <= wanted


# (name, fp8, KV MiB from, below, must, aim) in % of copy peak.
_SIZES = (
    ("bf16, KV of 2 GiB and more", False, 2048, None, 104.0, 108.0),
    ("bf16, 512 MiB to 2 GiB", False, 512, 2048, 97.0, 102.0),
    ("bf16, 128 to 512 MiB", False, 128, 512, 88.0, 95.0),
    ("fp8, 2 GiB and more", True, 2048, None, 98.0, 104.0),
    ("fp8, 512 MiB to 2 GiB", True, 512, 2048, 92.0, 99.0),
    ("fp8, 128 to 512 MiB", True, 128, 512, 84.0, 92.0),
)


def regime_table(cases: CaseRows) -> list[Regime]:
    """All lines, measured or not, in the order of the goal."""
    ours = [(case, rows[IMPL]) for case, rows in cases.items() if usable(rows.get(IMPL))]
    table = [
        _line(name, "% of copy peak", True, must, aim, _of_size(ours, fp8, low, high))
        for name, fp8, low, high, must, aim in _SIZES
    ]
    table.append(_line("skewed against uniform of the same bytes", "x", False, 1.03, 1.0, _skew(cases)))
    seed = Case(64, 8192, None, 5, 1, 128, 1)
    small, large = [c for c in grid.captured() if c.num_kv_heads == 1][:2]
    table.append(_line(seed.name, "% of copy peak", True, 90.0, 95.0, _one(ours, seed, _pct)))
    for case, label, must, aim in (
        (small, "captured: 1 request of 91 tokens, h5_kv1", 6.0, 4.5),
        (large, "captured: 63 requests, 19,134 tokens, h5_kv1", 11.0, 8.0),
        (Case(1, 1024, None, 32, 8, 128, 16), "", 7.5, 6.0),
        (Case(8, 1024, None, 32, 8, 128, 16), "", 12.0, 10.0),
    ):
        table.append(_line(label or case.name, "us", False, must, aim, _one(ours, case, _us)))
    ratios = [(c.case.name, c.ratio) for c in compare(cases, IMPL) if c.ratio is not None]
    table.append(_line("every case against the best peer", "x faster", True, TIE, 1.2, ratios))
    mean = geometric_mean(ratio for _, ratio in ratios)
    found = [] if mean is None else [(f"{len(ratios)} cases", mean)]
    table.append(_line("the same, geometric mean", "x faster", True, 1.0, 1.3, found))
    host = [(case.name, row.host_us) for case, row in ours if row.host_us is not None]
    table.append(_line("host time of a call", "us", False, 10.0, 5.0, host))
    table.append(_line(f"max abs error / that of {ERROR_PEER}", "x", False, 1.0, 0.5, _errors(cases)))
    return table


def _line(
    name: str, unit: str, higher: bool, must: float, aim: float, found: Iterable[tuple[str, float]]
) -> Regime:
    ranked = sorted(found, key=lambda pair: pair[1], reverse=not higher)
    if not ranked:
        return Regime(name, unit, higher, must, aim, None, None, 0, 0, "")
    values = [value for _, value in ranked]
    missed = sum(value < must if higher else value > must for value in values)
    middle = statistics.median(values)
    return Regime(name, unit, higher, must, aim, values[0], middle, len(values), missed, ranked[0][0])


def _of_size(
    ours: Sequence[tuple[Case, Row]], fp8: bool, low_mib: int, high_mib: int | None
) -> list[tuple[str, float]]:
    return [
        (case.name, row.pct_copy_peak)
        for case, row in ours
        if case.kv_dtype.startswith("float8") == fp8
        and row.kv_bytes >= low_mib * _MIB
        and (high_mib is None or row.kv_bytes < high_mib * _MIB)
        and row.pct_copy_peak is not None
    ]


def _skew(cases: CaseRows) -> list[tuple[str, float]]:
    """Time a byte of skewed batches / that of their uniform partners, where both were measured."""
    found = []
    for case, rows in cases.items():
        if case.lengths is None or case.batch == 1 or not usable(rows.get(IMPL)):
            continue
        partner = cases.get(grid.uniform_partner(case), {}).get(IMPL)
        if partner is None or not usable(partner):
            continue
        own = rows[IMPL]
        assert own.graph_us and partner.graph_us
        found.append((case.name, (own.graph_us / own.kv_bytes) / (partner.graph_us / partner.kv_bytes)))
    return found


def _one(
    ours: Sequence[tuple[Case, Row]], wanted: Case, value: Callable[[Row], float | None]
) -> list[tuple[str, float]]:
    return [(case.name, got) for case, row in ours if case == wanted and (got := value(row)) is not None]


def _errors(cases: CaseRows) -> list[tuple[str, float]]:
    found = []
    for case, rows in cases.items():
        own, peer = rows.get(IMPL), rows.get(ERROR_PEER)
        if own and peer and own.status == peer.status == "ok" and peer.max_abs_err:
            assert own.max_abs_err is not None
            found.append((case.name, own.max_abs_err / peer.max_abs_err))
    return found


def _pct(row: Row) -> float | None:
    return row.pct_copy_peak


def _us(row: Row) -> float | None:
    return row.graph_us
