"""Host side of evenkv_triton: argument checks that cost nothing, scratch, the one launch.

What follows from shapes, strides, types and alignments is worked out at their first call and kept (`Plan`),
with the compiled kernel: a later call compares them, looks for its scratch and launches.
"""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime import driver

from . import interpret
from .cut import MOST_SLOTS, choose_cut
from .kernel import decode_kernel
from .tuning import PROGRAMS_PER_SM, RUN_TOKENS, SEARCH_BLOCK, choose

_MOST_PLANS = 4096

_scratch: dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
_devices: dict[int, tuple[int, int]] = {}
_plans: dict[tuple, "Plan"] = {}
_compiled: dict[tuple, Any] = {}


class Plan(NamedTuple):
    """A launch but for its tensors: `sizes` and `constants` in the kernel's order, options by name."""

    programs: int
    scratch: tuple[int, int, int]  # places, group, head_dim
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


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
    programs: int | None = None,
    part_tokens: int | None = None,
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
    programs : int, optional
        That run at once, as far as requests are cut for them; None: the device's number. Another number may
        give other roundings.
    part_tokens : int, optional
        Cuts requests in parts of about this many tokens, whatever the batch; None chooses.

    Raises
    ------
    ValueError
        When a dtype, a stride or a shape cannot be read as the above.
    """
    tensors = (
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        k_scale,
        v_scale,
        output,
        lse,
    )
    if not q.is_cuda:
        _interpret(tensors, sm_scale, layout, programs, part_tokens)
        return
    traits = [None if t is None else _traits(t) for t in tensors]
    key = (layout, programs, part_tokens, *traits)
    plan = _plans.get(key)
    if plan is None:
        _check(*tensors, layout)
        if q.shape[0] == 0:
            return
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
            _compiled.clear()
        plan = _plans[key] = _make_plan(q, k_cache, v_cache, kv_indices, layout, programs, part_tokens)
    if torch.cuda.current_device() == q.device.index:
        _launch(key, plan, tensors, sm_scale)
    else:
        with torch.cuda.device(q.device):
            _launch(key, plan, tensors, sm_scale)


def _traits(tensor: torch.Tensor) -> tuple:
    """All that checks, plan and compilation look at."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15


def _make_plan(
    q, k_cache, v_cache, kv_indices, layout: str, programs: int | None, part_tokens: int | None
) -> Plan:
    page_axis, head_axis = (1, 2) if layout == "NHD" else (2, 1)
    batch, num_qo_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads = k_cache.shape[0], k_cache.shape[page_axis], k_cache.shape[head_axis]
    num_indices = kv_indices.shape[0]
    group = num_qo_heads // num_kv_heads
    sm_count, shared_bytes = _device(q.device.index) if q.is_cuda else (1, 0)
    tuning = choose(head_dim, k_cache.element_size(), group, shared_bytes)
    if programs is None:
        programs = sm_count * PROGRAMS_PER_SM if q.is_cuda else interpret.PROGRAMS
    choice = choose_cut(
        num_kv_heads, batch, page_size, num_indices, tuning.tile, max(1, programs), part_tokens
    )
    if q.is_cuda:
        tile = tuning.tile
        compute = tl.bfloat16 if k_cache.dtype == torch.bfloat16 else tl.float16
        pairs = tuning.streams and k_cache.dtype == torch.float8_e4m3fn and _even(k_cache) and _even(v_cache)
    else:
        tile = interpret.tile(-(-num_indices * page_size // batch))
        compute = tl.float32 if k_cache.dtype == torch.float32 else tl.float16
        pairs = False
    k_strides, v_strides = k_cache.stride(), v_cache.stride()
    sizes = (
        batch,
        num_pages,
        num_indices,
        q.stride(0),
        q.stride(1),
        k_strides[0],
        k_strides[head_axis],
        v_strides[0],
        v_strides[head_axis],
        *choice.cut,
    )
    constants = dict(
        K_SLOT_STRIDE=k_strides[page_axis],
        V_SLOT_STRIDE=v_strides[page_axis],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=tuning.rows,
        MERGE_ROWS=tuning.merge_rows,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        STEP=tuning.tile,
        TILE=tile,
        STREAMS=tuning.streams,
        RUN=RUN_TOKENS,
        PAIRS=pairs,
        CUT=not choice.uncut,
        UNROLL=tuning.unroll,
        SEARCH=SEARCH_BLOCK,
        COMPUTE=compute,
    )
    options = dict(
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=True,  # said, because Triton's default is about to change: the bits should not
    )
    places = _power_of_two(num_kv_heads * choice.cut.places)
    return Plan(num_kv_heads * choice.numbers, (places, group, head_dim), sizes, constants, options)


def _power_of_two(size: int) -> int:
    """At least `size` and 1: a batch that grows gets new scratch a few times at most."""
    return 1 << max(0, size - 1).bit_length()


def _launch(key: tuple, plan: Plan, tensors: tuple, sm_scale: float) -> None:
    """Launch on the current stream: through the compiled kernel where Triton has handed one out before.

    Its own path looks at every argument anew, which the plan's key makes superfluous.
    """
    device = tensors[0].device
    stream = driver.active.get_current_stream(device.index)  # as Triton asks, without an object around it
    scratch = _get_scratch(device, stream, *plan.scratch)
    arguments = (*tensors, *scratch, sm_scale * math.log2(math.e), *plan.sizes)
    compiled = _compiled.get(key)
    if compiled is not None:
        try:
            compiled[(plan.programs, 1, 1)](*arguments, *plan.constants.values(), stream=stream)
            return
        except TypeError:  # a Triton whose compiled kernels are called otherwise; nothing has been launched
            _compiled[key] = None
    compiled = decode_kernel[(plan.programs,)](*arguments, **plan.constants, **plan.options)
    if key not in _compiled and hasattr(compiled, "__getitem__"):
        _compiled[key] = compiled


def _interpret(
    tensors: tuple, sm_scale: float, layout: str, programs: int | None, part_tokens: int | None
) -> None:
    _check(*tensors, layout)
    q, k_cache, v_cache, indptr, indices, *tables, output, lse = tensors
    if q.shape[0] == 0:
        return
    q, k_cache, v_cache = interpret.widen(q, k_cache, v_cache)
    rounded = torch.empty_like(output, dtype=torch.float32)
    plan = _make_plan(q, k_cache, v_cache, indices, layout, programs, part_tokens)
    scratch = _get_scratch(q.device, 0, *plan.scratch)
    arguments = (q, k_cache, v_cache, indptr, indices, *tables, rounded, lse, *scratch)
    scale = sm_scale * math.log2(math.e)
    decode_kernel[(plan.programs,)](*arguments, scale, *plan.sizes, **plan.constants, **plan.options)
    output.copy_(rounded)


def _get_scratch(device: torch.device, stream: int, places: int, group: int, head_dim: int):
    """acc, stats and zeroed counters, kept for (device, stream, size): two streams never share them.

    A CUDA graph captured on a stream that has run this before uses that stream's scratch: replay it in order
    with that stream. Captured on another stream it gets scratch of its own out of the graph's pool, and pays
    one memset node for its counters.
    """
    key = (device, stream, places, group, head_dim)
    found = _scratch.get(key)
    if found is not None:
        return found
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    acc = torch.empty(places * group * head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(places * 2 * group, dtype=torch.float32, device=device)
    counters = torch.zeros(places, dtype=torch.int32, device=device)
    if not capturing:
        _scratch[key] = (acc, stats, counters)
    return acc, stats, counters


def _even(cache: torch.Tensor) -> bool:
    """Whether every row starts at an even address, so that it can be read as int16."""
    return cache.data_ptr() % 2 == 0 and all(stride % 2 == 0 for stride in cache.stride()[:3])


def _device(index: int) -> tuple[int, int]:
    """SMs, and the shared memory that each of PROGRAMS_PER_SM programs can have (1 KiB is the driver's)."""
    if index not in _devices:
        properties = torch.cuda.get_device_properties(index)
        block = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
        share = getattr(properties, "shared_memory_per_multiprocessor", 100 * 1024) // PROGRAMS_PER_SM - 1024
        _devices[index] = (properties.multi_processor_count, min(block, share))
    return _devices[index]


def _check(q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len, k_scale, v_scale, output, lse, layout):
    """Refuse what the kernel would misread; a few comparisons of host-known facts."""
    page_size, num_kv_heads = k_cache.shape[1:3] if layout == "NHD" else (k_cache.shape[2], k_cache.shape[1])
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
    if kv_indices.shape[0] * page_size > MOST_SLOTS:
        raise ValueError(
            f"kv_indices: wanted at most {MOST_SLOTS} slots (entries times page_size {page_size}), "
            f"got {kv_indices.shape[0]} entries; decode in two calls."
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
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"q: wanted a multiple of {num_kv_heads} heads (KV heads), got {q.shape[1]}.")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale, v_scale: wanted both or neither.")
