"""Compiles what the cases need before anything is timed: several processes, each job with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from evenkv.bench.case import Case
from evenkv.bench.device.implementations import Implementation, make_implementation
from evenkv.bench.device.subject import Subject
from evenkv.bench.device.timing import CudaMachine
from evenkv.bench.device.worker import Worker, WorkerFault
from evenkv.bench.record import OURS
from evenkv.bench.shards import usable_cores

DEADLINE_S = 900.0
_MOST_PROCESSES = 12

BuildKey = tuple[str, Hashable]
Progress = Callable[[str, float], None]


class Builder:
    """Commands of a build process: any implementation, on small cases of a geometry."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._machine = CudaMachine(index, "events")

    def classify(self, error: Exception) -> tuple[str, bool]:
        return self._machine.classify(error)

    def build(self, name: str, case: Case) -> None:
        Subject(name, self._index, "events", machine=self._machine).build(case)


def build_jobs(
    cases: Sequence[Case],
    names: Sequence[str],
    done: Mapping[BuildKey, str | None],
    make: Callable[[str], Implementation] = make_implementation,
) -> dict[BuildKey, Case]:
    """One case for every piece of compiler's work that is not done yet; peers, which take longest, first."""
    jobs: dict[BuildKey, Case] = {}
    for name in sorted(names, key=lambda name: name in OURS):
        implementation = make(name)
        for case in cases:
            key = name, implementation.build_key(case)
            if key[1] is None or key in done or key in jobs or implementation.supports(case):
                continue
            jobs[key] = case
    return jobs


def build_all(
    jobs: Mapping[BuildKey, Case],
    index: int,
    progress: Progress = lambda what, share: None,
    make_worker: Callable[[str], Any] | None = None,
) -> dict[BuildKey, str | None]:
    """Do the jobs side by side.

    Returns
    -------
    dict
        By key: None, or why the build failed. A build that dies or hangs takes no other with it.
    """
    make_worker = make_worker or (
        lambda name: Worker(name, "evenkv.bench.device.builds:Builder", {"index": index}, DEADLINE_S)
    )
    waiting: SimpleQueue[tuple[BuildKey, Case]] = SimpleQueue()
    for job in jobs.items():
        waiting.put(job)
    results: dict[BuildKey, str | None] = {}

    def work(number: int) -> None:
        worker = make_worker(f"builder-{number}")
        try:
            while True:
                try:
                    key, case = waiting.get_nowait()
                except Empty:
                    return
                try:
                    worker.call("build", name=key[0], case=case)
                    results[key] = None
                except WorkerFault as fault:
                    results[key] = f"its build failed: {fault.reason}"
                progress(f"build {key[0]} for {case.name}", len(results) / len(jobs))
        finally:
            worker.end()

    count = max(1, min(_MOST_PROCESSES, len(usable_cores()) * 3 // 4, len(jobs)))
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads if jobs else []:
        thread.start()
    for thread in threads if jobs else []:
        thread.join()
    return results
