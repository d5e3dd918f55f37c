"""The process that `probe` asks about the machine: CUPTI, graphs, streams, memory shared by processes."""

from __future__ import annotations

import importlib.metadata
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from evenkv.bench.device.clocks import Clocks
from evenkv.bench.device.inputs import adopt, make_pool, share
from evenkv.bench.device.spans import MARKER, Record
from evenkv.bench.device.timing import CudaMachine, CuptiTimer

_PACKAGES = ("torch", "triton", "flashinfer-python", "cupti-python", "nvidia-cuda-cupti", "apache-tvm-ffi")
_MORE_PACKAGES = ("tokenspeed-fa3", "flashinfer-bench", "pyelftools", "cuda-pathfinder")
_SHARED_BYTES = 1 << 30
_MARK = 97  # what the other process writes
_GRAPH_KERNELS = 3


class Parts:
    """Commands of the process.

    Parameters
    ----------
    index : int
    machine, make_timer, clocks : optional
        Stand in for the GPU, CUPTI and NVML.
    """

    def __init__(
        self,
        index: int,
        machine: Any = None,
        make_timer: Callable[[], CuptiTimer] = CuptiTimer,
        clocks: Any = None,
    ) -> None:
        self._machine = machine or CudaMachine(index, "events")
        self._make_timer, self._clocks, self._index = make_timer, clocks, index
        self._timer: CuptiTimer | None = None
        self._sent: dict[str, torch.Tensor] = {}
        self._taken: list[torch.Tensor] = []
        self._own_bytes = self._machine.held_bytes()

    def classify(self, error: Exception) -> tuple[str, bool]:
        return self._machine.classify(error)

    def clocks(self) -> str:
        """What NVML gives."""
        clocks = self._clocks or Clocks(self._machine.facts()["uuid"], self._index)
        state = clocks.state()
        if state is None:
            raise ValueError(f"no clocks: {clocks.reason}")
        return f"{state}, memory's peak {clocks.memory_peak_gbps()} GB/s"

    def packages(self) -> str:
        """Versions of what is there."""
        found = []
        for name in (*_PACKAGES, *_MORE_PACKAGES):
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"{name} MISSING")
        return ", ".join(found)

    def records(self) -> str:
        """A kernel, a copy and a copy to the host: are they recorded, named, on the markers' stream?"""
        small = torch.ones(1024, device=self._machine.device)
        other = torch.empty_like(small)

        def call() -> None:
            small.mul_(2.0)
            other.copy_(small)

        records = self._recorded(call, 2)
        kinds = Counter(_short(record.name) for record in records)
        if not any(MARKER in record.name for record in records):
            raise ValueError(f"no marker among {dict(kinds)}")
        if len(streams := {record.stream for record in records}) > 1:
            raise ValueError(f"one stream's work is recorded on streams {sorted(streams)}: {dict(kinds)}")
        return f"{dict(kinds)} on stream {streams.pop()}"

    def graph_records(self) -> str:
        """Replays of a graph: does each kernel in it have its record?"""
        small = torch.ones(1024, device=self._machine.device)

        def call() -> None:
            for _ in range(_GRAPH_KERNELS):
                small.mul_(1.0)

        replay = self._machine.capture(call)
        records = self._recorded(replay, 5)
        inside = [record for record in records if MARKER not in record.name]
        if len(inside) != 5 * _GRAPH_KERNELS:
            raise ValueError(f"{len(inside)} records of 5 replays of {_GRAPH_KERNELS} kernels")
        return f"{_GRAPH_KERNELS} a replay, on streams {sorted({record.stream for record in inside})}"

    def toggling(self) -> str:
        """Seconds that CUPTI takes to begin and end: each timed round pays for it."""
        small = torch.ones(1024, device=self._machine.device)
        took = []
        for _ in range(5):
            begin = time.perf_counter()
            self._recorded(small.zero_, 1)
            took.append(f"{1e3 * (time.perf_counter() - begin):.1f}")
        return f"{', '.join(took)} ms"

    def streams(self) -> str:
        """A tvm-ffi function runs on torch's current stream, whichever that is."""
        import tvm_ffi

        device = tvm_ffi.device(f"cuda:{self._index}")
        tensor = torch.zeros(1, device=self._machine.device)
        side = torch.cuda.Stream(self._machine.device)
        function = tvm_ffi.convert(lambda _: tvm_ffi.get_raw_stream(device))
        seen = [function(tensor)]
        with torch.cuda.stream(side):
            seen.append(function(tensor))
        if seen != [torch.cuda.current_stream().cuda_stream, side.cuda_stream]:
            raise ValueError(f"it runs on streams {seen}, wanted 0 and {side.cuda_stream}")
        has_fast_way = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        return f"torch's exchange API is {'there' if has_fast_way else 'MISSING: slow calls'}"

    def capture(self) -> str:
        """Capture on the side stream, replay with other contents."""
        value = torch.zeros(4, device=self._machine.device)
        result = torch.zeros(4, device=self._machine.device)
        replay = self._machine.capture(lambda: torch.add(value, 1.0, out=result))
        value.fill_(41.0)
        replay()
        self._machine.synchronize()
        if result.tolist() != [42.0] * 4:
            raise ValueError(f"the replay gives {result.tolist()}, wanted 42")
        return "replays see new contents"

    def send(self, dtype: str) -> tuple[bytes, int]:
        """1 GiB for another process, and a checksum."""
        tensor = make_pool(_SHARED_BYTES, dtype, self._machine.device, 3)
        self._machine.synchronize()
        self._sent[dtype] = tensor
        return share(tensor), _checksum(tensor)

    def take(self, message: bytes, dtype: str) -> int:
        """The checksum of what another process sent; then marks its end."""
        tensor = adopt(message, dtype)
        self._taken.append(tensor)
        found = _checksum(tensor)
        tensor.view(torch.uint8)[-1:] = _MARK
        self._machine.synchronize()
        return found

    def written_by_other(self, dtype: str) -> bool:
        return int(self._sent[dtype].view(torch.uint8)[-1]) == _MARK

    def let_go(self) -> int:
        """Drop what was sent or taken; bytes that stay allocated beyond those of the start."""
        self._sent.clear()
        self._taken.clear()
        self._machine.collect()
        return max(0, self._machine.held_bytes() - self._own_bytes)

    def _recorded(self, call: Callable[[], Any], count: int) -> list[Record]:
        if self._timer is None:
            self._timer = self._make_timer()
        nothing = [lambda: None] * count
        self._timer.times(call, nothing, lambda _: None)
        return list(self._timer.records)


def _checksum(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.uint8).sum(dtype=torch.int64))


def _short(name: str) -> str:
    return "marker" if MARKER in name else name[:60]
