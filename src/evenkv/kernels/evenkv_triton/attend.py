"""A part whose outputs are too many for one warp's registers: all warps share each tile's tokens."""

import triton
import triton.language as tl


@triton.jit
def attend_shared(
    query,  # [ROWS, HEAD_DIM]
    logit_scale,  # [ROWS] fp32: logits in base-2 units
    k_head_ptr,
    v_head_ptr,
    indices_ptr,
    first_entry,  # the request's first entry in kv_indices
    begin,  # tokens of the request, [begin, end)
    end,
    num_pages,
    num_indices,
    k_page_stride,
    v_page_stride,
    K_SLOT_STRIDE: tl.constexpr,
    V_SLOT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Running maximum [ROWS], sum [ROWS] and weighted V [ROWS, HEAD_DIM] (all fp32) of tokens [begin, end).

    A token whose page id is not in the pool is never loaded; its weight is NaN, which reaches every output of
    the request. Slots past `end` are never loaded either: what they hold cannot enter through 0 * NaN.
    """
    dim = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, TILE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, HEAD_DIM], 0.0, tl.float32)
    for start in range(begin, end, TILE):
        token = start + lane
        entry = first_entry + token // PAGE_SIZE
        slot = (token % PAGE_SIZE).to(tl.int64)
        inside = token < end
        page = tl.load(indices_ptr + entry, mask=inside & (entry < num_indices), other=-1)
        known = (page >= 0) & (page < num_pages)
        page = page.to(tl.int64)
        k_row = page * k_page_stride + slot * K_SLOT_STRIDE
        v_row = page * v_page_stride + slot * V_SLOT_STRIDE
        k_tile = tl.load(k_head_ptr + k_row[:, None] + dim[None, :], mask=known[:, None], other=0.0)
        v_tile = tl.load(v_head_ptr + v_row[:, None] + dim[None, :], mask=known[:, None], other=0.0)

        logits = tl.dot(query, tl.trans(k_tile.to(COMPUTE))) * logit_scale[:, None]
        logits = tl.where(known[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        # -inf - -inf would be NaN where nothing was seen yet.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logits - pivot[:, None])
        weight = tl.where((inside & (known == 0))[None, :], float("nan"), weight)
        shrink = tl.exp2(top - pivot)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(COMPUTE), v_tile.to(COMPUTE), acc * shrink[:, None])
        top = new_top
    return top, total, acc
