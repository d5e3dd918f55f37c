"""How requests are cut in parts: plain integers, from shapes on the host and from lengths on the device.

A unit is a KV head. A part is a run of steps of one request in one unit: what a program takes. The host
settles what a part may hold (`choose_cut`); lengths, which only the device knows, decide between two ways
to number the parts of a unit:

- Even: no request has more than `even_pages` pages. Each one owns `even_parts` numbers.
- Uneven: parts have at most `part_tokens` tokens. Request r's numbers begin at first_slot(r) // part_tokens
  + r, which leaves each request enough of them without a scan over lengths. Some are nobody's.

Shapes speak of kv_indices, which may be longer than kv_indptr counts (as in the buffers of a captured
graph). Then lengths in tokens shrink by a power of two, the scale.

Boundaries depend on lengths and shapes, never on who computes a part: the bits stay the same. 32 bits hold
every sum of two slot counts (`MOST_SLOTS`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .tuning import (
    EVEN_100,
    FAIR_PARTS,
    MOST_FAIR_PARTS,
    MOST_PARTS,
    MOST_SCANNED,
    PART_STEPS,
    UNCUT_STEPS,
    UNEVEN_TOKENS,
    UNEVEN_WAVE_TOKENS,
    WAVE_TOKENS,
    WAVES_10,
    WORST_STEPS,
)

MOST_SLOTS = 1 << 30
ALWAYS_EVEN = tl.constexpr((1 << 31) - 1)
NEVER_EVEN = -1


class Cut(NamedTuple):
    """What the kernel takes, in its order. Slots and tokens are of one unit."""

    even_parts: int  # of a request, where no request has more pages than even_pages
    even_tokens: int  # of such a part, about
    even_pages: int  # or ALWAYS_EVEN or NEVER_EVEN
    multiplier: int  # x * multiplier >> shift == x // part_tokens for 0 <= x < 2**31; always 64 bits wide
    shift: int
    most_scale: int  # halvings that leave parts long enough
    places: int  # of partials in scratch, a unit


class Choice(NamedTuple):
    cut: Cut
    uncut: bool  # every request is one part, whatever its length
    numbers: int  # of a unit: programs to launch for it
    part_tokens: int  # of an uneven part, at most; a multiple of the step


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def choose_cut(
    units: int,
    batch: int,
    page_size: int,
    num_indices: int,
    step: int,
    programs: int,
    part_tokens: int | None = None,
) -> Choice:
    """Settle from shapes how a batch may be cut.

    Parameters
    ----------
    units : int
        KV heads.
    batch, page_size, num_indices : int
        Requests (at least 1), slots of a page, entries of kv_indices.
    step : int
        Tokens that a program attends to at once: parts begin at multiples of it.
    programs : int
        That run at once on the device.
    part_tokens : int, optional
        The length of all parts but a request's last, about, whatever the batch: uneven, never scaled.
    """
    items, slots = units * batch, num_indices * page_size
    average = max(1, _ceil_div(slots, batch))
    least = PART_STEPS * step
    waves = items > programs  # more than run at once
    parts = 1
    if part_tokens is not None:
        even_pages = NEVER_EVEN
        most = part_tokens
    else:
        if waves:
            if items * 10 < programs * WAVES_10:
                parts = min(_ceil_div(programs * WAVES_10, items * 10), average // WAVE_TOKENS)
        elif average > UNCUT_STEPS * step:
            parts = min(programs // items, average // least, MOST_PARTS)
        parts = max(1, parts)
        even_pages = average * EVEN_100 // 100 // page_size
        if batch == 1:
            even_pages = ALWAYS_EVEN.value
        elif batch > MOST_SCANNED:
            even_pages = NEVER_EVEN
        fair = units * slots // programs
        if waves:
            usual = min(max(average, WAVE_TOKENS), max(fair // FAIR_PARTS, UNEVEN_WAVE_TOKENS))
            most = max(usual, fair // MOST_FAIR_PARTS)
        else:
            wanted = max(fair, _ceil_div(slots, MOST_PARTS))
            most = max(fair // FAIR_PARTS, min(wanted, UNEVEN_TOKENS), least)
        most = min(most, slots)
    even_tokens = _ceil_div(average, parts)
    part_tokens, forced = _ceil_div(max(1, most), step) * step, part_tokens is not None
    # Lengths may be far below what kv_indices could hold, but no part gets less than its steps.
    halved = min(even_tokens, part_tokens) if parts > 1 else part_tokens
    most_scale = 0
    while not forced and halved >> (most_scale + 1) >= least:
        most_scale += 1

    always_even = even_pages == ALWAYS_EVEN.value
    uncut = not forced and parts == 1 and not waves and (always_even or slots <= WORST_STEPS * step)
    if uncut:
        numbers = batch
    else:
        numbers = max(
            0 if even_pages == NEVER_EVEN else parts * batch,
            0 if always_even else batch + slots // part_tokens,
        )
    places = 0
    if not uncut:
        if parts > 1:
            places = parts * batch
        if not always_even and slots > part_tokens:
            places = max(places, 2 * (slots // part_tokens + 1))
    bits = (part_tokens - 1).bit_length()
    multiplier = _ceil_div(1 << (31 + bits), part_tokens)
    cut = Cut(parts, even_tokens, even_pages, multiplier, 31 + bits, most_scale, places)
    return Choice(cut, uncut, numbers, part_tokens)


@triton.jit
def scale_of(pages, num_indices, most_scale):
    """How often lengths are halved where kv_indptr counts `pages` of `num_indices`."""
    scale = pages * 0
    while (scale < most_scale) & (pages <= (num_indices >> (scale + 1))):
        scale += 1
    return scale


@triton.jit
def divide_scaled(slot, scale, multiplier, shift):
    """slot // (part_tokens / 2**scale). Of two slots, it adds up to at most what it gives for their sum."""
    return ((slot * multiplier) >> (shift - scale)).to(tl.int32)


@triton.jit
def find_part(number, request, slot, length, even, scale, even_parts, even_tokens, multiplier, shift):
    """Which part of its request a number stands for: index, count, and where the request's places begin.

    `slot`: the request's first; `length`: its tokens. The number is nobody's unless 0 <= index < count. A
    request without tokens has one part.
    """
    if even:
        first = request * even_parts
        index = number - first
        tokens = even_tokens >> scale
        count = tl.minimum((length + tokens - 1) // tokens, even_parts)
    else:
        first = divide_scaled(slot, scale, multiplier, shift)
        index = number - request - first
        count = divide_scaled(tl.maximum(length - 1, 0), scale, multiplier, shift) + 1
    return index, tl.maximum(count, 1), first


@triton.jit
def steps_of_part(steps, index, count):
    """The part's steps, [begin, end): a request's are dealt evenly to its parts."""
    each = steps // count
    more = steps - each * count
    begin = each * index + tl.minimum(index, more)
    return begin, begin + each + (index < more).to(tl.int32)


@triton.jit
def place_of(part, first, count, even):
    """The place of a part's partial within the unit's.

    Uneven: two cut requests may share a part_tokens' worth of slots, one with its last part and one with its
    first.
    """
    last = (part == count - 1).to(tl.int32)
    return tl.where(even, first + part, 2 * (first + part) + last)


@triton.jit
def read_lengths(indptr_ptr, batch, num_indices, even_pages, most_scale, SEARCH: tl.constexpr):
    """Whether the batch is even, its scale, and the entries of kv_indices that it lists.

    kv_indptr that decreases counts as even: who owns a number does not depend on its order then, so that no
    part stays without a program and no counter is left behind. (Beyond MOST_SCANNED nobody looks.)
    """
    listed = tl.minimum(tl.maximum(tl.load(indptr_ptr + batch), 0), num_indices)
    scale = scale_of(listed, num_indices, most_scale)
    even = even_pages == ALWAYS_EVEN
    if (even_pages >= 0) & (even_pages < ALWAYS_EVEN):
        longest = tl.full([SEARCH], 0, tl.int32)
        for block in range(0, batch, SEARCH):
            request = block + tl.arange(0, SEARCH)
            begin = tl.load(indptr_ptr + request, mask=request < batch, other=0)
            pages = tl.load(indptr_ptr + 1 + request, mask=request < batch, other=0) - begin
            longest = tl.maximum(longest, tl.where(pages < 0, ALWAYS_EVEN, pages))
        most = tl.max(longest, axis=0)
        even = (most <= (even_pages >> scale)) | (most == ALWAYS_EVEN)
    return even, scale, listed


@triton.jit
def begins_by(indptr_ptr, request, live, number, listed, scale, multiplier, shift, PAGE_SIZE: tl.constexpr):
    """Whether a request's first number is at most `number`; entries that are not live do not."""
    page = tl.load(indptr_ptr + request, mask=live, other=0)
    slot = tl.minimum(tl.maximum(page, 0), listed) * PAGE_SIZE
    return (live & (divide_scaled(slot, scale, multiplier, shift) + request <= number)).to(tl.int32)


@triton.jit
def find_request(
    indptr_ptr,
    number,
    batch,
    listed,
    scale,
    multiplier,
    shift,
    PAGE_SIZE: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """The request that owns an uneven number, or `batch`.

    Entries that begin by the number are counted, with loads that do not depend on each other: batches below
    SEARCH take one trip to memory, those up to SEARCH**2 two.
    """
    lane = tl.arange(0, SEARCH)
    low = number * 0  # the count lies in [low, high]
    high = batch + 1
    while high - low > SEARCH:
        stride = (high - low + SEARCH) // (SEARCH + 1)
        probe = low + stride * (lane + 1) - 1
        below = begins_by(
            indptr_ptr, probe, probe < high, number, listed, scale, multiplier, shift, PAGE_SIZE
        )
        low += tl.sum(below, axis=0) * stride
        high = tl.minimum(high, low + stride)
    entry = low + lane
    below = begins_by(indptr_ptr, entry, entry < high, number, listed, scale, multiplier, shift, PAGE_SIZE)
    return tl.maximum(low + tl.sum(below, axis=0) - 1, 0)
