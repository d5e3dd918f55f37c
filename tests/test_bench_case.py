"""Cases of the roofline grid: lengths, bytes, names, JSON."""

from __future__ import annotations

import numpy as np
import pytest
from bench_fixtures import case

from evenkv.bench import grid, plan
from evenkv.bench.case import Case, lognormal
from evenkv.errors import EvenkvError


def test_bytes_are_those_of_listed_tokens():
    assert case(32, 4096).kv_bytes() == 2 * 2 * 8 * 128 * 32 * 4096
    assert case(2, None, (1, 17), kv_dtype="float8_e4m3fn").kv_bytes() == 2 * 8 * 128 * 18
    assert case(2, None, (1, 17)).num_pages() == 3


def test_drawn_lengths_are_the_same_everywhere_and_have_the_stated_mean():
    drawn = case(4, None, "lognormal(8192,1,0)").request_lengths()
    # Of numpy's PCG64: another generator, or another recipe, would make the committed rows another case.
    assert drawn == [5634, 4354, 9427, 5518]
    many = case(200_000, None, lognormal(8192, 0.5, 3)).request_lengths()
    assert np.mean(many) == pytest.approx(8192, rel=0.01)
    assert np.std(np.log(many)) == pytest.approx(0.5, rel=0.01)


def test_drawn_lengths_are_at_least_one():
    assert min(case(1000, None, "lognormal(1,3,0)").request_lengths()) == 1


@pytest.mark.parametrize(
    "given",
    [
        case(),
        case(32, None, "lognormal(2048,1.5,7)", kv_dtype="float8_e4m3fn"),
        case(3, None, (5, 0, 1), layout="HND", head_dim=64),
    ],
)
def test_json_round_trip(given):
    plain = given.to_json()
    assert Case.from_json(plain) == given
    assert plain["lengths"] is None or isinstance(plain["lengths"], (str, list))


def test_names():
    assert case().name == "b32 L4096 h32/8 ps16 bf16"
    assert case(64, None, (131072,) + (1024,) * 63).name == "b64 1x131072+63x1024 h32/8 ps16 bf16"
    named = case(8, None, "lognormal(2048,0.5,0)", kv_dtype="float8_e4m3fn", head_dim=64, layout="HND")
    assert named.name == "b8 logn(2048,0.5,0) h32/8 ps16 fp8 d64 HND"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"context": None}, "context"),
        ({"context": 0}, "context"),
        ({"context": None, "lengths": [1, 2]}, "lengths"),
        ({"context": None, "lengths": [1] * 31 + [-1]}, "lengths"),
        ({"context": None, "lengths": "uniform(1,2)"}, "lengths"),
        ({"context": None, "lengths": 7}, "lengths"),
        ({"num_kv_heads": 3}, "num_qo_heads"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"layout": "XYZ"}, "layout"),
        ({"colour": "red"}, "colour"),
        ({"batch": 2**31}, "batch: wanted a whole number that fits int32"),
        ({"head_dim": 10**400}, "head_dim"),
        (
            {"batch": 1_000_001, "context": None, "lengths": "lognormal(8,1,0)"},
            "1000000 or fewer drawn lengths",
        ),
        ({"batch": 3, "context": None, "lengths": [1]}, "wanted 3 numbers for batch=3, got 1 number\\."),
    ],
)
def test_faulty_cases_are_named(change, named):
    with pytest.raises(EvenkvError, match=named):
        Case.from_json({**case().to_json(), **change})


@pytest.mark.parametrize(
    "given",
    [case(3, 17), case(3, None, (5, 0, 33)), case(3, None, "lognormal(64,1,0)")],
)
def test_sums_are_those_of_the_lengths(given):
    lengths = given.request_lengths()
    assert given.total_tokens() == sum(lengths) and given.longest() == max(lengths)
    assert given.num_pages() == sum(-(-n // 16) for n in lengths)
    assert given.kv_bytes() == 2 * 2 * 8 * 128 * sum(lengths)


def test_a_uniform_batch_makes_no_list_of_its_lengths(monkeypatch):
    monkeypatch.setattr(Case, "request_lengths", lambda self: pytest.fail("made a list"))
    huge = case(2**31 - 1, 2**31 - 1)
    assert huge.longest() == 2**31 - 1 and huge.total_tokens() == (2**31 - 1) ** 2
    assert grid.is_skipped(huge) and huge.num_pages() > 2**57
    assert plan.slowness("flashinfer-tc", huge) > 1


def test_that_neither_context_nor_lengths_is_given_is_named():
    for left_out in ({}, {"context": None}, {"lengths": None}, {"context": None, "lengths": None}):
        with pytest.raises(EvenkvError, match="missing: head_dim, one of context and lengths"):
            values = {name: v for name, v in case().to_json().items() if name not in ("context", "lengths")}
            Case.from_json({**{name: v for name, v in values.items() if name != "head_dim"}, **left_out})


def test_missing_fields_are_named():
    with pytest.raises(EvenkvError, match="head_dim"):
        Case.from_json({name: value for name, value in case().to_json().items() if name != "head_dim"})
