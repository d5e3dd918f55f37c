"""Turns what a device reports into rows: no number may be better than physics, or too shaky to tell."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from evenkv.bench.case import Case
from evenkv.bench.protocol import DeviceFacts, Outcome, keeps_time
from evenkv.bench.record import IMPLEMENTATIONS, OURS, Row, when
from evenkv.evaluate.table import DATASHEET_BANDWIDTH
from evenkv.pack.manifest import find_kernel
from evenkv.pack.render import source_hash
from evenkv.paths import Repository

MISSING = "missing: "
UNSTABLE = "unstable: "
# Spread (p90 - p10) beyond which a median is no result: relative, and for launch-bound calls absolute.
MAX_SPREAD = 0.15
MAX_SPREAD_US = 2.0
# Clock after / before; a GPU that warms up from idle raises its clock, one that throttles lowers it.
MIN_CLOCK_RATIO = 0.85
# No L2 is larger: beyond it even a warm call reads memory.
_LARGEST_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Provenance:
    """Which sources a run measures: hash of our kernels by implementation, and the commit."""

    hashes: Mapping[str, str]
    commit: str | None

    def hash_of(self, impl: str) -> str:
        """The implementation's own sources; for a peer those of evenkv-cuda."""
        return self.hashes.get(impl, self.hashes[OURS[0]])


def provenance(repository: Repository, commit: str | None = None) -> Provenance:
    """Of the authored kernels in this tree; `commit` where git cannot tell it."""
    hashes = {impl: source_hash(find_kernel(repository, impl.replace("-", "_"))) for impl in OURS}
    return Provenance(hashes, commit or git_commit(repository.root))


def git_commit(root: Path) -> str | None:
    """HEAD's hash, with `-dirty` when sources differ from it; None outside a git checkout, or in one that
    cannot tell whether they do."""
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", "src")
    if not head or changes is None:
        return None
    return f"{head}-dirty" if changes else head


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


@dataclass(frozen=True)
class Judge:
    """Makes the rows of one run."""

    facts: DeviceFacts
    copy_peak_gbps: float
    provenance: Provenance
    warm: bool = False

    @property
    def datasheet_gbps(self) -> float | None:
        """The memory's peak, which no honest time passes; None where nobody knows the GPU."""
        known = DATASHEET_BANDWIDTH.get(self.facts.gpu)
        return known / 1e9 if known else self.facts.datasheet_gbps

    def row(self, case: Case, impl: str, outcome: Outcome) -> Row:
        """The row, after all checks: an impossible or incomplete "ok" becomes a failure with a reason."""
        outcome = self._checked(case, outcome)
        fields = {
            "case": case.to_json(),
            "impl": impl,
            "status": outcome.status,
            "reason": outcome.reason,
            "kv_bytes": case.kv_bytes(),
            "copy_peak_gbps": round(self.copy_peak_gbps, 2),
            "max_abs_err": _digits(outcome.max_abs_err),
            "rel_err": _digits(outcome.rel_err),
            "timer": outcome.timer,
            "gpu": self.facts.gpu,
            "driver": self.facts.driver,
            "cuda": self.facts.cuda,
            "torch": self.facts.torch,
            "peer_version": outcome.peer_version,
            "source_hash": self.provenance.hash_of(impl),
            "commit": self.provenance.commit,
            "when": when(),
        }
        if outcome.status == "ok":
            assert outcome.graph_us and outcome.matched_copy_us
            at_peak_us = case.kv_bytes() / self.copy_peak_gbps * 1e-3
            fields |= {
                "graph_us": outcome.graph_us,
                "eager_us": outcome.eager_us,
                "host_us": outcome.host_us,
                "iterations": outcome.iterations,
                "spread": outcome.spread,
                "matched_copy_us": outcome.matched_copy_us,
                "pct_copy_peak": round(100 * at_peak_us / outcome.graph_us, 3),
                "pct_matched_copy": round(100 * outcome.matched_copy_us / outcome.graph_us, 3),
                "sm_clock_mhz": (outcome.sm_clock_mhz_before, outcome.sm_clock_mhz_after),
            }
        try:
            return Row(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            reason = f"the device's answer is incomplete: {place} {first['msg']}".replace("  ", " ")
            return self.row(case, impl, Outcome("refused", reason, peer_version=outcome.peer_version))

    def _checked(self, case: Case, outcome: Outcome) -> Outcome:
        if outcome.status != "ok":
            return outcome if outcome.reason else replace(outcome, reason="no reason given")
        if fault := _number_fault(outcome):
            return replace(outcome, status="wrong", reason=fault)
        if fault := self._too_fast(case, outcome):
            return replace(outcome, status="wrong", reason=fault)
        shaky = instability(outcome)
        return replace(outcome, reason=f"{UNSTABLE}{shaky}") if shaky else outcome

    def _too_fast(self, case: Case, outcome: Outcome) -> str | None:
        peak = self.datasheet_gbps
        if peak is None or (self.warm and case.kv_bytes() <= _LARGEST_CACHE_BYTES):
            return None
        floor_us = case.kv_bytes() / peak * 1e-3
        for what, time_us in (("graph", outcome.graph_us), ("eager", outcome.eager_us)):
            if time_us is not None and time_us < floor_us:
                return (
                    f"{what} time {time_us:.2f} us is below {floor_us:.2f} us, the case's bytes at the "
                    f"datasheet's {peak:.0f} GB/s: it cannot have read them"
                )
        return None


def instability(outcome: Outcome) -> str | None:
    """Why an "ok" outcome's median is shaky, or None: spread, times that moved with the clock, or what the
    device says."""
    if outcome.status != "ok" or outcome.graph_us is None or outcome.spread is None:
        return None
    p10, p90 = outcome.spread
    if p90 - p10 > max(MAX_SPREAD * outcome.graph_us, MAX_SPREAD_US):
        return f"p10 {p10:.1f} us, p90 {p90:.1f} us around {outcome.graph_us:.1f} us"
    before, after = outcome.sm_clock_mhz_before, outcome.sm_clock_mhz_after
    if before and after and after < MIN_CLOCK_RATIO * before and not keeps_time(outcome.moved):
        return f"the SM clock fell from {before:.0f} to {after:.0f} MHz"
    return outcome.reason


def steadier(first: Outcome, second: Outcome) -> Outcome:
    """Of two outcomes of one case the one to record: the stable one, else the one with the smaller spread."""
    if second.status != "ok":
        return second
    if instability(second) is None:
        return second
    return min(first, second, key=_relative_spread)


def missing_outcome(reason: str) -> Outcome:
    """For an implementation that this machine does not have."""
    return Outcome("refused", f"{MISSING}{reason}")


def check_names(names: Sequence[str]) -> list[str]:
    """Implementations in the record's order, each once."""
    known = [name for name in IMPLEMENTATIONS if name in names]
    return known + [name for name in dict.fromkeys(names) if name not in IMPLEMENTATIONS]


def _number_fault(outcome: Outcome) -> str | None:
    positive = ("graph_us", "eager_us", "matched_copy_us")
    for name in (*positive, "host_us", "max_abs_err", "rel_err"):
        value = getattr(outcome, name)
        if value is None:
            continue  # The row's schema names what is missing.
        if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
            return f"{name} is {value}: no measurement"
    return None


def _relative_spread(outcome: Outcome) -> float:
    if outcome.spread is None or not outcome.graph_us:
        return math.inf
    return (outcome.spread[1] - outcome.spread[0]) / outcome.graph_us


def _digits(value: float | None) -> float | None:
    """Those that say something, since thousands of rows are kept; None where it is not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
