"""The Ray path on CPU tasks with the stand-in: merging, lost nodes, other sources, the deadline."""

from __future__ import annotations

import time

import pytest
from bench_fixtures import SOURCE, case

pytest.importorskip("ray")

from evenkv.bench import grid, plan, ray_pool  # noqa: E402
from evenkv.bench.judge import provenance  # noqa: E402
from evenkv.bench.machine_log import RunEntry, load_log  # noqa: E402
from evenkv.bench.record import IMPLEMENTATIONS, load_rows  # noqa: E402
from evenkv.paths import find_repository  # noqa: E402

CASES = plan.order([case(1, 1024), case(8, 1024), case(1, 1024, page_size=64)], in_rounds=False)


def job(source):
    return ray_pool.Job("standin", IMPLEMENTATIONS, 100, False, source)


@pytest.fixture(scope="module")
def cluster():
    """One Ray for the module: each start takes seconds."""
    real = ray_pool._connect("local", 1)
    shutdown, connect = real.shutdown, ray_pool._connect
    real.shutdown = lambda: None
    ray_pool._connect = lambda address, workers: real
    yield
    ray_pool._connect, real.shutdown = connect, shutdown
    shutdown()


def test_groups_run_on_the_cluster_and_rows_are_merged(cluster, tmp_path):
    asked = []

    def path_of(gpu):
        asked.append(gpu)
        return tmp_path / f"{gpu}.jsonl"

    source = provenance(find_repository(), "f" * 40)
    cases = [*CASES, case(256, 131072)]
    report = ray_pool.run_on_ray("local", job(source), cases, path_of, workers=1)
    assert report.lost == []
    rows = load_rows(tmp_path / "standin.jsonl")
    assert set(asked) == {"standin"} and not report.left
    assert {(r.the_case(), r.impl) for r in rows} == {(c, i) for c in cases for i in IMPLEMENTATIONS}
    assert sum(r.status == "skipped" for r in rows) == 6
    assert {r.commit for r in rows} == {"f" * 40}
    log = load_log(tmp_path / "standin.jsonl")
    assert log and all(isinstance(entry, RunEntry) and entry.gpu == "standin" for entry in log)


def test_a_node_with_other_sources_refuses(cluster, tmp_path):
    report = ray_pool.run_on_ray("local", job(SOURCE), CASES[:1], lambda gpu: tmp_path / "x.jsonl", workers=1)
    assert report.given_up and report.left == CASES[:1] and not report.rows
    assert len(report.lost) == ray_pool.ATTEMPTS
    assert all("kernel sources differ" in why for why in report.lost)
    assert not (tmp_path / "x.jsonl").exists()


def test_the_groups_of_a_lost_node_run_again(cluster, tmp_path):
    """The worker process dies under its first task, as it does when its node goes."""
    flag = str(tmp_path / "died")

    def dies_once(the_job, cases):
        import os
        from pathlib import Path

        from evenkv.bench.case import Case
        from evenkv.bench.run import run_bench
        from evenkv.bench.standin import StandIn

        if not os.path.exists(flag):
            Path(flag).touch()
            os._exit(1)
        chosen = [Case.from_json(each) for each in cases]
        path = Path(f"{flag}-{os.getpid()}-{len(cases)}.jsonl")
        made = run_bench(StandIn(), chosen, the_job.implementations, path, provenance=the_job.provenance)
        return ray_pool.Measured([each.model_dump(mode="json") for each in made.rows], [])

    report = ray_pool.run_on_ray(
        "local", job(SOURCE), CASES, lambda gpu: tmp_path / "x.jsonl", measure=dies_once, workers=1
    )
    assert len(report.lost) == 1 and not report.given_up and not report.left
    rows = load_rows(tmp_path / "x.jsonl")
    assert len(rows) == 18 and {r.the_case() for r in rows} == set(CASES)


def test_after_the_deadline_no_task_starts(cluster, tmp_path):
    report = ray_pool.run_on_ray(
        "local",
        job(SOURCE),
        CASES,
        lambda gpu: tmp_path / "x.jsonl",
        deadline=time.monotonic() - 1,
        workers=1,
    )
    assert report.left == CASES and not report.given_up and not report.lost


def test_groups_are_long_enough_to_be_worth_a_task():
    ordered = plan.order(grid.protocol(), in_rounds=False)

    def cost(each):
        return plan.case_seconds(each, IMPLEMENTATIONS, 100, plan.DEFAULT_COPY_GBPS)

    groups = plan.groups(ordered, cost, ray_pool.GROUP_S)
    assert 16 < len(groups) < 80
