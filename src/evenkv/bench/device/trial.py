"""One case on several implementations: right first, then timed in rounds that take turns.

Runs in the parent and touches no GPU: it gives commands to the processes, judges what they hand over (a
round's rows in a thread, while the GPU is busy with the next command), and turns it into outcomes. Nothing
is timed before the rounds, so until then the processes work side by side.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from evenkv.bench.case import Case
from evenkv.bench.device.clocks import ClockState
from evenkv.bench.device.correctness import Rows, Verdict, judge, sample_requests
from evenkv.bench.device.spans import summary
from evenkv.bench.device.verdict import hidden_work, throttling
from evenkv.bench.device.worker import WorkerFault
from evenkv.bench.effort import ROUNDS, effort
from evenkv.bench.protocol import Outcome
from evenkv.bench.record import OURS, Timer

BASELINE = "flashinfer-tc"

# Requests of a round's checked call that are compared, drawn anew each time from the case's sample: with all
# 64 of the sample the host would spend more time on comparing than the GPU on calls. That the WHOLE output
# was written is checked every time.
_ROUND_REQUESTS = 16
# Queries on which the baseline is checked: its largest error on them limits the others'.
_CHECKS = 2
# How often the host's clock is asked again when it says that a call hides work, and for how many replays.
_WALL_RETRIES, _RETRIED_WALLS = 3, 10


class Link(Protocol):
    """A process that takes commands (`worker.Worker`, or a stand-in)."""

    def call(self, command: str, **arguments: Any) -> Any: ...


@dataclass(frozen=True)
class Setup:
    """What all trials of a case share.

    Attributes
    ----------
    links : mapping
        Implementation name to its process.
    keeper : Link
        The owner's process.
    versions : mapping
        Implementation name to its peer version.
    clocks : callable
        The GPU's state now, None where it cannot be read.
    timer : "cupti" or "events"
    rng : Random
        Draws what no implementation may know: requests, timed calls and queries that are checked.
    choosy : set of str
        Implementations that choose between settings by trial calls: these want the GPU for themselves.
    """

    links: Mapping[str, Link]
    keeper: Link
    versions: Mapping[str, str | None]
    clocks: Callable[[], ClockState | None]
    timer: Timer
    rng: random.Random
    choosy: Set[str] = frozenset()


@dataclass
class _Reference:
    """What is right for the sampled requests, by the draw of the queries.

    `checks` are eager calls' before the race, `rounds` those of the checked call of each round.
    """

    requests: list[int]
    checks: list[int]
    rounds: list[int]
    outputs: dict[int, np.ndarray] = field(default_factory=dict)
    lses: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass
class _Trial:
    """An implementation's state on the case; `outcome` is set as soon as it is out of the race."""

    name: str
    link: Link
    info: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    times: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # medians
    clocks: list[ClockState | None] = field(default_factory=list)
    outcome: Outcome | None = None


@dataclass(frozen=True)
class _Judging:
    """The rows of a round's checked call, being judged."""

    trial: _Trial
    call: int
    verdict: Future[Verdict]


def measure_case(
    case: Case, seed: int, implementations: Sequence[str], iterations: int, warm: bool, setup: Setup
) -> dict[str, Outcome]:
    """Check and time the implementations.

    Raises
    ------
    WorkerFault
        When the owner's process fails; implementations that fail have outcomes.
    """
    requests = sample_requests(case.request_lengths(), case.num_kv_heads, setup.rng)
    draws = _draws(setup.rng, _CHECKS + ROUNDS)
    reference = _Reference(requests, draws[:_CHECKS], draws[_CHECKS:])
    run = _CaseRun(case, seed, setup, reference, warm)
    # The baseline comes first: its own error is the others' limit, even where only they are measured.
    limit = [BASELINE] if BASELINE in setup.links and limit_of(implementations) else []
    names = list(dict.fromkeys([*limit, *implementations]))
    with ThreadPoolExecutor(1 + len(names), thread_name_prefix="prepare") as pool:
        answers = pool.submit(
            setup.keeper.call, "reference", case=case, seed=seed, requests=requests, draws=draws
        )
        firsts = {name: pool.submit(run.first, name) for name in names if name not in setup.choosy}
    outputs, lses = answers.result()
    reference.outputs = dict(zip(draws, outputs, strict=True))
    reference.lses = dict(zip(draws, lses, strict=True))
    trials = [run.admit(name, firsts.get(name)) for name in names]
    for trial in trials:
        if trial.name not in implementations:
            run.leave(trial)
    trials = [trial for trial in trials if trial.name in implementations]
    copies = run.race(trials, -(-iterations // ROUNDS))
    for trial in trials:
        if trial.outcome is None:
            run.finish(trial, copies)
    found = {trial.name: trial.outcome for trial in trials}
    return {name: outcome for name in implementations if (outcome := found[name]) is not None}


class _CaseRun:
    def __init__(self, case: Case, seed: int, setup: Setup, reference: _Reference, warm: bool) -> None:
        self._case, self._seed, self._setup, self._reference = case, seed, setup, reference
        self._cold = not warm
        self._baseline_error: float | None = None

    def first(self, name: str, left_out: Sequence[str] = ()) -> tuple[dict[str, Any], list[Rows]]:
        """Prepare, and make the calls that are checked: what the process says of itself, and their rows.

        The baseline makes several, others the first of them.
        """
        link = self._setup.links[name]
        info = link.call("prepare", case=self._case, seed=self._seed, leave_out=tuple(left_out))
        draws = self._reference.checks if name == BASELINE else self._reference.checks[:1]
        return info, [link.call("check", draw=draw, requests=self._reference.requests) for draw in draws]

    def admit(self, name: str, first: Future[tuple[dict[str, Any], list[Rows]]] | None) -> _Trial:
        """Judge what `first` gave, or call it: who is wrong or refuses gets an outcome and is not timed."""
        trial = _Trial(name, self._setup.links[name])
        left_out: list[str] = []
        wrong: Outcome | None = None
        while True:
            try:
                trial.info, rows = first.result() if first else self.first(name, left_out)
            except WorkerFault as fault:
                # A setting that gives wrong results makes way for the next; when none is left, it counts.
                trial.outcome = wrong or self._outcome(trial, fault.status, fault.reason)
                return trial
            verdict = self._check(trial, rows)
            if not verdict.faults:
                trial.verdict = verdict
                return trial
            wrong = wrong or self._wrong(trial, verdict, "")
            left_out.append(trial.info["setting"])
            first = None

    def leave(self, trial: _Trial) -> None:
        """Of the baseline where it was only checked: whatever it did, it is not timed."""
        if trial.outcome is None:
            with contextlib.suppress(WorkerFault):
                trial.link.call("finish")

    def race(self, trials: Sequence[_Trial], calls: int) -> list[float]:
        """Timed rounds, in another order each time; the matched copy takes its turn.

        A round's rows are judged beside the commands that follow it: who is wrong is out before the next
        round, and nothing is left to judge, or to disturb the host's times, when this returns.

        Returns
        -------
        list of float
            Microseconds of the matched copies.
        """
        copies: list[float] = []
        kv_bytes = self._case.kv_bytes()
        judgings: list[_Judging] = []
        with ThreadPoolExecutor(1, thread_name_prefix="judge") as judges:
            for _ in range(ROUNDS):
                if all(trial.outcome is not None for trial in trials):
                    break
                # First, because it also tells about how long the calls will take.
                count = effort(statistics.median(copies) if copies else 0.0).copies
                copies += patient(
                    self._setup.keeper, "matched_copy", kv_bytes=kv_bytes, count=count, cold=self._cold
                )
                self._settle(judgings)
                live = [trial for trial in trials if trial.outcome is None]
                self._setup.rng.shuffle(live)
                for trial in live:
                    try:
                        judgings.append(self._round(trial, calls, copies, judges))
                    except WorkerFault as fault:
                        trial.outcome = self._outcome(trial, fault.status, fault.reason)
            self._settle(judgings)
        return copies

    def finish(self, trial: _Trial, copies: Sequence[float]) -> None:
        """Eager and host times, the cross-check by the host's clock, and the outcome."""
        median, p10, p90 = summary(trial.times)
        calls, rng, cold = effort(median), self._setup.rng, self._cold
        try:
            eager = patient(
                trial.link, "time_eager", draws=_draws(rng, calls.eager), cold=cold, warm_up=calls.warm_up
            )
            host = trial.link.call("time_host", count=calls.host)
            walls = trial.link.call("time_wall", draws=_draws(rng, calls.wall), cold=cold)
            for _ in range(_WALL_RETRIES):
                # The shortest counts, and a busy host only makes them longer: nobody is accused for that.
                if not hidden_work(median, min(walls)):
                    break
                walls += trial.link.call("time_wall", draws=_draws(rng, _RETRIED_WALLS), cold=cold)
            trial.link.call("finish")
        except WorkerFault as fault:
            trial.outcome = self._outcome(trial, fault.status, fault.reason)
            return
        assert trial.verdict is not None
        if hidden := hidden_work(median, min(walls)):
            trial.outcome = self._wrong(trial, trial.verdict, hidden)
            return
        known = [state for state in trial.clocks if state is not None]
        speeds = [state.sm_clock_mhz for state in known]
        degrees = [state.temperature_c for state in known]
        moved = max(trial.rounds) / min(trial.rounds)
        trial.outcome = self._outcome(
            trial,
            "ok",
            throttling(trial.clocks, moved),
            graph_us=median,
            eager_us=statistics.median(eager),
            host_us=statistics.median(host),
            iterations=len(trial.times),
            spread=(p10, p90),
            moved=moved,
            max_abs_err=trial.verdict.max_abs_err,
            rel_err=trial.verdict.rel_err,
            matched_copy_us=statistics.median(copies),
            sm_clock_mhz_before=speeds[0] if speeds else None,
            sm_clock_mhz_after=speeds[-1] if speeds else None,
            temperature_c=(min(degrees), max(degrees)) if degrees else None,
            throttle_reasons=tuple(sorted({why for state in known for why in state.throttle_reasons})),
            plan_us=trial.info["plan_us"] or None,
            setting=trial.info["setting"],
        )

    def _check(self, trial: _Trial, checked: Sequence[Rows]) -> Verdict:
        """Of all checks; errors are those on the first one's queries, so that implementations compare."""
        verdicts = [
            self._judge(trial, rows, draw, range(len(self._reference.requests)))
            for draw, rows in zip(self._reference.checks, checked, strict=False)
        ]
        for verdict in verdicts:
            if verdict.faults:
                return verdict
        if trial.name == BASELINE:
            self._baseline_error = max(verdict.max_abs_err for verdict in verdicts)
        return verdicts[0]

    def _round(
        self, trial: _Trial, calls: int, copies: Sequence[float], judges: ThreadPoolExecutor
    ) -> _Judging:
        # All draws are made here, in the parent's thread: their order depends on no other thread.
        draws = _draws(self._setup.rng, calls)
        checked = self._setup.rng.randrange(calls)
        draws[checked] = self._reference.rounds[len(trial.rounds)]
        sampled = len(self._reference.requests)
        places = sorted(self._setup.rng.sample(range(sampled), min(sampled, _ROUND_REQUESTS)))
        trial.clocks.append(self._setup.clocks())
        times, rows = patient(
            trial.link,
            "time_graph",
            draws=draws,
            cold=self._cold,
            checked=checked,
            requests=[self._reference.requests[place] for place in places],
            warm_up=effort(statistics.median(trial.times or copies)).warm_up,
        )
        trial.clocks.append(self._setup.clocks())
        trial.times += times
        trial.rounds.append(statistics.median(times))
        verdict = judges.submit(self._judge, trial, rows, draws[checked], places)
        return _Judging(trial, checked, verdict)

    def _settle(self, judgings: list[_Judging]) -> None:
        """Wait for the verdicts and act on them; raises what a judge raised."""
        for judging in judgings:
            verdict = judging.verdict.result()
            if verdict.faults:
                text = f"in timed call {judging.call} of a round: "
                judging.trial.outcome = self._wrong(judging.trial, verdict, text)
        judgings.clear()

    def _judge(self, trial: _Trial, rows: Any, draw: int, places: Sequence[int]) -> Verdict:
        """Of the rows of those of the sample's requests."""
        return judge(
            self._case,
            rows,
            self._reference.outputs[draw][list(places)],
            self._reference.lses[draw][list(places)],
            quantises_query=trial.info["quantises_query"],
            # Peers are what they are; ours must not be less accurate than the baseline allows.
            baseline_max_abs_err=self._baseline_error if trial.name in OURS else None,
        )

    def _wrong(self, trial: _Trial, verdict: Verdict, text: str) -> Outcome:
        return self._outcome(
            trial,
            "wrong",
            text + "; ".join(verdict.faults),
            max_abs_err=verdict.max_abs_err,
            rel_err=verdict.rel_err,
        )

    def _outcome(self, trial: _Trial, status: Any, reason: str | None, **numbers: Any) -> Outcome:
        return Outcome(
            status, reason, timer=self._setup.timer, peer_version=self._peer_version(trial), **numbers
        )

    def _peer_version(self, trial: _Trial) -> str | None:
        version = self._setup.versions.get(trial.name)
        if version is not None and trial.info.get("quantises_query"):
            return f"{version}, q quantised"
        return version


def limit_of(implementations: Sequence[str]) -> tuple[str, ...]:
    """Whose error limits that of these: the baseline's, where any of ours is among them."""
    return (BASELINE,) if any(name in OURS for name in implementations) else ()


def _draws(rng: random.Random, count: int) -> list[int]:
    """Of queries: nobody can know them, and no two are alike."""
    return [rng.getrandbits(62) for _ in range(count)]


def patient(link: Link, command: str, **arguments: Any) -> Any:
    """A timing command, once more when its records were lost: that is the profiler's fault."""
    try:
        return link.call(command, **arguments)
    except WorkerFault as fault:
        if not fault.reason.startswith("LostRecords"):
            raise
        return link.call(command, **arguments)
