"""The one table of limits, derived from dtypes: how far a right kernel may be from the exact result."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenkv.errors import EvenkvError

# Root mean square of one rounding's relative error, over evenly spread mantissas: 0.43 of the largest (2^-8
# and 2^-11), taken as one half. Norms over head_dim elements average, so it is the rms that counts.
_BF16_ROUNDING = 2.0**-9
_FP16_ROUNDING = 2.0**-12


@dataclass(frozen=True)
class Tolerance:
    """Limits of one (cache dtype, output dtype) pair.

    `output` bounds the norm-relative error ||out - ref|| / ||ref|| of every request: relative, because
    outputs shrink as 1 / sqrt(length) and a fixed bound passes zeros on long contexts. `lse` is absolute,
    in base 2.
    """

    output: float
    lse: float


# A row sum of probabilities that were rounded to bf16 for the second product: two tokens are the worst case,
# where the largest probability is exact and the other is off by 2^-8 of at most half the sum.
_LSE = 2.0**-9 * math.log2(math.e)

# Output limits count the roundings that a right kernel may make, added up as if they all went the same way.
# They are independent, so right kernels measure about half the limit.
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    # Probabilities to bf16 (1), output to bf16 (1), partial outputs kept in bf16 by a split kernel (1).
    ("bfloat16", "bfloat16"): Tolerance(output=3 * _BF16_ROUNDING, lse=_LSE),
    # As above in fp16, though a kernel may still keep its probabilities in bf16 (8 fp16 roundings).
    ("float16", "float16"): Tolerance(output=(8 + 2) * _FP16_ROUNDING, lse=_LSE),
    ("float16", "bfloat16"): Tolerance(output=3 * _BF16_ROUNDING, lse=_LSE),
    # The cache comes quantised, so its error is not ours. One more rounding: v_scale (or k_scale) folded into
    # a 16-bit operand. e4m3 and e5m2 widen exactly to fp16 and bf16, hence the same limits.
    ("float8_e4m3fn", "bfloat16"): Tolerance(output=4 * _BF16_ROUNDING, lse=2 * _LSE),
    ("float8_e5m2", "bfloat16"): Tolerance(output=4 * _BF16_ROUNDING, lse=2 * _LSE),
}

# What fp32 arithmetic alone may lose in lse: our own kernels sum unrounded probabilities.
LSE_FP32 = 1e-5


def tolerance(kv_dtype: str, output_dtype: str = "bfloat16") -> Tolerance:
    """Limits for a cache dtype and an output dtype, by flashinfer-bench names.

    Raises
    ------
    EvenkvError
        When the pair is not in the table.
    """
    try:
        return TOLERANCES[kv_dtype, output_dtype]
    except KeyError:
        known = ", ".join(f"{kv} -> {out}" for kv, out in TOLERANCES)
        raise EvenkvError(
            f"No tolerance for a {kv_dtype} cache with {output_dtype} output: known are {known}.",
            "Add a row with its reason to evenkv/numerics/tolerance.py.",
        ) from None
