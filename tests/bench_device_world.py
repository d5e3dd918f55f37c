"""A machine of simulated processes for `CudaDevice`: all of them in this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from bench_device_fakes import Kernel, LocalLink, SimulatedGpu, SimulatedKeeper, share_in_process, steady

from evenkv.bench.case import Case
from evenkv.bench.device import builds
from evenkv.bench.device.cuda_device import CudaDevice
from evenkv.bench.device.subject import Subject
from evenkv.bench.record import IMPLEMENTATIONS

OURS = "evenkv-cuda"
FEW = (OURS, "flashinfer-tc")


class FakeClocks:
    reason = None

    def state(self) -> Any:
        return steady()

    def memory_peak_gbps(self) -> float:
        return 4900.0


class World:
    """Processes in this one, and what they are to do wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        share_in_process(monkeypatch)
        self.kernels: dict[str, Callable[[SimulatedGpu], Any]] = {
            name: lambda gpu, name=name: Kernel(name, gpu) for name in IMPLEMENTATIONS
        }
        self.links: dict[str, LocalLink] = {}
        self.log: list[tuple[str, str]] = []
        self.make_keeper: Callable[[str], Any] = lambda timer: SimulatedKeeper(
            0, timer, machine=SimulatedGpu(timer)
        )
        self.built: list[builds.BuildKey] = []
        self.build_failures: dict[str, str] = {}
        monkeypatch.setattr(builds, "build_all", self._build)

    def _build(self, jobs: Mapping[builds.BuildKey, Case], *_: Any) -> dict[builds.BuildKey, str | None]:
        self.built += jobs
        return {key: self.build_failures.get(key[0]) for key in jobs}

    def make_worker(self, name: str, factory: str, arguments: Mapping[str, Any]) -> LocalLink:
        def make() -> Any:
            if factory.endswith(":Keeper"):
                return self.make_keeper(arguments["timer"])
            gpu = SimulatedGpu(arguments["timer"])
            return Subject(name, 0, arguments["timer"], machine=gpu, implementation=self.kernels[name](gpu))

        self.links[name] = LocalLink(make, self.log, name)
        return self.links[name]

    def device(self, timer: str = "cupti") -> CudaDevice:
        return CudaDevice(0, timer, make_worker=self.make_worker, clocks=FakeClocks())
