"""What Triton's interpreter (TRITON_INTERPRET=1, CPU tensors) needs from the host.

It multiplies bf16 as raw integers and cuts bf16 off instead of rounding, so caches are widened and the output
is rounded outside the kernel. Cutting, gathers, masks, merges and counters are the kernel's own, unchanged.
"""

import torch
import triton

PROGRAMS = 6
"""That "run at once". They run one after another: few of them, but enough that long requests are cut."""


def widen(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor):
    """q as fp32, the caches as fp32 (bf16) or fp16 (fp16, fp8: exact)."""
    if k_cache.dtype == torch.bfloat16:
        return q.float(), k_cache.float(), v_cache.float()
    return q.float(), k_cache.half(), v_cache.half()


def tile(tokens: int) -> int:
    """Tokens attended to at once: they cost about the same however many, so all of an average request."""
    return min(512, max(16, triton.next_power_of_2(tokens)))
