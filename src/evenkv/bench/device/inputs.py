"""Inputs of a case: cache pools allocated once a family, page tables and queries drawn on the device.

Every process draws the same tables and queries from the case's seed; only the pools are shared, through CUDA
IPC.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import torch

from evenkv.bench.case import Case
from evenkv.errors import EvenkvError
from evenkv.numerics.bytes import ELEMENT_BYTES, pages_of
from evenkv.numerics.problem import TORCH_DTYPES

# Pages that no request lists. A constant, so that a case is the same problem whatever the family's pool
# holds.
UNLISTED_PAGES = 3

_SLAB_BYTES = 256 << 20


@dataclass(frozen=True)
class Tensors:
    """One call's arguments on a device.

    Attributes
    ----------
    q : bf16 `[batch, num_qo_heads, head_dim]`; its contents change between calls
    k_cache, v_cache : `[num_pages, page_size, num_kv_heads, head_dim]`, views of the pools, strided for HND
    kv_indptr, kv_indices, kv_last_page_len : int32 `[batch + 1]`, `[pages]`, `[batch]`
    lengths : int32 `[batch]`
    k_scale, v_scale : float32 `[num_kv_heads]`, None for bf16
    queries : what the reference answers, a content of q for each of the `draws` asked for
    kv_indptr_host, kv_last_page_len_host : the same on the CPU, for planners
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    lengths: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    queries: tuple[torch.Tensor, ...]
    kv_indptr_host: torch.Tensor
    kv_last_page_len_host: torch.Tensor
    sm_scale: float

    def block_table(self) -> torch.Tensor:
        """int32 `[batch, pages of the longest request]`; past a request's own pages stand listed ids."""
        counts = self.kv_indptr_host[1:] - self.kv_indptr_host[:-1]
        width = max(1, int(counts.max()))
        entry = self.kv_indptr[:-1, None] + torch.arange(width, dtype=torch.int32, device=self.q.device)
        return self.kv_indices[entry.clamp_(max=max(0, self.kv_indices.numel() - 1)).long()]


def seed_of(case: Case) -> int:
    """63 bits that name the case: the same on every machine and in every run."""
    text = json.dumps(case.to_json(), sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def pool_bytes(case: Case) -> int:
    """Bytes of K (V takes as many): the listed pages and a few more."""
    page = case.page_size * case.num_kv_heads * case.head_dim * ELEMENT_BYTES[case.kv_dtype]
    return (case.num_pages() + UNLISTED_PAGES) * page


def make_pool(num_bytes: int, kv_dtype: str, device: torch.device, seed: int) -> torch.Tensor:
    """A flat tensor of normal random numbers, filled slab by slab on the device.

    Returns
    -------
    tensor of `kv_dtype`, `[num_bytes / element size]`
    """
    dtype = TORCH_DTYPES[kv_dtype]
    pool = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    step = _SLAB_BYTES // dtype.itemsize
    for begin in range(0, pool.numel(), step):
        slab = pool[begin : begin + step]
        if dtype.itemsize == 1:
            slab.copy_(torch.randn(slab.numel(), dtype=torch.bfloat16, device=device, generator=generator))
        else:
            slab.normal_(generator=generator)
    return pool


def view_cache(pool: torch.Tensor, case: Case) -> torch.Tensor:
    """`[num_pages, page_size, num_kv_heads, head_dim]` over the pool's beginning, strided for HND.

    Raises
    ------
    EvenkvError
        When the pool is too small or of another dtype.
    """
    if pool.dtype != TORCH_DTYPES[case.kv_dtype]:
        raise EvenkvError(
            f"{case.name}: the pool holds {pool.dtype}, wanted {case.kv_dtype}.",
            "Put cases of one dtype into a family.",
        )
    wanted = pool_bytes(case) // pool.dtype.itemsize
    if pool.numel() < wanted:
        raise EvenkvError(
            f"{case.name}: the pool holds {pool.numel()} elements, wanted {wanted}.",
            "Begin a family with all its cases.",
        )
    pages = case.num_pages() + UNLISTED_PAGES
    if case.layout == "HND":
        return pool[:wanted].view(pages, case.num_kv_heads, case.page_size, case.head_dim).transpose(1, 2)
    return pool[:wanted].view(pages, case.page_size, case.num_kv_heads, case.head_dim)


def fill_queries(q: torch.Tensor, draw: int) -> None:
    """Normal random numbers in place: the same for one `draw` in every process on the same kind of device.

    Each call that is timed gets a draw of its own, so that none can answer with what it computed before.
    """
    q.normal_(generator=_generator(q.device).manual_seed(draw))


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)  # made once: this stands between every two timed calls


def build_tensors(
    case: Case, k_pool: torch.Tensor, v_pool: torch.Tensor, seed: int, draws: Sequence[int] = ()
) -> Tensors:
    """Tables and scales of a case, drawn on the pools' device from `seed`, and the queries of `draws`."""
    device = k_pool.device
    lengths = torch.tensor(case.request_lengths(), dtype=torch.int64)
    counts = torch.tensor([pages_of(int(n), case.page_size) for n in lengths], dtype=torch.int64)
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    last = torch.where(counts > 0, lengths - (counts - 1) * case.page_size, 0).to(torch.int32)
    generator = torch.Generator(device).manual_seed(seed)
    listed = int(counts.sum())
    order = torch.randperm(listed + UNLISTED_PAGES, device=device, generator=generator)
    shape = (case.batch, case.num_qo_heads, case.head_dim)
    q, *queries = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(1 + len(draws))]
    for content, draw in zip((q, *queries), (seed, *draws), strict=True):
        fill_queries(content, draw)
    k_scale = v_scale = None
    if case.spec().is_fp8:
        k_scale = 0.5 + 1.5 * torch.rand(case.num_kv_heads, device=device, generator=generator)
        v_scale = 0.5 + 1.5 * torch.rand(case.num_kv_heads, device=device, generator=generator)
    return Tensors(
        q=q,
        k_cache=view_cache(k_pool, case),
        v_cache=view_cache(v_pool, case),
        kv_indptr=indptr.to(device),
        kv_indices=order[:listed].to(torch.int32),
        kv_last_page_len=last.to(device),
        lengths=lengths.to(torch.int32).to(device),
        k_scale=k_scale,
        v_scale=v_scale,
        queries=tuple(queries),
        kv_indptr_host=indptr,
        kv_last_page_len_host=last,
        sm_scale=1 / math.sqrt(case.head_dim),
    )


def share(tensor: torch.Tensor) -> bytes:
    """A flat CUDA tensor as a message to ONE other process; this one must keep the tensor alive meanwhile.

    Each message counts as one user of the memory: torch frees it once all have let go.
    """
    import torch.multiprocessing  # noqa: F401  (registers the CUDA IPC reductions)

    return bytes(ForkingPickler.dumps(tensor.view(torch.uint8)))


def adopt(shared: bytes, kv_dtype: str) -> torch.Tensor:
    """The tensor that another process shared: the same device memory, no copy."""
    import torch.multiprocessing  # noqa: F401

    return pickle.loads(shared).view(TORCH_DTYPES[kv_dtype])
