"""Two references: an fp64 oracle of our own for tests, and the committed definition's own code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from evenkv.errors import EvenkvError
from evenkv.numerics.problem import Problem
from evenkv.paths import Repository, find_repository
from evenkv.spec.family import DecodeSpec

LOG2_E = math.log2(math.e)


def reference(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one request after another in float64.

    Returns
    -------
    output : float64 `[batch, num_qo_heads, head_dim]`, on the problem's device, not rounded to bf16
    lse : float64 `[batch, num_qo_heads]`, base 2, of the scaled logits; -inf for an empty request

    Notes
    -----
    Request lengths come from `problem.lengths`, pages from the tables. Independent of the definitions'
    reference on purpose: plain gather, softmax by its textbook form, no batching.
    """
    spec, t = problem.spec, problem.tensors
    shape = (problem.batch_size, spec.num_qo_heads, spec.head_dim)
    output = torch.zeros(shape, dtype=torch.float64, device=problem.device)
    lse = torch.full(shape[:2], -math.inf, dtype=torch.float64, device=problem.device)
    starts = t["kv_indptr"].tolist()
    for request, length in enumerate(problem.lengths):
        if length == 0:
            continue
        pages = t["kv_indices"][starts[request] : starts[request + 1]].long()
        k = _tokens(t["k_cache"], pages, length)
        v = _tokens(t["v_cache"], pages, length)
        q = t["q"][request].double().view(spec.num_kv_heads, spec.group_size, spec.head_dim)
        logits = torch.einsum("kgd,nkd->kgn", q, k) * t["sm_scale"]
        if "k_scale" in t:
            logits = logits * t["k_scale"].double()[:, None, None]
        attended = torch.einsum("kgn,nkd->kgd", logits.softmax(-1), v)
        if "v_scale" in t:
            attended = attended * t["v_scale"].double()[:, None, None]
        output[request] = attended.reshape(shape[1:])
        lse[request] = torch.logsumexp(logits, -1).reshape(-1) * LOG2_E
    return output, lse


def _tokens(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """float64 `[length, num_kv_heads, head_dim]`: the request's tokens in order."""
    is_byte = cache.dtype.itemsize == 1  # indexing of fp8 tensors is not implemented everywhere
    gathered = cache.view(torch.uint8)[pages].view(cache.dtype) if is_byte else cache[pages]
    return gathered.flatten(0, 1)[:length].double()


def definition_reference(spec: DecodeSpec, repository: Repository | None = None) -> Callable[..., Any]:
    """The `run` of the committed definition `definitions/gqa_paged/<name>.json`.

    Returns
    -------
    callable
        Takes the inputs in the definition's order and returns what the definition's code returns.

    Raises
    ------
    EvenkvError
        When the definition is missing or its reference has no `run`.
    """
    folder = (repository or find_repository()).definitions
    path = folder / f"{spec.name}.json"
    if not path.is_file():
        raise EvenkvError(
            f"No definition {spec.name} in {folder}.", "List the known ones with `ls definitions/gqa_paged`."
        )
    source = json.loads(path.read_text(encoding="utf-8"))["reference"]
    namespace: dict[str, Any] = {"__name__": f"evenkv_reference_{spec.short_name}"}
    exec(compile(source, f"{path.name}:reference", "exec"), namespace)
    run = namespace.get("run")
    if not callable(run):
        raise EvenkvError(f"{path}: its reference defines no function `run`.", "Regenerate the definitions.")
    return run
