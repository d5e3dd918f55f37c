"""docs/results.md from the rows: the block between its markers, and the plots beside it; and the table of
regimes in docs/kernel.md.

`evenkv bench --report` writes them; nothing is measured, and the same rows give the same text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evenkv.bench.machine_log import Entry, describe, load_log
from evenkv.bench.record import Row, gpu_file_name, load_rows
from evenkv.bench.standin import GPU as STANDIN
from evenkv.bench.summary import Group, groups_of
from evenkv.bench.tables import all_tables, markdown_table, regimes_cells
from evenkv.errors import EvenkvError
from evenkv.evaluate.load import read_text
from evenkv.files import replace_block
from evenkv.paths import Repository

BEGIN = "<!-- roofline:begin -->"
END = "<!-- roofline:end -->"
REGIMES = ("<!-- regimes:begin -->", "<!-- regimes:end -->")
# What the protocol is for; others follow once they have rows.
EXPECTED_GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GB200")
NOT_MEASURED = "not measured yet"


def rows_folder(repository: Repository) -> Path:
    return repository.root / "results" / "roofline"


def results_page(repository: Repository) -> Path:
    return repository.root / "docs" / "results.md"


def kernel_page(repository: Repository) -> Path:
    return repository.root / "docs" / "kernel.md"


def plots_folder(repository: Repository) -> Path:
    return repository.root / "docs" / "plots"


def committed_rows(repository: Repository) -> list[Row]:
    """All rows under results/roofline, files in the order of their names; the stand-in's are left out."""
    paths = sorted(rows_folder(repository).glob("*.jsonl"))
    return [row for path in paths for row in load_rows(path) if row.gpu != STANDIN]


def log_of(repository: Repository, gpu: str) -> list[Entry]:
    """What runs on that GPU saw of the machine."""
    return load_log(rows_folder(repository) / f"{gpu_file_name(gpu)}.jsonl")


def render_block(
    rows: Iterable[Row], plots: Mapping[str, Sequence[str]], machines: Mapping[str, str] | None = None
) -> str:
    """What stands between the markers: one section a GPU (and timer), expected GPUs first.

    Parameters
    ----------
    rows : iterable of Row
    plots : mapping
        By GPU: the plots' paths (PNG), relative to the page.
    machines : mapping, optional
        By GPU: what its log tells (`machine_log.describe`).
    """
    groups = groups_of(rows)
    gpus = [*EXPECTED_GPUS, *sorted({g.gpu for g in groups} - set(EXPECTED_GPUS))]
    parts = []
    for gpu in gpus:
        parts.append(f"## {gpu}")
        own = [group for group in groups if group.gpu == gpu]
        if not own:
            parts.append(f"{gpu}: {NOT_MEASURED}. How to measure it: [reproduce.md](reproduce.md).")
        parts += [told] if own and (told := (machines or {}).get(gpu)) else []
        for group in own:
            parts += [_caption(group), *(markdown_table(cells) for cells in all_tables(group.cases))]
        parts += [f"![{Path(path).stem}]({path})" for path in plots.get(gpu, ())]
    return "\n\n".join(parts)


def page_text(repository: Repository, rows: Sequence[Row], plots: Mapping[str, Sequence[str]]) -> str:
    """docs/results.md with its block rendered anew."""
    told = {gpu: describe(log_of(repository, gpu)) for gpu in {row.gpu for row in rows}}
    machines = {gpu: text for gpu, text in told.items() if text}
    return _with_block(results_page(repository), (BEGIN, END), render_block(rows, plots, machines))


def render_regimes(rows: Iterable[Row]) -> str:
    """The regimes on the GPU that the kernel was tuned on, timer by timer."""
    gpu = EXPECTED_GPUS[0]
    own = [group for group in groups_of(rows) if group.gpu == gpu]
    parts = [part for group in own for part in (_caption(group), markdown_table(regimes_cells(group.cases)))]
    return "\n\n".join(parts) or f"{gpu}: {NOT_MEASURED}."


def kernel_text(repository: Repository, rows: Sequence[Row]) -> str:
    """docs/kernel.md with its table of regimes rendered anew."""
    return _with_block(kernel_page(repository), REGIMES, render_regimes(rows))


def plot_names(repository: Repository, gpus: Iterable[str]) -> dict[str, list[str]]:
    """Plots that are there, by GPU, as the page links them."""
    page, found = results_page(repository).parent, {}
    for gpu in gpus:
        paths = sorted(plots_folder(repository).glob(f"{gpu_file_name(gpu)}-[!.]*.png"))
        found[gpu] = [os.path.relpath(path, page).replace(os.sep, "/") for path in paths]
    return found


def _with_block(page: Path, markers: tuple[str, str], block: str) -> str:
    if not page.is_file():
        begin, end = markers
        raise EvenkvError(f"{page}: no such file.", f"Restore it; the tables go between {begin} and {end}.")
    return replace_block(f"docs/{page.name}", read_text(page), markers, block)


def _caption(group: Group) -> str:
    rows = group.rows()
    measured = [row for row in rows if row.status == "ok"] or rows
    versions = [
        f"{label} {', '.join(found)}"
        for label, field in (("driver", "driver"), ("CUDA", "cuda"), ("torch", "torch"))
        if (found := sorted({value for row in measured if (value := getattr(row, field))}))
    ]
    copies = [row.copy_peak_gbps for row in measured if row.copy_peak_gbps]
    sources = sorted({row.source_hash[:12] for row in measured if row.impl == "evenkv-cuda"})
    commits = sorted({_short(row.commit) for row in measured})
    days = sorted({row.when[:10] for row in measured})
    facts = [
        f"{len(group.cases)} cases, {len(rows)} rows",
        f"timer: {group.timer}",
        *versions,
        f"copy peak {_range(copies)} GB/s" if copies else "",
        f"sources of evenkv-cuda {', '.join(sources)}" if sources else "",
        f"commit {', '.join(commits)}",
        f"measured {days[0]}" + (f" to {days[-1]}" if days[-1] != days[0] else ""),
    ]
    return "; ".join(fact for fact in facts if fact) + "."


def _short(commit: str | None) -> str:
    """Twelve digits, and what git_commit puts behind them."""
    head, dash, rest = (commit or "unknown").partition("-")
    return f"{head[:12]}{dash}{rest}"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if high - low < 1 else f"{low:.0f} to {high:.0f}"
