"""One decode step's page tables: what a workload is besides its random q, K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenkv.errors import EvenkvError


@dataclass(frozen=True)
class DecodeStep:
    """Page tables of a batch.

    `kv_indptr` int32 `[batch + 1]`, `kv_indices` int32 `[kv_indptr[-1]]`, `kv_last_page_len` int32 `[batch]`
    (0 for an empty request; 1 everywhere else at page_size 1), `num_pages` the size of the shared pool.
    """

    page_size: int
    num_pages: int
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray

    @property
    def batch_size(self) -> int:
        return len(self.kv_indptr) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each request, int64 `[batch]`."""
        pages = np.diff(self.kv_indptr.astype(np.int64))
        return np.where(pages > 0, (pages - 1) * self.page_size + self.kv_last_page_len, 0)

    def axes(self) -> dict[str, int]:
        """The definition's variable axes."""
        return {
            "batch_size": self.batch_size,
            "num_pages": self.num_pages,
            "len_indptr": len(self.kv_indptr),
            "num_kv_indices": len(self.kv_indices),
        }


def pages_of(lengths: Sequence[int] | np.ndarray, page_size: int) -> np.ndarray:
    """Pages that hold each length, int64."""
    return -(-np.asarray(lengths, dtype=np.int64) // page_size)


def step_from_pages(
    pages: Sequence[Sequence[int]], lengths: Sequence[int], page_size: int, num_pages: int
) -> DecodeStep:
    """Join each request's page ids, in token order, into a checked step.

    Raises
    ------
    EvenkvError
        When the tables contradict each other (see `check_step`).
    """
    counts = [len(ids) for ids in pages]
    indptr = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    indices = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in pages] or [np.zeros(0, np.int64)])
    last = np.asarray(lengths, dtype=np.int64) - np.maximum(np.asarray(counts) - 1, 0) * page_size
    step = DecodeStep(
        page_size,
        num_pages,
        indptr.astype(np.int32),
        indices.astype(np.int32),
        last.astype(np.int32),
    )
    check_step(step)
    return step


def step_from_lengths(
    lengths: Sequence[int], page_size: int, num_pages: int, rng: np.random.Generator
) -> DecodeStep:
    """Assign pages of the pool by a seeded permutation: for steps of which only the lengths are known.

    Raises
    ------
    EvenkvError
        When the pool is too small for the lengths.
    """
    counts = pages_of(lengths, page_size)
    needed = int(counts.sum())
    if needed > num_pages:
        raise EvenkvError(
            f"num_pages: wanted at least {needed} for {int(np.sum(lengths))} tokens in pages of {page_size}, "
            f"got {num_pages}.",
            "Give a larger pool, or leave it out.",
        )
    order = random_order(rng, num_pages)[:needed]
    return step_from_pages(np.split(order, np.cumsum(counts)[:-1]), lengths, page_size, num_pages)


def random_order(rng: np.random.Generator, count: int) -> np.ndarray:
    """A permutation of `range(count)`, int64.

    Sorted uniform doubles give the same order in every numpy release; `Generator.permutation` may not.
    """
    return np.argsort(rng.random(count), kind="stable")


def check_step(step: DecodeStep, where: str = "step") -> None:
    """Hold the tables against the definition's contract.

    Raises
    ------
    EvenkvError
        Naming `where`, the table, the request, what was wanted and what came.
    """

    def fail(what: str) -> None:
        raise EvenkvError(f"{where}: {what}.", "Correct the tables, or draw the workload again.")

    indptr, indices, last = step.kv_indptr, step.kv_indices, step.kv_last_page_len
    for name, table in (("kv_indptr", indptr), ("kv_indices", indices), ("kv_last_page_len", last)):
        if table.dtype != np.int32 or table.ndim != 1:
            fail(f"{name}: wanted int32 of one dimension, got {table.dtype} {list(table.shape)}")
    if len(indptr) < 2:
        fail(f"kv_indptr: wanted at least one request, got {len(indptr)} entries")
    if len(last) != step.batch_size:
        fail(f"kv_last_page_len: wanted {step.batch_size} entries, got {len(last)}")
    counts = np.diff(indptr.astype(np.int64))
    if indptr[0] != 0 or (counts < 0).any():
        fail("kv_indptr: wanted a start at 0 and no decrease")
    if indptr[-1] != len(indices):
        fail(f"kv_indices: wanted kv_indptr[-1] = {indptr[-1]} entries, got {len(indices)}")
    if len(indices) and (indices.min() < 0 or indices.max() >= step.num_pages):
        bad = int(indices[(indices < 0) | (indices >= step.num_pages)][0])
        fail(f"kv_indices: wanted page ids from 0 to {step.num_pages - 1}, got {bad}")
    wrong = np.flatnonzero((counts > 0) & ((last < 1) | (last > step.page_size)))
    if len(wrong):
        fail(f"kv_last_page_len[{wrong[0]}]: wanted 1 to {step.page_size}, got {last[wrong[0]]}")
    # A page twice in one request would mean two tokens in one slot.
    owner = np.repeat(np.arange(step.batch_size, dtype=np.int64), counts)
    keys = np.sort(owner * step.num_pages + indices)
    twice = keys[1:][keys[1:] == keys[:-1]]
    if len(twice):
        fail(f"kv_indices: request {twice[0] // step.num_pages} lists page {twice[0] % step.num_pages} twice")
