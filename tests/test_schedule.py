"""The chunk schedule of evenkv_cuda, compiled for the host, and the walk and merge modelled over it."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_model import ALIGNMENT, GROUP_CHUNKS, Batch, decode, leaves
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evenkv.library.toolchain import find_cxx
from evenkv.paths import find_repository

KERNEL = find_repository().kernels / "evenkv_cuda"
SHIM = Path(__file__).with_name("schedule_shim.cpp")
RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

# min_chunk, single_round_slots, tail_chunk: tuning.cuh's for 8 warps of 16-token tiles.
SHIPPED = (128, 16384, 512)


class _Schedule(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_int64),
        ("per_worker", ctypes.c_int64),
        ("tail_begin", ctypes.c_int64),
        ("workers", ctypes.c_int32),
        ("tail_first", ctypes.c_int32),
        ("tail_slots", ctypes.c_int32),
        ("num_chunks", ctypes.c_int32),
    ]


class Schedule:
    """One compiled schedule; `ranges` int64 [num_chunks, 2] are positions on the line."""

    def __init__(self, library: ctypes.CDLL, total: int, workers: int, tuning: tuple[int, int, int]) -> None:
        raw = _Schedule()
        library.schedule_make(ctypes.c_int64(total), workers, *tuning, ctypes.byref(raw))
        self._set(library, raw)

    @classmethod
    def cut(cls, library: ctypes.CDLL, units: int, unit_slots: int, batch: int, workers: int) -> Schedule:
        """The schedule of a batch, fitted to its requests where that costs little."""
        schedule, raw = cls.__new__(cls), _Schedule()
        library.schedule_cut(units, unit_slots, batch, workers, *SHIPPED, ctypes.byref(raw))
        schedule._set(library, raw)
        return schedule

    def _set(self, library: ctypes.CDLL, raw: _Schedule) -> None:
        self._library, self._raw = library, raw
        self.num_chunks: int = raw.num_chunks
        self.ranges = np.full((max(self.num_chunks, 0), 2), -1, dtype=np.int64)
        library.schedule_ranges(ctypes.byref(self._raw), self.ranges.ctypes)

    def chunks_of(self, positions: Any) -> np.ndarray:
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        chunks = np.full(positions.shape, -1, dtype=np.int32)
        count = ctypes.c_int64(positions.size)
        self._library.schedule_chunks_of(ctypes.byref(self._raw), count, positions.ctypes, chunks.ctypes)
        return chunks

    def chunk_of(self, position: int) -> int:
        return int(self.chunks_of([position])[0])


Make = Callable[[int, int, tuple[int, int, int]], Schedule]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("schedule") / "schedule.so"
    # Signed overflow traps: wrapped integers would pass for a schedule.
    command = [find_cxx(), "-std=c++17", "-O1", "-ftrapv", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, f"-I{KERNEL}", SHIM, "-o", path], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="session")
def make(library: ctypes.CDLL) -> Make:
    return lambda total, workers, tuning: Schedule(library, total, workers, tuning)


def _multiples(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high).map(lambda n: 16 * n)


TUNINGS = st.tuples(_multiples(1, 64), st.integers(0, 1 << 17), _multiples(1, 256))
WORKERS = st.integers(1, 1024)
TOTALS = st.one_of(st.integers(0, 5000), st.integers(0, 1 << 24), st.integers(0, 1 << 40))


@settings(max_examples=300, **RELAXED)
@given(total=TOTALS, workers=WORKERS, tuning=st.one_of(st.just(SHIPPED), TUNINGS), data=st.data())
@example(total=0, workers=132, tuning=SHIPPED, data=None)
@example(total=1, workers=1024, tuning=SHIPPED, data=None)
@example(total=132 * 16384, workers=132, tuning=SHIPPED, data=None)  # one round
@example(total=132 * 16384 + 1, workers=132, tuning=SHIPPED, data=None)  # several
def test_chunks_tile_the_line(
    library: ctypes.CDLL, total: int, workers: int, tuning: tuple, data: Any
) -> None:
    # Walks count a chunk's slots in 32 bits: beyond 2^31 slots a worker there is no schedule.
    total = min(total, workers << 31)
    schedule = Schedule(library, total, workers, tuning)
    begins, ends = schedule.ranges.T
    if total == 0:
        assert schedule.num_chunks == 0
        return
    assert begins[0] == 0 and ends[-1] == total
    assert (begins[1:] == ends[:-1]).all(), "chunks overlap, leave a gap or are out of order"
    lengths = ends - begins
    assert (lengths > 0).all(), "an empty chunk"
    assert lengths.max() < 1 << 31
    assert (begins % library.slot_alignment() == 0).all()
    assert (np.diff(lengths) <= 0).all(), "a later chunk is longer"
    assert schedule.num_chunks <= library.chunks_per_worker_bound() * workers, (
        "more chunks than scratch has slots for"
    )

    chunks = np.arange(schedule.num_chunks)
    assert (schedule.chunks_of(begins) == chunks).all()
    assert (schedule.chunks_of(ends - 1) == chunks).all()
    if data is not None:
        inside = data.draw(st.lists(st.integers(0, total - 1), max_size=20))
        assert (schedule.chunks_of(inside) == np.searchsorted(ends, inside, side="right")).all()


def test_a_small_line_has_no_chunk_below_the_least(make: Make) -> None:
    for total in range(1, 4000, 37):
        lengths = np.diff(make(total, 132, SHIPPED).ranges, axis=1)[:, 0]
        assert (lengths[:-1] == SHIPPED[0]).all() and lengths[-1] <= SHIPPED[0]


@settings(max_examples=200, **RELAXED)
@given(
    units=st.integers(1, 40), unit_slots=st.integers(0, 1 << 22), batch=st.integers(1, 300), workers=WORKERS
)
def test_chunks_fitted_to_requests_are_hardly_longer(
    library: ctypes.CDLL, units: int, unit_slots: int, batch: int, workers: int
) -> None:
    equal = Schedule(library, units * unit_slots, workers, SHIPPED)
    fitted = Schedule.cut(library, units, unit_slots, batch, workers)
    if unit_slots == 0:
        assert fitted.num_chunks == 0
        return
    begins, ends = fitted.ranges.T
    assert begins[0] == 0 and ends[-1] == units * unit_slots
    assert (begins[1:] == ends[:-1]).all() and (begins < ends).all()
    assert fitted.num_chunks <= equal.num_chunks
    longest = np.diff(equal.ranges, axis=1).max()
    assert (ends - begins).max() <= longest + longest // 25
    assert (fitted.chunks_of(ends - 1) == np.arange(fitted.num_chunks)).all()


@pytest.mark.parametrize(
    ("units", "batch", "length"),
    [(4, 32, 4096), (8, 32, 4096), (8, 128, 2048), (1, 64, 8192), (8, 1, 131072)],
)
def test_equal_requests_are_whole_or_cut_evenly(
    library: ctypes.CDLL, units: int, batch: int, length: int
) -> None:
    ends = Schedule.cut(library, units, batch * length, batch, 132).ranges[:, 1]
    chunk = ends[0]
    assert (ends % length == 0).all() if chunk >= length else length % chunk == 0
    assert len(ends) == 128


@pytest.mark.parametrize("slots_per_worker", [16385, 20_000, 65_536, 1_000_003, 50_000_000])
def test_the_tail_is_fine_enough_to_balance(make: Make, slots_per_worker: int) -> None:
    """The last chunk of each worker is at most 1/64 of its share, or as small as the tuning allows."""
    schedule = make(132 * slots_per_worker, 132, SHIPPED)
    last = np.diff(schedule.ranges[-132:], axis=1)
    assert last.max() <= max(SHIPPED[2], slots_per_worker / 64)


# The walk and the merge.


def test_the_model_has_the_kernel_s_constants(library: ctypes.CDLL) -> None:
    assert f"constexpr int kGroupChunks = {GROUP_CHUNKS};" in (KERNEL / "merge.cuh").read_text()
    assert library.slot_alignment() == ALIGNMENT


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Requests of mixed lengths, empty ones and such as end in a page of no tokens among them."""
    page_size = draw(st.sampled_from([1, 16, 48, 64]))
    length = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 150), st.integers(0, 900))
    lengths = draw(st.lists(length, min_size=1, max_size=12))
    kv_indptr, last_page_len = [0], []
    for tokens in lengths:
        pages = -(-tokens // page_size)
        last = tokens - (pages - 1) * page_size if pages else draw(st.sampled_from([0, page_size]))
        if page_size > 1 and pages and last == page_size and draw(st.booleans()):
            pages, last = pages + 1, 0
        kv_indptr.append(kv_indptr[-1] + pages)
        last_page_len.append(last)
    return Batch(kv_indptr, last_page_len, page_size)


def _check_decode(schedule: Schedule, batch: Batch, units: int, parts: int, orders: int, seed: int) -> int:
    """Every token once and in order, the same tree whoever ends when; returns the largest tree's chunks."""
    chunks = list(range(schedule.num_chunks))
    ranges = [tuple(r) for r in schedule.ranges.tolist()]
    rng = random.Random(seed)
    first = None
    for _ in range(orders):
        outputs = decode(batch, ranges, schedule.chunk_of, parts, chunks)
        rng.shuffle(chunks)
        first = first or outputs
        assert outputs == first, "the order of a sum depends on who ended when"
    tokens = {
        (request, unit): batch.length(request)
        for request in range(len(batch.last_page_len))
        for unit in range(units)
        if batch.length(request) > 0
    }
    assert (first or {}).keys() == tokens.keys(), "requests without an output, or outputs without tokens"
    for key, length in tokens.items():
        position = 0
        for begin, end in leaves(first[key]):
            assert begin == position and end > begin, f"tokens of {key} are missing, double or out of order"
            position = end
        assert position == length
    return max((sum(1 for _ in leaves(tree)) for tree in (first or {}).values()), default=0)


@settings(max_examples=150, **RELAXED)
@given(
    batch=batches(),
    units=st.integers(1, 5),
    heads_and_warps=st.sampled_from([(h, w) for h in (1, 2) for w in (4, 6, 8)]),
    workers=st.integers(1, 40),
    tuning=st.tuples(_multiples(1, 8), st.integers(0, 600), _multiples(1, 8)),
    seed=st.integers(0, 1 << 30),
)
def test_every_token_is_summed_once_in_an_order_of_its_own(
    make: Make,
    batch: Batch,
    units: int,
    heads_and_warps: tuple[int, int],
    workers: int,
    tuning: tuple,
    seed: int,
) -> None:
    heads, warps = heads_and_warps
    schedule = make(units * batch.unit_slots, workers, tuning)
    _check_decode(schedule, batch, units, warps // heads, orders=3, seed=seed)


@pytest.mark.parametrize("pages", [16 * 16, 16 * 16 + 1, 16 * 17, 16 * 17 + 1])
def test_long_requests_merge_in_two_steps(make: Make, pages: int) -> None:
    """Sixteen whole groups of chunks, a group of one chunk, and requests around it that share its chunks."""
    batch = Batch([0, 1, 1 + pages, 3 + pages], [3, 16, 1], 16)
    schedule = make(batch.unit_slots, 1024, (16, 16384, 512))
    assert _check_decode(schedule, batch, 1, 8, orders=4, seed=pages) >= pages // 16


def test_shipped_tuning_on_a_long_and_many_short_requests(make: Make) -> None:
    rng = random.Random(7)
    lengths = [131_072] + [rng.randrange(0, 2048) for _ in range(200)]
    kv_indptr = [0]
    for tokens in lengths:
        kv_indptr.append(kv_indptr[-1] + -(-tokens // 64))
    batch = Batch(kv_indptr, [(tokens - 1) % 64 + 1 if tokens else 0 for tokens in lengths], 64)
    schedule = make(8 * batch.unit_slots, 132, SHIPPED)
    assert schedule.num_chunks > 132
    _check_decode(schedule, batch, 8, 8, orders=2, seed=1)
