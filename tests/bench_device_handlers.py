"""Handlers for real worker processes: standard library only, so that they start quickly."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any


class Handler:
    """Answers, fails, crashes or hangs, as told."""

    def __init__(self, greeting: str = "hello", broken: bool = False) -> None:
        if broken:
            raise ValueError("cannot be made")
        self.greeting = greeting
        self.memory: list[Any] = []

    def classify(self, error: Exception) -> tuple[str, bool]:
        return {"MemoryError": ("oom", False), "SystemError": ("refused", True)}.get(
            type(error).__name__, ("refused", False)
        )

    def greet(self, name: str) -> str:
        self.memory.append(name)
        return f"{self.greeting} {name} {len(self.memory)}"

    def refuse(self) -> None:
        raise ValueError("page_size 3 is not for me\nand more lines")

    def run_out(self) -> None:
        raise MemoryError("out of memory")

    def poison(self) -> None:
        raise SystemError("an illegal memory access was encountered")

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self) -> None:
        time.sleep(600)

    def make_a_lock(self) -> None:
        """As tqdm does at its first bar."""
        self.memory.append(multiprocessing.RLock())


def simulated_subject(name: str, case: Any) -> Any:
    """An implementation's process with all that is its own; GPU and pools are on the CPU."""
    from bench_device_fakes import SimulatedGpu

    from evenkv.bench.device.inputs import make_pool, pool_bytes
    from evenkv.bench.device.subject import Subject

    gpu = SimulatedGpu("events")
    subject = Subject(name, 0, "events", machine=gpu)
    subject._pools = tuple(make_pool(pool_bytes(case), case.kv_dtype, gpu.device, half) for half in range(2))
    return subject


class GpuHandler:
    """Misbehaves on a real GPU."""

    def __init__(self) -> None:
        from evenkv.bench.device.timing import CudaMachine

        self.machine = CudaMachine(0, "events")

    def classify(self, error: Exception) -> tuple[str, bool]:
        return self.machine.classify(error)

    def add(self) -> float:
        import torch

        return float(torch.ones(1, device=self.machine.device) + 1)

    def spin(self) -> None:
        import torch

        torch.cuda._sleep(1 << 45)  # hours
        torch.cuda.synchronize()

    def assert_on_device(self) -> None:
        import torch

        index = torch.tensor([1 << 20], device=self.machine.device)
        torch.zeros(4, device=self.machine.device)[index].sum().item()

    def run_out(self) -> None:
        import torch

        torch.empty(1 << 44, dtype=torch.uint8, device=self.machine.device)
