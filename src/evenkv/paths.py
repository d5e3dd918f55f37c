"""Where the package's trace set lies on disk: one place that knows the folder names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from evenkv.errors import EvenkvError

OP_TYPE = "gqa_paged"


@dataclass(frozen=True)
class Repository:
    """Folders of a FlashInfer-Bench trace set (upstream's names and depths)."""

    root: Path

    @property
    def definitions(self) -> Path:
        return self.root / "definitions" / OP_TYPE

    @property
    def solutions(self) -> Path:
        return self.root / "solutions"

    @property
    def optional(self) -> Path:
        """A trace set of its own: solutions that a plain GPU run must not meet."""
        return self.root / "optional"

    @property
    def workloads(self) -> Path:
        return self.root / "workloads" / OP_TYPE

    @property
    def blobs(self) -> Path:
        return self.root / "blob" / "workloads" / OP_TYPE

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def kernels(self) -> Path:
        """The authored kernel sources, shipped inside the Python package."""
        return Path(__file__).resolve().parent / "kernels"


def find_repository(start: Path | None = None) -> Repository:
    """Find the trace set: EVENKV_ROOT, else `start` (or the working folder) and its parents,
    else the checkout that this package is installed from.

    Raises
    ------
    EvenkvError
        When no folder with a `definitions/gqa_paged` folder or evenkv's `pyproject.toml` is found.
    """
    override = os.environ.get("EVENKV_ROOT")
    if override:
        candidates = [Path(override)]
    else:
        here = (start or Path.cwd()).resolve()
        candidates = [here, *here.parents, Path(__file__).resolve().parents[2]]
    for folder in candidates:
        if (folder / "definitions" / OP_TYPE).is_dir() or _is_checkout(folder):
            return Repository(folder.resolve())
    raise EvenkvError(
        f"No evenkv package found from {candidates[0]}: wanted a folder holding definitions/{OP_TYPE}.",
        "Run inside a clone, or set EVENKV_ROOT to one.",
    )


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "evenkv"' in project.read_text(encoding="utf-8")
