"""Partial results in scratch: how a cut request's parts are kept, merged and written out.

A place (cut.py) holds acc [GROUP, HEAD_DIM] and, in a second array, running maximum and sum [2, GROUP], all
fp32.
"""

import triton
import triton.language as tl

from .cut import place_of


@triton.jit
def store_partial(
    acc_ptr,
    stats_ptr,
    place,
    top,
    total,
    acc,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    place = place.to(tl.int64)
    tl.store(stats_ptr + place * (2 * GROUP) + row, top, mask=row < GROUP)
    tl.store(stats_ptr + place * (2 * GROUP) + GROUP + row, total, mask=row < GROUP)
    tile = row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(acc_ptr + place * (GROUP * HEAD_DIM) + tile, acc, mask=row[:, None] < GROUP)


@triton.jit
def merge_partials(
    acc_ptr,
    stats_ptr,
    unit_place,  # the unit's first place
    first,
    count,
    even,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge the partials of a request's `count` parts, always in their order: [ROWS], [ROWS, HEAD_DIM].

    UNROLL of them are loaded side by side, so that they take one trip to memory together. `.cg`: other SMs
    wrote these, so L1 is not asked.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    tile = row[:, None] * HEAD_DIM + dim[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, HEAD_DIM], 0.0, tl.float32)
    for batch in range(0, count, UNROLL):
        part = batch + tl.arange(0, UNROLL)
        place = (unit_place + place_of(part, first, count, even)).to(tl.int64)
        live = (part < count)[:, None] & (row < GROUP)[None, :]
        stats = stats_ptr + place[:, None] * (2 * GROUP) + row[None, :]
        part_top = tl.load(stats, mask=live, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats + GROUP, mask=live, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            acc_ptr + place[:, None, None] * (GROUP * HEAD_DIM) + tile[None, :, :],
            mask=live[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        # -inf - -inf would be NaN where nothing was seen yet.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - pivot)
        weight = tl.exp2(part_top - pivot[None, :])
        total = total * shrink + tl.sum(weight * part_total, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * part_acc, axis=0)
        top = new_top
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
