"""A simulated GPU for the harness: tensors on the CPU, a timeline of streams instead of a clock.

Kernels, honest and cheating, write real outputs and put their work on the timeline.
"""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from evenkv.bench.case import Case
from evenkv.bench.device import inputs, keeper, subject, timing
from evenkv.bench.device.clocks import ClockState
from evenkv.bench.device.correctness import reference_rows
from evenkv.bench.device.implementations.base import Implementation, Prepared, bf16_outputs
from evenkv.bench.device.inputs import Tensors
from evenkv.bench.device.timing import CuptiTimer
from evenkv.bench.device.trial import Setup, measure_case
from evenkv.bench.device.worker import WorkerFault, describe
from evenkv.bench.protocol import Outcome

STREAM, SIDE_STREAM = 7, 13
FACTS = {"gpu": "Simulated", "uuid": "GPU-0", "cuda": "0", "torch": "0"}

BF16 = Case(3, None, (5, 40, 33), 4, 2, 64, 16)
FP8 = replace(BF16, kv_dtype="float8_e4m3fn")


class Poisoned(Exception):
    """An illegal address: the context is gone."""


class SimulatedGpu:
    """Takes the place of `timing.CudaMachine`. Time passes only by `launch` (ns on streams)."""

    def __init__(self, timer: str = "cupti", lose_records: int = 0) -> None:
        self.device = torch.device("cpu")
        self.now = {STREAM: 0, SIDE_STREAM: 0}
        self.records: list[SimpleNamespace] = []
        self.flushes = 0
        self.lose_records = lose_records
        self.kinds = SimpleNamespace(CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2)
        self.timer: Any = (
            CuptiTimer(self._cupti(), lambda: self.launch("spin_kernel(long)", 1.0), self.synchronize)
            if timer == "cupti"
            else _SimulatedEvents(self)
        )

    def launch(self, name: str, us: float, stream: int = STREAM) -> None:
        start = self.now[stream] if stream == STREAM else max(self.now.values())
        end = start + round(1000 * us)
        self.records.append(SimpleNamespace(kind=10, name=name, start=start, end=end, stream_id=stream))
        self.now[stream] = end

    def _cupti(self) -> Any:
        callbacks: list[Callable[..., None]] = []
        enabled: set[int] = set()

        def flush(_: int) -> None:
            if self.lose_records:
                self.lose_records -= 1
                self.records.remove(next(r for r in self.records if "spin" in r.name))
            callbacks[-1](self.records if enabled else [])
            self.records = []

        def enable(kind: int) -> None:
            if not enabled:
                self.records = []
            enabled.add(kind)

        return SimpleNamespace(
            ActivityKind=self.kinds,
            activity_enable=enable,
            activity_disable=enabled.discard,
            activity_register_callbacks=lambda requested, completed: callbacks.append(completed),
            activity_flush_all=flush,
        )

    def flush(self) -> None:
        self.flushes += 1
        self.launch("flush", 60.0)

    def synchronize(self) -> None:
        latest = max(self.now.values())
        self.now = dict.fromkeys(self.now, latest)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        return call

    def trial_timer(self) -> Any:
        return self.timer

    def host_times(self, call: Callable[[], None], count: int) -> list[float]:
        return timing.host_times(call, count, self.synchronize)

    def wall_times(self, call: Callable[[], None], before: Sequence[Callable[[], None]]) -> list[float]:
        times = []
        for prepare in before:
            prepare()
            self.synchronize()
            begin = max(self.now.values())
            call()
            self.synchronize()
            times.append((max(self.now.values()) - begin) / 1000 + 12.0)
        return times

    def facts(self) -> dict[str, Any]:
        return FACTS

    def free_bytes(self) -> int:
        return 64 << 30

    def held_bytes(self) -> int:
        return 0

    def collect(self) -> None:
        pass

    def classify(self, error: Exception) -> tuple[str, bool]:
        return timing.status_of(error), isinstance(error, Poisoned)


class _SimulatedEvents:
    """Sees its own stream alone, as CUDA events do."""

    name = "events"

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def times(self, call: Any, before: Sequence[Any], after: Any) -> list[float]:
        times = []
        for number, prepare in enumerate(before):
            prepare()
            begin = self._gpu.now[STREAM]
            call()
            times.append((self._gpu.now[STREAM] - begin) / 1000)
            after(number)
        self._gpu.synchronize()
        return times


class Kernel(Implementation):
    """An honest kernel on the simulated GPU; cheats override `attend` or `PreparedKernel`."""

    us = 10.0

    def __init__(self, name: str, gpu: SimulatedGpu) -> None:
        super().__init__(name)
        self.gpu = gpu

    def missing(self) -> str | None:
        return None

    def version(self) -> str | None:
        return None if self.name.startswith("evenkv") else "1.0"

    def prepare(self, case: Case, tensors: Tensors, setting: str) -> Prepared:
        return PreparedKernel(self, case, tensors, setting)

    def attend(self, prepared: PreparedKernel) -> None:
        prepared.write_exact()
        self.gpu.launch("attend", self.us_of(prepared.setting))

    def us_of(self, setting: str) -> float:
        return self.us


class PreparedKernel(Prepared):
    def __init__(self, kernel: Kernel, case: Case, tensors: Tensors, setting: str) -> None:
        self.kernel, self.case, self.tensors, self.setting = kernel, case, tensors, setting
        self.returned = bf16_outputs(case, tensors.q.device)
        self.calls = 0
        self._known: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}

    def call(self) -> None:
        self.calls += 1
        self.kernel.attend(self)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        # The simulation's own memory, to be quick: by contents, so it is as right as computing anew.
        key = bytes(self.tensors.q.view(torch.uint8).numpy())
        if key not in self._known:
            self._known[key] = self._compute()
        return self._known[key]

    def _compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        now = replace(self.tensors, queries=(self.tensors.q,))
        outputs, lses = reference_rows(self.case, now, range(self.case.batch))
        return torch.from_numpy(outputs[0]), torch.from_numpy(lses[0])

    def write_exact(self) -> None:
        for target, value in zip(self.returned, self.exact(), strict=True):
            target.copy_(value)


class Coarse(Kernel):
    """Within the table's limit, but coarser than the baseline by far."""

    def attend(self, prepared: PreparedKernel) -> None:
        output, lse = prepared.exact()
        prepared.returned[0].copy_(output * 0.9945)
        prepared.returned[1].copy_(lse)
        self.gpu.launch("attend", 8.0)


class SimulatedKeeper(keeper.Keeper):
    """Its pools and reference are real; copies and probes come from the timeline."""

    def matched_copy(self, kv_bytes: int, count: int, cold: bool) -> list[float]:
        return [8.0] * count

    def copy_peak(self) -> float:
        return 4000.0

    def probe_read(self, num_bytes: int, count: int, cold: bool) -> list[float]:
        return [(10.0 if cold else 5.0)] * count

    def probe_empty(self, count: int) -> list[float]:
        return [2.5] * count

    def probe_walls(self, num_bytes: int, count: int) -> tuple[float, float, float]:
        return 500.0, 503.0, 512.0

    def probe_hidden(self, num_bytes: int) -> str | None:
        return None


# Handlers of one process share what processes have for themselves, such as generators: they take turns.
_turn = threading.RLock()


class LocalLink:
    """A handler in this process behind the interface of `worker.Worker`."""

    def __init__(
        self, make: Callable[[], Any], log: list[tuple[str, str]] | None = None, name: str = ""
    ) -> None:
        self._make, self._log, self.name = make, log if log is not None else [], name
        self.handler: Any = None
        self.generation = 0

    @property
    def alive(self) -> bool:
        return self.handler is not None

    def start(self) -> None:
        if self.handler is None:
            try:
                self.handler = self._make()
            except Exception as error:
                raise WorkerFault(describe(error), gone=True) from error
            self.generation += 1

    def call(self, command: str, **arguments: Any) -> Any:
        with _turn:
            self.start()
            self._log.append((self.name, command))
            try:
                # Over a real pipe, everything is pickled.
                answer = getattr(self.handler, command)(**pickle.loads(pickle.dumps(arguments)))
            except Exception as error:
                status, poisoned = self.handler.classify(error)
                if poisoned:
                    self.kill()
                raise WorkerFault(describe(error), status, gone=poisoned) from error
            return pickle.loads(pickle.dumps(answer))

    def kill(self) -> None:
        self.handler = None

    end = kill


_shared: dict[bytes, torch.Tensor] = {}
_numbers = itertools.count()


def share_in_process(monkeypatch: Any) -> None:
    """Stand-ins for CUDA IPC within one process."""

    def share(tensor: torch.Tensor) -> bytes:
        key = str(next(_numbers)).encode()
        _shared[key] = tensor
        return key

    monkeypatch.setattr(keeper, "share", share)
    monkeypatch.setattr(subject, "adopt", lambda key, dtype: _shared[key])


def steady() -> ClockState:
    return ClockState(1980.0, 40.0, ())


def run_case(
    kernels: dict[str, Callable[[SimulatedGpu], Implementation]],
    case: Case = BF16,
    *,
    timer: str = "cupti",
    clocks: Callable[[], ClockState | None] = steady,
    iterations: int = 20,
    log: list[tuple[str, str]] | None = None,
    lose_records: int = 0,
    seed: int = 0,
) -> dict[str, Outcome]:
    """Measure a case with kernels on simulated GPUs, through the real trial, subjects and keeper."""
    owner = SimulatedKeeper(0, timer, machine=SimulatedGpu(timer))
    owner.allocate(inputs.pool_bytes(case), case.kv_bytes(), case.kv_dtype, seed=1)
    links: dict[str, LocalLink] = {}
    choosy = set()
    for name, make in kernels.items():
        gpu = SimulatedGpu(timer, lose_records)
        implementation = make(gpu)
        if len(implementation.settings(case)) > 1:
            choosy.add(name)
        handler = subject.Subject(name, 0, timer, machine=gpu, implementation=implementation)
        handler._pools = tuple(owner._pools)
        links[name] = LocalLink(lambda handler=handler: handler, log, name)
    setup = Setup(
        links,
        LocalLink(lambda: owner, log, "keeper"),
        {name: "1.0" for name in kernels},
        clocks,
        timer,  # type: ignore[arg-type]
        random.Random(seed),
        choosy,
    )
    return measure_case(case, 5, list(kernels), iterations, False, setup)
