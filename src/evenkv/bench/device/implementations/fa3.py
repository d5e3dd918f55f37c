"""FlashAttention-3's `flash_attn_with_kvcache` (tokenspeed-fa3): split over KV, with a block table.

Best settings, on Hopper: its own choice of splits (`num_splits=0`), with the scheduler's metadata computed
ahead ("metadata", as vLLM does once a step) or inside each call ("plain"): the harness takes the faster. An
fp8 cache wants fp8 queries: each request's queries of a KV head are rounded with a scale of their own,
outside the clock; the row says "q quantised". Table and lengths are made ahead, as engines keep them.
"""

from __future__ import annotations

import importlib.metadata
import math
import time
from typing import Any

import torch

from evenkv.bench.case import Case
from evenkv.bench.device.implementations.base import Implementation, Prepared, Returned, per_head
from evenkv.bench.device.inputs import Tensors
from evenkv.bench.device.worker import describe
from evenkv.evaluate.environment import INSTALL_FA3

_LOG2_E = math.log2(math.e)
_E4M3_MAX = 448.0


class FlashAttention3(Implementation):
    """`fa3`."""

    def missing(self) -> str | None:
        try:
            import flash_attn_interface  # noqa: F401
        except Exception as error:  # a package that is there may still fail to load
            return f"FlashAttention-3 does not import ({describe(error)}): `{INSTALL_FA3}`"
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            return "FlashAttention-3 runs on Hopper (sm_90) alone"
        return None

    def version(self) -> str | None:
        try:
            return importlib.metadata.version("tokenspeed-fa3")
        except importlib.metadata.PackageNotFoundError:
            return "unknown (flash_attn_interface of another package)"

    def quantises_query(self, case: Case) -> bool:
        return case.spec().is_fp8

    def settings(self, case: Case) -> tuple[str, ...]:
        return ("plain", "metadata")

    def prepare(self, case: Case, tensors: Tensors, setting: str) -> Prepared:
        return _PreparedFa3(case, tensors, setting)


class _PreparedFa3(Prepared):
    def __init__(self, case: Case, tensors: Tensors, setting: str) -> None:
        from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

        self._run, self._case, self._tensors = flash_attn_with_kvcache, case, tensors
        self._arguments: dict[str, Any] = {
            "cache_seqlens": tensors.lengths,
            "page_table": tensors.block_table(),
            "softmax_scale": tensors.sm_scale,
            "num_splits": 0,
            "return_softmax_lse": True,
        }
        self._query = tensors.q.unsqueeze(1)
        if tensors.k_scale is not None and tensors.v_scale is not None:
            self._query = torch.empty_like(self._query, dtype=torch.float8_e4m3fn)
            shape = (case.batch, case.num_kv_heads)
            self._q_descale = torch.empty(shape, dtype=torch.float32, device=tensors.q.device)
            self._arguments |= {
                "q_descale": self._q_descale,
                "k_descale": tensors.k_scale.expand(shape).contiguous(),
                "v_descale": tensors.v_scale.expand(shape).contiguous(),
            }
            self.new_queries()
        if setting == "metadata":
            begin = time.perf_counter_ns()
            self._arguments["scheduler_metadata"] = get_scheduler_metadata(
                case.batch,
                1,
                # As the call itself sees it: FA3 chooses its splits from the table's width.
                self._arguments["page_table"].shape[1] * case.page_size,
                case.num_qo_heads,
                case.num_kv_heads,
                case.head_dim,
                tensors.lengths,
                qkv_dtype=self._query.dtype,
                page_size=case.page_size,
                num_splits=0,
            )
            self.plan_us = (time.perf_counter_ns() - begin) / 1e3
        self.returned = ()

    def new_queries(self) -> None:
        if self._tensors.k_scale is None:
            return
        q = per_head(self._tensors.q, self._case).float()
        scale = q.abs().amax(dim=(2, 3)).clamp_(min=1e-12) / _E4M3_MAX
        self._q_descale.copy_(scale)
        self._query.copy_((q / scale[:, :, None, None]).view(self._query.shape))

    def call(self) -> None:
        output, lse, *_ = self._run(
            self._query, self._tensors.k_cache, self._tensors.v_cache, **self._arguments
        )
        self.returned = output, lse

    def result(self, returned: Returned) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, lse = returned  # [batch, 1, heads, dim], natural lse [batch, heads, 1]
        return output.squeeze(1), lse.squeeze(-1) * _LOG2_E
