"""Shared pytest setup: tests marked `gpu` skip by themselves where there is no CUDA GPU, and may share one.

Under pytest-xdist several processes use the same GPU and the same cores.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from host_kernel import HostKernel

_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    # Before torch is imported: each process and each compiler would otherwise take every core.
    for variable in ("OMP_NUM_THREADS", "MAX_JOBS"):
        os.environ.setdefault(variable, str(max(1, (os.cpu_count() or 1) // _PROCESSES)))

# Memory that torch may keep for later allocations of this process, while others need it.
_KEPT_BYTES = 1 << 30


def _runs_alone(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("gpu")
    return marker is not None and bool(marker.kwargs.get("alone"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, so that other processes have little left to do that has to wait for them.
    items.sort(key=_runs_alone)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder that all processes of this run have in common; None where there is one process."""
    return tmp_path_factory.getbasetemp().parent if _PROCESSES > 1 else None


@pytest.fixture(autouse=True)
def gpu_turn(request: pytest.FixtureRequest, shared_folder: Path | None) -> Iterator[None]:
    """Under pytest-xdist: no other GPU test runs beside one that is marked `gpu(alone=True)`."""
    if shared_folder is None or request.node.get_closest_marker("gpu") is None:
        yield
        return
    with (shared_folder / "gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if _runs_alone(request.node) else fcntl.LOCK_SH)
        try:
            yield
        finally:
            torch = sys.modules["torch"]  # imported when the marked tests were collected
            if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
                torch.cuda.empty_cache()
            fcntl.flock(file, fcntl.LOCK_UN)


def _build_host_kernel(name: str, request: pytest.FixtureRequest) -> HostKernel:
    """evenkv_cuda for the host, of the specialisation that the test module names."""
    from host_kernel import build_host_kernel  # and torch with it, which other tests do not need

    folder = request.getfixturevalue("tmp_path_factory").mktemp(name.lower())
    return build_host_kernel(getattr(request.module, name), folder)


@pytest.fixture(scope="module")
def bf16(request: pytest.FixtureRequest) -> HostKernel:
    return _build_host_kernel("BF16", request)


@pytest.fixture(scope="module")
def fp8(request: pytest.FixtureRequest) -> HostKernel:
    return _build_host_kernel("FP8", request)
