"""evenkv_triton: cuts in plain integers; G-cases, geometries, tables, repeats interpreted; compilation."""

from __future__ import annotations

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

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from evenkv.kernels.evenkv_triton import cut, launch, tuning  # noqa: E402
from evenkv.kernels.evenkv_triton import kernel as device_code  # noqa: E402
from evenkv.numerics.cases import BASE, GCase, g_cases, run_case  # noqa: E402
from evenkv.numerics.check import check_outputs  # noqa: E402
from evenkv.numerics.judge import bit_equal, call  # noqa: E402
from evenkv.numerics.problem import Problem, make_problem  # noqa: E402
from evenkv.numerics.reference import reference  # noqa: E402
from evenkv.pack.manifest import find_kernel  # noqa: E402
from evenkv.pack.render import pack_solution  # noqa: E402
from evenkv.paths import Repository  # noqa: E402
from evenkv.spec.family import DecodeSpec  # noqa: E402


@triton.jit
def look_up(
    indptr_ptr,
    found_ptr,  # int32 [programs, 4]: the owner of the program's number, evenness, scale, listed entries
    batch,
    num_indices,
    even_pages,
    most_scale,
    multiplier,
    shift,
    PAGE_SIZE: tl.constexpr,
    SEARCH: tl.constexpr,
):
    number = tl.program_id(0)
    even, scale, listed = cut.read_lengths(indptr_ptr, batch, num_indices, even_pages, most_scale, SEARCH)
    request = cut.find_request(indptr_ptr, number, batch, listed, scale, multiplier, shift, PAGE_SIZE, SEARCH)
    tl.store(found_ptr + 4 * number, request)
    tl.store(found_ptr + 4 * number + 1, even.to(tl.int32))
    tl.store(found_ptr + 4 * number + 2, scale)
    tl.store(found_ptr + 4 * number + 3, listed)


if _BEFORE is None:
    os.environ.pop("TRITON_INTERPRET", None)

interpreted = pytest.mark.skipif(
    type(device_code.decode_kernel).__name__ != "InterpretedFunction",
    reason="Triton compiles here: a GPU is there, or Triton was imported before this module",
)
UNEVEN_32 = {"part_tokens": 32}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
COMPILE = Path(__file__).with_name("triton_compile_script.py")


def kernel(spec: DecodeSpec, *arguments: Any, **forced: int) -> None:
    """The solution's entry; `forced` are launch.decode's programs and part_tokens."""
    named = dict(zip((*spec.input_names, "output", "lse"), arguments, strict=True))
    launch.decode(**{"kv_last_page_len": None, **named, **forced})


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
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Each call's stats [places, 2 * group] as int32. Calls find NaN there: what is read unwritten shows.

    No call may leave a counter behind, wrong tables included: the next one would merge too early.
    """
    get, calls = launch._get_scratch, []

    def get_soiled(*arguments: Any) -> tuple[torch.Tensor, ...]:
        found = get(*arguments)
        for partials in found[:2]:
            partials.view(torch.uint8).fill_(0xFF)
        calls.append(found[1].view(torch.int32).view(arguments[2], -1))
        return found

    monkeypatch.setattr(launch, "_get_scratch", get_soiled)
    yield calls
    for _, _, counters in launch._scratch.values():
        assert not counters.any()


def decode(problem: Problem, **forced: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    return call(problem, lambda spec, *a: kernel(spec, *a, **forced))


def faults(problem: Problem, **forced: int) -> list[str]:
    output, lse, found = decode(problem, **forced)
    return found + check_outputs(problem.spec, output, lse, *reference(problem))


def test_interpreter_is_on_without_a_gpu() -> None:
    """Else everything below would be skipped unnoticed: some module has imported Triton before this one."""
    assert torch.cuda.is_available() or type(device_code.decode_kernel).__name__ == "InterpretedFunction"


@interpreted
@pytest.mark.parametrize("case", g_cases(small=True), ids=lambda case: case.name)
def test_g_case(case: GCase) -> None:
    assert run_case(case, kernel) == []


CUT_CASES = ("G5-zero", "G5-peaked", "G7-", "G8-", "G13-e4m3-by-head", "G14-", "G16-fused-q", "G18-ps16")


@interpreted
@pytest.mark.parametrize(
    "case", [c for c in g_cases(small=True) if c.name.startswith(CUT_CASES)], ids=lambda case: case.name
)
def test_g_case_in_short_parts(case: GCase) -> None:
    assert run_case(case, lambda spec, *a: kernel(spec, *a, part_tokens=64)) == []


@interpreted
@pytest.mark.parametrize(
    ("spec", "lengths", "forced", "places"),
    [
        pytest.param(DecodeSpec(5, 1, 128, 1), [91], {}, 0, id="captured-91-tokens"),
        pytest.param(DecodeSpec(5, 1, 128, 64), [0, 200, 0, 0, 65, 0], UNEVEN_32, 10, id="empty"),
        pytest.param(DecodeSpec(8, 1, 64, 16), [n % 9 for n in range(40)], {"programs": 9}, 0, id="many"),
        pytest.param(DecodeSpec(8, 2, 64, 48), [2500, 16, 1, 16], {"programs": 24}, 2 * 10, id="skew"),
        pytest.param(DecodeSpec(8, 2, 64, 48), [16, 1, 2500], {"part_tokens": 192}, 28, id="skew-of-parts"),
        pytest.param(DecodeSpec(5, 1, 64, 1), [256 * 33], {"programs": 40}, 33, id="merge-of-33"),
        pytest.param(DecodeSpec(8, 2, 64, 16), [600, 620, 520], {"programs": 15}, 12, id="even-in-two"),
        pytest.param(DecodeSpec(8, 2, 64, 1), [800, 800], {"programs": 99}, 2 * 2 * 3, id="even-in-three"),
        pytest.param(DecodeSpec(4, 2, 64, 16), [3000] * 3, {"programs": 5}, 2 * 3 * 2, id="even-in-waves"),
        pytest.param(DecodeSpec(16, 4, 256, 16), [70, 0, 33], UNEVEN_32, 4 * (3 + 2), id="d256"),
        pytest.param(DecodeSpec(32, 1, 128, 16), [150], UNEVEN_32, 5, id="group-32"),
        pytest.param(DecodeSpec(12, 2, 128, 16, E4M3), [300, 0, 20], {"part_tokens": 96}, 2 * 4, id="e4m3"),
        pytest.param(DecodeSpec(7, 1, 64, 1, E5M2), [140], {"part_tokens": 64}, 3, id="e5m2"),
        pytest.param(DecodeSpec(4, 2, 128, 16, "float16"), [140], {}, 0, id="fp16-cache"),
    ],
)
def test_geometry(
    spec: DecodeSpec, lengths: list[int], forced: dict[str, int], places: int, scratch: list[torch.Tensor]
) -> None:
    """`places`: partials of all units, so that a batch is cut as its name says."""
    assert faults(make_problem(spec, lengths, seed=3), **forced) == []
    assert int((scratch[-1] != -1).any(1).sum()) == places


@interpreted
def test_queries_beyond_the_range_of_fp16() -> None:
    spec = DecodeSpec(4, 1, 64, 16, E4M3)
    problem = make_problem(spec, [40], q_scale=1e6, sm_scale=1e-6)
    assert float(problem.tensors["q"].abs().max()) > 65504
    assert faults(problem) == []


@interpreted
@pytest.mark.parametrize(
    ("lengths", "forced"),
    [([290, 70, 0, 5, 100], {"part_tokens": 64}), ([580, 600], {"programs": 8})],
    ids=["uneven", "even"],
)
def test_bits_do_not_depend_on_who_comes_first(
    monkeypatch: pytest.MonkeyPatch, scratch: list[torch.Tensor], lengths: list[int], forced: dict[str, int]
) -> None:
    problem = make_problem(DecodeSpec(8, 2, 64, 16), lengths)
    first = decode(problem, **forced)[:2]
    assert int((scratch[-1] != -1).any(1).sum()) > 4
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    for seed in range(6):

        def shuffle(x: int, y: int, z: int, seed: int = seed) -> None:
            order = torch.randperm(builder.grid_dim[0], generator=torch.Generator().manual_seed(seed))
            place(int(order[x]), y, z)

        monkeypatch.setattr(builder, "set_grid_idx", shuffle)
        assert bit_equal(decode(problem, **forced)[:2], first)


@interpreted
@pytest.mark.parametrize("more", [9, 100])
@pytest.mark.parametrize("forced", [{}, {"part_tokens": 128}, {"programs": 64}], ids=str)
def test_table_longer_than_the_last_request(more: int, forced: dict[str, int]) -> None:
    for lengths in ([37, 20], [500, 3]):
        problem = make_problem(BASE, lengths)
        longer = torch.nn.functional.pad(problem.tensors["kv_indices"], (0, more), value=1 << 30)
        assert faults(problem.with_tensors(kv_indices=longer), **forced) == []


@interpreted
@pytest.mark.parametrize("forced", [{}, {"part_tokens": 64}, {"programs": 64}], ids=str)
def test_table_shorter_than_kv_indptr_counts(forced: dict[str, int]) -> None:
    problem = make_problem(BASE, [300, 40, 20], poison_unused=False)
    shorter = problem.with_tensors(kv_indices=problem.tensors["kv_indices"][:-3].clone())
    output, lse, found = decode(shorter, **forced)
    assert output[1:].isnan().all() and lse[1:].isnan().all()
    right = reference(replace(problem, lengths=(300, 0, 0)))
    assert found + check_outputs(BASE, output[:1], lse[:1], right[0][:1], right[1][:1]) == []


@interpreted
@pytest.mark.parametrize("forced", [{}, {"programs": 99}], ids=str)
def test_kv_indptr_that_decreases_spoils_no_other_request(forced: dict[str, int]) -> None:
    """Pages 0 to 24, then 25 down to 19, which is none, then 19 to 37."""
    problem = make_problem(BASE, [400, 0, 300], poison_unused=False)
    indptr = torch.tensor([0, 25, 19, 38], dtype=torch.int32)
    tables = {"kv_indptr": indptr, "kv_last_page_len": torch.tensor([16, 5, 16], dtype=torch.int32)}
    problem = replace(problem.with_tensors(**tables), lengths=(400, 0, 304))
    assert faults(problem, **forced) == []


@interpreted
def test_more_slots_than_32_bits_add_up_are_refused() -> None:
    problem = make_problem(replace(BASE, page_size=256), [5])
    many = torch.zeros((cut.MOST_SLOTS // 256) + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_indices: wanted at most 1073741824 slots"):
        decode(problem.with_tensors(kv_indices=many))


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


# Cuts are integers only: without their jit wrappers, these functions take tensors of all numbers at once.
_PLAIN: dict[str, Any] = {
    "tl": types.SimpleNamespace(
        int32=torch.int64,  # so that what would not fit 32 bits is seen below
        where=torch.where,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    )
}
for _name in ("scale_of", "divide_scaled", "find_part", "steps_of_part", "place_of"):
    _PLAIN[_name] = types.FunctionType(getattr(cut, _name).fn.__code__, _PLAIN)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Page size, lengths, and entries of kv_indices: as many as are listed, or more."""
    page_size = draw(st.sampled_from([1, 16, 48]))
    longest = draw(st.sampled_from([20, 700, 40_000]))
    usual = draw(st.integers(0, longest))
    length = st.one_of(st.just(usual), st.integers(0, longest), st.integers(usual * 9 // 10, usual))
    lengths = draw(st.lists(length, min_size=1, max_size=24))
    listed = sum(-(-length // page_size) for length in lengths)
    return page_size, lengths, draw(st.one_of(st.just(listed), st.integers(listed, 40 * listed + 40)))


@given(
    batches(),
    st.integers(1, 8),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([1, 8, 60, 528]),
    st.one_of(st.none(), st.none(), st.integers(1, 3_000)),
)
@settings(max_examples=400, deadline=None)
def test_every_token_is_in_one_part(
    batch: tuple[int, list[int], int], units: int, step: int, programs: int, part_tokens: int | None
) -> None:
    page_size, lengths, num_indices = batch
    choice = cut.choose_cut(units, len(lengths), page_size, num_indices, step, programs, part_tokens)
    even_parts, even_tokens, even_pages, multiplier, shift, most_scale, places = choice.cut
    assert 1 << 31 <= multiplier < 1 << 32 and 31 <= shift < 62
    pages = torch.tensor([-(-length // page_size) for length in lengths])
    slots = (pages.cumsum(0) - pages) * page_size
    scale = int(_PLAIN["scale_of"](pages.sum(), num_indices, most_scale))
    even = int(pages.max()) <= even_pages >> scale
    if choice.uncut:
        assert even_parts == 1 and choice.numbers == len(lengths)
        assert max(lengths) <= tuning.WORST_STEPS * step or len(lengths) == 1
        return

    number = torch.arange(choice.numbers)
    begins = _PLAIN["divide_scaled"](slots, scale, multiplier, shift) + torch.arange(len(lengths))
    assert (begins[1:] > begins[:-1]).all()
    owner = number // even_parts if even else torch.searchsorted(begins, number, right=True) - 1
    number, owner = number[owner < len(lengths)], owner[owner < len(lengths)]
    length = torch.tensor(lengths)[owner]
    numbering = (even, scale, even_parts, even_tokens, multiplier, shift)
    index, count, first = _PLAIN["find_part"](number, owner, slots[owner], length, *numbering)
    begin, end = _PLAIN["steps_of_part"]((length + step - 1) // step, index, count)
    mine = index < count
    assert (index >= 0).all() and (count <= choice.numbers).all()
    for request, tokens in enumerate(lengths):
        own = mine & (owner == request)
        assert index[own].tolist() == list(range(int(count[own][0])))
        steps = list(zip(begin[own].tolist(), end[own].tolist(), strict=True))
        assert [b for b, _ in steps] == [0, *(e for _, e in steps[:-1])]
        assert steps[-1][1] == -(-tokens // step)
        assert len(steps) == 1 or all(b < e for b, e in steps)
        if not even:
            assert all((e - b) * step <= choice.part_tokens for b, e in steps)
    partials = mine & (count > 1)
    place = _PLAIN["place_of"](index, first, count, torch.tensor(even))[partials].tolist()
    assert len(set(place)) == len(place) and all(0 <= p < places for p in place)
    counters = first[partials & (index == 0)].tolist()
    assert len(set(counters)) == len(counters) and all(0 <= c < places for c in counters)


def test_shapes_choose() -> None:
    """What a device of 528 programs makes of the batches that the measurements speak of."""

    def parts(units: int, batch: int, tokens: int) -> int:
        return cut.choose_cut(units, batch, 16, batch * tokens // 16, 32, 528).cut.even_parts

    assert [parts(8, 1, 131_072), parts(8, 32, 4096), parts(8, 256, 8192)] == [66, 2, 1]
    assert [parts(8, 64, 4096), parts(8, 128, 4096), parts(8, 128, 1024)] == [1, 2, 1]
    assert parts(1, 1, 131_072) == tuning.MOST_PARTS
    one_long = cut.choose_cut(1, 64, 1, 131_072 + 63 * 1024, 32, 528)
    assert one_long.part_tokens == 1536 and one_long.cut.even_pages == 3820
    assert cut.choose_cut(1, 1, 1, 91, 32, 528).uncut
    assert cut.choose_cut(8, 2000, 1, 2_000_000, 32, 528).cut.even_pages == cut.NEVER_EVEN


@interpreted
@pytest.mark.parametrize("batch", [1, 5, 300])
@pytest.mark.parametrize("padded", [1, 5])
def test_owners_and_evenness_are_found(batch: int, padded: int) -> None:
    """Against plain loops; blocks of 64 entries, so that 300 requests are searched in steps."""
    lengths = [(37 * i * i + 11 * i) % 90 for i in range(batch)]
    indptr = torch.tensor([sum(lengths[:i]) for i in range(batch + 1)], dtype=torch.int32)
    num_indices = padded * int(indptr[-1])
    programs = 25
    found = torch.zeros(programs, 4, dtype=torch.int32)
    for even_pages in (-1, 10, 89 << 2, cut.ALWAYS_EVEN.value):
        bits = 8
        numbers = (batch, num_indices, even_pages, 2, 1 << 31, 31 + bits)  # parts of 256 tokens
        look_up[(programs,)](indptr, found, *numbers, PAGE_SIZE=1, SEARCH=64)
        scale = 2 if padded == 5 and indptr[-1] else min(2, 2 * (indptr[-1] == 0))
        begins = [(int(slot) << scale >> bits) + r for r, slot in enumerate(indptr)]
        for number in range(programs):
            assert int(found[number, 0]) == max(r for r, b in enumerate(begins) if b <= number)
        assert found[:, 1].tolist() == [int(max(lengths) <= even_pages >> scale)] * programs
        assert found[:, 2:].tolist() == [[scale, int(indptr[-1])]] * programs


@pytest.mark.parametrize(
    ("cache", "page_size", "arch", "shared", "group", "is_cut"),
    [
        pytest.param("fp8e4nv", 1, 90, 57_344, 5, 1, id="sm_90-e4m3-ps1"),
        pytest.param("fp8e4nv", 16, 90, 57_344, 4, 1, id="sm_90-e4m3-ps16"),
        pytest.param("fp8e5", 16, 90, 57_344, 5, 1, id="sm_90-e5m2-ps16"),
        pytest.param("bf16", 16, 90, 57_344, 4, 1, id="sm_90-bf16-ps16"),
        pytest.param("bf16", 1, 90, 57_344, 5, 0, id="sm_90-bf16-ps1-uncut"),
        pytest.param("bf16", 16, 80, 40_960, 5, 1, id="sm_80-bf16-ps16"),
    ],
)
def test_compiles_without_a_gpu(
    cache: str, page_size: int, arch: int, shared: int, group: int, is_cut: int
) -> None:
    """The interpreter forgives what the compiler does not; four programs must fit an SM, none may spill."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    ran = subprocess.run(
        [sys.executable, str(COMPILE), cache, *map(str, (page_size, arch, shared, group, is_cut))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    taken, spilled, registers = map(int, ran.stdout.split())
    assert 0 < taken <= shared
    assert spilled == 0 and registers * 32 * tuning.WARPS * tuning.PROGRAMS_PER_SM <= 65_536
