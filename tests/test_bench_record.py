"""Rows: the schema, appending, torn lines, files of another schema."""

from __future__ import annotations

import json
import multiprocessing

import pytest
from bench_fixtures import H200, SOURCE, case, outcome, row
from pydantic import ValidationError

from evenkv.bench.judge import Judge
from evenkv.bench.protocol import Outcome
from evenkv.bench.record import Row, append_rows, by_case, gpu_file_name, latest, load_rows
from evenkv.errors import EvenkvError

# design.md, section 6, by name.
FIELDS = [
    "case",
    "impl",
    "status",
    "reason",
    "kv_bytes",
    "graph_us",
    "eager_us",
    "host_us",
    "iterations",
    "spread",
    "copy_peak_gbps",
    "matched_copy_us",
    "pct_copy_peak",
    "pct_matched_copy",
    "max_abs_err",
    "rel_err",
    "timer",
    "gpu",
    "sm_clock_mhz",
    "driver",
    "cuda",
    "torch",
    "peer_version",
    "source_hash",
    "commit",
    "when",
]


def test_the_fields_are_those_of_the_format():
    written = json.loads(row(case(), "evenkv-cuda", 130.0).model_dump_json())
    assert list(written) == FIELDS
    assert written["case"] == case().to_json()
    assert written["source_hash"] == "c" * 64 and written["commit"] == "f" * 40


def test_percentages_are_of_graph_time():
    made = row(case(), "fa3", 252.644)
    assert made.pct_copy_peak == pytest.approx(50.0, abs=0.01)
    assert made.pct_matched_copy == pytest.approx(100 * 130 / 252.644, abs=1e-3)
    assert made.sm_clock_mhz == (1980.0, 1980.0)


@pytest.mark.parametrize("name", ["graph_us", "host_us", "spread", "max_abs_err", "timer", "pct_copy_peak"])
def test_ok_wants_every_number(name):
    values = row(case(), "fa3", 150.0).model_dump()
    with pytest.raises(ValidationError, match=name):
        Row(**{**values, name: None})


def test_under_100_iterations_is_no_result():
    with pytest.raises(ValidationError, match="iterations"):
        Row(**{**row(case(), "fa3", 150.0).model_dump(), "iterations": 99})


def test_others_want_a_reason_and_have_no_times():
    made = Judge(H200, 4250.0, SOURCE).row(case(), "fa3", Outcome("oom", "70 GB of 60 GB"))
    assert made.status == "oom" and made.graph_us is None and made.pct_copy_peak is None
    with pytest.raises(ValidationError, match="reason"):
        Row(**{**made.model_dump(), "reason": None})


def test_append_and_load(tmp_path):
    path = tmp_path / "results" / "x.jsonl"
    rows = [row(case(), "evenkv-cuda", 130.0), row(case(1, 1024), "fa3", 12.0)]
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert load_rows(path) == rows
    assert load_rows(tmp_path / "gone.jsonl") == []


@pytest.mark.parametrize("torn_bytes", [1, 400, 100_000])
def test_a_torn_last_line_is_dropped_with_a_warning(tmp_path, torn_bytes):
    path = tmp_path / "x.jsonl"
    first, second = row(case(), "evenkv-cuda", 130.0), row(case(), "fa3", 140.0)
    append_rows(path, [first])
    torn = (second.model_dump_json() + "x" * torn_bytes)[:torn_bytes]
    with path.open("a") as file:
        file.write(torn)
    with pytest.warns(UserWarning, match="last line is cut off"):
        assert load_rows(path) == [first]
    with pytest.warns(UserWarning, match="removed"):
        append_rows(path, [second])
    assert load_rows(path) == [first, second]


def test_a_file_that_is_one_torn_line_starts_anew(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"case": {"ba')
    with pytest.warns(UserWarning, match="removed"):
        append_rows(path, [row(case(), "fa3", 140.0)])
    assert len(load_rows(path)) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"model": "llama", "tokens_per_s": 3}', "line 2: not a row of this schema"),
        ("not json", "line 2: not JSON"),
        ("version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_another_schema_is_named_by_line(tmp_path, line, named):
    path = tmp_path / "x.jsonl"
    append_rows(path, [row(case(), "fa3", 140.0)])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(EvenkvError, match=named):
        load_rows(path)


def test_what_cannot_be_read_or_written_is_an_error_of_ours(tmp_path):
    for act in (load_rows, lambda path: append_rows(path, [row(case(), "fa3", 140.0)])):
        with pytest.raises(EvenkvError, match="Is a directory"):
            act(tmp_path)


def test_the_last_row_counts():
    old, new, other = row(case(), "fa3", 150.0), row(case(), "fa3", 140.0), row(case(), "evenkv-cuda", 130.0)
    assert latest([old, other, new]) == [new, other]
    assert by_case([old, other, new]) == {case(): {"fa3": new, "evenkv-cuda": other}}


def test_file_names():
    assert gpu_file_name("NVIDIA H200") == "nvidia-h200"
    assert gpu_file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def _append_many(path, impl):
    for context in range(1, 41):
        append_rows(path, [row(case(1, context), impl, 12.0)])


def test_several_processes_append_whole_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, impl)) for impl in ("fa3", "evenkv-cuda")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(latest(load_rows(path))) == 80


def test_impossible_times_are_failures_and_no_records():
    judge = Judge(H200, 4250.0, SOURCE)
    at_peak_us = case().kv_bytes() / 4.8e12 * 1e6
    made = judge.row(case(), "fa3", outcome(0.99 * at_peak_us))
    assert made.status == "wrong" and "below" in made.reason and made.graph_us is None
    made = judge.row(case(), "fa3", outcome(1.2 * at_peak_us, eager_us=0.5 * at_peak_us))
    assert made.status == "wrong" and "eager" in made.reason
    assert judge.row(case(), "fa3", outcome(1.01 * at_peak_us)).status == "ok"


def test_warm_times_of_small_cases_may_pass_memory_and_of_large_ones_may_not():
    judge = Judge(H200, 4250.0, SOURCE, warm=True)
    assert judge.row(case(1, 8192), "fa3", outcome(5.0)).status == "ok"
    assert judge.row(case(), "fa3", outcome(50.0)).status == "wrong"


@pytest.mark.parametrize(
    "change",
    [{"graph_us": 0.0}, {"graph_us": float("nan")}, {"rel_err": float("inf")}, {"host_us": -1.0}],
)
def test_numbers_that_are_none_are_failures(change):
    made = Judge(H200, 4250.0, SOURCE).row(case(), "fa3", outcome(**{"graph_us": 150.0, **change}))
    assert made.status == "wrong" and next(iter(change)) in made.reason
    assert Row.model_validate_json(made.model_dump_json()) == made


def test_an_incomplete_answer_is_no_result():
    made = Judge(H200, 4250.0, SOURCE).row(case(), "fa3", outcome(150.0, iterations=30))
    assert made.status == "refused" and "100 or more, got 30" in made.reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spread": (100.0, 160.0)}, "p10 100.0 us, p90 160.0 us"),
        ({"sm_clock_mhz_after": 1200.0}, "fell from 1980 to 1200 MHz"),
        ({"sm_clock_mhz_after": 1200.0, "moved": 1.05}, "fell from 1980 to 1200 MHz"),
        ({"reason": "throttled: power cap"}, "power cap"),
    ],
)
def test_shaky_numbers_say_so(change, said):
    made = Judge(H200, 4250.0, SOURCE).row(case(), "fa3", outcome(150.0, **change))
    assert made.status == "ok" and made.unstable and said in made.reason


def test_a_clock_that_falls_without_the_times_is_steady():
    made = Judge(H200, 4250.0, SOURCE).row(
        case(), "fa3", outcome(150.0, sm_clock_mhz_after=1200.0, moved=1.01)
    )
    assert made.reason is None and not made.unstable


def test_a_clock_that_rises_and_a_scatter_of_two_us_are_steady():
    made = Judge(H200, 4250.0, SOURCE).row(
        case(1, 1024), "fa3", outcome(8.0, spread=(7.5, 9.4), sm_clock_mhz_before=345.0)
    )
    assert made.reason is None
