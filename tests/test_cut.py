"""How evenkv_cuda cuts requests in parts: cut.h and choose.h, compiled for the host."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from cut_library import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    INDEX,
    INVARIANT_TOKENS,
    KERNEL,
    NUMBER,
    PLACE,
    REQUEST,
    Choice,
    CutLibrary,
    Room,
    Shape,
    Visits,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
H200 = Room.of(132, 3)
A100 = Room.of(108, 2, most_splits=1)
# Of blocks with one head or (short rows) two: tokens of their warps and of a tile, heads, bytes of a row.
BLOCKS = [(64, 16, 1, 256), (32, 16, 1, 512), (128, 32, 1, 128), (128, 32, 1, 64), (64, 32, 2, 128)]
TILES = [block[:2] for block in BLOCKS]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> CutLibrary:
    return CutLibrary(tmp_path_factory.mktemp("cut"))


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    """From one SM to 160; clusters fit worse than blocks do, or not at all."""
    workers = draw(st.one_of(st.sampled_from([1, 2, 80, 108, 132, 148]), st.integers(1, 160)))
    blocks = workers * draw(st.integers(1, 3))
    most = draw(st.sampled_from([1, 2, 4, 8, 8, 8]))
    lost = draw(st.integers(0, 12))  # blocks that clusters cannot use
    fits = [blocks] + [max(blocks - lost * s, 0) // s if s <= most else 0 for s in range(2, 9)]
    return Room(workers, tuple(fits))


@st.composite
def tables(draw: st.DrawFn, most_tokens: int = 60_000) -> tuple[int, list[int], list[int]]:
    """page_size, kv_indptr and lengths: even batches, uneven ones, empty requests, pages without tokens."""
    page_size = draw(st.sampled_from([1, 5, 16, 48, 64, 256]))
    top = draw(st.sampled_from([0, 1, 16, 100, 1000, 5000, most_tokens]))
    batch = draw(
        st.one_of(
            st.integers(1, 12), st.sampled_from([17, 31, 32, 33, 40, 64, 255, 256, 257, 1024, 1025, 1500])
        )
    )
    if batch <= 12:
        each = st.one_of(st.just(0), st.just(top), st.integers(0, top))
        lengths = draw(st.lists(each, min_size=batch, max_size=batch))
    else:
        rng = random.Random(draw(st.integers(0, 1 << 20)))
        lengths = [rng.choice([0, 1, top // 8, rng.randint(0, top // 8)]) for _ in range(batch)]
        lengths[rng.randrange(batch)] = top
    empty_last = draw(st.booleans())  # full last pages are followed by one without tokens
    first = draw(st.sampled_from([0, 0, 0, 1, 700]))  # above 0: the end of a larger batch
    kv_indptr = [first]
    for length in lengths:
        pages = -(-length // page_size) + (empty_last and length > 0 and length % page_size == 0)
        kv_indptr.append(kv_indptr[-1] + pages)
    return page_size, kv_indptr, lengths


def _check_visits(
    shape: Shape, choice: Choice, kv_indptr: Sequence[int], lengths: Sequence[int], v: Visits
) -> None:
    """Every token once, every empty request once, scratch and counters apart."""
    rows, tokens, cut = v.rows.astype(np.int64), np.asarray(lengths, dtype=np.int64), choice.cut
    tiles = -(-tokens // shape.tile_tokens)
    order = np.lexsort((rows[:, INDEX], rows[:, REQUEST]))
    rows, warps = rows[order], v.warps[order].astype(np.int64)

    empty = rows[rows[:, COUNT] == 0, REQUEST]
    assert np.array_equal(empty, np.flatnonzero(tokens == 0)), "a request without tokens is not written once"
    warps, rows = warps[rows[:, COUNT] > 0], rows[rows[:, COUNT] > 0]
    request, count = rows[:, REQUEST], rows[:, COUNT]
    heads = np.flatnonzero(np.diff(request, prepend=-1))  # each request's first part
    tails = np.append(heads[1:], len(rows))[: len(heads)] - 1
    assert np.array_equal(request[heads], np.flatnonzero(tokens > 0)), "requests are missing"
    assert (count == np.repeat(tails - heads + 1, tails - heads + 1)).all(), "not `count` parts"
    assert (rows[:, INDEX] == np.arange(len(rows)) - np.repeat(heads, tails - heads + 1)).all()

    assert (rows[heads, BEGIN] == 0).all() and (rows[tails, END] == tiles[request[tails]]).all()
    inner = np.setdiff1d(np.arange(len(rows)), heads)
    assert (rows[inner, BEGIN] == rows[inner - 1, END]).all(), "parts overlap or leave a gap"
    assert (rows[:, END] > rows[:, BEGIN]).all(), "a part without tiles"
    assert (warps[:, 0, 0] == rows[:, BEGIN]).all() and (warps[:, -1, 1] == rows[:, END]).all()
    assert (warps[:, 1:, 0] == warps[:, :-1, 1]).all(), "warps overlap or leave a gap"
    each = warps[:, :, 1] - warps[:, :, 0]
    assert (each >= 0).all() and (each.max(1) - each.min(1) <= 1).all(), "tiles are not dealt evenly"

    sizes = rows[:, END] - rows[:, BEGIN]
    pages = np.asarray(kv_indptr, dtype=np.int64)
    counted = min(pages[-1], shape.num_kv_indices)
    slots = (counted - pages[request + 1] if v.mirrored else pages[request]) * shape.page_size
    begins = slots + rows[:, BEGIN] * shape.tile_tokens
    late = (begins > v.tail_slot - shape.tile_tokens) & (not v.even and cut.tail_scale > 0 and not cut.dealt)
    for which in (late, ~late):
        longest, shortest = np.zeros(len(lengths), np.int64), np.full(len(lengths), 1 << 40)
        np.maximum.at(longest, request[which], sizes[which])
        np.minimum.at(shortest, request[which], sizes[which])
        assert (longest - shortest <= 1).all(), "a request's tiles are not dealt evenly"
    if not v.even and cut.dealt > 0:
        assert (2 * sizes[count > 1] + 2 >= cut.least_dealt).all(), "a part is too short"
    if not v.even and cut.dealt == 0:
        # Fitted lengths need not be multiples of a tile.
        slack = 2 * shape.tile_tokens if v.part_tokens < cut.part_tokens * (1 - 1e-6) else 0
        most = np.full(len(rows), v.part_tokens * (1 + 1e-6) + slack)
        most[late] = 1.5 * v.part_tokens / 2**cut.tail_scale + 2 * shape.tile_tokens
        most[count == 1] = np.maximum(most[count == 1], cut.whole_tokens)
        assert (sizes * shape.tile_tokens <= most).all(), "a part is too long"

    is_cut = count > 1
    assert not (choice.uncut and is_cut.any())
    places = rows[is_cut, PLACE]
    assert len(np.unique(places)) == len(places), "two partials share a place"
    firsts = rows[heads[is_cut[heads]], FIRST]
    assert len(np.unique(firsts)) == len(firsts), "two requests share arrival counters"
    for used in (places, firsts):
        assert ((used >= 0) & (used < cut.places)).all(), "beyond the scratch of the unit"


def _check_choice(shape: Shape, room: Room, invariant: int, may_stay_uncut: bool, choice: Choice) -> None:
    cut, items = choice.cut, shape.units * shape.batch
    at_once = max(room.clusters[choice.splits - 1], 1)
    assert 1 <= choice.splits <= 8 and (choice.splits == 1 or items <= room.clusters[choice.splits - 1])
    assert 1 <= choice.clusters <= 65535
    assert cut.part_tokens > 0 and cut.part_tokens % shape.tile_tokens == 0
    assert cut.even_parts >= 1
    assert cut.even_parts == 1 or cut.least_even_tokens >= shape.tile_tokens
    if choice.uncut:
        assert may_stay_uncut and not invariant and items <= at_once and choice.clusters == shape.batch
        assert cut.places == 0 and cut.even_parts == 1
        # A request that holds all tokens leaves a warp 56 tiles at most.
        step = shape.block_tokens * choice.splits
        assert shape.slots <= 56 * step or shape.batch == 1
    if invariant:
        assert choice.splits == 1 and cut.even_pages == -1 and cut.part_tokens == invariant
        assert cut.least_share == 1
        assert shape.units * cut.places <= 2 * shape.units * (shape.slots // invariant + 1)
        return
    assert (cut.even_pages == 2**31 - 1) == (shape.batch == 1)
    if cut.dealt > 0:
        blocks = choice.splits if cut.alone else 1  # that take a part each
        assert 1 < shape.batch <= min(32, cut.dealt) and shape.units * cut.dealt <= at_once * blocks
        assert cut.numbers == cut.dealt <= choice.clusters * blocks and cut.places >= 2 * cut.dealt
        assert cut.least_dealt >= 1
        assert not cut.alone or shape.units * choice.clusters <= at_once, "not all at once"
    # Scratch is bounded by the device and the number of units, whatever the batch.
    cells = 1 << cut.tail_scale  # of the tail, for one before it
    teams = at_once * (choice.splits if cut.alone else 1)
    assert shape.units * cut.places <= (cells + 2) * teams + (3 * cells + 2) * shape.units


@settings(max_examples=400, **RELAXED)
@given(
    table=tables(),
    units=st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
    room=rooms(),
    block=st.sampled_from(BLOCKS),
    mode=st.sampled_from(["by shapes", "always cut", "batch-invariant"]),
    spare=st.sampled_from([0, 0, 1, 2.0, 5.0, 70.0]),
)
@example(table=(1, [0, 0, 0], [0, 0]), units=1, room=H200, block=BLOCKS[0], mode="by shapes", spare=0)
@example(
    table=(1, [700, 712, 716], [12, 4]), units=8, room=A100, block=BLOCKS[0], mode="batch-invariant", spare=0
)
def test_every_token_is_visited_once(
    library: CutLibrary,
    table: tuple[int, list[int], list[int]],
    units: int,
    room: Room,
    block: tuple[int, int, int, int],
    mode: str,
    spare: float,
) -> None:
    page_size, kv_indptr, lengths = table
    # Entries of kv_indices that no request owns: a few, or as many as a graph's buffers have.
    listed = kv_indptr[-1] + (int(spare * kv_indptr[-1]) if isinstance(spare, float) else spare)
    shape = Shape(units, len(lengths), page_size, listed, *block)
    invariant = INVARIANT_TOKENS if mode == "batch-invariant" else 0
    stays_whole = mode == "by shapes" and shape.heads == 1
    choice = library.choose(shape, room, invariant, stays_whole)
    _check_choice(shape, room, invariant, stays_whole, choice)
    _check_visits(shape, choice, kv_indptr, lengths, library.visits(shape, choice, kv_indptr, lengths))


def _tables_of(lengths: Sequence[int], page_size: int) -> list[int]:
    return [0, *np.cumsum([-(-length // page_size) for length in lengths]).tolist()]


@settings(max_examples=300, **RELAXED)
@given(
    lengths=st.lists(
        st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=9
    ),
    page_size=st.sampled_from([1, 16, 48]),
    tiles=st.sampled_from(TILES),
    splits=st.integers(1, 8),
    tile_multiple=st.integers(1, 16),
    even_parts=st.integers(1, 40),
    clusters=st.sampled_from([1, 2, 7, 1000]),
    even=st.booleans(),
    tail_scale=st.sampled_from([0, 1, 2, 3, 4]),
    tail_64ths=st.integers(0, 64),
    dealt=st.sampled_from([0, 0, 1, 2, 5, 40, 300]),
    alone=st.booleans(),
)
def test_every_cut_that_the_host_may_ask_for(
    library: CutLibrary,
    lengths: list[int],
    page_size: int,
    tiles: tuple[int, int],
    splits: int,
    tile_multiple: int,
    even_parts: int,
    clusters: int,
    even: bool,
    tail_scale: int,
    tail_64ths: int,
    dealt: int,
    alone: bool,
) -> None:
    """Parts far shorter than any that choose.h asks for."""
    kv_indptr = _tables_of(lengths, page_size)
    shape = Shape(1, len(lengths), page_size, kv_indptr[-1], *tiles)
    choice = library.choose(shape, Room(132, (396,) * 8), tile_multiple * tiles[1], False)
    choice.splits, choice.clusters, cut = splits, clusters, choice.cut
    assert cut.part_tokens == tile_multiple * tiles[1]
    library.share_among(choice, splits * tiles[0] // tiles[1])
    if even:
        cut.even_parts, cut.even_pages = even_parts, 2**31 - 1
        # No more parts than tiles.
        cut.even_tokens = max(-(-shape.slots // shape.batch // even_parts), shape.tile_tokens)
        cut.places = even_parts * shape.batch
    else:
        cut.tail_scale = min(tail_scale, tile_multiple.bit_length() - 1)
        if cut.tail_scale > 0:
            cut.tail_slot = 1 + shape.slots * tail_64ths // 64
        cut.dealt, cut.least_dealt, cut.alone = dealt and dealt + len(lengths), 1, dealt > 0 and alone
        library.number(choice, shape)
    found = library.visits(shape, choice, kv_indptr, lengths)
    assert found.even == even
    _check_visits(shape, choice, kv_indptr, lengths, found)


def test_dealt_parts_are_nearly_as_short_as_the_numbers_allow(library: CutLibrary) -> None:
    """Against the shortest ceiling that needs no more numbers, found by trying every one."""
    rng, count = random.Random(0), 0
    for _ in range(120):
        batch, units = rng.choice([(2, 8), (8, 4), (8, 8), (17, 8), (32, 4), (32, 8)])
        mean = rng.choice([3000, 5000, 8000]) * 8 // batch
        lengths = [int(mean * rng.lognormvariate(0, 1)) + 1 for _ in range(batch)]
        kv_indptr = _tables_of(lengths, 16)
        shape = Shape(units, batch, 16, kv_indptr[-1])
        choice = library.choose(shape, H200)
        found = library.visits(shape, choice, kv_indptr, lengths)
        if choice.cut.dealt == 0 or found.even or choice.uncut:
            continue
        _check_visits(shape, choice, kv_indptr, lengths, found)
        tiles, whole = [-(-length // 16) for length in lengths], choice.cut.whole_dealt

        def needed(most: int, tiles: list[int] = tiles, whole: int = whole) -> int:
            return sum(1 if own <= whole else -(-own // most) for own in tiles)

        best = next(most for most in range(1, max(tiles) + 1) if needed(most) <= choice.cut.dealt)
        longest = int((found.rows[:, END] - found.rows[:, BEGIN]).max())
        assert longest <= max(1.1 * best + 1, choice.cut.least_dealt, whole), (lengths, units)
        count += 1
    assert count > 30


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_batch_invariant_cut_depends_on_the_request_alone(library: CutLibrary, page_size: int) -> None:
    """The same parts and warps, alone, in a batch, behind others, and on any device."""
    rng = random.Random(page_size)
    lengths = [0, 1, 2047, 2048, 2049, 4096, 70_000, 31, *(rng.randint(0, 9000) for _ in range(60))]
    shuffled = rng.sample(range(len(lengths)), len(lengths))
    alone = {}
    for batch, room, units in (
        *(([request], H200, 8) for request in range(len(lengths))),
        (list(range(len(lengths))), H200, 1),
        (shuffled, A100, 32),
        (shuffled[7:], Room.of(1, 1), 4),
    ):
        own = [lengths[request] for request in batch]
        kv_indptr = _tables_of(own, page_size)
        shape = Shape(units, len(own), page_size, kv_indptr[-1])
        choice = library.choose(shape, room, INVARIANT_TOKENS)
        found = library.visits(shape, choice, kv_indptr, own)
        _check_visits(shape, choice, kv_indptr, own, found)
        for place, request in enumerate(batch):
            mine = found.rows[:, REQUEST] == place
            # By index: which cluster takes a part, and when, is not part of the cut.
            rows, warps = found.rows[mine][:, [INDEX, COUNT, BEGIN, END]], found.warps[mine]
            parts = sorted(zip(rows.tolist(), warps.tolist(), strict=True))
            assert alone.setdefault(request, parts) == parts, (request, len(batch))


def test_tuning_s_invariant_tokens_are_those_of_the_tests() -> None:
    line = f"constexpr int32_t kInvariantTokens = {INVARIANT_TOKENS};"
    assert line in (KERNEL / "tuning.cuh").read_text()


MOST_SLOTS = 1 << 30  # params.h


@pytest.mark.parametrize("room", [H200, Room.of(1, 1)], ids=["h200", "one SM"])
@pytest.mark.parametrize("tiles", [(64, 16), (128, 32)])
@pytest.mark.parametrize("page_size", [1, 64])
def test_extreme_shapes(library: CutLibrary, page_size: int, tiles: tuple[int, int], room: Room) -> None:
    """2^30 slots, batches of 65,536 and more, one request with everything: 32 bits hold every sum."""
    listed = MOST_SLOTS // page_size
    for batch in (1, 300, 65_536, 200_000):
        tables = {
            "the first has all": [listed] + [0] * (batch - 1),
            "the last has all": [0] * (batch - 1) + [listed],
            "equal": [listed // batch] * batch,
            "hardly any": [1] * (batch // 2) + [0] * (batch - batch // 2),
        }
        for name, pages in tables.items():
            # All visits of a large batch take seconds: one table of it is enough.
            is_visited = name == "equal" or batch <= 300
            kv_indptr = [0, *np.cumsum(pages).tolist()] if is_visited else []
            lengths = [count * page_size for count in pages] if is_visited else []
            for invariant in (0, INVARIANT_TOKENS):
                for units in (64, 1):
                    shape = Shape(units, batch, page_size, listed, *tiles)
                    choice = library.choose(shape, room, invariant)
                    _check_choice(shape, room, invariant, True, choice)
                if is_visited and (name == "equal" or invariant == 0):
                    found = library.visits(shape, choice, kv_indptr, lengths)
                    _check_visits(shape, choice, kv_indptr, lengths, found)


@settings(max_examples=300, **RELAXED)
@given(
    divisor=st.one_of(st.integers(1, 4096), st.integers(1, (1 << 30) + 32)),
    x=st.lists(st.one_of(st.integers(0, 5000), st.integers(0, (1 << 31) - 1)), min_size=1, max_size=20),
)
def test_division_by_multiplication_is_exact(library: CutLibrary, divisor: int, x: list[int]) -> None:
    multiples = [m for n in (*x, 0) for m in (n // divisor * divisor, n // divisor * divisor - 1) if m >= 0]
    given_numbers = [*x, *multiples, (1 << 31) - 1]
    assert library.divide(given_numbers, divisor).tolist() == [n // divisor for n in given_numbers]


def test_division_by_every_small_divisor(library: CutLibrary) -> None:
    ends = np.r_[0:3000, 2**30 - 50 : 2**30 + 50, 2**31 - 3000 : 2**31].astype(np.int64)
    for divisor in range(1, 1500):
        assert np.array_equal(library.divide(ends, divisor), ends // divisor), divisor


# The choice: which launches are cut, and how.


def _choice(library: CutLibrary, units: int, batch: int, length: int, room: Room = H200) -> Choice:
    return library.choose(Shape(units, batch, 16, batch * -(-length // 16)), room)


def _equal(library: CutLibrary, batch: int, length: int, times: int = 1, row_bytes: int = 256) -> Visits:
    """What becomes of equal requests of 8 units; kv_indices `times` as long."""
    pages = -(-length // 16)
    shape = Shape(8, batch, 16, batch * pages * times, row_bytes=row_bytes)
    kv_indptr = [pages * r for r in range(batch + 1)]
    return library.visits(shape, library.choose(shape, H200), kv_indptr, [length] * batch)


@pytest.mark.parametrize(
    ("batch", "length", "even"),
    [
        (64, 4096, False),  # 1.3 waves of 396 blocks
        (128, 4096, False),  # 2.6
        (256, 4096, True),  # 5.2
        (512, 4096, True),  # 10.3
        (96, 4096, True),  # 1.94: the last wave is nearly full
        (64, 1000, True),  # short ones are not worth it
        (1000, 2048, True),  # 20.2
        (32, 8192, True),  # all at once
        (32, 16_384, False),  # but some SMs hold one block, and it is long
        (8, 131_072, True),  # several clusters an item
    ],
)
def test_which_equal_batches_are_levelled(library: CutLibrary, batch: int, length: int, even: bool) -> None:
    """Cut as uneven ones are: those that come last in short parts."""
    visits = _equal(library, batch, length)
    assert visits.even == even
    if not even:
        tokens = (visits.rows[:, END] - visits.rows[:, BEGIN]) * 16
        assert 400 < tokens[-1] <= length / 2 and tokens[0] >= 2 * tokens[-1]


def test_levelling_goes_by_what_is_counted_and_by_bytes(library: CutLibrary) -> None:
    for times in (2, 4, 16):
        assert not _equal(library, 128, 4096, times).even, "long ones in a long list"
        assert _equal(library, 128, 700, times).even, "short ones"
        assert _equal(library, 32, 2048, times).even, "all at once, and not many bytes"
    assert _equal(library, 128, 2048, row_bytes=128).even and not _equal(library, 128, 2048).even


@pytest.mark.parametrize(
    ("units", "batch", "length", "uncut", "is_cluster", "is_cut"),
    [
        (8, 1, 91, True, True, False),  # a chain of dependent steps
        (8, 8, 1024, True, True, False),
        (8, 40, 16, True, False, False),
        (8, 63, 300, False, False, False),  # more items than blocks at once: each whole
        (8, 1, 131_072, False, True, True),
        (1, 1, 131_072, False, True, True),
        (8, 8, 16_384, False, True, True),  # they fill the device
        (8, 128, 16_384, False, False, False),
    ],
)
def test_which_equal_batches_are_cut(
    library: CutLibrary, units: int, batch: int, length: int, uncut: bool, is_cluster: bool, is_cut: bool
) -> None:
    choice = _choice(library, units, batch, length)
    found = choice.uncut, choice.splits > 1, choice.cut.even_parts > 1
    assert found == (uncut, is_cluster, is_cut), choice
    assert _choice(library, units, batch, length, A100).splits == 1


def test_one_long_request_among_short_ones_is_cut_for_all_sms(library: CutLibrary) -> None:
    lengths = [131_072] + [100] * 200
    kv_indptr = _tables_of(lengths, 16)
    shape = Shape(8, len(lengths), 16, kv_indptr[-1])
    choice = library.choose(shape, H200)
    found = library.visits(shape, choice, kv_indptr, lengths)
    assert not found.even and not choice.uncut
    parts = int(found.rows[found.rows[:, REQUEST] == 0, COUNT][0])
    assert shape.units * parts >= H200.workers, "SMs are left without work"


def test_a_long_request_begins_early_wherever_it_stands(library: CutLibrary) -> None:
    """Behind short ones the same parts in the same order as before them."""
    shape, parts = Shape(8, 64, 16, 12_224), {}
    for place in (0, 63):
        lengths = [1024] * 64
        lengths[place] = 131_072
        found = library.visits(shape, library.choose(shape, H200), _tables_of(lengths, 16), lengths)
        assert not found.even and found.mirrored == (place == 63)
        parts[place] = found.rows[:, [NUMBER, INDEX, COUNT, FIRST, PLACE, BEGIN, END]].tolist()
        assert (found.rows[:20, REQUEST] == place).all(), "its parts are not the first"
    assert parts[0] == parts[63]


def test_an_even_batch_in_a_longer_list_is_still_cut_for_all_sms(library: CutLibrary) -> None:
    """A graph's buffers list more pages than requests have: lengths shrink to what is counted."""
    lengths = [65_536] * 2
    kv_indptr = _tables_of(lengths, 16)
    for times in (1, 3, 9, 40):
        shape = Shape(4, 2, 16, kv_indptr[-1] * times)
        choice = library.choose(shape, H200)
        found = library.visits(shape, choice, kv_indptr, lengths)
        _check_visits(shape, choice, kv_indptr, lengths, found)
        blocks = shape.units * len(found.rows) * choice.splits
        assert blocks >= H200.workers, (times, choice)
