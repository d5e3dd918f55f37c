"""The machine's log: what runs append to it, what the page and the plot of times take from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_fixtures import SOURCE, case

from evenkv.bench import machine_log
from evenkv.bench.machine_log import CaseEntry, RunEntry, describe, launch_floor_us, load_log, log_path
from evenkv.bench.record import TornLineWarning
from evenkv.bench.run import run_bench
from evenkv.bench.standin import StandIn
from evenkv.errors import EvenkvError

FIRST, SECOND = case(1, 1024), case(8, 1024)


class Warm(StandIn):
    """A stand-in that gets warmer, with a peer that plans."""

    def measure(self, the_case, names, iterations, warm):
        answers = super().measure(the_case, names, iterations, warm)
        answers["flashinfer-tc"] = replace(
            answers["flashinfer-tc"],
            plan_us=30.0 if the_case == FIRST else 40.0,
            temperature_c=(40.0, 44.0),
            setting="default",
        )
        answers["fa3"] = replace(
            answers["fa3"],
            temperature_c=(43.0, 61.0),
            setting="16 splits",
            throttle_reasons=("power brake",) if the_case == SECOND else (),
        )
        return answers


def run(path: Path, device: StandIn) -> None:
    run_bench(device, [FIRST, SECOND], tuple(device.implementations()), path, provenance=SOURCE, resume=True)


def test_a_run_appends_what_it_saw(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    run(path, Warm())
    begin, first, second = load_log(path)
    assert (
        isinstance(begin, RunEntry) and begin.gpu == "standin" and begin.launch_floor_us and begin.read_gbps
    )
    assert isinstance(first, CaseEntry) and first.case == FIRST.name
    assert first.temperature_c == (40.0, 61.0) and first.throttle_reasons == ()
    assert first.plan_us == {"flashinfer-tc": 30.0} and first.settings == {"fa3": "16 splits"}
    assert isinstance(second, CaseEntry) and second.throttle_reasons == ("power brake",)
    run(path, Warm())
    assert len(load_log(path)) == 3, "nothing was left to do, so nothing was seen"


def test_the_page_and_the_plot_tell_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    run(path, Warm())
    entries = load_log(path)
    said = describe(entries)
    assert said is not None and "40 to 61 degrees Celsius" in said
    assert "a plain reduction reads at 4250 GB/s" in said
    assert "throttled: power brake in 1 cases" in said
    assert "flashinfer-tc plans for 35 us on the host (median of 2)" in said
    assert launch_floor_us(entries) == StandIn().launch_floor_us()
    assert describe([]) is None and launch_floor_us([]) is None


def test_nothing_seen_is_nothing_said(tmp_path: Path) -> None:
    run(tmp_path / "x.jsonl", StandIn())
    assert [type(entry) for entry in load_log(tmp_path / "x.jsonl")] == [RunEntry]


def test_cut_lines_are_left_out_and_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    run(path, Warm())
    log = log_path(path)
    assert log.name == "x.machine.log"
    whole = log.read_text()
    log.write_text(whole + '{"kind":"case","wh')
    assert len(load_log(path)) == 3
    with pytest.warns(TornLineWarning, match="removed"):
        machine_log.log_run(path, "standin", 4000.0, None, None)
    assert len(load_log(path)) == 4, "the cut line is gone"
    log.write_text(whole + '{"kind":"case"}\n')
    with pytest.raises(EvenkvError, match=r"x\.machine\.log, line 4"):
        load_log(path)
