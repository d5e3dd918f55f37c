"""What the options of `evenkv bench` mean: which cases, which file of rows, what is there already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenkv.errors import EvenkvError
from evenkv.paths import Repository

# A run on a GPU machine without git says its commit so.
COMMIT_VARIABLE = "EVENKV_COMMIT"
# Rows of warm runs lie in a folder of this name: beside cold ones they would be taken for them.
WARM_FOLDER = "warm"


@dataclass(frozen=True)
class Options:
    """The parsed command line; `impl` has every implementation when none was named."""

    preset: str
    cases: Path | None
    only: str | None
    impl: list[str]
    resume: bool
    shard: tuple[int, int] | None
    minutes: float | None
    iterations: int | None
    warm: bool
    out: Path | None
    device: str
    as_json: bool

    @property
    def standin(self) -> bool:
        return self.device == "standin"


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """(i, n) of "i/n".

    Raises
    ------
    EvenkvError
        When it is not that.
    """
    if text is None:
        return None
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise EvenkvError(f"--shard: wanted i/n with 1 <= i <= n, got {text!r}.", "For example 1/2.")
    return int(index), int(count)


def parse_implementations(values: Sequence[str] | None) -> list[str]:
    """Names in the order given, each once; all where the option was not given.

    Raises
    ------
    EvenkvError
        When a name is unknown, or the option names none.
    """
    from evenkv.bench.record import IMPLEMENTATIONS

    if not values:
        return list(IMPLEMENTATIONS)
    named = [name.strip() for value in values for name in value.split(",")]
    names = list(dict.fromkeys(name for name in named if name))
    known = ", ".join(IMPLEMENTATIONS)
    if not names:
        raise EvenkvError(
            f"--impl: wanted some of {known}, got {','.join(values)!r}.",
            "Name one, or leave --impl out for all.",
        )
    if unknown := sorted(set(names) - set(IMPLEMENTATIONS)):
        raise EvenkvError(
            f"--impl: unknown {', '.join(unknown)}; wanted some of {known}.", "Correct the name."
        )
    return names


def chosen_cases(options: Options) -> list[Any]:
    """The cases in measuring order, this shard's only."""
    from evenkv.bench import grid, plan

    if options.cases is not None:
        chosen = grid.load_cases(options.cases)
    elif options.preset in grid.PRESETS:
        chosen = grid.PRESETS[options.preset]()
    else:
        raise EvenkvError(
            f"--preset: wanted one of {', '.join(grid.PRESETS)}, got {options.preset!r}.", "Correct it."
        )
    ordered = plan.order(grid.select(chosen, options.only), in_rounds=False)
    return ordered if options.shard is None else share_of(ordered, *options.shard, options)


def share_of(cases: Sequence[Any], index: int, count: int, options: Options) -> list[Any]:
    """Part `index` of `count` of ordered cases."""
    from evenkv.bench import plan

    def cost(case: Any) -> float:
        return plan.case_seconds(case, options.impl, 100, plan.DEFAULT_COPY_GBPS)

    return plan.shard(cases, index, count, cost)


def rows_files(options: Options, repository: Repository) -> list[Path]:
    """Files that may have rows of such runs: that of --out, else the stand-in's, else those of all GPUs."""
    from evenkv.bench.standin import GPU

    if options.out is not None or options.standin:
        return [out_path(options, repository, GPU)]
    return sorted(out_path(options, repository, "x").parent.glob("*.jsonl"))


def out_path(options: Options, repository: Repository, gpu: str) -> Path:
    """The file that rows of this GPU go to."""
    from evenkv.bench.markdown import rows_folder
    from evenkv.bench.record import gpu_file_name
    from evenkv.bench.standin import GPU

    if options.out is not None:
        return options.out
    folder = repository.root / "build" / "roofline" if gpu == GPU else rows_folder(repository)
    return folder / (WARM_FOLDER if options.warm else "") / f"{gpu_file_name(gpu)}.jsonl"


def out_shown(options: Options, repository: Repository) -> Path:
    """The file that rows go to, as a pattern where it depends on a GPU that is not known yet."""
    from evenkv.bench.standin import GPU

    if options.out is not None or options.standin:
        return out_path(options, repository, GPU)
    return out_path(options, repository, "x").with_name("<gpu>.jsonl")


def source_of(repository: Repository) -> Any:
    """Provenance of the kernels here."""
    from evenkv.bench.judge import provenance

    return provenance(repository, os.environ.get(COMMIT_VARIABLE))


def budget_s(options: Options) -> float:
    """Seconds that a plan aims at: those of --minutes, else what such a run is meant to take."""
    from evenkv.bench import plan

    if options.minutes is not None:
        return 60 * options.minutes
    small = options.preset == "smoke" and options.cases is None
    return plan.SMOKE_BUDGET_S if small else plan.FULL_BUDGET_S


def planned(options: Options, cases: Sequence[Any]) -> Any:
    """The estimate of one GPU's run before its copy speed is known."""
    from evenkv.bench import grid, plan

    measured = [case for case in cases if not grid.is_skipped(case)]
    copy_gbps = plan.DEFAULT_COPY_GBPS
    if options.iterations is None:
        return plan.estimate(measured, options.impl, budget_s(options), copy_gbps)
    seconds = plan.total_seconds(measured, options.impl, options.iterations, copy_gbps)
    return plan.Estimate(seconds, options.iterations)


def unsettled(cases: Sequence[Any], rows: Iterable[Any], options: Options, source: Any) -> list[Any]:
    """Cases that a cluster has to measure, whatever GPUs it has."""
    from evenkv.bench.run import settled_cases

    settled = settled_cases(rows, options.impl, source)
    return [case for case in cases if case not in settled]
