"""Spreads a run over a Ray cluster: one group of cases a task, one GPU a task; lost groups run again.

Ray is optional, of the extra `ray`. Every node needs this package at the same commit, at the same
path or installed: a task refuses when its kernel sources differ from the caller's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evenkv.bench import plan
from evenkv.bench.case import Case
from evenkv.bench.judge import Provenance
from evenkv.bench.machine_log import append_log, load_log
from evenkv.bench.record import Row, append_rows
from evenkv.bench.run import DeviceLost, run_bench
from evenkv.bench.shards import visible_gpus
from evenkv.errors import EvenkvError
from evenkv.evaluate.environment import INSTALL_RAY

# Long enough that self-test and allocation are small beside it, short enough that a lost node costs little.
GROUP_S = 60.0
ATTEMPTS = 3
# Groups that a node may lose one after the other before it gets no more.
MOST_LOST = 3
_WAIT_S = 0.5
# How long a cluster may be without a node that measures before the run ends.
_NOBODY_S = 120.0
# A host that does not answer, and a port that is not Ray's: ray.init alone would try for minutes.
_PORT_S = 5.0
_HELLO_S = 45.0
_HELLO = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='error')"


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
    avoid: set[str] = field(default_factory=set)  # nodes where it was lost


class Nodes:
    """Which node takes the next group: one with a free slot, not one that lost the group before.

    A node that lost `MOST_LOST` groups one after the other (its GPU is broken, or its clone is old) gets
    none while others live.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._busy: dict[str, int] = {}
        self._lost: dict[str, int] = {}

    def update(self, slots: dict[str, int]) -> None:
        """Slots of the nodes that live now, by node id."""
        self._slots = {node: count for node, count in slots.items() if count >= 1}

    def choose(self, avoid: set[str]) -> str | None:
        """The freest of the best nodes, which has a slot less then; None while these are all at work."""
        sound = {node for node in self._slots if self._lost.get(node, 0) < MOST_LOST}
        best = (sound - avoid) or (set(self._slots) - avoid) or set(self._slots)
        free = {node: self._slots[node] - self._busy.get(node, 0) for node in sorted(best)}
        node = max(free, key=lambda name: free[name], default=None)
        if node is None or free[node] < 1:
            return None
        self._busy[node] = self._busy.get(node, 0) + 1
        return node

    def release(self, node: str, lost: bool) -> None:
        """A group ended there."""
        self._busy[node] -= 1
        self._lost[node] = self._lost.get(node, 0) + 1 if lost else 0


@dataclass(frozen=True)
class Measured:
    """What a task returns: rows and the machine's log (`machine_log`), as plain objects."""

    rows: list[dict]
    log: list[dict]


Measure = Callable[[Job, list[dict]], Measured]


def measure_group(job: Job, cases: list[dict]) -> Measured:
    """One task: measure the cases on this node's GPU.

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
            path = Path(folder) / "rows.jsonl"
            report = run_bench(
                device,
                [Case.from_json(case) for case in cases],
                job.implementations,
                path,
                provenance=job.provenance,
                iterations=job.iterations,
                warm=job.warm,
            )
            log = [entry.model_dump(mode="json") for entry in load_log(path)]
        return Measured([row.model_dump(mode="json") for row in report.rows], log)
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
        Tasks at a time; as many as the cluster has GPUs when not given.

    Raises
    ------
    EvenkvError
        When Ray is missing, the cluster cannot be reached, or it has no GPU.
    """
    ray = _connect(address, workers)
    try:
        gpus = 0 if job.device == "standin" else 1
        kind = "GPU" if gpus else "CPU"
        slots = int(ray.cluster_resources().get(kind, 0))
        if slots < 1:
            raise EvenkvError(f"--ray {address}: the cluster has no {kind}.", "Add a node with one.")
        # Ray's own retries would hide what was lost; ours run on another node where there is one (`Nodes`),
        # and are reported.
        remote = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=0)(measure)
        return _Pool(ray, remote, kind, job, path_of, deadline, progress, workers).run(cases)
    finally:
        ray.shutdown()


class _Pool:
    def __init__(
        self,
        ray: Any,
        remote: Any,
        kind: str,
        job: Job,
        path_of: Callable[[str], Path],
        deadline: float | None,
        progress: Callable[[str, float], None],
        most: int | None,
    ) -> None:
        self._ray = ray
        self._remote = remote
        self._kind = kind
        self._job = job
        self._path_of = path_of
        self._deadline = deadline
        self._progress = progress
        self._most = most
        self._nodes = Nodes()

    def run(self, cases: Sequence[Case]) -> PoolReport:
        def cost(case: Case) -> float:
            return plan.case_seconds(
                case, self._job.implementations, self._job.iterations, plan.DEFAULT_COPY_GBPS
            )

        waiting = [_Group(group) for group in plan.groups(cases, cost, GROUP_S)]
        report, done, alive = PoolReport(), 0, time.monotonic()
        running: dict[Any, tuple[_Group, str]] = {}
        try:
            while waiting or running:
                late = self._deadline is not None and time.monotonic() > self._deadline
                if not late:
                    waiting = self._start(waiting, running)
                if not running:
                    if not late and time.monotonic() > alive + _NOBODY_S:
                        report.lost.append(f"for {_NOBODY_S:.0f} s no node with a {self._kind} was alive")
                        report.given_up = late = True
                    if late:
                        break
                    time.sleep(_WAIT_S)
                    continue
                alive = time.monotonic()
                finished, _ = self._ray.wait(list(running), timeout=_WAIT_S)
                for reference in finished:
                    group, node = running.pop(reference)
                    measured = self._collect(reference, group, report)
                    self._nodes.release(node, lost=not measured)
                    if measured:
                        done += len(group.cases)
                        self._progress(group.cases[-1].name, done / len(cases))
                    elif group.attempts < ATTEMPTS:
                        group.avoid.add(node)
                        waiting.append(group)
                    else:
                        report.given_up = True
                        report.left += group.cases
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)
        report.left += [case for group in waiting for case in group.cases]
        return report

    def _start(self, waiting: Sequence[_Group], running: dict[Any, tuple[_Group, str]]) -> list[_Group]:
        """Start groups on nodes with free slots; returns those that have to wait."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._nodes.update(
            {
                node["NodeID"]: int(node["Resources"].get(self._kind, 0))
                for node in self._ray.nodes()
                if node["Alive"]
            }
        )
        left = []
        for group in waiting:
            full = self._most is not None and len(running) >= self._most
            node = None if full else self._nodes.choose(group.avoid)
            if node is None:
                left.append(group)
                continue
            group.attempts += 1
            plain = [case.to_json() for case in group.cases]
            # Soft: elsewhere, should the node be gone by the time that the task starts.
            place = NodeAffinitySchedulingStrategy(node, soft=True)
            task = self._remote.options(scheduling_strategy=place).remote(self._job, plain)
            running[task] = (group, node)
        return left

    def _collect(self, reference: Any, group: _Group, report: PoolReport) -> bool:
        """Append the task's rows; False when it was lost."""
        try:
            measured = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            report.lost.append(f"{group.cases[0].name} and {len(group.cases) - 1} more: {_why(error)}")
            return False
        rows = [Row.model_validate(row) for row in measured.rows]
        by_gpu: dict[str, list[Row]] = {}
        for row in rows:
            by_gpu.setdefault(row.gpu, []).append(row)
        for gpu, own in by_gpu.items():
            append_rows(self._path_of(gpu), own)
            append_log(self._path_of(gpu), measured.log)
        report.rows += rows
        return True


def _connect(address: str, workers: int | None) -> Any:
    try:
        import ray
    except ImportError:
        raise EvenkvError("--ray needs Ray.", f"Install it: `{INSTALL_RAY}`.") from None
    # Tasks must find this package where it is not installed but lies on a path that all nodes have.
    environment = {"env_vars": {"PYTHONPATH": ":".join([str(Path(__file__).parents[2]), *_python_path()])}}
    options: dict[str, Any] = {"runtime_env": environment, "log_to_driver": False, "logging_level": "error"}
    # "local" is said to Ray too: without an address it would join a cluster that happens to run here.
    options["address"] = address
    if address == "local":
        # A task of a GPU takes a CPU too: as many as there are GPUs, or they would wait for each other.
        options |= {"num_cpus": workers or max(1, len(visible_gpus())), "include_dashboard": False}
    else:
        _probe(address)
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise _no_cluster(address, _why(error)) from None
    return ray


def _probe(address: str) -> None:
    """Raise unless a cluster answers there soon.

    A port that nobody listens at is known at once. What listens is Ray only when a driver can join it; that
    is tried in a process that can be ended, for Ray's own attempts write logs and take minutes.
    """
    if address != "auto":
        host, port = _host_and_port(address)
        try:
            socket.create_connection((host, port), timeout=_PORT_S).close()
        except OSError as error:
            raise _no_cluster(address, str(error)) from None
    command = [sys.executable, "-c", _HELLO, address]
    # A session of its own, that an interruption reaches this process alone, which then ends that one.
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_HELLO_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise _no_cluster(address, f"what listens there does not speak Ray within {_HELLO_S:.0f} s") from None
    if answer.returncode:
        lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        raise _no_cluster(address, lines[-1] if lines else f"exit code {answer.returncode}")


def _host_and_port(address: str) -> tuple[str, int]:
    """Of "host:6379" or "ray://host:10001"."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("", "ray"):
        raise EvenkvError(
            f'--ray: wanted "auto", "local", host:port or ray://host:port, got {address!r}.',
            "Correct it; a head started with `ray start --head` listens at port 6379.",
        )
    return host, port


def _no_cluster(address: str, why: str) -> EvenkvError:
    return EvenkvError(
        f"--ray {address}: no cluster answers: {why.rstrip('.')}.", "Start one with `ray start --head`."
    )


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]


def _why(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, (EvenkvError, DeviceLost)):
        return str(cause)
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1].strip()}" if lines else type(cause).__name__
