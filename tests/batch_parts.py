"""Requests of a problem as a batch of their own."""

from __future__ import annotations

from dataclasses import replace

from evenkv.numerics.problem import Problem


def take_requests(problem: Problem, requests: range) -> Problem:
    """Some requests, side by side in the batch, with the pages that they had."""
    t = problem.tensors
    rows = slice(requests.start, requests.stop)
    first, last = int(t["kv_indptr"][requests.start]), int(t["kv_indptr"][requests.stop])
    own = {"kv_indptr": t["kv_indptr"][requests.start : requests.stop + 1] - first}
    own["kv_indices"] = t["kv_indices"][first:last]
    own |= {name: t[name][rows] for name in ("q", "kv_last_page_len") if name in t}
    own = {name: tensor.clone() for name, tensor in own.items()}
    return replace(problem.with_tensors(**own), lengths=problem.lengths[rows])
