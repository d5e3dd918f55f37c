"""`evenkv pack`: write the generated files, or check that they are what the sources give."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from evenkv.cli.output import print_json
from evenkv.paths import Repository, find_repository
from evenkv.spec import generate

# What needs torch is imported where it is used: it takes seconds, and `--help` does not need it.


class Part(str, Enum):
    """What `--only` narrows the command to."""

    definitions = "definitions"
    solutions = "solutions"


def pack(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when a generated file differs.")
    ] = False,
    only: Annotated[Part | None, typer.Option(help="Leave the other part alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate definitions from their template and solutions from the kernel sources."""
    repo = find_repository()
    parts = [part for part in Part if only in (None, part)]
    if check:
        _check(repo, parts, as_json)
    else:
        _write(repo, parts, as_json)


def _check(repo: Repository, parts: list[Part], as_json: bool) -> None:
    from evenkv.pack.write import drift as solutions_drift

    find = {Part.definitions: generate.drift, Part.solutions: solutions_drift}
    lines = {part.value: list(find[part](repo)) for part in parts}
    count = sum(map(len, lines.values()))
    if as_json:
        print_json({"ok": count == 0, "drift": lines})
    elif count == 0:
        typer.echo(f"No drift: {' and '.join(lines)} are what their sources give.")
    else:
        for line in (line for found in lines.values() for line in found):
            typer.echo(line)
        typer.echo(
            f"{count} generated file{'s' if count > 1 else ''} drifted from the sources. "
            "Edit the source (src/evenkv/kernels, src/evenkv/spec), not the JSON; "
            "then run `evenkv pack` and commit what it writes.",
            err=True,
        )
    if count:
        raise typer.Exit(1)


def _write(repo: Repository, parts: list[Part], as_json: bool) -> None:
    from evenkv.pack.write import write_solutions

    report: dict[str, dict[str, object]] = {}
    if Part.definitions in parts:
        written = [str(path) for path in generate.write_definitions(repo) or ()]
        report["definitions"] = {"written": written}
    if Part.solutions in parts:
        result = write_solutions(repo)
        report["solutions"] = {
            "written": result.written,
            "removed": result.removed,
            "unchanged": result.unchanged,
        }
    if as_json:
        print_json(report)
        return
    for name, counts in report.items():
        parts_of_line = [
            f"{len(value) if isinstance(value, list) else value} {what}" for what, value in counts.items()
        ]
        typer.echo(f"{name}: {', '.join(parts_of_line)}")
