"""Reads the package (both trace sets) and picks what a run evaluates; faults name the file or the name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from flashinfer_bench.data import Definition, Solution, Trace, TraceSet, Workload
from pydantic import BaseModel, ValidationError

from evenkv.errors import EvenkvError
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec, parse_name

_LFS_POINTER = b"version https://git-lfs"

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Package:
    """Definitions by name; solutions and workloads by definition, in the order of their files."""

    repository: Repository
    definitions: dict[str, Definition] = field(default_factory=dict)
    solutions: dict[str, list[Solution]] = field(default_factory=dict)
    workloads: dict[str, list[Workload]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One workload and the solutions to evaluate on it."""

    definition: Definition
    workload: Workload
    solutions: tuple[Solution, ...]

    @property
    def spec(self) -> DecodeSpec:
        return parse_name(self.definition.name)


def load_package(repository: Repository) -> Package:
    """Read definitions, workloads and the solutions of the main and the optional trace set.

    Raises
    ------
    EvenkvError
        When a folder or a file is missing, broken, or names something that is not there or is there twice.
    """
    package = Package(repository)
    for path in _files(repository.definitions, "*.json"):
        definition = _parse(Definition, path, read_text(path))
        _add_once(package.definitions, definition.name, definition, "definition", path)
    if not package.definitions:
        raise EvenkvError(
            f"No definitions in {repository.definitions}.",
            "Run `evenkv pack`, or check out the whole repository.",
        )
    names: dict[str, Path] = {}
    for folder in (repository.solutions, repository.optional / "solutions"):
        for path in _files(folder, "*.json"):
            solution = _parse(Solution, path, read_text(path))
            _add_once(names, solution.name, path, "solution", path)
            _require_definition(package, solution.definition, path)
            package.solutions.setdefault(solution.definition, []).append(solution)
    for path in _files(repository.workloads, "*.jsonl"):
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                trace = _parse(Trace, path, line, number)
                _require_definition(package, trace.definition, path)
                package.workloads.setdefault(trace.definition, []).append(trace.workload)
    return package


def select_cases(
    package: Package,
    definitions: Sequence[str] = (),
    solutions: Sequence[str] = (),
    workloads_per_definition: int | None = None,
) -> list[Case]:
    """What a run evaluates.

    Parameters
    ----------
    definitions : sequence of str
        Names; empty means all.
    solutions : sequence of str
        Solution names, or kernel names such as "evenkv_cuda" for all solutions of that kernel; empty: all.
    workloads_per_definition : int, optional
        Only the first so many workloads of each definition.

    Raises
    ------
    EvenkvError
        When a name is unknown or chooses nothing, or a chosen definition has no workload.
    """
    for name in definitions:
        if name not in package.definitions:
            raise EvenkvError(
                f"Unknown definition {name!r}.",
                f"Wanted one of the {len(package.definitions)} in {package.repository.definitions}.",
            )
    chosen = [name for name in package.definitions if not definitions or name in definitions]
    picked = {name: _pick(package.solutions.get(name, []), solutions) for name in chosen}
    for wanted in solutions:
        if not any(matches(solution, wanted) for found in picked.values() for solution in found):
            raise EvenkvError(
                f"Unknown solution {wanted!r} for the chosen definitions.",
                "Give a solution's name or a kernel's: " + ", ".join(_kernels(package)) + ".",
            )
    cases = []
    for name in chosen:
        found = package.workloads.get(name, [])
        if not found:
            raise EvenkvError(
                f"Definition {name} has no workloads in {package.repository.workloads / name}.jsonl.",
                "Restore the file, or draw some with `evenkv workloads synth`.",
            )
        if picked[name]:
            cases += [
                Case(package.definitions[name], workload, picked[name])
                for workload in found[:workloads_per_definition]
            ]
    return cases


def kernel_name(solution: str, definition: str) -> str:
    """The kernel's name: the solution's name without the definition's short name."""
    try:
        return solution.removesuffix(f"_{parse_name(definition).short_name}")
    except EvenkvError:
        return solution


def kernel_of(solution: Solution) -> str:
    return kernel_name(solution.name, solution.definition)


def matches(solution: Solution, wanted: str) -> bool:
    return wanted in (solution.name, kernel_of(solution))


def trace_set_of(case: Case, root: Path) -> TraceSet:
    """A trace set in memory that holds just this case; `root` is where blob paths start."""
    name = case.definition.name
    return TraceSet(
        root=root,
        definitions={name: case.definition},
        solutions={name: list(case.solutions)},
        workloads={name: [Trace(definition=name, workload=case.workload)]},
    )


def read_text(path: Path) -> str:
    """A text file's content; a Git LFS pointer or a file that is not UTF-8 is an EvenkvError."""
    refuse_lfs_pointer(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvenkvError(f"Cannot read {path}: {error}.", "Restore the file.") from error


def refuse_lfs_pointer(path: Path) -> None:
    """Raise when the file is missing, or is the small text that Git LFS leaves in a file's place."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise EvenkvError(f"Cannot read {path}: {error.strerror}.", "Restore the file.") from error
    if start == _LFS_POINTER:
        raise EvenkvError(
            f"{path} is a Git LFS pointer, not the file itself.",
            f"Run `git lfs pull --include '{path.name}'`.",
        )


def _pick(found: Sequence[Solution], wanted: Sequence[str]) -> tuple[Solution, ...]:
    if not wanted:
        return tuple(found)
    return tuple(s for s in found if any(matches(s, name) for name in wanted))


def _kernels(package: Package) -> list[str]:
    return sorted({kernel_of(s) for found in package.solutions.values() for s in found})


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    return iter(sorted(path for path in folder.rglob(pattern) if not path.name.startswith(".")))


def _parse(model: type[Model], path: Path, text: str, line: int | None = None) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
        place = f"{path}, line {line}" if line else str(path)
        raise EvenkvError(
            f"{place} is not a valid {model.__name__.lower()}: {where}{first['msg']}.",
            "Restore the file, or generate it again.",
        ) from error


def _add_once(known: dict, name: str, value: object, what: str, path: Path) -> None:
    if name in known:
        raise EvenkvError(
            f"The {what} {name} is there twice, the second time in {path}.", "Remove one of them."
        )
    known[name] = value


def _require_definition(package: Package, name: str, path: Path) -> None:
    if name not in package.definitions:
        raise EvenkvError(
            f"{path} is for definition {name!r}, which is not in {package.repository.definitions}.",
            "Add the definition, or remove the file.",
        )
