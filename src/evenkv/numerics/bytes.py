"""Bytes that a decode step must move, counted from the case itself: the one counter that every speed uses."""

from __future__ import annotations

from collections.abc import Sequence

from evenkv.errors import EvenkvError
from evenkv.spec.family import DecodeSpec

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
INT32_BYTES = 4
FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2


def pages_of(length: int, page_size: int) -> int:
    """Pages that `length` tokens occupy."""
    return -(-length // page_size)


def kv_bytes(spec: DecodeSpec, lengths: Sequence[int]) -> int:
    """Bytes of K and V of the listed tokens (not of whole pages), each read once.

    Parameters
    ----------
    spec : DecodeSpec
    lengths : sequence of int
        Tokens of each request.

    Raises
    ------
    EvenkvError
        When a length is negative.
    """
    row = spec.num_kv_heads * spec.head_dim * ELEMENT_BYTES[spec.kv_dtype]
    return 2 * row * sum(_checked(lengths))


def problem_bytes(spec: DecodeSpec, lengths: Sequence[int]) -> int:
    """Bytes that one call must move: inputs read once, output and lse written once.

    Counts q, K and V of the listed tokens, kv_indptr, listed kv_indices, kv_last_page_len, per-head scales,
    output and lse; `sm_scale` travels with the launch and is not counted.
    """
    lengths = _checked(lengths)
    batch = len(lengths)
    heads = batch * spec.num_qo_heads
    q_and_output = 2 * heads * spec.head_dim * BFLOAT16_BYTES
    lse = heads * FLOAT32_BYTES
    tables = (batch + 1 + sum(pages_of(n, spec.page_size) for n in lengths)) * INT32_BYTES
    if spec.has_last_page_len:
        tables += batch * INT32_BYTES
    scales = 2 * spec.num_kv_heads * FLOAT32_BYTES if spec.is_fp8 else 0
    return kv_bytes(spec, lengths) + q_and_output + lse + tables + scales


def _checked(lengths: Sequence[int]) -> list[int]:
    values = [int(n) for n in lengths]
    for request, length in enumerate(values):
        if length < 0:
            raise EvenkvError(
                f"lengths[{request}] is {length}: wanted a number of tokens, 0 or more.",
                "Check where the lengths come from.",
            )
    return values
