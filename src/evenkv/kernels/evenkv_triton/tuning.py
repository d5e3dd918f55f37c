"""Launch numbers and their reasons: from host-known shapes only, never from lengths, never by trial runs."""

from dataclasses import dataclass

MIN_CHUNK_SLOTS = 128
"""Below this a chunk costs more to merge than to read (128 tokens of bf16 d128: 64 KiB)."""

FAN = 32
"""Partials merged by one program. 264 chunks of one request become 9 groups, merged in parallel."""

SEARCH_BLOCK = 256
"""Requests looked at together when a position's request is sought: one step for batches up to 256."""

PROGRAMS_PER_SM = 2
"""The second covers the first one's ticket, merge and first loads; 230 registers a thread bar a third."""

WARPS = 4
"""Each takes a quarter of a tile's tokens for the logits and a quarter of the dims for the output."""


@dataclass(frozen=True)
class Tuning:
    """tile: tokens of one step; stages: of Triton's pipeline; unroll: partials in flight in a merge."""

    tile: int
    stages: int
    unroll: int


def choose(head_dim: int, cache_bytes: int, shared_bytes: int) -> Tuning:
    """Numbers for one cache geometry on one device.

    Parameters
    ----------
    head_dim : int
        64, 128 or 256.
    cache_bytes : int
        Bytes of a cache element: 1 or 2.
    shared_bytes : int
        Shared memory that one program may take.
    """
    # Small enough that a warp keeps logits, V fragments and addresses in registers: 128 fp8 tokens spill.
    tile = 32 if head_dim * cache_bytes > 256 else 64
    pair_bytes = 2 * tile * head_dim * cache_bytes
    # K and V of `buffers` tiles wait in shared memory: 3 x 32 KiB in bf16 d128, so 192 KiB are in flight on
    # an SM of an H200, where 36 KiB cover the idle latency and about three times that the loaded one. More
    # than 4 buffers only lengthen the prologue that each segment pays. 8 KiB: page ids and exchanges.
    buffers = max(1, min(4, (shared_bytes - 8192) // pair_bytes))
    # Page ids come one load before K and V, which costs a second stage a buffer.
    return Tuning(tile=tile, stages=2 * buffers + 1, unroll=4 if head_dim > 128 else 8)
