"""Shares, means, worst cases, the table of regimes, and how a second run agrees."""

from __future__ import annotations

import pytest
from bench_fixtures import COPY_GBPS, H200, SOURCE, bench, case, row

from evenkv.bench import grid, tables
from evenkv.bench.judge import Judge
from evenkv.bench.protocol import DeviceFacts, Outcome
from evenkv.bench.record import by_case
from evenkv.bench.regimes import regime_table
from evenkv.bench.summary import (
    compare,
    geometric_mean,
    groups_of,
    reproduction,
    summarise,
    worst_against_copy,
    worst_against_peer,
)

BIG, SMALL, FP8 = case(), case(1, 1024), case(kv_dtype="float8_e4m3fn")
JUDGE = Judge(H200, COPY_GBPS, SOURCE)


def at_pct(the_case, pct):
    return the_case.kv_bytes() / COPY_GBPS * 1e-3 * 100 / pct


def test_shares_and_means():
    rows = [
        row(BIG, "evenkv-cuda", at_pct(BIG, 100), matched_copy_us=at_pct(BIG, 99)),
        row(SMALL, "evenkv-cuda", at_pct(SMALL, 25), matched_copy_us=at_pct(SMALL, 50)),
        JUDGE.row(FP8, "evenkv-cuda", Outcome("wrong", "rel_err 0.5")),
        JUDGE.row(case(256, 131072), "evenkv-cuda", Outcome("skipped", "large")),
        row(BIG, "fa3", at_pct(BIG, 50), peer_version="3.0"),
        row(BIG, "flashinfer-tc", at_pct(BIG, 80)),
        row(SMALL, "fa3", at_pct(SMALL, 50), peer_version="3.0"),
        row(BIG, "evenkv-triton", at_pct(BIG, 101)),
    ]
    lines = {line.impl: line for line in summarise(by_case(rows))}
    ours = lines["evenkv-cuda"]
    assert (ours.asked, ours.counts) == (3, {"ok": 2, "wrong": 1, "skipped": 1})
    assert ours.share_copy_peak == pytest.approx(1 / 3)
    assert ours.share_matched_copy == pytest.approx(1 / 3)
    # 1.25x against tc, 0.5x against fa3; evenkv-triton is no peer.
    assert ours.share_fastest == 0.5 and ours.mean_vs_peer == pytest.approx((1.25 * 0.5) ** 0.5)
    assert ours.mean_copy_peak == pytest.approx(50.0)
    assert lines["fa3"].mean_vs_peer == pytest.approx(50 / 80) and lines["fa3"].peer_versions == ("3.0",)
    assert list(lines)[:2] == ["evenkv-cuda", "evenkv-triton"]


def test_unstable_times_count_for_nothing():
    shaky = row(BIG, "fa3", at_pct(BIG, 99), spread=(50.0, 500.0))
    rows = [row(BIG, "evenkv-cuda", at_pct(BIG, 90.5)), shaky]
    lines = {line.impl: line for line in summarise(by_case(rows))}
    assert lines["fa3"].unstable == 1 and lines["fa3"].share_copy_peak == 0.0
    assert lines["fa3"].mean_copy_peak is None and lines["evenkv-cuda"].mean_vs_peer is None


def test_an_unstable_time_of_ours_beats_nobody():
    rows = [
        row(BIG, "evenkv-cuda", at_pct(BIG, 99), spread=(50.0, 500.0)),
        row(BIG, "fa3", at_pct(BIG, 80)),
        row(SMALL, "evenkv-cuda", at_pct(SMALL, 50)),
        row(SMALL, "fa3", at_pct(SMALL, 25)),
        row(FP8, "evenkv-cuda", at_pct(FP8, 50)),
    ]
    ours = {line.impl: line for line in summarise(by_case(rows))}["evenkv-cuda"]
    assert ours.share_fastest == 0.5 and ours.mean_vs_peer == pytest.approx(2.0)


def test_geometries_say_how_many_times_they_are_means_of():
    rows = [
        *(row(case(batch), "evenkv-cuda", at_pct(case(batch), 100)) for batch in (32, 64)),
        row(case(64), "fa3", at_pct(case(64), 80)),
        row(case(128), "evenkv-cuda", at_pct(case(128), 50), spread=(1.0, 5000.0)),
    ]
    (line,) = tables.geometries_table(by_case(rows)).rows
    assert line[2:] == ("2", "100.0", "80.0 (1)")


def test_times_of_two_timers_or_gpus_are_not_compared():
    h100 = DeviceFacts("NVIDIA H100 80GB HBM3", None, None, None)
    rows = [
        row(BIG, "evenkv-cuda", 140.0),
        row(BIG, "fa3", 150.0, timer="events"),
        row(BIG, "flashinfer-tc", 300.0, h100),
        JUDGE.row(BIG, "flashinfer-cc", Outcome("refused", "no")),
    ]
    groups = groups_of(rows)
    assert [(g.gpu, g.timer) for g in groups] == [
        ("NVIDIA H100 80GB HBM3", "cupti"),
        ("NVIDIA H200", "cupti"),
        ("NVIDIA H200", "events"),
    ]
    assert set(groups[1].cases[BIG]) == {"evenkv-cuda", "flashinfer-cc"}
    assert compare(groups[1].cases, "evenkv-cuda")[0].ratio is None


def test_the_ten_worst_are_the_ten_worst():
    cases = [case(1, 1024 * n) for n in range(1, 15)]
    rows = []
    for n, each in enumerate(cases, 1):
        rows += [row(each, "evenkv-cuda", 100.0 + n, matched_copy_us=50.0 + 3 * n), row(each, "fa3", 200.0)]
    by = by_case(rows)
    assert [c.case for c in worst_against_peer(by, "evenkv-cuda")] == cases[:3:-1]
    assert [c.case for c in worst_against_copy(by, "evenkv-cuda")] == cases[:10]


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([None, 3.0]) == pytest.approx(3.0)
    assert geometric_mean([]) is None


def test_a_second_run_is_held_against_the_first():
    old = [
        row(BIG, "evenkv-cuda", 150.0),
        row(SMALL, "evenkv-cuda", 20.0),
        row(BIG, "fa3", 150.0, timer="events"),
    ]
    new = [row(BIG, "evenkv-cuda", 153.0), row(SMALL, "evenkv-cuda", 18.0), row(BIG, "fa3", 151.0)]
    found = reproduction(old, new)
    assert found.changes == pytest.approx(
        {(BIG.name, "evenkv-cuda"): 0.02, (SMALL.name, "evenkv-cuda"): -0.1}
    )
    assert found.within == 1 and found.worst == (SMALL.name, "evenkv-cuda")
    changed = [r.model_copy(update={"source_hash": "0" * 64}) for r in old]
    assert reproduction(changed, new).changes == {} and reproduction([], new).worst is None


def line_of(table, name):
    return next(line for line in table if line.name == name)


def test_regimes_are_judged_by_their_worst_case():
    fast, slow = case(256, 8192), case(128, 2048, num_kv_heads=32)
    rows = [row(fast, "evenkv-cuda", at_pct(fast, 109)), row(slow, "evenkv-cuda", at_pct(slow, 103))]
    line = line_of(regime_table(by_case(rows)), "bf16, KV of 2 GiB and more")
    assert line.worst == pytest.approx(103) and line.worst_case == slow.name
    assert line.verdict == "missed in 1 of 2"
    assert line_of(regime_table(by_case(rows[:1])), line.name).verdict == "aim reached"
    assert line_of(regime_table(by_case(rows)), "fp8, 2 GiB and more").verdict == "not measured"


@pytest.mark.parametrize(("mib", "name"), [(128, "128 to 512 MiB"), (512, "512 MiB to 2 GiB"), (64, None)])
def test_sizes_belong_to_their_regime(mib, name):
    each = case(1, mib * 256)
    assert each.kv_bytes() == mib * 2**20
    measured = {
        line.name
        for line in regime_table(by_case([row(each, "evenkv-cuda", at_pct(each, 95))]))
        if line.cases
    }
    assert {n for n in measured if "MiB" in n} == ({f"bf16, {name}"} if name else set())


def test_skew_is_held_against_the_uniform_batch_of_the_same_bytes():
    skewed = case(64, None, grid.ONE_LONG)
    partner = grid.uniform_partner(skewed)
    rows = [row(skewed, "evenkv-cuda", 206.0), row(partner, "evenkv-cuda", 200.0)]
    name = "skewed against uniform of the same bytes"
    line = line_of(regime_table(by_case(rows)), name)
    assert line.worst == pytest.approx(1.03) and line.cases == 1
    assert line_of(regime_table(by_case(rows[:1])), name).verdict == "not measured"


def test_small_cases_speed_up_host_time_and_error_have_lines():
    rows = [
        row(SMALL, "evenkv-cuda", 7.0, host_us=12.0, max_abs_err=3e-4),
        row(SMALL, "flashinfer-tc", 8.4, max_abs_err=2e-4),
    ]
    table = regime_table(by_case(rows))
    assert line_of(table, SMALL.name).verdict == "met"
    assert line_of(table, "every case against the best peer").worst == pytest.approx(1.2)
    assert line_of(table, "host time of a call").verdict == "missed in 1 of 1"
    assert line_of(table, "max abs error / that of flashinfer-tc").worst == pytest.approx(1.5)


def test_tables_of_a_whole_run(tmp_path):
    report = bench(tmp_path / "x.jsonl", [*grid.smoke(), case(256, 131072)])
    (group,) = groups_of(report.rows)
    titles = {cells.title: cells for cells in tables.all_tables(group.cases)}
    assert len(titles["Implementations"].rows) == 6
    assert len(titles["evenkv-cuda: the ten worst against the best peer"].rows) == 10
    assert ("all", "skipped", "cache over 80 GB", "1", case(256, 131072).name) in titles[
        "Without a time"
    ].rows
    for cells in titles.values():
        assert all(len(line) == len(cells.columns) for line in cells.rows)
        assert tables.rich_table(cells).row_count == len(cells.rows)
        text = tables.markdown_table(cells)
        assert text.startswith(f"### {cells.title}\n") and text.count("\n| ") >= len(cells.rows) + 1


def test_alike_reasons_fall_together():
    rows = [
        JUDGE.row(BIG, "fa3", Outcome("refused", "no answer within 60.5 s")),
        JUDGE.row(SMALL, "fa3", Outcome("refused", "no answer within 7 s")),
        row(FP8, "fa3", 200.0, spread=(10.0, 400.0)),
    ]
    found = tables.trouble_table(by_case(rows)).rows
    assert ("fa3", "refused", "no answer within # s", "2", BIG.name) in found
    assert len(found) == 2 and found[1][1] == "unstable"


def test_a_share_is_never_rounded_up_to_all():
    cases = [case(1, 1024 + n) for n in range(2000)]
    rows = [row(each, "evenkv-cuda", at_pct(each, 95 if n else 10)) for n, each in enumerate(cases)]
    line = tables.implementations_table(by_case(rows)).rows[0]
    assert line[2] == "99.9 %"
