"""On a GPU: our kernels over the G-cases, repeats, scratch, graphs; every packed solution; an error table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.compile.builder import BuildError
from flashinfer_bench.data import Definition, Solution
from flashinfer_bench.data.json_utils import load_json_file

from evenkv.library.build import build_kernel
from evenkv.numerics.cases import BASE, GCase, g_cases, run_case
from evenkv.numerics.check import check_outputs
from evenkv.numerics.error import measure
from evenkv.numerics.judge import bit_equal, call, judge_or_refusal
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import reference
from evenkv.numerics.tolerance import tolerance
from evenkv.pack.manifest import find_kernel
from evenkv.paths import find_repository
from evenkv.spec.family import DecodeSpec, parse_name

pytestmark = pytest.mark.gpu

REPOSITORY = find_repository()
KERNELS = ("evenkv_cuda", "evenkv_triton")
FP8 = replace(BASE, kv_dtype="float8_e4m3fn")
SEED = DecodeSpec(5, 1, 128, 1)

# One definition of each page size, head_dim and dtype: flashinfer-bench's own run meets all of them.
DEFINITIONS = (
    "gqa_paged_decode_h5_kv1_d128_ps1",
    "gqa_paged_decode_h32_kv8_d128_ps16",
    "gqa_paged_decode_h16_kv2_d64_ps16",
    "gqa_paged_decode_h16_kv4_d256_ps16",
    "gqa_paged_decode_fp8_h32_kv8_d128_ps64",
)
# A request in parts on all SMs, a few parts, one, one token, none, and page and tile ends.
LENGTHS = (40_000, 1, 0, 17, 600, 64, 333, 2048)

_BATCHES = ([30_000, 5, 700], [0, 1], [300] * 64)

_BUILD = """
import json, sys
from evenkv.library.build import build_kernel
from evenkv.spec.family import DecodeSpec
build_kernel("evenkv_cuda", DecodeSpec(**json.loads(sys.argv[1])))
"""


def _supports(kernel_name: str, specs: Iterable[DecodeSpec]) -> bool:
    kernel = find_kernel(REPOSITORY, kernel_name)
    return all(kernel.supports(spec) for spec in specs)


def _kernel(name: str) -> Callable[..., None]:
    """`kernel(spec, *inputs, output, lse)`; builds on demand, from the cache after the first time."""

    def run(spec: DecodeSpec, *arguments: Any) -> None:
        build_kernel(name, spec)(*arguments)

    return run


@pytest.fixture(scope="session", autouse=True)
def built_in_parallel(request: pytest.FixtureRequest, shared_folder: Path | None) -> None:
    """Fill the library's cache for the selected cases: one process a build, as nvcc takes its time.

    Of several pytest processes the first that comes builds for all, and the others wait.
    """
    if shared_folder is None:
        faults = _build_for(request.session.items)
    else:
        told = shared_folder / "numerics-built.json"
        with filelock.FileLock(shared_folder / "numerics-built.lock"):
            if not told.exists():
                told.write_text(json.dumps(_build_for(request.session.items)), encoding="utf-8")
            faults = json.loads(told.read_text(encoding="utf-8"))
    assert not faults, "\n".join(faults)


def _build_for(items: Iterable[pytest.Item]) -> list[str]:
    """Build evenkv_cuda for every geometry that the tests use; returns what went wrong."""
    specs: dict[DecodeSpec, None] = dict.fromkeys((BASE, FP8, SEED))
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(parameters.get("case"), GCase) and parameters.get("name") == "evenkv_cuda":
            specs |= dict.fromkeys(parameters["case"].specs)
    wanted = [spec for spec in specs if _supports("evenkv_cuda", [spec])]

    def build(spec: DecodeSpec) -> str:
        fields = {key: value for key, value in asdict(spec).items() if key != "models"}
        command = [sys.executable, "-c", _BUILD, json.dumps(fields)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return "" if done.returncode == 0 else f"{spec.short_name}: {done.stderr[-2000:]}"

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return [fault for fault in pool.map(build, wanted) if fault]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", g_cases(), ids=lambda case: case.name)
def test_g_case(case: GCase, name: str) -> None:
    if case.judge is not judge_or_refusal and not _supports(name, case.specs):
        pytest.skip(f"{name} does not support {', '.join(spec.short_name for spec in case.specs)}")
    assert run_case(case, _kernel(name), device="cuda") == []


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("spec", [SEED, BASE, FP8], ids=lambda spec: spec.short_name)
def test_twenty_repeats_are_bit_equal(spec: DecodeSpec, name: str) -> None:
    problem = make_problem(spec, LENGTHS, seed=20, device="cuda")
    first = call(problem, _kernel(name))[:2]
    for repeat in range(20):
        assert bit_equal(call(problem, _kernel(name))[:2], first), f"repeat {repeat}"


@pytest.mark.parametrize("name", KERNELS)
def test_scratch_needs_no_zeroing_and_keeps_nothing(name: str) -> None:
    """The free memory that scratch may come from is filled with ones, and other problems come in between."""
    problems = [make_problem(BASE, lengths, seed=i, device="cuda") for i, lengths in enumerate(_BATCHES)]
    kernel = _kernel(name)
    fresh = [call(problem, kernel)[:2] for problem in problems]
    for order in ((2, 0, 1), (1, 2, 0), (0, 0, 2)):
        torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")  # freed at once: the pool keeps it
        for number in order:
            assert bit_equal(call(problems[number], kernel)[:2], fresh[number]), f"problem {number}"


@pytest.mark.parametrize("name", KERNELS)
def test_two_streams_do_not_share_scratch(name: str) -> None:
    problems = [make_problem(BASE, lengths, seed=i, device="cuda") for i, lengths in enumerate(_BATCHES[::2])]
    kernel = _kernel(name)
    alone = [call(problem, kernel)[:2] for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(10):
        outputs = [problem.empty_outputs() for problem in problems]
        torch.cuda.synchronize()
        for stream, problem, pair in zip(streams, problems, outputs, strict=True):
            with torch.cuda.stream(stream):
                kernel(BASE, *problem.inputs(), *pair)
        torch.cuda.synchronize()
        for pair, wanted in zip(outputs, alone, strict=True):
            assert bit_equal(pair, wanted)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("spec", [SEED, BASE], ids=lambda spec: spec.short_name)
def test_a_captured_graph_reads_changed_lengths(spec: DecodeSpec, name: str) -> None:
    """Lengths and page ids come from the device at every launch, and no call waits for the device."""
    long = make_problem(spec, [3000, 40, 1000], seed=1, device="cuda")
    short = make_problem(
        spec, [7, 0, 2500], seed=2, device="cuda", num_pages=long.tensors["k_cache"].shape[0]
    )
    kernel = _kernel(name)
    output, lse = long.empty_outputs()
    static = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in long.tensors.items()}
    problem = long.with_tensors(**static)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernel(spec, *problem.inputs(), output, lse)  # builds, and whatever else happens only once
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(spec, *problem.inputs(), output, lse)
    for now in (short, long, short):
        for tensor_name, tensor in now.tensors.items():
            if isinstance(tensor, torch.Tensor):
                static[tensor_name][: tensor.shape[0]].copy_(tensor)
        output.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert check_outputs(spec, output, lse, *reference(now)) == []


@pytest.mark.parametrize("name", KERNELS)
def test_a_call_does_not_wait_for_the_device(name: str) -> None:
    problem = make_problem(BASE, [600, 0, 5], device="cuda")
    outputs = problem.empty_outputs()
    kernel = _kernel(name)
    kernel(BASE, *problem.inputs(), *outputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(BASE, *problem.inputs(), *outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert check_outputs(BASE, *outputs, *reference(problem)) == []


def _solution_files() -> list[Path]:
    folders = (REPOSITORY.solutions, REPOSITORY.optional / "solutions")
    files = [path for folder in folders for name in DEFINITIONS for path in folder.glob(f"*/*/{name}/*.json")]
    return sorted(path for path in files if "evenkv_cpp" not in path.name)


@pytest.mark.parametrize("path", _solution_files(), ids=lambda path: path.stem)
def test_packed_solutions_of_every_author_are_right(path: Path) -> None:
    solution = load_json_file(Solution, path)
    definition = load_json_file(Definition, REPOSITORY.definitions / f"{solution.definition}.json")
    spec = parse_name(solution.definition)
    # Peers promise nothing for empty requests, nor for NaN in unused slots.
    lengths = LENGTHS if solution.author == "evenkv" else [n for n in LENGTHS if n]
    problem = make_problem(spec, lengths, seed=5, device="cuda", poison_unused=solution.author == "evenkv")
    outputs = problem.empty_outputs()
    try:
        runnable = BuilderRegistry.get_instance().build(definition, solution)
        if solution.spec.destination_passing_style:
            runnable(*problem.inputs(), *outputs)
        else:
            outputs = runnable(*problem.inputs())
    except (ImportError, BuildError) as error:
        if solution.author == "evenkv" or "No module named" not in str(error):
            raise
        pytest.skip(f"a peer that is not installed: {error}")
    torch.cuda.synchronize()
    assert check_outputs(spec, *outputs, *reference(problem)) == []


def test_relative_error_table(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what each kernel's error is beside its limit, per cache dtype (with pytest-xdist: see `-rP`)."""
    head = ("kernel", "cache", "lengths", "rel_err", "max rel", "limit", "lse err")
    lines = ["{:14} {:14} {:>12} {:>9} {:>9} {:>9} {:>9}".format(*head)]
    worst: list[str] = []
    for name in KERNELS:
        for spec in (BASE, FP8, replace(BASE, kv_dtype="float8_e5m2")):
            if not _supports(name, [spec]):
                continue
            for lengths in ([1] * 8, [64] * 8, [4096] * 8, [131_072]):
                problem: Problem = make_problem(spec, lengths, device="cuda")
                output, lse, _ = call(problem, _kernel(name))
                report = measure(output, lse, *reference(problem))
                limit = tolerance(spec.kv_dtype)
                shown = f"{len(lengths)} x {lengths[0]}"
                lines.append(
                    f"{name:14} {spec.kv_dtype:14} {shown:>12} {report.rel_err:9.2e} "
                    f"{report.max_request_rel_err:9.2e} {limit.output:9.2e} {report.lse_err:9.2e}"
                )
                if report.max_request_rel_err > limit.output or report.lse_err > limit.lse:
                    worst.append(lines[-1])
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    request.node.add_report_section("call", "relative errors", "\n".join(lines))
    assert worst == []
