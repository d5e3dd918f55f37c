"""Which batches evenkv_cuda cuts, levels or leaves whole on an H200: choose.h, compiled for the host."""

from __future__ import annotations

import pytest
from cut_library import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    INDEX,
    NUMBER,
    PLACE,
    REQUEST,
    Choice,
    CutLibrary,
    Room,
    Shape,
    Visits,
    check_visits,
    tables_of,
)

H200 = Room.of(132, 3)
A100 = Room.of(108, 2, most_splits=1)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> CutLibrary:
    return CutLibrary(tmp_path_factory.mktemp("cut"))


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
    kv_indptr = tables_of(lengths, 16)
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
        found = library.visits(shape, library.choose(shape, H200), tables_of(lengths, 16), lengths)
        assert not found.even and found.mirrored == (place == 63)
        parts[place] = found.rows[:, [NUMBER, INDEX, COUNT, FIRST, PLACE, BEGIN, END]].tolist()
        assert (found.rows[:20, REQUEST] == place).all(), "its parts are not the first"
    assert parts[0] == parts[63]


def test_an_even_batch_in_a_longer_list_is_still_cut_for_all_sms(library: CutLibrary) -> None:
    """A graph's buffers list more pages than requests have: lengths shrink to what is counted."""
    lengths = [65_536] * 2
    kv_indptr = tables_of(lengths, 16)
    for times in (1, 3, 9, 40):
        shape = Shape(4, 2, 16, kv_indptr[-1] * times)
        choice = library.choose(shape, H200)
        found = library.visits(shape, choice, kv_indptr, lengths)
        check_visits(shape, choice, kv_indptr, lengths, found)
        blocks = shape.units * len(found.rows) * choice.splits
        assert blocks >= H200.workers, (times, choice)
