"""The implementations that the roofline compares: ours and the pinned peers, each at its best setting."""

from __future__ import annotations

from evenkv.bench.device.implementations.base import Implementation, Prepared
from evenkv.errors import EvenkvError

__all__ = ["Implementation", "Prepared", "make_implementation"]


def make_implementation(name: str) -> Implementation:
    """The implementation of that name; imports only what it needs.

    Raises
    ------
    EvenkvError
        When there is none of that name.
    """
    if name.startswith("evenkv-"):
        from evenkv.bench.device.implementations.evenkv import EvenkvKernel

        return EvenkvKernel(name)
    if name in ("flashinfer-tc", "flashinfer-cc"):
        from evenkv.bench.device.implementations.flashinfer import FlashInferDecode

        return FlashInferDecode(name)
    if name == "flashinfer-xqa":
        from evenkv.bench.device.implementations.flashinfer import FlashInferXqa

        return FlashInferXqa(name)
    if name == "fa3":
        from evenkv.bench.device.implementations.fa3 import FlashAttention3

        return FlashAttention3(name)
    raise EvenkvError(
        f"Unknown implementation {name!r}.",
        "Known are evenkv-cuda, evenkv-triton, flashinfer-tc, flashinfer-cc, flashinfer-xqa and fa3.",
    )
