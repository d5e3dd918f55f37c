"""Processes that obey commands: answers, failures, deadlines, restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evenkv.bench.device.worker import Worker, WorkerFault

FACTORY = "bench_device_handlers:Handler"


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("peer", FACTORY, {"greeting": "hi"}, deadline_s=20.0)
    yield made
    made.end()


def test_keeps_its_state_between_commands(worker: Worker) -> None:
    assert worker.call("greet", name="a") == "hi a 1"
    assert worker.call("greet", name="b") == "hi b 2"
    assert worker.generation == 1


def test_a_failed_command_leaves_the_process_as_it_is(worker: Worker) -> None:
    worker.call("greet", name="a")
    with pytest.raises(WorkerFault) as refused:
        worker.call("refuse")
    assert (refused.value.status, refused.value.gone) == ("refused", False)
    assert refused.value.reason == "ValueError: page_size 3 is not for me"
    with pytest.raises(WorkerFault) as full:
        worker.call("run_out")
    assert (full.value.status, full.value.gone) == ("oom", False)
    assert worker.call("greet", name="b") == "hi b 2"


@pytest.mark.parametrize(("command", "reason"), [("crash", "SIGSEGV"), ("poison", "illegal memory access")])
def test_a_dead_or_poisoned_process_is_replaced(worker: Worker, command: str, reason: str) -> None:
    worker.call("greet", name="a")
    with pytest.raises(WorkerFault, match=reason) as fault:
        worker.call(command)
    assert fault.value.gone and not worker.alive
    assert worker.call("greet", name="b") == "hi b 1"
    assert worker.generation == 2


def test_a_hung_process_is_killed_at_its_deadline(worker: Worker) -> None:
    worker.call("greet", name="a")
    process = worker._process
    begin = time.monotonic()
    with pytest.raises(WorkerFault, match="killed: hang did not end") as fault:
        worker.call("hang", deadline_s=0.3)
    assert fault.value.gone and time.monotonic() - begin < 10
    assert not process.is_alive()
    assert worker.call("greet", name="b") == "hi b 1"


def test_an_interrupted_command_leaves_no_answer_for_the_next(worker: Worker) -> None:
    worker.call("greet", name="a")
    worker.send("greet", name="late")
    pipe = worker._pipe
    assert pipe is not None

    class Interrupted:
        def poll(self, seconds: float) -> bool:
            raise KeyboardInterrupt

        close = pipe.close

    worker._pipe = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        worker.receive()
    assert not worker.alive
    assert worker.call("greet", name="b") == "hi b 1"


def test_calls_of_several_threads_wait_for_one_another(worker: Worker) -> None:
    names = [str(number) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: worker.call("greet", name=name), names))
    assert [answer.split()[1] for answer in answers] == names
    assert sorted(int(answer.split()[2]) for answer in answers) == list(range(1, 41))


def test_a_handler_that_cannot_be_made_says_why() -> None:
    worker = Worker("peer", FACTORY, {"broken": True})
    with pytest.raises(WorkerFault, match="ValueError: cannot be made"):
        worker.call("greet", name="a")
    assert not worker.alive


def test_end_leaves_no_process(worker: Worker) -> None:
    worker.call("greet", name="a")
    process = worker._process
    worker.end()
    assert not process.is_alive() and not worker.alive


def test_locks_that_a_library_made_are_not_reported_as_leaked(tmp_path: Path) -> None:
    # Whoever is left to tidy up warns when the parent ends: seen in its process alone.
    script = f"""
from evenkv.bench.device.worker import Worker
if __name__ == "__main__":
    worker = Worker("peer", {FACTORY!r})
    worker.call("make_a_lock")
    worker.end()
    print("done")
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "src")])
    file = tmp_path / "parent.py"
    file.write_text(script)
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n" and done.stderr == ""
