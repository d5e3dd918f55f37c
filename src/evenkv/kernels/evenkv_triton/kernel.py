"""Paged GQA decode in one launch, no host plan: the device code of evenkv_triton.

Grid: a program for each number of each unit (KV head), the units of a number side by side. A program finds
the part of a request that its number stands for (cut.py), attends to it and leaves; numbers that are
nobody's leave at once. The hardware hands out programs as others leave: there is no other balancing.

- A request that is one part is written to the output at once.
- The parts of a cut one are left in scratch; the program that brings the last adds all up, in order.

Who merges depends on timing; what is merged, and in which order, does not: same inputs, same bits.

Lengths and page ids are read here, at every launch. Page ids outside the pool, last_page_len outside
[0, PAGE_SIZE] and pages beyond kv_indices are never followed: they turn that request's output and lse into
NaN.

counters: arrivals of a cut request's parts in a unit, at the place where the request's partials begin. All
zero between launches: whoever brings the last part sets its counter back, so nothing has to be zeroed.
"""

import triton
import triton.language as tl

from .attend import attend_shared
from .cut import find_part, find_request, place_of, read_lengths, steps_of_part
from .partials import merge_partials, store_output, store_partial
from .streams import attend_streams, load_query


@triton.jit
def finish_part(
    acc_ptr,
    stats_ptr,
    counters_ptr,
    out_ptr,
    lse_ptr,
    out_row,
    v_scale,
    unit_place,
    first,
    index,
    count,
    even,
    top,
    total,
    acc,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Leave the partial of a cut request's part; with its last one, merge all and write the output.

    The barrier makes the partial visible to the thread that does the acq_rel add; the add hands it on.
    """
    place = unit_place + place_of(index, first, count, even)
    store_partial(acc_ptr, stats_ptr, place, top, total, acc, GROUP, ROWS, HEAD_DIM)
    tl.debug_barrier()
    counter_ptr = counters_ptr + unit_place + first
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1:
        tl.store(counter_ptr, 0)
        all_top, all_total, all_acc = merge_partials(
            acc_ptr, stats_ptr, unit_place, first, count, even, GROUP, MERGE_ROWS, HEAD_DIM, UNROLL
        )
        store_output(
            out_ptr, lse_ptr, out_row, all_top, all_total, all_acc, v_scale, GROUP, MERGE_ROWS, HEAD_DIM
        )


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_pages",
        "num_indices",
        "even_parts",
        "even_tokens",
        "even_pages",
        "multiplier",
        "shift",
        "most_scale",
        "places",
    ]
)
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
    acc_ptr,  # fp32 [NUM_KV_HEADS * places, GROUP, HEAD_DIM]
    stats_ptr,  # fp32 [NUM_KV_HEADS * places, 2, GROUP]
    counters_ptr,  # int32 [NUM_KV_HEADS * places], zero between launches
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
    even_parts,  # these as in cut.Cut
    even_tokens,
    even_pages,
    multiplier,
    shift,
    most_scale,
    places,
    K_SLOT_STRIDE: tl.constexpr,  # known, so that a page's rows lie at fixed distances
    V_SLOT_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP padded for tl.dot
    MERGE_ROWS: tl.constexpr,  # GROUP padded to a power of two
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STEP: tl.constexpr,  # tokens: parts begin at multiples of it
    TILE: tl.constexpr,  # tokens attended to at once: STEP, but for the interpreter
    STREAMS: tl.constexpr,  # whether each warp has tokens of its own,
    RUN: tl.constexpr,  # this many of a tile; divides STEP
    PAIRS: tl.constexpr,  # whether fp8 rows may be read as int16
    CUT: tl.constexpr,  # whether a request may have several parts; else a number is a request
    UNROLL: tl.constexpr,
    SEARCH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0)
    number = program // NUM_KV_HEADS
    head = program % NUM_KV_HEADS
    request = number
    even = True
    scale = 0
    listed = num_indices
    if CUT:
        even, scale, listed = read_lengths(indptr_ptr, batch, num_indices, even_pages, most_scale, SEARCH)
        if even:
            request = number // even_parts
        else:
            request = find_request(
                indptr_ptr, number, batch, listed, scale, multiplier, shift, PAGE_SIZE, SEARCH
            )
    if request < batch:
        entry = tl.load(indptr_ptr + request)
        pages = tl.load(indptr_ptr + request + 1) - entry
        last = PAGE_SIZE
        broken = (entry < 0) | (entry > listed - pages)
        if PAGE_SIZE > 1:
            last = tl.load(last_page_len_ptr + request)
            broken = broken | (last < 0) | (last > PAGE_SIZE)
        broken = broken & (pages > 0)
        length = tl.where(broken | (pages <= 0), 0, (pages - 1) * PAGE_SIZE + last)
        index = 0
        count = 1
        first = 0
        begin = 0
        end = length
        if CUT:
            slot = tl.minimum(tl.maximum(entry, 0), listed) * PAGE_SIZE
            index, count, first = find_part(
                number, request, slot, length, even, scale, even_parts, even_tokens, multiplier, shift
            )
            begin, end = steps_of_part((length + STEP - 1) // STEP, index, count)
            begin = begin * STEP
            end = tl.minimum(end * STEP, length)
        if (index >= 0) & (index < count):
            row = request.to(tl.int64)
            unit = head.to(tl.int64)
            query, undo = load_query(
                q_ptr + row * q_batch_stride + unit * GROUP * q_head_stride,
                q_head_stride,
                GROUP,
                ROWS,
                HEAD_DIM,
                COMPUTE,
            )
            logit_factor = logit_scale
            v_scale = 1.0
            if k_scale_ptr is not None:
                logit_factor *= tl.load(k_scale_ptr + head)
                v_scale = tl.load(v_scale_ptr + head)
            if STREAMS:
                top, total, acc = attend_streams(
                    query,
                    undo * logit_factor,
                    k_ptr + unit * k_head_stride,
                    v_ptr + unit * v_head_stride,
                    indices_ptr,
                    entry,
                    begin,
                    end,
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
                    undo * logit_factor,
                    k_ptr + unit * k_head_stride,
                    v_ptr + unit * v_head_stride,
                    indices_ptr,
                    entry,
                    begin,
                    end,
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
            # A request without tokens walked none: 0 and -inf, or NaN where its table is bad.
            total = tl.where(broken, float("nan"), total)
            out_row = (row * NUM_KV_HEADS + unit) * GROUP
            if count == 1:
                store_output(out_ptr, lse_ptr, out_row, top, total, acc, v_scale, GROUP, ROWS, HEAD_DIM)
            else:
                finish_part(
                    acc_ptr,
                    stats_ptr,
                    counters_ptr,
                    out_ptr,
                    lse_ptr,
                    out_row,
                    v_scale,
                    head * places,
                    first,
                    index,
                    count,
                    even,
                    top,
                    total,
                    acc,
                    GROUP,
                    ROWS,
                    MERGE_ROWS,
                    HEAD_DIM,
                    UNROLL,
                )
