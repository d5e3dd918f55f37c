"""tools/kernel_sweep.py: knobs leave choices as they are until they are set, and then do what they say."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import kernel_edits  # noqa: E402
import kernel_sweep  # noqa: E402
from cut_library import KERNEL, CutLibrary, Room, Shape, choose_launch  # noqa: E402
from kernel_cases import choose_cases  # noqa: E402
from kernel_knobs import STRUCTURE, knob_edits, numbers, parse_setting, setting  # noqa: E402

from evenkv.spec.family import DecodeSpec  # noqa: E402

H200 = Room.of(132, 3)
EVEN = Shape(8, 8, 16, 8 * 512, 64, 16, 1, 256)  # 8 requests of 8,192 tokens on average, kv8, 16 bits


@pytest.fixture(scope="module")
def authored(tmp_path_factory: pytest.TempPathFactory) -> CutLibrary:
    return CutLibrary(tmp_path_factory.mktemp("authored"))


@pytest.fixture(scope="module")
def knobs(tmp_path_factory: pytest.TempPathFactory) -> CutLibrary:
    folder = tmp_path_factory.mktemp("knobs")
    contents = {path.name: path.read_text() for path in KERNEL.glob("*.h")}
    kernel_edits.apply("knobs", knob_edits(), contents)
    for name, text in contents.items():
        (folder / name).write_text(text)
    return CutLibrary(folder, folder)


def test_without_knobs_nothing_changes(authored: CutLibrary, knobs: CutLibrary) -> None:
    heads = ((5, 1, 1), (32, 4, 16), (32, 8, 16), (32, 32, 16))
    for (q, kv, page), dtype, batch, tokens in itertools.product(
        heads, ("bfloat16", "float8_e4m3fn"), (1, 8, 32, 128, 256), (64, 1024, 9000, 131_072)
    ):
        spec = DecodeSpec(q, kv, 128, page, dtype)
        launches = [
            choose_launch(library, spec, batch, batch * -(-tokens // page), 132)
            for library in (authored, knobs)
        ]
        assert bytes(launches[0].choice) == bytes(launches[1].choice), (spec.short_name, batch, tokens)
        assert launches[0].heads == launches[1].heads and launches[0].few == launches[1].few


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("S=4,P=3", {"splits": 4, "even_parts": 3}),
        ("U=1,D=0,H=2,TS=25,TT=16", {"tail_scale": 2, "dealt": 0, "uncut": False}),
        ("U=1,D=0,H=0", {"tail_scale": 0}),
        ("S=1,U=1,D=40", {"dealt": 40, "numbers": 40, "alone": 0}),
        ("S=2,U=1,D=40,A=1", {"dealt": 40, "alone": 1}),
        ("kEvenBlocks=1", {"even_parts": 1}),
    ],
)
def test_knobs_do_what_they_say(knobs: CutLibrary, text: str, wanted: dict[str, int]) -> None:
    default = knobs.choose(EVEN, H200)
    with setting(parse_setting(text)):
        choice = knobs.choose(EVEN, H200)
    for name, value in wanted.items():
        assert getattr(choice if hasattr(choice, name) else choice.cut, name) == value, name
    assert bytes(choice) != bytes(default)
    assert bytes(knobs.choose(EVEN, H200)) == bytes(default), "a knob outlived its setting"


def test_width_is_a_knob(knobs: CutLibrary) -> None:
    shape = Shape(8, 4, 16, 4 * 64, 128, 32, 1, 128)
    found = {}
    for width in (1, 2, 3):
        with setting({"W": width}):
            found[width] = knobs.choose_width(shape, H200, 0)
    assert found == {1: (1, False), 2: (2, True), 3: (2, False)}


def test_settings_are_parsed_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_setting("kWorstTiles=28, W=2") == {"kWorstTiles": "28", "W": "2"}
    assert parse_setting("") == {}
    for bad, said in (("kWorst=2", "wanted knobs among"), ("kWorstTiles=1.5", "INTEGER"), ("W", "INTEGER")):
        with pytest.raises(SystemExit, match=said):
            parse_setting(bad)
    monkeypatch.setenv("kTailTokens", "1")  # of somebody else: not part of a setting
    with setting({"S": 2}):
        assert os.environ["S"] == "2" and "kTailTokens" not in os.environ
    assert not {"S", "kTailTokens"} & set(os.environ)
    assert "kFewBlocks" not in numbers() and not set(numbers()) & set(STRUCTURE)


def test_every_case_has_cuts_of_its_kind() -> None:
    even, uneven, single = choose_cases(
        ["b8 L8192 kv8 fp8", "logn b8 mean8192 sigma1 kv4 bf16", "b1 L131072 kv8 bf16"]
    )
    cuts = {case.name: list(kernel_sweep.cuts_of(case)) for case in (even, uneven, single)}
    assert {cut["W"] for cut in cuts[even.name]} == {1, 2, 3}
    assert all("D" not in cut or cut["D"] == 0 for cut in cuts[even.name] + cuts[single.name])
    assert any(cut.get("D", 0) > 8 for cut in cuts[uneven.name])
    assert not any("P" in cut for cut in cuts[uneven.name])
    for own in cuts.values():
        assert len(own) > 50 and len({tuple(cut.items()) for cut in own}) == len(own)


def test_settings_are_summarised() -> None:
    rows = [("a", [103.0, 53.0, 103.0]), ("b", [13.0, 13.0, 23.0])]
    half, more = kernel_sweep.summarise(["half", "more"], rows)
    assert half.split()[1] == "0.7071" and "1 better 0 worse" in half and "0.500 a" in half
    assert more.split()[1] == "1.4142" and "0 better 1 worse" in more and "2.000 b" in more
