"""The main job without a GPU: interpreted Triton and C++ against the reference, and CUDA compile checks.

Everything keeps to a budget of seconds. What did not fit is said, with the reason.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashinfer_bench.data import Solution

from evenkv.errors import EvenkvError
from evenkv.evaluate import builds
from evenkv.evaluate.load import Case, kernel_of
from evenkv.evaluate.remote import Worker, WorkerDiedError, WorkerTimeoutError
from evenkv.library import toolchain
from evenkv.numerics.bytes import ELEMENT_BYTES
from evenkv.pack.compile import ARCHS, CompileResult, CompileUnit, compile_check, compile_units
from evenkv.pack.manifest import Kernel
from evenkv.spec.family import SEED_DEFINITION, DecodeSpec, parse_name

CACHE_LIMIT_BYTES = 1 << 30
FIRST_BUDGET_S = 130.0
LATER_BUDGET_S = 55.0
_SEED = 20
_COMPILERS = 2

# Shares of the budget after which a stage starts nothing new. What is left at the end goes to evaluations:
# builds and compilations are cached, so later runs spend nearly everything on those.
_TRITON_UNTIL, _BUILD_UNTIL, _CPP_UNTIL, _COMPILE_UNTIL, _CPP_AGAIN_UNTIL = 0.15, 0.5, 0.63, 0.87, 0.93

# Seconds that the C++ solutions get even when builds took longer than planned; never more than the budget.
_CPP_AT_LEAST_S = 5.0

# In a result's place of the workload: the solution did not get as far as one.
_NO_WORKLOAD = "-"

# A job that is killed before it had this long says nothing about its solution.
_NOTABLE_S = 10.0

# Interpreted Triton costs about as much for one KV element as filling the pools costs for this many.
_INTERPRETER_FACTOR = 50

Note = Callable[[str, float], None]
"""`note(what, share)`: what happens now, and the share of the budget that is used up."""


@dataclass(frozen=True)
class CpuResult:
    """One solution on one workload. `latency_ms` is host wall clock, None for interpreted code."""

    definition: str
    workload: str
    solution: str
    status: str
    faults: tuple[str, ...] = ()
    max_abs_err: float | None = None
    rel_err: float | None = None
    latency_ms: float | None = None


@dataclass
class CpuReport:
    """`left_out` pairs what was not evaluated with the reason."""

    results: list[CpuResult] = field(default_factory=list)
    compiled: list[CompileResult] = field(default_factory=list)
    compilations: int = 0
    """CUDA compilations (one source for one target) that there are; `compiled` may be fewer."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    planned: bool = False
    """Whether there was something to evaluate, and time for it: then no result at all is a failure."""
    interrupted: bool = False
    """Whether Ctrl-C or SIGTERM ended it: what had ended by then is in the report."""

    @property
    def ok(self) -> bool:
        if self.interrupted or (self.planned and not self.results):
            return False
        return all(r.status == "PASSED" for r in self.results) and all(c.ok for c in self.compiled)


@dataclass(frozen=True)
class Job:
    """One solution on one workload; `cost` ranks jobs, in KV elements touched."""

    case: Case
    solution: Solution
    cost: int

    @property
    def name(self) -> str:
        return f"{self.solution.name} on {self.case.workload.uuid}"


def evaluate_on_cpu(
    cases: Sequence[Case],
    lengths: Mapping[tuple[str, str], Sequence[int]],
    kernels: Sequence[Kernel],
    root: Path,
    budget_s: float | None = None,
    note: Note = lambda what, share: None,
) -> CpuReport:
    """Evaluate what a CPU can run, smallest workloads first, every definition before a second round.

    Parameters
    ----------
    lengths : mapping
        Tokens of each request by (definition, workload uuid).
    kernels : sequence of Kernel
        Kernel folders whose CUDA code is compiled for every target.
    root : Path
        The folder that blob paths start from.
    budget_s : float, optional
        Seconds for everything; None means FIRST_BUDGET_S when nothing is built yet, else
        LATER_BUDGET_S. With 0 nothing starts, and the report says what is left.

    Returns
    -------
    CpuReport
        Also when Ctrl-C or SIGTERM ends it: then `interrupted` is set.
    """
    report = CpuReport()
    _leave_out_gpu_only(cases, report)
    cpp = plan_jobs(cases, lengths, "cpp", report)
    triton = plan_jobs(cases, lengths, "triton", report)
    try:
        builds.use_keyed_cache(for_gpu=False)
    except EvenkvError as error:
        report.left_out.append((f"{len(cpp)} C++ evaluations", str(error)))
        cpp = []
        os.environ.setdefault("FIB_CACHE_PATH", str(toolchain.cache_folder() / "flashinfer-bench" / "plain"))
    if budget_s is None:
        budget_s = LATER_BUDGET_S if any(builds.is_built(job.solution) for job in cpp) else FIRST_BUDGET_S
    start = time.monotonic()

    def tell(what: str) -> None:
        note(what, min(1.0, (time.monotonic() - start) / budget_s) if budget_s else 1.0)

    def until(share: float) -> float:
        return start + share * budget_s

    specs = list(dict.fromkeys(case.spec for case in cases))
    planned = len(cpp) + len(triton)
    report.planned = planned > 0 and budget_s > 0
    try:
        with Worker({}) as compiled, Worker({"TRITON_INTERPRET": "1"}) as interpreted:
            stage = _Evaluations(root, until(1.0), report, tell)
            triton = stage.run(triton, interpreted, until(_TRITON_UNTIL))
            cpp = _build(cpp, until(_BUILD_UNTIL), report, tell)
            at_least = time.monotonic() + min(_CPP_AT_LEAST_S, budget_s)
            cpp = stage.run(cpp, compiled, max(until(_CPP_UNTIL), at_least))
            _compile(kernels, specs, until(_COMPILE_UNTIL if planned else 1.0), report, tell)
            cpp = stage.run(cpp, compiled, until(_CPP_AGAIN_UNTIL))
            triton = stage.run(triton, interpreted, until(1.0))
    except KeyboardInterrupt:
        # What had ended by then is worth telling. The stages gave no list of what is left: count.
        report.interrupted = True
        left = planned - sum(result.workload != _NO_WORKLOAD for result in report.results)
        if left > 0:
            report.left_out.append((f"{left} evaluations", "interrupted"))
        compiles = any(kernel.manifest.language == "cuda" for kernel in kernels)
        if compiles and (not report.compilations or len(report.compiled) < report.compilations):
            report.left_out.append(("CUDA compilations that had not ended", "interrupted"))
        return report
    for jobs in (cpp, triton):
        if jobs:
            kernels_left = ", ".join(dict.fromkeys(kernel_of(job.solution) for job in jobs))
            report.left_out.append((f"{len(jobs)} evaluations of {kernels_left}", "no time left"))
    return report


def needs_gpu(solution: Solution) -> bool:
    """Whether a CPU can do nothing with it: neither run or interpret it nor compile it."""
    return solution.spec.language.value == "python"


def _leave_out_gpu_only(cases: Sequence[Case], report: CpuReport) -> None:
    kernels = dict.fromkeys(kernel_of(s) for case in cases for s in case.solutions if needs_gpu(s))
    for kernel in kernels:
        report.left_out.append((kernel, "needs a CUDA GPU"))


def plan_jobs(
    cases: Sequence[Case],
    lengths: Mapping[tuple[str, str], Sequence[int]],
    language: str,
    report: CpuReport,
) -> list[Job]:
    """Jobs in rounds: the cheapest workload of every definition, then the second cheapest, and so on."""
    by_definition: dict[str, list[Job]] = {}
    too_large = 0
    for case in cases:
        solutions = [s for s in case.solutions if s.spec.language.value == language]
        row = case.spec.num_kv_heads * case.spec.head_dim
        pool = 2 * case.workload.axes["num_pages"] * case.spec.page_size * row
        if solutions and pool * ELEMENT_BYTES[case.spec.kv_dtype] > CACHE_LIMIT_BYTES:
            too_large += 1
            continue
        tokens = sum(lengths[case.definition.name, case.workload.uuid])
        read = 2 * tokens * row * (_INTERPRETER_FACTOR if language == "triton" else 1)
        for solution in solutions:
            by_definition.setdefault(case.definition.name, []).append(Job(case, solution, pool + read))
    if too_large:
        what = f"{too_large} workloads for {language} solutions"
        report.left_out.append((what, f"KV pools of more than {CACHE_LIMIT_BYTES >> 20} MiB"))
    rounds = [
        (rank, job.cost, job)
        for jobs in by_definition.values()
        for rank, job in enumerate(sorted(jobs, key=lambda job: job.cost))
    ]
    return [job for *_, job in sorted(rounds, key=lambda entry: entry[:2])]


def _build(jobs: Sequence[Job], deadline: float, report: CpuReport, tell: Callable[[str], None]) -> list[Job]:
    """Build what the jobs need, in their order; returns the jobs whose solution stands."""
    pairs = {job.solution.name: (job.case.definition, job.solution) for job in jobs}
    if not pairs:
        return []
    tell("building C++")
    failures, unbuilt = builds.build_all(
        list(pairs.values()), lambda name: tell(f"built {name}"), deadline=deadline
    )
    for name, error in failures.items():
        definition = pairs[name][0].name
        report.results.append(CpuResult(definition, _NO_WORKLOAD, name, "COMPILE_ERROR", (error,)))
    if unbuilt:
        report.left_out.append(
            (f"{len(unbuilt)} C++ solutions", "no time to build them; each run builds some more")
        )
    return [job for job in jobs if job.solution.name not in {*failures, *unbuilt}]


class _Evaluations:
    """Runs jobs in a worker until a stage's time is over."""

    def __init__(self, root: Path, end: float, report: CpuReport, tell: Callable[[str], None]) -> None:
        self._root = root
        self._end = end
        self._report = report
        self._tell = tell

    def run(self, jobs: Sequence[Job], worker: Worker, deadline: float) -> list[Job]:
        """Start no job after `deadline`, stop none before the end of the budget; returns what is left."""
        waiting = list(jobs)
        while waiting and time.monotonic() < deadline:
            job = waiting[0]
            self._tell(job.name)
            left = max(self._end, deadline) - time.monotonic()
            try:
                answer = worker.ask(self._request(job), left)
            except WorkerTimeoutError:
                if left > _NOTABLE_S:
                    waiting.pop(0)
                    self._report.left_out.append(
                        (job.name, f"stopped after {left:.0f} s, when time was over")
                    )
                return waiting
            except WorkerDiedError as error:
                answer = {"status": "RUNTIME_ERROR", "faults": [str(error)]}
            waiting.pop(0)
            self._report.results.append(
                CpuResult(
                    job.case.definition.name,
                    job.case.workload.uuid,
                    job.solution.name,
                    answer["status"],
                    tuple(answer["faults"]),
                    answer.get("max_abs_err"),
                    answer.get("rel_err"),
                    answer.get("latency_ms"),
                )
            )
        return waiting

    def _request(self, job: Job) -> dict[str, Any]:
        return {
            "definition": job.case.definition.model_dump(mode="json"),
            "solution": job.solution.model_dump(mode="json"),
            "workload": job.case.workload.model_dump(mode="json"),
            "root": str(self._root),
            "seed": _SEED,
            "timed": job.solution.spec.language.value == "cpp",
        }


def _compile(
    kernels: Sequence[Kernel],
    specs: Sequence[DecodeSpec],
    deadline: float,
    report: CpuReport,
    tell: Callable[[str], None],
) -> None:
    """Compile what ends before the deadline; what earlier runs compiled comes from the cache, in no time."""
    by_name = {kernel.name: kernel for kernel in kernels}
    seed_first = sorted(specs, key=lambda spec: spec.name != SEED_DEFINITION)
    waiting = [(unit, arch) for unit in _kinds_in_turn(compile_units(kernels, seed_first)) for arch in ARCHS]
    report.compilations = len(waiting)
    if not waiting:
        return
    try:
        toolchain.find_nvcc()
    except EvenkvError as error:
        report.left_out.append((f"{len(waiting)} CUDA compilations", str(error)))
        return

    def one(unit: CompileUnit, arch: str) -> CompileResult:
        results = compile_check([by_name[unit.kernel]], [parse_name(unit.specs[0])], [arch], jobs=1)
        return replace(next(r for r in results if r.source == unit.source), specs=unit.specs)

    # Each with its result once it has ended, in the order of their starts.
    started: dict[Future[CompileResult], CompileResult | None] = {}
    running: set[Future[CompileResult]] = set()
    longest = 0.0
    with ThreadPoolExecutor(_COMPILERS) as pool:
        try:
            while True:
                while waiting and len(running) < _COMPILERS and time.monotonic() + longest < deadline:
                    unit, arch = waiting.pop(0)
                    tell(f"compiling {unit.kernel} for {arch}")
                    future = pool.submit(one, unit, arch)
                    started[future] = None
                    running.add(future)
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    result = started[future] = future.result()
                    longest = max(longest, 0.0 if result.cached else result.seconds)
        except KeyboardInterrupt:
            tell("interrupted: the compilers that run end first")
            raise
        finally:
            # Those alone that ended before an interruption: Ctrl-C in a terminal kills compilers, too, and
            # what was killed has not failed.
            report.compiled += [result for result in started.values() if result is not None]
    if waiting:
        what = f"{len(waiting)} of {report.compilations} CUDA compilations"
        report.left_out.append((what, "no time left; the next run goes on with them"))


def _kinds_in_turn(units: Sequence[CompileUnit]) -> list[CompileUnit]:
    """One unit of each (KV dtype, head_dim) before a second of any: a short run sees every kind of code."""
    seen: Counter[tuple[str, int]] = Counter()
    ranked = []
    for unit in units:
        spec = parse_name(unit.specs[0])
        kind = (spec.kv_dtype, spec.head_dim)
        ranked.append((seen[kind], unit))
        seen[kind] += 1
    return [unit for _, unit in sorted(ranked, key=lambda entry: entry[0])]
