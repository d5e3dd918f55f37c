"""Writes docs/results.md, docs/plots and the table in docs/kernel.md: `evenkv bench --report`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evenkv.bench import markdown
from evenkv.bench.machine_log import launch_floor_us
from evenkv.bench.summary import Group, groups_of
from evenkv.files import write_atomic
from evenkv.paths import Repository


def write_report(repository: Repository, progress: Callable[[str, float], None]) -> list[Path]:
    """Render the plots of every GPU that has rows, then the pages; nothing is measured.

    Returns
    -------
    list of Path
        The files written, docs/results.md last.
    """
    rows = markdown.committed_rows(repository)
    largest = {}
    for group in groups_of(rows):
        known = largest.get(group.gpu)
        # Plots do not mix timers: the one with more times is drawn.
        if known is None or _times(group) > _times(known):
            largest[group.gpu] = group
    written: list[Path] = []
    for number, group in enumerate(largest.values()):
        from evenkv.bench.plots import write_plots

        progress(f"plots of {group.gpu}", number / len(largest))
        floor = launch_floor_us(markdown.log_of(repository, group.gpu))
        written += write_plots(group, markdown.plots_folder(repository), floor)
    pages = {
        markdown.kernel_page(repository): markdown.kernel_text(repository, rows),
        markdown.results_page(repository): markdown.page_text(
            repository, rows, markdown.plot_names(repository, largest)
        ),
    }
    for page, text in pages.items():
        write_atomic(page, text.encode())
    return [*written, *pages]


def _times(group: Group) -> int:
    return sum(row.status == "ok" for row in group.rows())
