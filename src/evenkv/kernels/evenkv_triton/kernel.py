"""Paged GQA decode in one launch, no host plan: the device code of evenkv_triton.

Grid: a fixed number of programs (`workers`), whatever the lengths. A program takes chunks of the flattened
slot space (schedule.py): the first is its own number, later ones come from a ticket counter, so SMs of
unequal speed take unequal numbers of chunks. A chunk is one range of slots of one or more KV heads; inside it
the program walks segments, a segment being the part of one (KV head, request) in the chunk.

- A segment that is the whole (head, request) is written to the output at once.
- A cut one leaves a partial in scratch; the program that arrives last merges all its partials in chunk order.
  Long requests are merged in two levels, `FAN` chunks each: no program merges hundreds of partials alone.

Who merges depends on timing; what is merged, and in which order, does not: same inputs, same bits.
Lengths and page ids are read here, at every launch. Page ids outside the pool and last_page_len outside
[0, PAGE_SIZE] are never followed: they turn that request's output and lse into NaN.

counters: [0] ticket, [1, 1 + MAX_CHUNKS) arrivals of a group of chunks, keyed by the group's first chunk, and
[1 + MAX_CHUNKS, 1 + 2 * MAX_CHUNKS) arrivals of groups, keyed by the segment's first chunk. All zero between
launches: whoever sees a counter's last arrival sets it back, so nothing has to be zeroed.
"""

import triton
import triton.language as tl

from .attend import attend_shared
from .partials import merge_partials, store_output, store_partial
from .schedule import UNIT, chunk_of, count_chunks, find_request, follow_rounds, round_size, tail_size
from .streams import attend_streams, load_query


@triton.jit
def finish_cut_segment(
    acc_ptr,
    stats_ptr,
    counters_ptr,
    out_ptr,
    lse_ptr,
    out_row,
    v_scale,
    chunk,
    start_chunk,
    last_chunk,
    top,
    total,
    acc,
    MAX_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FAN: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Leave the partial of `chunk`; as the last arriver of the segment's chunks, merge and write the output.

    The barrier makes the partial visible to the thread that does the acq_rel add; the add hands it on.
    """
    store_partial(
        acc_ptr,
        stats_ptr,
        2 * chunk + (chunk == start_chunk).to(tl.int32),
        top,
        total,
        acc,
        GROUP,
        ROWS,
        HEAD_DIM,
    )
    group = (chunk - start_chunk) // FAN
    groups = (last_chunk - start_chunk) // FAN + 1
    group_first = start_chunk + group * FAN
    members = tl.minimum(last_chunk + 1 - group_first, FAN)
    tl.debug_barrier()
    # A group of one needs no counter and must not touch it: the segment that starts in this chunk counts
    # there.
    arrived = members - 1
    if members > 1:
        arrived = tl.atomic_add(counters_ptr + 1 + group_first, 1, sem="acq_rel")
    if arrived == members - 1:
        if members > 1:
            tl.store(counters_ptr + 1 + group_first, 0)
        all_top, all_total, all_acc = merge_partials(
            acc_ptr, stats_ptr, start_chunk, group_first, members, 1, GROUP, MERGE_ROWS, HEAD_DIM, FAN, UNROLL
        )
        if groups == 1:
            store_output(
                out_ptr, lse_ptr, out_row, all_top, all_total, all_acc, v_scale, GROUP, MERGE_ROWS, HEAD_DIM
            )
        else:
            # The group's result takes the place of its first partial, once every thread has read that.
            tl.debug_barrier()
            slot = 2 * group_first + (group == 0).to(tl.int32)
            store_partial(acc_ptr, stats_ptr, slot, all_top, all_total, all_acc, GROUP, MERGE_ROWS, HEAD_DIM)
            tl.debug_barrier()
            groups_arrived = tl.atomic_add(counters_ptr + 1 + MAX_CHUNKS + start_chunk, 1, sem="acq_rel")
            if groups_arrived == groups - 1:
                tl.store(counters_ptr + 1 + MAX_CHUNKS + start_chunk, 0)
                all_top, all_total, all_acc = merge_partials(
                    acc_ptr,
                    stats_ptr,
                    start_chunk,
                    start_chunk,
                    groups,
                    FAN,
                    GROUP,
                    MERGE_ROWS,
                    HEAD_DIM,
                    FAN,
                    UNROLL,
                )
                store_output(
                    out_ptr,
                    lse_ptr,
                    out_row,
                    all_top,
                    all_total,
                    all_acc,
                    v_scale,
                    GROUP,
                    MERGE_ROWS,
                    HEAD_DIM,
                )


@triton.jit(do_not_specialize=["batch", "num_pages", "num_indices"])
def decode_kernel(
    q_ptr,  # [batch, NUM_KV_HEADS * GROUP, HEAD_DIM], strides (q_batch_stride, q_head_stride, 1)
    k_ptr,  # [num_pages] pages of PAGE_SIZE slots of NUM_KV_HEADS rows, strides (page, slot, head) below
    v_ptr,
    indptr_ptr,  # int32 [batch + 1]
    indices_ptr,  # int32 [num_indices]
    last_page_len_ptr,  # int32 [batch]; None when PAGE_SIZE is 1
    k_scale_ptr,  # fp32 [NUM_KV_HEADS]; None when the cache is not scaled
    v_scale_ptr,
    out_ptr,  # [batch, NUM_KV_HEADS * GROUP, HEAD_DIM] contiguous
    lse_ptr,  # fp32 [batch, NUM_KV_HEADS * GROUP] contiguous
    acc_ptr,  # fp32 [2 * MAX_CHUNKS, GROUP, HEAD_DIM]
    stats_ptr,  # fp32 [2 * MAX_CHUNKS, 2, GROUP]
    counters_ptr,  # int32 [1 + 2 * MAX_CHUNKS], zero between launches
    logit_scale,  # sm_scale * log2(e)
    batch,
    num_pages,
    num_indices,
    q_batch_stride,
    q_head_stride,
    k_page_stride,
    k_head_stride,
    v_page_stride,
    v_head_stride,
    K_SLOT_STRIDE: tl.constexpr,  # known, so that a page's rows lie at fixed distances
    V_SLOT_STRIDE: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP padded for tl.dot
    MERGE_ROWS: tl.constexpr,  # GROUP padded to a power of two
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # tokens a step
    STREAMS: tl.constexpr,  # whether each warp has tokens of its own,
    RUN: tl.constexpr,  # this many of a tile; divides UNIT
    PAIRS: tl.constexpr,  # whether fp8 rows may be read as int16
    MIN_UNITS: tl.constexpr,
    EVEN_UNITS: tl.constexpr,
    FAN: tl.constexpr,
    UNROLL: tl.constexpr,
    SEARCH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    first_entry = tl.load(indptr_ptr)
    slots = (tl.load(indptr_ptr + batch) - first_entry).to(tl.int64) * PAGE_SIZE  # of one head
    units = ((slots * NUM_KV_HEADS + UNIT - 1) // UNIT).to(tl.int32)
    tail = tail_size(units, workers, (slots // UNIT).to(tl.int32) // batch, MIN_UNITS, EVEN_UNITS)
    chunks = count_chunks(units, workers, tail)

    chunk = worker
    round_first = worker * 0
    round_begin = worker * 0
    left = units
    size = round_size(left, workers, tail)
    while chunk < chunks:
        round_first, round_begin, left, size = follow_rounds(
            chunk, round_first, round_begin, left, size, workers, tail
        )
        begin_unit = round_begin + (chunk - round_first) * size
        position = begin_unit.to(tl.int64) * UNIT
        stop = tl.minimum(position + size.to(tl.int64) * UNIT, slots * NUM_KV_HEADS)
        while position < stop:
            head = position // slots
            head_begin = head * slots
            slot = position - head_begin
            request = find_request(indptr_ptr, first_entry + (slot // PAGE_SIZE).to(tl.int32), batch, SEARCH)
            entry = tl.load(indptr_ptr + request)
            pages = tl.load(indptr_ptr + request + 1) - entry
            length = pages
            broken = length < 1
            if PAGE_SIZE > 1:
                last = tl.load(last_page_len_ptr + request)
                broken = broken | (last < 0) | (last > PAGE_SIZE)
                length = tl.where(broken, 0, (pages - 1) * PAGE_SIZE + last)
            segment_begin = head_begin + (entry - first_entry).to(tl.int64) * PAGE_SIZE
            segment_end = segment_begin + pages.to(tl.int64) * PAGE_SIZE
            begin_token = (position - segment_begin).to(tl.int32)
            part_end = tl.minimum(segment_end, stop)
            end_token = tl.minimum((part_end - segment_begin).to(tl.int32), length)

            row = request.to(tl.int64)
            head_row = head.to(tl.int32) * GROUP
            query, undo = load_query(
                q_ptr + row * q_batch_stride + head_row.to(tl.int64) * q_head_stride,
                q_head_stride,
                GROUP,
                ROWS,
                HEAD_DIM,
                COMPUTE,
            )
            scale = logit_scale
            v_scale = 1.0
            if k_scale_ptr is not None:
                scale *= tl.load(k_scale_ptr + head)
                v_scale = tl.load(v_scale_ptr + head)
            if STREAMS:
                top, total, acc = attend_streams(
                    query,
                    undo * scale,
                    k_ptr + head * k_head_stride,
                    v_ptr + head * v_head_stride,
                    indices_ptr,
                    entry,
                    begin_token,
                    end_token,
                    num_pages,
                    num_indices,
                    k_page_stride,
                    v_page_stride,
                    K_SLOT_STRIDE,
                    V_SLOT_STRIDE,
                    ROWS,
                    HEAD_DIM,
                    PAGE_SIZE,
                    TILE // RUN,
                    RUN,
                    PAIRS,
                    COMPUTE,
                )
            else:
                top, total, acc = attend_shared(
                    query,
                    undo * scale,
                    k_ptr + head * k_head_stride,
                    v_ptr + head * v_head_stride,
                    indices_ptr,
                    entry,
                    begin_token,
                    end_token,
                    num_pages,
                    num_indices,
                    k_page_stride,
                    v_page_stride,
                    K_SLOT_STRIDE,
                    V_SLOT_STRIDE,
                    ROWS,
                    HEAD_DIM,
                    PAGE_SIZE,
                    TILE,
                    COMPUTE,
                )
            total = tl.where(broken, float("nan"), total)
            out_row = row * (NUM_KV_HEADS * GROUP) + head_row
            if (position == segment_begin) & (part_end == segment_end):
                store_output(out_ptr, lse_ptr, out_row, top, total, acc, v_scale, GROUP, ROWS, HEAD_DIM)
            else:
                finish_cut_segment(
                    acc_ptr,
                    stats_ptr,
                    counters_ptr,
                    out_ptr,
                    lse_ptr,
                    out_row,
                    v_scale,
                    chunk,
                    chunk_of((segment_begin // UNIT).to(tl.int32), units, workers, tail),
                    chunk_of(((segment_end - 1) // UNIT).to(tl.int32), units, workers, tail),
                    top,
                    total,
                    acc,
                    MAX_CHUNKS,
                    GROUP,
                    ROWS,
                    MERGE_ROWS,
                    HEAD_DIM,
                    FAN,
                    UNROLL,
                )
            # A broken kv_indptr may name an empty range: the walk goes on all the same.
            position = tl.maximum(part_end, position + 1)

        if chunks > workers:
            chunk = workers + tl.atomic_add(counters_ptr, 1, sem="relaxed")
            # Every worker draws until it draws too much: this is the last of all draws.
            if chunk == chunks + workers - 1:
                tl.store(counters_ptr, 0)
        else:
            chunk = chunks

    # Requests without pages have no slot and so no segment. Workers without a chunk come here first.
    row = tl.arange(0, MERGE_ROWS)
    dim = tl.arange(0, HEAD_DIM)
    request = workers - 1 - worker
    while request < batch:
        if tl.load(indptr_ptr + request + 1) <= tl.load(indptr_ptr + request):
            for head in range(NUM_KV_HEADS):
                rows = (request.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + row
                tl.store(lse_ptr + rows, float("-inf"), mask=row < GROUP)
                tl.store(out_ptr + rows[:, None] * HEAD_DIM + dim[None, :], 0.0, mask=row[:, None] < GROUP)
        request += workers
