"""`evenkv doctor`: what this machine has, what is missing, how to get it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from evenkv.cli.output import print_json, progress_bar, stdout
from evenkv.evaluate.environment import can_run, inspect_machine


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Show GPU, driver, compilers and versions; say what is missing and how to get it."""
    with progress_bar() as show:
        show("looking", 0.5)
        parts = inspect_machine()
    ready = can_run(parts)
    has_gpu = all(part.found for part in parts if part.name in ("GPU", "CUDA of torch"))
    mode = "gpu" if has_gpu else "cpu"
    if as_json:
        print_json({"ok": ready, "mode": mode, "parts": [asdict(part) for part in parts]})
    else:
        table = Table()
        for name in ("part", "found", "without it", "how to get it"):
            table.add_column(name, overflow="fold")
        for part in parts:
            missing = part.found is None
            cells = (
                part.name,
                part.found or "missing",
                f"no {part.needed_for}" if missing and part.needed_for != "everything" else "",
                part.remedy if missing else "",
            )
            # rich would take the brackets of `.[test,bench]` for its own markup.
            table.add_row(*map(escape, cells))
        stdout.print(table)
        if not ready:
            stdout.print("`evenkv run` cannot run here: see what is missing above.")
        elif has_gpu:
            stdout.print("`evenkv run` evaluates everything on the GPU.")
        else:
            stdout.print(
                "`evenkv run` evaluates on the CPU: correctness and compile checks, no speeds, no traces."
            )
    if not ready:
        raise typer.Exit(2)
