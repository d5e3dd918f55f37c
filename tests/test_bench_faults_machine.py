"""B8 to B14 of other harnesses' faults: timer, flush, clocks, files, hung processes, packing, builds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_device_fakes import (
    BF16,
    Kernel,
    LocalLink,
    PreparedKernel,
    SimulatedGpu,
    SimulatedKeeper,
    run_case,
    share_in_process,
    steady,
)
from flashinfer_bench.data import Solution

from evenkv.bench import grid
from evenkv.bench.device import cuda_device, timing, trial
from evenkv.bench.device.clocks import ClockState
from evenkv.bench.device.implementations import evenkv as implementation
from evenkv.bench.device.selftest import CopyMemory, Probes, faults_of, self_test
from evenkv.bench.device.worker import Worker
from evenkv.bench.effort import ROUNDS
from evenkv.bench.judge import UNSTABLE, Judge, Provenance
from evenkv.bench.protocol import DeviceFacts
from evenkv.bench.record import load_rows
from evenkv.errors import EvenkvError
from evenkv.library import build
from evenkv.library.build import build_inputs, cache_key
from evenkv.pack.manifest import load_kernels
from evenkv.pack.render import pack_solution
from evenkv.paths import find_repository
from evenkv.spec.family import FAMILY
from evenkv.workloads import store

torch.set_num_threads(1)

HONEST = Probes(
    empty_us=2.6,
    cold_us=10.0,
    warm_us=5.5,
    copy_gbps=4260.0,
    last_copy_gbps=4250.0,
    copy_us=504.0,
    copy_events_us=508.0,
    copy_wall_us=525.0,
    hidden=None,
)


# -- B8: CUPTI fails and events take over in silence


def broken_cupti() -> Any:
    kinds = SimpleNamespace(CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2)

    def register(*_: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    return SimpleNamespace(ActivityKind=kinds, activity_register_callbacks=register)


def test_b8_cupti_that_does_not_work_is_an_error_with_a_remedy() -> None:
    with pytest.raises(EvenkvError, match="MULTIPLE_SUBSCRIBERS.*another timer"):
        timing.CuptiTimer(broken_cupti())


def devices(asked: str, cupti_works: bool, monkeypatch: pytest.MonkeyPatch) -> cuda_device.CudaDevice:
    share_in_process(monkeypatch)

    def make_worker(name: str, factory: str, arguments: Any) -> LocalLink:
        def make() -> Any:
            if arguments["timer"] == "cupti" and not cupti_works:
                timing.CuptiTimer(broken_cupti())
            return SimulatedKeeper(0, arguments["timer"], machine=SimulatedGpu(arguments["timer"]))

        return LocalLink(make)

    clocks = SimpleNamespace(state=steady, memory_peak_gbps=lambda: None, reason=None)
    return cuda_device.CudaDevice(0, asked, make_worker=make_worker, clocks=clocks)


def test_b8_who_asked_for_cupti_gets_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvenkvError, match="cannot be used.*MULTIPLE_SUBSCRIBERS"):
        devices("cupti", False, monkeypatch).facts()


def test_b8_auto_falls_back_once_aloud_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices("auto", False, monkeypatch)
    with pytest.warns(UserWarning, match="events are the timer of all rows"):
        device.facts()
    assert device._timer == "events" and "MULTIPLE_SUBSCRIBERS" in (device.timer_note or "")
    works = devices("auto", True, monkeypatch)
    works.facts()
    assert works._timer == "cupti" and works.timer_note is None


@pytest.mark.parametrize("timer", ["cupti", "events"])
def test_b8_every_outcome_names_its_timer(timer: str) -> None:
    outcome = run_case({"fa3": lambda gpu: Kernel("fa3", gpu)}, timer=timer)["fa3"]
    assert outcome.timer == timer and outcome.status == "ok"


def test_b8_lost_records_are_asked_for_again_and_never_replaced() -> None:
    kernels: dict[str, Callable[[SimulatedGpu], Any]] = {"fa3": lambda gpu: Kernel("fa3", gpu)}
    once = run_case(kernels, lose_records=1)["fa3"]
    assert (once.status, once.timer) == ("ok", "cupti")
    always = run_case(kernels, lose_records=1000)["fa3"]
    assert always.status == "refused" and "LostRecords" in (always.reason or "") and always.graph_us is None


# -- B9: "cold" runs that were warm


def test_b9_an_honest_machine_has_no_faults() -> None:
    assert faults_of(HONEST, "cupti", 4800.0) == []
    assert faults_of(HONEST, "cupti", None) == []
    assert faults_of(replace(HONEST, last_copy_gbps=None), "events", 4800.0) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cold_us": 5.5}, "not cold"),  # 6.1 TB/s: came out of L2
        ({"empty_us": 18.0}, "empty kernel"),  # a flush that writes: the write-back slows what follows
        ({"empty_us": 0.0}, "empty kernel"),
        ({"copy_gbps": 3100.0}, "in the last run here at 4250"),
        ({"copy_gbps": 9000.0, "last_copy_gbps": None}, "over the memory's 4800"),
        ({"copy_us": 250.0}, "by events"),  # a timer that sees half of the work
        ({"copy_wall_us": 300.0}, "by the clock"),  # a timer that sees more than there was
        ({"hidden": "400 us of work on another stream went unseen"}, "went unseen"),
    ],
)
def test_b9_a_broken_flush_or_timer_fails_the_self_test(change: dict[str, Any], words: str) -> None:
    faults = faults_of(replace(HONEST, **change), "cupti", 4800.0)
    assert any(words in fault for fault in faults), faults


def test_b9_without_a_known_peak_cold_must_be_slower_than_warm() -> None:
    assert "not cold" in faults_of(replace(HONEST, cold_us=5.6), "cupti", None)[0]


def test_b9_a_failed_self_test_is_not_remembered_as_the_copy_speed(tmp_path: Path) -> None:
    memory = CopyMemory(tmp_path / "bench" / "copy-peak.json", "GPU-0 cupti")
    answers = {
        "probe_walls": (500.0, 503.0, 512.0),
        "probe_empty": [2.5],
        "probe_read": [10.0],
        "probe_hidden": None,
    }

    def call(command: str, **_: Any) -> Any:
        return answers[command]

    assert self_test(call, 4250.0, "cupti", 4800.0, memory) == []
    assert memory.last() == 4250.0
    faults = self_test(call, 3000.0, "cupti", 4800.0, memory)
    assert len(faults) == 1 and str(memory.path) in faults[0]
    assert memory.last() == 4250.0
    assert CopyMemory(memory.path, "GPU-1 cupti").last() is None
    memory.path.write_text("{broken")
    assert memory.last() is None


def test_b9_a_disturbed_gpu_is_probed_again_and_a_broken_timer_stays_broken(tmp_path: Path) -> None:
    memory = CopyMemory(tmp_path / "copy-peak.json", "GPU-0 cupti")
    answers = {"probe_empty": [2.5], "probe_read": [10.0], "probe_hidden": None}
    walls = [(555.0, 556.0, 520.0), (500.0, 503.0, 512.0)]
    taken = []

    def call(command: str, **_: Any) -> Any:
        if command != "probe_walls":
            return answers[command]
        taken.append(command)
        return walls[min(len(taken), len(walls)) - 1]

    assert self_test(call, 4250.0, "cupti", 4800.0, memory) == []
    assert len(taken) == 2
    walls[1] = walls[0]
    (fault,) = self_test(call, 4250.0, "cupti", 4800.0, memory)
    assert "555.0 us by cupti, but 520.0 us by the clock (556.0 us by events" in fault


def test_b9_every_cold_call_is_flushed_before_and_the_flush_is_not_counted() -> None:
    gpus: list[SimulatedGpu] = []

    def make(gpu: SimulatedGpu) -> Kernel:
        gpus.append(gpu)
        return Kernel("fa3", gpu)

    outcome = run_case({"fa3": make}, iterations=50)["fa3"]
    assert outcome.graph_us == 10.0
    assert gpus[0].flushes >= 50 + 20, "graph and eager calls"


# -- B10: throttling inside one run


def test_b10_implementations_take_turns_in_rounds() -> None:
    log: list[tuple[str, str]] = []
    names = ("flashinfer-tc", "fa3", "evenkv-cuda")
    run_case({name: lambda gpu, name=name: Kernel(name, gpu) for name in names}, log=log)
    timed = [name for name, command in log if command in ("time_graph", "matched_copy")]
    assert len(timed) == 4 * ROUNDS > 4
    rounds = [timed[4 * r : 4 * r + 4] for r in range(ROUNDS)]
    assert all(set(r) == {*names, "keeper"} for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order changes"


def test_b10_a_throttled_case_is_unstable_rather_than_a_number() -> None:
    states: Iterator[ClockState] = iter(
        [steady(), steady(), ClockState(1980, 91, ("hardware thermal slowdown",))] + [steady()] * 20
    )
    outcome = run_case({"fa3": lambda gpu: Kernel("fa3", gpu)}, clocks=lambda: next(states))["fa3"]
    assert outcome.reason == "throttled by hardware thermal slowdown"
    assert outcome.sm_clock_mhz_before == outcome.sm_clock_mhz_after == 1980.0
    facts = DeviceFacts("Simulated", None, None, None)
    row = Judge(facts, 4000.0, Provenance({"evenkv-cuda": "0"}, None)).row(
        BF16, "fa3", replace(outcome, iterations=100)
    )
    assert row.unstable and (row.reason or "").startswith(UNSTABLE)


def test_b10_times_that_drift_show_in_the_spread() -> None:
    class Slowing(Kernel):
        count = 0

        def us_of(self, setting: str) -> float:
            self.count += 1
            return 100.0 + self.count

    outcome = run_case({"fa3": lambda gpu: Slowing("fa3", gpu)}, iterations=100)["fa3"]
    assert outcome.spread is not None and outcome.spread[1] - outcome.spread[0] > 50.0


# -- B11: an LFS pointer where a file should be

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"


def test_b11_pointers_are_named_with_the_command_that_fetches(tmp_path: Path) -> None:
    rows = tmp_path / "nvidia-h200.jsonl"
    rows.write_text(_POINTER)
    with pytest.raises(EvenkvError, match=r"nvidia-h200\.jsonl is a Git LFS pointer.*git lfs pull"):
        load_rows(rows)
    blob = tmp_path / "step.safetensors"
    blob.write_text(_POINTER)
    with pytest.raises(EvenkvError, match=r"step\.safetensors.*Git LFS pointer.*lfs pull"):
        store.refuse_lfs_pointers(tmp_path, [blob])
    with pytest.raises(EvenkvError):
        grid.load_cases(rows)


# -- B12: one fault poisons the context, a kernel never ends


def test_b12_a_hung_and_a_crashed_implementation_cost_only_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real processes for the two that misbehave, the simulation for the rest."""
    workers = {
        name: Worker(name, "bench_device_handlers:Handler", deadline_s=0.5) for name in ("hangs", "crashes")
    }
    for worker in workers.values():
        worker.start()

    class Misbehaving:
        def __init__(self, worker: Worker, command: str) -> None:
            self.worker, self.command = worker, command

        def call(self, command: str, **arguments: Any) -> Any:
            return self.worker.call(self.command)

    original = trial.measure_case

    def measure(case: Any, seed: int, names: Any, iterations: int, warm: bool, setup: Any) -> Any:
        links = {
            **setup.links,
            "fa3": Misbehaving(workers["hangs"], "hang"),
            "flashinfer-cc": Misbehaving(workers["crashes"], "crash"),
        }
        names = [*names, "fa3", "flashinfer-cc"]
        return original(case, seed, names, iterations, warm, replace(setup, links=links))

    monkeypatch.setattr("bench_device_fakes.measure_case", measure)
    begin = time.monotonic()
    outcomes = run_case({"evenkv-cuda": lambda gpu: Kernel("evenkv-cuda", gpu)})
    assert time.monotonic() - begin < 20
    assert outcomes["evenkv-cuda"].status == "ok"
    assert "killed: hang did not end" in (outcomes["fa3"].reason or "")
    assert "SIGSEGV" in (outcomes["flashinfer-cc"].reason or "")
    assert not any(worker.alive for worker in workers.values())


def test_b12_a_fault_in_the_middle_of_a_race_leaves_the_others_racing() -> None:
    class DiesLate(Kernel):
        def attend(self, prepared: PreparedKernel) -> None:
            if prepared.calls > 12:
                raise RuntimeError("an illegal instruction was encountered")
            super().attend(prepared)

    outcomes = run_case(
        {"fa3": lambda gpu: DiesLate("fa3", gpu), "evenkv-cuda": lambda gpu: Kernel("evenkv-cuda", gpu)}
    )
    assert outcomes["fa3"].status == "refused" and "illegal instruction" in (outcomes["fa3"].reason or "")
    assert outcomes["evenkv-cuda"].status == "ok" and outcomes["evenkv-cuda"].iterations == 20


# -- B13: packing lost the destination-passing flag or subfolders


def test_b13_every_packed_solution_keeps_its_style_and_all_its_files() -> None:
    repository = find_repository(Path(__file__))
    kernels = {kernel.name: kernel for kernel in load_kernels(repository)}
    specs = {spec.name: spec for spec in FAMILY}
    seen = set()
    for root in (repository.solutions, repository.optional / "solutions"):
        for path in sorted(root.rglob("*.json")):
            solution = Solution.model_validate_json(path.read_text(encoding="utf-8"))
            short = specs[solution.definition].short_name
            kernel = kernels[solution.name.removesuffix(f"_{short}")]
            assert solution.spec.destination_passing_style == kernel.manifest.destination_passing_style
            assert {source.path for source in solution.sources} == set(kernel.packed_paths)
            again = Solution.model_validate_json(solution.model_dump_json())
            assert again == solution
            seen.add(kernel.name)
    assert {"evenkv_cuda", "evenkv_triton", "flashinfer_tc", "fa3"} <= seen


# -- B14: a build cache that ignores compiler, flags, arch and passing style


def test_b14_what_decides_a_build_decides_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0")
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("evenkv.library.toolchain.find_nvcc", lambda: compiler)
    repository = find_repository(Path(__file__))
    kernel = next(kernel for kernel in load_kernels(repository) if kernel.name == "evenkv_cuda")
    solution = pack_solution(kernel, BF16.spec())
    keys = {"as it is": cache_key(build_inputs(solution))}
    assert cache_key(build_inputs(solution)) == keys["as it is"]

    other_style = json.loads(solution.model_dump_json())
    other_style["spec"]["destination_passing_style"] = not solution.spec.destination_passing_style
    keys["style"] = cache_key(build_inputs(Solution.model_validate(other_style)))
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "10.0")
    keys["arch"] = cache_key(build_inputs(solution))
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr("evenkv.library.toolchain.NVCC_FLAGS", ("-O3",))
    keys["flags"] = cache_key(build_inputs(solution))
    compiler.write_text("#!/bin/sh\necho release 13.2, V13.2.1\n")
    keys["compiler"] = cache_key(build_inputs(solution))
    assert len(set(keys.values())) == len(keys), keys


def test_b14_the_harness_builds_through_that_cache() -> None:
    assert implementation.build_kernel is build.build_kernel
