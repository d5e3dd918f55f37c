"""Inputs of one decode step, built from request lengths, with everything that must not be read poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from evenkv.errors import EvenkvError
from evenkv.numerics.bytes import pages_of
from evenkv.spec.family import DecodeSpec

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_FP8_NAN = 0x7F  # NaN in e4m3fn and in e5m2 alike

# Pages of the pool that no request lists: a kernel that reads past its list meets them.
_UNLISTED_PAGES = 3


@dataclass(frozen=True)
class Problem:
    """One call's arguments.

    Attributes
    ----------
    spec : DecodeSpec
        Geometry; `page_size` and dtypes agree with the tensors.
    lengths : tuple of int
        Tokens of each request, as a correct kernel must see them.
    tensors : dict
        By input name: tensors as in the definition, `sm_scale` a float.
    """

    spec: DecodeSpec
    lengths: tuple[int, ...]
    tensors: dict[str, Any]

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.tensors["q"].device

    def inputs(self) -> tuple[Any, ...]:
        """Arguments in the definition's order."""
        return tuple(self.tensors[name] for name in self.spec.input_names)

    def to(self, device: str | torch.device) -> Problem:
        """The same problem on `device`; strides and shared storages (interleaved K and V) are kept."""
        storages: dict[int, torch.Tensor] = {}
        target = torch.empty(0, device=device).device  # with its index, unlike torch.device("cuda")

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device == target:
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                raw = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
                storages[storage.data_ptr()] = raw.to(target)
            moved = storages[storage.data_ptr()].view(value.dtype)
            return moved.as_strided(value.shape, value.stride(), value.storage_offset())

        return replace(self, tensors={name: move(value) for name, value in self.tensors.items()})

    def with_tensors(self, **changes: Any) -> Problem:
        """A copy with some arguments exchanged (for deliberately odd or broken calls)."""
        return replace(self, tensors={**self.tensors, **changes})

    def empty_outputs(self, poison: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[batch, num_qo_heads, head_dim]`, fp16 for an fp16 q, else bf16; lse float32; all NaN."""
        shape = (self.batch_size, self.spec.num_qo_heads, self.spec.head_dim)
        # A q of another dtype is misuse, which a kernel must refuse for q's sake alone.
        dtype = torch.float16 if self.tensors["q"].dtype == torch.float16 else torch.bfloat16
        output = torch.empty(shape, dtype=dtype, device=self.device)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        if poison:
            output.fill_(float("nan"))
            lse.fill_(float("nan"))
        return output, lse


def query_dtype(spec: DecodeSpec) -> torch.dtype:
    """dtype of q and output: fp16 with an fp16 cache, else bf16."""
    return torch.float16 if spec.kv_dtype == "float16" else torch.bfloat16


def make_problem(
    spec: DecodeSpec,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    num_pages: int | None = None,
    page_order: Literal["shuffled", "ordered"] = "shuffled",
    sm_scale: float | None = None,
    q_scale: float = 1.0,
    poison_unused: bool = True,
    k_scale: float | Sequence[float] | None = None,
    v_scale: float | Sequence[float] | None = None,
    interleaved: bool = False,
) -> Problem:
    """Draw a problem of the given request lengths.

    Parameters
    ----------
    spec : DecodeSpec
    lengths : sequence of int
        Tokens of each request; 0 lists no page and has `kv_last_page_len` 0.
    seed : int
        Seeds page order and contents; the same seed gives the same numbers on every device.
    num_pages : int, optional
        Pool size in pages; default: the listed pages and a few that no request lists.
    page_order : "shuffled" or "ordered"
        Order of the page ids in `kv_indices`.
    sm_scale : float, optional
        Default `head_dim ** -0.5`.
    q_scale : float
        Multiplies q: above 1 makes the softmax peaked.
    poison_unused : bool
        Fill unlisted pages and slots past each request's length with NaN.
    k_scale, v_scale : float or sequence of `num_kv_heads` floats, optional
        fp8 only; default: drawn from [0.5, 2), a different one for each head.
    interleaved : bool
        K and V are halves of one `[num_pages, 2, page_size, num_kv_heads, head_dim]` buffer.

    Raises
    ------
    EvenkvError
        When the pool is smaller than the listed pages, or scales do not fit the heads.
    """
    lengths = tuple(int(n) for n in lengths)
    page_counts = [pages_of(n, spec.page_size) for n in lengths]
    listed = sum(page_counts)
    pool = listed + _UNLISTED_PAGES if num_pages is None else num_pages
    if pool < listed:
        raise EvenkvError(
            f"num_pages is {pool}: wanted at least the {listed} pages that the lengths list.",
            "Pass a larger num_pages, or none.",
        )
    generator = torch.Generator().manual_seed(seed)
    if page_order == "shuffled":
        ids = torch.randperm(pool, generator=generator)[:listed]
    else:
        ids = torch.arange(listed)
    kv_indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    kv_indptr[1:] = torch.tensor(page_counts, dtype=torch.int64).cumsum(0)
    last_page_len = torch.tensor(
        [n - (p - 1) * spec.page_size if p else 0 for n, p in zip(lengths, page_counts, strict=True)],
        dtype=torch.int32,
    )

    q = torch.randn(len(lengths), spec.num_qo_heads, spec.head_dim, generator=generator) * q_scale
    used = _used_slots(spec.page_size, pool, ids, kv_indptr, last_page_len) if poison_unused else None
    tensors: dict[str, Any] = {
        "q": q.to(query_dtype(spec)),
        "kv_indptr": kv_indptr,
        "kv_indices": ids.to(torch.int32),
        "kv_last_page_len": last_page_len,
        "sm_scale": float(spec.head_dim**-0.5 if sm_scale is None else sm_scale),
    }
    tensors["k_cache"], tensors["v_cache"] = _draw_caches(spec, pool, used, generator, interleaved)
    if spec.is_fp8:
        tensors["k_scale"] = _scales(spec, "k_scale", k_scale, generator)
        tensors["v_scale"] = _scales(spec, "v_scale", v_scale, generator)
    wanted = {name: tensors[name] for name in spec.input_names}
    return Problem(spec, lengths, wanted).to(device)


def _draw_caches(
    spec: DecodeSpec,
    pool: int,
    used: torch.Tensor | None,
    generator: torch.Generator,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = TORCH_DTYPES[spec.kv_dtype]
    shape = (pool, spec.page_size, spec.num_kv_heads, spec.head_dim)
    halves = []
    for _ in range(2):
        half = torch.randn(shape, generator=generator).to(dtype)
        if used is not None:
            poison(half, ~used)
        halves.append(half)
    if interleaved:
        both = torch.stack([h.view(torch.uint8) for h in halves], dim=1).view(dtype)
        return both[:, 0], both[:, 1]
    return halves[0], halves[1]


def poison(cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write NaN into a cache `[num_pages, page_size, ...]` where `slots` `[num_pages, page_size]` is True."""
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8)[slots] = _FP8_NAN
    else:
        cache[slots] = float("nan")


def _used_slots(
    page_size: int, pool: int, ids: torch.Tensor, kv_indptr: torch.Tensor, last_page_len: torch.Tensor
) -> torch.Tensor:
    """Bool `[pool, page_size]`: slots that hold a token of some request."""
    used = torch.zeros(pool, page_size, dtype=torch.bool)
    used[ids] = True
    ends = kv_indptr[1:].long()
    requests = ends > kv_indptr[:-1].long()
    last_pages = ids[ends[requests] - 1]
    used[last_pages] = torch.arange(page_size)[None, :] < last_page_len[requests][:, None]
    return used


def _scales(
    spec: DecodeSpec, name: str, value: float | Sequence[float] | None, generator: torch.Generator
) -> torch.Tensor:
    """float32 `[num_kv_heads]`."""
    if value is None:
        return 0.5 + 1.5 * torch.rand(spec.num_kv_heads, generator=generator)
    scales = torch.tensor([value] if isinstance(value, int | float) else list(value), dtype=torch.float32)
    if scales.numel() == 1:
        return scales.expand(spec.num_kv_heads).contiguous()
    if scales.numel() != spec.num_kv_heads:
        raise EvenkvError(
            f"{name} has {scales.numel()} values: wanted one for each of {spec.num_kv_heads} KV heads.",
            "Pass one float, or one per KV head.",
        )
    return scales
