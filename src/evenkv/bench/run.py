"""Runs a list of cases on a device: a row for every (case, implementation), whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evenkv.bench import grid, plan
from evenkv.bench.case import Case
from evenkv.bench.judge import (
    MISSING,
    Judge,
    Provenance,
    check_names,
    instability,
    missing_outcome,
    steadier,
)
from evenkv.bench.machine_log import log_case, log_run
from evenkv.bench.protocol import Device, DeviceFacts, DeviceLost, Outcome
from evenkv.bench.record import OURS, Row, append_rows, latest, load_rows
from evenkv.errors import EvenkvError

__all__ = ["Device", "DeviceFacts", "DeviceLost", "Outcome", "RunReport", "run_bench"]

Progress = Callable[[str, float], None]
Key = tuple[Case, str]

# How far the pace of the first cases may push predictions of the next: one odd case must not end a run.
_MAX_PACE = 10.0


@dataclass
class RunReport:
    """What a run did. `rows` are the new ones; `reused` were there already (resume)."""

    facts: DeviceFacts
    copy_peak_gbps: float
    estimate: plan.Estimate
    rows: list[Row] = field(default_factory=list)
    reused: int = 0
    left: list[Case] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def failures(rows: Iterable[Row]) -> list[Row]:
    """Rows that say one of our own kernels is wrong or did not get through; a small card is no failure."""
    return [
        row
        for row in rows
        if row.impl in OURS and (row.status == "wrong" or (row.status == "refused" and not _was_missing(row)))
    ]


def settled_cases(
    rows: Iterable[Row],
    implementations: Sequence[str],
    provenance: Provenance,
    missing: Collection[str] = (),
) -> set[Case]:
    """Cases that have a row of these sources for every implementation, on whatever GPU.

    Parameters
    ----------
    missing : collection of str
        Implementations that are missing here: rows that say so settle the matter for these alone.
    """
    found: dict[Case, set[str]] = {}
    for row in latest(rows):
        if row.source_hash == provenance.hash_of(row.impl) and _is_done(row, missing):
            found.setdefault(row.the_case(), set()).add(row.impl)
    return {case for case, names in found.items() if names >= set(implementations)}


def _silent(what: str, share: float) -> None:
    pass


def run_bench(
    device: Device,
    cases: Sequence[Case],
    implementations: Sequence[str],
    path: Path,
    *,
    provenance: Provenance,
    resume: bool = False,
    minutes: float | None = None,
    warm: bool = False,
    iterations: int | None = None,
    budget_s: float = plan.FULL_BUDGET_S,
    progress: Progress = _silent,
    announce: Callable[[RunReport], None] = lambda report: None,
    clock: Callable[[], float] = time.monotonic,
) -> RunReport:
    """Measure cases and append their rows to `path` as they come.

    Parameters
    ----------
    device : Device
    cases : sequence of Case
        In any order; families are put together here. Those over 80 GB of cache get "skipped" rows.
    implementations : sequence of str
        Those that the device lacks get "refused" rows with the reason.
    provenance : Provenance
        Sources and commit that the rows name.
    resume : bool
        Leave out what `path` has of this GPU, this source and (for our kernels) this state of them.
    minutes : float, optional
        Stop before the first case that would not end in time; `left` of the report has the rest.
    iterations : int, optional
        Timed calls of a case, 100 or more; as many as the budget allows when not given.
    budget_s : float
        What a plan without `minutes` aims at, in seconds.
    announce : callable
        Told once, before the first measurement, what is planned.

    Raises
    ------
    EvenkvError
        When the self-test finds faults (exit code 1), an implementation is unknown, or `path` has
        another schema.
    DeviceLost
        When the device is gone; finished rows are in `path`.
    """
    started = clock()
    facts = device.facts()
    known = device.implementations()
    wanted = _known_names(implementations, known)
    present = _present(path, facts.gpu, provenance) if resume else {}
    progress("self-test", 0.0)
    if faults := device.self_test():
        raise EvenkvError(
            f"Self-test on {facts.gpu} failed: {'; '.join(fault.rstrip('.') for fault in faults)}.",
            "Nothing was measured: times of such a harness mean nothing.",
            exit_code=1,
        )
    progress("copy peak", 0.0)
    copy_gbps = device.copy_peak_gbps()
    missing = {name: reason for name in wanted if (reason := known[name]) is not None}
    able = [name for name in wanted if name not in missing]

    todo = {case: [n for n in wanted if not _is_done(present.get((case, n)), missing)] for case in cases}
    waiting = [case for case, names in todo.items() if names]
    measured = [case for case in waiting if not grid.is_skipped(case)]
    limit = 60 * minutes if minutes is not None else budget_s
    planned = plan.estimate(plan.order(measured, in_rounds=False), able, limit, copy_gbps)
    if iterations is not None:
        seconds = plan.total_seconds(plan.order(measured, False), able, iterations, copy_gbps)
        planned = plan.Estimate(seconds, iterations)
    in_rounds = minutes is not None and planned.seconds > limit
    report = RunReport(facts, copy_gbps, planned, missing=missing)
    report.reused = sum(len(wanted) - len(names) for names in todo.values())
    announce(report)

    if waiting:
        log_run(path, facts.gpu, copy_gbps, device.launch_floor_us(), device.read_peak_gbps())
    run = _Run(device, Judge(facts, copy_gbps, provenance, warm), path, report, todo, progress)
    for case in waiting:
        if grid.is_skipped(case):
            size = f"{case.kv_bytes() / 1e9:.1f} GB of K and V"
            run.file(case, {n: Outcome("skipped", f"{size}: over the protocol's 80 GB") for n in todo[case]})
    deadline = None if minutes is None else started + 60 * minutes
    ordered = plan.order(measured, in_rounds)
    if ordered and able and (deadline is None or clock() < deadline):
        # All at once, before anything is timed: compilers would disturb it, and wait for each other.
        device.build(ordered, progress, able)
    run.measure_all(ordered, planned.iterations, deadline, clock)
    return report


class _Run:
    """The state of one `run_bench`."""

    def __init__(
        self,
        device: Device,
        judge: Judge,
        path: Path,
        report: RunReport,
        todo: Mapping[Case, Sequence[str]],
        progress: Progress,
    ) -> None:
        self._device = device
        self._judge = judge
        self._path = path
        self._report = report
        self._todo = todo
        self._progress = progress

    def file(self, case: Case, outcomes: Mapping[str, Outcome]) -> None:
        """Append the case's rows, those of missing implementations included."""
        missing = self._report.missing
        rows = []
        for name in self._todo[case]:
            outcome = outcomes.get(name)
            if outcome is None and name in missing:
                outcome = missing_outcome(missing[name])
            outcome = outcome or Outcome("refused", "the device gave no answer")
            rows.append(self._judge.row(case, name, outcome))
        append_rows(self._path, rows)
        log_case(self._path, case, outcomes)
        self._report.rows += rows

    def measure_all(
        self, cases: Sequence[Case], wanted: int, deadline: float | None, clock: Callable[[], float]
    ) -> None:
        """Measure family by family until the deadline; what is left goes into the report."""
        total = sum(self._seconds(case, wanted) for case in cases) or 1.0
        predicted = spent = 0.0
        done = 0
        for _, members in plan.by_family(cases):
            family = list(members)
            able = [case for case in family if self._able(case)]
            begun = False
            try:
                for case in family:
                    own = self._seconds(case, wanted)
                    pace = min(max(spent / predicted, 1.0), _MAX_PACE) if predicted else 1.0
                    now = clock()
                    if deadline is not None and now + own * pace > deadline:
                        self._report.left = list(cases[done:])
                        return
                    self._progress(case.name, predicted / total)
                    if able and not begun:
                        begun = True
                        if fault := self._begin(able):
                            begun = False
                            for failed in family:
                                self.file(failed, self._refusals(failed, fault))
                            done += len(family)
                            break
                    self.file(case, self._measure(case, wanted))
                    done += 1
                    predicted += own
                    spent += clock() - now
            except DeviceLost:
                begun = False  # Nothing to free on a device that is gone.
                raise
            finally:
                if begun:
                    self._device.end_family()

    def _refusals(self, case: Case, reason: str) -> dict[str, Outcome]:
        return {name: Outcome("refused", reason) for name in self._able(case)}

    def _begin(self, cases: Sequence[Case]) -> str | None:
        try:
            self._device.begin_family(cases)
        except DeviceLost:
            raise
        except Exception as error:
            return f"the family's caches could not be made: {_said(error)}"
        return None

    def _measure(self, case: Case, wanted: int) -> Mapping[str, Outcome]:
        names = self._able(case)
        if not names:
            return {}
        iterations = plan.iterations_for(case, wanted, self._judge.copy_peak_gbps)
        outcomes = self._once(case, names, iterations)
        shaky = [
            name
            for name, outcome in outcomes.items()
            if instability(outcome) and (outcome.graph_us or 0.0) <= plan.LONG_US
        ]
        if shaky:
            # Once more: a disturbance from outside is over by then, a shaky kernel is not.
            again = self._once(case, shaky, iterations)
            outcomes |= {name: steadier(outcomes[name], again.get(name, outcomes[name])) for name in shaky}
        return outcomes

    def _once(self, case: Case, names: Sequence[str], iterations: int) -> dict[str, Outcome]:
        try:
            return dict(self._device.measure(case, names, iterations, self._judge.warm))
        except DeviceLost:
            raise
        except Exception as error:
            return {name: Outcome("refused", f"the harness failed: {_said(error)}") for name in names}

    def _able(self, case: Case) -> list[str]:
        return [name for name in self._todo[case] if name not in self._report.missing]

    def _seconds(self, case: Case, wanted: int) -> float:
        return plan.case_seconds(case, self._able(case), wanted, self._judge.copy_peak_gbps)


def _known_names(names: Sequence[str], known: Mapping[str, str | None]) -> list[str]:
    if unknown := sorted(set(names) - set(known)):
        raise EvenkvError(
            f"--impl: unknown {', '.join(unknown)}; wanted some of {', '.join(known)}.", "Correct the name."
        )
    return check_names(names)


def _present(path: Path, gpu: str, provenance: Provenance) -> dict[Key, Row]:
    rows: Iterable[Row] = latest(load_rows(path))
    return {
        (row.the_case(), row.impl): row
        for row in rows
        if row.gpu == gpu and row.source_hash == provenance.hash_of(row.impl)
    }


def _is_done(row: Row | None, missing: Collection[str]) -> bool:
    """Whether a row of an earlier run settles the matter: one of a peer that has come since does not."""
    if row is None:
        return False
    return not _was_missing(row) or row.impl in missing


def _was_missing(row: Row) -> bool:
    return row.status == "refused" and (row.reason or "").startswith(MISSING)


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
