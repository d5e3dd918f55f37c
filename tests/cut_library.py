"""cut.h and choose.h of evenkv_cuda, compiled for the host: how a batch is cut on a device."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenkv.library.toolchain import find_cxx
from evenkv.paths import find_repository
from evenkv.spec.family import DecodeSpec

KERNEL = find_repository().kernels / "evenkv_cuda"
SHIM = Path(__file__).with_name("cut_shim.cpp")
MOST_SPLITS = 8  # choose.h
FEW_BLOCKS = 2  # choose.h
MOST_AT_ONCE = 48  # tuning.cuh: kMostAtOnce
INVARIANT_TOKENS = 2048  # tuning.cuh


class _Struct(ctypes.Structure):
    def __repr__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name)}" for name, _ in self._fields_)


class Cut(_Struct):
    """cut.h: Cut."""

    _fields_ = [
        ("even_parts", ctypes.c_int32),
        ("even_pages", ctypes.c_int32),
        ("even_tokens", ctypes.c_int32),
        ("part_tokens", ctypes.c_int32),
        ("tail_slot", ctypes.c_int32),
        ("tail_scale", ctypes.c_int32),
        ("by_part_tokens", ctypes.c_uint32 * 2),
        ("by_warps", ctypes.c_uint32 * 2),
        ("least_share", ctypes.c_float),
        ("numbers", ctypes.c_int32),
        ("places", ctypes.c_int32),
        ("least_even_tokens", ctypes.c_int32),
        ("whole_tokens", ctypes.c_int32),
        ("whole_pages", ctypes.c_int32),
        ("dealt", ctypes.c_int32),
        ("least_dealt", ctypes.c_float),
        ("whole_dealt", ctypes.c_int32),
        ("alone", ctypes.c_int32),
    ]


class Choice(_Struct):
    """choose.h: Choice."""

    _fields_ = [
        ("splits", ctypes.c_int32),
        ("clusters", ctypes.c_int32),
        ("uncut", ctypes.c_bool),
        ("cut", Cut),
    ]


class _Room(ctypes.Structure):
    """choose.h: DeviceRoom."""

    _fields_ = [("workers", ctypes.c_int32), ("clusters", ctypes.c_int32 * MOST_SPLITS)]

    @classmethod
    def of(cls, room: Room) -> _Room:
        return cls(room.workers, (ctypes.c_int32 * MOST_SPLITS)(*room.clusters))


class _Shape(ctypes.Structure):
    """choose.h: Shape."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "units",
            "batch",
            "page_size",
            "num_kv_indices",
            "block_tokens",
            "tile_tokens",
            "heads",
            "row_bytes",
        )
    ]

    @classmethod
    def of(cls, shape: Shape) -> _Shape:
        return cls(*(getattr(shape, name) for name, _ in cls._fields_))


def clusters_of(blocks: int, most_splits: int = MOST_SPLITS) -> tuple[int, ...]:
    """Clusters of 1, 2, ... 8 blocks that make up `blocks`; 0: larger than the device takes."""
    return tuple(blocks // s if s <= most_splits else 0 for s in range(1, MOST_SPLITS + 1))


@dataclass(frozen=True)
class Room:
    """A device: SMs, and how many clusters of 1, 2, ... 8 blocks run at once (0: none)."""

    workers: int
    clusters: tuple[int, ...]

    @classmethod
    def of(cls, workers: int, resident: int, most_splits: int = MOST_SPLITS) -> Room:
        """With `resident` blocks an SM, which fill up with clusters of up to `most_splits` blocks."""
        return cls(workers, clusters_of(workers * resident, most_splits))


@dataclass(frozen=True)
class Shape:
    """What the host knows of a batch, the specialisation's tiles (in tokens: of a block's warps, of one), how
    many KV heads a unit has, and the bytes of a head's row."""

    units: int
    batch: int
    page_size: int
    num_kv_indices: int
    block_tokens: int = 64
    tile_tokens: int = 16
    heads: int = 1
    row_bytes: int = 256

    @property
    def slots(self) -> int:
        return self.num_kv_indices * self.page_size


# Columns of `Visits.rows`.
NUMBER, REQUEST, INDEX, COUNT, FIRST, PLACE, BEGIN, END = range(8)


@dataclass(frozen=True)
class Visits:
    """What the clusters of one unit do.

    Attributes
    ----------
    rows : int32 `[visits, 8]`
        number, request, index, count, first, place, and the tiles from BEGIN to END; count 0 where a request
        without tokens is written.
    warps : int32 `[visits, warps, 2]`
        Each warp's tiles, from and to.
    even : bool
        How parts are numbered.
    part_tokens : float
        Of an uneven part before the tail, at most; less than the cut's where kv_indices is longer.
    tail_slot : int
        Where the tail begins.
    mirrored : bool
        Whether slots are counted from the last request on.
    """

    rows: np.ndarray
    warps: np.ndarray
    even: bool
    part_tokens: float
    tail_slot: int
    mirrored: bool


class CutLibrary:
    """The compiled functions."""

    def __init__(self, folder: Path, sources: Path = KERNEL) -> None:
        path = folder / "cut.so"
        # Signed overflow traps: wrapped integers would pass for a cut.
        flags = ["-std=c++17", "-O1", "-ftrapv", "-Wall", "-Werror", "-shared", "-fPIC"]
        subprocess.run([find_cxx(), *flags, f"-I{sources}", SHIM, "-o", path], check=True)
        self._library = ctypes.CDLL(str(path))
        self._library.visit_all.restype = ctypes.c_int64
        assert self._library.choice_bytes() == ctypes.sizeof(Choice), "choose.h and Choice differ"

    def divide(self, x: Sequence[int], divisor: int) -> np.ndarray:
        given = np.asarray(x, dtype=np.int32)
        out = np.empty_like(given)
        self._library.divide_all(ctypes.c_int64(divisor), len(given), given.ctypes, out.ctypes)
        return out

    def share_among(self, choice: Choice, warps: int) -> None:
        """Has so many warps share a part's tiles."""
        self._library.share_among(ctypes.byref(choice), warps)

    def number(self, choice: Choice, shape: Shape) -> None:
        """Has numbers and places follow from a cut's parts and tail."""
        self._library.number_cut(ctypes.byref(choice), ctypes.byref(_Shape.of(shape)))

    def choose(
        self, shape: Shape, room: Room, invariant_tokens: int = 0, may_stay_uncut: bool = True
    ) -> Choice:
        """What the host settles; `invariant_tokens` 0, or the part length of batch-invariant bits."""
        choice = Choice()
        self._library.choose(
            ctypes.byref(_Shape.of(shape)),
            ctypes.byref(_Room.of(room)),
            ctypes.c_int64(invariant_tokens),
            may_stay_uncut,
            ctypes.byref(choice),
        )
        return choice

    def choose_width(self, shape: Shape, room: Room, invariant_tokens: int) -> tuple[int, bool]:
        """KV heads a block, and whether an SM takes two such blocks at most; of `shape` with single heads."""
        few = ctypes.c_int32()
        heads = self._library.choose_heads(
            ctypes.byref(_Shape.of(shape)),
            ctypes.byref(_Room.of(room)),
            ctypes.c_int64(invariant_tokens),
            ctypes.byref(few),
        )
        return heads, bool(few.value)

    def visits(
        self, shape: Shape, choice: Choice, kv_indptr: Sequence[int], lengths: Sequence[int]
    ) -> Visits:
        """All parts of one unit, of page tables `kv_indptr` [batch + 1] in pages and `lengths` [batch]."""
        indptr, tokens = (np.ascontiguousarray(table, dtype=np.int32) for table in (kv_indptr, lengths))
        warps = choice.splits * shape.block_tokens // shape.tile_tokens
        cut = choice.cut
        capacity = max(cut.numbers, cut.even_parts * shape.batch if cut.even_pages >= 0 else 0, shape.batch)
        rows = np.empty((capacity, 8), dtype=np.int32)
        ranges = np.empty((capacity, warps, 2), dtype=np.int32)
        even, tail_slot, team, mirrored = (ctypes.c_int32() for _ in range(4))
        part_tokens = ctypes.c_double()
        found = self._library.visit_all(
            ctypes.byref(choice),
            shape.batch,
            shape.page_size,
            shape.num_kv_indices,
            shape.tile_tokens,
            warps,
            indptr.ctypes,
            tokens.ctypes,
            ctypes.c_int64(capacity),
            rows.ctypes,
            ranges.ctypes,
            ctypes.byref(even),
            ctypes.byref(part_tokens),
            ctypes.byref(tail_slot),
            ctypes.byref(team),
            ctypes.byref(mirrored),
        )
        assert found <= capacity, "more parts than numbers"
        shared = ranges[:found, : team.value]
        return Visits(
            rows[:found],
            shared,
            bool(even.value),
            part_tokens.value,
            tail_slot.value,
            bool(mirrored.value),
        )


@dataclass(frozen=True)
class Blocks:
    """tuning.cuh on sm_90: what a specialisation's blocks are made of."""

    tile_tokens: int
    warps: int
    resident: int  # blocks an SM
    units_a_head: int
    has_pairs: bool  # whether a block may take two KV heads
    row_bytes: int

    @classmethod
    def of(cls, spec: DecodeSpec) -> Blocks:
        most_heads = 8 if spec.head_dim > 128 else 16
        units_a_head = -(-spec.group_size // most_heads)
        row_bytes = spec.head_dim * (1 if spec.is_fp8 else 2)
        tile_tokens = 16 if row_bytes > 128 else 32
        warps = 2 if 2 * tile_tokens * row_bytes > 8192 else 4
        two_columns = -(-spec.group_size // units_a_head) > 8
        resident = 2 if warps == 4 and (spec.head_dim > 128 or two_columns) else 3
        has_pairs = units_a_head == 1 and row_bytes <= 128
        return cls(tile_tokens, warps, resident, units_a_head, has_pairs, row_bytes)

    def shape(self, spec: DecodeSpec, batch: int, num_kv_indices: int, heads: int) -> Shape:
        """A batch, of blocks that take so many KV heads."""
        return Shape(
            spec.num_kv_heads * self.units_a_head // heads,
            batch,
            spec.page_size,
            num_kv_indices,
            self.warps // heads * self.tile_tokens,
            self.tile_tokens,
            heads,
            self.row_bytes,
        )


@dataclass(frozen=True)
class Launch:
    """What the launcher settles.

    Attributes
    ----------
    heads : int
        KV heads a block.
    few : bool
        Whether shared memory is asked for that no block uses, so that an SM takes `FEW_BLOCKS` at most.
    resident : int
        Blocks that an SM takes.
    """

    heads: int
    few: bool
    resident: int
    shape: Shape
    choice: Choice


def choose_launch(
    library: CutLibrary,
    spec: DecodeSpec,
    batch: int,
    num_kv_indices: int,
    workers: int,
    *,
    always_cut: bool = False,
    invariant: bool = False,
    room_of: Callable[[int], Room] | None = None,
) -> Launch:
    """As kernel.cu has it, on a device of `workers` SMs.

    `room_of`: what runs at once there, of so many blocks an SM; not given, clusters can fill it.
    """
    blocks = Blocks.of(spec)
    tokens = INVARIANT_TOKENS if invariant else 0
    room_of = room_of or (lambda resident: Room.of(workers, resident))
    shape, room, heads, few = blocks.shape(spec, batch, num_kv_indices, 1), room_of(blocks.resident), 1, False
    if blocks.has_pairs:
        heads, few = library.choose_width(shape, room, tokens)
    resident = min(blocks.resident, FEW_BLOCKS) if few else blocks.resident
    if heads == 2:
        shape, room = blocks.shape(spec, batch, num_kv_indices, heads), room_of(resident)
    choice = library.choose(shape, room, tokens, not always_cut and heads == 1)
    return Launch(heads, few, resident, shape, choice)


def check_visits(
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
        # Fitted lengths need not be multiples of a tile. Fitted to what they were, their divisor is rounded
        # anew, by less than a millionth: one token more may be in, which is a tile more.
        slack = 0 if v.part_tokens == cut.part_tokens else shape.tile_tokens
        slack *= 2 if v.part_tokens < cut.part_tokens * (1 - 1e-6) else 1
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


def tables_of(lengths: Sequence[int], page_size: int) -> list[int]:
    return [0, *np.cumsum([-(-length // page_size) for length in lengths]).tolist()]
