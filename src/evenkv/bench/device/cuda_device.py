"""`evenkv.bench.protocol.Device` on one NVIDIA GPU.

The parent makes no CUDA context. One process owns the inputs (`keeper.Keeper`), one each runs an
implementation (`subject.Subject`), over the owner's memory. Only one of them uses the GPU while times are
taken.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evenkv.bench.case import Case
from evenkv.bench.device import builds, memory, selftest
from evenkv.bench.device.clocks import Clocks
from evenkv.bench.device.inputs import pool_bytes, seed_of
from evenkv.bench.device.trial import BASELINE, Setup, limit_of, measure_case, patient
from evenkv.bench.device.worker import Worker, WorkerFault
from evenkv.bench.protocol import DeviceFacts, DeviceLost, Outcome
from evenkv.bench.record import IMPLEMENTATIONS, OURS, Timer
from evenkv.errors import EvenkvError
from evenkv.evaluate.environment import driver_version
from evenkv.evaluate.table import DATASHEET_BANDWIDTH
from evenkv.library.toolchain import cache_folder

DEADLINE_S = 60.0
# An implementation whose process had to be killed as often, one case after the other, gets no more of them.
STRIKES = 3

_POOL_SEED = 20260101
_FLOOR_CALLS = 20

MakeWorker = Callable[[str, str, Mapping[str, Any]], Any]


class CudaDevice:
    """A GPU to measure on.

    Parameters
    ----------
    index : int
        As CUDA counts, CUDA_VISIBLE_DEVICES included.
    timer : "cupti", "events" or "auto"
        "auto": CUPTI, or events when CUPTI does not work here; decided once, named in every row.
    deadline_s : float
        Seconds until a process that does not answer is killed.
    make_worker, clocks : optional
        Stand in for the processes (name, factory, arguments) and for NVML.
    """

    def __init__(
        self,
        index: int = 0,
        timer: str = "auto",
        deadline_s: float = DEADLINE_S,
        make_worker: MakeWorker | None = None,
        clocks: Any = None,
    ) -> None:
        if timer not in ("cupti", "events", "auto"):
            raise EvenkvError(f"timer is {timer!r}.", 'Wanted "cupti", "events" or "auto".')
        self._index, self._asked_timer, self._deadline_s = index, timer, deadline_s
        self._make_worker = make_worker or (
            lambda name, factory, arguments: Worker(name, factory, arguments, deadline_s)
        )
        self._clocks = clocks
        self.timer_note: str | None = None  # why "auto" took events
        self._keeper: Any = None
        self._timer: Timer = "cupti"
        self._facts: dict[str, Any] = {}
        self._subjects: dict[str, Any] = {}
        self._missing: dict[str, str | None] = {}
        self._versions: dict[str, str | None] = {}
        self._built: dict[builds.BuildKey, str | None] = {}
        self._wanted: tuple[str, ...] = IMPLEMENTATIONS
        self._copy_gbps: float | None = None
        self._family: list[Case] = []
        self._pool = 0
        self._free_at_start: int | None = None  # bytes, with every process up and nothing allocated
        self._adopted: dict[str, tuple[int, int]] = {}  # name -> generations of its process and the pools
        self._pool_generation = 0
        self._strikes: dict[str, int] = {}
        self._rng = random.Random()  # seeded by the system: nobody can know what is checked

    # -- the Device protocol

    def facts(self) -> DeviceFacts:
        self._start()
        return DeviceFacts(
            self._facts["gpu"],
            driver_version(),
            self._facts["cuda"],
            self._facts["torch"],
            self._clocks.memory_peak_gbps(),
        )

    def self_test(self) -> list[str]:
        self._start()
        copy = self.copy_peak_gbps()
        remembered = selftest.CopyMemory(
            cache_folder() / "bench" / "copy-peak.json", f"{self._facts['uuid']} {self._timer}"
        )
        known = DATASHEET_BANDWIDTH.get(self._facts["gpu"])
        peak = known / 1e9 if known else self._clocks.memory_peak_gbps()
        faults = selftest.self_test(self._keeper.call, copy, self._timer, peak, remembered)
        if self._clocks.state() is None:
            faults.append(f"clocks cannot be read ({self._clocks.reason})")
        return faults

    def implementations(self) -> Mapping[str, str | None]:
        self._start()
        if not self._missing:
            for name in IMPLEMENTATIONS:
                self._subjects[name] = self._make_worker(
                    name,
                    "evenkv.bench.device.subject:Subject",
                    {"name": name, "index": self._index, "timer": self._timer},
                )
            with ThreadPoolExecutor(len(IMPLEMENTATIONS)) as pool:  # they import side by side
                answers = pool.map(self._describe, IMPLEMENTATIONS)
            for name, (missing, version) in zip(IMPLEMENTATIONS, answers, strict=True):
                self._missing[name], self._versions[name] = missing, version
        return dict(self._missing)

    def copy_peak_gbps(self) -> float:
        self._start()
        if self._copy_gbps is None:
            self._copy_gbps = self._ask_keeper("copy_peak")
        return self._copy_gbps

    def launch_floor_us(self) -> float:
        self._start()
        return statistics.median(self._ask_keeper("probe_empty", count=_FLOOR_CALLS))

    def read_peak_gbps(self) -> float:
        self._start()
        return self._ask_keeper("read_peak")

    def build(
        self,
        cases: Sequence[Case],
        progress: builds.Progress = lambda what, share: None,
        implementations: Sequence[str] | None = None,
    ) -> None:
        """Compile what the cases need; `begin_family` does what is left of it.

        Parameters
        ----------
        implementations : sequence of str, optional
            Those that will be measured: the others' compilers have nothing to do, here and later.
        """
        if implementations is not None:
            self._wanted = tuple(implementations)
        jobs = builds.build_jobs(cases, self._present(), self._built)
        self._built |= builds.build_all(jobs, self._index, progress)

    def begin_family(self, cases: Sequence[Case]) -> None:
        if len({case.kv_dtype for case in cases}) != 1:
            raise EvenkvError("A family has one kv_dtype.", "Begin a family for each of them.")
        self.build(cases)
        self._family = list(cases)
        with ThreadPoolExecutor(len(IMPLEMENTATIONS)) as pool:  # those that were ended after the last family
            list(pool.map(self._wake, self._present()))
        if self._free_at_start is None:
            self._free_at_start = self._ask_keeper("free_bytes")
        self._allocate()

    def measure(
        self, case: Case, implementations: Sequence[str], iterations: int, warm: bool
    ) -> Mapping[str, Outcome]:
        wanted = pool_bytes(case)
        if wanted > self._pool:
            reason = f"K and V need {2 * wanted / 2**30:.1f} GiB, {2 * self._pool / 2**30:.1f} are allocated"
            return {name: Outcome("oom", reason) for name in implementations}
        outcomes = {name: self._barred(name, case) for name in implementations}
        able = [name for name, outcome in outcomes.items() if outcome is None]
        present = {name: _Link(self, name) for name in able}
        if limit_of(able) and self._barred(BASELINE, case) is None:
            present.setdefault(BASELINE, _Link(self, BASELINE))
        for name in present:
            # Before they work side by side: the owner has its own work then, and shares with one at a time.
            with contextlib.suppress(WorkerFault):  # the call that wants the pools says so
                self._adopt(name)
        setup = Setup(
            present,
            self._keeper,
            self._versions,
            self._clocks.state,
            self._timer,
            self._rng,
            {name for name in present if len(builds.make_implementation(name).settings(case)) > 1},
        )
        try:
            measured = measure_case(case, seed_of(case), able, iterations, warm, setup)
        except KeyboardInterrupt:
            for worker in self._subjects.values():
                worker.kill()  # some are at work still: nobody waits for a peer that hangs
            raise
        except WorkerFault as fault:
            if fault.status == "oom":
                return {name: Outcome("oom", f"the reference: {fault.reason}") for name in implementations}
            # The owner failed, not an implementation: begin anew, once.
            self._recover(fault)
            try:
                measured = measure_case(case, seed_of(case), able, iterations, warm, setup)
            except WorkerFault as second:
                raise DeviceLost(f"GPU {self._index} does not answer: {second.reason}") from second
        found = {name: outcomes[name] or measured[name] for name in implementations}
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    def end_family(self) -> None:
        alive = {name: worker for name, worker in self._subjects.items() if worker.alive}
        with ThreadPoolExecutor(max(1, len(alive))) as pool:  # nothing is timed: side by side
            held = dict(zip(alive, pool.map(memory.release, alive.values()), strict=True))
        self._adopted.clear()
        self._family, self._pool = [], 0
        try:
            leftover = self._keeper.call("free")
        except WorkerFault:
            leftover = memory.LEFTOVER_BYTES + 1
        if leftover > memory.LEFTOVER_BYTES:
            # A process that was killed never let go of the pools: they end with their owner's process.
            self._restart_keeper()
        self._check_freed(held)

    def close(self) -> None:
        for worker in [*self._subjects.values(), self._keeper]:
            if worker is not None:
                worker.end()
        self._subjects.clear()
        self._missing.clear()
        self._keeper = None

    # -- inside

    def _check_freed(self, held: dict[str, int]) -> None:
        """Whether the GPU itself has the family's memory back; processes start anew when it has not.

        `held`: by implementation, the bytes that torch still has in its process.
        """

        def lost() -> int:
            return (self._free_at_start or 0) - self._ask_keeper("free_bytes") - sum(held.values())

        if lost() <= memory.SCRATCH_BYTES:
            return
        for name in OURS:
            self._subjects[name].kill()
            held.pop(name, None)
        if (still := lost()) <= memory.UNACCOUNTED_BYTES:
            return
        warnings.warn(
            f"GPU {self._index}: {still / 2**30:.1f} GiB are not free after a family and no process says "
            "that it holds them; all processes start anew.",
            stacklevel=3,
        )
        for worker in self._subjects.values():
            worker.kill()
        self._restart_keeper()

    def _start(self) -> None:
        """Start the owner; settles the timer."""
        if self._keeper is not None:
            return
        first: Timer = "events" if self._asked_timer == "events" else "cupti"
        try:
            self._open(first)
        except WorkerFault as fault:
            if self._asked_timer != "auto":
                raise EvenkvError(
                    f"GPU {self._index} cannot be used: {fault.reason}.", _START_REMEDY
                ) from fault
            self.timer_note = (
                f"CUPTI does not work here, CUDA events are the timer of all rows: {fault.reason}"
            )
            warnings.warn(self.timer_note, stacklevel=3)
            try:
                self._open("events")
            except WorkerFault as second:
                raise EvenkvError(
                    f"GPU {self._index} cannot be used: {second.reason}.", _START_REMEDY
                ) from second

    def _open(self, timer: Timer) -> None:
        keeper = self._make_worker(
            "keeper", "evenkv.bench.device.keeper:Keeper", {"index": self._index, "timer": timer}
        )
        try:
            facts = keeper.call("facts")
            patient(keeper, "probe_empty", count=5)  # a timer that is there may still not work
        except WorkerFault:
            keeper.end()
            raise
        self._keeper, self._timer, self._facts = keeper, timer, facts
        if self._clocks is None:
            self._clocks = Clocks(facts["uuid"], self._index)

    def _present(self) -> list[str]:
        """Implementations that will be called and are not missing."""
        wanted, known = {*self._wanted, *limit_of(self._wanted)}, self.implementations()
        return [name for name in IMPLEMENTATIONS if name in wanted and known[name] is None]

    def _wake(self, name: str) -> None:
        with contextlib.suppress(WorkerFault):  # the first call tells
            self._subjects[name].start()

    def _describe(self, name: str) -> tuple[str | None, str | None]:
        try:
            return self._subjects[name].call("describe")
        except WorkerFault as fault:
            return fault.reason, None

    def _allocate(self) -> None:
        """The family's pools, at the largest size that it needs."""
        self._pool_generation += 1
        self._pool = 0
        try:
            self._pool = self._keeper.call(
                "allocate",
                pool_bytes=max(pool_bytes(case) for case in self._family),
                kv_bytes=max(case.kv_bytes() for case in self._family),
                kv_dtype=self._family[0].kv_dtype,
                seed=_POOL_SEED,
            )
        except WorkerFault as fault:
            if fault.status != "oom" or fault.gone:
                raise DeviceLost(f"GPU {self._index} does not answer: {fault.reason}") from fault
            # Somebody else has the memory: the family's cases get rows that say so, the next ones may fit.
            self._ask_keeper("free")

    def _ask_keeper(self, command: str, **arguments: Any) -> Any:
        try:
            return self._keeper.call(command, **arguments)
        except WorkerFault as fault:
            raise DeviceLost(f"GPU {self._index} does not answer: {fault.reason}") from fault

    def _recover(self, fault: WorkerFault) -> None:
        for worker in self._subjects.values():
            worker.kill()  # they hold the old pools
        self._adopted.clear()
        self._restart_keeper()
        self._allocate()
        if self._pool == 0:
            raise DeviceLost(f"GPU {self._index} has no memory left after: {fault.reason}")

    def _restart_keeper(self) -> None:
        self._keeper.kill()
        try:
            self._keeper.call("free_bytes")
        except WorkerFault as fault:
            raise DeviceLost(f"GPU {self._index} does not come up again: {fault.reason}") from fault

    def _barred(self, name: str, case: Case) -> Outcome | None:
        """The outcome of an implementation that does not even start."""
        missing = self.implementations().get(name, "unknown implementation")
        if missing is not None:
            return Outcome("refused", f"missing: {missing}")
        if self._strikes.get(name, 0) >= STRIKES:
            return Outcome("refused", f"left out: its process had to be ended {STRIKES} cases in a row")
        failure = self._built.get((name, builds.make_implementation(name).build_key(case)))
        return Outcome("refused", failure) if failure is not None else None

    def _call_subject(self, name: str, command: str, arguments: Mapping[str, Any]) -> Any:
        try:
            self._adopt(name)
            answer = self._subjects[name].call(command, **arguments)
        except WorkerFault as fault:
            if fault.gone:
                self._strikes[name] = self._strikes.get(name, 0) + 1
            raise
        if command == "finish":
            self._strikes[name] = 0
        return answer

    def _adopt(self, name: str) -> None:
        """See to it that the process runs and has the family's pools."""
        worker = self._subjects[name]
        worker.start()
        if self._adopted.get(name) != (worker.generation, self._pool_generation):
            k_pool, v_pool = self._share()
            worker.call("adopt", k_pool=k_pool, v_pool=v_pool, kv_dtype=self._family[0].kv_dtype)
            self._adopted[name] = worker.generation, self._pool_generation

    def _share(self) -> tuple[bytes, bytes]:
        return self._ask_keeper("share")


class _Link:
    """An implementation's process, with the family's pools in its hands before anything else."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self._device, self._name = device, name

    def call(self, command: str, **arguments: Any) -> Any:
        return self._device._call_subject(self._name, command, arguments)


_START_REMEDY = "Check `nvidia-smi` and `evenkv doctor`; EVENKV_BENCH_TIMER=events does without CUPTI."
