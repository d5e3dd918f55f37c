"""The `evenkv` command: puts the commands together and turns faults into one line and an exit code."""

from __future__ import annotations

import importlib.metadata
import re
import signal
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import evenkv
from evenkv.cli.bench import bench
from evenkv.cli.doctor import doctor
from evenkv.cli.pack import pack
from evenkv.cli.run import run
from evenkv.cli.workloads import app as workloads_app
from evenkv.errors import EvenkvError

# Options that take several values, `--definitions A B`, as `flashinfer-bench run` has them.
_MANY_VALUES = ("--definitions", "--solutions")

# What a value should have been, by the kind of pydantic's error, with the limits that the error carries.
_WANTED = {
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "less than {lt:g}",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
}
_NOT_ONE_OF = re.compile(r"(?:Value error, )?(?P<got>'.*') is not one of (?P<choices>.*?)\.?")


class _FaultGroup(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EvenkvError as error:
            fault = error
        except typer.BadParameter as error:
            # A missing argument is a subclass, and says enough by itself.
            if type(error) is not typer.BadParameter or error.param is None:
                raise
            fault = bad_value(error)
        except KeyboardInterrupt:
            # Commands that have something to say about it have caught it before.
            fault = EvenkvError(
                "Interrupted; every file is as it was or whole.", "Run the same command again.", exit_code=1
            )
        typer.echo(f"evenkv: {fault}", err=True)
        raise typer.Exit(fault.exit_code)


def bad_value(error: typer.BadParameter) -> EvenkvError:
    """The fault of an option's (or argument's) value: what was wanted, what came, where the help is.

    Typer says what was wanted alone when pydantic checks the value, and both when it does so itself.
    """
    option = max(error.param.opts, key=len)
    said = error.message.rstrip(".")
    details = getattr(error.__cause__, "errors", list)()
    wanted = _WANTED.get(details[0]["type"]) if details else None
    if wanted is not None:
        limits = details[0].get("ctx", {})
        said = f"wanted {wanted.format(**limits)}, got {str(details[0]['input'])!r}"
    elif match := _NOT_ONE_OF.fullmatch(said):
        said = f"wanted one of {match['choices']}, got {match['got']}"
    help_of = error.ctx.command_path if error.ctx is not None else "evenkv"
    return EvenkvError(f"{option}: {said}.", f"See `{help_of} --help`.")


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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evenkv {_version()}")
        raise typer.Exit()


def _version() -> str:
    try:
        return importlib.metadata.version("evenkv")
    except importlib.metadata.PackageNotFoundError:
        # A checkout on PYTHONPATH, not installed.
        return evenkv.__version__


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


app.command()(doctor)
app.command(cls=ManyValuesCommand)(run)
app.command()(pack)
app.command()(bench)
app.add_typer(workloads_app, name="workloads", help="Import, draw and capture workloads.")


def main() -> None:
    """Entry point of the `evenkv` script."""
    # A batch system ends a run so: it is told and ends as with Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    app(prog_name="evenkv")


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
