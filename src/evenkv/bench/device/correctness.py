"""Right first: a sample of requests against an fp32 reference, limits from the baseline's own error.

The owner of the caches computes the reference on the device; each implementation's process hands over the
rows that were drawn; the parent, which runs no kernel, judges. Nobody who is judged knows the sample
beforehand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evenkv.bench.case import Case
from evenkv.bench.device.inputs import Tensors
from evenkv.numerics.bytes import pages_of
from evenkv.numerics.error import measure
from evenkv.numerics.tolerance import Tolerance, tolerance

LOG2_E = math.log2(math.e)

_MOST_ROWS = 64
_TOKEN_HEADS = 8 << 20  # tokens x KV heads that a case's sample may hold: 8 GiB of fp32 at head_dim 128
_CHUNK_ELEMENTS = 64 << 20  # of one gathered fp32 piece: 256 MB

# e4m3 keeps 3 bits of mantissa: roundings of relative rms 2^-5.2. Queries rounded so shift logits by as much
# times |k| scales up to 2, probabilities add their own. A mean or zero "kernel" is off by 0.7 or more.
QUANTISED_QUERY = Tolerance(output=0.15, lse=0.25)

# What rounding to bf16 can cost an output, relative to itself (half of 2^-7), and a quarter for what comes
# before it. Another query's largest output may lie beyond the next power of two, where roundings are twice
# those that the baseline was checked on: that is nobody's fault.
_BF16_ROUNDING = 1.25 * 2.0**-8


@dataclass(frozen=True)
class Rows:
    """What a kernel wrote for the sampled requests: float32 `[rows, num_qo_heads(, head_dim)]`.

    `lse` is None where the implementation gives none. `all_written`: every element of the whole output is
    finite, so nothing of the poison is left.
    """

    output: np.ndarray
    lse: np.ndarray | None
    all_written: bool


@dataclass(frozen=True)
class Verdict:
    """Errors on the sample, and the faults: none means right."""

    max_abs_err: float
    rel_err: float
    faults: tuple[str, ...]


def sample_requests(lengths: Sequence[int], num_kv_heads: int, rng: random.Random) -> list[int]:
    """Requests to check: all when they are few and short, else the ends, the extremes and a random draw.

    The draw comes from `rng`; the longest, the shortest, the first and the last are always in.
    """
    order = range(len(lengths))
    chosen = {0, len(lengths) - 1, max(order, key=lengths.__getitem__), min(order, key=lengths.__getitem__)}
    budget = _TOKEN_HEADS // num_kv_heads - sum(lengths[request] for request in chosen)
    rest = [request for request in order if request not in chosen]
    rng.shuffle(rest)
    for request in rest:
        if len(chosen) >= _MOST_ROWS:
            break
        if lengths[request] <= budget:
            chosen.add(request)
            budget -= lengths[request]
    return sorted(chosen)


@torch.no_grad()
def reference_rows(
    case: Case, tensors: Tensors, requests: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Attention of the sampled requests in fp32, for every variant of the queries.

    Returns
    -------
    outputs : per variant, float32 `[requests, num_qo_heads, head_dim]`
    lses : per variant, float32 `[requests, num_qo_heads]`, base 2

    Notes
    -----
    Short requests go in batches, a long one in pieces: any lengths take about 0.5 GB. fp32 products need TF32
    to be off.
    """
    variants, device = len(tensors.queries), tensors.q.device
    outputs = torch.zeros(variants, len(requests), case.num_qo_heads, case.head_dim, device=device)
    lses = torch.full((variants, len(requests), case.num_qo_heads), -math.inf, device=device)
    lengths = case.request_lengths()
    pages = [pages_of(lengths[request], case.page_size) for request in requests]
    most = max(1, _CHUNK_ELEMENTS // (case.num_kv_heads * case.head_dim * case.page_size))
    for rows in _batches(pages, most):
        batch = torch.tensor([requests[row] for row in rows], device=device)
        index = torch.tensor(rows, device=device)
        outputs[:, index], lses[:, index] = _attend(case, tensors, batch, pages[rows[0]], most)
    return list(outputs.cpu().numpy()), list(lses.cpu().numpy())


def _batches(pages: Sequence[int], most: int) -> list[list[int]]:
    """Places of the requests that have pages, the longest first, in lists for one pass each.

    Padded to its first one's, a list holds at most `most` pages; a request that has more is alone.
    """
    batches: list[list[int]] = []
    for place in sorted((place for place, count in enumerate(pages) if count), key=lambda p: -pages[p]):
        if batches and (len(batches[-1]) + 1) * pages[batches[-1][0]] <= most:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _attend(
    case: Case, tensors: Tensors, requests: torch.Tensor, width: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_rows` of one batch, whose longest request has `width` pages: gathers `most` at once."""
    heads, dim, count = case.num_kv_heads, case.head_dim, len(requests)
    variants, group = len(tensors.queries), case.num_qo_heads // heads
    device = tensors.q.device
    # Shorter requests are padded with their own last page. What lies behind their tokens gets a weight of 0,
    # which is enough: pools are finite.
    first, end = tensors.kv_indptr[requests].long(), tensors.kv_indptr[requests + 1].long()
    entries = torch.minimum(first[:, None] + torch.arange(width, device=device), end[:, None] - 1)
    pieces = tensors.kv_indices[entries].long().split(max(1, most // count), dim=1)
    padding = torch.arange(width * case.page_size, device=device) >= tensors.lengths[requests, None]
    # [count * heads, variants * group, dim]: one pass over K and V serves all variants.
    q = torch.stack([variant[requests] for variant in tensors.queries]).float()
    q = q.view(variants, count, heads, group, dim).permute(1, 2, 0, 3, 4).reshape(count * heads, -1, dim)
    q = q.contiguous()  # with one head a group or one request, reshape copies nothing
    logits = torch.cat([torch.bmm(q, _gather(tensors.k_cache, piece).mT) for piece in pieces], dim=-1)
    logits *= tensors.sm_scale
    by_head = logits.view(count, heads, variants * group, -1)
    if tensors.k_scale is not None:
        by_head *= tensors.k_scale[:, None, None]
    by_head.masked_fill_(padding[:, None, None], -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None])
    attended = torch.zeros_like(q)
    for part, piece in zip(weights.split(pieces[0].shape[1] * case.page_size, -1), pieces, strict=True):
        attended += torch.bmm(part, _gather(tensors.v_cache, piece))
    if tensors.v_scale is not None:
        attended.view(count, heads, -1).mul_(tensors.v_scale[:, None])
    attended = attended.view(count, heads, variants, group, dim).permute(2, 0, 1, 3, 4)
    lse = (lse * LOG2_E).view(count, heads, variants, group).permute(2, 0, 1, 3)
    return attended.reshape(variants, count, -1, dim), lse.reshape(variants, count, -1)


def _gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """float32 `[requests * num_kv_heads, tokens, head_dim]` of `[requests, pages]`, in order."""
    is_byte = cache.dtype.itemsize == 1  # indexing of fp8 tensors is not implemented everywhere
    gathered = cache.view(torch.uint8)[pages].view(cache.dtype) if is_byte else cache[pages]
    by_head = gathered.permute(0, 3, 1, 2, 4)
    by_head = by_head.to(torch.float32, memory_format=torch.contiguous_format)
    return by_head.view(len(pages) * cache.shape[2], -1, cache.shape[3])


def judge(
    case: Case,
    rows: Rows,
    output: np.ndarray,
    lse: np.ndarray,
    *,
    quantises_query: bool = False,
    baseline_max_abs_err: float | None = None,
) -> Verdict:
    """Compare the sampled rows with the reference's.

    Parameters
    ----------
    output, lse : reference of the same requests and queries
    quantises_query : bool
        The implementation says that it rounds q to fp8: another arithmetic, another limit.
    baseline_max_abs_err : float, optional
        The baseline's own largest error on the same sample, with these or other queries: twice that is a
        further limit, but none below what rounding the largest output to bf16 can cost.
    """
    reference, reference_lse = torch.from_numpy(output), torch.from_numpy(lse)
    got = torch.from_numpy(rows.output)
    got_lse = reference_lse if rows.lse is None else torch.from_numpy(rows.lse)
    report = measure(got, got_lse, reference, reference_lse)
    limit = QUANTISED_QUERY if quantises_query else tolerance(case.kv_dtype)
    faults = []
    if not rows.all_written:
        faults.append("output or lse is not finite, or was not written, somewhere")
    # Relative to each request's own norm: outputs shrink as 1 / sqrt(length), and a fixed bound passes zeros.
    if not report.max_request_rel_err <= limit.output:
        faults.append(
            f"output is off by {report.max_request_rel_err:.3g} of its norm, limit {limit.output:.3g}"
        )
    if not report.lse_err <= limit.lse:
        faults.append(f"lse is off by {report.lse_err:.3g}, limit {limit.lse:.3g}")
    if baseline_max_abs_err is not None:
        most = max(2 * baseline_max_abs_err, _BF16_ROUNDING * float(np.abs(output).max(initial=0.0)))
        if not report.max_abs_err <= most:
            said = f"max abs error {report.max_abs_err:.3g} is over twice the baseline's"
            faults.append(f"{said} {baseline_max_abs_err:.3g}")
    return Verdict(report.max_abs_err, report.rel_err, tuple(faults))


def take_rows(output: torch.Tensor, lse: torch.Tensor | None, requests: Sequence[int]) -> Rows:
    """The sampled rows, copied to the host. An lse of -inf (an empty request) counts as written."""
    index = torch.tensor(list(requests), device=output.device)
    written = bool(output.isfinite().all())
    lse_rows: Any = None
    if lse is not None:
        written &= not bool((lse.isnan() | (lse == math.inf)).any())
        lse_rows = lse[index].float().cpu().numpy()
    return Rows(output[index].float().cpu().numpy(), lse_rows, written)
