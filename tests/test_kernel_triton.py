"""evenkv_triton under Triton's interpreter: G-cases, geometries, repeats, counters; schedule; compilation."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# Triton decides when its functions are decorated, its own library's included, so it is imported under the
# switch here and the switch is put back at once: other tests and their processes must not inherit it.
_BEFORE = os.environ.get("TRITON_INTERPRET")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")

from evenkv.kernels.evenkv_triton import kernel as device_code  # noqa: E402
from evenkv.kernels.evenkv_triton import launch, schedule, tuning  # noqa: E402
from evenkv.numerics.cases import BASE, GCase, g_cases, run_case  # noqa: E402
from evenkv.numerics.check import check_outputs  # noqa: E402
from evenkv.numerics.judge import bit_equal, call  # noqa: E402
from evenkv.numerics.problem import Problem, make_problem  # noqa: E402
from evenkv.numerics.reference import reference  # noqa: E402
from evenkv.pack.manifest import find_kernel  # noqa: E402
from evenkv.pack.render import pack_solution  # noqa: E402
from evenkv.paths import Repository  # noqa: E402
from evenkv.spec.family import DecodeSpec  # noqa: E402

if _BEFORE is None:
    os.environ.pop("TRITON_INTERPRET", None)

interpreted = pytest.mark.skipif(
    type(device_code.decode_kernel).__name__ != "InterpretedFunction",
    reason="Triton compiles here: a GPU is there, or Triton was imported before this module",
)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def kernel(spec: DecodeSpec, *arguments: Any, workers: int | None = None) -> None:
    """The solution's entry, with the programs to launch on request."""
    named = dict(zip(spec.input_names, arguments, strict=False))
    launch.decode(
        *(named[n] for n in ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices")),
        named.get("kv_last_page_len"),
        named["sm_scale"],
        *arguments[-2:],
        named.get("k_scale"),
        named.get("v_scale"),
        workers=workers,
    )


@pytest.fixture(autouse=True)
def switch_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton looks at its switch while it runs, too. Tiles are small: threads that wait only slow them."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def counters_are_restored() -> Iterator[None]:
    """No call may leave a counter behind, wrong tables included: the next one would merge too early."""
    yield
    for _, _, counters in launch._scratch.values():
        assert not counters.any()


def faults(problem: Problem, workers: int | None = None) -> list[str]:
    output, lse, found = call(problem, lambda spec, *a: kernel(spec, *a, workers=workers))
    return found + check_outputs(problem.spec, output, lse, *reference(problem))


def test_interpreter_is_on_without_a_gpu() -> None:
    """Else everything below would be skipped unnoticed: some module has imported Triton before this one."""
    assert torch.cuda.is_available() or type(device_code.decode_kernel).__name__ == "InterpretedFunction"


@interpreted
@pytest.mark.parametrize("case", g_cases(small=True), ids=lambda case: case.name)
def test_g_case(case: GCase) -> None:
    assert run_case(case, kernel) == []


@interpreted
@pytest.mark.parametrize(
    ("spec", "lengths", "workers"),
    [
        pytest.param(DecodeSpec(5, 1, 128, 1), [91], None, id="captured-91-tokens"),
        pytest.param(DecodeSpec(5, 1, 128, 64), [0, 200, 0, 0, 65, 0], 3, id="empty-requests"),
        pytest.param(DecodeSpec(8, 1, 64, 16), [n % 9 for n in range(40)], 2, id="many-short-requests"),
        pytest.param(DecodeSpec(8, 2, 64, 48), [2500, 16, 1, 16], 2, id="skew-through-tickets"),
        pytest.param(DecodeSpec(5, 1, 64, 1), [128 * 33], 40, id="merge-in-two-levels"),
        pytest.param(DecodeSpec(16, 4, 256, 16), [70, 0, 33], None, id="d256"),
        pytest.param(DecodeSpec(32, 1, 128, 16), [150], 2, id="group-32"),
        pytest.param(DecodeSpec(12, 2, 128, 16, E4M3), [300, 0, 20], 3, id="e4m3"),
        pytest.param(DecodeSpec(7, 1, 64, 1, E5M2), [140], None, id="e5m2"),
        pytest.param(DecodeSpec(4, 2, 128, 16, "float16"), [140], None, id="fp16-cache"),
    ],
)
def test_geometry(
    monkeypatch: pytest.MonkeyPatch, spec: DecodeSpec, lengths: list[int], workers: int | None
) -> None:
    monkeypatch.setattr(launch, "EVEN_SLOTS", 1024)  # so that small problems take rounds, too
    assert faults(make_problem(spec, lengths, seed=3), workers) == []


@interpreted
def test_a_group_of_one_chunk_leaves_the_next_counter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk 2 ends one request (a group of its own), starts the next, and is computed last."""
    monkeypatch.setattr(launch, "FAN", 2)
    monkeypatch.setattr(launch, "EVEN_SLOTS", 1024)
    spec = replace(BASE, num_qo_heads=1, num_kv_heads=1, page_size=1)
    # Three programs cut 3200 tokens in chunks of 544, then smaller ones: chunk 2 is tokens 1088 to 1631.
    problem = make_problem(spec, [1300, 1900])
    output, lse, faults = call(problem, lambda *a: kernel(*a, workers=3))
    assert faults + check_outputs(spec, output, lse, *reference(problem)) == []


@interpreted
def test_queries_beyond_the_range_of_fp16() -> None:
    spec = DecodeSpec(4, 1, 64, 16, E4M3)
    problem = make_problem(spec, [40], q_scale=1e6, sm_scale=1e-6)
    assert float(problem.tensors["q"].abs().max()) > 65504
    assert faults(problem) == []


@interpreted
def test_repeats_are_bit_equal_whatever_scratch_holds() -> None:
    problem = make_problem(DecodeSpec(8, 1, 64, 16), [290, 0, 5])
    run = lambda spec, *a: kernel(spec, *a, workers=2)  # noqa: E731
    first = call(problem, run)[:2]
    for _ in range(20):
        for partials, stats, _ in launch._scratch.values():
            partials.view(torch.uint8).fill_(0xFF)
            stats.view(torch.uint8).fill_(0xFF)
        assert bit_equal(call(problem, run)[:2], first)


@interpreted
def test_table_longer_than_the_last_request() -> None:
    problem = make_problem(BASE, [37, 20])
    longer = torch.cat([problem.tensors["kv_indices"], torch.full((9,), 1 << 30, dtype=torch.int32)])
    assert faults(problem.with_tensors(kv_indices=longer)) == []


@interpreted
def test_packed_solution_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, spec in enumerate((DecodeSpec(5, 1, 128, 1), replace(BASE, kv_dtype=E4M3))):
        package = f"packed_triton_{number}"
        for source in pack_solution(find_kernel(Repository(Path()), "evenkv_triton"), spec).sources:
            path = tmp_path / package / source.path
            path.parent.mkdir(exist_ok=True)
            path.write_text(source.content, encoding="utf-8")
        main = __import__(f"{package}.main", fromlist=["run"])
        problem = make_problem(spec, [20, 3])
        output, lse, found = call(problem, lambda spec, *a, run=main.run: run(*a))
        assert found + check_outputs(spec, output, lse, *reference(problem)) == []


# The schedule is integers only: its functions run as plain Python once their jit wrappers are taken off.
_NUMBERS = ("UNIT", "FITTING_GROWTH", "TAIL_PARTS")
_PLAIN: dict[str, Any] = {n: getattr(schedule, n).value for n in _NUMBERS}
for _name in ("tail_size", "round_size", "follow_rounds", "count_chunks", "chunk_of"):
    _PLAIN[_name] = types.FunctionType(getattr(schedule, _name).fn.__code__, _PLAIN)
MIN_UNITS = tuning.MIN_CHUNK_SLOTS // schedule.UNIT.value
EVEN_UNITS = tuning.EVEN_SLOTS // schedule.UNIT.value


@given(
    st.one_of(st.integers(0, 3_000), st.integers(0, 10_000_000)), st.integers(1, 400), st.integers(0, 9_000)
)
@settings(max_examples=150, deadline=None)
def test_schedule_covers_every_unit_once(units: int, workers: int, average: int) -> None:
    tail = _PLAIN["tail_size"](units, workers, average, MIN_UNITS, EVEN_UNITS)
    chunks = _PLAIN["count_chunks"](units, workers, tail)
    assert chunks <= schedule.CHUNKS_PER_WORKER * workers
    state = (0, 0, units, _PLAIN["round_size"](units, workers, tail))
    covered, last_size = 0, math.inf
    for chunk in range(chunks):
        state = _PLAIN["follow_rounds"](chunk, *state, workers, tail)
        first, round_begin, _, size = state
        begin = round_begin + (chunk - first) * size
        end = min(begin + size, units)
        assert begin == covered < end
        assert size <= last_size
        assert size >= MIN_UNITS
        for unit in (begin, end - 1):
            assert _PLAIN["chunk_of"](unit, units, workers, tail) == chunk
        covered, last_size = end, size
    assert covered == units


_COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evenkv.kernels.evenkv_triton import kernel, tuning

cache, page_size, arch, shared = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
scaled, head_dim = cache.startswith("fp8"), 128
chosen = tuning.choose(head_dim, 1 if scaled else 2, 5, shared)
constants = dict(
    K_SLOT_STRIDE=256, V_SLOT_STRIDE=256, MAX_CHUNKS=2112, NUM_KV_HEADS=2,
    GROUP=5, ROWS=chosen.rows, MERGE_ROWS=chosen.merge_rows, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
    EVEN_UNITS=256, TILE=chosen.tile, STREAMS=chosen.streams, RUN=tuning.RUN_TOKENS,
    PAIRS=cache == "fp8e4nv", MIN_UNITS=8, FAN=tuning.FAN, UNROLL=chosen.unroll, SEARCH=tuning.SEARCH_BLOCK,
    COMPUTE=tl.float16 if scaled else tl.bfloat16,
)
if page_size == 1:
    constants["last_page_len_ptr"] = None
if not scaled:
    constants |= {"k_scale_ptr": None, "v_scale_ptr": None}
types = {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_ptr": "*" + cache, "v_ptr": "*" + cache}
types |= {"logit_scale": "fp32"}
types |= {n + "_ptr": "*fp32" for n in ("k_scale", "v_scale", "lse", "acc", "stats")}
types |= {n + "_ptr": "*i32" for n in ("indptr", "indices", "last_page_len", "counters")}
names = kernel.decode_kernel.arg_names
signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
aligned = [n for n in names if n not in constants and n.endswith(("_ptr", "_stride"))]
attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
source = ASTSource(kernel.decode_kernel, signature, constants, attributes)
options = {"num_warps": tuning.WARPS, "num_stages": chosen.stages, "enable_fp_fusion": True}
built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
print(built.metadata.shared)
"""


@pytest.mark.parametrize(
    ("cache", "page_size", "arch", "shared"),
    [
        pytest.param("fp8e4nv", 1, 90, 57_344, id="sm_90-e4m3-ps1"),
        pytest.param("fp8e5", 16, 90, 57_344, id="sm_90-e5m2-ps16"),
        pytest.param("bf16", 16, 80, 40_960, id="sm_80-bf16-ps16"),
    ],
)
def test_compiles_without_a_gpu(cache: str, page_size: int, arch: int, shared: int) -> None:
    """The interpreter forgives what the compiler does not; shared memory must fit four programs an SM."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    ran = subprocess.run(
        [sys.executable, "-c", _COMPILE, cache, str(page_size), str(arch), str(shared)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert 0 < int(ran.stdout) <= shared
