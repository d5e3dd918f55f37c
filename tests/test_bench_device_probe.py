"""The probe of a new machine, over simulated processes: it tells what is broken and goes on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_device_fakes import (
    Kernel,
    LocalLink,
    PreparedKernel,
    SimulatedGpu,
    SimulatedKeeper,
    share_in_process,
)
from bench_device_world import FakeClocks

from evenkv.bench.device import builds, probe, probe_parts
from evenkv.bench.device.subject import Subject
from evenkv.bench.record import IMPLEMENTATIONS

torch.set_num_threads(1)
BF16 = ("bfloat16",)
# They need CUDA itself: the fakes have no streams that torch knows, no graphs, no kernels of torch's.
CUDA_ALONE = {"records", "graph records", "toggling", "streams"}


class Wrong(Kernel):
    def attend(self, prepared: PreparedKernel) -> None:
        super().attend(prepared)
        prepared.returned[0].mul_(1.5)


class Hanging(Kernel):
    def attend(self, prepared: PreparedKernel) -> None:
        raise RuntimeError("no kernel image")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    share_in_process(monkeypatch)
    monkeypatch.setattr(probe_parts, "_SHARED_BYTES", 1 << 16)
    shared: dict[bytes, torch.Tensor] = {}

    def share(tensor: torch.Tensor) -> bytes:
        shared[key := str(len(shared)).encode()] = tensor
        return key

    monkeypatch.setattr(probe_parts, "share", share)
    monkeypatch.setattr(probe_parts, "adopt", lambda key, dtype: shared[key])

    def of(kernels: dict[str, type[Kernel]]) -> Any:
        def make_worker(name: str, factory: str, arguments: dict[str, Any]) -> LocalLink:
            def handler() -> Any:
                gpu = SimulatedGpu()
                if factory.endswith(":Parts"):
                    return probe_parts.Parts(0, gpu, clocks=FakeClocks())
                if factory.endswith(":Keeper"):
                    return SimulatedKeeper(0, "cupti", machine=gpu)
                kernel = kernels.get(name, Kernel)(name, gpu)
                return Subject(name, 0, "cupti", machine=gpu, implementation=kernel)

            return LocalLink(handler)

        return make_worker

    return of


def test_every_step_of_a_fit_machine_is_told(make: Callable[..., Any]) -> None:
    lines: list[str] = []
    failed = probe.probe(IMPLEMENTATIONS, BF16, with_builds=False, make_worker=make({}), say=lines.append)
    assert set(failed) <= CUDA_ALONE | {"capture"}, lines
    for name in IMPLEMENTATIONS:
        assert any(f"ok     {name} bfloat16: graph" in line and "max abs error" in line for line in lines)
    assert any("GiB of float8_e4m3fn through IPC" in line and line.startswith("ok") for line in lines)
    assert lines[-1].startswith(f"{len(failed)} steps failed")


def test_what_is_broken_is_told_and_the_rest_goes_on(make: Callable[..., Any]) -> None:
    lines: list[str] = []
    broken = make({"evenkv-cuda": Wrong, "flashinfer-tc": Hanging})
    names = ("evenkv-cuda", "flashinfer-tc", "fa3")
    failed = probe.probe(names, BF16, with_builds=False, make_worker=broken, say=lines.append)
    assert "evenkv-cuda bfloat16: eager output" in failed and "evenkv-cuda bfloat16: graph" in failed
    assert "flashinfer-tc bfloat16: prepares, captures" in failed
    assert any("no kernel image" in line for line in lines)
    assert not any(step.startswith("fa3") for step in failed)


def test_shared_memory_that_is_a_copy_is_told(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = probe_parts.adopt
    monkeypatch.setattr(probe_parts, "adopt", lambda key, dtype: taken(key, dtype).clone())
    lines: list[str] = []
    failed = probe.probe((), (), make_worker=make({}), say=lines.append)
    assert "1 GiB of bfloat16 through IPC" in failed
    assert any("is not seen here" in line for line in lines)


def test_failed_builds_are_told(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        builds,
        "build_all",
        lambda jobs, *_: {key: f"no {key[0]}" for key in jobs if key[0] == "flashinfer-xqa"},
    )
    lines: list[str] = []
    failed = probe.probe(IMPLEMENTATIONS, BF16, make_worker=make({}), say=lines.append)
    assert "bfloat16: builds, side by side" in failed
    assert any("flashinfer-xqa: no flashinfer-xqa" in line for line in lines)


@pytest.mark.parametrize("lost", [0, 1])
def test_kernels_of_a_graph_without_records_are_told(lost: int) -> None:
    gpu = SimulatedGpu()

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        return lambda: [gpu.launch("multiply", 1.0) for _ in range(3 - lost)] and None

    gpu.capture = capture  # type: ignore[method-assign]
    parts = probe_parts.Parts(0, gpu, make_timer=lambda: gpu.timer)
    if lost:
        with pytest.raises(ValueError, match="10 records of 5 replays of 3 kernels"):
            parts.graph_records()
    else:
        assert parts.graph_records().startswith("3 a replay")


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    assert probe.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu(alone=True)
def test_gpu_every_building_block_works() -> None:
    lines: list[str] = []
    failed = probe.probe(("evenkv-cuda", "evenkv-triton"), BF16, say=lines.append)
    assert not failed, "\n".join(lines)
