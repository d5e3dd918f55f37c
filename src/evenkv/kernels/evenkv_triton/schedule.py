"""The chunk schedule: how the flattened slots of all KV heads are cut, in plain integers.

Position = head * slots_per_head + slot (head-major). Everything is counted in units of 16 slots, so 32-bit
integers reach 3.4e10 slots. `workers` programs share the `units`:

- small problems (at most `EVEN_UNITS` a worker) take one round of equal chunks: a second would cost more in
  merges than it evens out;
- larger ones take rounds of `workers` chunks, each round half of what is left, until chunks reach the tail
  size: large first, small last, so that SMs of unequal bandwidth end together.

Boundaries depend on `units` and `workers` alone, never on who computes a chunk: that is what makes the bits
repeatable. At most `CHUNKS_PER_WORKER * workers` chunks exist (host and device size the scratch by it).
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(16)
FITTING_GROWTH = tl.constexpr(25)
TAIL_PARTS = tl.constexpr(64)
CHUNKS_PER_WORKER = 8


@triton.jit
def tail_size(units, workers, average, MIN_UNITS: tl.constexpr, EVEN_UNITS: tl.constexpr):
    """Units in the smallest chunk: 1/64 of a worker's share, or the equal share of a small problem.

    That share is made to end where requests of `average` units do, if it grows little by it: where all have
    that length, none is cut without need. Mixed batches get chunks a little longer, no more.
    """
    even = units <= workers * EVEN_UNITS
    parts = workers if even else workers * TAIL_PARTS
    equal = max((units + parts - 1) // parts, MIN_UNITS)
    average = max(average, 1)
    pieces = max(average // equal, 1)
    whole = (equal + average - 1) // average * average
    fitting = whole if average < equal else (average + pieces - 1) // pieces
    return fitting if even & ((fitting - equal) * FITTING_GROWTH <= equal) else equal


@triton.jit
def round_size(left, workers, tail):
    """Units in each chunk of the round that starts with `left` units to hand out."""
    return max((left + 2 * workers - 1) // (2 * workers), tail)


@triton.jit
def follow_rounds(chunk, first, begin, left, size, workers, tail):
    """Go on to the round of `chunk`: its first chunk, first unit, units left to it, size of its chunks.

    The chunk is units [begin + (chunk - first) * size, + size), cut off at the end of all units. The numbers
    of a worker's chunks only grow, so it follows the rounds rather than searching them each time.
    """
    while (size > tail) & (chunk - first >= workers):
        begin += workers * size
        left -= workers * size
        first += workers
        size = round_size(left, workers, tail)
    return first, begin, left, size


@triton.jit
def count_chunks(units, workers, tail):
    """Number of chunks, 0 for no units."""
    left = units
    first = units * 0
    size = round_size(left, workers, tail)
    while size > tail:
        left -= workers * size
        first += workers
        size = round_size(left, workers, tail)
    return first + (left + tail - 1) // tail


@triton.jit
def chunk_of(unit, units, workers, tail):
    """The chunk that holds `unit`."""
    left = units
    first = units * 0
    begin = units * 0
    size = round_size(left, workers, tail)
    while (size > tail) & (unit - begin >= workers * size):
        begin += workers * size
        left -= workers * size
        first += workers
        size = round_size(left, workers, tail)
    return first + (unit - begin) // size


@triton.jit
def find_request(indptr_ptr, page, batch, BLOCK: tl.constexpr):
    """The request that lists entry `page` of kv_indices: requests that end at or before it are counted.

    A counting scan, not a binary search: its loads do not depend on each other.
    """
    passed = page * 0
    for first in range(0, batch, BLOCK):
        request = first + tl.arange(0, BLOCK)
        ends = tl.load(indptr_ptr + 1 + request, mask=request < batch, other=2147483647)
        passed += tl.sum((ends <= page).to(tl.int32), axis=0)
    return tl.minimum(passed, batch - 1)
