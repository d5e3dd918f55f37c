"""tools/cut_model.py: what it is told of a launch, and how near it comes to the committed rows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import cut_model
from kernel_cases import SCOUT, choose_cases

from evenkv.numerics.bytes import kv_bytes
from evenkv.spec.family import DecodeSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> cut_model.CutModel:
    return cut_model.CutModel(tmp_path_factory.mktemp("cut_model"))


@pytest.mark.parametrize(
    "name",
    [
        "b1 L1024 kv8 bf16",  # whole
        "b1 L32768 kv8 fp8",  # parts of clusters
        "b128 L2048 kv4 fp8",  # two heads a block
        "logn b32 mean8192 sigma1 kv8 bf16",  # uneven, with a tail
        "4096+16+16+16+16+16+16+3000 kv2 bf16",  # clusters that walk several numbers
        "h5 91+5668",
    ],
)
def test_a_launch_holds_all_bytes(model: cut_model.CutModel, name: str) -> None:
    (case,) = choose_cases([name])
    launch = model.launch(case.spec, case.lengths)
    streamed = launch.kilobytes[launch.kilobytes > 0].sum() * launch.splits * 1024
    wanted = kv_bytes(case.spec, case.lengths)
    tile_bytes = 32 * 2 * case.spec.head_dim * 2 * case.spec.num_kv_heads
    assert wanted <= streamed <= wanted + len(case.lengths) * tile_bytes
    assert launch.first_part[-1] == len(launch.kilobytes) == len(launch.request)
    assert (np.diff(launch.first_part) >= 1).all()
    cut = np.bincount(launch.request[launch.request >= 0], minlength=len(launch.parts_of))
    assert (cut[launch.parts_of > 1] == launch.parts_of[launch.parts_of > 1]).all()
    assert (cut[launch.parts_of <= 1] == 0).all()


def test_it_is_near_the_committed_rows(model: cut_model.CutModel) -> None:
    found = [
        model.predict(case.spec(), case.request_lengths()) / micros for case, micros in cut_model.measured()
    ]
    assert len(found) > 100
    assert float(np.median(np.abs(np.log(found)))) < 0.06


def test_time_follows_bytes_and_balance(model: cut_model.CutModel) -> None:
    spec = DecodeSpec(32, 8, 128, 16)
    one = model.predict(spec, (4096,) * 32)
    assert 1.8 * one < model.predict(spec, (8192,) * 32) < 2.1 * one
    assert model.predict(spec, (16,)) < 10
    assert model.predict(SCOUT, (0,)) < 10
    assert model.predict(spec, (4096,) * 32, padding=3.0) == pytest.approx(one, rel=0.2)
    fitted = cut_model.FITTED[False].as_dict()
    slower = cut_model.Parameters(**{**fitted, "device": fitted["device"] / 2})
    launch = model.launch(spec, (4096,) * 32)
    assert model.micros(launch, slower) > 1.7 * model.micros(launch, cut_model.FITTED[False])


def test_variants_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--variants", "base,kLargeTailHalvings=0", "--cases", "logn b64 mean8192 sigma1 kv8 fp8"]
    monkeypatch.setattr(sys, "argv", ["cut_model.py", *arguments])
    cut_model.main()
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[1:] == ["base", "kLargeTailHalvings=0"]
    base, no_tail = (float(word) for word in row.split()[-2:])
    assert base < 0.95 * no_tail
