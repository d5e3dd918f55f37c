"""What Triton's interpreter (TRITON_INTERPRET=1, CPU tensors) needs from the host.

It multiplies bf16 as raw integers and cuts bf16 off instead of rounding, so caches are widened and the output
is rounded outside the kernel. Schedule, gathers, masks, merges and counters are the kernel's own, unchanged.
"""

import torch
import triton


def widen(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor):
    """q as fp32, the caches as fp32 (bf16) or fp16 (fp16, fp8: exact)."""
    if k_cache.dtype == torch.bfloat16:
        return q.float(), k_cache.float(), v_cache.float()
    return q.float(), k_cache.half(), v_cache.half()


def workers(positions_bound: int, even_slots: int) -> int:
    """Programs, which run one after another: one round of equal chunks if 16 do, else 3 that take many."""
    even = -(-positions_bound // even_slots)
    return even if even <= 16 else 3


def tile(slots_bound: int, batch: int) -> int:
    """Tokens a step: a step costs about the same whatever it holds, so as many as a request may have."""
    return min(512, max(16, triton.next_power_of_2(-(-slots_bound // batch))))
