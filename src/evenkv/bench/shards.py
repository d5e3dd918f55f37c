"""One process a GPU of this machine: each runs `evenkv bench --shard i/n`, all append to one file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from evenkv.errors import EvenkvError
from evenkv.evaluate.environment import gpu_names

_POLL_S = 0.2
_STOP_S = 30.0
_REMEDY = "See them with `evenkv doctor`."


@dataclass(frozen=True)
class ShardResult:
    """How one process ended; `said` is the last line of its stderr."""

    index: int
    gpu: str
    exit_code: int
    said: str


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return [name.strip() for name in limited.split(",") if name.strip()]
    return [str(number) for number in range(len(gpu_names()))]


def choose_gpus(wanted: str, available: Sequence[str], remedy: str = _REMEDY) -> list[str]:
    """The first so many GPUs, or "all".

    Parameters
    ----------
    wanted : str
        What `--gpus` was given.
    available : sequence of str
    remedy : str, optional
        What to do about a number that does not fit.

    Raises
    ------
    EvenkvError
        When `wanted` is neither, or there are fewer.
    """
    if wanted == "all" and available:
        return list(available)
    if not wanted.isdigit() or not 1 <= int(wanted) <= len(available):
        raise EvenkvError(
            f'--gpus: wanted "all" or a number from 1 to the GPUs here ({len(available)}), got {wanted!r}.',
            remedy,
        )
    return list(available[: int(wanted)])


def usable_cores() -> list[int]:
    """Cores that this process may use: one of several shards has a part of the machine's."""
    if hasattr(os, "sched_getaffinity"):  # not every system lets a process choose
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 2))


def share_cores(cores: Sequence[int], number: int, count: int) -> list[int]:
    """The cores of process `number` of `count`: its own, so that none of them disturbs another's host times.

    All of them where there are fewer than two for each process.
    """
    each = len(cores) // count
    return sorted(cores)[number * each : (number + 1) * each] if each >= 2 else sorted(cores)


def run_shards(
    arguments: Sequence[str], gpus: Sequence[str], progress: Callable[[str, float], None]
) -> list[ShardResult]:
    """Start one process a GPU, on cores of its own, and wait for all.

    An interruption is passed on, finished rows stay.

    Parameters
    ----------
    arguments : sequence of str
        Of `evenkv bench`, without `--gpus`, `--shard` and `--json`.
    """
    processes: list[subprocess.Popen] = []
    cores = usable_cores()
    with contextlib.ExitStack() as stack:
        # Files, not pipes: nobody reads while they run, and a full pipe would stop them.
        logs = [
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            for _ in gpus
        ]
        try:
            for number, (gpu, log) in enumerate(zip(gpus, logs, strict=True), 1):
                shard = f"{number}/{len(gpus)}"
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "evenkv", "bench", *arguments, "--shard", shard],
                        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        start_new_session=True,
                    )
                )
                if hasattr(os, "sched_setaffinity"):
                    with contextlib.suppress(OSError):  # it ended already, or is not allowed to
                        own = share_cores(cores, number - 1, len(gpus))
                        os.sched_setaffinity(processes[-1].pid, own)
            while running := [p for p in processes if p.poll() is None]:
                progress(f"{len(running)} of {len(gpus)} GPUs at work", 1 - len(running) / len(gpus))
                time.sleep(_POLL_S)
        finally:
            # The first ones too, when an interruption comes while the others are being started.
            _stop([p for p in processes if p.poll() is None])
        return [
            ShardResult(number, gpu, process.returncode, _last_line(log))
            for number, (gpu, process, log) in enumerate(zip(gpus, processes, logs, strict=True), 1)
        ]


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = log.read().strip().splitlines()
    return lines[-1] if lines else ""


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    """Ask all to end, and make those that do not, or all at once when a second interruption comes."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_S
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
