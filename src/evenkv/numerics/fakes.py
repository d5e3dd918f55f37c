"""Wrong kernels that lenient checks have let pass: each must fail on every workload."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from evenkv.numerics.problem import Problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

KernelCallable = Callable[..., Any]
"""`kernel(spec, *inputs, output, lse)`: inputs in the definition's order, writes output and lse."""


def no_op(spec: DecodeSpec, *arguments: Any) -> None:
    """Writes nothing: the output keeps what was there."""


def all_zero(spec: DecodeSpec, *arguments: Any) -> None:
    """Zeros: near the right values on long contexts, whose outputs shrink as 1 / sqrt(length)."""
    output, lse = arguments[-2:]
    output.zero_()
    lse.zero_()


def mean_of_v(spec: DecodeSpec, *arguments: Any) -> None:
    """Attention without q and K: every token of a request weighs the same."""
    tensors = dict(zip(spec.input_names, arguments, strict=False))
    output, lse = arguments[-2:]
    starts = tensors["kv_indptr"].tolist()
    for request in range(output.shape[0]):
        pages = tensors["kv_indices"][starts[request] : starts[request + 1]].long()
        if len(pages) == 0:
            output[request] = 0
            lse[request] = -math.inf
            continue
        length = len(pages) * spec.page_size
        if spec.has_last_page_len:
            length += int(tensors["kv_last_page_len"][request]) - spec.page_size
        v = tensors["v_cache"]
        rows = v.view(torch.uint8)[pages].view(v.dtype) if v.dtype.itemsize == 1 else v[pages]
        mean = rows.flatten(0, 1)[:length].float().mean(0)
        if spec.is_fp8:
            mean = mean * tensors["v_scale"][:, None]
        output[request] = mean.repeat_interleave(spec.group_size, dim=0).to(output.dtype)
        lse[request] = math.log2(length)


class StaleOutput:
    """Answers with the result of the problem before, whatever this one holds.

    Parameters
    ----------
    previous : Problem
        The problem before. When its batch differs, its requests are repeated or cut to fit.
    """

    def __init__(self, previous: Problem) -> None:
        self._output, self._lse = reference(previous)

    def __call__(self, spec: DecodeSpec, *arguments: Any) -> None:
        output, lse = arguments[-2:]
        rows = torch.arange(output.shape[0], device=self._output.device) % max(1, self._output.shape[0])
        output.copy_(self._output[rows])
        lse.copy_(self._lse[rows])
