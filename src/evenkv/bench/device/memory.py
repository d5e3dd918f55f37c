"""What of a GPU's memory may stay taken between two families, and how a process is made to let go of it."""

from __future__ import annotations

from typing import Any

from evenkv.bench.device.worker import WorkerFault

# What may stay allocated between families: in the owner's process, and in an implementation's (workspaces).
LEFTOVER_BYTES = 256 << 20
_WORKER_BYTES = 2 << 30
# Beyond what torch has in the processes: our kernels keep the scratch of captured graphs as long as their
# process lives, and all kernels are loaded as they are used. Past the first, ours start anew; past the
# second, all do.
SCRATCH_BYTES, UNACCOUNTED_BYTES = 2 << 30, 4 << 30


def release(worker: Any) -> int:
    """Let an implementation's process give its memory back; the process goes when it does not.

    Returns
    -------
    int
        Bytes that torch still has there.
    """
    try:
        held = worker.call("release")
    except WorkerFault:
        held = _WORKER_BYTES + 1
    if held > _WORKER_BYTES:
        worker.kill()
        return 0
    return held
