"""The one error measure: norm-relative error of the output, absolute error of lse, and where the worst is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenkv.errors import EvenkvError


@dataclass(frozen=True)
class ErrorReport:
    """How far one result is from its reference.

    Attributes
    ----------
    rel_err : float
        ||output - reference|| / ||reference|| over everything: 0 when both are zero, inf when only the
        reference is.
    max_request_rel_err : float
        The largest of the same ratio taken request by request; `worst_request` has it.
    max_abs_err : float
        Largest |output - reference|.
    worst_index : (request, head, dim)
        The element of `worst_request` that is furthest off.
    lse_err : float
        Largest |lse - reference| in base 2; at `worst_lse_index` (request, head). Infinities of the same sign
        differ by 0, an infinity and anything else by inf.
    A NaN or infinity in the output counts as an error of inf.
    """

    rel_err: float
    max_request_rel_err: float
    worst_request: int
    max_abs_err: float
    worst_index: tuple[int, int, int]
    lse_err: float
    worst_lse_index: tuple[int, int]


def measure(
    output: torch.Tensor, lse: torch.Tensor, ref_output: torch.Tensor, ref_lse: torch.Tensor
) -> ErrorReport:
    """Compare output `[batch, num_qo_heads, head_dim]` and lse `[batch, num_qo_heads]` in float64.

    Raises
    ------
    EvenkvError
        When shapes differ, or the reference output itself is not finite.
    """
    for name, got, want in (("output", output, ref_output), ("lse", lse, ref_lse)):
        if got.shape != want.shape:
            raise EvenkvError(
                f"{name} has shape {tuple(got.shape)}: the reference's is {tuple(want.shape)}.",
                "Compare results of the same problem.",
            )
    ref_output, ref_lse = ref_output.double(), ref_lse.double()
    if not ref_output.isfinite().all() or ref_lse.isnan().any():
        raise EvenkvError("The reference output is not finite.", "Check the problem's inputs.")
    if output.numel() == 0:
        return ErrorReport(0.0, 0.0, 0, 0.0, (0, 0, 0), 0.0, (0, 0))

    difference = (output.double().to(ref_output.device) - ref_output).abs()
    difference = difference.nan_to_num(nan=torch.inf, posinf=torch.inf)
    error_norms = difference.flatten(1).norm(dim=1)
    ref_norms = ref_output.flatten(1).norm(dim=1)
    by_request = _ratio(error_norms, ref_norms)
    worst_request = int(by_request.argmax())
    lse_difference = _lse_difference(lse.double().to(ref_lse.device), ref_lse)
    return ErrorReport(
        rel_err=float(_ratio(error_norms.norm(), ref_norms.norm())),
        max_request_rel_err=float(by_request[worst_request]),
        worst_request=worst_request,
        max_abs_err=float(difference.max()),
        worst_index=(worst_request, *_index(difference[worst_request])),
        lse_err=float(lse_difference.max()),
        worst_lse_index=_index(lse_difference),
    )


def _ratio(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """error / norm, with 0 / 0 = 0: a request whose reference is zero must be hit exactly."""
    return torch.where(error == 0, 0.0, error / norm)


def _lse_difference(lse: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    both_same_infinity = lse.isinf() & (lse == ref)
    difference = (lse - ref).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(both_same_infinity, 0.0, difference)


def _index(values: torch.Tensor) -> tuple[int, ...]:
    position = int(values.argmax())
    index = []
    for size in reversed(values.shape):
        index.append(position % size)
        position //= size
    return tuple(reversed(index))
