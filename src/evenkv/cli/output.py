"""What every command prints with: results on stdout, progress and remarks on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_FILE_WIDTH = 160


def _console(to_stderr: bool) -> Console:
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        # A file has no width: wide enough that no row of a table wraps.
        console.width = _FILE_WIDTH
    return console


stdout = _console(to_stderr=False)
stderr = _console(to_stderr=True)


class ShowProgress(Protocol):
    """`show(what, share)`: what is being done, and the share of the work that is done (0 to 1)."""

    def __call__(self, what: str, share: float) -> None: ...


@contextmanager
def progress_bar() -> Iterator[ShowProgress]:
    """A bar on stderr; where stderr is no terminal, nothing but what the caller prints itself."""
    columns = (BarColumn(30), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(task, completed=share, description=what)

        yield show


def print_json(document: Any) -> None:
    """One JSON document on stdout. NaN and infinity become null: JSON has neither."""
    typer.echo(json.dumps(_finite(document), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
