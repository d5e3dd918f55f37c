#!/usr/bin/env python3
"""Predict on a CPU what a cut costs on an H200: a fluid model of blocks, fitted to measured rows.

The cut is that of cut.h and choose.h, compiled for the host. Each block begins, streams its share of K and V,
and ends; blocks share what the device can read. Thirteen parameters for each dtype, fitted to the rows of
commit c2976c0 up to 1.2 GiB: it errs by 4.6 % in bf16 (99 rows, rms) and 6.4 % in fp8 (64). It does not know
on which SMs the hardware puts a cluster. It ranks ways to cut before a GPU does; it is no measurement.

    python tools/cut_model.py                                           lab cases, the sources as they are
    python tools/cut_model.py --variants "base,kTailHalvings=0" --cases "logn b8 mean2048 sigma0.5 kv4 bf16"
    python tools/cut_model.py --rows                                    against the committed rows
    python tools/cut_model.py --fit 100                                 parameters from the committed rows

Variants are those of kernel_variants.py (edits of choose.h and cut.h tell; others change nothing here), cases
those of kernel_lab.py.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

import kernel_edits  # noqa: E402
from cut_library import (  # noqa: E402
    BEGIN,
    COUNT,
    END,
    KERNEL,
    NUMBER,
    REQUEST,
    Blocks,
    CutLibrary,
    Room,
    choose_launch,
)
from kernel_cases import choose_cases  # noqa: E402
from kernel_variants import choose_variants, edits_of  # noqa: E402

from evenkv.bench.case import Case  # noqa: E402
from evenkv.bench.record import OURS, by_case, latest, load_rows  # noqa: E402
from evenkv.library.toolchain import find_cxx  # noqa: E402
from evenkv.spec.family import DecodeSpec  # noqa: E402

SMS = 132
# Clusters of 1, 2, ... 8 blocks that the driver says run at once, by blocks an SM.
AT_ONCE = {3: (396, 198, 124, 92, 69, 62, 47, 45), 2: (264, 132, 79, 62, 47, 39, 32, 30)}
ROWS = ROOT / "results/roofline/nvidia-h200.jsonl"
MOST_FITTED_BYTES = int(1.2 * 2**30)


class Parameters(ctypes.Structure):
    """cut_model.cpp: Parameters. KB/us, a share, then us."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in (
            "idle",
            "busy",
            "device",
            "spread",
            "launch",
            "first_begin",
            "later_begin",
            "end",
            "cluster_end",
            "cut_end",
            "merge",
            "eight_parts",
            "nobody",
        )
    ]

    @classmethod
    def of(cls, values: np.ndarray) -> Parameters:
        return cls(*(float(value) for value in values))

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name, _ in self._fields_}


FITTED = {  # by whether the cache is fp8
    False: Parameters(61.5, 31.1, 4313, 0.0257, 1.19, 0.29, 1.69, 1.59, 1.39, 2.10, 1.38, 0.62, 0.92),
    True: Parameters(40.5, 20.3, 4130, 0.0319, 1.60, 1.81, 1.13, 1.51, 0.01, 3.02, 0.15, 0.77, 0.18),
}


def _room_of(resident: int) -> Room:
    return Room(SMS, AT_ONCE[resident]) if resident in AT_ONCE else Room.of(SMS, resident)


@dataclass(frozen=True)
class Launch:
    """What cut_model.cpp simulates of one launch."""

    resident: int  # blocks an SM
    splits: int
    first_part: np.ndarray  # int32 [clusters + 1]
    kilobytes: np.ndarray  # float64 [parts]
    request: np.ndarray  # int32 [parts]
    parts_of: np.ndarray  # int32 [requests of all units]


class CutModel:
    """The simulation, over the cut of one folder of sources."""

    def __init__(self, folder: Path, sources: Path = KERNEL) -> None:
        self.cuts = CutLibrary(folder, sources)
        path = folder / "cut_model.so"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([find_cxx(), "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", path], check=True)
        self._library = ctypes.CDLL(str(path))
        self._library.simulate.restype = ctypes.c_double

    def launch(self, spec: DecodeSpec, lengths: tuple[int, ...], padding: float = 1.0) -> Launch:
        """The clusters of a launch in their order, and their parts; kv_indices `padding` times too long."""
        blocks = Blocks.of(spec)
        pages = [-(-length // spec.page_size) for length in lengths]
        kv_indptr = [0, *np.cumsum(pages).tolist()]
        listed = int(kv_indptr[-1] * padding)
        settled = choose_launch(self.cuts, spec, len(lengths), listed, SMS, room_of=_room_of)
        shape, choice = settled.shape, settled.choice
        visits = self.cuts.visits(shape, choice, kv_indptr, lengths)
        rows = visits.rows[visits.rows[:, COUNT] > 0]
        if choice.uncut:
            numbers = len(lengths)
        else:
            numbers = choice.cut.even_parts * len(lengths) if visits.even else choice.cut.numbers
        size = max(numbers, choice.clusters)
        kilobytes, request = np.full(size, -1.0), np.full(size, -1)
        row_bytes = 2 * spec.head_dim * (1 if spec.is_fp8 else 2) * shape.heads
        tokens = (rows[:, END] - rows[:, BEGIN]) * blocks.tile_tokens
        kilobytes[rows[:, NUMBER]] = tokens * row_bytes / 1024 / choice.splits
        request[rows[:, NUMBER]] = np.where(rows[:, COUNT] > 1, rows[:, REQUEST], -1)
        parts_of = np.zeros(len(lengths), np.int32)
        parts_of[rows[:, REQUEST]] = rows[:, COUNT]
        # Clusters of a number, one a unit, are neighbours; a cluster walks numbers `clusters` apart.
        own = [np.arange(z, max(numbers, z + 1), choice.clusters) for z in range(choice.clusters)]
        units = range(shape.units)
        cut = [np.where(request[n] >= 0, request[n] + unit * len(lengths), -1) for n in own for unit in units]
        sizes = np.repeat([len(n) for n in own], shape.units)
        return Launch(
            settled.resident,
            choice.splits,
            np.r_[0, np.cumsum(sizes)].astype(np.int32),
            np.concatenate([kilobytes[n] for n in own for _ in units]),
            np.concatenate(cut).astype(np.int32),
            np.tile(parts_of, shape.units).astype(np.int32),
        )

    def micros(self, launch: Launch, parameters: Parameters) -> float:
        """Predicted microseconds of a launch, L2 cold."""

        def place(array: np.ndarray) -> ctypes.c_void_p:
            return array.ctypes.data_as(ctypes.c_void_p)

        return self._library.simulate(
            ctypes.byref(parameters),
            SMS,
            launch.resident,
            launch.splits,
            len(launch.first_part) - 1,
            place(launch.first_part),
            place(launch.kilobytes),
            place(launch.request),
            len(launch.parts_of),
            place(launch.parts_of),
        )

    def predict(self, spec: DecodeSpec, lengths: tuple[int, ...], padding: float = 1.0) -> float:
        """Microseconds of a decode step over requests of these lengths."""
        return self.micros(self.launch(spec, lengths, padding), FITTED[spec.is_fp8])


def measured() -> list[tuple[Case, float]]:
    """Cases of the committed rows, and microseconds of evenkv-cuda."""
    cases = by_case(latest(load_rows(ROWS)))
    return [(case, rows[OURS[0]].graph_us) for case, rows in cases.items() if rows[OURS[0]].graph_us]


def fit(model: CutModel, is_fp8: bool, seconds: float) -> None:
    """Prints parameters that fit the rows better, by random steps from those that stand here."""
    rows = [(c, t) for c, t in measured() if c.spec().is_fp8 == is_fp8 and c.kv_bytes() <= MOST_FITTED_BYTES]
    launches = [(model.launch(case.spec(), case.request_lengths()), micros) for case, micros in rows]

    def errors(values: np.ndarray) -> np.ndarray:
        parameters = Parameters.of(values)
        return np.array([np.log(model.micros(launch, parameters) / micros) for launch, micros in launches])

    def cost(values: np.ndarray) -> float:
        return float((np.minimum(np.abs(errors(values)), 0.25) ** 1.5).mean())

    names, values = zip(*FITTED[is_fp8].as_dict().items(), strict=True)
    best = np.array(values)
    least, random, end = cost(best), np.random.default_rng(0), time.monotonic() + seconds
    while time.monotonic() < end:
        tried = best.copy()
        chosen = random.choice(len(best), random.integers(1, 4), replace=False)
        tried[chosen] *= np.exp(0.1 * random.standard_normal(len(chosen)))
        if (found := cost(tried)) < least:
            best, least = tried, found
    rms = float(np.sqrt((errors(best) ** 2).mean()))
    print(f"{'fp8' if is_fp8 else '16 bits'}: {len(launches)} rows, rms {100 * rms:.1f} %")
    print(", ".join(f"{name} {value:.4g}" for name, value in zip(names, best, strict=True)))


def show_rows(model: CutModel) -> None:
    """Prints each row's measured and predicted microseconds, the worst predictions first."""
    found = [(case, us, model.predict(case.spec(), case.request_lengths())) for case, us in measured()]
    for case, us, predicted in sorted(found, key=lambda row: -abs(np.log(row[2] / row[1]))):
        error = 100 * (predicted / us - 1)
        print(f"{case.name:60s} measured {us:9.1f}  predicted {predicted:9.1f}  {error:+5.0f} %")


def edited_sources(variant: str, folder: Path) -> Path:
    """A copy of the kernel's sources with a variant's edits."""
    sources = folder / "sources"
    shutil.copytree(KERNEL, sources)
    contents = {path.name: path.read_text() for path in sources.iterdir()}
    kernel_edits.apply(variant, edits_of(variant), contents)
    for name, content in contents.items():
        (sources / name).write_text(content)
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="base", help="as of kernel_lab.py, comma-separated")
    parser.add_argument("--cases", default="", help="as of kernel_lab.py, comma-separated; default: all")
    parser.add_argument("--rows", action="store_true", help="measured and predicted times of committed rows")
    parser.add_argument("--fit", type=float, metavar="SECONDS", help="better parameters, for each dtype")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if chosen.rows or chosen.fit:
            model = CutModel(folder)
            if chosen.rows:
                show_rows(model)
            for is_fp8 in (False, True) if chosen.fit else ():
                fit(model, is_fp8, chosen.fit)
            return
        models = {}
        for place, variant in enumerate(choose_variants(chosen.variants)):
            own = folder / str(place)
            own.mkdir()
            models[variant] = CutModel(own, edited_sources(variant, own))
        print(f"{'case':38s}" + "".join(f"{variant:>24s}" for variant in models))
        for case in choose_cases([part for part in chosen.cases.split(",") if part]):
            times = [model.predict(case.spec, case.lengths, case.padding) for model in models.values()]
            print(f"{case.name:38s}" + "".join(f"{micros:24.1f}" for micros in times))


if __name__ == "__main__":
    main()
