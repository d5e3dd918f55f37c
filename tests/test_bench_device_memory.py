"""Device memory between families: given back, checked on the GPU itself, and what happens without it."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from bench_device_fakes import BF16, FP8, Kernel, SimulatedGpu, SimulatedKeeper
from bench_device_world import FEW, OURS, World

from evenkv.bench.case import Case
from evenkv.bench.device.cuda_device import CudaDevice
from evenkv.bench.device.inputs import pool_bytes
from evenkv.bench.device.subject import Subject

torch.set_num_threads(1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize("kept", [0, 3 << 30, 5 << 30])
def test_the_gpu_itself_is_asked_whether_memory_is_free(world: World, kept: int) -> None:
    """Ours end with their scratch; what is not free then, whoever keeps it, ends with all processes."""

    class Forgetful(SimulatedKeeper):
        families = 0

        def free(self) -> int:
            Forgetful.families += 1
            return super().free()

        def free_bytes(self) -> int:
            return (100 << 30) - (kept if Forgetful.families > 1 else 0)

    world.make_keeper = lambda timer: Forgetful(0, timer, machine=SimulatedGpu(timer))
    device = world.device()
    device.begin_family([BF16])
    device.measure(BF16, FEW, 5, False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        device.end_family()
    too_much = kept > 4 << 30
    assert [str(w.message)[:40] for w in seen] == ["GPU 0: 5.0 GiB are not free after a fami"] * too_much
    assert world.links["keeper"].generation == 1 + too_much
    assert world.links[OURS].alive is (kept == 0)
    assert world.links["fa3"].alive is not too_much
    device.begin_family([BF16])
    assert world.links[OURS].alive
    assert {o.status for o in device.measure(BF16, FEW, 5, False).values()} == {"ok"}


def test_the_owner_lets_go_of_a_family_before_it_makes_the_next() -> None:
    collected: list[bool] = []
    gpu = SimulatedGpu()
    owner = SimulatedKeeper(0, "cupti", machine=gpu)
    owner.allocate(1 << 16, 1 << 16, BF16.kv_dtype, seed=1)
    old = [weakref.ref(tensor) for tensor in (*owner._pools, owner._buffer)]
    gpu.collect = lambda: collected.append(all(ref() is None for ref in old))  # type: ignore[method-assign]
    owner.allocate(1 << 16, 1 << 16, BF16.kv_dtype, seed=1)
    assert collected == [True], "given back to the GPU, not only to the allocator, before anything is made"
    assert owner.free() == 0 and owner._pools == [] and owner._buffer is None and len(collected) == 2


def test_an_implementation_lets_go_of_everything() -> None:
    collected: list[bool] = []
    gpu = SimulatedGpu()
    owner = SimulatedKeeper(0, "cupti", machine=SimulatedGpu())
    owner.allocate(pool_bytes(BF16), BF16.kv_bytes(), BF16.kv_dtype, seed=1)
    made = Subject(OURS, 0, "cupti", machine=gpu, implementation=Kernel(OURS, gpu))
    made._pools = tuple(owner._pools)
    made.prepare(BF16, 1)
    assert made._running is not None
    outputs = [weakref.ref(tensor) for tensor in made._running.prepared.returned]
    gpu.collect = lambda: collected.append(all(ref() is None for ref in outputs))  # type: ignore[method-assign]
    assert made.release() == 0
    assert collected == [True] and made._pools is None and made._running is None


def test_pools_that_do_not_fit_are_rows_of_their_family_alone(world: World) -> None:
    class Greedy(SimulatedKeeper):
        def allocate(self, pool_bytes: int, *rest: Any, **more: Any) -> int:
            if len(world.log) < 12:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().allocate(pool_bytes, *rest, **more)

    world.make_keeper = lambda timer: Greedy(0, timer, machine=SimulatedGpu(timer))
    device = world.device()
    device.begin_family([BF16])
    outcomes = device.measure(BF16, FEW, 5, False)
    assert {outcome.status for outcome in outcomes.values()} == {"oom"}
    assert "0.0 are allocated" in (outcomes[OURS].reason or "")
    device.end_family()
    world.log += [("", "")] * 12
    device.begin_family([FP8])
    assert {outcome.status for outcome in device.measure(FP8, FEW, 5, False).values()} == {"ok"}


@pytest.mark.gpu(alone=True)
def test_gpu_memory_is_free_again_after_a_family() -> None:
    case = Case(16, 131_072, None, 32, 8, 128, 16)  # 8 GiB
    device = CudaDevice(deadline_s=120.0)
    try:
        device.implementations()
        before = device._keeper.call("free_bytes")
        device.build([case], implementations=(OURS,))
        device.begin_family([case])
        assert device._keeper.call("free_bytes") < before - case.kv_bytes()
        outcome = device.measure(case, (OURS,), 100, False)[OURS]
        assert outcome.status == "ok", outcome.reason
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a restart of all processes would be told
            device.end_family()
        assert device._keeper.generation == 1
        assert device._keeper.call("free_bytes") > before - case.kv_bytes() // 2
    finally:
        device.close()
