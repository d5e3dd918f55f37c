"""The yardsticks: how fast this card copies, at peak size and at each case's own."""

from __future__ import annotations

from collections.abc import Callable

import torch

PEAK_BYTES = 4 << 30  # each way
# Copies of more go through a buffer of this size, piece by piece: the traffic is the same.
MATCHED_BUFFER_BYTES = 4 << 30
# Matched copies are of whole pages of so many bytes. With less than a page left over a copy takes 2 to 4 us
# more on an H200, and uneven batches would seem to come nearer to a copy than even ones.
COPY_GRAIN = 4096


def matched_bytes(kv_bytes: int) -> int:
    """Bytes each way of the copy that moves a case's K and V: half of them, up to a whole page."""
    return max(1, -(-kv_bytes // (2 * COPY_GRAIN))) * COPY_GRAIN


def copy_call(source: torch.Tensor, target: torch.Tensor, num_bytes: int) -> Callable[[], None]:
    """A device-to-device copy of `num_bytes` out of `source` (it moves twice that: read and write).

    Parameters
    ----------
    source : flat tensor of at least `num_bytes`
    target : uint8 tensor; when smaller, it is written several times over
    """
    data = source.view(torch.uint8)[:num_bytes]
    step = target.numel()
    pairs = [
        (target[: min(step, num_bytes - begin)], data[begin : begin + step])
        for begin in range(0, num_bytes, step)
    ]

    def call() -> None:
        for into, out_of in pairs:
            into.copy_(out_of)

    return call


def peak_bytes(free_bytes: int) -> int:
    """Bytes each way of the copy at peak size: 4 GiB, or what a small GPU's memory leaves for two buffers."""
    return min(PEAK_BYTES, free_bytes // 3 // 4096 * 4096)


def gbps(num_bytes: int, microseconds: float) -> float:
    """1e9 bytes a second of a copy of `num_bytes`, read and write counted."""
    return 2 * num_bytes / microseconds / 1e3
