"""One part's streams: every warp attends to tokens of its own, so that no step waits for another warp.

A tile is STREAMS x RUN tokens; stream s (one warp's, once compiled) has RUN that follow each other. Each
stream keeps a maximum, a sum and an output of its own. They meet once, at the end of the part, always in
the same order.
"""

import triton
import triton.language as tl


@triton.jit
def load_query(
    q_ptr,
    q_head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The group's query rows [ROWS, HEAD_DIM] as `COMPUTE`, and the factors [ROWS] that undo their scaling.

    Widened caches are multiplied in fp16, whose range bf16 queries can exceed: each row is brought near 1 by
    an exact power of two first. A bf16 cache needs none of it.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    query = tl.load(q_ptr + row[:, None] * q_head_stride + dim[None, :], mask=row[:, None] < GROUP, other=0.0)
    if tl.float16 != COMPUTE:
        return query.to(COMPUTE), tl.full([ROWS], 1.0, tl.float32)
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    undo = (exponent << 23).to(tl.float32, bitcast=True)
    return (wide * shrink[:, None]).to(COMPUTE), undo


@triton.jit
def widen_pairs(pairs):
    """Two fp8 values of each int16 as fp16, exactly: those of even dims and those of odd ones.

    Elements are taken two at a time, whichever they are: bytes 0, 2 and bytes 1, 3 change places and widen.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }""",
        "=r,=r,r",
        args=[pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def locate(
    start,
    first_entry,
    end,
    indices_ptr,
    num_pages,
    num_indices,
    STREAMS: tl.constexpr,
    RUN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Page ids, slots, rows that may be read and ids that may not, of the tile at token `start`.

    A page size that is a multiple of RUN puts a stream's tokens in one page: shapes are [STREAMS, 1], else
    [STREAMS, RUN]. `rows` counts the tokens that may be read, from a shape's own token on.
    """
    stream = tl.arange(0, STREAMS)
    if PAGE_SIZE % RUN == 0:
        token = start + stream[:, None] * RUN
    else:
        token = start + stream[:, None] * RUN + tl.arange(0, RUN)[None, :]
    entry = first_entry + token // PAGE_SIZE
    inside = token < end
    page = tl.load(indices_ptr + entry, mask=inside & (entry < num_indices), other=-1)
    known = (page >= 0) & (page < num_pages)
    rows = tl.where(known, end - token, 0)
    return page.to(tl.int64), (token % PAGE_SIZE).to(tl.int64), rows, (inside & (known == 0)).to(tl.int32)


@triton.jit
def add_streams(values, STREAMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum [ROWS, WIDTH] of all streams' values.

    Halves are added, after one exchange in which a thread gets all streams' values of its place: tl.sum would
    exchange and shuffle number by number. Up to 64 streams.
    """
    values = tl.permute(values, (1, 2, 0))
    for level in tl.static_range(6):
        if STREAMS >> level > 1:
            left, right = tl.split(tl.reshape(values, [ROWS, WIDTH, STREAMS >> (level + 1), 2]))
            values = left + right
    return tl.reshape(values, [ROWS, WIDTH])


@triton.jit
def attend_streams(
    query,  # [ROWS, HEAD_DIM]
    logit_scale,  # [ROWS] fp32: logits in base-2 units
    k_head_ptr,
    v_head_ptr,
    indices_ptr,
    first_entry,  # the request's first entry in kv_indices
    begin,  # tokens of the request, [begin, end); begin is a multiple of RUN where PAGE_SIZE is one
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
    STREAMS: tl.constexpr,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Running maximum [ROWS], sum [ROWS] and weighted V [ROWS, HEAD_DIM] (all fp32) of tokens [begin, end).

    A token whose page id is not in the pool is never loaded; it makes the sum NaN, and so every output of the
    request. Slots past `end` are never loaded either: what they hold cannot enter through 0 * NaN.

    PAIRS reads fp8 rows as int16, two dims each, and multiplies even and odd dims apart: a fragment of V for
    the tensor cores then comes from shared memory in words of 16 bits, as it does for bf16.
    """
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    K_SLOT: tl.constexpr = K_SLOT_STRIDE // 2 if PAIRS else K_SLOT_STRIDE
    V_SLOT: tl.constexpr = V_SLOT_STRIDE // 2 if PAIRS else V_SLOT_STRIDE
    RUNS: tl.constexpr = 1 if PAGE_SIZE % RUN == 0 else RUN
    NOTHING: tl.constexpr = 0 if PAIRS else 0.0  # Triton 3.6 makes no fp8 of an integer
    if PAIRS:
        even, odd = tl.split(tl.reshape(query, [ROWS, WIDTH, 2]))
        k_head_ptr = k_head_ptr.to(tl.pointer_type(tl.int16))
        v_head_ptr = v_head_ptr.to(tl.pointer_type(tl.int16))
        k_page_stride = k_page_stride // 2
        v_page_stride = v_page_stride // 2
        odd = tl.broadcast_to(odd[None, :, :], [STREAMS, ROWS, WIDTH])
    else:
        even = query
    even = tl.broadcast_to(even[None, :, :], [STREAMS, ROWS, WIDTH])
    dim = tl.arange(0, WIDTH)[None, None, :]
    run = tl.arange(0, RUN)
    if RUNS == 1:
        step = run[None, :]
        k_row = (run * K_SLOT)[None, :, None] + dim
        v_row = (run * V_SLOT)[None, :, None] + dim
    else:
        step = tl.full([1, RUN], 0, tl.int32)
        k_row = dim
        v_row = dim
    lane = tl.arange(0, STREAMS)[:, None] * RUN + run[None, :]
    bad = tl.full([STREAMS, RUNS], 0, tl.int32)
    top = tl.full([STREAMS, ROWS], float("-inf"), tl.float32)
    total = tl.full([STREAMS, ROWS, RUN], 0.0, tl.float32)
    acc = tl.full([STREAMS, ROWS, WIDTH], 0.0, tl.float32)
    acc_odd = acc
    scale = logit_scale[None, :, None]
    for start in range(begin, end, STREAMS * RUN):
        page, slot, rows, unknown = locate(
            start, first_entry, end, indices_ptr, num_pages, num_indices, STREAMS, RUN, PAGE_SIZE
        )
        bad |= unknown
        live = (step < rows)[:, :, None]
        k_offset = (page * k_page_stride + slot * K_SLOT)[:, :, None]
        v_offset = (page * v_page_stride + slot * V_SLOT)[:, :, None]
        k_tile = tl.load(k_head_ptr + k_offset + k_row, mask=live, other=NOTHING)
        v_tile = tl.load(v_head_ptr + v_offset + v_row, mask=live, other=NOTHING)
        if PAIRS:
            k_even, k_odd = widen_pairs(k_tile)
            v_even, v_odd = widen_pairs(v_tile)
            logits = tl.dot(odd, tl.trans(k_odd, 0, 2, 1))
            logits = tl.dot(even, tl.trans(k_even, 0, 2, 1), logits)
        else:
            v_even = v_tile.to(COMPUTE)
            logits = tl.dot(even, tl.trans(k_tile.to(COMPUTE), 0, 2, 1))
        logits = tl.where((lane < end - start)[:, None, :], logits * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=2))
        # -inf - -inf would be NaN where nothing was seen yet.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logits - pivot[:, :, None])
        shrink = tl.exp2(top - pivot)[:, :, None]
        total = total * shrink + weight
        weight = weight.to(COMPUTE)
        acc = tl.dot(weight, v_even, acc * shrink)
        if PAIRS:
            acc_odd = tl.dot(weight, v_odd, acc_odd * shrink)
        top = new_top

    best = tl.max(top, axis=0)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    factor = tl.exp2(top - pivot[None, :])
    sums = tl.sum(tl.sum(total, axis=2) * factor, axis=0)
    sums = tl.where(tl.max(tl.max(bad, axis=1), axis=0) > 0, float("nan"), sums)
    values = add_streams(acc * factor[:, :, None], STREAMS, ROWS, WIDTH)
    if PAIRS:
        values_odd = add_streams(acc_odd * factor[:, :, None], STREAMS, ROWS, WIDTH)
        values = tl.reshape(tl.join(values, values_odd), [ROWS, HEAD_DIM])
    return best, sums, values
