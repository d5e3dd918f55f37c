"""A run on the stand-in: resume, budget, missing peers, failures that must not stop it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_fixtures import COPY_GBPS, SOURCE, Clock, bench, case, outcome

from evenkv.bench import grid, plan
from evenkv.bench.judge import Provenance
from evenkv.bench.protocol import DeviceLost, Outcome
from evenkv.bench.record import IMPLEMENTATIONS, load_rows
from evenkv.bench.run import failures, settled_cases
from evenkv.bench.standin import StandIn
from evenkv.errors import EvenkvError

CASES = [case(), case(1, 1024), case(kv_dtype="float8_e4m3fn")]
TOO_LARGE = case(256, 131072)


def test_every_case_has_a_row_of_every_implementation(tmp_path):
    report = bench(tmp_path / "x.jsonl", [*CASES, TOO_LARGE])
    rows = load_rows(tmp_path / "x.jsonl")
    assert rows == report.rows
    assert {(r.the_case(), r.impl) for r in rows} == {
        (c, i) for c in [*CASES, TOO_LARGE] for i in IMPLEMENTATIONS
    }
    assert len(rows) == 24 and not report.left
    skipped = [r for r in rows if r.status == "skipped"]
    assert len(skipped) == 6 and all("137.4 GB" in r.reason for r in skipped)
    assert {r.status for r in rows if r.the_case() in CASES} == {"ok"}


def test_caches_are_made_once_a_family_and_freed_before_the_next(tmp_path):
    device = StandIn()
    bench(tmp_path / "x.jsonl", [CASES[2], CASES[0], TOO_LARGE, CASES[1]], device)
    kinds = [line.split()[0] for line in device.log]
    assert kinds == ["build", "begin", "measure", "measure", "end", "begin", "measure", "end"]
    assert device.log[0] == f"build 3 for {','.join(IMPLEMENTATIONS)}" and device.log[1].endswith(" 2")


def test_two_runs_give_the_same_rows_but_for_the_moment(tmp_path):
    bench(tmp_path / "a.jsonl", CASES)
    bench(tmp_path / "b.jsonl", CASES)
    first, second = ([replace_when(r) for r in load_rows(tmp_path / name)] for name in ("a.jsonl", "b.jsonl"))
    assert first == second


def replace_when(row):
    return row.model_copy(update={"when": "then"})


def test_missing_implementations_have_rows_that_say_why(tmp_path):
    device = StandIn(missing={"fa3": "pip install tokenspeed-fa3"})
    report = bench(tmp_path / "x.jsonl", CASES, device)
    assert device.log[0].startswith("build 3 for ") and "fa3" not in device.log[0]
    mine = [r for r in report.rows if r.impl == "fa3"]
    assert len(mine) == 3 and {(r.status, r.reason) for r in mine} == {
        ("refused", "missing: pip install tokenspeed-fa3")
    }
    assert report.missing == {"fa3": "pip install tokenspeed-fa3"}
    assert not any("fa3" in line for line in device.log)
    assert not failures(report.rows)


def test_resume_measures_only_what_is_left(tmp_path):
    path = tmp_path / "x.jsonl"
    bench(path, CASES[:1], StandIn(missing={"fa3": "not installed"}))
    device = StandIn()
    report = bench(path, CASES, device, resume=True)
    assert report.reused == 5
    assert "measure b32 L4096 h32/8 ps16 bf16 fa3" in device.log
    assert len(load_rows(path)) == 6 + 13
    again = bench(path, CASES, StandIn(), resume=True)
    assert again.reused == 18 and not again.rows


def test_resume_without_the_peer_does_not_repeat_that_it_is_missing(tmp_path):
    device = StandIn(missing={"fa3": "not installed"})
    bench(tmp_path / "x.jsonl", CASES, device)
    assert bench(tmp_path / "x.jsonl", CASES, device, resume=True).reused == 18


def test_resume_measures_other_sources_anew(tmp_path):
    bench(tmp_path / "x.jsonl", CASES)
    changed = Provenance({**SOURCE.hashes, "evenkv-cuda": "e" * 64}, None)
    report = bench(tmp_path / "x.jsonl", CASES, provenance=changed, resume=True)
    # evenkv-triton's sources are the same; peers belong to the run of evenkv-cuda's.
    assert report.reused == 3 and {r.impl for r in report.rows} == set(IMPLEMENTATIONS) - {"evenkv-triton"}


def test_without_resume_everything_is_measured_again(tmp_path):
    bench(tmp_path / "x.jsonl", CASES)
    assert bench(tmp_path / "x.jsonl", CASES).reused == 0
    assert len(load_rows(tmp_path / "x.jsonl")) == 36


def test_the_budget_stops_between_cases_and_resume_ends_the_work(tmp_path):
    path = tmp_path / "x.jsonl"
    cases = [case(1, 1024 * n) for n in range(1, 11)]
    report = bench(path, cases, minutes=1.0, clock=Clock(5.0))
    assert 0 < len(report.left) < 10
    done = {r.the_case() for r in load_rows(path)}
    assert done | set(report.left) == set(cases) and not done & set(report.left)
    assert all(sum(r.the_case() == c for r in load_rows(path)) == 6 for c in done)
    again = bench(path, cases, resume=True)
    assert not again.left and {r.the_case() for r in again.rows} == set(report.left)


def test_a_budget_that_is_too_small_begins_with_the_telling_cases(tmp_path):
    report = bench(tmp_path / "x.jsonl", grid.regimes(), minutes=0.3, clock=Clock(0.5))
    done = list(dict.fromkeys(r.the_case() for r in report.rows))
    telling = set(grid.smoke()) & set(grid.regimes())
    assert report.left and set(done[: len(telling)]) == telling


def test_no_time_at_all_measures_nothing(tmp_path):
    report = bench(tmp_path / "x.jsonl", CASES, minutes=0.0, clock=Clock(0.1))
    assert report.left and not report.rows


def test_an_interrupted_run_keeps_its_rows_and_frees_the_device(tmp_path):
    path = tmp_path / "x.jsonl"
    first, second = plan.order(CASES[:2], in_rounds=False)
    device = StandIn(outcomes={(second, "fa3"): KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        bench(path, CASES[:2], device)
    assert {r.the_case() for r in load_rows(path)} == {first}
    assert device.log[-1] == "end"
    assert bench(path, CASES[:2], resume=True).reused == 6


def test_a_lost_device_stops_the_run_with_exit_code_1(tmp_path):
    path = tmp_path / "x.jsonl"
    first, second = plan.order(CASES[:2], in_rounds=False)
    device = StandIn(outcomes={(second, "fa3"): DeviceLost("GPU 0 fell off the bus.")})
    with pytest.raises(DeviceLost) as caught:
        bench(path, CASES[:2], device)
    assert caught.value.exit_code == 1 and "--resume" in str(caught.value)
    assert {r.the_case() for r in load_rows(path)} == {first}
    assert device.log[-1] != "end"


def test_one_bad_outcome_stops_nothing(tmp_path):
    at_peak_us = CASES[0].kv_bytes() / 4.8e12 * 1e6
    device = StandIn(
        outcomes={
            (CASES[0], "fa3"): Outcome("refused", "no answer within 60 s: killed"),
            (CASES[0], "flashinfer-tc"): Outcome("wrong", "rel_err 0.9"),
            (CASES[0], "flashinfer-cc"): outcome(0.5 * at_peak_us),
            (CASES[0], "flashinfer-xqa"): Outcome("oom", "out of memory"),
            (CASES[1], "fa3"): RuntimeError("CUDA error: an illegal memory access\nmore"),
        }
    )
    report = bench(tmp_path / "x.jsonl", CASES, device)
    found = {(r.the_case(), r.impl): r for r in report.rows}
    assert len(found) == 18
    statuses = [found[CASES[0], impl].status for impl in IMPLEMENTATIONS]
    assert statuses == ["ok", "ok", "wrong", "wrong", "oom", "refused"]
    assert "cannot have read them" in found[CASES[0], "flashinfer-cc"].reason
    assert "illegal memory access" in found[CASES[1], "fa3"].reason
    assert {found[CASES[2], impl].status for impl in IMPLEMENTATIONS} == {"ok"}


def test_a_device_that_forgets_an_implementation_has_a_row_that_says_so(tmp_path):
    class Forgetful(StandIn):
        def measure(self, *arguments):
            answers = super().measure(*arguments)
            answers.pop("fa3")
            return answers

    report = bench(tmp_path / "x.jsonl", CASES[:1], Forgetful())
    assert [r.reason for r in report.rows if r.status != "ok"] == ["the device gave no answer"]


def test_a_family_that_cannot_begin_is_refused_and_the_next_goes_on(tmp_path):
    class Full(StandIn):
        def begin_family(self, cases):
            super().begin_family(cases)
            if cases[0].kv_dtype == "bfloat16":
                raise EvenkvError("no memory.")

    device = Full()
    report = bench(tmp_path / "x.jsonl", CASES, device)
    refused = [r for r in report.rows if r.status == "refused"]
    assert len(refused) == 12 and all("no memory" in r.reason for r in refused)
    assert [r.status for r in report.rows if r.the_case() == CASES[2]] == ["ok"] * 6
    assert device.log.count("end") == 1 and not report.left


def test_only_our_own_failures_fail_the_run(tmp_path):
    device = StandIn(
        outcomes={
            (CASES[0], "fa3"): Outcome("wrong", "x"),
            (CASES[0], "evenkv-triton"): Outcome("wrong", "y"),
            (CASES[1], "evenkv-cuda"): Outcome("oom", "small card"),
        }
    )
    report = bench(tmp_path / "x.jsonl", CASES, device)
    assert [(r.impl, r.reason) for r in failures(report.rows)] == [("evenkv-triton", "y")]


def test_shaky_times_are_measured_once_more(tmp_path):
    class Disturbed(StandIn):
        calls = 0

        def measure(self, the_case, names, iterations, warm):
            answers = super().measure(the_case, names, iterations, warm)
            self.calls += 1
            if self.calls == 1:
                answers["fa3"] = replace(answers["fa3"], spread=(100.0, 500.0))
            return answers

    device = Disturbed()
    report = bench(tmp_path / "x.jsonl", CASES[:1], device)
    assert device.log[3] == "measure b32 L4096 h32/8 ps16 bf16 fa3"
    assert len(report.rows) == 6 and not any(r.unstable for r in report.rows)


def test_times_that_stay_shaky_are_called_unstable(tmp_path):
    shaky = outcome(150.0, spread=(100.0, 300.0))
    report = bench(tmp_path / "x.jsonl", CASES[:1], StandIn(outcomes={(CASES[0], "fa3"): shaky}))
    assert [r.impl for r in report.rows if r.unstable] == ["fa3"]


def test_long_calls_are_not_measured_once_more(tmp_path):
    long = case(128, 65536)
    hot = outcome(9000.0, spread=(8990.0, 9010.0), sm_clock_mhz_before=1980.0, sm_clock_mhz_after=1500.0)
    device = StandIn(outcomes={(long, "fa3"): hot})
    report = bench(tmp_path / "x.jsonl", [long], device)
    assert sum(line.startswith("measure ") for line in device.log) == 1
    assert [r.impl for r in report.rows if r.unstable] == ["fa3"]


def test_a_failed_self_test_measures_nothing(tmp_path):
    device = StandIn(faults=["a 32 MB case reads above DRAM peak: not cold"])
    with pytest.raises(EvenkvError, match="not cold") as caught:
        bench(tmp_path / "x.jsonl", CASES, device)
    assert caught.value.exit_code == 1
    assert not device.log and not (tmp_path / "x.jsonl").exists()


def test_unknown_implementations_are_named(tmp_path):
    with pytest.raises(EvenkvError, match="unknown fa4; wanted some of evenkv-cuda"):
        bench(tmp_path / "x.jsonl", CASES, implementations=["fa3", "fa4"])


def test_out_of_memory_is_a_row(tmp_path):
    report = bench(tmp_path / "x.jsonl", [case(128, 131072), case(1, 1024)], StandIn(memory_bytes=60 * 10**9))
    assert [r.status for r in report.rows].count("oom") == 6
    assert [r.status for r in report.rows].count("ok") == 6


def test_what_is_planned_is_announced_before_it_is_measured(tmp_path):
    device, heard = StandIn(), []
    bench(tmp_path / "x.jsonl", CASES, device, announce=lambda r: heard.append((r.estimate, len(device.log))))
    ((estimate, before),) = heard
    assert before == 0 and estimate.iterations == 300
    assert estimate.seconds == plan.total_seconds(plan.order(CASES, False), IMPLEMENTATIONS, 300, COPY_GBPS)


def test_progress_ends_near_the_whole(tmp_path):
    shares = []
    bench(tmp_path / "x.jsonl", CASES, progress=lambda what, share: shares.append(share))
    assert shares == sorted(shares) and shares[0] >= 0 and 0.5 < shares[-1] <= 1


def test_settled_cases_are_those_with_all_rows(tmp_path):
    report = bench(tmp_path / "x.jsonl", CASES, StandIn(missing={"fa3": "not here"}))
    assert settled_cases(report.rows, ["evenkv-cuda", "flashinfer-tc"], SOURCE) == set(CASES)
    assert settled_cases(report.rows, IMPLEMENTATIONS, SOURCE) == set()
