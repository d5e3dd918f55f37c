"""docs/results.md and the plots, rendered from rows."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from bench_fixtures import bench, case, row

from evenkv.bench import grid, markdown
from evenkv.bench.record import append_rows, load_rows
from evenkv.bench.report import write_report
from evenkv.bench.summary import groups_of
from evenkv.errors import EvenkvError
from evenkv.paths import Repository, find_repository


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(
        f"# Results\n\n{markdown.BEGIN}\n{markdown.END}\n\nThe end.\n"
    )
    begin, end = markdown.REGIMES
    (tmp_path / "docs" / "kernel.md").write_text(f"# Kernel\n\n{begin}\n{end}\n\nThe end.\n")
    return Repository(tmp_path)


def silent(what, share):
    pass


def as_gpu(rows, gpu):
    return [r.model_copy(update={"gpu": gpu}) for r in rows]


def test_gpus_without_rows_are_not_measured_yet(repository):
    write_report(repository, silent)
    text = markdown.results_page(repository).read_text()
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GB200"):
        assert f"## {gpu}\n\n{gpu}: not measured yet" in text
    assert text.endswith(f"{markdown.END}\n\nThe end.\n")
    begin, end = markdown.REGIMES
    kernel = markdown.kernel_page(repository).read_text()
    assert f"{begin}\nNVIDIA H200: not measured yet.\n{end}\n\nThe end.\n" in kernel


def test_a_page_from_rows(repository, tmp_path):
    pytest.importorskip("matplotlib")
    rows = bench(tmp_path / "x.jsonl", [*grid.smoke(), case(256, 131072)]).rows
    append_rows(markdown.rows_folder(repository) / "nvidia-h200.jsonl", as_gpu(rows, "NVIDIA H200"))
    append_rows(markdown.rows_folder(repository) / "standin.jsonl", rows)
    written = write_report(repository, silent)
    page = markdown.results_page(repository)
    text = page.read_text()
    assert "NVIDIA H200: not measured yet" not in text and "NVIDIA GB200: not measured yet" in text
    assert "13 cases, 78 rows; timer: events" in text and "copy peak 4250 GB/s" in text
    assert "### Regimes of evenkv-cuda" in text and "standin:" not in text
    names = {path.name for path in written}
    plots = {f"nvidia-h200-{plot}" for plot in ("share-of-copy", "batch-context", "skew", "time")}
    assert names == {f"{plot}.{suffix}" for plot in plots for suffix in ("png", "svg")} | {
        "results.md",
        "kernel.md",
    }
    kernel = markdown.kernel_page(repository).read_text()
    assert "13 cases, 78 rows" in kernel and "| skewed against uniform of the same bytes |" in kernel
    assert kernel.count("### Regimes of evenkv-cuda") == 1 and "### Implementations" not in kernel
    for plot in plots:
        assert f"](plots/{plot}.png)" in text
        assert (repository.root / "docs/plots" / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (repository.root / "docs/plots" / f"{plot}.svg").read_text()


def test_the_same_rows_give_the_same_files(repository, monkeypatch):
    plots = pytest.importorskip("evenkv.bench.plots")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "_PLOTS", {"time": plots._time})
    path = markdown.rows_folder(repository) / "nvidia-h200.jsonl"
    append_rows(path, [row(case(), "fa3", 200.0), row(case(1, 1024), "fa3", 20.0)])
    before = {path: path.read_bytes() for path in write_report(repository, silent)}
    assert {path: path.read_bytes() for path in write_report(repository, silent)} == before
    assert len(before) == 4


def test_plots_that_rows_do_not_allow_are_not_drawn(repository):
    pytest.importorskip("matplotlib")
    path = markdown.rows_folder(repository) / "nvidia-h200.jsonl"
    append_rows(path, [row(case(3, 999), "fa3", 200.0)])
    drawn = {p.name.split("h200-")[-1] for p in write_report(repository, silent)}
    assert drawn == {
        "share-of-copy.png",
        "share-of-copy.svg",
        "time.png",
        "time.svg",
        "results.md",
        "kernel.md",
    }


def test_unknown_gpus_follow_the_expected_ones(repository):
    text = markdown.render_block([row(case(), "fa3", 200.0).model_copy(update={"gpu": "NVIDIA L4"})], {})
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## NVIDIA H200", "## NVIDIA H100 80GB HBM3", "## NVIDIA GB200", "## NVIDIA L4"]


def test_sources_that_no_commit_holds_are_told():
    rows = [row(case(), "fa3", 200.0).model_copy(update={"commit": "0123456789abcdef-dirty"})]
    assert "commit 0123456789ab-dirty;" in markdown.render_block(rows, {})


def test_a_page_without_markers_is_named(repository):
    markdown.results_page(repository).write_text("# Results\n")
    with pytest.raises(EvenkvError, match="roofline:begin"):
        write_report(repository, silent)


def test_a_file_of_another_schema_is_named(repository):
    path = markdown.rows_folder(repository) / "nvidia-h200.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"tokens": 3}\n')
    with pytest.raises(EvenkvError, match=r"nvidia-h200.jsonl, line 1: not a row"):
        write_report(repository, silent)


def test_the_committed_page_is_rendered_from_the_committed_rows():
    """Rows of a run in progress are no fault: those of the last commit may stand in the page instead."""
    repository = find_repository()
    text = markdown.results_page(repository).read_text(encoding="utf-8")
    kernel = markdown.kernel_page(repository).read_text(encoding="utf-8")

    def renders(rows) -> bool:
        gpus = {group.gpu for group in groups_of(rows)}
        page = markdown.page_text(repository, rows, markdown.plot_names(repository, gpus))
        return page == text and markdown.kernel_text(repository, rows) == kernel

    assert renders(markdown.committed_rows(repository)) or renders(_rows_of_head(repository)), (
        "run `evenkv bench --report` and commit docs/results.md, docs/kernel.md and docs/plots"
    )


def _rows_of_head(repository):
    def git(*arguments):
        command = ["git", "-C", str(repository.root), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout

    rows = []
    names = git("ls-tree", "--name-only", "HEAD", "results/roofline/").decode().split()
    for name in sorted(n for n in names if n.endswith(".jsonl")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.write_bytes(git("show", f"HEAD:{name}"))
            rows += load_rows(path)
    return rows
