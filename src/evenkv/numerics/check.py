"""Is a result right? Applies the table of limits to the error measure."""

from __future__ import annotations

import torch

from evenkv.numerics.error import measure
from evenkv.numerics.tolerance import tolerance
from evenkv.spec.family import DecodeSpec


def check_outputs(
    spec: DecodeSpec,
    output: torch.Tensor,
    lse: torch.Tensor,
    ref_output: torch.Tensor,
    ref_lse: torch.Tensor,
) -> list[str]:
    """Faults of a result, one sentence each; empty when it is right.

    Parameters
    ----------
    spec : DecodeSpec
        Gives the cache dtype that the limits depend on.
    output, ref_output : `[batch, num_qo_heads, head_dim]`
        The output in its own dtype (bf16 or fp16); the reference in any, finite.
    lse, ref_lse : `[batch, num_qo_heads]`
        Base 2.
    """
    faults = []
    shape = tuple(ref_output.shape)
    if tuple(output.shape) != shape or tuple(lse.shape) != shape[:2]:
        return [f"output {tuple(output.shape)} and lse {tuple(lse.shape)}: wanted {shape} and {shape[:2]}"]
    if output.dtype != torch.bfloat16 and output.dtype != torch.float16:
        faults.append(f"output is {output.dtype}: wanted bfloat16")
    if lse.dtype != torch.float32:
        faults.append(f"lse is {lse.dtype}: wanted float32")
    if faults:
        return faults

    limit = tolerance(spec.kv_dtype, str(output.dtype).removeprefix("torch."))
    report = measure(output, lse, ref_output, ref_lse)
    if not report.max_request_rel_err <= limit.output:
        request, head, dim = report.worst_index
        faults.append(
            f"output of request {request} is off by {report.max_request_rel_err:.3g} of its norm, limit "
            f"{limit.output:.3g}; worst at head {head}, dim {dim}: {float(output[request, head, dim]):.6g}, "
            f"wanted {float(ref_output[request, head, dim]):.6g}"
        )
    if not report.lse_err <= limit.lse:
        request, head = report.worst_lse_index
        faults.append(
            f"lse is off by {report.lse_err:.3g}, limit {limit.lse:.3g}, at request {request}, head {head}: "
            f"{float(lse[request, head]):.6g}, wanted {float(ref_lse[request, head]):.6g}"
        )
    return faults
