"""A rectangular page table and lengths out of the compressed tables, on their device."""

import torch


def longest_request(kv_indptr):
    """Pages of the request with most of them, at least 1. Waits for the device: the one read to the host."""
    ends = kv_indptr.tolist()
    return max((end - begin for begin, end in zip(ends, ends[1:], strict=False)), default=1) or 1


def build_page_table(kv_indptr, kv_indices, width):
    """Page ids int32 [batch, width]; past a request's own pages stand other listed ids, never reached."""
    if kv_indices.numel() == 0:
        return kv_indptr.new_zeros(kv_indptr.numel() - 1, width)
    entry = kv_indptr[:-1, None] + torch.arange(width, dtype=torch.int32, device=kv_indptr.device)
    return kv_indices[entry.clamp_(max=kv_indices.numel() - 1)]


def build_lengths(kv_indptr, kv_last_page_len, page_size):
    """Tokens int32 [batch]; 0 for a request without pages, whatever its last_page_len."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    if kv_last_page_len is None:
        return pages
    return torch.add(kv_last_page_len - page_size, pages, alpha=page_size).clamp_(min=0)
