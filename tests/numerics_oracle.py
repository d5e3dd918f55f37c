"""A right kernel in plain torch, and wrong ones made from it: what the G-cases are tested with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from evenkv.spec.family import DecodeSpec

Rows = tuple[torch.Tensor, torch.Tensor]


def make_kernel(
    *,
    checked: bool = False,
    lengths: Callable[[DecodeSpec, int, int], int] | None = None,
    logits: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    k_scale_in_lse: bool = True,
    lse_base: float = 2.0,
    write_empty: bool = True,
    mask_by_zero: bool = False,
    after: Callable[..., None] = lambda *_: None,
) -> Callable[..., None]:
    """`kernel(spec, *inputs, output, lse)` in fp32; every keyword switches one fault on."""
    length_of = lengths or (lambda spec, pages, last: (pages - 1) * spec.page_size + last if pages else 0)

    def kernel(spec: DecodeSpec, *arguments: Any) -> None:
        t = dict(zip(spec.input_names, arguments, strict=False))
        output, lse = arguments[-2:]
        _refuse_misuse(t)
        starts, pool = t["kv_indptr"].tolist(), t["k_cache"].shape[0]
        lasts = t["kv_last_page_len"].tolist() if spec.has_last_page_len else [1] * output.shape[0]
        for request, last in enumerate(lasts):
            pages = t["kv_indices"][starts[request] : starts[request + 1]].long()
            bad = [int(p) for p in pages if not 0 <= p < pool]
            if len(pages) and not (1 if checked else 0) <= last <= spec.page_size:
                bad.append(last)
            if bad and checked:
                raise ValueError(f"request {request} has {bad[0]}")
            if bad:
                output[request], lse[request] = math.nan, math.nan
                continue
            length = length_of(spec, len(pages), last)
            if length == 0:
                if write_empty:
                    output[request], lse[request] = 0, -math.inf
                continue
            k, v = (_rows(t[name], pages, length, mask_by_zero) for name in ("k_cache", "v_cache"))
            q = t["q"][request].float().view(spec.num_kv_heads, spec.group_size, -1)
            scores = torch.einsum("kgd,nkd->kgn", q, k) * t["sm_scale"]
            scale = t["k_scale"][:, None, None] if spec.is_fp8 else 1.0
            scores = logits(scores * scale)
            if mask_by_zero:
                scores = scores.nan_to_num()
            attended = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), v)
            if spec.is_fp8:
                attended = attended * t["v_scale"][:, None, None]
            output[request] = attended.reshape(output.shape[1:]).to(output.dtype)
            shown = scores if k_scale_in_lse else scores / scale
            lse[request] = shown.logsumexp(-1).reshape(-1) / math.log(lse_base)
        after(t, output, lse)

    return kernel


def _rows(cache: torch.Tensor, pages: torch.Tensor, length: int, whole_pages: bool) -> torch.Tensor:
    raw = cache.view(torch.uint8)[pages].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[pages]
    rows = raw.flatten(0, 1).float()
    return rows if whole_pages else rows[:length]


def _refuse_misuse(tensors: dict[str, Any]) -> None:
    for name in ("kv_indptr", "kv_indices", "kv_last_page_len"):
        table = tensors.get(name)
        if table is not None and (table.dtype != torch.int32 or not table.is_contiguous()):
            raise TypeError(f"{name} is not packed int32")
    if tensors["q"].dtype != torch.bfloat16:
        raise TypeError("q is not bfloat16")
    if tensors["k_cache"].dtype != tensors["v_cache"].dtype:
        raise TypeError("k_cache and v_cache differ in dtype")
