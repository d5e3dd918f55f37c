"""The `evenkv` command: puts the commands together and turns faults into one line and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from evenkv.cli.bench import bench
from evenkv.cli.doctor import doctor
from evenkv.cli.pack import pack
from evenkv.cli.run import run
from evenkv.cli.workloads import app as workloads_app
from evenkv.errors import EvenkvError

# Options that take several values, `--definitions A B`, as `flashinfer-bench run` has them.
_MANY_VALUES = ("--definitions", "--solutions")


class _FaultGroup(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EvenkvError as error:
            typer.echo(f"evenkv: {error}", err=True)
            raise typer.Exit(error.exit_code) from error


class ManyValuesCommand(TyperCommand):
    """Lets `--definitions A B` stand for `--definitions A --definitions B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_options(args))


def repeat_options(args: Sequence[str]) -> list[str]:
    """Repeat a many-valued option before each of its values."""
    repeated: list[str] = []
    current: str | None = None
    for arg in args:
        if arg.startswith("-"):
            current = arg if arg in _MANY_VALUES else None
            if current is None:
                repeated.append(arg)
        elif current is not None:
            repeated += [current, arg]
        else:
            repeated.append(arg)
    if args and args[-1] in _MANY_VALUES:
        repeated.append(args[-1])
    return repeated


app = typer.Typer(
    name="evenkv",
    cls=_FaultGroup,
    help="Paged GQA decode attention at memory-copy speed: evaluate, measure, pack, draw workloads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(doctor)
app.command(cls=ManyValuesCommand)(run)
app.command()(pack)
app.command()(bench)
app.add_typer(workloads_app, name="workloads", help="Import, draw and capture workloads.")


def main() -> None:
    """Entry point of the `evenkv` script."""
    app(prog_name="evenkv")
