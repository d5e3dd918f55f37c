"""tools/kernel_lab.py: its edits must keep hitting the sources they name, and what they make must compile."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import kernel_cases  # noqa: E402
import kernel_lab  # noqa: E402
import kernel_notes  # noqa: E402
import kernel_variants  # noqa: E402

from evenkv.errors import EvenkvError  # noqa: E402
from evenkv.library import toolchain  # noqa: E402
from evenkv.pack.compile import compile_check  # noqa: E402
from evenkv.pack.manifest import load_kernel  # noqa: E402
from evenkv.spec.family import SEED_DEFINITION, parse_name  # noqa: E402

try:
    toolchain.find_nvcc()
    HAS_NVCC = True
except EvenkvError:
    HAS_NVCC = False

SEED = parse_name(SEED_DEFINITION)
INSTRUMENTS = [f"base{kernel_lab.STAMPED}", f"base{kernel_lab.TRACED}12", "3 parts of 2"]
AUTHORED = kernel_lab.find_kernel(kernel_lab.Repository(Path()), "evenkv_cuda").folder


@pytest.mark.parametrize("variant", [*kernel_variants.VARIANTS, *INSTRUMENTS])
def test_every_edit_hits_and_changes_the_solution(variant: str) -> None:
    solution = kernel_lab.variant_solution(variant, SEED)
    assert solution.name == f"evenkv_cuda_h5_kv1_d128_ps1_{variant}"
    sources = {source.path: source.content for source in solution.sources}
    for file, text, replacement in kernel_lab.edits_of(variant):
        assert text != replacement and replacement in sources[file]
        assert (AUTHORED / file).read_text().count(text) == 1


# fp8 has pairs of heads, and the most code.
DEFINITIONS = ("gqa_paged_decode_h32_kv8_d128_ps16", "gqa_paged_decode_fp8_h32_kv4_d128_ps16")


@pytest.mark.skipif(not HAS_NVCC, reason="no CUDA toolkit on this machine")
@pytest.mark.parametrize(
    "variant",
    [*INSTRUMENTS, "many pairs", "2 warps", "8 warps", "3 stages", "short rows+short blocks"],
)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_variants_compile_without_spills(variant: str, name: str, tmp_path: Path) -> None:
    """Those that change the device's code."""
    shutil.copytree(AUTHORED, tmp_path / "evenkv_cuda")
    for file, text, replacement in kernel_lab.edits_of(variant):
        path = tmp_path / "evenkv_cuda" / file
        path.write_text(path.read_text().replace(text, replacement))
    (result,) = compile_check(
        [load_kernel(tmp_path / "evenkv_cuda")], [parse_name(name)], archs=["sm_90a"], jobs=1
    )
    assert result.ok, result.log


def test_an_edit_that_misses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_variants.VARIANTS, "stale", [("tuning.cuh", "no such text", "")])
    with pytest.raises(SystemExit, match=r"stale: tuning\.cuh does not hold 'no such text'"):
        kernel_lab.variant_solution("stale", SEED)
    monkeypatch.setitem(kernel_variants.VARIANTS, "gone", [("streaming_warps.cuh", "", "")])
    with pytest.raises(SystemExit, match=r"gone: streaming_warps\.cuh does not hold ''"):
        kernel_lab.variant_solution("gone", SEED)


def test_a_variant_of_a_kernel_folder_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(AUTHORED, tmp_path / "evenkv_cuda")
    tuning = tmp_path / "evenkv_cuda" / "tuning.cuh"
    tuning.write_text(tuning.read_text() + "// elsewhere\n")
    solution = kernel_lab.variant_solution(f"base@{tmp_path}{kernel_lab.STAMPED}", SEED)
    (source,) = (s.content for s in solution.sources if s.path == "tuning.cuh")
    assert source.endswith("// elsewhere\n")


def test_numbers_take_any_value_and_variants_add_up() -> None:
    ((file, text, replacement),) = kernel_variants.edits_of("kGrowTiles=77")
    assert (file, replacement) == ("choose.h", " kGrowTiles = 77") and text.startswith(" kGrowTiles = ")
    *first, (file, _, replacement) = kernel_variants.edits_of("always cut+kStages=3")
    assert first == kernel_variants.VARIANTS["always cut"]
    assert (file, replacement) == ("tuning.cuh", " kStages = 3")
    assert kernel_variants.choose_variants("base,kGrowTiles,kStages=3") == [
        "base",
        *(f"kGrowTiles={value}" for value in kernel_variants.NUMBERS["kGrowTiles"]),
        "kStages=3",
    ]


@pytest.mark.parametrize("variant", ["rounds", "kNoSuch=3", "kStages=", "base+", ""])
def test_an_unknown_variant_gives_one_line(variant: str) -> None:
    with pytest.raises(SystemExit, match="wanted base, exit at entry, always cut") as caught:
        kernel_variants.edits_of(variant)
    assert repr(variant.rpartition("+")[2]) in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_output_is_told_beside_a_right_lse() -> None:
    output, lse = torch.full((4, 128), 0.01), torch.full((4,), 12.0)
    assert kernel_lab.judged([output, lse], [output, lse], 0.876) == "88%"
    assert kernel_lab.judged([output * 1.01, lse], [output, lse], 0.876) == "WRONG 1e-02"
    assert kernel_lab.judged([output, lse + 1], [output, lse], 0.876) == "WRONG 8e-02"
    assert kernel_lab.judged([output * float("nan"), lse], [output, lse], 0.876) == "WRONG nan"


def test_cases_by_part_and_spelled_out() -> None:
    assert kernel_lab.choose_cases([]) == kernel_cases.lab_cases()
    names = [case.name for case in kernel_lab.choose_cases(["91 tokens", "b3 L77 kv4 fp8", "b256"])]
    assert names == ["91 tokens h5", "b3 L77 kv4 fp8", "b256 L8192 kv8 bf16", "b256 L8192 kv8 fp8"]
    # A name that is spelled out stands for itself, though "jitter b32 L4096 kv8 bf16" holds it.
    assert len(kernel_lab.choose_cases(["b32 L4096 kv8 bf16"])) == 1


def test_spelled_cases() -> None:
    scout = kernel_cases.spelled_case("h5 91+5668")
    assert (scout.spec.name, scout.lengths) == (SEED.name, (91, 5668))
    assert kernel_cases.spelled_case("h5 b64 L8192").lengths == (8192,) * 64
    listed = kernel_cases.spelled_case("91+5668 kv4 fp8")
    assert listed.spec.name == "gqa_paged_decode_fp8_h32_kv4_d128_ps16"

    jitter = kernel_cases.spelled_case("jitter b32 L4096 kv8 bf16")
    assert jitter.spec.name == "gqa_paged_decode_h32_kv8_d128_ps16"
    assert len(set(jitter.lengths)) > 16 and 3276 <= min(jitter.lengths) <= max(jitter.lengths) <= 4916
    assert jitter == kernel_cases.spelled_case("jitter b32 L4096 kv8 bf16")

    drawn = kernel_cases.spelled_case("logn b4000 mean8192 sigma1 kv8 bf16").lengths
    assert statistics.mean(drawn) == pytest.approx(8192, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(8192 * 2.718 ** (-1 / 2), rel=0.05)
    padded = kernel_cases.spelled_case("padded 1.9 b8 L4096 kv8 bf16")
    assert (padded.padding, padded.lengths) == (1.9, (4096,) * 8)
    assert kernel_cases.spelled_case("padded 2 h5 91+5668").lengths == scout.lengths
    assert kernel_cases.spelled_case("b8 L4096 kv8 bf16").padding == scout.padding == 1
    assert set(kernel_cases.spelled_case("logn b4 mean512 sigma0 kv8 bf16").lengths) <= {511, 512}


@pytest.mark.parametrize(
    "name",
    [
        "92 tokens",
        "b0 L64 kv8 bf16",
        "b8 L1025 kv8",
        "b8 L1024 kv8 fp4",
        "b8 L1024 kv5 bf16",
        "h5 b8 L1024 kv8 bf16",
        "91+ kv8 bf16",
        "b2000 L1000000 kv8 bf16",
        "b8 L0 kv8 bf16",
        "logn b8 mean0 sigma1 kv8 bf16",
        "logn b8 mean64 sigma1. kv8 bf16",
    ],
)
def test_an_unknown_case_gives_one_line(name: str) -> None:
    with pytest.raises(SystemExit, match="wanted part of a name in the list") as caught:
        kernel_lab.choose_cases([name])
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--variants", "rounds"], "variant 'rounds': wanted base,"),
        (["--cases", "92 tokens"], "case '92 tokens': wanted part of a name"),
        (["--variants", "kGrowTiles", "--cases", "b8 L1024 kv8 bf16"], "wanted a CUDA GPU"),
    ],
)
def test_bad_names_end_the_lab_with_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_lab.py", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=said) as caught:
        kernel_lab.main()
    assert "\n" not in str(caught.value)


def test_help_names_every_variant() -> None:
    ran = subprocess.run(
        [sys.executable, str(TOOLS / "kernel_lab.py"), "--help"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    shown = " ".join(ran.stdout.split())
    assert all(name in shown for name in (*kernel_variants.NAMED, *kernel_variants.NUMBERS))


def test_cases_are_distinct_and_the_captured_step_is_whole() -> None:
    cases = {case.name: case for case in kernel_cases.lab_cases()}
    assert len(cases) == len(kernel_cases.lab_cases()) == 24
    assert sum(cases["63 requests h5"].lengths) == 19134


def _number(name: str) -> int:
    return next(number for number, point in enumerate(kernel_notes.POINTS) if point.name == name)


def test_stamps_become_a_table_of_microseconds() -> None:
    width = 2 * len(kernel_notes.POINTS)
    notes = [0] * 8 * width
    for block in range(5):  # the others did not run
        row, entered = block * width, 1000 + 100 * block
        for name, first, last in (
            ("start", entered, entered + 7),
            ("tiles through", entered + 1000, entered + 2000 + 1000 * block),
        ):
            notes[row + 2 * _number(name)] = ~first
            notes[row + 2 * _number(name) + 1] = last
    rows = {line[:22].rstrip(): line[22:].split() for line in kernel_notes.stamp_table(notes).splitlines()}
    assert rows["us"] == ["blocks", "min", "median", "max"]
    assert rows["start"] == ["5", "0.0", "0.2", "0.4"]
    assert rows["tiles through, first"] == ["5", "1.0", "1.2", "1.4"]
    assert rows["tiles through, last"] == ["5", "2.0", "4.2", "6.4"]
    assert rows["parts merged"] == ["0"]
    assert kernel_notes.stamp_table([0] * width) == "no stamps"


def test_traces_become_a_table_of_cycles() -> None:
    notes = [0] * kernel_notes.TRACE_NOTES
    for warp, begin in ((0, 2**32 - 6), (3, 50)):  # the clock runs over
        for step, (name, since) in enumerate(
            (("start", 0), ("tile asked for", 100), ("tile there", 130), ("tile asked for", 140 + warp))
        ):
            clock = (begin + since) % 2**32
            notes[warp * kernel_notes.MOST_STEPS + step] = _number(name) + 1 << 32 | clock
    rows = {line[:18].rstrip(): line[18:].split() for line in kernel_notes.trace_table(notes).splitlines()}
    assert rows["cycles"] == ["visits", "min", "median", "max", "from", "to"]
    assert rows["tile asked for"] == ["4", "10", "56", "100", "100", "143"]
    assert rows["tile there"] == ["2", "30", "30", "30", "130", "130"]
    assert "start" not in rows
    assert kernel_notes.trace_table([0] * kernel_notes.TRACE_NOTES) == "no steps"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_notes_are_taken_where_the_keys_lie(dtype: torch.dtype) -> None:
    count = 1001
    query, keys = torch.zeros(2, 32, 128), torch.zeros(3, 16, 8, 128).to(dtype)
    arguments = [query, keys, keys.clone(), *torch.zeros(3, 2), 0.1, query.clone(), query[..., 0]]

    def call(*given: object) -> None:
        assert given[1] is given[2] and given[-3] == kernel_notes.TAKE
        assert given[0] is query and all(a is b for a, b in zip(given[3:6], arguments[3:6], strict=True))
        place = given[1].view(torch.uint8).flatten().view(torch.int64)
        place[:count] = torch.arange(count) << 40

    assert kernel_lab._take(call, arguments, count) == [number << 40 for number in range(count)]
