"""Plots of one GPU's rows, PNG and SVG. matplotlib is optional, of the extra `bench`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evenkv.bench import grid
from evenkv.bench.case import Case
from evenkv.bench.record import OURS, Row, gpu_file_name
from evenkv.bench.summary import CaseRows, Group, implementations_of, usable
from evenkv.errors import EvenkvError
from evenkv.evaluate.environment import INSTALL
from evenkv.files import write_all_atomic

# Colours that people with any colour vision tell apart (Okabe and Ito), and a mark each.
_STYLES = {
    "evenkv-cuda": ("#d55e00", "o"),
    "evenkv-triton": ("#e69f00", "s"),
    "flashinfer-tc": ("#0072b2", "^"),
    "flashinfer-cc": ("#56b4e9", "v"),
    "flashinfer-xqa": ("#009e73", "D"),
    "fa3": ("#cc79a7", "P"),
}
_OTHER_STYLE = ("#555555", "x")
# As pixels in the SVG too: a mark for each of thousands of rows would make it megabytes.
_POINTS: dict[str, Any] = {"linewidths": 0, "rasterized": True}
# Suffix, dots an inch, and metadata that would change from run to run.
_FILES: tuple[tuple[str, int, dict[str, None]], ...] = (
    ("png", 110, {"Software": None}),
    ("svg", 80, {"Date": None, "Creator": None}),
)
_KINDS = (("bfloat16", "bf16"), ("float8_e4m3fn", "fp8"))


def write_plots(group: Group, folder: Path, launch_floor_us: float | None = None) -> list[Path]:
    """Draw everything that the rows allow into `<gpu>-<plot>.png` and `.svg`; the same rows, the same files.

    Parameters
    ----------
    launch_floor_us : float, optional
        Of a kernel that does nothing: rows do not know it, and without it the plot of times draws none.

    Raises
    ------
    EvenkvError
        When matplotlib is missing.
    """
    pyplot = _pyplot()
    contents: dict[Path, bytes] = {}
    draws = {**_PLOTS, "time": partial(_time, floor_us=launch_floor_us)}
    for name, draw in draws.items():
        figure = draw(pyplot, group)
        if figure is None:
            continue
        for suffix, dpi, metadata in _FILES:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, dpi=dpi, metadata=metadata)
            figure.set_layout_engine("none")  # The first file's layout serves the second.
            drawn = _fewer_colours(buffer) if suffix == "png" else buffer.getvalue()
            contents[folder / f"{gpu_file_name(group.gpu)}-{name}.{suffix}"] = drawn
        pyplot.close(figure)
    write_all_atomic(contents)
    return list(contents)


def _fewer_colours(png: io.BytesIO) -> bytes:
    """A third of the bytes: these files are committed with each record."""
    from PIL import Image  # matplotlib's own

    small = io.BytesIO()
    Image.open(png).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise EvenkvError("Plots need matplotlib.", f"Install it: `{INSTALL}`.") from None
    matplotlib.use("Agg")
    # Text stays text and ids do not depend on the moment: SVG files that do not change without a reason.
    matplotlib.rcParams.update({"svg.hashsalt": "evenkv", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as pyplot

    return pyplot


def _share_of_copy(pyplot: Any, group: Group) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.8), sharex=True, sharey=True, layout="constrained")
    drawn = False
    for axis, (dtype, label) in zip(axes, _KINDS, strict=True):
        for name in implementations_of(group.cases):
            rows = [row for case, row in _rows_of(group.cases, name) if case.kv_dtype == dtype]
            drawn |= bool(rows)
            colour, mark = _STYLES.get(name, _OTHER_STYLE)
            size = 14 if name in OURS else 9
            x, y = [row.kv_bytes / 2**20 for row in rows], [row.pct_copy_peak for row in rows]
            axis.scatter(x, y, s=size, c=colour, marker=mark, alpha=0.6, label=name, **_POINTS)
        axis.axhline(100, color="black", linewidth=0.8)
        axis.axhline(90, color="black", linewidth=0.8, linestyle="--")
        axis.set(xscale="log", xlabel="K and V, MiB", title=f"{label}, {group.gpu}")
        axis.grid(alpha=0.25)
    axes[0].set(ylabel="% of copy peak (graph replay, cold L2)", ylim=(0, None))
    axes[1].legend(loc="lower right", fontsize=8)
    return figure if drawn else _dropped(pyplot, figure)


def _heat_map(pyplot: Any, group: Group) -> Any:
    """% of copy peak over batch and context, evenkv-cuda, one panel a KV-head count and dtype, page 16."""
    panels = [(kv, dtype, label) for dtype, label in _KINDS for kv in grid.KV_HEADS]
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6), layout="constrained")
    drawn, image = False, None
    for axis, (kv, dtype, label) in zip(axes.flat, panels, strict=True):
        values = [[math.nan] * len(grid.CONTEXTS) for _ in grid.BATCHES]
        for y, batch in enumerate(grid.BATCHES):
            for x, context in enumerate(grid.CONTEXTS):
                wanted = Case(batch, context, None, 32, kv, 128, 16, kv_dtype=dtype)
                row = group.cases.get(wanted, {}).get(OURS[0])
                if row is not None and usable(row) and row.pct_copy_peak is not None:
                    values[y][x] = row.pct_copy_peak
                    axis.text(x, y, f"{row.pct_copy_peak:.0f}", ha="center", va="center", fontsize=7)
                    drawn = True
        axis.set_facecolor("#dddddd")
        image = axis.imshow(values, vmin=0, vmax=110, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(grid.CONTEXTS)), [f"{c // 1024}k" for c in grid.CONTEXTS])
        axis.set_yticks(range(len(grid.BATCHES)), [str(b) for b in grid.BATCHES])
        axis.set(title=f"{kv} KV heads, {label}", xlabel="context", ylabel="batch")
    if not drawn:
        return _dropped(pyplot, figure)
    figure.colorbar(image, ax=axes, label=f"% of copy peak, {OURS[0]}, page 16")
    figure.suptitle(f"{group.gpu}: grey has no time (cache over 80 GB, or not measured)")
    return figure


def _skew(pyplot: Any, group: Group) -> Any:
    """Skewed and uniform batches of the same size: two clouds that should lie on each other."""
    names = [name for name in implementations_of(group.cases) if any(_rows_of(group.cases, name))]
    skewed = any(case.lengths is not None and case.batch > 1 for case in group.cases)
    if not names or not skewed:
        return None
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    size = (4.3 * columns, 3.4 * lines)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        pairs = list(_rows_of(group.cases, name))
        kinds: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
            ("uniform", "#999999", lambda case: case.lengths is None),
            ("skewed", "#d55e00", lambda case: case.lengths is not None and case.batch > 1),
        )
        for label, colour, belongs in kinds:
            rows = [row for case, row in pairs if belongs(case)]
            x, y = [row.kv_bytes / 2**20 for row in rows], [row.pct_matched_copy for row in rows]
            axis.scatter(x, y, s=9, c=colour, alpha=0.6, label=label, **_POINTS)
        axis.set(xscale="log", title=name, xlabel="K and V, MiB", ylim=(0, None))
        axis.grid(alpha=0.25)
    axes[0][0].set(ylabel="% of matched copy")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{group.gpu}: skewed against uniform batches")
    return figure


def _time(pyplot: Any, group: Group, floor_us: float | None = None) -> Any:
    """Time against bytes, with the limits: the launch floor, the copy peak, a copy of the same bytes."""
    pairs = {name: list(_rows_of(group.cases, name)) for name in implementations_of(group.cases)}
    rows = [row for found in pairs.values() for _, row in found]
    if not rows:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 5.4), layout="constrained")
    for name, found in pairs.items():
        colour, mark = _STYLES.get(name, _OTHER_STYLE)
        x, y = [row.kv_bytes for _, row in found], [row.graph_us for _, row in found]
        axis.scatter(x, y, s=9, c=colour, marker=mark, alpha=0.5, label=name, **_POINTS)
    sizes = sorted({row.kv_bytes for row in rows})
    peak = max(row.copy_peak_gbps or 0.0 for row in rows)
    axis.plot(
        sizes, [size / peak * 1e-3 for size in sizes], "k-", linewidth=1, label=f"copy peak {peak:.0f} GB/s"
    )
    matched = {row.kv_bytes: row.matched_copy_us for row in rows}
    axis.plot(sizes, [matched[size] for size in sizes], "k:", linewidth=1, label="copy of the same bytes")
    if floor_us is not None:
        label = f"launch floor {floor_us:.1f} us"
        axis.axhline(floor_us, color="grey", linewidth=1, linestyle="--", label=label)
    axis.set(xscale="log", yscale="log", xlabel="bytes of K and V", ylabel="us (graph replay, cold L2)")
    axis.set(title=f"{group.gpu}: time and its limits")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    return figure


_PLOTS: dict[str, Callable[[Any, Group], Any]] = {
    "share-of-copy": _share_of_copy,
    "batch-context": _heat_map,
    "skew": _skew,
}


def _rows_of(cases: CaseRows, impl: str) -> Iterator[tuple[Case, Row]]:
    for case, rows in cases.items():
        row = rows.get(impl)
        if row is not None and usable(row):
            yield case, row


def _dropped(pyplot: Any, figure: Any) -> None:
    pyplot.close(figure)
