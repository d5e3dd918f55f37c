"""Builds solutions through flashinfer-bench's own builders, in parallel, into a cache that is never stale.

Upstream's cache knows a solution by its sources alone. Here the whole cache folder is keyed by everything
else that decides a build: compilers, flags, architecture, torch and tvm-ffi.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from flashinfer_bench.compile import BuilderRegistry, BuildError
from flashinfer_bench.compile.builders import TVMFFIBuilder
from flashinfer_bench.compile.utils import create_package_name
from flashinfer_bench.data import Definition, Solution

from evenkv.files import write_atomic
from evenkv.library import toolchain

_FLAG_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

Progress = Callable[[str], None]


def use_keyed_cache(for_gpu: bool) -> Path:
    """Point FIB_CACHE_PATH, for this process and its children, at a folder for exactly this toolchain.

    A FIB_CACHE_PATH that the user has set stays.

    Raises
    ------
    EvenkvError
        When a compiler, ninja or, with `for_gpu`, the GPU is missing.
    """
    # tvm-ffi runs `ninja` by name: it must be found also when the environment is not activated.
    toolchain.require_ninja()
    if os.environ.get("FIB_CACHE_PATH"):
        return Path(os.environ["FIB_CACHE_PATH"])
    parts = {
        "torch": importlib.metadata.version("torch"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "machine": toolchain.host_machine(),
        "cxx": toolchain.compiler_version(toolchain.find_cxx()),
        "variables": {name: os.environ.get(name) for name in _FLAG_VARIABLES},
    }
    if for_gpu:
        parts["nvcc"] = toolchain.compiler_version(toolchain.find_nvcc())
        parts["arch"] = toolchain.cuda_arch()
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    folder = toolchain.cache_folder() / "flashinfer-bench" / key
    os.environ["FIB_CACHE_PATH"] = str(folder)
    return folder


def is_compiled(solution: Solution) -> bool:
    """Whether building it means a compiler run: CUDA or C++ with tvm-ffi's binding."""
    return TVMFFIBuilder().can_build(solution)


def is_built(solution: Solution) -> bool:
    """Whether `build_all` has built and loaded it with this toolchain before."""
    try:
        return _mark(solution).read_text() == str(_library(solution).stat().st_size)
    except OSError:
        return False


def build_all(
    pairs: Sequence[tuple[Definition, Solution]],
    progress: Progress = lambda _: None,
    deadline: float | None = None,
    processes: int | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Build compiled solutions in separate processes, in the given order.

    Parameters
    ----------
    pairs : sequence of (Definition, Solution)
        Those that are built already take no time.
    progress : callable
        Called with each solution's name when it is done.
    deadline : float, optional
        `time.monotonic()` by which builds should have ended: none starts that would end later, judged by
        the longest so far.

    Returns
    -------
    failures : dict
        Solution name to the error's text.
    unbuilt : list of str
        Solutions that the deadline left out.
    """
    waiting = [(d, s) for d, s in pairs if not is_built(s)]
    for _, solution in pairs:
        if is_built(solution):
            progress(solution.name)
    failures: dict[str, str] = {}
    if not waiting:
        return failures, []
    count = max(1, min(processes or os.cpu_count() or 1, len(waiting)))
    running: dict[Future[tuple[str | None, float]], str] = {}
    longest = 0.0
    with ProcessPoolExecutor(count, get_context("spawn"), _leave_interrupts_to_the_parent) as pool:
        while waiting or running:
            while waiting and len(running) < count:
                if deadline is not None and time.monotonic() + longest > deadline:
                    break
                definition, solution = waiting.pop(0)
                future = pool.submit(_build_one, definition.model_dump_json(), solution.model_dump_json())
                running[future] = solution.name
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                error, seconds = future.result()
                longest = max(longest, seconds)
                if error is not None:
                    failures[name] = error
                progress(name)
    return failures, [solution.name for _, solution in waiting]


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches every process of a terminal: builds that run end whole, the parent starts no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _build_one(definition_json: str, solution_json: str) -> tuple[str | None, float]:
    """In a process of its own: the error, if any, and the seconds without the process's own start."""
    definition = Definition.model_validate_json(definition_json)
    solution = Solution.model_validate_json(solution_json)
    start = time.monotonic()
    return _build_and_load(definition, solution), time.monotonic() - start


def _build_and_load(definition: Definition, solution: Solution) -> str | None:
    for last in (False, True):
        try:
            # A registry of its own: the shared one would answer a second try with the first one's error.
            BuilderRegistry([TVMFFIBuilder()]).build(definition, solution)
            write_atomic(_mark(solution), str(_library(solution).stat().st_size).encode())
            return None
        except BuildError as error:
            if last or not _library(solution).is_file():
                return str(error)
        # A library that does not load, say from a run that was killed while linking: build it anew.
        shutil.rmtree(_library(solution).parent, ignore_errors=True)
    return None


def _library(solution: Solution) -> Path:
    """Where upstream's builder puts the shared library."""
    name = create_package_name(solution, "tvm_ffi_")
    return Path(os.environ["FIB_CACHE_PATH"]) / "tvm_ffi" / name / f"{name}.so"


def _mark(solution: Solution) -> Path:
    """Says that the library beside it was whole: the linker may have been killed halfway through."""
    return _library(solution).with_suffix(".whole")
