"""Times of calls on the device: CUPTI's activity records, or CUDA events where they were asked for.

CUPTI counts from the first start to the last end of all that a call launches, on every stream. Events count
launch gaps too, and only their own stream. The timer's name goes into every row; nothing falls from one to
the other on the way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from evenkv.bench.device.spans import Record, StrayWork, spans
from evenkv.bench.effort import CAPTURE_WARM_UP_CALLS, HOST_WARM_UP_CALLS
from evenkv.errors import EvenkvError
from evenkv.evaluate.environment import INSTALL

Call = Callable[[], None]

# Four times the L2: its replacement is no strict LRU, and two halves keep copies of each other's lines.
_FLUSH_FACTOR = 4
_FLUSH_ROWS = 1024  # one result a row: 4 KB written, and enough blocks to read at full speed


class Flush:
    """Makes L2 cold by READING a buffer several times its size.

    Writing one would leave dirty lines, and their write-back slows the measured kernel by 10 to 20 us.
    """

    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        columns = -(-_FLUSH_FACTOR * l2 // (4 * _FLUSH_ROWS))
        self._buffer = torch.zeros(_FLUSH_ROWS, columns, dtype=torch.float32, device=device)
        self._sink = torch.empty(_FLUSH_ROWS, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        torch.amax(self._buffer, dim=1, out=self._sink)


class Timer(Protocol):
    """`name` is the row's; `times` gives microseconds of each call."""

    name: str

    def times(self, call: Call, before: Sequence[Call], after: Callable[[int], None]) -> list[float]:
        """Time `len(before)` calls: `before[i]()`, the call, `after(i)`; only the call is counted."""
        ...


class EventTimer:
    """CUDA events around each call, on the current stream."""

    name = "events"

    def times(self, call: Call, before: Sequence[Call], after: Callable[[int], None]) -> list[float]:
        pairs = []
        for number, prepare in enumerate(before):
            prepare()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
            after(number)
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]


class CuptiTimer:
    """Spans of activity records; `records` are those of the latest `times`.

    Parameters
    ----------
    cupti : module, optional
        Stands in for `cupti.cupti`.

    Raises
    ------
    EvenkvError
        When cupti-python 13 or later is missing, or does not work with this driver.
    """

    name = "cupti"

    def __init__(self, cupti: Any = None, marker: Call | None = None, wait: Call | None = None) -> None:
        self._cupti = cupti if cupti is not None else _import_cupti()
        self._marker = marker or (lambda: torch.cuda._sleep(1))
        self._wait = wait or torch.cuda.synchronize
        self.records: list[Record] = []
        kinds = self._cupti.ActivityKind
        self._kinds = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        try:
            self._cupti.activity_register_callbacks(_buffer_requested, self._buffer_completed)
        except Exception as error:
            raise EvenkvError(
                f"CUPTI does not work here: {type(error).__name__}: {error}.",
                "Stop other profilers, or set EVENKV_BENCH_TIMER=events, which is another timer.",
            ) from error

    def times(self, call: Call, before: Sequence[Call], after: Callable[[int], None]) -> list[float]:
        self._wait()
        self.records.clear()
        for kind in self._kinds:
            self._cupti.activity_enable(kind)
        try:
            for number, prepare in enumerate(before):
                prepare()
                self._marker()
                call()
                self._marker()
                after(number)
            self._wait()
            self._cupti.activity_flush_all(1)
        except Exception:
            # What was recorded so far must not turn up among the next call's records.
            with contextlib.suppress(Exception):
                self._wait()
                self._cupti.activity_flush_all(1)
            raise
        finally:
            for kind in self._kinds:
                self._cupti.activity_disable(kind)
        return spans(self.records, len(before))

    def _buffer_completed(self, activities: list[Any]) -> None:
        # Runs in CUPTI's hands: the activities die with this call, and an exception would be lost.
        kernel = self._kinds[0]
        for activity in activities:
            if activity.kind in self._kinds:
                name = activity.name if activity.kind == kernel else "copy or memset"
                self.records.append(Record(name, activity.start, activity.end, activity.stream_id))


def _buffer_requested() -> tuple[int, int]:
    return 8 << 20, 0  # bytes of a buffer, and no limit on its records


def _import_cupti() -> Any:
    # It imports pyelftools: a bundle that was packed without dependencies lacks it.
    needs = f"`{INSTALL}` (cupti-python 13 or later)"
    remedy = f"{needs}, or set EVENKV_BENCH_TIMER=events, which is another timer."
    try:
        version = importlib.metadata.version("cupti-python")
        from cupti import cupti
    except (ImportError, OSError) as error:
        raise EvenkvError(f"CUPTI's Python module is missing: {error}.", remedy) from error
    if int(version.split(".")[0]) < 13:
        raise EvenkvError(f"cupti-python is {version}: wanted 13 or later.", remedy)
    return cupti


def make_timer(name: str) -> Timer:
    """The timer of that name, "cupti" or "events"."""
    return CuptiTimer() if name == "cupti" else EventTimer()


def host_times(call: Call, count: int, wait: Call = torch.cuda.synchronize) -> list[float]:
    """Microseconds of CPU time that each of `count` calls takes to return, one right after the other.

    As the layers of a model call it. With an idle device before each, what was timed was how deep the
    processor slept meanwhile: 7 to 20 us and more for the same call. The device's queue has room for all.
    HOST_WARM_UP_CALLS come first, not timed.
    """
    for _ in range(HOST_WARM_UP_CALLS):
        call()
    wait()
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    wait()
    return times


def wall_times(call: Call, before: Sequence[Call]) -> list[float]:
    """Microseconds from the launch until the WHOLE device is idle: no stream can hide from it."""
    times = []
    for prepare in before:
        prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def capture(call: Call, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph, captured on a side stream after a call there.

    Raises
    ------
    Exception
        Whatever the call raises when it cannot be captured.
    """
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Not `with torch.cuda.graph(...)`: it collects garbage and empties the allocator's cache at every
    # capture.
    with torch.cuda.stream(stream):
        for _ in range(CAPTURE_WARM_UP_CALLS):
            call()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            call()
        except Exception:
            with contextlib.suppress(
                RuntimeError
            ):  # the capture is invalid already: the first error says why
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


class CudaMachine:
    """One GPU as its processes see it: the only place where measuring touches CUDA.

    Parameters
    ----------
    index : int
        The device, as torch counts.
    timer : "cupti" or "events"
    """

    def __init__(self, index: int, timer: str) -> None:
        torch.cuda.set_device(index)
        torch.backends.cuda.matmul.allow_tf32 = False  # the reference is fp32
        self.device = torch.device("cuda", index)
        self.timer = make_timer(timer)
        self.flush: Call = Flush(self.device)
        # One for all captures: kernels may keep scratch for every stream that they meet.
        self._side_stream = torch.cuda.Stream()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, call: Call) -> Call:
        """A function that replays the captured call."""
        return capture(call, self._side_stream).replay

    def host_times(self, call: Call, count: int) -> list[float]:
        return host_times(call, count)

    def wall_times(self, call: Call, before: Sequence[Call]) -> list[float]:
        return wall_times(call, before)

    def facts(self) -> dict[str, Any]:
        """Name and identity of the GPU, versions of CUDA and torch."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "uuid": f"GPU-{properties.uuid}",
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
        }

    def trial_timer(self) -> Timer:
        """Good enough to choose between settings, and quick to start."""
        return EventTimer()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def held_bytes(self) -> int:
        """Memory that this process has taken, blocks that wait for other processes included."""
        return torch.cuda.memory_reserved()

    def collect(self) -> None:
        """Give back to the driver all that nobody uses."""
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def classify(self, error: Exception) -> tuple[str, bool]:
        """The row's status for an error, and whether this CUDA context is poisoned."""
        try:
            torch.cuda.synchronize()
        except Exception:
            return "refused", True
        status = status_of(error)
        if status == "oom":
            self.collect()
        return status, False


def status_of(error: Exception) -> str:
    """The row's status for what an implementation or the timer raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    return "wrong" if isinstance(error, StrayWork) else "refused"
