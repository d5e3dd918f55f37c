"""The process that owns the inputs: cache pools, the fp32 reference, the copies, the probes of the self-test.

Implementations never run here, so nothing that they do can poison it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from evenkv.bench.case import Case
from evenkv.bench.device.copies import (
    COPY_GRAIN,
    MATCHED_BUFFER_BYTES,
    copy_call,
    gbps,
    matched_bytes,
    peak_bytes,
)
from evenkv.bench.device.correctness import reference_rows
from evenkv.bench.device.inputs import build_tensors, make_pool, share
from evenkv.bench.device.spans import StrayWork
from evenkv.bench.device.timing import CudaMachine, EventTimer
from evenkv.bench.device.verdict import hidden_work

# Left free for the other processes: workspaces, block tables, outputs of every implementation.
RESERVE_BYTES = 6 << 30

_PEAK_REPEATS = 20


class Keeper:
    """Commands of the owner's process.

    Parameters
    ----------
    index : int
    timer : "cupti" or "events"
    machine : optional
        Stands in for the GPU.
    """

    def __init__(self, index: int, timer: str, machine: Any = None) -> None:
        self._machine = machine or CudaMachine(index, timer)
        self._pools: list[torch.Tensor] = []
        self._buffer: torch.Tensor | None = None
        self._own_bytes = self._machine.held_bytes()

    def classify(self, error: Exception) -> tuple[str, bool]:
        return self._machine.classify(error)

    def facts(self) -> dict[str, Any]:
        """Name, identity and versions of the GPU."""
        return self._machine.facts()

    def free_bytes(self) -> int:
        return self._machine.free_bytes()

    def allocate(self, pool_bytes: int, kv_bytes: int, kv_dtype: str, seed: int) -> int:
        """Make the K and V pools and the buffer of the matched copies, of cases of up to `kv_bytes`.

        Returns
        -------
        int
            Bytes of each pool: `pool_bytes`, or what the memory leaves.
        """
        self.free()
        buffer_bytes = min(matched_bytes(kv_bytes), MATCHED_BUFFER_BYTES)
        room = self._machine.free_bytes() - RESERVE_BYTES - buffer_bytes
        size = max(0, min(pool_bytes, room // 2)) // 16 * 16
        device = self._machine.device
        # The last page of a matched copy may reach beyond what the case lists.
        self._pools = [make_pool(size + COPY_GRAIN, kv_dtype, device, seed + half) for half in range(2)]
        self._buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        self._machine.synchronize()
        return size

    def share(self) -> tuple[bytes, bytes]:
        """The pools, for one other process."""
        return share(self._pools[0]), share(self._pools[1])

    def free(self) -> int:
        """Drop the pools.

        Returns
        -------
        int
            Bytes that this process still holds beyond what it held at its start.
        """
        self._pools, self._buffer = [], None
        self._machine.collect()
        return max(0, self._machine.held_bytes() - self._own_bytes)

    def reference(
        self, case: Case, seed: int, requests: Sequence[int], draws: Sequence[int]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """`correctness.reference_rows` of the case, for the queries of each draw."""
        return reference_rows(case, build_tensors(case, *self._pools, seed, draws), requests)

    def copy_peak(self) -> float:
        """1e9 bytes a second, read and write counted, median of repeats."""
        size = peak_bytes(self._machine.free_bytes())
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self._machine.device) for _ in range(2))
        call = copy_call(source, target, size)
        times = self._times(call, _PEAK_REPEATS, cold=True)
        del call, source, target
        self._machine.collect()
        return gbps(size, statistics.median(times))

    def read_peak(self) -> float:
        """1e9 bytes a second that torch's reduction reads, 4 GiB or what the copy has each way."""
        size = peak_bytes(self._machine.free_bytes())
        times = self.probe_read(size, _PEAK_REPEATS, cold=True)
        self._machine.collect()
        return size / statistics.median(times) / 1e3

    def matched_copy(self, kv_bytes: int, count: int, cold: bool) -> list[float]:
        """Microseconds of copies that move `kv_bytes`: half read, half written."""
        assert self._buffer is not None
        call = copy_call(self._pools[0], self._buffer, matched_bytes(kv_bytes))
        return self._times(call, count, cold)

    def probe_empty(self, count: int) -> list[float]:
        """A kernel that does next to nothing, with the flush on."""
        value = torch.zeros(1, device=self._machine.device)
        return self._times(value.zero_, count, cold=True)

    def probe_read(self, num_bytes: int, count: int, cold: bool) -> list[float]:
        """A kernel that reads `num_bytes`."""
        data = torch.zeros(1024, num_bytes // 4096, dtype=torch.float32, device=self._machine.device)
        sink = torch.empty(1024, dtype=torch.float32, device=self._machine.device)
        return self._times(lambda: torch.amax(data, dim=1, out=sink), count, cold)

    def probe_hidden(self, num_bytes: int) -> str | None:
        """None when a call that leaves its work on another stream is caught, else what the timers saw."""
        buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=self._machine.device) for _ in range(2)]
        work = copy_call(*buffers, num_bytes)
        side = torch.cuda.Stream()
        value = torch.zeros(1, device=self._machine.device)
        honest = statistics.median(EventTimer().times(work, [self._machine.flush] * 5, _nothing))

        def cheat() -> None:
            value.zero_()  # something to be timed
            with torch.cuda.stream(side):
                work()

        try:
            times = self._machine.timer.times(cheat, [self._machine.synchronize] * 5, _nothing)
        except StrayWork:
            return None
        seen = statistics.median(times)
        wall = min(self._machine.wall_times(cheat, [self._machine.synchronize] * 5))
        if hidden_work(seen, wall) or seen > 0.5 * honest:
            return None
        return (
            f"{honest:.1f} us of work on another stream went unseen: timer {seen:.1f} us, wall {wall:.1f} us"
        )

    def probe_walls(self, num_bytes: int, count: int) -> tuple[float, float, float]:
        """One copy of `num_bytes` each way: by the timer, by events, by the host's clock (idle to idle).

        Medians all three: a GPU that is disturbed now and then must not look like a timer that is wrong.
        """
        buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=self._machine.device) for _ in range(2)]
        call = copy_call(*buffers, num_bytes)
        before = [self._machine.flush] * count
        ours = self._times(call, count, cold=True)
        events = EventTimer().times(call, before, _nothing)
        walls = self._machine.wall_times(call, before)
        return statistics.median(ours), statistics.median(events), statistics.median(walls)

    def _times(self, call: Any, count: int, cold: bool) -> list[float]:
        call()
        before = [self._machine.flush if cold else _nothing] * count
        return self._machine.timer.times(call, before, _nothing)


def _nothing(*_: Any) -> None:
    pass
