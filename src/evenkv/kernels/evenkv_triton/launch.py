"""Host side of evenkv_triton: argument checks that cost nothing, scratch, the one launch."""

import math

import torch
import triton
import triton.language as tl

from . import interpret
from .kernel import decode_kernel
from .schedule import CHUNKS_PER_WORKER, UNIT
from .tuning import FAN, MIN_CHUNK_SLOTS, PROGRAMS_PER_SM, SEARCH_BLOCK, WARPS, choose

_scratch: dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
_devices: dict[int, tuple[int, int]] = {}


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sm_scale: float,
    output: torch.Tensor,
    lse: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    layout: str = "NHD",
    workers: int | None = None,
) -> None:
    """Decode attention of one query token a request over a paged KV cache; writes `output` and `lse`.

    One launch on the current stream of q's device; no synchronisation, no read of lengths on the host.

    Parameters
    ----------
    q : [batch, num_qo_heads, head_dim] bf16 or fp16, last stride 1
    k_cache, v_cache : [num_pages, page_size, num_kv_heads, head_dim] (`NHD`) or [num_pages, num_kv_heads,
        page_size, head_dim] (`HND`), last stride 1; bf16 (with a bf16 q), fp16, float8_e4m3fn or float8_e5m2
    kv_indptr : int32 [batch + 1]
    kv_indices : int32, at least kv_indptr[-1] entries
    kv_last_page_len : int32 [batch]; None at page_size 1
    sm_scale : float
    output : [batch, num_qo_heads, head_dim], contiguous
    lse : float32 [batch, num_qo_heads], contiguous, base 2
    k_scale, v_scale : float32 [num_kv_heads] or None
    workers : programs to launch; None chooses. Another number of workers gives other roundings.

    Raises
    ------
    ValueError
        When a dtype, a stride or a shape cannot be read as the above.
    """
    page_axis, head_axis = (1, 2) if layout == "NHD" else (2, 1)
    batch, num_qo_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads = k_cache.shape[0], k_cache.shape[page_axis], k_cache.shape[head_axis]
    _check(
        q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, output, lse, k_scale, v_scale, page_size
    )
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"q: wanted a multiple of {num_kv_heads} heads (KV heads), got {num_qo_heads}.")
    if batch == 0:
        return
    sm_count, shared_bytes = _device(q.device.index) if q.is_cuda else (1, 0)
    tuning = choose(head_dim, k_cache.element_size(), shared_bytes)
    bound = kv_indices.shape[0] * page_size
    destination = output
    if q.is_cuda:
        most, tile = sm_count * PROGRAMS_PER_SM, tuning.tile
        compute = tl.bfloat16 if k_cache.dtype == torch.bfloat16 else tl.float16
    else:
        most, tile = interpret.workers(bound * num_kv_heads), interpret.tile(bound, batch)
        q, k_cache, v_cache, compute = interpret.widen(q, k_cache, v_cache)
        output = torch.empty_like(output, dtype=torch.float32)
    if workers is None:
        # A program that could not get a chunk is not launched.
        workers = max(1, min(most, -(-bound * num_kv_heads // MIN_CHUNK_SLOTS)))
    group = num_qo_heads // num_kv_heads
    max_chunks = CHUNKS_PER_WORKER * max(workers, most)
    acc, stats, counters = _get_scratch(q.device, max_chunks, group, head_dim)
    k_strides, v_strides = k_cache.stride(), v_cache.stride()
    launch = decode_kernel[(workers,)]
    arguments = (
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len if page_size > 1 else None,
        k_scale,
        v_scale,
        output,
        lse,
        acc,
        stats,
        counters,
        sm_scale * math.log2(math.e),
        batch,
        num_pages,
        kv_indices.shape[0],
        q.stride(0),
        q.stride(1),
        k_strides[0],
        k_strides[page_axis],
        k_strides[head_axis],
        v_strides[0],
        v_strides[page_axis],
        v_strides[head_axis],
    )
    constants = dict(
        MAX_CHUNKS=max_chunks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        MERGE_ROWS=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        TILE=tile,
        MIN_UNITS=MIN_CHUNK_SLOTS // UNIT.value,
        FAN=FAN,
        UNROLL=tuning.unroll,
        SEARCH=SEARCH_BLOCK,
        COMPUTE=compute,
        num_warps=WARPS,
        num_stages=tuning.stages,
        enable_fp_fusion=True,  # said, because Triton's default is about to change: the bits should not
    )
    if q.is_cuda and torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            launch(*arguments, **constants)
    else:
        launch(*arguments, **constants)
    if destination is not output:
        destination.copy_(output)


def _get_scratch(device: torch.device, max_chunks: int, group: int, head_dim: int):
    """acc, stats and zeroed counters, kept for (device, stream, size): two streams never share them.

    A CUDA graph captured on a stream that has run this before uses that stream's scratch: replay it in order
    with that stream. Captured on another stream it gets scratch of its own out of the graph's pool, and pays
    one memset node for its counters.
    """
    stream, capturing = 0, False
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream, max_chunks, group, head_dim)
    found = _scratch.get(key)
    if found is not None:
        return found
    if device.type == "cuda":
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()
    acc = torch.empty(2 * max_chunks * group * head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(2 * max_chunks * 2 * group, dtype=torch.float32, device=device)
    counters = torch.zeros(1 + 2 * max_chunks, dtype=torch.int32, device=device)
    if not capturing:
        _scratch[key] = (acc, stats, counters)
    return acc, stats, counters


def _device(index: int) -> tuple[int, int]:
    """SMs, and the shared memory that each of PROGRAMS_PER_SM programs can have (1 KiB is the driver's)."""
    if index not in _devices:
        properties = torch.cuda.get_device_properties(index)
        block = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
        share = getattr(properties, "shared_memory_per_multiprocessor", 100 * 1024) // PROGRAMS_PER_SM - 1024
        _devices[index] = (properties.multi_processor_count, min(block, share))
    return _devices[index]


def _check(
    q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len, output, lse, k_scale, v_scale, page_size
):
    """Refuse what the kernel would misread; a few comparisons of host-known facts."""
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"v_cache: wanted k_cache's shape {tuple(k_cache.shape)} and dtype {k_cache.dtype}, "
            f"got {tuple(v_cache.shape)} and {v_cache.dtype}."
        )
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q: wanted bfloat16 or float16, got {q.dtype}.")
    if k_cache.dtype == torch.bfloat16 and q.dtype != torch.bfloat16:
        raise ValueError(f"q: wanted bfloat16 for a bfloat16 cache, got {q.dtype}.")
    if k_cache.dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(
            f"k_cache: wanted bfloat16, float16, float8_e4m3fn or float8_e5m2, got {k_cache.dtype}."
        )
    head_dim = q.shape[2]
    if k_cache.shape[3] != head_dim or head_dim not in (64, 128, 256):
        raise ValueError(
            f"head_dim: wanted 64, 128 or 256 in q and cache, got {head_dim} and {k_cache.shape[3]}."
        )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: wanted a last stride of 1, got {tensor.stride(-1)}; pass {name}.contiguous()."
            )
    if (page_size > 1) != (last_page_len is not None):
        raise ValueError(
            f"kv_last_page_len: wanted for every page_size above 1 and only then; page_size {page_size}."
        )
    integers = (("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("kv_last_page_len", last_page_len))
    for name, tensor in integers:
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise ValueError(
                f"{name}: wanted contiguous int32, got {tensor.dtype} with strides {tensor.stride()}."
            )
    if kv_indptr.shape[0] != q.shape[0] + 1:
        raise ValueError(f"kv_indptr: wanted {q.shape[0] + 1} entries (batch + 1), got {kv_indptr.shape[0]}.")
    if output.shape != q.shape or not output.is_contiguous():
        raise ValueError(
            f"output: wanted contiguous {tuple(q.shape)}, got {tuple(output.shape)}, {output.stride()}."
        )
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(
            f"lse: wanted contiguous float32 {tuple(q.shape[:2])}, got {lse.dtype} {tuple(lse.shape)}."
        )
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale, v_scale: wanted both or neither.")
