"""The grid: what the protocol demands, subsets, cases of the user's own; order, shares, estimates."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from bench_fixtures import case, row

from evenkv.bench import grid, plan
from evenkv.bench.case import Case, lognormal
from evenkv.bench.record import IMPLEMENTATIONS
from evenkv.errors import EvenkvError

PROTOCOL = grid.protocol()


def test_the_uniform_grid_is_complete():
    have = {
        (c.batch, c.context, c.num_kv_heads, c.page_size, c.kv_dtype)
        for c in PROTOCOL
        if c.context is not None
    }
    wanted = itertools.product(
        (1, 8, 32, 128, 256),
        (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
        (32, 8, 4),
        (16, 64),
        ("bfloat16", "float8_e4m3fn"),
    )
    assert set(wanted) <= have and len(grid.uniform()) == 480


def test_every_geometry_has_every_skewed_batch():
    skewed = set(grid.skewed())
    for kv, ps, dtype in itertools.product((32, 8, 4), (16, 64), ("bfloat16", "float8_e4m3fn")):
        more = {"num_kv_heads": kv, "page_size": ps, "kv_dtype": dtype}
        for batch, mean, sigma in itertools.product((8, 32, 128), (2048, 8192, 32768), (0.5, 1.0, 1.5)):
            assert case(batch, None, lognormal(mean, sigma, 0), **more) in skewed
        assert case(64, None, (131072,) + (1024,) * 63, **more) in skewed
    assert skewed <= set(PROTOCOL)


def test_captured_steps_and_tensor_parallel_heads_are_in():
    lengths = {c.lengths for c in grid.captured()}
    assert (91,) in lengths and {sum(each) for each in lengths} == {91, 19134, 58966}
    heads = {(c.num_qo_heads, c.num_kv_heads) for c in PROTOCOL}
    assert {(5, 1), (6, 1), (8, 1), (10, 2), (20, 4)} <= heads


def test_cases_over_80_gb_are_skipped_and_no_others():
    skipped = [c for c in PROTOCOL if grid.is_skipped(c)]
    assert case(256, 131072) in skipped and case(128, 131072) not in skipped
    assert all(c.kv_bytes() > 80e9 for c in skipped)
    assert len(skipped) == sum(c.kv_bytes() > 80e9 for c in PROTOCOL)


def test_presets_are_parts_of_the_protocol_with_names_of_their_own():
    assert len(grid.smoke()) == 12
    for preset in (grid.smoke(), grid.regimes()):
        assert set(preset) <= set(PROTOCOL) and len(set(preset)) == len(preset)
    assert len({c.name for c in PROTOCOL}) == len(PROTOCOL)


def test_skewed_cases_of_the_regimes_have_a_uniform_partner_of_the_same_bytes():
    regimes = set(grid.regimes())
    skewed = [c for c in regimes if c.lengths is not None and c.num_qo_heads == 32 and c.page_size == 16]
    assert len(skewed) == 8
    for each in skewed:
        partner = grid.uniform_partner(each)
        assert partner in regimes
        assert partner.kv_bytes() == pytest.approx(each.kv_bytes(), rel=1e-4)


def test_select():
    chosen = grid.select(PROTOCOL, "H5/1 ps1 fp8")
    assert {c.family for c in chosen} == {chosen[0].family} and len(chosen) == 7
    assert grid.select(PROTOCOL, "b1 L1024 h32/8 ps16 *") == [
        case(1, 1024),
        case(1, 1024, kv_dtype="float8_e4m3fn"),
    ]
    with pytest.raises(EvenkvError, match="matches none of 911 cases"):
        grid.select(PROTOCOL, "b7 ")


def test_a_pattern_matches_a_name_from_end_to_end():
    assert grid.select([case(1, 1024)], "b1 L1024") and grid.select([case(1, 1024)], "B1*BF16")
    with pytest.raises(EvenkvError, match="matches none of 1 case;.* begin and end it with"):
        grid.select([case(1, 1024)], "L1024*")


def test_load_cases(tmp_path):
    wanted = [case(), case(2, None, (3, 4))]
    as_list, as_lines = tmp_path / "list.json", tmp_path / "lines.jsonl"
    as_list.write_text(json.dumps([c.to_json() for c in wanted]))
    as_lines.write_text("".join(row(c, "fa3", 200.0).model_dump_json() + "\n" for c in [*wanted, wanted[0]]))
    assert grid.load_cases(as_list) == grid.load_cases(as_lines) == wanted


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", "not JSON"),
        ("[]", "no cases"),
        ('[{"batch": 1}]', "entry 1"),
        ("[3]", "entry 1: case: wanted an ob"),
    ],
)
def test_faulty_case_files_are_named(tmp_path, text, named):
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(EvenkvError, match=named):
        grid.load_cases(path)
    with pytest.raises(EvenkvError, match="no such file"):
        grid.load_cases(tmp_path / "gone.json")


def test_what_is_no_file_of_text_is_named_with_its_option(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x80\x81")
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "deep").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    faults = [
        ("binary", "wanted UTF-8 text, got other bytes"),
        ("pointer", "is a Git LFS pointer"),
        ("deep", "not JSON"),
        ("pipe", "got a pipe"),
        ("", "got a directory"),
    ]
    for name, said in faults:
        with pytest.raises(EvenkvError, match=said) as caught:
            grid.load_cases(tmp_path / name)
        assert caught.value.problem.startswith("--cases") and str(tmp_path) in caught.value.problem


def test_order_keeps_families_together():
    ordered = plan.order(PROTOCOL, in_rounds=False)
    assert sorted(c.name for c in ordered) == sorted(c.name for c in PROTOCOL)
    families = [family for family, _ in plan.by_family(ordered)]
    assert len(families) == len(set(families))


def test_in_rounds_the_telling_cases_come_first():
    ordered = plan.order(PROTOCOL, in_rounds=True)
    telling = set(grid.smoke()) | set(grid.regimes())
    assert set(ordered[:12]) == set(grid.smoke())
    assert set(ordered[: len(telling)]) == telling


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_are_a_fair_partition(count):
    ordered = plan.order(PROTOCOL, in_rounds=False)

    def cost(c: Case) -> float:
        return plan.case_seconds(c, IMPLEMENTATIONS, 100, 4250.0)

    shards = [plan.shard(ordered, index, count, cost) for index in range(1, count + 1)]
    assert [c for shard in shards for c in shard] == ordered
    costs = [sum(map(cost, shard)) for shard in shards]
    assert max(costs) - min(costs) <= 2 * max(map(cost, ordered))


def test_a_shard_that_does_not_exist_is_refused():
    for index, count in ((0, 2), (3, 2)):
        with pytest.raises(EvenkvError, match="--shard"):
            plan.shard(PROTOCOL, index, count, lambda c: 1.0)


def test_groups_stay_in_a_family_and_near_their_length():
    ordered = plan.order(PROTOCOL, in_rounds=False)
    groups = plan.groups(ordered, lambda c: 1.0, 10.0)
    assert [c for group in groups for c in group] == ordered
    assert all(len(group) <= 10 and len({c.family for c in group}) == 1 for group in groups)


def test_the_protocol_is_plannable_in_25_minutes_and_the_smoke_test_in_one():
    full = plan.estimate(plan.order(PROTOCOL, False), IMPLEMENTATIONS, plan.FULL_BUDGET_S, 4250.0)
    assert full.iterations == 100 and 10 * 60 < full.seconds < 25 * 60
    smoke = plan.estimate(plan.order(grid.smoke(), False), IMPLEMENTATIONS, plan.SMOKE_BUDGET_S, 4250.0)
    assert smoke.iterations > 100 and smoke.seconds < 60


def test_an_estimate_is_the_sum_of_what_is_done():
    short, long = case(1, 1024), case(256, 32768)
    for each, call_us in ((short, 13.0), (long, 8096.0)):
        one = plan.implementation_seconds("evenkv-cuda", each, 100, 4250.0)
        more = plan.implementation_seconds("evenkv-cuda", each, 200, 4250.0) - one
        # 100 replays more are 100 calls with their flush, and nothing else.
        assert more == pytest.approx(100e-6 * (call_us + 72), rel=0.02)
    # Commands, captures and comparisons take the host's time in every case; a setting more takes its own.
    host = plan.implementation_seconds("evenkv-cuda", short, 0, 4250.0)
    assert 0.015 < host < plan.implementation_seconds("fa3", short, 0, 4250.0) < 2 * host
    # Beside the 100 replays of a long call, few others are made.
    others = plan.implementation_seconds("evenkv-cuda", long, 0, 4250.0) - host
    assert others < 0.1 * 100 * 8096e-6
    family = plan.total_seconds([short], IMPLEMENTATIONS, 100, 4250.0)
    assert family > plan.case_seconds(short, IMPLEMENTATIONS, 100, 4250.0)


def test_no_case_is_timed_less_than_100_times():
    assert {plan.iterations_for(c, wanted, 4250.0) for c in PROTOCOL for wanted in (100, 200)} == {100, 200}
