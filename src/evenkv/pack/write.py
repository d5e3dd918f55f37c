"""Solutions on disk: write what the kernels give, and say where the disk differs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashinfer_bench.data import Solution

from evenkv.errors import EvenkvError
from evenkv.files import write_all_atomic
from evenkv.pack.manifest import Kernel, load_kernels
from evenkv.pack.render import GENERATED_MARK, pack_solution
from evenkv.paths import OP_TYPE, Repository
from evenkv.spec.family import FAMILY

# Authors whose folders belong to `pack` even when their last kernel is gone.
_OWNED_AUTHORS = ("evenkv", "baseline")

# The optional trace set has solutions of its own and shares the rest.
_SHARED_FOLDERS = ("definitions", "workloads", "blob")


@dataclass
class PackResult:
    """Files that a pack touched, relative to the repository's root, and how many were right already."""

    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0


def solution_path(repo: Repository, kernel: Kernel, solution: Solution) -> Path:
    """`[optional/]solutions/<author>/gqa_paged/<definition>/<solution>.json`."""
    base = repo.solutions if kernel.manifest.trace_set == "main" else repo.optional / "solutions"
    return base / solution.author / OP_TYPE / solution.definition / f"{solution.name}.json"


def to_json(solution: Solution) -> str:
    """The one formatting of solution files: indented, UTF-8, declared field order, newline at the end."""
    fields = solution.model_dump(mode="json", exclude_none=True)
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def write_solutions(repo: Repository, kernels: Sequence[Kernel] | None = None) -> PackResult:
    """Write every kernel's solution for every definition it supports; remove generated files that are stale.

    Everything is rendered before the first byte is written, so a broken kernel leaves the disk as it was.

    Parameters
    ----------
    repo : Repository
        Where to write.
    kernels : sequence of Kernel, optional
        What to pack; the package's own kernels when left out.

    Raises
    ------
    EvenkvError
        When a kernel is broken, or one of our folders holds a solution that `pack` did not write.
    """
    kernels = load_kernels(repo) if kernels is None else kernels
    expected = _expected(repo, kernels)
    extra = [path for path in _present(repo, kernels) if path not in expected]
    for path in extra:
        if GENERATED_MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise EvenkvError(
                f"{_relative(repo, path)} lies among the generated solutions, but `pack` did not write it.",
                "Move it to solutions/<your author name>/, or delete it.",
            )

    changed = {path: text.encode() for path, text in expected.items() if _read(path) != text.encode()}
    write_all_atomic(changed)
    result = PackResult([_relative(repo, path) for path in changed], unchanged=len(expected) - len(changed))
    for path in extra:
        path.unlink()
        _remove_empty_parents(path, repo.root)
        result.removed.append(_relative(repo, path))
    for link, target in _links(repo):
        if not _leads_to(link, target):
            _make_link(repo, link, target)
            result.written.append(_relative(repo, link))
    return result


def drift(repo: Repository, kernels: Sequence[Kernel] | None = None) -> list[str]:
    """One line for each solution file or shared link that is missing, differs or is extra."""
    kernels = load_kernels(repo) if kernels is None else kernels
    expected = _expected(repo, kernels)
    lines = []
    for path, text in expected.items():
        found = _read(path)
        if found is None:
            lines.append(f"{_relative(repo, path)}: missing")
        elif found != text.encode():
            lines.append(f"{_relative(repo, path)}: differs in {_first_difference(found, text)}")
    for path in _present(repo, kernels):
        if path not in expected:
            lines.append(f"{_relative(repo, path)}: extra, no kernel packs to it")
    for link, target in _links(repo):
        if not _leads_to(link, target):
            lines.append(f"{_relative(repo, link)}: missing link to {target}")
    return lines


def _expected(repo: Repository, kernels: Sequence[Kernel]) -> dict[Path, str]:
    texts: dict[Path, str] = {}
    for kernel in kernels:
        for spec in FAMILY:
            if kernel.supports(spec):
                solution = pack_solution(kernel, spec)
                texts[solution_path(repo, kernel, solution)] = to_json(solution)
    return dict(sorted(texts.items()))


def _present(repo: Repository, kernels: Sequence[Kernel]) -> list[Path]:
    authors = {*_OWNED_AUTHORS, *(k.author for k in kernels)}
    roots = (repo.solutions, repo.optional / "solutions")
    found = (p for root in roots for author in authors for p in (root / author).rglob("*.json"))
    return sorted(found)


def _links(repo: Repository) -> Iterator[tuple[Path, str]]:
    for name in _SHARED_FOLDERS:
        yield repo.optional / name, f"../{name}"


def _leads_to(link: Path, target: str) -> bool:
    return link.is_symlink() and os.readlink(link) == target


def _make_link(repo: Repository, link: Path, target: str) -> None:
    if link.exists() and not link.is_symlink():
        raise EvenkvError(
            f"{_relative(repo, link)} must be a link to {target}, but something else lies there.",
            "Move it away and run `evenkv pack` again.",
        )
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _first_difference(found: bytes, wanted: str) -> str:
    """Name the source or field that differs, for a message; "formatting" when only the layout does."""
    try:
        old, new = json.loads(found), json.loads(wanted)
        old_sources = {s["path"]: s["content"] for s in old["sources"]}
    except (ValueError, KeyError, TypeError):
        return "structure (not a solution file)"
    new_sources = {s["path"]: s["content"] for s in new["sources"]}
    for path in sorted({*old_sources, *new_sources}):
        if old_sources.get(path) != new_sources.get(path):
            return f"source {path}"
    for name in new:
        if old.get(name) != new[name]:
            return f"field {name}"
    return "formatting"


def _remove_empty_parents(path: Path, root: Path) -> None:
    for folder in path.parents:
        if folder == root or any(folder.iterdir()):
            return
        folder.rmdir()


def _relative(repo: Repository, path: Path) -> str:
    return path.relative_to(repo.root).as_posix()
