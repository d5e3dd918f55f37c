"""`python -m evenkv.bench.device.probe`: each building block of the harness on this GPU, a line each.

For the first minute on a new machine: what fails is told and the next step goes on, so that one short call
tells all that is broken. Measures nothing that becomes a row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenkv.bench.case import Case
from evenkv.bench.device.worker import Worker, WorkerFault, describe
from evenkv.bench.record import IMPLEMENTATIONS

MakeWorker = Callable[[str, str, dict[str, Any]], Any]

_KEEPER = "evenkv.bench.device.keeper:Keeper"
_SUBJECT = "evenkv.bench.device.subject:Subject"
_PARTS = "evenkv.bench.device.probe_parts:Parts"
_SECONDS = 300.0  # of one step: builds of peers take minutes where no cache has them
_LENGTHS = (1, 300, 1000)
_CALLS = 20
_COMPANY = 3


@dataclass
class _Report:
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    failed: list[str] = field(default_factory=list)

    def step(self, name: str, do: Callable[[], Any]) -> Any:
        """Do it, print how it went and how long it took; None when it failed."""
        begin = self.clock()
        try:
            answer = do()
        except Exception as error:
            self.failed.append(name)
            what = error.reason if isinstance(error, WorkerFault) else describe(error)
            self.say(f"FAILED {name} ({self.clock() - begin:.2f} s): {what}")
            return None
        shown = answer if isinstance(answer, str) else ""
        self.say(f"ok     {name} ({self.clock() - begin:.2f} s) {shown}".rstrip())
        return True if answer is None else answer


def probe(
    implementations: Sequence[str],
    dtypes: Sequence[str],
    *,
    timer: str = "cupti",
    index: int = 0,
    with_builds: bool = True,
    make_worker: MakeWorker | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Run all steps.

    Parameters
    ----------
    implementations : sequence of str
    dtypes : sequence of str
        Of the caches: "bfloat16", "float8_e4m3fn".
    with_builds : bool
        Compile ahead, side by side, as `evenkv bench` does.
    make_worker : callable, optional
        Stands in for the processes (name, factory, arguments).

    Returns
    -------
    list of str
        The steps that failed.
    """
    report = _Report(say)
    make = make_worker or (lambda name, factory, arguments: Worker(name, factory, arguments, _SECONDS))
    keeper = make("keeper", _KEEPER, {"index": index, "timer": timer})
    try:
        _probe_parts(report, make, index)
        if report.step(f"owner's process with {timer}", lambda: _facts(keeper)):
            _probe_keeper(report, keeper)
            _probe_company(report, make, keeper, index)
            for dtype in dtypes:
                _probe_family(report, make, keeper, implementations, dtype, timer, index, with_builds)
    finally:
        keeper.end()
    say(f"{len(report.failed)} steps failed{': ' if report.failed else ''}{'; '.join(report.failed)}")
    return report.failed


def _facts(keeper: Any) -> str:
    facts = keeper.call("facts")
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _probe_parts(report: _Report, make: MakeWorker, index: int) -> None:
    parts = make("parts", _PARTS, {"index": index})
    try:
        steps = ("clocks", "packages", "records", "graph_records", "toggling", "streams", "capture")
        for command in steps:
            report.step(command.replace("_", " "), lambda command=command: parts.call(command))
        other = make("other", _PARTS, {"index": index})
        try:
            for dtype in ("bfloat16", "float8_e4m3fn"):
                report.step(f"1 GiB of {dtype} through IPC", lambda dtype=dtype: _ipc(parts, other, dtype))
            report.step("IPC memory comes back", lambda: _ipc_returned(parts, other))
        finally:
            other.end()
    finally:
        parts.end()


def _ipc(parts: Any, other: Any, dtype: str) -> str:
    message, wanted = parts.call("send", dtype=dtype)
    got = other.call("take", message=message, dtype=dtype)
    if got != wanted:
        raise ValueError(f"the other process reads a checksum of {got}, wanted {wanted}")
    if parts.call("written_by_other", dtype=dtype) is not True:
        raise ValueError("what the other process wrote is not seen here")
    return f"checksum {wanted}"


def _ipc_returned(parts: Any, other: Any) -> str:
    other.call("let_go")
    left = parts.call("let_go")
    if left > 256 << 20:
        raise ValueError(f"{left / 2**20:.0f} MiB stay allocated: families would restart the owner")
    return f"{left / 2**20:.0f} MiB left"


def _probe_keeper(report: _Report, keeper: Any) -> None:
    def median(command: str, **arguments: Any) -> str:
        times = sorted(keeper.call(command, **arguments))
        return f"median {times[len(times) // 2]:.2f} us, {times[0]:.2f} to {times[-1]:.2f}"

    def hidden() -> str:
        if fault := keeper.call("probe_hidden", num_bytes=1 << 30):
            raise ValueError(fault)
        return "work on another stream is caught"

    report.step("empty kernel, cold", lambda: median("probe_empty", count=50))
    for cold in (True, False):
        what = "reading 32 MiB, " + ("cold" if cold else "warm")
        report.step(what, lambda cold=cold: median("probe_read", num_bytes=32 << 20, count=50, cold=cold))
    report.step("copy of 1 GiB", lambda: _walls(keeper))
    report.step("copy peak", lambda: f"{keeper.call('copy_peak'):.0f} GB/s")
    report.step("copy of 1 GiB after it", lambda: _walls(keeper))
    report.step("hidden work", hidden)


def _walls(keeper: Any) -> str:
    ours, events, wall = keeper.call("probe_walls", num_bytes=1 << 30, count=10)
    return f"timer {ours:.1f} us, events {events:.1f} us, wall {wall:.1f} us"


def _probe_company(report: _Report, make: MakeWorker, keeper: Any, index: int) -> None:
    """The implementations' processes have contexts on the GPU too: idle, they must cost nothing."""
    others = [make(f"idle {number}", _PARTS, {"index": index}) for number in range(_COMPANY)]
    try:
        for other in others:
            other.call("clocks")
        report.step(f"copy of 1 GiB beside {_COMPANY} idle processes", lambda: _walls(keeper))
        report.step(f"copy peak beside {_COMPANY}", lambda: f"{keeper.call('copy_peak'):.0f} GB/s")
    finally:
        for other in others:
            other.end()


def _probe_family(
    report: _Report,
    make: MakeWorker,
    keeper: Any,
    implementations: Sequence[str],
    dtype: str,
    timer: str,
    index: int,
    with_builds: bool,
) -> None:
    from evenkv.bench.device.inputs import pool_bytes, seed_of

    case = Case(len(_LENGTHS), None, _LENGTHS, 32, 8, 128, 16, kv_dtype=dtype)
    requests = list(range(case.batch))
    if with_builds:
        _build(report, case, implementations, index)
    pools = {"pool_bytes": pool_bytes(case), "kv_bytes": case.kv_bytes(), "kv_dtype": dtype, "seed": 1}
    if not report.step(f"{dtype}: pools", lambda: _said(keeper.call("allocate", **pools))):
        return
    rows: dict[str, Any] = {"case": case, "seed": seed_of(case), "requests": requests, "draws": range(4)}
    found: list[Any] = []
    report.step(f"{dtype}: fp32 reference", lambda: found.append(keeper.call("reference", **rows)))
    copy = {"kv_bytes": case.kv_bytes(), "count": 5, "cold": True}
    report.step(f"{dtype}: matched copy", lambda: f"{min(keeper.call('matched_copy', **copy)):.2f} us")
    for name in implementations:
        subject = make(name, _SUBJECT, {"name": name, "index": index, "timer": timer})
        try:
            _probe_subject(report, f"{name} {dtype}", subject, keeper, case, found[0] if found else None)
        finally:
            subject.end()
    report.step(f"{dtype}: pools come back", lambda: f"{keeper.call('free') / 2**20:.0f} MiB left")


def _said(allocated: int) -> str:
    return f"{allocated} bytes each"


def _build(report: _Report, case: Case, implementations: Sequence[str], index: int) -> None:
    from evenkv.bench.device import builds

    def build() -> str:
        jobs = builds.build_jobs([case], implementations, {})
        begin = time.monotonic()
        took: list[str] = []

        def told(what: str, share: float) -> None:
            took.append(f"{what.split()[1]} {time.monotonic() - begin:.0f} s")

        faults = {key: fault for key, fault in builds.build_all(jobs, index, told).items() if fault}
        if faults:
            raise ValueError("; ".join(f"{key[0]}: {fault}" for key, fault in faults.items()))
        return ", ".join(took)

    report.step(f"{case.kv_dtype}: builds, side by side", build)


def _probe_subject(report: _Report, name: str, subject: Any, keeper: Any, case: Case, reference: Any) -> None:
    from evenkv.bench.device.correctness import judge
    from evenkv.bench.device.inputs import seed_of

    requests = list(range(case.batch))
    facts: dict[str, Any] = {}

    def start() -> str:
        subject.start()
        missing, version = subject.call("describe")
        if missing:
            raise ValueError(f"missing: {missing}")
        return f"version {version}"

    def adopt() -> None:
        k_pool, v_pool = keeper.call("share")
        subject.call("adopt", k_pool=k_pool, v_pool=v_pool, kv_dtype=case.kv_dtype)

    def prepare() -> str:
        facts.update(subject.call("prepare", case=case, seed=seed_of(case)))
        return ", ".join(f"{key} {value}" for key, value in facts.items())

    def judged(rows: Any, draw: int) -> str:
        if reference is None:
            raise ValueError("there is no reference")
        quantised = facts["quantises_query"]
        verdict = judge(case, rows, reference[0][draw], reference[1][draw], quantises_query=quantised)
        if verdict.faults:
            raise ValueError("; ".join(verdict.faults))
        return f"max abs error {verdict.max_abs_err:.2e}, relative {verdict.rel_err:.2e}"

    def check() -> str:
        return judged(subject.call("check", draw=1, requests=requests), 1)

    def graph() -> str:
        asked = {"draws": range(_CALLS), "cold": True, "checked": 3, "requests": requests}
        times, rows = subject.call("time_graph", **asked)
        return f"median {sorted(times)[_CALLS // 2]:.2f} us, {judged(rows, 3)}"

    def plain(command: str, **arguments: Any) -> str:
        times = sorted(subject.call(command, **arguments))
        return f"median {times[len(times) // 2]:.2f} us"

    def release() -> str:
        subject.call("finish")
        return f"{subject.call('release') / 2**20:.0f} MiB held"

    for what, do in (("starts", start), ("adopts the pools", adopt), ("prepares, captures", prepare)):
        if report.step(f"{name}: {what}", do) is None:
            return
    report.step(f"{name}: eager output", check)
    report.step(f"{name}: graph", graph)
    report.step(f"{name}: eager", lambda: plain("time_eager", draws=range(10), cold=True))
    report.step(f"{name}: host", lambda: plain("time_host", count=10))
    report.step(f"{name}: wall", lambda: plain("time_wall", draws=range(10), cold=True))
    report.step(f"{name}: lets go", release)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when no step failed, 1 when some did, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m evenkv.bench.device.probe", description=__doc__)
    parser.add_argument("--impl", default=",".join(IMPLEMENTATIONS), help="separated by commas")
    parser.add_argument("--dtypes", default="bfloat16,float8_e4m3fn", help="of the caches")
    parser.add_argument("--timer", choices=("cupti", "events"), default="cupti")
    parser.add_argument("--no-builds", action="store_true", help="let each process compile for itself")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("evenkv: the probe needs a CUDA GPU, and torch sees none here.", file=sys.stderr)
        return 2
    failed = probe(
        options.impl.split(","),
        options.dtypes.split(","),
        timer=options.timer,
        with_builds=not options.no_builds,
        say=lambda line: print(line, flush=True),
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
