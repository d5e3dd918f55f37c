"""Fills the caches of what compiles itself when it is called, before anything is evaluated.

FlashInfer compiles a module for each cache dtype and head_dim, Triton a kernel for each specialisation. In
upstream's worker that happens serially, within a solution's timeout. Here one tiny call of each, in a process
of its own (it may crash, and CUDA errors stick to their process), several at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashinfer_bench.data import Definition, Solution

from evenkv.errors import EvenkvError
from evenkv.evaluate.load import kernel_of
from evenkv.files import write_atomic
from evenkv.spec.family import parse_name

LIMIT_S = 600.0
"""A call that takes longer hangs: FlashInfer's largest module needs minutes on few cores."""

_MOST_PROCESSES = 8
_POLL_S = 0.05
_TOKENS = 16
_COMMAND = (sys.executable, "-m", "evenkv.evaluate.warm")

# What decides the code that a kernel compiles: for FlashInfer the group size is a runtime argument, and the
# dtype of its queries follows from the cache's. Triton, and any kernel not named here: the whole geometry.
_FLASHINFER = ("kv_dtype", "head_dim")
_GEOMETRY = ("kv_dtype", "head_dim", "num_kv_heads", "group_size", "page_size")
_COMPILED_FOR = {"flashinfer_tc": _FLASHINFER, "flashinfer_cc": _FLASHINFER}
_COMPILE_NOTHING = ("fa3", "torch_reference")

# Whose own caches are keyed by their version: what an older one has compiled is not warm.
_COMPILERS = ("torch", "triton", "flashinfer-python")

Progress = Callable[[str], None]
Pair = tuple[Definition, Solution]


def to_warm(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair for each thing that is compiled at the first call, in the given order.

    Definitions outside the family of names are left out: no problem can be drawn for them.
    """
    first: dict[tuple[str, ...], Pair] = {}
    for definition, solution in pairs:
        compiles = solution.spec.language.value in ("python", "triton")
        if compiles and kernel_of(solution) not in _COMPILE_NOTHING:
            with contextlib.suppress(EvenkvError):
                first.setdefault(_key(solution), (definition, solution))
    return list(first.values())


def warm_all(
    pairs: Sequence[Pair],
    progress: Progress = lambda _: None,
    deadline: float | None = None,
    processes: int | None = None,
    limit_s: float = LIMIT_S,
    device: str = "cuda",
) -> tuple[dict[str, str], list[str]]:
    """Call every pair of `to_warm(pairs)` once; those that this toolchain has warmed before take no time.

    Parameters
    ----------
    pairs : sequence of (Definition, Solution)
        What will be evaluated, in that order.
    progress : callable
        Called with each solution's name when it is done, failed or not.
    deadline : float, optional
        `time.monotonic()` by which all should be warm: none starts that would end later, judged by the
        longest so far.
    processes : int, optional
        Calls at a time; default: half the cores, at most 8. The cores are shared out among the compilers
        that they start (MAX_JOBS, unless the user has set it).
    limit_s : float
        Seconds after which a call is ended, with the compilers that it has started.

    Returns
    -------
    failures : dict
        Solution name to why: nothing else stops, the evaluation will show the failure.
    left : list of str
        Solutions that the deadline left out: the evaluation compiles them itself.
    """
    waiting: list[Pair] = []
    for pair in to_warm(pairs):
        if _mark(pair[1]).is_file():
            progress(pair[1].name)
        else:
            waiting.append(pair)
    cores = os.cpu_count() or 1
    count = max(1, min(processes or min(cores // 2, _MOST_PROCESSES), len(waiting)))
    environment = {"MAX_JOBS": str(max(1, cores // count)), **os.environ}
    failures: dict[str, str] = {}
    running: list[_Call] = []
    longest = 0.0
    try:
        while waiting or running:
            while waiting and len(running) < count:
                if deadline is not None and time.monotonic() + longest > deadline:
                    break
                running.append(_Call(waiting.pop(0), device, environment))
            if not running:
                break
            time.sleep(_POLL_S)
            for call in list(running):
                if not call.has_ended(limit_s):
                    continue
                running.remove(call)
                longest = max(longest, call.seconds)
                error = call.error()
                if error is None:
                    write_atomic(_mark(call.solution), b"")
                else:
                    failures[call.solution.name] = error
                progress(call.solution.name)
    finally:
        for call in running:
            call.stop()
    return failures, [solution.name for _, solution in waiting]


class _Call:
    """One process that calls one solution once."""

    def __init__(self, pair: Pair, device: str, environment: dict[str, str]) -> None:
        definition, self.solution = pair
        job = {
            "definition": definition.model_dump(mode="json"),
            "solution": self.solution.model_dump(mode="json"),
            "device": device,
        }
        self._said = tempfile.TemporaryFile("w+", errors="replace", prefix="evenkv-warm-")  # noqa: SIM115
        self._limit_s: float | None = None
        self._start = time.monotonic()
        # A file, not a pipe: the sources may be more than a pipe holds before the process reads.
        with tempfile.TemporaryFile("w+", prefix="evenkv-warm-") as given:
            json.dump(job, given)
            given.seek(0)
            # A session of its own, so that the compilers which it starts end with it.
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=given,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def has_ended(self, limit_s: float) -> bool:
        """Whether it is over; ends it when it has had `limit_s` seconds."""
        if self._process.poll() is not None:
            return True
        if self.seconds <= limit_s:
            return False
        self._limit_s = limit_s
        self.stop()
        return True

    def error(self) -> str | None:
        """Why it failed, None if it did not; to be asked once, when it has ended."""
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        self._said.close()
        if self._limit_s is not None:
            return f"ended after {self._limit_s:g} s"
        code = self._process.returncode
        return None if code == 0 else f"{lines[-1] if lines else 'no message'} (exit code {code})"

    def stop(self) -> None:
        """End it at once, with its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _key(solution: Solution) -> tuple[str, ...]:
    kernel, spec = kernel_of(solution), parse_name(solution.definition)
    return kernel, *(str(getattr(spec, name)) for name in _COMPILED_FOR.get(kernel, _GEOMETRY))


def _mark(solution: Solution) -> Path:
    """Says that the solution was called with this toolchain before.

    It knows nothing of the compilers' own caches: where someone has emptied those, the evaluation compiles,
    as without a warm-up.
    """
    parts = [*_key(solution), solution.hash(), *map(_version, _COMPILERS)]
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return Path(os.environ["FIB_CACHE_PATH"]) / "warm" / name


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def call_once(job: dict[str, Any]) -> None:
    """Build the job's solution through flashinfer-bench and call it on one request of a few tokens.

    `job` holds `definition` and `solution` (upstream's JSON) and `device`. The kernels' compiled code does
    not depend on lengths: the smallest problem compiles what every workload will need.
    """
    import torch
    from flashinfer_bench.compile import BuilderRegistry

    from evenkv.numerics.problem import make_problem

    definition = Definition.model_validate(job["definition"])
    runnable = BuilderRegistry.get_instance().build(definition, Solution.model_validate(job["solution"]))
    spec = parse_name(definition.name)
    problem = make_problem(spec, [_TOKENS], device=job["device"], poison_unused=False)
    outputs = problem.empty_outputs()
    with torch.no_grad():
        runnable.call_destination_passing(*problem.inputs(), *outputs)
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)


def main() -> None:
    try:
        call_once(json.load(sys.stdin))
    except Exception as error:  # whatever a solution raises is its own failure
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:1000] or 'no message'}")


if __name__ == "__main__":
    main()
