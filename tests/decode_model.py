"""The walk and the merge of evenkv_cuda in plain Python, over the compiled chunk schedule.

Follows cursor.cuh (`walk`), streaming_warps.cuh (`stream_chunk`), merging_warps.cuh (`merge_block`, `Merger`)
step by step, with token ranges in the place of partial sums. A result is a tree: its leaves are the ranges
of tokens that one warp attended to, its shape is the order in which they were added.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

GROUP_CHUNKS = 16  # merge.cuh: kGroupChunks
ALIGNMENT = 16  # schedule.h: kSlotAlignment

ChunkOf = Callable[[int], int]


@dataclass(frozen=True)
class Batch:
    """Page tables of a batch: `kv_indptr` int [batch + 1] in pages, `last_page_len` int [batch] in tokens."""

    kv_indptr: list[int]
    last_page_len: list[int]
    page_size: int

    @property
    def unit_slots(self) -> int:
        return self.kv_indptr[-1] * self.page_size

    def begin(self, request: int) -> int:
        return self.kv_indptr[request] * self.page_size

    def length(self, request: int) -> int:
        pages = self.kv_indptr[request + 1] - self.kv_indptr[request]
        return (pages - 1) * self.page_size + self.last_page_len[request] if pages > 0 else 0


@dataclass(frozen=True)
class Piece:
    """A run of one request's tokens `begin` to `end` in one warp's part of a chunk."""

    request: int
    unit: int
    begin: int
    end: int
    starts_before: bool
    ends_after: bool
    last_of_chunk: bool = False

    @property
    def cut(self) -> bool:
        return self.starts_before or self.ends_after


def walk(batch: Batch, unit: int, slot: int, slots: int) -> list[Piece]:
    """What a warp meets from `slot` of `unit` on, `slots` positions far: across requests and units."""
    pieces: list[Piece] = []
    requests = len(batch.last_page_len)
    while slots > 0:
        unit_end = min(batch.unit_slots, slot + slots)
        slots -= unit_end - slot
        request = bisect_right(batch.kv_indptr, slot // batch.page_size) - 1
        for r in range(request, requests):
            token = max(slot - batch.begin(r), 0)
            end = min(batch.length(r), unit_end - batch.begin(r))
            if token < end:
                pieces.append(Piece(r, unit, token, end, token > 0, end < batch.length(r)))
        unit, slot = unit + 1, 0
    if pieces:
        last = pieces[-1]
        pieces[-1] = Piece(*(getattr(last, n) for n in list(Piece.__dataclass_fields__)[:-1]), True)
    return pieces


def stream_chunk(batch: Batch, begin: int, end: int, parts: int) -> Iterator[list[Piece]]:
    """The pieces of each part of a chunk, a part being the warps that share its tokens."""
    part_slots = -(-(end - begin) // parts)
    part_slots = -(-part_slots // ALIGNMENT) * ALIGNMENT
    for part in range(parts):
        first = begin + part * part_slots
        slots = min(part_slots, end - first)
        unit = first // batch.unit_slots
        yield walk(batch, unit, first - unit * batch.unit_slots, slots)


@dataclass
class Merger:
    """What blocks leave in memory: outputs, partials by (chunk, slot), arrival counters."""

    batch: Batch
    chunk_of: ChunkOf
    outputs: dict[tuple[int, int], Any] = field(default_factory=dict)
    partials: dict[tuple[int, int], Any] = field(default_factory=dict)
    arrivals: Counter[int] = field(default_factory=Counter)

    def write_output(self, request: int, unit: int, tree: Any) -> None:
        assert (request, unit) not in self.outputs, f"request {request}, unit {unit} is written twice"
        self.outputs[request, unit] = tree

    def merge_block(self, chunk: int, parts: Iterable[list[Piece]]) -> list[tuple[int, int] | None]:
        """Writes what is whole; returns the (request, unit) left in the chunk's two slots."""
        cut_pieces: dict[int, Piece] = {}
        for part, pieces in enumerate(parts):
            for piece in pieces:
                if not piece.cut:
                    self.write_output(piece.request, piece.unit, (piece.begin, piece.end))
                    continue
                place = 2 * part + piece.last_of_chunk
                assert place not in cut_pieces, "a warp's cut piece overwrites another"
                cut_pieces[place] = piece
        cuts: list[tuple[int, int] | None] = [None, None]
        present = sorted(cut_pieces)
        if not present:
            return cuts
        leaders = [i for i in present if not cut_pieces[i].starts_before or i == present[0]]
        for leader, stop in zip(leaders, [*leaders[1:], 1 << 30], strict=True):
            members = [i for i in present if leader <= i < stop]
            assert sum(i % 2 == 0 for i in members) <= 1, "two early pieces in one chain"
            assert all(i % 2 == 1 for i in members[:-1]), "an early piece inside a chain"
            chain = [cut_pieces[i] for i in members]
            head = chain[0]
            assert {(p.request, p.unit) for p in chain} == {(head.request, head.unit)}, "chains mix requests"
            tree = tuple((p.begin, p.end) for p in chain)
            if not head.starts_before and not chain[-1].ends_after:
                self.write_output(head.request, head.unit, tree)
                continue
            slot = 0 if head.starts_before else 1
            assert cuts[slot] is None, "two cut requests in one slot"
            assert (chunk, slot) not in self.partials
            cuts[slot] = (head.request, head.unit)
            self.partials[chunk, slot] = tree
        return cuts

    def arrive_last(self, counter: int, expected: int) -> bool:
        self.arrivals[counter] += 1
        assert self.arrivals[counter] <= expected, "more arrivals than chunks"
        if self.arrivals[counter] < expected:
            return False
        del self.arrivals[counter]
        return True

    def merge_cuts(self, chunk: int, cuts: list[tuple[int, int] | None]) -> None:
        for cut in cuts:
            if cut is None:
                continue
            request, unit = cut
            begin = unit * self.batch.unit_slots + self.batch.begin(request)
            first = self.chunk_of(begin)
            last = self.chunk_of(begin + self.batch.length(request) - 1)
            group = chunk - (chunk - first) % GROUP_CHUNKS
            group_chunks = min(GROUP_CHUNKS, last - group + 1)
            groups = -(-(last - first + 1) // GROUP_CHUNKS)

            def merge(begin: int, end: int, stride: int, first: int = first) -> Any:
                return tuple(self.partials[c, int(c == first)] for c in range(begin, end + 1, stride))

            if group_chunks > 1:
                if not self.arrive_last(2 * group, group_chunks):
                    continue
                tree = merge(group, group + group_chunks - 1, 1)
                if groups > 1:
                    self.partials[group, int(group == first)] = tree
                else:
                    self.write_output(request, unit, tree)
            if groups > 1 and self.arrive_last(2 * first + 1, groups):
                self.write_output(request, unit, merge(first, last, GROUP_CHUNKS))


def decode(
    batch: Batch,
    ranges: list[tuple[int, int]],
    chunk_of: ChunkOf,
    parts: int,
    order: Iterable[int],
) -> dict[tuple[int, int], Any]:
    """One launch: chunks end in the order given. Returns the tree of every (request, unit) written."""
    merger = Merger(batch, chunk_of)
    for chunk in order:
        cuts = merger.merge_block(chunk, stream_chunk(batch, *ranges[chunk], parts))
        merger.merge_cuts(chunk, cuts)
    assert not merger.arrivals, "counters are not zero after the launch"
    return merger.outputs


def leaves(tree: Any) -> Iterator[tuple[int, int]]:
    """The token ranges of a tree, in the order of summation."""
    if isinstance(tree[0], int):
        yield tree
    else:
        for branch in tree:
            yield from leaves(branch)
