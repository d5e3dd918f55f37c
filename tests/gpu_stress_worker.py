"""The stress test's child process, its parent's loop with the watchdog, and a command to repeat a problem.

    PYTHONPATH=src python tests/gpu_stress_worker.py evenkv_cuda 1234      # the problem of seed 1234
    PYTHONPATH=src python tests/gpu_stress_worker.py evenkv_cuda 0 2000    # seeds 0 to 1999

Light imports only: the parent needs no CUDA context, and the child imports torch when it starts.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evenkv.bench.device.worker import Worker, WorkerFault
from evenkv.spec.family import DecodeSpec

if TYPE_CHECKING:
    from stress_problems import Limits, Plan

SILENCE_S = 30.0  # one problem takes milliseconds; what takes this long hangs
PREPARE_S = 300.0  # a build that the cache lacks, or Triton's compiler
MOST_FAULTY = 5  # problems: each wrong one after these says little new, each hang costs SILENCE_S


class StressKernel(Protocol):
    """What the worker runs."""

    def spoil_scratch(self, plan: Plan, call: int) -> None:
        """Before call 0 and call 1 of a problem: fills all scratch with `plan.scratch[call]`."""

    def __call__(self, spec: DecodeSpec, *arguments: Any) -> None:
        """Inputs in the definition's order, output, lse."""


class CudaKernel:
    """evenkv_cuda, and the hook of its libraries that fills scratch."""

    symbol = "run"

    def __init__(self) -> None:
        self._loaded: dict[DecodeSpec, tuple[Callable[..., None], Callable[[int], None]]] = {}

    def _load(self, spec: DecodeSpec) -> tuple[Callable[..., None], Callable[[int], None]]:
        if spec not in self._loaded:
            self._loaded[spec] = load_cuda_kernel(spec, self.symbol)
        return self._loaded[spec]

    def spoil_scratch(self, plan: Plan, call: int) -> None:
        self._load(plan.spec)[1](plan.scratch[call])

    def __call__(self, spec: DecodeSpec, *arguments: Any) -> None:
        self._load(spec)[0](*arguments)


class GeneralCudaKernel(CudaKernel):
    """The same without the kernel for requests that stay whole, which takes many of the stress test's."""

    symbol = "run_always_cut"


class InvariantCudaKernel(CudaKernel):
    """The same with batch-invariant bits: always uneven parts, of 2048 tokens."""

    symbol = "run_batch_invariant"


class TritonKernel:
    """evenkv_triton. Its scratch is a module's torch tensors: partials and stats, and counters that stay."""

    def __init__(self) -> None:
        self._loaded: dict[DecodeSpec, Callable[..., None]] = {}

    def _load(self, spec: DecodeSpec) -> Callable[..., None]:
        from evenkv.library.build import build_kernel

        if spec not in self._loaded:
            self._loaded[spec] = build_kernel("evenkv_triton", spec)
        return self._loaded[spec]

    def spoil_scratch(self, plan: Plan, call: int) -> None:
        import torch

        function = self._load(plan.spec)
        launch = sys.modules[f"{function.__module__.rpartition('.')[0]}.launch"]
        for *partials, _counters in launch._scratch.values():
            for tensor in partials:
                tensor.view(torch.uint8).fill_(plan.scratch[call])

    def __call__(self, spec: DecodeSpec, *arguments: Any) -> None:
        self._load(spec)(*arguments)


MODULE = Path(__file__).stem  # also when this file is the command
KERNELS = {
    "evenkv_cuda": f"{MODULE}:CudaKernel",
    "evenkv_cuda general": f"{MODULE}:GeneralCudaKernel",
    "evenkv_cuda batch-invariant": f"{MODULE}:InvariantCudaKernel",
    "evenkv_triton": f"{MODULE}:TritonKernel",
}


def load_cuda_function(spec: DecodeSpec, symbol: str) -> Callable[..., None]:
    """A function that evenkv_cuda's library exports, out of the cache once it is built."""
    from evenkv.library import toolchain
    from evenkv.library.build import build_inputs, build_solution, cache_key
    from evenkv.library.load import load_shared_library

    solution = _cuda_solution(spec)
    run = build_solution(solution)
    if symbol == "run":
        return run
    entry = toolchain.cache_folder() / "library" / cache_key(build_inputs(solution))
    # The same file again: the loader gives the library that is loaded, with the scratch that `run` uses.
    return load_shared_library(entry / "kernel.so", symbol)


def load_cuda_kernel(
    spec: DecodeSpec, symbol: str = "run"
) -> tuple[Callable[..., None], Callable[[int], None]]:
    """A decode function and `fill_scratch` of one built library."""
    return load_cuda_function(spec, symbol), load_cuda_function(spec, "fill_scratch")


def _cuda_solution(spec: DecodeSpec) -> Any:
    from evenkv.pack.manifest import find_kernel
    from evenkv.pack.render import pack_solution
    from evenkv.paths import Repository

    return pack_solution(find_kernel(Repository(Path()), "evenkv_cuda"), spec)


def build_side_by_side(specs: Sequence[DecodeSpec]) -> list[str]:
    """Fill the library's cache with evenkv_cuda for `specs`, a process each; returns what did not build."""
    jobs = min(len(specs), max(1, os.cpu_count() or 1))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return [fault for fault in pool.map(_build, specs) if fault]


def _build(spec: DecodeSpec) -> str | None:
    from evenkv.library.build import build_solution

    try:
        build_solution(_cuda_solution(spec))
    except Exception as error:
        return f"{spec.short_name}: {str(error)[-2000:]}"
    return None


class Stress:
    """The child's commands.

    Parameters
    ----------
    kernel : str
        "module:callable" that gives a `StressKernel`.
    device : str
        Where problems live.
    specs, limits
        As `stress_problems.draw_plan`.
    """

    def __init__(self, kernel: str, device: str, specs: Sequence[DecodeSpec], limits: Limits) -> None:
        import stress_problems  # noqa: F401 (here, so that no problem waits for imports)
        import torch

        from evenkv.numerics import judge  # noqa: F401

        if device == "cpu":
            torch.set_num_threads(1)
        module, _, name = kernel.partition(":")
        self._kernel: StressKernel = getattr(importlib.import_module(module), name)()
        self._device, self._specs, self._limits = device, tuple(specs), limits

    def classify(self, error: Exception) -> tuple[str, bool]:
        # After an error on a device nothing that this process computes there can be trusted.
        return "refused", self._device != "cpu"

    def prepare(self, index: int) -> list[str]:
        """A small problem of a geometry, which builds and compiles: no other problem waits for a compiler."""
        from stress_problems import Limits, draw_plan

        return self._judge(draw_plan(index, self._specs[index : index + 1], Limits(3, 100, 100)))

    def solve(self, seed: int) -> list[str]:
        """What is wrong with the results of a seed's problem."""
        from stress_problems import draw_plan

        return self._judge(draw_plan(seed, self._specs, self._limits))

    def _judge(self, plan: Plan) -> list[str]:
        from stress_problems import build_problem, fast_reference

        from evenkv.numerics.check import check_outputs
        from evenkv.numerics.judge import bit_equal, call

        problem = build_problem(plan, self._device)
        self._kernel.spoil_scratch(plan, 0)
        output, lse, faults = call(problem, self._kernel, compare_inputs=False)
        faults += check_outputs(plan.spec, output, lse, *fast_reference(problem))
        self._kernel.spoil_scratch(plan, 1)
        again, again_lse, found = call(problem, self._kernel, compare_inputs=False)
        if not bit_equal((again, again_lse), (output, lse)):
            found.append(f"a second call, with scratch filled with 0x{plan.scratch[1]:02X}, has other bits")
        return faults + found


def stress(
    worker: Worker,
    seeds: Iterable[int],
    describe: Callable[[int], object],
    *,
    silence_s: float = SILENCE_S,
    most_faulty: int = MOST_FAULTY,
) -> list[str]:
    """Solve the problems of `seeds` one after another in the worker's process.

    A problem that takes longer than `silence_s` seconds, or takes the process with it, costs that process;
    a fresh one goes on.

    Returns
    -------
    list of str
        Every fault with its seed; empty when all is right.
    """
    faults: list[str] = []
    faulty = 0
    for seed in seeds:
        try:
            # A fresh process imports and loads first, and has a deadline of its own for that.
            worker.start()
            found = worker.call("solve", seed=seed, deadline_s=silence_s)
        except WorkerFault as fault:
            found = [fault.reason]
        if found:
            faulty += 1
            faults += [f"seed {seed} ({describe(seed)}): {fault}" for fault in found]
        if faulty >= most_faulty:
            faults.append(f"stopped after seed {seed}: {faulty} problems are wrong already")
            break
    return faults


def make_worker(
    kernel: str, device: str, specs: Sequence[DecodeSpec], limits: Limits, name: str = "stress"
) -> Worker:
    """The child for a kernel of `KERNELS`, or any other "module:callable"."""
    arguments = {
        "kernel": KERNELS.get(kernel, kernel),
        "device": device,
        "specs": tuple(specs),
        "limits": limits,
    }
    return Worker(name, f"{MODULE}:Stress", arguments, deadline_s=SILENCE_S)


def run_stress(kernel: str, seeds: Sequence[int], specs: Sequence[DecodeSpec]) -> tuple[list[str], float]:
    """On a GPU: build, prepare, solve. Returns the faults, and the seconds that solving took."""
    from stress_problems import Limits, draw_plan

    faults = build_side_by_side(specs) if kernel.startswith("evenkv_cuda") else []
    if faults:
        return faults, 0.0
    worker = make_worker(kernel, "cuda", specs, Limits())
    try:
        for index, spec in enumerate(specs):
            try:
                found = worker.call("prepare", index=index, deadline_s=PREPARE_S)
            except WorkerFault as fault:
                found = [fault.reason]
            faults += [f"first problem of {spec.short_name} {spec.kv_dtype}: {fault}" for fault in found]
        if faults:
            return faults, 0.0
        begun = time.monotonic()
        found = stress(worker, seeds, lambda seed: draw_plan(seed, tuple(specs)))
        return found, time.monotonic() - begun
    finally:
        worker.end()


def main() -> int:
    from stress_problems import specs_of

    kernel, first = sys.argv[1], int(sys.argv[2])
    seeds = range(first, first + (int(sys.argv[3]) if len(sys.argv) > 3 else 1))
    faults, seconds = run_stress(kernel, seeds, specs_of(kernel))
    print("\n".join([*faults, f"{len(seeds)} problems of {kernel} in {seconds:.1f} s"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
