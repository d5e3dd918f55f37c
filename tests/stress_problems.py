"""Random decode problems for the stress test: drawn from a seed, built on the device; and a quick reference.

`draw_plan` uses no device, so that a process without one can say what problem a seed means.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cut_library import FEW_BLOCKS, Blocks

from evenkv.numerics.bytes import pages_of
from evenkv.numerics.problem import TORCH_DTYPES, Problem, query_dtype
from evenkv.numerics.reference import LOG2_E
from evenkv.spec.family import DecodeSpec

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"

# Few, since each is a build: every page size; every head_dim with 16-bit and fp8 caches; KV heads 1
# to 8; groups on both sides of 8 and 16 (the mma's columns, the heads of a unit). Pages of 2048 and more: a
# token a page makes millions of slots, of which the host expects large requests.
SPECS: tuple[DecodeSpec, ...] = (
    DecodeSpec(5, 1, 128, 1),
    DecodeSpec(8, 2, 128, 16),
    DecodeSpec(16, 8, 128, 64),
    DecodeSpec(21, 3, 64, 5),
    DecodeSpec(64, 4, 128, 48),
    DecodeSpec(6, 1, 256, 256),
    DecodeSpec(24, 1, 128, 16),
    DecodeSpec(16, 8, 64, 2048),
    DecodeSpec(45, 5, 64, 1, "float16"),
    DecodeSpec(21, 7, 128, 256, "float16"),
    DecodeSpec(20, 2, 256, 16, "float16"),
    DecodeSpec(64, 8, 128, 16, E4M3),
    DecodeSpec(6, 6, 128, 1, E4M3),
    DecodeSpec(24, 2, 64, 64, E4M3),
    DecodeSpec(32, 8, 64, 4096, E4M3),
    DecodeSpec(13, 1, 256, 5, E5M2),
    DecodeSpec(30, 2, 128, 48, E5M2),
)

# Slots of all KV heads that spare entries of kv_indices list: far more than requests have.
SPARE_SLOTS = 1 << 21
# So many that blocks take two KV heads where rows are short, and that an SM then takes two of them.
VAST_SLOTS = 1 << 22
# SMs of the device whose choices the plans are to cover: two heads a block are for batches of a few sizes.
WORKERS = 132

CACHE_LAYOUTS = ("nhd", "hnd", "interleaved", "interleaved-hnd", "padded")
QUERY_LAYOUTS = ("contiguous", "fused", "padded")
_JUNK_IDS = (-1, 1 << 30, 0x7FFFFFFF)  # in kv_indices past the last request: never read as pages
_REFERENCE_TOKENS = 1 << 16


class Limits(NamedTuple):
    """Sizes of problems: requests, tokens of all requests, tokens of one huge request."""

    batch: int = 300
    tokens: int = 60_000
    huge: int = 40_000


@dataclass(frozen=True)
class Plan:
    """All that decides one problem.

    Attributes
    ----------
    seed : int
        Draws the plan, and the contents of its tensors.
    lengths : tuple of int
        Tokens of each request.
    cache_layout, query_layout : str
        Of `CACHE_LAYOUTS`, `QUERY_LAYOUTS`.
    spare_ids : int
        Entries of kv_indices behind the last request's.
    shared_pages : bool
        Requests share full pages, as with a common prefix.
    q_scale : float
        Above 1, the softmax is peaked.
    scratch : (int, int)
        Byte that fills scratch before the first call and before the second.
    """

    seed: int
    spec: DecodeSpec
    lengths: tuple[int, ...]
    cache_layout: str
    query_layout: str
    spare_ids: int
    shared_pages: bool
    q_scale: float
    scratch: tuple[int, int]

    @property
    def counted_slots(self) -> int:
        """Slots of all KV heads, as kv_indptr counts them."""
        pages = sum(pages_of(n, self.spec.page_size) for n in self.lengths)
        return pages * self.spec.page_size * self.spec.num_kv_heads

    @property
    def listed_slots(self) -> int:
        """`counted_slots` with the spare entries: what the host knows."""
        return self.counted_slots + self.spare_ids * self.spec.page_size * self.spec.num_kv_heads

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:8])) + (", ..." if len(self.lengths) > 8 else "")
        shared = ", shared pages" if self.shared_pages else ""
        return (
            f"{self.spec.short_name} {self.spec.kv_dtype}, {len(self.lengths)} requests [{shown}] of "
            f"{sum(self.lengths)} tokens, cache {self.cache_layout}, q {self.query_layout}, "
            f"{self.spare_ids} spare ids{shared}, scratch 0x{self.scratch[0]:02X}"
        )


def draw_plan(seed: int, specs: tuple[DecodeSpec, ...] = SPECS, limits: Limits = Limits()) -> Plan:  # noqa: B008
    """The plan of a seed: the same on every machine."""
    rng = random.Random(seed)
    spec = rng.choice(specs)
    return Plan(
        seed=seed,
        spec=spec,
        lengths=_draw_lengths(rng, spec, limits),
        cache_layout=rng.choice(CACHE_LAYOUTS),
        query_layout=rng.choice(QUERY_LAYOUTS),
        spare_ids=_draw_spare_ids(rng, spec),
        shared_pages=rng.random() < 0.2,
        q_scale=rng.choice((1.0, 1.0, 1.0, 4.0)),
        scratch=(rng.choice((0xFF, 0x7F, 0x00, rng.randrange(256))), rng.randrange(256)),
    )


def _draw_lengths(rng: random.Random, spec: DecodeSpec, limits: Limits) -> tuple[int, ...]:
    batch = round(limits.batch ** rng.random())
    if rng.random() < (0.5 if spec.page_size > 1024 else 0.1):
        batch = rng.randint((limits.batch + 1) // 2, limits.batch)
    if rng.random() < 0.2:
        batch = _draw_pair_batch(rng, spec, limits) or batch
    medium = max(17, min(1500, limits.tokens * 2 // (3 * batch)))
    edges = (16, 32, 64, 128, 256, *(spec.page_size * k for k in (1, 2, 3)))

    def draw(kind: str) -> int:
        if kind == "tiny":
            return rng.randint(1, 16)
        if kind == "edge":
            return max(0, min(medium, rng.choice(edges)) + rng.choice((-1, 0, 1)))
        return round(math.exp(rng.uniform(math.log(17), math.log(medium)))) if kind == "medium" else 0

    kinds = ("empty", "tiny", "edge", "medium")
    weights = [rng.random() ** 2 + 1e-3 for _ in kinds]  # most batches are mostly of one or two kinds
    lengths = [draw(kind) for kind in rng.choices(kinds, weights, k=batch)]
    if rng.random() < 0.35:
        low = max(1, limits.huge // 40)
        lengths[rng.randrange(batch)] = round(low * (limits.huge / low) ** rng.random())
    left = limits.tokens
    for request, length in sorted(enumerate(lengths), key=lambda item: -item[1]):
        lengths[request] = min(length, left)
        left -= lengths[request]
    return tuple(lengths)


def _draw_pair_batch(rng: random.Random, spec: DecodeSpec, limits: Limits) -> int | None:
    """Requests with which a block takes two KV heads; None where no number of them does."""
    blocks = Blocks.of(spec)
    fewest = blocks.resident * WORKERS // spec.num_kv_heads + 1  # more than run at once of single heads
    most = min(limits.batch, 2 * FEW_BLOCKS * WORKERS // spec.num_kv_heads)
    if not blocks.has_pairs or spec.num_kv_heads % 2 or fewest > most:
        return None
    return rng.randint(fewest, most)


def _draw_spare_ids(rng: random.Random, spec: DecodeSpec) -> int:
    """None, a few, or so many that the host takes the problem for a large one."""
    few = rng.choice((0, 0, 1, 37))
    large = SPARE_SLOTS if rng.random() < 0.7 else VAST_SLOTS
    return -(-large // (spec.page_size * spec.num_kv_heads)) if rng.random() < 0.15 else few


def build_problem(plan: Plan, device: Any) -> Problem:
    """The problem of a plan, drawn on `device`: the same on every device of that type.

    Every slot that no request uses, and what lies beside strided tensors, is NaN.
    """
    spec = plan.spec
    host = random.Random(plan.seed)
    generator = torch.Generator(device=device).manual_seed(plan.seed)
    counts = torch.tensor([pages_of(n, spec.page_size) for n in plan.lengths])
    lengths = torch.tensor(plan.lengths)
    kv_indptr = torch.zeros(len(plan.lengths) + 1, dtype=torch.int64)
    kv_indptr[1:] = counts.cumsum(0)
    ids, pool = _draw_page_ids(plan, kv_indptr)
    last_page_len = torch.where(counts > 0, lengths - (counts - 1) * spec.page_size, 0)

    used = torch.zeros(pool, spec.page_size, dtype=torch.bool)
    used[ids] = True
    ends = kv_indptr[1:][counts > 0] - 1
    used[ids[ends]] = torch.arange(spec.page_size)[None, :] < last_page_len[counts > 0][:, None]
    slots = used.nonzero().to(device)
    caches = _empty_caches(plan, pool, device)
    for cache in caches:
        shape = (len(slots), spec.num_kv_heads, spec.head_dim)
        rows = torch.randn(shape, generator=generator, device=device).to(cache.dtype)
        _bits(cache)[slots[:, 0], slots[:, 1]] = _bits(rows)

    junk = torch.tensor([host.choice(_JUNK_IDS) for _ in range(min(plan.spare_ids, 64))], dtype=torch.int64)
    junk = junk.repeat(plan.spare_ids // max(1, len(junk)) + 1)[: plan.spare_ids]
    tensors: dict[str, Any] = {
        "q": _draw_queries(plan, generator, device),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "kv_indptr": kv_indptr.int().to(device),
        "kv_indices": torch.cat([ids, junk]).int().to(device),
        "kv_last_page_len": last_page_len.int().to(device),
        "sm_scale": spec.head_dim**-0.5,
    }
    for name in ("k_scale", "v_scale"):
        scales = torch.rand(spec.num_kv_heads, generator=generator, device=device)
        tensors[name] = 0.5 + 1.5 * scales
    return Problem(spec, plan.lengths, {name: tensors[name] for name in spec.input_names})


def _draw_page_ids(plan: Plan, kv_indptr: torch.Tensor) -> tuple[torch.Tensor, int]:
    """kv_indices int64 without spare entries, and the pool's size. Last pages are never shared."""
    generator = torch.Generator().manual_seed(plan.seed)
    listed = int(kv_indptr[-1])
    if not plan.shared_pages:
        return torch.randperm(listed + 3, generator=generator)[:listed], listed + 3
    last = torch.zeros(listed, dtype=torch.bool)
    last[kv_indptr[1:][kv_indptr[1:] > kv_indptr[:-1]] - 1] = True
    full = int((~last).sum())
    prefix = full // 3 + 1
    pool = int(last.sum()) + prefix + 3
    shuffled = torch.randperm(pool, generator=generator)
    ids = torch.empty(listed, dtype=torch.int64)
    ids[~last] = shuffled[torch.randint(prefix, (full,), generator=generator)]
    ids[last] = shuffled[prefix : prefix + int(last.sum())]
    return ids, pool


def _empty_caches(plan: Plan, pool: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[pool, page_size, num_kv_heads, head_dim]`, all NaN, in the plan's layout."""
    spec, layout = plan.spec, plan.cache_layout
    dtype = TORCH_DTYPES[spec.kv_dtype]
    inner = [spec.page_size, spec.num_kv_heads, spec.head_dim]
    if layout.endswith("hnd"):
        inner[:2] = inner[1::-1]
    if layout == "padded":
        inner[2] += 16  # rows stay 16-byte aligned

    def buffer(*shape: int) -> torch.Tensor:
        # A byte of ones is part of a NaN in each of the four dtypes.
        raw = torch.full((math.prod(shape) * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        return raw.view(dtype).view(shape)

    if layout.startswith("interleaved"):
        both = buffer(pool, 2, *inner)
        halves = [both[:, 0], both[:, 1]]
    else:
        halves = [buffer(pool, *inner), buffer(pool, *inner)]
    halves = [half[..., : spec.head_dim] for half in halves]
    if layout.endswith("hnd"):
        halves = [half.transpose(1, 2) for half in halves]
    return halves[0], halves[1]


def _draw_queries(plan: Plan, generator: torch.Generator, device: Any) -> torch.Tensor:
    spec = plan.spec
    shape = [len(plan.lengths), spec.num_qo_heads, spec.head_dim]
    values = torch.randn(shape, generator=generator, device=device) * plan.q_scale
    outer = list(shape)
    if plan.query_layout == "fused":
        outer[1] += 2 * spec.num_kv_heads
    elif plan.query_layout == "padded":
        outer[2] += 2  # rows stay 4-byte aligned, and no more
    fused = torch.full(outer, math.nan, dtype=query_dtype(spec), device=device)
    q = fused[:, : shape[1], : shape[2]]
    q.copy_(values)
    return q


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: fp8 tensors cannot be indexed everywhere."""
    return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


def fast_reference(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """As `evenkv.numerics.reference.reference`, with requests of like lengths together: few launches.

    Returns
    -------
    output : float64 `[batch, num_qo_heads, head_dim]`
    lse : float64 `[batch, num_qo_heads]`, base 2
    """
    spec, t, device = problem.spec, problem.tensors, problem.device
    output = torch.zeros(t["q"].shape, dtype=torch.float64, device=device)
    lse = torch.full(t["q"].shape[:2], -math.inf, dtype=torch.float64, device=device)
    for group in _alike(problem.lengths):
        requests = torch.tensor(group, device=device)
        lengths = torch.tensor([problem.lengths[r] for r in group], device=device)[:, None]
        token = torch.arange(max(problem.lengths[r] for r in group), device=device)[None, :]
        live = token < lengths
        token = torch.minimum(token, lengths - 1)
        page = t["kv_indices"][t["kv_indptr"][requests][:, None] + token // spec.page_size].long()
        slot = token % spec.page_size
        k, v = (_bits(t[n])[page, slot].view(t[n].dtype).double() for n in ("k_cache", "v_cache"))
        q = t["q"][requests].double().view(len(group), spec.num_kv_heads, spec.group_size, spec.head_dim)
        logits = torch.einsum("bkgd,bnkd->bkgn", q, k) * t["sm_scale"]
        if spec.is_fp8:
            logits *= t["k_scale"].double()[:, None, None]
        logits.masked_fill_(~live[:, None, None, :], -math.inf)
        attended = torch.einsum("bkgn,bnkd->bkgd", logits.softmax(-1), v)
        if spec.is_fp8:
            attended *= t["v_scale"].double()[:, None, None]
        output[requests] = attended.reshape(len(group), *output.shape[1:])
        lse[requests] = torch.logsumexp(logits, -1).reshape(len(group), -1) * LOG2_E
    return output, lse


def _alike(lengths: tuple[int, ...]) -> list[list[int]]:
    """Requests with tokens, in groups of lengths within a factor of two and of bounded size."""
    groups: list[list[int]] = []
    top = 0
    for request in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: -lengths[r]):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or 2 * lengths[request] <= longest or (len(groups[-1]) + 1) * top > _REFERENCE_TOKENS:
            groups.append([])
            top = lengths[request]
        groups[-1].append(request)
    return groups


def specs_of(kernel: str) -> tuple[DecodeSpec, ...]:
    """What a kernel is stressed with: Triton compiles each geometry at its first call, so it gets fewer."""
    return SPECS if kernel.startswith("evenkv_cuda") else SPECS[1::3]
