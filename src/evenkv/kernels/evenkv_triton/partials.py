"""Partial results in scratch: where a cut segment's parts lie, how they are merged and written out.

A chunk leaves at most two, in slot 2 * chunk + {0: of the segment it continues, 1: of the segment it starts}.
A slot holds acc [GROUP, HEAD_DIM] and, in a second array, running maximum and sum [2, GROUP], all fp32.
"""

import triton
import triton.language as tl


@triton.jit
def store_partial(
    acc_ptr, stats_ptr, slot, top, total, acc, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    slot = slot.to(tl.int64)
    tl.store(stats_ptr + slot * (2 * GROUP) + row, top, mask=row < GROUP)
    tl.store(stats_ptr + slot * (2 * GROUP) + GROUP + row, total, mask=row < GROUP)
    tile = row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(acc_ptr + slot * (GROUP * HEAD_DIM) + tile, acc, mask=row[:, None] < GROUP)


@triton.jit
def merge_partials(
    acc_ptr,
    stats_ptr,
    start_chunk,
    first,
    count,
    step,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FAN: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge the partials of chunks first, first + step, ... (`count` of them), always in that order.

    The maximum is found first, over all of them at once: in the sum no load waits for an earlier partial.
    `.cg`: other SMs wrote these, so L1 is not asked.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    tile = row[:, None] * HEAD_DIM + dim[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for j in range(0, count, FAN):
        part = j + tl.arange(0, FAN)
        chunk = first + part * step
        slot = 2 * chunk + (chunk == start_chunk).to(tl.int32)
        tops = tl.load(
            stats_ptr + slot.to(tl.int64)[:, None] * (2 * GROUP) + row[None, :],
            mask=(part < count)[:, None] & (row < GROUP)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        top = tl.maximum(top, tl.max(tops, axis=0))
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, HEAD_DIM], 0.0, tl.float32)
    for j in range(0, count, UNROLL):
        part = j + tl.arange(0, UNROLL)
        chunk = first + part * step
        slot = (2 * chunk + (chunk == start_chunk).to(tl.int32)).to(tl.int64)
        live = (part < count)[:, None] & (row < GROUP)[None, :]
        stats = stats_ptr + slot[:, None] * (2 * GROUP) + row[None, :]
        part_top = tl.load(stats, mask=live, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats + GROUP, mask=live, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            acc_ptr + slot[:, None, None] * (GROUP * HEAD_DIM) + tile[None, :, :],
            mask=live[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        weight = tl.exp2(part_top - pivot[None, :])
        total += tl.sum(weight * part_total, axis=0)
        acc += tl.sum(weight[:, :, None] * part_acc, axis=0)
    return top, total, acc


@triton.jit
def store_output(
    out_ptr,
    lse_ptr,
    first_row,
    top,
    total,
    acc,
    v_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write one (request, KV head): output rows from `first_row` and base-2 lse; no tokens: 0 and -inf."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    nothing = total == 0.0
    scale = tl.where(nothing, 0.0, v_scale / tl.where(nothing, 1.0, total))
    values = (acc * scale[:, None]).to(out_ptr.dtype.element_ty)
    first_row = first_row.to(tl.int64)
    tile = row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + first_row * HEAD_DIM + tile, values, mask=row[:, None] < GROUP)
    log = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(lse_ptr + first_row + row, log, mask=row < GROUP)
