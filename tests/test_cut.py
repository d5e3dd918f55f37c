"""How evenkv_cuda cuts requests in parts: cut.h and choose.h, compiled for the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cut_library import (
    BEGIN,
    COUNT,
    END,
    INDEX,
    INVARIANT_TOKENS,
    KERNEL,
    REQUEST,
    Choice,
    CutLibrary,
    Room,
    Shape,
    check_visits,
    tables_of,
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
    check_visits(shape, choice, kv_indptr, lengths, library.visits(shape, choice, kv_indptr, lengths))


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
    kv_indptr = tables_of(lengths, page_size)
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
    check_visits(shape, choice, kv_indptr, lengths, found)


def test_dealt_parts_are_nearly_as_short_as_the_numbers_allow(library: CutLibrary) -> None:
    """Against the shortest ceiling that needs no more numbers, found by trying every one."""
    rng, count = random.Random(0), 0
    for _ in range(120):
        batch, units = rng.choice([(2, 8), (8, 4), (8, 8), (17, 8), (32, 4), (32, 8)])
        mean = rng.choice([3000, 5000, 8000]) * 8 // batch
        lengths = [int(mean * rng.lognormvariate(0, 1)) + 1 for _ in range(batch)]
        kv_indptr = tables_of(lengths, 16)
        shape = Shape(units, batch, 16, kv_indptr[-1])
        choice = library.choose(shape, H200)
        found = library.visits(shape, choice, kv_indptr, lengths)
        if choice.cut.dealt == 0 or found.even or choice.uncut:
            continue
        check_visits(shape, choice, kv_indptr, lengths, found)
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
        kv_indptr = tables_of(own, page_size)
        shape = Shape(units, len(own), page_size, kv_indptr[-1])
        choice = library.choose(shape, room, INVARIANT_TOKENS)
        found = library.visits(shape, choice, kv_indptr, own)
        check_visits(shape, choice, kv_indptr, own, found)
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
                    check_visits(shape, choice, kv_indptr, lengths, found)


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
