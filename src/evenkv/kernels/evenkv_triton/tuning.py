"""Launch numbers and their reasons: from host-known shapes only, never from lengths, never by trial runs."""

from dataclasses import dataclass

PART_STEPS = 8
"""Steps of a part, at least: 256 tokens. Adding up a part costs the last program an eighth of a trip to
memory or so, and a step costs a program about half a trip. With UNCUT_STEPS, against 4 and 8: b8 L1024 kv8
bf16 18.0 us, not 20.4, 63 short requests 22.4, not 23.3, six larger cases within 0.4 % either way."""

UNCUT_STEPS = 16
"""An even request is cut where a program would have more steps than this: below, what is saved is no more
than a part's own end costs (store, fence, atomic: some 3 us). Measured with PART_STEPS."""

WORST_STEPS = 16
"""Requests stay whole, however uneven, while one that holds all tokens leaves a program at most this many
steps: the kernel for them has no search, no scan and no merge. evenkv_cuda takes 28 steps of a warp, of
which a cluster has up to 32. Not measured yet."""

MOST_PARTS = 128
"""Even parts of a request, at most: the program with the last one adds all up, 8 or 16 a trip to memory.
evenkv_cuda took 84 us for 1 x 131,072 tokens of h5 in 396 parts, 30 in 45 of larger clusters. There are no
clusters here, so fewer parts are fewer programs that read: 128 are one an SM. Uneven parts get no shorter
than leaves this many of the whole batch, up to UNEVEN_TOKENS. Not measured yet."""

WAVES_10 = 25
"""More items (request and unit) than programs run at once: requests are cut in as many parts as make this
many waves, in tenths, if parts keep WAVE_TOKENS. Few waves end with SMs that hold one program, which alone
does not use an SM's bandwidth. evenkv_cuda: 512 items of 4,096 tokens whole 262 to 278 us, cut in two 254;
512 items of 1,024 tokens whole 73, cut in two 78. Not measured yet here."""

WAVE_TOKENS = 1024
"""See WAVES_10."""

EVEN_100 = 125
"""A batch whose longest request has no more than this many hundredths of the average counts as even.
evenkv_cuda's number."""

MOST_SCANNED = 1024
"""Requests that every program looks through for the longest: four loads side by side of SEARCH_BLOCK. A
scan over more costs more than it gains (evenkv_cuda's number; not measured yet here)."""

FAIR_PARTS = 3
"""Uneven parts: a third of what a program would get of the batch, so that those that end late do not end
much later than others. evenkv_cuda: logn(8,192) x 32 kv8, parts of a fair share, a half and a third: bf16
185, 181 and 179 us, fp8 115, 110 and 103. Not measured yet here."""

MOST_FAIR_PARTS = 5
"""Beyond a fifth of a program's share, where items do not run at once, parts would only fill scratch."""

UNEVEN_TOKENS = 2048
"""An uneven part is no shorter than this while that leaves every program one: its begin and end cost some 5
us. evenkv_cuda, 128k + 63 x 1k fp8, parts of a fair share, a half and a third: 108, 119 and 124 us. Not
measured yet here, where a program has a quarter of an SM, not a third."""

UNEVEN_WAVE_TOKENS = 3072
"""As UNEVEN_TOKENS, where items do not run at once: this or the average, whichever is shorter."""

SEARCH_BLOCK = 256
"""Entries of kv_indptr looked at together: one trip to memory for batches up to 255, two up to 65,000."""

PROGRAMS_PER_SM = 4
"""Others compute during one's search, merge and first loads. With WARPS and nothing else, against 2 of 4
warps: 1 x 128k + 63 x 1k kv8 bf16 214 us, not 239; 63 short requests 63, not 78; b32 L4096 kv8 bf16 138.5
and 138.2, fp8 84 and 82. One program of 8 warps: 324, 127, 153 and 110. (All of versions whose programs
stayed and walked chunks of all slots; MOST_BUFFERS, too.)

8 programs of 1 warp against 4 of 2, in one that prefetched: 63 short requests 36.9 us, not 41.9, b64 L8192
h5 ps1 83.1, not 85.4; b256 L8192 kv8 bf16 1,973.7, not 1,954.3, b8 L1024 kv8 24.0, not 22.7."""

WARPS = 2
"""Four programs of them are 8 warps an SM: all that 255 registers a thread allow."""

RUN_TOKENS = 16
"""Tokens of a warp's own in one step: what its registers hold, and a page of 16 needs one id."""

MOST_STREAM_VALUES = 16 * 128
"""Outputs of a group (rows x head_dim) that one warp keeps in 64 registers a thread; more spill."""

MOST_BUFFERS = 2
"""Tiles in shared memory: more only lengthen the prologue that each part pays. Of 2 programs of 4 warps, 2
buffers against 3 (bf16) or 4 (fp8): b32 L4096 kv8 bf16 137.7 us against 138.2, fp8 80.6 against 81.6, 63
short requests 72 against 78; b256 L8192 kv8 bf16 1,963 against 1,955."""

MERGE_REGISTERS = 128
"""Registers of a thread that hold partials in flight in a merge: half of what a thread has, since by then
the program's own part is in scratch. 64: 63 short requests 29.9 us, not 23.3, h5 b64 L8192 78.3, not 75.7,
1 x 128k + 63 x 1k kv8 bf16 196.6, not 193.5."""

MOST_UNROLL = 16
"""Partials in flight, at most: few cut requests have more."""


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
        unroll=max(1, min(MOST_UNROLL, unroll)),
        streams=streams,
    )
