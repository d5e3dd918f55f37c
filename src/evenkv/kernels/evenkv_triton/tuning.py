"""Launch numbers and their reasons: from host-known shapes only, never from lengths, never by trial runs."""

from dataclasses import dataclass

MIN_CHUNK_SLOTS = 64
"""Two steps of a program: 32 KiB of bf16 d128. Where requests are short, the program with the most of them
decides, and each costs a chain of trips of its own: smaller chunks hold fewer. 32 slots, in the version that
prefetched: 63 requests of 4 to 5,668 tokens 38.6 us, not 41.9, but up to 0.9 us more in four of seven other
cases, and no gain above 0.1."""

EVEN_SLOTS = 4096
"""Up to this many slots a program all chunks are equal, one each: a second round would cost more in prologues
and merges than it evens out (16,384 slots an SM). Halving rounds instead, of 2 programs of 4 warps: b32 L4096
kv8 180 us against 138 in bf16, 150 against 82 in fp8."""

FAN = 16
"""Partials merged by one program, in two to four rounds of loads at head_dim 128 and groups of 3 to 8. 528
chunks of one request (132 SMs, one round) become 33 groups, merged in parallel, then by one."""

SEARCH_BLOCK = 256
"""Requests looked at together when a position's request is sought: one step for batches up to 256."""

PROGRAMS_PER_SM = 4
"""Others compute during one's ticket, merge and first loads. With WARPS and nothing else, against 2 of 4
warps: 1 x 128k + 63 x 1k kv8 bf16 214 us, not 239; 63 short requests 63, not 78; b32 L4096 kv8 bf16 138.5 and
138.2, fp8 84 and 82. One program of 8 warps: 324, 127, 153 and 110.

8 programs of 1 warp against 4 of 2, in the version that prefetched: 63 short requests 36.9 us, not 41.9,
b64 L8192 h5 ps1 83.1, not 85.4; b256 L8192 kv8 bf16 1,973.7, not 1,954.3, b8 L1024 kv8 24.0, not 22.7."""

WARPS = 2
"""Four programs of them are 8 warps an SM: all that 255 registers a thread allow."""

RUN_TOKENS = 16
"""Tokens of a warp's own in one step: what its registers hold, and a page of 16 needs one id."""

MOST_STREAM_VALUES = 16 * 128
"""Outputs of a group (rows x head_dim) that one warp keeps in 64 registers a thread; more spill."""

MOST_BUFFERS = 2
"""Tiles in shared memory: more only lengthen the prologue that each segment pays. Of 2 programs of 4 warps, 2
buffers against 3 (bf16) or 4 (fp8): b32 L4096 kv8 bf16 137.7 us against 138.2, fp8 80.6 against 81.6, 63
short requests 72 against 78; b256 L8192 kv8 bf16 1,963 against 1,955."""

MERGE_REGISTERS = 64
"""Registers of a thread that hold partials in flight in a merge, which runs beside a segment's own values."""


@dataclass(frozen=True)
class Tuning:
    """rows, merge_rows: a group's query heads, padded for tl.dot and for a merge; tile: tokens of one step;
    stages: of Triton's pipeline; unroll: partials in flight in a merge.

    streams: whether each warp attends to tokens of its own (streams.py) or all share a tile (attend.py).
    """

    rows: int
    merge_rows: int
    tile: int
    stages: int
    unroll: int
    streams: bool
    warps: int = WARPS


def choose(head_dim: int, cache_bytes: int, group: int, shared_bytes: int) -> Tuning:
    """Numbers for one cache geometry on one device.

    Parameters
    ----------
    head_dim : int
        64, 128 or 256.
    cache_bytes : int
        Bytes of a cache element: 1 or 2.
    group : int
        Query heads of a KV head.
    shared_bytes : int
        Shared memory that one program may take.
    """
    merge_rows = 1 << (group - 1).bit_length()
    rows = max(16, merge_rows)
    streams = rows * head_dim <= MOST_STREAM_VALUES
    tile = WARPS * RUN_TOKENS
    pair_bytes = 2 * tile * head_dim * cache_bytes
    # K and V of `buffers` tiles wait in shared memory: 2 x 16 KiB in bf16 d128, so 128 KiB are in flight on
    # an SM of an H200, where 36 KiB cover the idle latency and about three times that the loaded one.
    # 8 KiB: page ids and exchanges.
    buffers = max(1, min(MOST_BUFFERS, (shared_bytes - 8192) // pair_bytes))
    # Page ids come one load before K and V, which costs a second stage a buffer.
    unroll = MERGE_REGISTERS * 32 * WARPS // (merge_rows * head_dim)
    return Tuning(
        rows=rows,
        merge_rows=merge_rows,
        tile=tile,
        stages=2 * buffers + 1,
        unroll=max(1, min(8, unroll)),
        streams=streams,
    )
