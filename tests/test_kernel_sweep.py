"""tools/kernel_sweep.py: knobs leave choices as they are until they are set, and then do what they say."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_without_knobs_nothing_changes_in_any_shape(authored: CutLibrary, knobs: CutLibrary) -> None:
    drawn = random.Random(0)
    for _ in range(5000):
        page = drawn.choice((1, 16, 64))
        batch = drawn.choice((1, 2, 7, 31, 32, 33, 100, 256, 1024, 1025))
        indices = min(int(batch * 2 ** drawn.uniform(0, 17) / page) + 1, (1 << 30) // page)
        tiles = (drawn.choice((64, 128)), drawn.choice((16, 32)))
        shape = Shape(
            drawn.randint(1, 32), batch, page, indices, *tiles, drawn.choice((1, 2)), drawn.choice((128, 256))
        )
        room = Room.of(drawn.choice((8, 108, 132)), drawn.choice((2, 3)), drawn.choice((1, 2, 8)))
        invariant, uncut = drawn.choice((0, 0, 2048)), drawn.random() < 0.7
        given = (shape, room, invariant)
        assert bytes(authored.choose(*given, uncut)) == bytes(knobs.choose(*given, uncut)), (given, uncut)
        assert authored.choose_width(*given) == knobs.choose_width(*given), given


def test_every_number_is_asked() -> None:
    replaced = "".join(replacement for _, _, replacement in knob_edits())
    assert set(re.findall(r'#define (k\w+) \(knob\("\1", ', replaced)) == set(numbers())


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


LEVELLED = Shape(8, 64, 16, 64 * 512, 64, 16, 1, 256)  # equal requests, 1.3 waves of them
DEALT = Shape(8, 16, 16, 16 * 64, 64, 16, 1, 256)  # takes smaller clusters to be dealt


def test_what_is_asked_for_stays(knobs: CutLibrary) -> None:
    assert knobs.choose(LEVELLED, H200).cut.even_pages < 512
    for parts in (1, 3):
        with setting({"P": parts}):
            cut = knobs.choose(LEVELLED, H200).cut
        assert cut.even_parts == parts and cut.even_pages >= 512
    assert knobs.choose(DEALT, H200).cut.dealt > 0
    for splits in (1, 2, 4, 8):
        for others in ({}, {"D": 0}, {"D": 40}):
            with setting({"S": splits, **others}):
                choice = knobs.choose(DEALT, H200)
            assert choice.splits == splits and choice.cut.dealt == others.get("D", choice.cut.dealt)
    with setting({"D": 5, "A": 1}):  # fewer than requests: none are dealt, nor alone
        cut = knobs.choose(DEALT, H200).cut
    assert (cut.dealt, cut.alone) == (0, 0)


def test_batch_invariant_bits_have_no_knobs(authored: CutLibrary, knobs: CutLibrary) -> None:
    with setting({"S": 4, "P": 3, "D": 40, "H": 2, "U": 1}):
        choice = knobs.choose(EVEN, H200, 2048)
    assert bytes(choice) == bytes(authored.choose(EVEN, H200, 2048))


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
    for bad, said in (
        ("kWorst=2", "wanted knobs among"),
        ("kWorstTiles=1.5", "INTEGER"),
        ("W", "INTEGER"),
        ("S=9", "1 to 8"),
    ):
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


def test_what_failed_is_left_out_and_told() -> None:
    rows = [("a", [103.0, 53.0, None]), ("b", [13.0, None, None])]
    half, none = kernel_sweep.summarise(["half", "none"], rows)
    assert half.split()[1] == "0.5000" and half.endswith("1 wrong or not launched")
    assert "no times" in none and none.endswith("2 wrong or not launched")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["kernel_sweep.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        kernel_sweep.main()
    return str(caught.value)


def test_bad_arguments_end_it_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ended(monkeypatch) == "kernel_sweep: wanted a CUDA GPU, found none."
    unknown = ended(monkeypatch, "--versus", "W=1;kNoSuch=3")
    assert all(name in unknown for name in ("kNoSuch", *STRUCTURE, *numbers())) and "\n" not in unknown
    assert "wanted part of a name" in ended(monkeypatch, "--cases", "92 tokens")
    ended(monkeypatch, "--rounds", "0")
    assert "--rounds" in capsys.readouterr().err


def test_help_names_every_knob(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, "--help") == "0"
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}: {meaning}" in shown for name, meaning in STRUCTURE.items())
    assert all(name in shown for name in numbers())


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses clusters of 8, is wrong in clusters of 4 and fastest in 6 parts."""

    def call(*arguments: Any) -> None:
        if os.environ.get("S") == "8":
            raise RuntimeError("launching the kernel: cluster too large")
        for result in arguments[-2:]:
            result.fill_(2.0 if os.environ.get("S") == "4" else 1.0)

    def times(
        call: Any, arguments: list[Any], buffer: torch.Tensor, count: int, knobs: dict[str, Any]
    ) -> list[float]:
        with setting(knobs):
            call(*arguments)
        quick = {"4": 20.0}.get(str(knobs.get("S")), 40.0) if knobs else 50.0
        return [quick - (5.0 if str(knobs.get("P")) == "6" else 0.0)] * count

    monkeypatch.setattr(kernel_sweep, "build", lambda spec: call)
    monkeypatch.setattr(kernel_sweep, "times", times)
    monkeypatch.setattr(kernel_sweep.kernel_lab, "build_all", lambda jobs: None)
    monkeypatch.setattr(kernel_sweep.kernel_lab, "draw", lambda case: [torch.full((2, 2), 0.0) for _ in "ab"])
    monkeypatch.setattr(kernel_sweep.kernel_lab, "copy_peak", lambda buffer: 4e6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: torch.full((1,), 0))


CASES = "b8 L8192 kv8 bf16,b1 L131072 kv8 bf16"


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["kernel_sweep.py", "--cases", CASES, *arguments])
    kernel_sweep.main()
    assert not [name for name in (*STRUCTURE, *numbers()) if name in os.environ]
    return capsys.readouterr().out.splitlines()


def test_a_sweep_tells_the_best_right_cut(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        kernel_sweep,
        "cuts_of",
        lambda case: [{"S": s, "P": p} for s in (1, 4, 8) for p in (2, 6)],
    )
    _, first, second = printed(monkeypatch, capsys, "--out", str(tmp_path / "all.jsonl"))
    assert first.startswith("b8 L8192 kv8 bf16") and "    50.0 us" in first
    assert "best of   6:      35.0 us" in first and "S=1 P=6" in first
    assert "2 not launched" in first and first.count("WRONG 1e+00") == 2
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == CASES.split(",")
    assert rows[0]["best"] == [[35.0, {"S": 1, "P": 6}], [40.0, {"S": 1, "P": 2}]]
    assert [None, {"S": 8, "P": 2}] in rows[0]["all"] and len(rows[0]["wrong"]) == 2


def test_settings_are_compared_and_what_is_wrong_is_told(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "versus.jsonl"
    versus = "kWorstTiles=28; S=4;S=8"
    _, first, _, quick, wrong, refused = printed(
        monkeypatch, capsys, "--versus", versus, "--rounds", "2", "--out", str(out)
    )
    assert "50.0     40.0        -        -" in first and "cluster too large" in first
    assert quick.startswith("kWorstTiles=28") and "2 better 0 worse" in quick
    assert wrong.startswith("S=4") and "no times" in wrong and refused.startswith("S=8")
    assert json.loads(out.read_text().splitlines()[0])["us"] == {
        "default": 50.0,
        "kWorstTiles=28": 40.0,
        "S=4": None,
        "S=8": None,
    }


def test_minutes_end_it_between_cases(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(monkeypatch, capsys, "--minutes", "0")[-1] == "2 of 2 cases left."
