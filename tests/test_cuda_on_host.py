"""evenkv_cuda's own sources, built for the host and run with copies that arrive as late as they may."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from batch_parts import take_requests
from host_kernel import CountersLeft, HostKernel, build_host_kernel

from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

# Eight warps, rings of two tiles, chunks of one tile a warp; six warps, two heads a block, groups above 8.
BF16 = DecodeSpec(4, 2, 128, 16)
FP8 = DecodeSpec(20, 2, 64, 16, "float8_e4m3fn")


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    return build_host_kernel(BF16, (128, 256, 128), tmp_path_factory.mktemp("bf16"))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    return build_host_kernel(FP8, (96, 96, 32), tmp_path_factory.mktemp("fp8"))


def _lengths(rng: random.Random) -> list[int]:
    top = rng.choice([1, 8, 40, 300, 900])
    return [rng.choice([0, 1, rng.randint(0, top), top]) for _ in range(rng.choice([1, 3, 9]))]


def _check(kernel: HostKernel, problem: Problem, **options: int) -> None:
    """Right with late copies and with early ones, the same bits both times."""
    late = kernel(problem, early=False, **options)
    faults = check_outputs(problem.spec, *late, *reference(problem))
    assert faults == [], f"lengths {problem.lengths}, {options}: {faults}"
    options["seed"] = options.get("seed", 0) + 1
    assert bit_equal(kernel(problem, early=True, **options), late), f"lengths {problem.lengths}, {options}"


def test_shared_memory_fits(bf16: HostKernel, fp8: HostKernel) -> None:
    for kernel in (bf16, fp8):
        assert kernel.library.shared_bytes() <= kernel.library.shared_budget()


def test_bf16(bf16: HostKernel) -> None:
    rng = random.Random(5)
    for page_size in (1, 5, 16, 48, 64):
        spec = replace(BF16, page_size=page_size)
        for seed in range(3):
            problem = make_problem(spec, _lengths(rng), seed=seed, interleaved=seed == 1)
            _check(bf16, problem, workers=rng.choice([1, 3, 40]), seed=seed)


def test_queries_of_which_rows_begin_anywhere(bf16: HostKernel) -> None:
    """Rows that are not aligned to 16 bytes travel 4 bytes at a time."""
    _check(replace(bf16, q_copy_bytes=4), make_problem(BF16, [40, 0, 300]), workers=3)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_batch_invariant_bits(bf16: HostKernel, page_size: int) -> None:
    """A request's bits are the same alone, among others, and at another place of the batch."""
    kernel = replace(bf16, request_chunk_shift=8)
    problem = make_problem(
        replace(BF16, page_size=page_size), [3, 0, 700, 256, 257, 0, 1, 4500, 90], seed=page_size
    )
    _check(kernel, problem, workers=5, seed=page_size)
    output, lse = kernel(problem, workers=3)
    for requests in (range(2, 3), range(3, 5), range(7, 8), range(1, 9)):
        part = kernel(take_requests(problem, requests), workers=40, seed=requests.start)
        rows = slice(requests.start, requests.stop)
        assert bit_equal(part, (output[rows], lse[rows])), requests


def test_batch_invariant_fp8_and_tables_that_list_too_much(fp8: HostKernel, bf16: HostKernel) -> None:
    kernel = replace(fp8, request_chunk_shift=6)
    _check(kernel, make_problem(FP8, [0, 400, 17, 0, 64]), workers=3)
    problem = make_problem(replace(BF16, page_size=64), [1] * 30)
    short = problem.with_tensors(kv_indices=problem.tensors["kv_indices"][:1].clone())
    wanted = reference(problem)
    output, lse = replace(bf16, request_chunk_shift=7)(short, workers=4)
    assert check_outputs(BF16, output[:1], lse[:1], wanted[0][:1], wanted[1][:1]) == []


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8])
def test_small_problems(bf16: HostKernel, fp8: HostKernel, splits: int) -> None:
    for page_size in (1, 5, 16, 64):
        problem = make_problem(replace(BF16, page_size=page_size), [1, 0, 17, 300, 91], seed=page_size)
        _check(replace(bf16, splits=splits), problem, seed=page_size)
    _check(replace(fp8, splits=splits), make_problem(FP8, [40, 0, 333, 1]))


@pytest.mark.parametrize("entries", [{21: 128, 27: 128, 40: 0}, {1: -5}])
def test_batch_invariant_reads_nothing_outside_whatever_kv_indptr_says(
    bf16: HostKernel, entries: dict[int, int]
) -> None:
    """A kv_indptr that falls: what comes out is undefined, but every copy lies within the inputs."""
    kernel = replace(bf16, request_chunk_shift=8)
    for seed in range(4):
        problem = make_problem(BF16, [16] * 44, seed=seed)
        kv_indptr = problem.tensors["kv_indptr"].clone()
        for entry, page in entries.items():
            kv_indptr[entry] = page
        # Counters may be left: docs/kernel.md.
        with contextlib.suppress(CountersLeft):
            kernel(problem.with_tensors(kv_indptr=kv_indptr), workers=8, seed=seed)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("first, last", [(-9, 120), (0, 2**31 - 1), (0, 121)])
def test_small_problems_with_pages_that_are_not_listed(
    bf16: HostKernel, splits: int, first: int, last: int
) -> None:
    """NaN at once, however many pages are counted; page ids that lie around kv_indices are not read."""
    spec = replace(BF16, page_size=1)
    problem = make_problem(spec, [40] * 3, poison_unused=False)
    wanted = reference(problem)
    ids = problem.tensors["kv_indices"]
    kv_indptr = torch.tensor([first, 40, 80, last], dtype=torch.int32)
    tables = {"kv_indices": torch.cat([ids] * 3)[120:240], "kv_indptr": kv_indptr}
    output, lse = replace(bf16, splits=splits)(problem.with_tensors(**tables))
    for request, bad in enumerate((first < 0, False, last > 120)):
        rows = slice(request, request + 1)
        if bad:
            assert output[rows].isnan().all() and lse[rows].isnan().all()
        else:
            assert check_outputs(spec, output[rows], lse[rows], wanted[0][rows], wanted[1][rows]) == []


@pytest.mark.parametrize("heads", [1, 2])
def test_fp8(fp8: HostKernel, heads: int) -> None:
    rng = random.Random(heads)
    for seed, page_size in enumerate((1, 16, 64)):
        problem = make_problem(replace(FP8, page_size=page_size), _lengths(rng), seed=seed)
        _check(fp8, problem, workers=rng.choice([1, 3]), heads=heads, seed=seed)


def test_more_than_a_group_of_chunks(bf16: HostKernel) -> None:
    _check(bf16, make_problem(replace(BF16, num_qo_heads=2, num_kv_heads=1), [5, 3000, 1]), workers=40)


def test_chunks_of_one_tile_a_warp(bf16: HostKernel) -> None:
    """The ring holds more tiles than a chunk has, so that copies start later than tiles are used."""
    _check(bf16, make_problem(replace(BF16, page_size=16), [16] * 64), workers=1)


def test_a_warp_without_tokens_in_the_first_chunk(bf16: HostKernel) -> None:
    _check(bf16, make_problem(replace(BF16, page_size=256), [1] * 5), workers=1)


def test_more_pages_counted_than_listed(bf16: HostKernel) -> None:
    """The grid comes from the length of kv_indices; what lies past its end is NaN, the rest is right."""
    problem = make_problem(replace(BF16, page_size=64), [1] * 3)
    wanted = reference(problem)
    short = problem.with_tensors(kv_indices=problem.tensors["kv_indices"][:1].clone())
    output, lse = bf16(short, workers=132)
    assert check_outputs(BF16, output[:1], lse[:1], wanted[0][:1], wanted[1][:1]) == []
    assert output[1:].isnan().all() and lse[1:].isnan().all()


@pytest.mark.parametrize("workers", [1, 5, 40])
def test_kv_indices_longer_than_counted(bf16: HostKernel, workers: int) -> None:
    """What a graph's buffers are: the cut that the length let expect is dropped for that of kv_indptr."""
    for page_size in (1, 16):
        problem = make_problem(replace(BF16, page_size=page_size), [300, 0, 17, 64])
        ids = problem.tensors["kv_indices"]
        padded = problem.with_tensors(kv_indices=torch.cat([ids, ids.flip(0), ids]))
        _check(bf16, padded, workers=workers, seed=page_size)
        assert bit_equal(bf16(padded, workers=workers), bf16(problem, workers=workers))


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_end_of_a_batch_as_a_batch(bf16: HostKernel, page_size: int) -> None:
    """kv_indptr starts above 0: the slots before belong to nobody, and nothing is written for them."""
    whole = make_problem(replace(BF16, page_size=page_size), [13, 64, 40, 5])
    ends = {n: whole.tensors[n][1:] for n in ("q", "kv_indptr", "kv_last_page_len") if n in whole.tensors}
    output, lse = whole.empty_outputs()
    output.fill_(7.0)
    lse.fill_(7.0)
    bf16(replace(whole.with_tensors(**ends), lengths=whole.lengths[1:]), (output[1:], lse[1:]))
    assert (output[0] == 7.0).all() and (lse[0] == 7.0).all(), "a row before the outputs is written"
    wanted = reference(whole)
    assert check_outputs(whole.spec, output[1:], lse[1:], wanted[0][1:], wanted[1][1:]) == []


def test_infinite_queries_spoil_their_own_head_only(fp8: HostKernel) -> None:
    """fp8 computes in fp16, with q scaled by its largest finite value."""
    problem = make_problem(replace(FP8, page_size=16), [40, 7], poison_unused=False)
    wanted = reference(problem)
    q = problem.tensors["q"].clone()
    q[0, 1] = float("inf")
    output, lse = fp8(problem.with_tensors(q=q))
    kept = [head for head in range(q.shape[1]) if head != 1]
    assert not output[0, 1].isfinite().any()
    spec = problem.spec
    for request, heads in ((0, kept), (1, list(range(q.shape[1])))):
        found = output[request : request + 1, heads], lse[request : request + 1, heads]
        right = wanted[0][request : request + 1, heads], wanted[1][request : request + 1, heads]
        assert check_outputs(spec, *found, *right) == []


def test_bad_tables_spoil_their_own_request_only(bf16: HostKernel) -> None:
    problem = make_problem(BF16, [160, 160], page_order="ordered", poison_unused=False)
    wanted = reference(problem)
    ids = problem.tensors["kv_indices"].clone()
    ids[3] = -1
    for table in ({"kv_indices": ids}, {"kv_last_page_len": torch.tensor([17, 16], dtype=torch.int32)}):
        output, lse = bf16(problem.with_tensors(**table), workers=5)
        assert output[0].isnan().all() and lse[0].isnan().all()
        assert check_outputs(BF16, output[1:], lse[1:], wanted[0][1:], wanted[1][1:]) == []
