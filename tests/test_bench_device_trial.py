"""A race's judging beside the GPU: what overlaps, what does not, and that nothing else changes by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_device_fakes import (
    BF16,
    Kernel,
    LocalLink,
    PreparedKernel,
    SimulatedGpu,
    SimulatedKeeper,
    run_case,
)

from evenkv.bench.device import trial
from evenkv.bench.device.subject import Subject
from evenkv.bench.effort import ROUNDS

torch.set_num_threads(1)
NAMES = ("evenkv-cuda", "flashinfer-tc", "fa3")


class WrongLate(Kernel):
    """Right in preparation, check and first round (3, 1 and 4 calls and a warm-up), not in the second."""

    def attend(self, prepared: PreparedKernel) -> None:
        super().attend(prepared)
        if prepared.calls > 9:
            prepared.returned[0].mul_(2.0)


class FaultsLate(Kernel):
    def attend(self, prepared: PreparedKernel) -> None:
        if prepared.calls > 20:
            raise RuntimeError("an illegal instruction was encountered")
        super().attend(prepared)


def race(log: list[tuple[str, str]] | None = None, **others: type[Kernel]) -> dict[str, Any]:
    kinds = dict.fromkeys(NAMES, Kernel) | {name.replace("_", "-"): kind for name, kind in others.items()}
    return run_case(
        {name: lambda gpu, name=name, kind=kind: kind(name, gpu) for name, kind in kinds.items()}, log=log
    )


def watch_judge(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None]) -> None:
    """`before` gets the rows of each judgement that is in the judges' thread, ahead of it."""
    original = trial.judge

    def judge(case: Any, rows: Any, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread().name.startswith("judge"):
            before(rows)
        return original(case, rows, *arguments, **named)

    monkeypatch.setattr(trial, "judge", judge)


def test_a_rounds_rows_are_judged_while_the_next_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, overlapped = 0, []
    first = 1 + 2 * len(NAMES) + 1  # commands until the race: reference, preparations, checks (baseline: two)
    begun = threading.Condition()
    original = LocalLink.call

    def call(self: LocalLink, command: str, **arguments: Any) -> Any:
        nonlocal commands
        with begun:
            commands += 1
            begun.notify_all()
        return original(self, command, **arguments)

    def wait_for_the_next_command(_: Any) -> None:
        number = len(overlapped)
        if number == ROUNDS * len(NAMES) - 1:
            return  # the race's last rows have no command after them
        copies = number // len(NAMES) + 1
        with begun:
            assert begun.wait_for(lambda: commands > first + copies + number + 1, timeout=20.0)
        overlapped.append(True)

    watch_judge(monkeypatch, wait_for_the_next_command)
    monkeypatch.setattr(LocalLink, "call", call)
    assert {outcome.status for outcome in race().values()} == {"ok"}
    assert overlapped == [True] * (ROUNDS * len(NAMES) - 1)


def test_nothing_is_judged_any_more_when_host_times_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def slowly(_: Any) -> None:
        time.sleep(0.01)
        judged.append(threading.current_thread().name)

    watch_judge(monkeypatch, slowly)
    seen: list[tuple[int, bool]] = []
    original = Subject.time_eager

    def time_eager(self: Subject, *arguments: Any, **named: Any) -> Any:
        alive = any(thread.name.startswith("judge") for thread in threading.enumerate())
        seen.append((len(judged), alive))
        return original(self, *arguments, **named)

    monkeypatch.setattr(Subject, "time_eager", time_eager)
    assert {outcome.status for outcome in race().values()} == {"ok"}
    assert seen == [(ROUNDS * len(NAMES), False)] * len(NAMES)
    assert len(set(judged)) == 1, "one thread"


def test_who_is_wrong_in_a_round_is_not_timed_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_judge(monkeypatch, lambda _: time.sleep(0.01))
    log: list[tuple[str, str]] = []
    outcomes = race(log, fa3=WrongLate)
    assert outcomes["fa3"].status == "wrong" and outcomes["fa3"].graph_us is None
    assert (outcomes["fa3"].reason or "").startswith("in timed call ")
    assert " of a round: output is off by 1 of its norm" in (outcomes["fa3"].reason or "")
    assert log.count(("fa3", "time_graph")) == 2 and ("fa3", "time_eager") not in log
    for name in NAMES[:2]:
        assert outcomes[name].status == "ok" and log.count((name, "time_graph")) == ROUNDS


@pytest.mark.parametrize("seed", range(4))
def test_errors_are_of_the_same_queries(seed: int) -> None:
    """Three of one kernel have one error; the largest of more queries would be unfair to the baseline."""
    outcomes = run_case({name: lambda gpu, name=name: Kernel(name, gpu) for name in NAMES}, seed=seed)
    errors = {(outcome.max_abs_err, outcome.rel_err) for outcome in outcomes.values()}
    assert len(errors) == 1 and min(errors.pop()) > 0.0


def test_a_busy_host_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays by the host's clock are long while something else runs: then they are taken again."""
    asked: list[int] = []
    original = SimulatedGpu.wall_times

    def disturbed(self: SimulatedGpu, call: Any, before: Any) -> list[float]:
        asked.append(len(before))
        return [us + 500.0 * (len(asked) == 1) for us in original(self, call, before)]

    monkeypatch.setattr(SimulatedGpu, "wall_times", disturbed)
    outcomes = race()
    assert {outcome.status for outcome in outcomes.values()} == {"ok"}
    assert len(asked) == len(NAMES) + 1, "once more, for the one that was disturbed"


def test_when_all_are_wrong_the_race_ends() -> None:
    log: list[tuple[str, str]] = []
    outcomes = race(log, evenkv_cuda=WrongLate, flashinfer_tc=WrongLate, fa3=WrongLate)
    assert {outcome.status for outcome in outcomes.values()} == {"wrong"}
    assert sum(command == "time_graph" for _, command in log) <= 2 * len(NAMES)


def test_all_prepare_side_by_side_but_who_chooses_between_settings_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Chooses(Kernel):
        def settings(self, case: Any) -> tuple[str, ...]:
            return "slow", "quick"

        def us_of(self, setting: str) -> float:
            return 9.0 if setting == "slow" else 7.0

    original, meeting, busy = LocalLink.call, threading.Barrier(3, timeout=20.0), []

    def call(self: LocalLink, command: str, **arguments: Any) -> Any:
        if command == "prepare" and self.name == "fa3":
            assert not busy
        elif command in ("prepare", "reference"):
            busy.append(self.name)
            meeting.wait()  # the baseline, ours and the owner's reference: each waits for the others
            meeting.wait()
            busy.remove(self.name)
        return original(self, command, **arguments)

    monkeypatch.setattr(LocalLink, "call", call)
    outcomes = race(fa3=Chooses)
    assert [outcome.status for outcome in outcomes.values()] == ["ok"] * 3
    assert outcomes["fa3"].setting == "quick" and outcomes["fa3"].graph_us == 7.0


class AtOnce:
    """An executor that does what it is given on the spot, in the parent's thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Future:
        future: Future = Future()
        future.set_result(call(*arguments, **named))
        return future


def test_draws_and_outcomes_are_those_of_doing_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalLink.call

    def commands(executor: Any) -> tuple[list[Any], dict[str, Any]]:
        asked: list[Any] = []

        def call(self: LocalLink, command: str, **arguments: Any) -> Any:
            asked.append((self.name, command, arguments))
            return original(self, command, **arguments)

        with monkeypatch.context() as patch:
            patch.setattr(LocalLink, "call", call)
            if executor is not None:
                patch.setattr(trial, "ThreadPoolExecutor", executor)
            outcomes = race(fa3=WrongLate, evenkv_cuda=FaultsLate)
        return asked, {name: replace(outcome, host_us=None) for name, outcome in outcomes.items()}

    first, second = commands(None), commands(AtOnce)
    assert first[1] == second[1]
    # What comes before the first copy is done side by side: in whatever order, but the same.
    for asked in (first[0], second[0]):
        begin = next(number for number, (_, command, _) in enumerate(asked) if command == "matched_copy")
        asked[:begin] = sorted(asked[:begin], key=repr)
    assert first[0] == second[0]
    assert [first[1][name].status for name in NAMES] == ["refused", "ok", "wrong"]


def test_what_a_judge_raises_ends_the_case_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise ArithmeticError("the judge is out of order")

    watch_judge(monkeypatch, fails)
    with pytest.raises(ArithmeticError, match="out of order"):
        race()
    assert not any(thread.name.startswith("judge") for thread in threading.enumerate())


def test_an_owner_that_fails_in_a_race_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(SimulatedKeeper):
        rounds = 0

        def matched_copy(self, **arguments: Any) -> list[float]:
            self.rounds += 1
            if self.rounds == 3:
                raise RuntimeError("fell off the bus")
            return super().matched_copy(**arguments)

    monkeypatch.setattr("bench_device_fakes.SimulatedKeeper", Fails)
    with pytest.raises(trial.WorkerFault, match="fell off the bus"):
        run_case({"fa3": lambda gpu: Kernel("fa3", gpu)}, BF16)
    assert not any(thread.name.startswith("judge") for thread in threading.enumerate())
