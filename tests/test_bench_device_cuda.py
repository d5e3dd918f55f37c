"""CudaDevice: families, failures and restarts over simulated processes; three small cases on a real GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_device_fakes import (
    BF16,
    FP8,
    Coarse,
    Kernel,
    LocalLink,
    Poisoned,
    PreparedKernel,
    SimulatedGpu,
    SimulatedKeeper,
)
from bench_device_world import FEW, OURS, World

from evenkv.bench.case import Case
from evenkv.bench.device import builds, cuda_device
from evenkv.bench.device.cuda_device import CudaDevice
from evenkv.bench.device.worker import WorkerFault
from evenkv.bench.protocol import DeviceLost, Outcome
from evenkv.bench.record import IMPLEMENTATIONS
from evenkv.errors import EvenkvError

torch.set_num_threads(1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_family_is_measured_and_freed(world: World, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKV_CACHE", str(tmp_path))
    device = world.device()
    assert device.facts().gpu == "Simulated" and device.facts().datasheet_gbps == 4900.0
    assert device.self_test() == [] and device.read_peak_gbps() > 0
    assert dict(device.implementations()) == dict.fromkeys(IMPLEMENTATIONS)
    small, large = BF16, replace(BF16, lengths=(100, 50, 7))
    device.begin_family([small, large])
    for case in (large, small):
        outcomes = device.measure(case, IMPLEMENTATIONS, 10, False)
        assert [o.status for o in outcomes.values()] == ["ok"] * 6, outcomes
        assert list(outcomes) == list(IMPLEMENTATIONS)
        assert outcomes[OURS].peer_version is None and outcomes["fa3"].peer_version == "1.0"
    device.end_family()
    assert world.log.count(("keeper", "allocate")) == 1, "caches are allocated once a family"
    assert world.log.count((OURS, "adopt")) == 1
    assert all((name, "release") in world.log for name in IMPLEMENTATIONS)
    assert world.links["keeper"].generation == 1
    device.close()
    assert not any(link.alive for link in world.links.values())


def test_compilers_work_before_timing_once_for_each_geometry(world: World) -> None:
    device = world.device()
    device.build([BF16, FP8, replace(BF16, lengths=(1, 2, 3))])
    first = list(world.built)
    assert (OURS, BF16.spec().short_name) in first and (OURS, FP8.spec().short_name) in first
    assert len(first) == len(set(first))
    device.begin_family([BF16])
    assert world.built == first


def test_only_what_will_be_measured_is_compiled(world: World) -> None:
    device = world.device()
    device.build([BF16], implementations=("fa3", "flashinfer-xqa"))
    device.begin_family([BF16])
    assert {name for name, _ in world.built} <= {"fa3", "flashinfer-xqa"}


def test_ours_alone_are_held_against_the_baseline_all_the_same(world: World) -> None:
    world.kernels[OURS] = lambda gpu: Coarse(OURS, gpu)
    device = world.device()
    case = replace(FP8, lengths=(4, 4, 4))
    device.build([case], implementations=(OURS,))
    device.begin_family([case])
    assert {"flashinfer-tc", OURS} == {name for name, _ in world.built}, "its compiler must not be waited for"
    outcomes = device.measure(case, (OURS,), 5, False)
    assert list(outcomes) == [OURS] and outcomes[OURS].status == "wrong"
    assert "twice the baseline's" in (outcomes[OURS].reason or "")
    assert ("flashinfer-tc", "time_graph") not in world.log and ("flashinfer-tc", "finish") in world.log
    world.kernels["flashinfer-tc"] = lambda gpu: RunsOut("flashinfer-tc", gpu)
    device = world.device()
    device.begin_family([case])
    assert device.measure(case, (OURS,), 5, False)[OURS].status == "ok", "then the table's limit is left"


def test_nothing_is_compiled_for_cases_that_are_refused() -> None:
    scout, usual = Case(1, 8, None, 5, 1, 128, 1), Case(1, 8, None, 32, 8, 128, 16)
    names = ("evenkv-cuda", "evenkv-triton", "flashinfer-cc", "flashinfer-xqa")
    jobs = builds.build_jobs([scout, usual], names, {})
    assert {case.name for (name, _), case in jobs.items() if name.startswith("flashinfer")} == {usual.name}
    assert sum(name.startswith("evenkv") for name, _ in jobs) == 4, "each geometry, Triton's too"
    assert [name for name, _ in jobs][:2] == ["flashinfer-cc", "flashinfer-xqa"], "the longest come first"


def test_a_failed_build_costs_its_own_implementation_alone(world: World) -> None:
    world.build_failures = {"flashinfer-xqa": "its build failed: no such head_dim"}
    device = world.device()
    device.begin_family([BF16])
    outcomes = device.measure(BF16, IMPLEMENTATIONS, 5, False)
    xqa = outcomes.pop("flashinfer-xqa")
    assert (xqa.status, xqa.reason) == ("refused", "its build failed: no such head_dim")
    assert {o.status for o in outcomes.values()} == {"ok"}


def test_cases_beyond_the_memory_are_oom(world: World) -> None:
    class SmallKeeper(SimulatedKeeper):
        def allocate(self, pool_bytes: int, **arguments: Any) -> int:
            return super().allocate(pool_bytes=min(pool_bytes, 1 << 17), **arguments)

    world.make_keeper = lambda timer: SmallKeeper(0, timer, machine=SimulatedGpu(timer))
    device = world.device()
    large = replace(BF16, lengths=(1000, 1000, 1000))
    device.begin_family([BF16, large])
    assert device.measure(BF16, FEW, 5, False)[OURS].status == "ok"
    outcomes = device.measure(large, FEW, 5, False)
    assert {o.status for o in outcomes.values()} == {"oom"} and "GiB" in (outcomes[OURS].reason or "")


class RunsOut(Kernel):
    def prepare(self, *arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Crashes(Kernel):
    """Poisons its context on one case."""

    def attend(self, prepared: PreparedKernel) -> None:
        if prepared.case.request_lengths()[0] == 5:
            raise Poisoned("an illegal memory access was encountered")
        super().attend(prepared)


def test_a_poisoned_process_is_restarted_with_the_pools_and_only_it_is_marked(world: World) -> None:
    world.kernels["fa3"] = lambda gpu: Crashes("fa3", gpu)
    device = world.device()
    other = replace(BF16, lengths=(6, 6, 6))
    device.begin_family([BF16, other])
    hurt = device.measure(BF16, IMPLEMENTATIONS, 5, False)
    fault = hurt.pop("fa3")
    assert fault.status == "refused" and "illegal memory access" in (fault.reason or "")
    assert {o.status for o in hurt.values()} == {"ok"}
    assert device.measure(other, ("fa3",), 5, False)["fa3"].status == "ok"
    assert world.links["fa3"].generation == 2 and world.log.count(("fa3", "adopt")) == 2


def test_who_has_to_be_ended_again_and_again_gets_no_more_cases(world: World) -> None:
    world.kernels["fa3"] = lambda gpu: Crashes("fa3", gpu)
    device = world.device()
    device.begin_family([BF16])
    reasons = [device.measure(BF16, ("fa3",), 5, False)["fa3"].reason or "" for _ in range(5)]
    assert all("illegal" in reason for reason in reasons[: cuda_device.STRIKES])
    assert all("left out" in reason for reason in reasons[cuda_device.STRIKES :])


def test_out_of_memory_of_one_implementation_is_its_own(world: World) -> None:
    world.kernels["fa3"] = lambda gpu: RunsOut("fa3", gpu)
    device = world.device()
    device.begin_family([BF16])
    outcomes = device.measure(BF16, ("fa3", OURS), 5, False)
    assert outcomes["fa3"].status == "oom" and outcomes[OURS].status == "ok"


def test_a_failed_owner_is_restarted_once_and_then_the_device_is_lost(world: World) -> None:
    failures = {"left": 1}

    class Failing(SimulatedKeeper):
        def reference(self, *arguments: Any, **named: Any) -> Any:
            if failures["left"]:
                failures["left"] -= 1
                raise Poisoned("fell off the bus")
            return super().reference(*arguments, **named)

    world.make_keeper = lambda timer: Failing(0, timer, machine=SimulatedGpu(timer))
    device = world.device()
    device.begin_family([BF16])
    assert device.measure(BF16, FEW, 5, False)[OURS].status == "ok"
    assert world.links["keeper"].generation == 2
    failures["left"] = 2
    with pytest.raises(DeviceLost, match="fell off the bus"):
        device.measure(BF16, FEW, 5, False)


@pytest.mark.parametrize("where", ["prepare", "check", "time_graph", "time_host"])
def test_who_interrupts_waits_for_no_process(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = world.device()
    device.begin_family([BF16])
    original = world.links["fa3"].call

    def call(command: str, **arguments: Any) -> Any:
        if command == where:
            raise KeyboardInterrupt
        return original(command, **arguments)

    monkeypatch.setattr(world.links["fa3"], "call", call)
    with pytest.raises(KeyboardInterrupt):
        device.measure(BF16, (*FEW, "fa3"), 5, False)
    assert not any(world.links[name].alive for name in (*FEW, "fa3")) and world.links["keeper"].alive
    device.end_family()


def test_memory_that_does_not_come_back_ends_with_its_process(world: World) -> None:
    class Leaky(SimulatedKeeper):
        def free(self) -> int:
            return 1 << 30

    world.make_keeper = lambda timer: Leaky(0, timer, machine=SimulatedGpu(timer))
    device = world.device()
    device.begin_family([BF16])
    device.end_family()
    assert world.links["keeper"].generation == 2


def test_a_reference_that_does_not_fit_is_oom_and_no_lost_device(world: World) -> None:
    class Full(SimulatedKeeper):
        def reference(self, *arguments: Any, **named: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    world.make_keeper = lambda timer: Full(0, timer, machine=SimulatedGpu(timer))
    device = world.device()
    device.begin_family([BF16])
    outcome = device.measure(BF16, FEW, 5, False)[OURS]
    assert outcome.status == "oom" and "the reference" in (outcome.reason or "")
    assert world.links["keeper"].generation == 1


def test_a_process_that_holds_on_to_memory_is_ended_with_its_family(world: World) -> None:
    device = world.device()
    device.begin_family([BF16])
    device.measure(BF16, FEW, 5, False)
    world.links[OURS].handler._machine.held_bytes = lambda: 5 << 30
    device.end_family()
    assert not world.links[OURS].alive and world.links["flashinfer-tc"].alive


def test_a_missing_implementation_says_so(world: World) -> None:
    class Missing(Kernel):
        def missing(self) -> str | None:
            return "not installed"

    world.kernels["fa3"] = lambda gpu: Missing("fa3", gpu)
    device = world.device()
    assert device.implementations()["fa3"] == "not installed"
    device.begin_family([BF16])
    assert device.measure(BF16, ("fa3",), 5, False)["fa3"] == Outcome("refused", "missing: not installed")
    assert ("fa3", "build") not in world.log and not any(key[0] == "fa3" for key in world.built)


def test_wrong_use_is_refused(world: World) -> None:
    with pytest.raises(EvenkvError, match="timer is 'wall'"):
        CudaDevice(0, "wall")
    with pytest.raises(EvenkvError, match="one kv_dtype"):
        world.device().begin_family([BF16, FP8])


def test_builds_run_side_by_side_and_fail_alone() -> None:
    class Compiler:
        def classify(self, error: Exception) -> tuple[str, bool]:
            return "refused", False

        def build(self, name: str, case: Case) -> None:
            if name == "fa3":
                raise ValueError("nvcc is not amused")

    jobs = {(name, "x"): BF16 for name in ("evenkv-cuda", "fa3", "flashinfer-xqa")}
    told: list[float] = []
    results = builds.build_all(jobs, 0, lambda _, share: told.append(share), lambda _: LocalLink(Compiler))
    failure = results.pop(("fa3", "x"))
    assert "nvcc is not amused" in (failure or "")
    assert results == {("evenkv-cuda", "x"): None, ("flashinfer-xqa", "x"): None}
    assert len(told) == 3 and max(told) == 1.0
    assert builds.build_all({}, 0) == {}


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize(
    "case",
    [
        Case(8, 1024, None, 32, 8, 128, 16),
        Case(4, None, (1, 300, 5000, 64), 32, 8, 128, 64, "HND", "float8_e4m3fn"),
        Case(2, 91, None, 5, 1, 128, 1),
    ],
    ids=lambda case: case.name,
)
def test_gpu_measures_small_cases(case: Case) -> None:
    device = CudaDevice(deadline_s=120.0)
    try:
        present = [name for name, missing in device.implementations().items() if missing is None]
        assert OURS in present
        copy = device.copy_peak_gbps()
        device.begin_family([case])
        outcomes = device.measure(case, present, 100, False)
        assert outcomes[OURS].status == "ok", outcomes[OURS].reason
        for name, outcome in outcomes.items():
            assert outcome.status in ("ok", "refused"), (name, outcome)
            if outcome.status == "ok":
                assert outcome.graph_us and outcome.graph_us >= case.kv_bytes() / (1.3 * copy) / 1e3
                assert outcome.iterations == 100 and outcome.host_us and outcome.eager_us
        device.end_family()
    finally:
        device.close()


@pytest.mark.gpu(alone=True)
def test_gpu_self_test_finds_this_machine_fit() -> None:
    device = CudaDevice()
    try:
        assert device.self_test() == []
        with pytest.raises(WorkerFault):
            device._keeper.call("no such command")
    finally:
        device.close()
