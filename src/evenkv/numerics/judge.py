"""Runs a kernel on the G-cases: guard bands around outputs, inputs compared after, faults as sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenkv.errors import EvenkvError
from evenkv.numerics.check import check_outputs
from evenkv.numerics.error import measure
from evenkv.numerics.problem import Problem
from evenkv.numerics.reference import LOG2_E, reference
from evenkv.numerics.tolerance import LSE_FP32, tolerance

KernelCallable = Callable[..., Any]
"""`kernel(spec, *inputs, output, lse)`: inputs in the definition's order; writes output and lse."""

REFUSALS = (EvenkvError, ValueError, TypeError, RuntimeError)
"""What a refusal may be raised as: tvm-ffi and builders have their own subclasses of these."""

_GUARD_ELEMENTS = 1024  # a multiple of every vector width, so that outputs stay aligned
_GUARD_VALUE = 11.5  # exact in bf16


@dataclass(frozen=True)
class Mode:
    """What an implementation promises beyond right results.

    `checked`: bad lengths and page ids raise. Else they poison their request's output and lse with NaN.
    `invariant`: a request's bits do not depend on the others of its batch.
    """

    checked: bool = False
    invariant: bool = False


class GuardedOutputs:
    """Output and lse filled with NaN, each inside a larger buffer whose rims must stay as they are."""

    def __init__(self, problem: Problem) -> None:
        self._buffers = []
        views = []
        for like in problem.empty_outputs(poison=False):
            size = like.numel()
            buffer = torch.full(
                (size + 2 * _GUARD_ELEMENTS,), _GUARD_VALUE, dtype=like.dtype, device=like.device
            )
            view = buffer[_GUARD_ELEMENTS : _GUARD_ELEMENTS + size].view(like.shape)
            view.fill_(float("nan"))
            self._buffers.append(buffer)
            views.append(view)
        self.output, self.lse = views

    def faults(self) -> list[str]:
        broken = []
        for name, buffer in zip(("output", "lse"), self._buffers, strict=True):
            rims = torch.cat([buffer[:_GUARD_ELEMENTS], buffer[-_GUARD_ELEMENTS:]])
            if not (rims == _GUARD_VALUE).all():
                broken.append(f"memory beside {name} was written")
        return broken


def call(
    problem: Problem, kernel: KernelCallable, *, compare_inputs: bool = True
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """One guarded call.

    Returns
    -------
    output, lse : as the kernel wrote them (NaN where it did not)
    faults : list of str
        Writes beside the outputs and changed inputs.
    """
    tensors = (
        {n: t for n, t in problem.tensors.items() if isinstance(t, torch.Tensor)} if compare_inputs else {}
    )
    before = {name: _bits(tensor).clone() for name, tensor in tensors.items()}
    outputs = GuardedOutputs(problem)
    kernel(problem.spec, *problem.inputs(), outputs.output, outputs.lse)
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    faults = outputs.faults()
    faults += [f"input {n} was changed" for n, t in tensors.items() if not torch.equal(_bits(t), before[n])]
    return outputs.output, outputs.lse, faults


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN compares equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def bit_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two (output, lse) pairs agree in every bit."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(left, right, strict=True))


def judge_outputs(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
    """Every problem's result is right, its inputs unchanged, nothing else written."""
    faults = []
    for number, problem in enumerate(problems):
        output, lse, found = call(problem, kernel)
        found += check_outputs(problem.spec, output, lse, *reference(problem))
        faults += [f"problem {number} ({problem.spec.short_name}): {fault}" for fault in found]
    return faults


def judge_outputs_only(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
    """As `judge_outputs`, without a copy of the inputs: for pools of several GB."""
    faults = []
    for problem in problems:
        output, lse, found = call(problem, kernel, compare_inputs=False)
        faults += found + check_outputs(problem.spec, output, lse, *reference(problem))
    return faults


def judge_or_refusal(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
    """Right, or refused before anything was written by an error that has a message."""
    faults = []
    for problem in problems:
        try:
            faults += judge_outputs([problem], kernel, mode)
        except REFUSALS as refusal:
            if not str(refusal).strip():
                faults.append(f"{problem.spec.short_name}: refused without a message")
    return faults


def judge_refusal(names: Sequence[str]) -> Callable[..., list[str]]:
    """A judge for calls that are misuse: problem i must raise an error that names argument `names[i]`."""

    def judge(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
        faults = []
        for name, problem in zip(names, problems, strict=True):
            try:
                call(problem, kernel)
            except REFUSALS as refusal:
                if name not in str(refusal):
                    faults.append(f"the error does not name {name}: {refusal}")
            else:
                faults.append(f"a wrong {name} was accepted")
        return faults

    return judge


@dataclass(frozen=True)
class BadEntry:
    """A wrong table entry of one request: what a checked kernel's error must name."""

    request: int
    value: int


def judge_bad_tables(bad: Sequence[Sequence[BadEntry]]) -> Callable[..., list[str]]:
    """Problem i holds the wrong entries `bad[i]`.

    Checked kernels raise an error with the request and the value of one of them. Unchecked ones write NaN to
    output and lse of each such request and leave the other requests right.
    """

    def judge(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
        judge_one = _judge_bad_checked if mode.checked else _judge_bad_unchecked
        return [f for entries, p in zip(bad, problems, strict=True) for f in judge_one(p, entries, kernel)]

    return judge


def _judge_bad_checked(problem: Problem, entries: Sequence[BadEntry], kernel: KernelCallable) -> list[str]:
    try:
        call(problem, kernel)
    except REFUSALS as refusal:
        text = str(refusal)
        if any(f"request {e.request}" in text and str(e.value) in text for e in entries):
            return []
        return [f"the error names none of {list(entries)}: {text}"]
    return [f"accepted {list(entries)}"]


def _judge_bad_unchecked(problem: Problem, entries: Sequence[BadEntry], kernel: KernelCallable) -> list[str]:
    output, lse, faults = call(problem, kernel)
    bad = sorted({entry.request for entry in entries})
    for request in bad:
        if not (output[request].isnan().all() and lse[request].isnan().all()):
            faults.append(f"request {request} has a bad table and its output or lse is not all NaN")
    good = [r for r in range(problem.batch_size) if r not in bad]
    sound = take_requests(problem, good)
    return faults + check_outputs(problem.spec, output[good], lse[good], *reference(sound))


def judge_lse_base(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
    """lse in base 2 times ln 2 equals the natural one to fp32 accuracy."""
    faults = judge_outputs(problems, kernel, mode)
    for problem in problems:
        _, lse, _ = call(problem, kernel)
        natural = reference(problem)[1] / LOG2_E
        worst = float((lse.double() * math.log(2.0) - natural).abs().max())
        if not worst <= LSE_FP32:
            faults.append(f"lse * ln 2 is off the natural lse by {worst:.3g}, limit {LSE_FP32:g}")
    return faults


def judge_same_requests(orders: Sequence[Sequence[int]]) -> Callable[..., list[str]]:
    """Problem i holds requests `orders[i]` of problem 0: all right; bit-equal if invariant."""

    def judge(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
        faults = judge_outputs(problems, kernel, mode)
        if mode.invariant:
            whole = call(problems[0], kernel)[:2]
            for order, problem in zip(orders, problems, strict=True):
                if not bit_equal(call(problem, kernel)[:2], [t[list(order)] for t in whole]):
                    faults.append(f"requests {list(order)[:8]} have other bits in another batch")
        return faults

    return judge


def judge_merge(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
    """Problems come in threes: a whole, and its two parts, which merged by lse equal the whole."""
    faults = judge_outputs(problems, kernel, mode)
    for whole, *parts in zip(*[iter(problems)] * 3, strict=True):
        results = [call(part, kernel)[:2] for part in parts]
        lses = torch.stack([lse.double() for _, lse in results])
        merged_lse = torch.logsumexp(lses / LOG2_E, 0) * LOG2_E
        weights = torch.exp2(lses - merged_lse).nan_to_num(nan=0.0)
        merged = sum(w[..., None] * out.double() for w, (out, _) in zip(weights, results, strict=True))
        report = measure(merged, merged_lse, *call(whole, kernel)[:2])
        limit = 2 * tolerance(whole.spec.kv_dtype).output  # both sides of the comparison are rounded
        if not report.max_request_rel_err <= limit or not report.lse_err <= 2 * LSE_FP32:
            faults.append(f"parts {[p.lengths for p in parts]} merged differ from the whole: {report}")
    return faults


def take_requests(problem: Problem, requests: Sequence[int]) -> Problem:
    """The sub-batch of the given requests, over the same caches."""
    t = problem.tensors
    starts = t["kv_indptr"].tolist()
    pages = [t["kv_indices"][starts[r] : starts[r + 1]] for r in requests]
    kv_indptr = torch.zeros(len(pages) + 1, dtype=torch.int32)
    kv_indptr[1:] = torch.tensor([len(p) for p in pages], dtype=torch.int64).cumsum(0)
    changes = {
        "q": t["q"][list(requests)],
        "kv_indptr": kv_indptr.to(problem.device),
        "kv_indices": torch.cat([t["kv_indices"][:0], *pages]),
    }
    if "kv_last_page_len" in t:
        changes["kv_last_page_len"] = t["kv_last_page_len"][list(requests)]
    lengths = tuple(problem.lengths[r] for r in requests)
    return replace(problem.with_tensors(**changes), lengths=lengths)
