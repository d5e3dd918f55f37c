"""Entry point: maps the definition's arguments (config.py) to the kernel's."""

from .config import HAS_LAST_PAGE_LEN, IS_FP8
from .launch import decode


def run(*arguments):
    """Arguments in the definition's order, then output and lse (destination passing); returns nothing."""
    q, k_cache, v_cache, kv_indptr, kv_indices, *rest = arguments
    kv_last_page_len = rest.pop(0) if HAS_LAST_PAGE_LEN else None
    k_scale, v_scale = (rest.pop(0), rest.pop(0)) if IS_FP8 else (None, None)
    sm_scale, output, lse = rest
    decode(
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        float(sm_scale),
        output,
        lse,
        k_scale,
        v_scale,
    )
