"""evenkv_cuda's own sources, built for the host and run with copies that arrive as late as they may."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_parts import take_requests
from host_kernel import CountersLeft, HostKernel, Outputs, Report, Room, build_host_kernel, check_kernel

from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

# Four warps with rings of two 16-token tiles; rings of four 32-token tiles, and groups above 8 heads.
BF16 = DecodeSpec(4, 2, 128, 16)
FP8 = DecodeSpec(20, 2, 64, 16, "float8_e4m3fn")

# The ways that a batch may be cut, whatever its shapes; parts of one tile and of a few.
UNCUT = {"is_uncut": 1}
EVEN = {"is_uncut": -1, "is_even": 1, "even_parts": 5}
UNEVEN = {"is_uncut": -1, "is_even": -1, "part_tokens": 32}
SHORT = {"is_uncut": -1, "is_even": -1, "part_tokens": 16}
LONG = {"is_uncut": -1, "is_even": -1, "part_tokens": 160}
TAIL = {**LONG, "tail_slot": 160, "tail_scale": 2}
DEALT = {**LONG, "dealt": 40}
WAYS = {
    "uncut": UNCUT,
    "even": EVEN,
    "uneven": UNEVEN,
    "parts of a tile": SHORT,
    "long parts": LONG,
    "tail": TAIL,
    "dealt": DEALT,
    "hardly dealt": {**LONG, "dealt": 14},
    "dealt to blocks": {**DEALT, "alone": 1},
}
INVARIANT = {"invariant_tokens": 64}
ALL_WAYS = {**WAYS, "batch-invariant": INVARIANT}
of_all_ways = pytest.mark.parametrize("way", ALL_WAYS.values(), ids=ALL_WAYS)

# Two KV heads and at least four requests: more items than blocks run at once, fewer than four an SM.
PAIRS = Room(workers=6, resident=1)


def _lengths(rng: random.Random) -> list[int]:
    top = rng.choice([1, 8, 40, 300, 900])
    return [rng.choice([0, 1, rng.randint(0, top), top]) for _ in range(rng.choice([1, 3, 9]))]


def _check_requests(spec: DecodeSpec, outputs: Outputs, wanted: Outputs, bad: list[int]) -> None:
    """Requests in `bad` are NaN, all others right."""
    for request in range(len(outputs[0])):
        output, lse = (t[request : request + 1] for t in outputs)
        if request in bad:
            assert output.isnan().all() and lse.isnan().all(), f"request {request} is not NaN"
        else:
            faults = check_outputs(spec, output, lse, *(t[request : request + 1] for t in wanted))
            assert faults == [], f"request {request}: {faults}"


def test_shared_memory_fits(bf16: HostKernel, fp8: HostKernel) -> None:
    for kernel in (bf16, fp8):
        library = kernel.library
        assert library.shared_bytes() <= library.shared_budget()
        # sm_90: 228 KB an SM, of which each block takes another 1 KB.
        assert library.resident_blocks() * (library.shared_bytes() + 1024) <= 228 * 1024


def test_bf16_as_shapes_settle_it(bf16: HostKernel) -> None:
    rng = random.Random(5)
    kernels = set()
    for page_size in (1, 5, 16, 48, 64):
        spec = replace(BF16, page_size=page_size)
        for seed in range(6):
            problem = make_problem(spec, _lengths(rng), seed=seed, interleaved=seed % 3 == 1)
            room = Room(rng.choice([1, 2, 8, 40]), rng.choice([1, 3]), rng.choice([1, 2, 8]))
            report = check_kernel(bf16, problem, room=room, seed=seed, running=rng.choice([1, 3, 8]))
            kernels.add((report.is_uncut, report.splits > 1, report.places_written > 0))
    for lengths in ([3000], [40, 3000, 0, 700]):  # long enough to be cut
        report = check_kernel(bf16, make_problem(BF16, lengths), room=Room(8, 3, 1), seed=1)
        kernels.add((report.is_uncut, report.splits > 1, report.places_written > 0))
    assert {(1, False, False), (1, True, False), (0, False, True)} <= kernels


@pytest.mark.parametrize("splits", range(1, 9))
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_cut_in_clusters_of_any_size(
    bf16: HostKernel, fp8: HostKernel, way: dict[str, int], splits: int
) -> None:
    # Fewer clusters than parts, and as many: each takes several, or one. Every size of a cluster and every
    # way to cut meets all of them, not each pair of these: blocks of many lanes take long on a CPU.
    shapes = ((1, 2), (5, 0), (16, 3), (64, 0))
    turn = (splits + list(WAYS.values()).index(way)) % 4
    for page_size, clusters in shapes if splits < 3 else shapes[turn : turn + 1]:
        lengths = [1, 0, 17, 300, 91] if splits < 3 else [0, 17, 300]
        problem = make_problem(replace(BF16, page_size=page_size), lengths, seed=page_size)
        report = check_kernel(bf16, problem, seed=page_size, splits=splits, clusters=clusters, **way)
        assert report.splits == splits and bool(report.is_uncut) == (way is UNCUT)
        least = 2 * (300 // way["part_tokens"]) if way.get("is_even") == -1 else 2 * 5
        assert report.places_written >= (0 if way is UNCUT else least), "the request of 300 is not cut"
    if splits in (3, 4, 6, 7):
        return
    problem = make_problem(FP8, [40, 0, 333, 1])
    report = check_kernel(fp8, problem, room=Room(20), splits=splits, **{**way, "part_tokens": 64})
    assert report.heads == 1 and bool(report.is_uncut) == (way is UNCUT)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("way", [EVEN, {**UNEVEN, "part_tokens": 64}], ids=["even", "uneven"])
def test_two_fp8_heads_a_block(fp8: HostKernel, way: dict[str, int], splits: int) -> None:
    for seed, page_size in enumerate((1, 64)):
        problem = make_problem(replace(FP8, page_size=page_size), [400, 0, 70, 33, 1], seed=seed)
        report = check_kernel(fp8, problem, room=PAIRS, seed=seed, splits=splits, **way)
        assert (report.heads, report.units, report.splits) == (2, 1, splits)
        assert report.places_written >= 400 // 64


def test_which_fp8_problems_take_two_heads_a_block(fp8: HostKernel) -> None:
    """More items than run at once, up to four an SM; never with batch-invariant bits."""
    rng = random.Random(3)
    for batch, heads in ((3, 1), (4, 2), (12, 2), (13, 1)):
        problem = make_problem(FP8, [rng.choice([0, 1, 40, 90]) for _ in range(batch)], seed=batch)
        assert check_kernel(fp8, problem, room=PAIRS, always_cut=batch == 4).heads == heads, batch
        assert check_kernel(fp8, problem, room=PAIRS, **INVARIANT).heads == 1
    spec = replace(FP8, num_kv_heads=3, num_qo_heads=30)
    assert check_kernel(fp8, make_problem(spec, [50] * 4), room=PAIRS).heads == 1, "an odd number of KV heads"


def test_large_fp8_batches_take_two_heads_a_block_and_two_blocks_an_sm(fp8: HostKernel) -> None:
    """Whatever shapes say of 12,288 slots an SM and more: kv_indices may be longer than requests are."""
    sm_bytes = 228 * 1024
    for batch, few in ((1, False), (2, False), (3, True)):
        problem = make_problem(replace(FP8, page_size=64), [90, 0, 700][:batch], seed=batch)
        ids = problem.tensors["kv_indices"]
        pages = 12_288 // (2 * 64)
        for listed, heads in ((pages, 2), (pages - 1, 1)):
            tensors = {"kv_indices": torch.cat([ids, ids.new_zeros(listed - len(ids))])}
            report = check_kernel(fp8, problem.with_tensors(**tensors), room=Room(1, 8), seed=batch)
            assert report.heads == heads, (batch, listed)
            takes = sm_bytes // (report.block_bytes + 1024)
            assert takes == 2 if few and heads == 2 else takes > 2


def test_fp8_as_shapes_settle_it(fp8: HostKernel) -> None:
    rng = random.Random(2)
    for seed, page_size in enumerate((1, 16, 64, 1, 48)):
        problem = make_problem(replace(FP8, page_size=page_size), _lengths(rng), seed=seed)
        check_kernel(fp8, problem, room=Room(rng.choice([1, 3]), rng.choice([1, 2])), seed=seed)


def test_always_cut_gives_the_bits_of_the_kernel_for_whole_requests(bf16: HostKernel) -> None:
    problem, report = make_problem(BF16, [40, 0, 300, 64]), Report()
    whole = bf16(problem, room=Room(20), report=report)
    assert report.is_uncut and report.splits > 1
    assert bit_equal(bf16(problem, room=Room(20), always_cut=True, is_even=1, report=report), whole)
    assert not report.is_uncut


@pytest.mark.parametrize("splits", [1, 3])
def test_requests_in_more_parts_than_are_added_at_once(bf16: HostKernel, splits: int) -> None:
    """Partials are loaded eight at a time, or four where a row is longer."""
    spec = replace(BF16, num_qo_heads=2, num_kv_heads=1)
    for length in (8 * 16, 8 * 16 + 1, 1100):
        check_kernel(bf16, make_problem(spec, [5, length, 1]), splits=splits, **SHORT)


def test_head_dim_256_and_groups_cut_in_two(tmp_path: Any) -> None:
    """Two warps a block, two quads a lane; a group of 10 heads in units of 5."""
    spec = DecodeSpec(10, 1, 256, 16)
    kernel = build_host_kernel(spec, tmp_path)
    problem = make_problem(spec, [70, 0, 200, 5])
    for way in ({}, UNCUT, EVEN, UNEVEN, INVARIANT):
        for splits in (0,) if "invariant_tokens" in way else (1, 4):
            report = check_kernel(kernel, problem, splits=splits, room=Room(8), **way)
            assert report.units == 2


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_batch_invariant_bits(bf16: HostKernel, page_size: int) -> None:
    """A request's bits are the same alone, among others, at another place of the batch, on any device."""
    spec = replace(BF16, page_size=page_size)
    problem = make_problem(spec, [3, 0, 700, 256, 257, 0, 1, 4500, 90], seed=page_size)
    invariant = {"invariant_tokens": 256}
    report = check_kernel(bf16, problem, room=Room(5), seed=page_size, **invariant)
    assert not report.is_uncut and report.splits == 1 and report.places_written >= 2 * 18
    output, lse = bf16(problem, **invariant)
    for requests in (range(2, 3), range(3, 5), range(7, 8), range(1, 9)):
        some = take_requests(problem, requests)
        rows = slice(requests.start, requests.stop)
        for room in (Room(40, 3), Room(1, 1, 1)):
            part = bf16(some, room=room, seed=requests.start, **invariant)
            assert bit_equal(part, (output[rows], lse[rows])), requests


def test_batch_invariant_fp8(fp8: HostKernel) -> None:
    problem = make_problem(FP8, [0, 400, 17, 0, 64])
    check_kernel(fp8, problem, **INVARIANT)
    output, lse = fp8(problem, room=PAIRS, **INVARIANT)
    assert bit_equal(fp8(take_requests(problem, range(1, 2)), **INVARIANT), (output[1:2], lse[1:2]))


@pytest.mark.parametrize("share_64ths", [64, 63, 37, 8])
@pytest.mark.parametrize(
    "page_size, lengths",
    # 693 entries of kv_indptr are 33 equal ranges of the search.
    [(1, [5] * 700), (1, [5] * 692), (16, [0, 40, 0, 0, 300, 1]), (1, [0] * 9)],
    ids=["700", "692", "few", "empty"],
)
def test_numbers_find_their_requests(
    bf16: HostKernel, page_size: int, lengths: list[int], share_64ths: int
) -> None:
    """A number belongs to the last request that begins by it, also where a search narrows it down first."""
    problem = make_problem(replace(BF16, num_qo_heads=2, num_kv_heads=1, page_size=page_size), lengths)
    slots = problem.tensors["kv_indptr"].long() * page_size
    for part_tokens in (16, 48, 1024):
        for tail_slot in (2**31 - 1, max(64, int(slots[-1]) * 64 // share_64ths // 3)):
            counted = torch.arange(int(slots[-1]) * 16 * 64 // share_64ths // part_tokens + len(slots) + 40)
            found, begins = bf16.find_requests(problem, part_tokens, tail_slot, share_64ths, counted)
            assert (begins.diff() >= 1).all() and begins[0] >= 0
            wanted = (torch.searchsorted(begins, counted.int(), right=True) - 1).clamp(min=0)
            assert torch.equal(found.long(), wanted), (part_tokens, tail_slot)


def test_many_requests(bf16: HostKernel) -> None:
    """More than one pass over kv_indptr finds."""
    spec = replace(BF16, num_qo_heads=2, num_kv_heads=1, page_size=1)
    problem = make_problem(spec, [0, 3, 90, *[1] * 296, 0, 40])
    report = check_kernel(bf16, problem, running=8, is_even=-1, part_tokens=16, is_uncut=-1)
    assert report.places_written >= 6 + 3


@pytest.mark.parametrize("batch", [3, 17, 31, 32])
@pytest.mark.parametrize("alone", [0, 1])
def test_dealt_numbers_are_used(bf16: HostKernel, batch: int, alone: int) -> None:
    """Each request's parts by a lane of its own: nearly as many as there are numbers."""
    lengths = [(40 + 37 * r % 300) for r in range(batch)]
    problem = make_problem(replace(BF16, num_qo_heads=2, num_kv_heads=1), lengths, seed=batch)
    options = {**LONG, "dealt": 2 * batch + 4, "alone": alone, "splits": 2}
    report = check_kernel(bf16, problem, running=5, **options)
    # All but the requests that stay whole, of which there may be some, in two parts and more.
    assert 1.2 * batch < report.places_written <= report.numbers == 2 * batch + 4


@pytest.mark.parametrize("place", [0, 1, 4, 7])
@pytest.mark.parametrize("listed", [1.0, 1.7])
def test_cells_from_either_end(bf16: HostKernel, place: int, listed: float) -> None:
    """The longest request in the first half or in the second; in a list of page ids that is longer, too."""
    lengths = [70, 0, 40, 90, 8, 33, 64, 50]
    lengths[place] = 700
    problem = make_problem(BF16, lengths, seed=place)
    ids = problem.tensors["kv_indices"]
    more = torch.zeros(int(len(ids) * (listed - 1)), dtype=torch.int32)
    problem = problem.with_tensors(kv_indices=torch.cat([ids, more]))
    for part_tokens, tail in ((32, {}), (64, {"tail_slot": 320, "tail_scale": 1})):
        options = {"is_uncut": -1, "part_tokens": part_tokens, "splits": 1, **tail}
        report = check_kernel(bf16, problem, room=Room(1, 1), running=5, **options)
        assert report.places_written >= BF16.num_kv_heads * 700 // 64


@pytest.mark.parametrize("page_size", [1, 5, 16, 48, 64])
def test_whole_tiles_are_copied_by_tensor(bf16: HostKernel, fp8: HostKernel, page_size: int) -> None:
    """Where pages hold 16 rows side by side, whatever the strides; the last tokens of a walk by lanes.

    Not rows of 256 bytes, nor requests that stay whole.
    """
    for kernel, spec in ((bf16, BF16), (fp8, FP8)) if page_size == 16 else ((fp8, FP8),):
        wanted, has_any = replace(spec, page_size=page_size), kernel is fp8 and page_size % 16 == 0
        for interleaved in (False, True):
            problem = make_problem(wanted, [200, 0, 96, 7], interleaved=interleaved)
            for way in (UNCUT, EVEN, UNEVEN, DEALT):
                report = check_kernel(kernel, problem, room=Room(20), **way)
                copies = report.tensor_copies
                assert (copies > 0) == (has_any and way is not UNCUT)
                # K and V of 16 rows of a head each; 32 rows a tile.
                assert copies <= (200 // 32 + 96 // 32) * 2 * 2 * spec.num_kv_heads
            keys, values = (
                problem.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
                for name in ("k_cache", "v_cache")
            )
            report = check_kernel(kernel, problem.with_tensors(k_cache=keys, v_cache=values), **DEALT)
            assert (report.tensor_copies > 0) == has_any, "heads outside of slots"
            report = check_kernel(kernel, problem.with_tensors(k_cache=keys), **DEALT)
            assert report.tensor_copies == 0, "K and V in two orders"


@of_all_ways
@pytest.mark.parametrize("first, last", [(-9, 120), (0, 2**31 - 1), (0, 121), (-(2**30), 120)])
def test_pages_that_are_not_listed(bf16: HostKernel, way: dict[str, int], first: int, last: int) -> None:
    """NaN, however many pages are counted; page ids that lie around kv_indices are not read."""
    spec = replace(BF16, page_size=1)
    problem = make_problem(spec, [40] * 3, poison_unused=False)
    wanted = reference(problem)
    ids = problem.tensors["kv_indices"]
    kv_indptr = torch.tensor([first, 40, 80, last], dtype=torch.int32)
    tables = {"kv_indices": torch.cat([ids] * 3)[120:240], "kv_indptr": kv_indptr}
    bad = [request for request, is_bad in ((0, first < 0), (2, last > 120)) if is_bad]
    for splits in (1, 8) if way is not INVARIANT else (0,):
        outputs = bf16(problem.with_tensors(**tables), splits=splits, **way)
        _check_requests(spec, outputs, wanted, bad)


@of_all_ways
def test_kv_indices_shorter_than_counted(bf16: HostKernel, way: dict[str, int]) -> None:
    problem = make_problem(replace(BF16, page_size=64), [1, 64, 130, 1])
    wanted = reference(problem)
    for listed, bad in ((1, [1, 2, 3]), (2, [2, 3]), (4, [2, 3]), (0, [0, 1, 2, 3])):
        ids = problem.tensors["kv_indices"][:listed].clone()
        outputs = bf16(problem.with_tensors(kv_indices=ids), room=Room(132), **way)
        _check_requests(BF16, outputs, wanted, bad)


@of_all_ways
def test_page_ids_and_last_page_lengths_out_of_range(bf16: HostKernel, way: dict[str, int]) -> None:
    """They spoil their own request only."""
    problem = make_problem(BF16, [160, 160, 0, 40], page_order="ordered", poison_unused=False)
    wanted = reference(problem)
    pages = len(problem.tensors["k_cache"])
    tables = []
    for bad_id in (-1, pages, 2**31 - 1, -(2**31)):
        ids = problem.tensors["kv_indices"].clone()
        ids[3] = bad_id
        tables.append({"kv_indices": ids})
    for bad_length in (17, -1, 2**31 - 1, -(2**31)):
        tables.append({"kv_last_page_len": torch.tensor([bad_length, 16, 0, 8], dtype=torch.int32)})
    for table in tables:
        outputs = bf16(problem.with_tensors(**table), room=Room(5), **way)
        _check_requests(BF16, outputs, wanted, [0])


@of_all_ways
def test_requests_without_tokens(bf16: HostKernel, way: dict[str, int]) -> None:
    """No pages, none that kv_indices lists, or a last page of no tokens: 0 and -inf, written once each."""
    for lengths in ([0], [0, 0, 0], [40, 0, 0, 64, 0]):
        problem = make_problem(BF16, lengths)
        for running in (1, 9):
            check_kernel(bf16, problem, running=running, **way)
    problem = make_problem(BF16, [16, 40])
    last = torch.tensor([0, 8], dtype=torch.int32)
    output, lse = bf16(problem.with_tensors(kv_last_page_len=last), **way)
    assert (output[0] == 0).all() and (lse[0] == -torch.inf).all()
    wanted = reference(problem)
    assert check_outputs(BF16, output[1:], lse[1:], wanted[0][1:], wanted[1][1:]) == []


FITTED = {"is_uncut": -1, "is_even": -1, "part_tokens": 256, "least_64ths": 4}
FITTED_EVEN = {"is_uncut": -1, "is_even": 1, "even_parts": 6, "least_64ths": 8}


PADDED = {"by shapes": {}, **ALL_WAYS, "fitted": FITTED, "fitted, even": FITTED_EVEN}


@pytest.mark.parametrize("way", PADDED.values(), ids=PADDED)
def test_kv_indices_longer_than_counted(bf16: HostKernel, way: dict[str, int]) -> None:
    """What a graph's buffers are: shapes let expect more tokens than there are."""
    for page_size, workers in ((1, 1), (16, 5)):
        problem = make_problem(replace(BF16, page_size=page_size), [300, 0, 17, 64])
        ids = problem.tensors["kv_indices"]
        for copies in (2, 40):
            padded = problem.with_tensors(kv_indices=torch.cat([ids, *[ids.flip(0)] * (copies - 1)]))
            report = check_kernel(bf16, padded, room=Room(workers), seed=page_size, **way)
            if "least_64ths" in way and copies > 2:
                assert report.places_written > 2 * 2, "parts are not as long as the list lets expect"


@of_all_ways
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lengths", [[13, 64, 40, 5], [300, 0, 90, 200], [64, 130, 0]])
def test_the_end_of_a_batch_as_a_batch(
    bf16: HostKernel, way: dict[str, int], lengths: list[int], page_size: int
) -> None:
    """kv_indptr starts above 0: the slots before belong to nobody, and nothing is written for them."""
    whole = make_problem(replace(BF16, page_size=page_size), lengths)
    ends = {n: whole.tensors[n][1:] for n in ("q", "kv_indptr", "kv_last_page_len") if n in whole.tensors}
    problem = replace(whole.with_tensors(**ends), lengths=whole.lengths[1:])
    output, lse = reference(whole)
    check_kernel(bf16, problem, wanted=(output[1:], lse[1:]), **way)


@of_all_ways
@pytest.mark.parametrize("entries", [{21: 128, 27: 128, 40: 0}, {1: -5}, {44: 3}, {0: 40}])
def test_nothing_is_read_outside_whatever_kv_indptr_says(
    bf16: HostKernel, way: dict[str, int], entries: dict[int, int]
) -> None:
    """A kv_indptr that falls: what comes out is undefined, but every access lies within the call's memory."""
    for seed in range(2):
        problem = make_problem(BF16, [16] * 44, seed=seed)
        kv_indptr = problem.tensors["kv_indptr"].clone()
        for entry, page in entries.items():
            kv_indptr[entry] = page
        # Counters may be left: docs/kernel.md.
        with contextlib.suppress(CountersLeft):
            bf16(problem.with_tensors(kv_indptr=kv_indptr), room=Room(8), seed=seed, **way)


def test_infinite_queries_spoil_their_own_head_only(fp8: HostKernel) -> None:
    """fp8 computes in fp16, with q scaled by its largest finite value."""
    problem = make_problem(FP8, [40, 7], poison_unused=False)
    wanted = reference(problem)
    q = problem.tensors["q"].clone()
    q[0, 1] = float("inf")
    kept = [head for head in range(q.shape[1]) if head != 1]
    for way in (UNCUT, EVEN, UNEVEN):
        output, lse = fp8(problem.with_tensors(q=q), **way)
        assert not output[0, 1].isfinite().any()
        for request, heads in ((0, kept), (1, list(range(q.shape[1])))):
            found = output[request : request + 1, heads], lse[request : request + 1, heads]
            right = wanted[0][request : request + 1, heads], wanted[1][request : request + 1, heads]
            assert check_outputs(problem.spec, *found, *right) == []


def test_queries_and_caches_of_any_strides(bf16: HostKernel) -> None:
    """Queries of which rows begin anywhere, and a cache with heads before slots."""
    problem = make_problem(BF16, [40, 0, 300])
    q = problem.tensors["q"]
    wide = q.new_full((len(q), q.shape[1] + 3, q.shape[2] + 2), float("nan"))
    wide[:, : q.shape[1], : q.shape[2]] = q
    cache = problem.tensors["k_cache"]
    heads_first = cache.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = {"q": wide[:, : q.shape[1], : q.shape[2]], "k_cache": heads_first}
    for way in ({}, UNEVEN):
        check_kernel(bf16, problem.with_tensors(**tensors), **way)
