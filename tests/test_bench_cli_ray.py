"""`evenkv bench --ray` on real clusters of CPU nodes, with the stand-in; and addresses where none is."""

from __future__ import annotations

import json
import socket
import time

import pytest
from bench_fixtures import SOURCE, case
from typer.testing import CliRunner

pytest.importorskip("ray")

from evenkv.bench import grid, judge, ray_pool  # noqa: E402
from evenkv.bench.record import IMPLEMENTATIONS, load_rows  # noqa: E402
from evenkv.cli.main import app  # noqa: E402
from evenkv.errors import EvenkvError  # noqa: E402

SMALL = [case(1, 1024), case(1, 1024, page_size=64), case(8, 1024, kv_dtype="float8_e4m3fn")]


def bench(path, *words):
    words = ("bench", "--device", "standin", "--out", path, *words)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def address():
    """A cluster of two nodes, a CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def test_a_run_on_a_cluster_and_its_resumption(address, tmp_path):
    path, cases = tmp_path / "rows.jsonl", tmp_path / "cases.json"
    cases.write_text(json.dumps([each.to_json() for each in SMALL[:2]]))
    answer = bench(path, "--ray", address, "--cases", cases)
    assert answer.exit_code == 0, answer.output
    assert f"2 cases, 6 implementations on Ray at {address}" in answer.stderr
    rows = load_rows(path)
    assert {(r.the_case(), r.impl) for r in rows} == {(c, i) for c in SMALL[:2] for i in IMPLEMENTATIONS}
    assert len(rows) == 12 and {r.gpu for r in rows} == {"standin"}
    cases.write_text(json.dumps([each.to_json() for each in SMALL]))
    answer = bench(path, "--ray", address, "--cases", cases, "--resume", "--json")
    assert answer.exit_code == 0, answer.output
    assert "1 of 3 cases (2 are there)" in answer.stderr
    assert json.loads(answer.stdout)["reused"] == 2 and len(load_rows(path)) == 18


def test_what_ray_gives_up_exits_1(address, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "provenance", lambda repository, commit=None: SOURCE)
    answer = bench(tmp_path / "rows.jsonl", "--ray", address, "--only", "h5/1 ps1 ")
    assert answer.exit_code == 1
    assert "This node's kernel sources differ" in answer.stderr
    assert "left: the same command with --resume goes on" in answer.stdout
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_lost_group_runs_again_on_another_node(address, tmp_path):
    log = str(tmp_path / "nodes")

    def measure(job, cases):
        import os
        from pathlib import Path

        import ray

        from evenkv.bench.case import Case
        from evenkv.bench.run import run_bench
        from evenkv.bench.standin import StandIn

        node = ray.get_runtime_context().get_node_id()
        with open(log, "a") as file:
            file.write(f"{node}\n")
        if len(Path(log).read_text().splitlines()) < 2:
            os._exit(1)
        path = Path(f"{log}-{os.getpid()}.jsonl")
        chosen = [Case.from_json(each) for each in cases]
        made = run_bench(StandIn(), chosen, job.implementations, path, provenance=job.provenance)
        return ray_pool.Measured([row.model_dump(mode="json") for row in made.rows], [])

    job = ray_pool.Job("standin", IMPLEMENTATIONS, 100, False, SOURCE)
    path = tmp_path / "x.jsonl"
    report = ray_pool.run_on_ray(address, job, SMALL[:1], lambda gpu: path, measure=measure)
    assert len(report.lost) == 1 and not report.given_up and len(load_rows(path)) == 6
    first, second = (tmp_path / "nodes").read_text().split()
    assert first != second


def test_the_next_node_is_another_one_and_a_sick_one_gets_no_more():
    nodes = ray_pool.Nodes()
    nodes.update({"a": 1, "b": 1, "without": 0})
    assert nodes.choose(set()) == "a" and nodes.choose({"a"}) == "b"
    assert nodes.choose(set()) is None, "both are at work"
    nodes.release("a", lost=True)
    assert nodes.choose({"a"}) is None, "it waits for the other"
    for _ in range(2):
        assert nodes.choose(set()) == "a"
        nodes.release("a", lost=True)
    assert nodes.choose(set()) is None, "three groups lost: it gets none while the other lives"
    nodes.release("b", lost=False)
    assert nodes.choose({"b"}) == "a", "a group that the other lost has no better one"
    nodes.release("a", lost=True)
    nodes.update({"a": 1})
    assert nodes.choose({"a"}) == "a", "nor has anyone when the other is gone"
    nodes.release("a", lost=False)
    nodes.update({"a": 1, "b": 1})
    assert nodes.choose({"b"}) == "a", "one success, and it is well again"


def test_an_address_that_nobody_listens_at_is_told_at_once(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            started = time.monotonic()
            answer = bench(tmp_path / "x.jsonl", "--ray", address)
            assert time.monotonic() - started < 15
            assert answer.exit_code == 2 and "Traceback" not in answer.output
            assert f"--ray {address}: no cluster answers: " in answer.stderr


def test_what_listens_there_and_is_not_ray_is_told_in_time(monkeypatch):
    monkeypatch.setattr(ray_pool, "_HELLO_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EvenkvError, match="does not speak Ray within 3 s") as caught:
            ray_pool._connect(address, None)
    assert caught.value.exit_code == 2


def test_no_cluster_of_this_node_ends_with_one_full_stop(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(ray_pool, "_HELLO", "raise ConnectionError('Could not find any. Set a variable.')")
    with pytest.raises(EvenkvError, match=r"variable\. Start one with `ray start --head`\.") as caught:
        ray_pool._connect("auto", None)
    assert ".." not in str(caught.value)


@pytest.mark.parametrize("address", ["", "head", "head:x", "http://head:1", "head:99999999"])
def test_what_is_no_address_is_told_what_one_looks_like(tmp_path, address):
    answer = bench(tmp_path / "x.jsonl", "--ray", address)
    assert answer.exit_code == 2 and 'wanted "auto", "local", host:port' in answer.stderr


def test_local_is_a_ray_of_its_own_with_a_cpu_for_each_gpu(monkeypatch):
    import ray

    asked = {}
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray_pool, "visible_gpus", lambda: ["0", "1", "2"])
    ray_pool._connect("local", None)
    assert asked["address"] == "local" and asked["num_cpus"] == 3


def test_a_cluster_without_nodes_that_measure_is_given_up(monkeypatch, tmp_path):
    class Empty:
        exceptions = None

        @staticmethod
        def nodes():
            return []

    monkeypatch.setattr(ray_pool, "_NOBODY_S", 0.0)
    monkeypatch.setattr(ray_pool, "_WAIT_S", 0.01)
    job = ray_pool.Job("cuda", IMPLEMENTATIONS, 100, False, SOURCE)
    pool = ray_pool._Pool(Empty, None, "GPU", job, lambda gpu: tmp_path, None, lambda what, share: None, None)
    report = pool.run(grid.smoke())
    assert report.given_up and len(report.left) == 12 and "no node with a GPU" in report.lost[0]
