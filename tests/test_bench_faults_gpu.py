"""B2, B9 and B12 on a real GPU: hidden streams, the flush, kernels that never end or poison their context."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from evenkv.bench.device.clocks import Clocks
from evenkv.bench.device.keeper import Keeper
from evenkv.bench.device.selftest import COLD_BYTES
from evenkv.bench.device.worker import Worker, WorkerFault

pytestmark = pytest.mark.gpu


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("gpu", "bench_device_handlers:GpuHandler", deadline_s=60.0)
    yield made
    made.end()


@pytest.mark.parametrize("timer", ["cupti", "events"])
def test_b2_work_on_another_stream_is_caught(timer: str) -> None:
    if timer == "cupti":
        pytest.importorskip("cupti")
    assert Keeper(0, timer).probe_hidden(1 << 30) is None


def test_b9_the_flush_makes_reads_cold_and_does_not_slow_an_empty_kernel() -> None:
    keeper = Keeper(0, "events")
    peak = Clocks(keeper.facts()["uuid"]).memory_peak_gbps()
    assert peak is not None
    cold = statistics.median(keeper.probe_read(COLD_BYTES, 50, cold=True))
    assert COLD_BYTES / cold / 1e3 <= peak
    assert statistics.median(keeper.probe_empty(50)) < 15.0


def test_b12_a_kernel_that_never_ends_is_killed(worker: Worker) -> None:
    assert worker.call("add") == 2.0
    with pytest.raises(WorkerFault, match="killed: spin"):
        worker.call("spin", deadline_s=2.0)
    assert worker.call("add") == 2.0


def test_b12_a_poisoned_context_ends_its_process_alone(worker: Worker) -> None:
    other = Worker("other", "bench_device_handlers:GpuHandler")
    try:
        assert worker.call("add") == other.call("add") == 2.0
        with pytest.raises(WorkerFault) as fault:
            worker.call("assert_on_device")
        assert fault.value.gone and not worker.alive
        assert worker.call("add") == other.call("add") == 2.0
        assert other.generation == 1
    finally:
        other.end()


def test_b12_out_of_memory_leaves_the_process_alive(worker: Worker) -> None:
    with pytest.raises(WorkerFault) as fault:
        worker.call("run_out")
    assert (fault.value.status, fault.value.gone) == ("oom", False)
    assert worker.call("add") == 2.0
