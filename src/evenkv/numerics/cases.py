"""Calls that broke other kernels, as named builders; each implementation runs the same list.

Numbers G1 to G19 name the kinds: 1 group sizes, 2 odd head sizes, 3 page sizes, 4 offsets past 2^31 elements,
5 padded batches, 7 bad tables, 8 skewed lengths, 10 base of lse, 13 fp8 scales, 14 batch independence,
16 strides and index dtypes, 17 merging by lse, 18 every short length, 19 no side effects. The others need
several processes, several devices or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from evenkv.numerics import judge as judges
from evenkv.numerics.judge import BadEntry, KernelCallable, Mode
from evenkv.numerics.problem import TORCH_DTYPES, Problem, make_problem
from evenkv.spec.family import DecodeSpec

GROUP_SIZES = (*range(1, 9), 10, 12, 16)
PAGE_SIZES = (1, 8, 16, 32, 48, 96, 128, 256)
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")

# One geometry for every case that does not ask for another: two KV heads, so that head offsets matter.
BASE = DecodeSpec(8, 2, 128, 16)


@dataclass(frozen=True)
class GCase:
    """One kind of call and how to judge a kernel on it.

    Attributes
    ----------
    name : str
        `G<number>-<variant>`, unique.
    why : str
        What goes wrong in a kernel that fails.
    specs : tuple of DecodeSpec
        Geometries of the problems: what must be built to run it.
    build : callable
        `build(device)` makes the problems.
    judge : callable
        `judge(problems, kernel, mode)` returns the faults.
    huge : bool
        The pool spans several GB of address space (of memory, on a GPU).
    """

    name: str
    why: str
    specs: tuple[DecodeSpec, ...]
    build: Callable[[Any], list[Problem]]
    judge: Callable[[Sequence[Problem], KernelCallable, Mode], list[str]] = judges.judge_outputs
    huge: bool = False


def run_case(case: GCase, kernel: KernelCallable, device: Any = "cpu", mode: Mode | None = None) -> list[str]:
    """Faults of `kernel(spec, *inputs, output, lse)` on a case; empty when it behaves.

    Parameters
    ----------
    case : GCase
    kernel : callable
        Takes the spec, the inputs in the definition's order, output and lse.
    device : torch device
        Where the tensors live.
    mode : Mode, optional
        What the implementation promises; default: unchecked, not batch-invariant.
    """
    return case.judge(case.build(device), kernel, mode or Mode())


def g_cases(*, small: bool = False) -> list[GCase]:
    """All cases, in order. `small` shortens lengths (for interpreters) and leaves out `huge` ones."""
    cases = [
        *_group_sizes(),
        *_odd_head_dims(),
        *_page_sizes(small),
        *_padded(),
        *_bad_tables(small),
        *_skew(small),
    ]
    cases += [*_lse_base(small), *_scales(), *_alone(small), *_strides(), *_misuse(), *_merge(small)]
    cases += [*_short_lengths(small), *_side_effects(small)]
    return cases if small else [*cases, *_far_pages()]


def _plain(name: str, why: str, spec: DecodeSpec, lengths: Sequence[int], **options: Any) -> GCase:
    """A case of one drawn problem."""
    return GCase(name, why, (spec,), lambda device: [make_problem(spec, lengths, device=device, **options)])


def _group_sizes() -> list[GCase]:
    why = "group sizes that are no power of two are padded, copied to more KV heads, or refused"
    return [
        _plain(f"G1-group{group}-ps{ps}", why, DecodeSpec(group, 1, 128, ps), [16])
        for ps in (1, 64)
        for group in GROUP_SIZES
    ]


def _odd_head_dims() -> list[GCase]:
    why = "half a page is skipped, or a head_dim that is no multiple of the tile reads its neighbour"
    specs = [DecodeSpec(16, 4, 512, 32), DecodeSpec(8, 2, 72, 16), DecodeSpec(8, 2, 96, 16)]
    cases = [_plain(f"G2-d{spec.head_dim}", why, spec, [33]) for spec in specs]
    return [replace(case, judge=judges.judge_or_refusal) for case in cases]


def _page_sizes(small: bool) -> list[GCase]:
    why = "pages smaller than, larger than, or no multiple of the tile lose tokens at their ends"
    cases = []
    for ps in PAGE_SIZES:
        lengths = [ps, 2 * ps + 1, max(1, 3 * ps - 1)] + ([] if small else [ps // 2 + 1, 777])
        cases.append(_plain(f"G3-ps{ps}", why, DecodeSpec(8, 2, 128, ps), lengths))
    return cases


def _far_pages() -> list[GCase]:
    spec = DecodeSpec(32, 4, 128, 64)  # 32768 elements a page
    ids = [65535, 65536, 65537, 32767, 32768, 32769]

    def build(device: Any, interleaved: bool) -> list[Problem]:
        near = make_problem(spec, [64, 40, 128, 64], num_pages=len(ids), page_order="ordered", seed=4)
        shape = (max(ids) + 1, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
        if interleaved:
            both = torch.empty(shape, dtype=torch.bfloat16, device=device)
            k, v = both[:, 0], both[:, 1]
        else:  # empty, not zeros: a CPU maps only the pages that are touched
            k, v = (torch.empty(shape[:1] + shape[2:], dtype=torch.bfloat16, device=device) for _ in range(2))
        for slot, page in enumerate(ids):
            k[page] = near.tensors["k_cache"][slot].to(device)
            v[page] = near.tensors["v_cache"][slot].to(device)
        small = {
            n: t.to(device)
            for n, t in near.tensors.items()
            if isinstance(t, torch.Tensor) and "cache" not in n
        }
        far = torch.tensor(ids[: near.tensors["kv_indices"].numel()], dtype=torch.int32, device=device)
        return [near.with_tensors(**{**small, "k_cache": k, "v_cache": v, "kv_indices": far})]

    why = "page offsets of 2^31 elements and more wrap in 32 bits"
    return [
        GCase(f"G4-{name}", why, (spec,), partial(build, interleaved=i), judges.judge_outputs_only, huge=True)
        for name, i in (("apart", False), ("interleaved", True))
    ]


def _padded() -> list[GCase]:
    padded = {"zero": [0, 0, 0, 37, 0, 0, 0, 0], "one": [1, 1, 1, 37, 1, 1, 1, 1], "all-empty": [0, 0, 0]}
    why = "empty requests leave their output unwritten, or NaN of unused slots leaks through a mask"
    cases = [_plain(f"G5-{name}", why, BASE, lengths) for name, lengths in padded.items()]
    cases.append(_plain("G5-tail-of-4", why, DecodeSpec(8, 2, 128, 4), [1, 3]))
    cases.append(_plain("G5-zero-ps1", why, DecodeSpec(8, 2, 128, 1), padded["zero"]))
    cases.append(
        _plain(
            "G5-peaked", "probabilities that underflow meet slots with NaN", BASE, [1, 37, 300], q_scale=30.0
        )
    )
    return cases


def _bad_tables(small: bool) -> list[GCase]:
    long = 256 if small else 4096

    def ids_in_a_pool_of_three(device: Any) -> list[Problem]:
        problem = make_problem(BASE, [16, 9, 5], num_pages=3, page_order="ordered", poison_unused=False)
        q = make_problem(BASE, [0] * 5, seed=1).tensors["q"]
        tables = {
            "q": q,
            "kv_indptr": _int32([0, 1, 2, 3, 4, 6]),
            "kv_indices": _int32([0, 99, 2, -1, 1, 2]),
            "kv_last_page_len": _int32([16, 16, 9, 5, 3]),
        }
        return [replace(problem.with_tensors(**tables), lengths=(16, 0, 9, 0, 19)).to(device)]

    def last_page_lens(device: Any) -> list[Problem]:
        problem = make_problem(BASE, [16, 30, 16, 9], poison_unused=False)
        problem = problem.with_tensors(kv_last_page_len=_int32([17, 14, -1, 9]))
        wide = make_problem(DecodeSpec(8, 2, 128, 256), [256, 7], poison_unused=False)
        wide = wide.with_tensors(kv_last_page_len=_int32([257, 7]))
        return [replace(problem, lengths=(0, 30, 0, 9)).to(device), replace(wide, lengths=(0, 7)).to(device)]

    def deep_in_a_list(spec: DecodeSpec, device: Any) -> list[Problem]:
        problems = []
        for part in (0.1, 0.5, 1.0):
            # Finite pages everywhere: a kernel that clamps ids must not come by its NaN from a poisoned one.
            problem = make_problem(spec, [20, long, 40], page_order="ordered", poison_unused=False)
            first, end = problem.tensors["kv_indptr"].tolist()[1:3]
            ids = problem.tensors["kv_indices"].clone()
            ids[first + int((end - 1 - first) * part)] = 2_000_000_000
            problems.append(replace(problem.with_tensors(kv_indices=ids), lengths=(20, 0, 40)).to(device))
        return problems

    def empty_last_page(device: Any) -> list[Problem]:
        problem = make_problem(BASE, [32, 9], poison_unused=False)
        problem = problem.with_tensors(kv_last_page_len=_int32([0, 9]))
        return [replace(problem, lengths=(16, 9)).to(device)]

    def judge_empty_last_page(problems: Sequence[Problem], kernel: KernelCallable, mode: Mode) -> list[str]:
        """Checked kernels refuse it; for others two pages with an empty last one hold one page of tokens."""
        judge = judges.judge_bad_tables([[BadEntry(0, 0)]]) if mode.checked else judges.judge_outputs
        return judge(problems, kernel, mode)

    why = "a bad page id or length reads past the pool, or another request's page, in silence"
    deep = judges.judge_bad_tables([[BadEntry(1, 2_000_000_000)]] * 3)
    ps1 = DecodeSpec(8, 2, 128, 1)
    lens = [[BadEntry(0, 17), BadEntry(2, -1)], [BadEntry(0, 257)]]
    ids = [[BadEntry(1, 99), BadEntry(3, -1)]]
    wide_spec = DecodeSpec(8, 2, 128, 256)
    return [
        GCase("G7-page-ids", why, (BASE,), ids_in_a_pool_of_three, judges.judge_bad_tables(ids)),
        GCase("G7-last-page-len", why, (BASE, wide_spec), last_page_lens, judges.judge_bad_tables(lens)),
        GCase("G7-empty-last-page", why, (BASE,), empty_last_page, judge_empty_last_page),
        GCase("G7-deep-ps16", why, (BASE,), partial(deep_in_a_list, BASE), deep),
        GCase("G7-deep-ps1", why, (ps1,), partial(deep_in_a_list, ps1), deep),
    ]


def _skew(small: bool) -> list[GCase]:
    long, short, count = (700, 16, 5) if small else (8192, 64, 63)
    lengths = [long] + [short] * count
    orders = [list(range(count + 1)), list(range(count, -1, -1))]

    def build(device: Any) -> list[Problem]:
        problem = make_problem(BASE, lengths, seed=8, device=device)
        return [problem, judges.take_requests(problem, orders[1])]

    why = "one long request among short ones starves a split by request, or order changes the result"
    return [
        _plain("G8-long-and-short", why, BASE, [long, 16]),
        GCase("G8-order", why, (BASE,), build, judges.judge_same_requests(orders)),
    ]


def _lse_base(small: bool) -> list[GCase]:
    spec = DecodeSpec(1, 1, 128, 16)
    length = 400 if small else 1600
    case = _plain("G10-base", "lse comes in base e on one path and base 2 on another", spec, [length, length])
    return [replace(case, judge=judges.judge_lse_base)]


def _scales() -> list[GCase]:
    why = "the K scale is missing from lse, or scales of the wrong head or tensor are applied"
    cases = []
    for dtype in FP8_DTYPES:
        spec, short = replace(BASE, kv_dtype=dtype), dtype.removeprefix("float8_")
        cases.append(_plain(f"G13-{short}-uniform", why, spec, [1, 37, 300], k_scale=0.25, v_scale=0.5))
        cases.append(
            _plain(f"G13-{short}-by-head", why, spec, [1, 37, 300], k_scale=[0.25, 3.0], v_scale=[0.5, 2.0])
        )
        cases.append(_plain(f"G13-{short}-large-q", why, spec, [37, 300], q_scale=16.0))
    return cases


def _alone(small: bool) -> list[GCase]:
    lengths = [100, 300, 5, 64] if small else [1000, *range(1, 1600, 50)]
    orders = [list(range(len(lengths))), [0], [2, 0, 3]]

    def build(device: Any) -> list[Problem]:
        problem = make_problem(BASE, lengths, seed=14, device=device)
        return [problem, *(judges.take_requests(problem, order) for order in orders[1:])]

    why = "a request's result depends on its neighbours in the batch"
    return [GCase("G14-alone", why, (BASE,), build, judges.judge_same_requests(orders))]


def _strides() -> list[GCase]:
    lengths = [37, 1, 130]

    def fused_q(device: Any) -> list[Problem]:
        problem = make_problem(BASE, lengths, device=device)
        row = torch.full(
            (3, BASE.num_qo_heads + 2 * BASE.num_kv_heads, 128), float("nan"), dtype=torch.bfloat16
        )
        row = row.to(device)
        row[:, : BASE.num_qo_heads] = problem.tensors["q"]
        return [problem.with_tensors(q=row[:, : BASE.num_qo_heads])]

    def heads_first(spec: DecodeSpec, device: Any) -> list[Problem]:
        problem = make_problem(spec, lengths, device=device)
        caches = {n: _reorder(problem.tensors[n], (0, 2, 1, 3)) for n in ("k_cache", "v_cache")}
        return [problem.with_tensors(**caches)]

    def odd_strides_of_one(device: Any) -> list[Problem]:
        problem = make_problem(single, lengths, device=device)
        caches = {}
        for name in ("k_cache", "v_cache"):
            cache = problem.tensors[name]
            pages, rows, _, row = cache.stride()
            caches[name] = cache.as_strided(cache.shape, (pages, rows, 7, row))
        one = judges.take_requests(problem, [2])
        q = one.tensors["q"]
        return [
            problem.with_tensors(**caches),
            one.with_tensors(q=q.as_strided(q.shape, (13, *q.stride()[1:]))),
        ]

    single = DecodeSpec(5, 1, 128, 16)
    fp8 = replace(BASE, kv_dtype=FP8_DTYPES[0])
    why = "a contiguous layout is assumed where the caller's strides say otherwise"
    return [
        _plain("G16-interleaved", why, BASE, lengths, interleaved=True),
        _plain("G16-interleaved-fp8", why, fp8, lengths, interleaved=True),
        GCase("G16-fused-q", why, (BASE,), fused_q),
        GCase("G16-heads-first", why, (BASE,), partial(heads_first, BASE)),
        GCase("G16-size-one-strides", why, (single,), odd_strides_of_one),
    ]


def _misuse() -> list[GCase]:
    names = ["kv_indices", "kv_indptr", "kv_last_page_len", "kv_indices", "q", "k_cache"]

    def build(device: Any) -> list[Problem]:
        problem = make_problem(BASE, [37, 20], device=device)
        t = problem.tensors
        doubled = t["kv_indices"].repeat_interleave(2)
        changes = [
            {"kv_indices": t["kv_indices"].long()},
            {"kv_indptr": t["kv_indptr"].long()},
            {"kv_last_page_len": t["kv_last_page_len"].long()},
            {"kv_indices": doubled[::2]},
            {"q": t["q"].float()},
            {"k_cache": t["k_cache"].to(torch.float16)},
        ]
        return [problem.with_tensors(**change) for change in changes]

    why = "int64 or strided tables are read as if they were packed int32"
    return [GCase("G16-misuse", why, (BASE,), build, judges.judge_refusal(names))]


def _merge(small: bool) -> list[GCase]:
    pages = 13 if small else 65

    def build(spec: DecodeSpec, device: Any) -> list[Problem]:
        length = pages * spec.page_size - (spec.page_size > 1)
        whole = make_problem(spec, [length], seed=17, device=device)
        problems = []
        for first_pages in (pages // 3, 0, pages):
            problems += [whole, _pages_of(whole, 0, first_pages), _pages_of(whole, first_pages, pages)]
        return problems

    why = "parts of a request cannot be joined: lse of another base, or NaN from an empty part"
    specs = (BASE, DecodeSpec(8, 2, 128, 1), replace(BASE, kv_dtype=FP8_DTYPES[0]))
    return [
        GCase(f"G17-{spec.short_name}", why, (spec,), partial(build, spec), judges.judge_merge)
        for spec in specs
    ]


def _pages_of(problem: Problem, first: int, end: int) -> Problem:
    """The request's pages first..end as a request of its own."""
    spec, pages = problem.spec, problem.tensors["kv_indices"][first:end]
    total = problem.tensors["kv_indices"].numel()
    full, ps = end - first, spec.page_size
    length = full * ps if end < total or full == 0 else problem.lengths[0] - first * ps
    changes = {"kv_indices": pages, "kv_indptr": _int32([0, full]).to(problem.device)}
    if spec.has_last_page_len:
        changes["kv_last_page_len"] = _int32([length - (full - 1) * ps if full else 0]).to(problem.device)
    return replace(problem.with_tensors(**changes), lengths=(length,))


def _short_lengths(small: bool) -> list[GCase]:
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 130, 257] if small else list(range(1, 601))
    why = "some length near a tile's or a chunk's end is masked one token too early or too late"
    return [
        _plain(f"G18-ps{ps}", why, DecodeSpec(5, 1, 64 if ps == 64 else 128, ps), lengths)
        for ps in (1, 16, 64)
    ]


def _side_effects(small: bool) -> list[GCase]:
    lengths = [3, 100] if small else [3, 100, 0, 2000]
    why = "inputs are scaled or sorted in place, or a vector store passes the end of an output"
    specs = [DecodeSpec(5, 1, 64, 16), DecodeSpec(7, 1, 128, 1), replace(BASE, kv_dtype=FP8_DTYPES[0])]
    return [_plain(f"G19-{spec.short_name}", why, spec, lengths) for spec in specs]


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _reorder(cache: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values in memory of another dimension order (an HND cache seen as NHD)."""
    raw = cache.view(torch.uint8) if cache.dtype in map(TORCH_DTYPES.get, FP8_DTYPES) else cache
    return raw.permute(order).contiguous().permute(order).view(cache.dtype)
