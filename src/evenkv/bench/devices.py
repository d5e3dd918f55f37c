"""Opens the device that a command asks for."""

from __future__ import annotations

from evenkv.bench.protocol import Device
from evenkv.bench.standin import StandIn
from evenkv.errors import EvenkvError

DEVICES = ("cuda", "standin")


def open_device(kind: str = "cuda") -> Device:
    """The first visible GPU, or the stand-in that measures nothing.

    Raises
    ------
    EvenkvError
        When there is no GPU, or what its measurement needs is missing.
    """
    if kind == "standin":
        return StandIn()
    if kind != "cuda":
        raise EvenkvError(f"--device: wanted one of {', '.join(DEVICES)}, got {kind!r}.", "Correct it.")
    import torch

    if not torch.cuda.is_available():
        raise EvenkvError(
            "evenkv bench measures on a CUDA GPU, and torch sees none here.",
            "Run it on a machine with one; `evenkv doctor` says what is missing.",
        )
    from evenkv.bench.device import open_device as open_gpu

    return open_gpu()
