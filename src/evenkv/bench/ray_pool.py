"""Spreads a run over a Ray cluster: one group of cases a task, one GPU a task; lost groups run again.

Ray is optional (`pip install 'evenkv[ray]'`). Every node needs this package at the same commit, at the same
path or installed: a task refuses when its kernel sources differ from the caller's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenkv.bench import plan
from evenkv.bench.case import Case
from evenkv.bench.judge import Provenance
from evenkv.bench.record import Row, append_rows
from evenkv.bench.run import DeviceLost, run_bench
from evenkv.errors import EvenkvError

# Long enough that self-test and allocation are small beside it, short enough that a lost node costs little.
GROUP_S = 60.0
ATTEMPTS = 3
_WAIT_S = 0.5


@dataclass(frozen=True)
class Job:
    """What every task of a run needs to know; all of it plain values, for they travel."""

    device: str
    implementations: tuple[str, ...]
    iterations: int
    warm: bool
    provenance: Provenance


@dataclass
class PoolReport:
    """What the cluster did. `left` are groups not started or given up, `lost` why attempts failed."""

    rows: list[Row] = field(default_factory=list)
    left: list[Case] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    given_up: bool = False


@dataclass
class _Group:
    cases: list[Case]
    attempts: int = 0


Measure = Callable[[Job, list[dict]], list[dict]]


def measure_group(job: Job, cases: list[dict]) -> list[dict]:
    """One task: measure the cases on this node's GPU and return their rows as plain objects.

    Raises
    ------
    EvenkvError
        When the node's sources differ, or its GPU or harness is unusable.
    """
    from evenkv.bench.devices import open_device
    from evenkv.bench.judge import provenance
    from evenkv.paths import find_repository

    here = provenance(find_repository(), job.provenance.commit)
    if dict(here.hashes) != dict(job.provenance.hashes):
        raise EvenkvError("This node's kernel sources differ from the caller's.", "Update its clone.")
    device = open_device(job.device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = run_bench(
                device,
                [Case.from_json(case) for case in cases],
                job.implementations,
                Path(folder) / "rows.jsonl",
                provenance=job.provenance,
                iterations=job.iterations,
                warm=job.warm,
            )
        return [row.model_dump(mode="json") for row in report.rows]
    finally:
        device.close()


def run_on_ray(
    address: str,
    job: Job,
    cases: Sequence[Case],
    path_of: Callable[[str], Path],
    *,
    deadline: float | None = None,
    progress: Callable[[str, float], None] = lambda what, share: None,
    measure: Measure = measure_group,
    workers: int | None = None,
) -> PoolReport:
    """Measure ordered cases on a cluster, and append rows as tasks end.

    Parameters
    ----------
    address : str
        Ray's address ("auto", "host:6379", "ray://host:10001"), or "local" for a Ray of this machine.
    path_of : callable
        The results file of a GPU by its name: clusters may have several kinds.
    deadline : float, optional
        `time.monotonic()` after which no task starts; those that run are awaited.
    workers : int, optional
        Tasks at a time; the cluster's GPUs when not given.

    Raises
    ------
    EvenkvError
        When Ray is missing, the cluster cannot be reached, or it has no GPU.
    """
    ray = _connect(address, workers)
    try:
        gpus = 0 if job.device == "standin" else 1
        slots = workers or int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
        if slots < 1:
            raise EvenkvError(f"--ray {address}: the cluster has no GPU.", "Add a node with one.")
        # Ray's own retries would hide what was lost; ours run on another node and are reported.
        remote = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=0)(measure)
        return _Pool(ray, remote, job, path_of, deadline, progress, slots).run(cases)
    finally:
        ray.shutdown()


class _Pool:
    def __init__(
        self,
        ray: Any,
        remote: Any,
        job: Job,
        path_of: Callable[[str], Path],
        deadline: float | None,
        progress: Callable[[str, float], None],
        slots: int,
    ) -> None:
        self._ray = ray
        self._remote = remote
        self._job = job
        self._path_of = path_of
        self._deadline = deadline
        self._progress = progress
        self._slots = slots

    def run(self, cases: Sequence[Case]) -> PoolReport:
        def cost(case: Case) -> float:
            return plan.case_seconds(
                case, self._job.implementations, self._job.iterations, plan.DEFAULT_COPY_GBPS
            )

        waiting = [_Group(group) for group in plan.groups(cases, cost, GROUP_S)]
        report, running, done = PoolReport(), {}, 0
        try:
            while waiting or running:
                late = self._deadline is not None and time.monotonic() > self._deadline
                while waiting and len(running) < self._slots and not late:
                    group = waiting.pop(0)
                    group.attempts += 1
                    plain = [case.to_json() for case in group.cases]
                    running[self._remote.remote(self._job, plain)] = group
                if not running:
                    break
                finished, _ = self._ray.wait(list(running), timeout=_WAIT_S)
                for reference in finished:
                    group = running.pop(reference)
                    if self._collect(reference, group, report):
                        done += len(group.cases)
                        self._progress(group.cases[-1].name, done / len(cases))
                    elif group.attempts < ATTEMPTS:
                        waiting.append(group)
                    else:
                        report.given_up = True
                        report.left += group.cases
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)
        report.left += [case for group in waiting for case in group.cases]
        return report

    def _collect(self, reference: Any, group: _Group, report: PoolReport) -> bool:
        """Append the task's rows; False when it was lost."""
        try:
            rows = [Row.model_validate(row) for row in self._ray.get(reference)]
        except self._ray.exceptions.RayError as error:
            report.lost.append(f"{group.cases[0].name} and {len(group.cases) - 1} more: {_why(error)}")
            return False
        by_gpu: dict[str, list[Row]] = {}
        for row in rows:
            by_gpu.setdefault(row.gpu, []).append(row)
        for gpu, own in by_gpu.items():
            append_rows(self._path_of(gpu), own)
        report.rows += rows
        return True


def _connect(address: str, workers: int | None) -> Any:
    try:
        import ray
    except ImportError:
        raise EvenkvError("--ray needs Ray.", "Install it: `pip install 'evenkv[ray]'`.") from None
    # Tasks must find this package where it is not installed but lies on a path that all nodes have.
    environment = {"env_vars": {"PYTHONPATH": ":".join([str(Path(__file__).parents[2]), *_python_path()])}}
    options: dict[str, Any] = {"runtime_env": environment, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options |= {"num_cpus": workers or 1, "include_dashboard": False}
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise EvenkvError(
            f"--ray {address}: no cluster answers: {_why(error)}.", "Start one with `ray start --head`."
        ) from None
    return ray


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]


def _why(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, (EvenkvError, DeviceLost)):
        return str(cause)
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1].strip()}" if lines else type(cause).__name__
