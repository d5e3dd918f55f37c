"""FlashInfer's paged decode: tensor cores (tc), CUDA cores (cc), and XQA.

Best settings, on Hopper:
- tc: the FA2 template on tensor cores, planned without the CUDA-graph mode (whose plan launches blocks for
  the largest batch): with fixed lengths its run() can be captured all the same, and is faster.
- cc: the CUDA-core kernel, where it is compiled for the group size.
- fp8: one scale for all heads is all that it takes, so each head's K scale is multiplied into its queries,
  which go in as fp16 (fp8 widens to fp16 in one instruction; bf16 queries would be rounded eight times as
  coarsely).
- xqa: `xqa_batch_decode_with_kv_cache` with a block table. On sm_90 an fp8 cache runs its fp8 kernel, which
  rounds queries and probabilities to fp8. It gives no lse.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch

from evenkv.bench.case import Case
from evenkv.bench.device.implementations.base import (
    Implementation,
    Prepared,
    Returned,
    bf16_outputs,
    per_head,
)
from evenkv.bench.device.inputs import Tensors
from evenkv.bench.device.worker import describe
from evenkv.evaluate.environment import INSTALL
from evenkv.pack.manifest import Kernel, find_kernel
from evenkv.paths import Repository

_WORKSPACE_BYTES = 256 << 20
_XQA_PAGES = (16, 32, 64, 128)


class _FlashInfer(Implementation):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._workspace: torch.Tensor | None = None

    def missing(self) -> str | None:
        try:
            import flashinfer  # noqa: F401
        except Exception as error:  # a package that is there may still fail to load
            return f"flashinfer-python does not import ({describe(error)}): `{INSTALL}`"
        return None

    def version(self) -> str | None:
        return importlib.metadata.version("flashinfer-python")

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Zeroed once, as FlashInfer wants it; kept for all cases."""
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


class FlashInferDecode(_FlashInfer):
    """`BatchDecodeWithPagedKVCacheWrapper`, on tensor cores or on CUDA cores."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._tensor_cores = name == "flashinfer-tc"
        self._wrappers: dict[str, Any] = {}
        self._kernel: Kernel | None = None

    def supports(self, case: Case) -> str | None:
        if self._kernel is None:
            self._kernel = find_kernel(Repository(Path()), self.name.replace("-", "_"))
        # The packed solution's manifest knows what FlashInfer's kernels are compiled for.
        return self._kernel.manifest.supports.refusal(case.spec())

    def build_key(self, case: Case) -> Hashable:
        return case.kv_dtype, case.head_dim

    def prepare(self, case: Case, tensors: Tensors, setting: str) -> Prepared:
        if case.layout not in self._wrappers:
            import flashinfer

            self._wrappers[case.layout] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace(tensors.q.device),
                case.layout,
                use_tensor_cores=self._tensor_cores,
                backend="fa2" if self._tensor_cores else "auto",
            )
        return _PreparedDecode(self._wrappers[case.layout], case, tensors)


class _PreparedDecode(Prepared):
    def __init__(self, wrapper: Any, case: Case, tensors: Tensors) -> None:
        self._wrapper, self._case, self._tensors = wrapper, case, tensors
        self._caches = _native_caches(case, tensors)
        dtype = torch.float16 if case.spec().is_fp8 else torch.bfloat16
        output, lse = bf16_outputs(case, tensors.q.device)
        self.returned = output.to(dtype), lse
        self._queries = _Queries(case, tensors, dtype)
        begin = time.perf_counter_ns()
        # From the host's copies: plan() would fetch tables from the device first.
        wrapper.plan(
            tensors.kv_indptr_host,
            tensors.kv_indices,
            tensors.kv_last_page_len_host,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            case.page_size,
            q_data_type=dtype,
            kv_data_type=tensors.k_cache.dtype,
            sm_scale=tensors.sm_scale,
        )
        self.plan_us = (time.perf_counter_ns() - begin) / 1e3

    def new_queries(self) -> None:
        self._queries.renew()

    def call(self) -> None:
        output, lse = self.returned
        self._wrapper.run(self._queries.tensor, self._caches, out=output, lse=lse, return_lse=True)

    def result(self, returned: Returned) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, lse = returned
        return _scaled_by_v(self._case, self._tensors, output), lse


class FlashInferXqa(_FlashInfer):
    """XQA, TensorRT-LLM's decode kernel, as FlashInfer ships it."""

    def missing(self) -> str | None:
        if reason := super().missing():
            return reason
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10, 12):
            return "XQA runs on sm_90, sm_100 and sm_120 alone"
        return None

    def supports(self, case: Case) -> str | None:
        if case.page_size not in _XQA_PAGES:
            return f"XQA has page sizes {', '.join(map(str, _XQA_PAGES))}, not {case.page_size}"
        return None

    def quantises_query(self, case: Case) -> bool:
        return case.spec().is_fp8

    def build_key(self, case: Case) -> Hashable:
        return case.kv_dtype, case.page_size, case.head_dim, case.num_qo_heads // case.num_kv_heads

    def prepare(self, case: Case, tensors: Tensors, setting: str) -> Prepared:
        return _PreparedXqa(self.workspace(tensors.q.device), case, tensors)


class _PreparedXqa(Prepared):
    def __init__(self, workspace: torch.Tensor, case: Case, tensors: Tensors) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        self._run = xqa_batch_decode_with_kv_cache
        self._workspace, self._case, self._tensors = workspace, case, tensors
        self._caches = _native_caches(case, tensors)
        # XQA writes q's dtype.
        dtype = torch.float16 if case.spec().is_fp8 else torch.bfloat16
        self._queries = _Queries(case, tensors, dtype)
        self.returned = (bf16_outputs(case, tensors.q.device)[0].to(dtype),)
        self._block_table = tensors.block_table()
        self._lengths = tensors.lengths.view(torch.uint32)
        self._longest = max(case.request_lengths())

    def new_queries(self) -> None:
        self._queries.renew()

    def call(self) -> None:
        self._run(
            query=self._queries.tensor,
            kv_cache=self._caches,
            workspace_buffer=self._workspace,
            block_tables=self._block_table,
            seq_lens=self._lengths,
            max_seq_len=self._longest,
            bmm1_scale=self._tensors.sm_scale,
            bmm2_scale=1.0,
            out=self.returned[0],
            kv_layout=self._case.layout,
        )

    def result(self, returned: Returned) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _scaled_by_v(self._case, self._tensors, returned[0]), None


class _Queries:
    """q as FlashInfer gets it: itself, or with the K scales multiplied in."""

    def __init__(self, case: Case, tensors: Tensors, dtype: torch.dtype) -> None:
        self._case, self._tensors = case, tensors
        self.tensor = tensors.q if tensors.k_scale is None else torch.empty_like(tensors.q, dtype=dtype)
        self.renew()

    def renew(self) -> None:
        scale = self._tensors.k_scale
        if scale is not None:
            by_head = per_head(self._tensors.q, self._case)
            torch.mul(by_head, scale.view(1, -1, 1, 1), out=per_head(self.tensor, self._case))


def _native_caches(case: Case, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches in the case's own layout, contiguous."""
    if case.layout == "HND":
        return tensors.k_cache.transpose(1, 2), tensors.v_cache.transpose(1, 2)
    return tensors.k_cache, tensors.v_cache


def _scaled_by_v(case: Case, tensors: Tensors, output: torch.Tensor) -> torch.Tensor:
    """The output with each head's V scale, rounded to bf16 once."""
    if tensors.v_scale is None:
        return output
    scaled = per_head(output, case).float() * tensors.v_scale.view(1, -1, 1, 1)
    return scaled.view_as(output).to(torch.bfloat16)
