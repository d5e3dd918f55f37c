"""evenkv_cuda's own sources on the host: requests in so many parts that they are added up in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from host_kernel import HostKernel, Report, Room, check_kernel

from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import make_problem
from evenkv.spec.family import DecodeSpec

BF16 = DecodeSpec(4, 2, 128, 1)
# Two rows a warp, half of which may be nobody's; two KV heads a block on the device below.
FP8 = DecodeSpec(10, 2, 64, 1, "float8_e4m3fn")
PAIRS = Room(workers=6, resident=1)

UNEVEN = {"is_uncut": -1, "is_even": -1}
WAYS = {
    "even": {"is_uncut": -1, "is_even": 1, "even_parts": 60},
    "a tile each": {**UNEVEN, "part_tokens": 16},
    "tail": {**UNEVEN, "part_tokens": 128, "tail_slot": 128, "tail_scale": 3},
    "batch-invariant": {"invariant_tokens": 16},
}


@pytest.mark.parametrize("tokens", [48 * 16, 49 * 16, 56 * 16 + 3, 63 * 16])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_around_the_limit(bf16: HostKernel, way: dict[str, int], tokens: int) -> None:
    """48 parts, one more, and groups with a rest: with a neighbour in the same cells."""
    problem = make_problem(BF16, [5, tokens, 40], seed=tokens)
    report = check_kernel(bf16, problem, seed=tokens, running=5, **way)
    assert report.places_written >= 2 * 40


@pytest.mark.parametrize("way", [WAYS["even"], WAYS["a tile each"]], ids=["even", "uneven"])
def test_the_bits_are_the_same_whoever_comes_first(bf16: HostKernel, way: dict[str, int]) -> None:
    problem = make_problem(BF16, [70 * 16, 0], seed=3)
    for splits in (1, 3):
        found = [bf16(problem, seed=seed, running=1 + 5 * seed, splits=splits, **way) for seed in range(4)]
        assert all(bit_equal(outputs, found[0]) for outputs in found)


@pytest.mark.parametrize("splits", [1, 2])
def test_two_heads_a_block_and_two_rows_a_warp(fp8: HostKernel, splits: int) -> None:
    way = {**UNEVEN, "part_tokens": 32}
    problem = make_problem(FP8, [1, 52 * 32, 0, 9], seed=splits)
    assert check_kernel(fp8, problem, room=PAIRS, splits=splits, **way).heads == 2
    assert check_kernel(fp8, problem, splits=splits, **way).heads == 1


def test_the_scratch_of_a_launch_may_hold_anything(bf16: HostKernel) -> None:
    """Sums of groups lie beside parts' m and l: nothing is read there that was not written."""
    problem = make_problem(BF16, [60 * 16], seed=5)
    found = []
    for byte in (0x00, 0x41, 0x7F, 0xFF):
        report = Report()
        found.append(bf16(problem, scratch_byte=byte, report=report, **WAYS["a tile each"]))
        assert report.counters_left == 0
    assert all(torch.equal(a, b) for outputs in found for a, b in zip(outputs, found[0], strict=True))


def test_page_sizes(bf16: HostKernel) -> None:
    for page_size in (16, 48):
        problem = make_problem(replace(BF16, page_size=page_size), [50 * 16, 31], seed=page_size)
        check_kernel(bf16, problem, **WAYS["a tile each"])
