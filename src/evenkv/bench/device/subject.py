"""The process of one implementation: prepares a case, hands over outputs, lets its calls be timed.

It never judges and never learns the reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenkv.bench.case import Case
from evenkv.bench.device.correctness import Rows, take_rows
from evenkv.bench.device.implementations import Implementation, Prepared, make_implementation
from evenkv.bench.device.implementations.base import Returned
from evenkv.bench.device.inputs import (
    Tensors,
    adopt,
    build_tensors,
    fill_queries,
    make_pool,
    pool_bytes,
)
from evenkv.bench.device.timing import CudaMachine
from evenkv.bench.effort import effort

# Graphs of earlier cases leave their memory in pools that no other graph takes from: past this it goes back.
_TIDY_BYTES = 1 << 30


class Refused(Exception):
    """The implementation does not do this case."""


@dataclass
class _Running:
    """A prepared case, and how its two kinds of call are made."""

    tensors: Tensors
    prepared: Prepared
    setting: str
    replay: Callable[[], None]
    replay_returned: Returned


class Subject:
    """Commands of an implementation's process.

    Parameters
    ----------
    name : str
        The implementation's.
    index : int
    timer : "cupti" or "events"
    machine, implementation : optional
        Stand in for the GPU and the implementation.
    """

    def __init__(
        self,
        name: str,
        index: int,
        timer: str,
        machine: Any = None,
        implementation: Implementation | None = None,
    ) -> None:
        self._machine = machine or CudaMachine(index, timer)
        self._implementation = implementation or make_implementation(name)
        self._pools: tuple[torch.Tensor, torch.Tensor] | None = None
        self._running: _Running | None = None

    def classify(self, error: Exception) -> tuple[str, bool]:
        return self._machine.classify(error)

    def describe(self) -> tuple[str | None, str | None]:
        """(why it is missing or None, its version or None)."""
        missing = self._implementation.missing()
        return missing, None if missing else self._implementation.version()

    def build(self, case: Case) -> None:
        """Do the compiler's work for cases like this one, by running small ones."""
        for small in self._implementation.build_cases(case):
            self._run_once(small)

    def adopt(self, k_pool: bytes, v_pool: bytes, kv_dtype: str) -> None:
        """Take the family's pools: the owner's memory, no copy."""
        self._running = None
        self._pools = adopt(k_pool, kv_dtype), adopt(v_pool, kv_dtype)

    def release(self) -> int:
        """Let go of the pools and of all memory; gives the bytes that torch still has here."""
        self._running = self._pools = None
        self._machine.collect()
        return self._machine.held_bytes()

    def prepare(self, case: Case, seed: int, leave_out: Sequence[str] = ()) -> dict[str, Any]:
        """Draw the inputs, plan, capture; of several settings keep the fastest.

        Parameters
        ----------
        leave_out : sequence of str
            Settings that gave wrong results.

        Returns
        -------
        dict
            `setting`, `plan_us`, `quantises_query`.

        Raises
        ------
        Refused
            When it does not support the case, or its call cannot be captured.
        """
        assert self._pools is not None
        self._running = None
        if reason := self._implementation.supports(case):
            raise Refused(reason)
        if self._machine.held_bytes() > _TIDY_BYTES:
            self._machine.collect()
        tensors = build_tensors(case, *self._pools, seed)
        settings = [s for s in self._implementation.settings(case) if s not in leave_out]
        tried: list[tuple[float, _Running]] = []
        failure: Exception | None = None
        for setting in settings:
            try:
                running = self._capture(case, tensors, setting)
                tried.append((self._trial_us(running) if len(settings) > 1 else 0.0, running))
            except Exception as error:
                if self._machine.classify(error)[1]:
                    raise
                failure = failure or error
        if not tried:
            raise failure or Refused("no setting is left")
        self._running = min(tried, key=lambda pair: pair[0])[1]
        return {
            "setting": self._running.setting,
            "plan_us": self._running.prepared.plan_us,
            "quantises_query": self._implementation.quantises_query(case),
        }

    def check(self, draw: int, requests: Sequence[int]) -> Rows:
        """One eager call on poisoned outputs; the rows of the requests."""
        running = self._get()
        self._set_inputs(running.prepared.returned, draw)
        running.prepared.call()
        self._machine.synchronize()  # of the whole device: nothing may hide on another stream
        return self._rows(running.prepared.returned, requests)

    def time_graph(
        self,
        draws: Sequence[int],
        cold: bool,
        checked: int,
        requests: Sequence[int],
        warm_up: int = 1,
    ) -> tuple[list[float], Rows]:
        """Replays, each with fresh queries on poisoned outputs.

        Parameters
        ----------
        draws : sequence of int
            Which queries each timed call gets (`inputs.fill_queries`).
        checked : int
            The timed call whose output is handed over.
        warm_up : int
            Replays before those that are timed.

        Returns
        -------
        times : microseconds of each call
        rows : of the checked call
        """
        running = self._get()
        kept: list[Rows] = []

        def after(number: int) -> None:
            if number == checked:
                kept.append(self._rows(running.replay_returned, requests))

        before = [self._before(running.replay_returned, draw, cold) for draw in draws]
        self._warm_up(running.replay, running.replay_returned, draws[:warm_up], cold)
        times = self._machine.timer.times(running.replay, before, after)
        return times, kept[0]

    def time_eager(self, draws: Sequence[int], cold: bool, warm_up: int = 1) -> list[float]:
        """Microseconds on the device of calls that are launched one by one, after `warm_up` untimed ones."""
        running = self._get()
        before = [self._before(running.prepared.returned, draw, cold) for draw in draws]
        self._warm_up(running.prepared.call, running.prepared.returned, draws[:warm_up], cold)
        return self._machine.timer.times(running.prepared.call, before, lambda _: None)

    def time_host(self, count: int) -> list[float]:
        """Microseconds of CPU time of eager calls in a row."""
        running = self._get()
        self._set_inputs(running.prepared.returned, 0)
        return self._machine.host_times(running.prepared.call, count)

    def time_wall(self, draws: Sequence[int], cold: bool) -> list[float]:
        """Microseconds of replays by the host's clock, until the whole device is idle."""
        running = self._get()
        before = [self._before(running.replay_returned, draw, cold) for draw in draws]
        return self._machine.wall_times(running.replay, before)

    def finish(self) -> None:
        """Forget the case."""
        self._running = None

    def _run_once(self, case: Case) -> None:
        """On pools of its own, with every setting."""
        pools = [make_pool(pool_bytes(case), case.kv_dtype, self._machine.device, 0) for _ in range(2)]
        tensors = build_tensors(case, *pools, 0)
        for setting in self._implementation.settings(case):
            self._implementation.prepare(case, tensors, setting).call()
        self._machine.synchronize()

    def _capture(self, case: Case, tensors: Tensors, setting: str) -> _Running:
        prepared = self._implementation.prepare(case, tensors, setting)
        prepared.new_queries()
        prepared.call()
        self._machine.synchronize()
        try:
            replay = self._machine.capture(prepared.call)
        except Exception as error:
            raise Refused(f"its call cannot be captured in a CUDA graph: {error}") from error
        return _Running(tensors, prepared, setting, replay, prepared.returned)

    def _trial_us(self, running: _Running) -> float:
        timer, flush = self._machine.trial_timer(), self._machine.flush
        times = timer.times(running.replay, [flush], lambda _: None)
        if more := effort(times[0]).trial - 1:  # then the first one was a warm-up
            times = timer.times(running.replay, [flush] * more, lambda _: None)
        return statistics.median(times)

    def _warm_up(
        self, call: Callable[[], None], returned: Returned, draws: Sequence[int], cold: bool
    ) -> None:
        """Calls that are not timed, with queries that no timed call gets."""
        for draw in draws:
            self._before(returned, draw ^ 1, cold)()
            call()

    def _before(self, returned: Returned, draw: int, cold: bool) -> Callable[[], None]:
        def prepare() -> None:
            self._set_inputs(returned, draw)
            if cold:
                self._machine.flush()

        return prepare

    def _set_inputs(self, returned: Returned, draw: int) -> None:
        running = self._get()
        fill_queries(running.tensors.q, draw)
        running.prepared.new_queries()
        for tensor in returned:
            tensor.fill_(float("nan"))

    def _rows(self, returned: Returned, requests: Sequence[int]) -> Rows:
        output, lse = self._get().prepared.result(returned)
        return take_rows(output, lse, requests)

    def _get(self) -> _Running:
        assert self._running is not None, "prepare comes first"
        return self._running
