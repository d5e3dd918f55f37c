"""What `evenkv bench` refuses before it measures, and what it says when it is interrupted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenkv.cli.bench_options import WARM_FOLDER, Options
from evenkv.errors import EvenkvError

# Options that --report goes with.
_OF_REPORT = ("--report", "--json")


def given_options(context: Any) -> list[str]:
    """Names of the options on the command line, defaults left out."""
    return [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]


def check_together(given: Sequence[str]) -> None:
    """Raise EvenkvError when an option was given that another one would leave without effect."""
    ways = [name for name in given if name in ("--gpus", "--ray", "--shard")]
    if len(ways) > 1:
        raise EvenkvError(
            f"--gpus, --ray and --shard: wanted at most one of them, got {' and '.join(ways)}.", "Choose one."
        )
    if "--report" in given and (others := [name for name in given if name not in _OF_REPORT]):
        raise EvenkvError(
            f"--report: wanted alone or with --json, got {', '.join(others)} too, which it has no use for.",
            "It renders the committed rows; measure first, then run it alone.",
        )
    if "--cases" in given and "--preset" in given:
        raise EvenkvError("--cases and --preset: wanted one of them, got both.", "Choose one.")


def check_device(kind: str) -> None:
    """Raise EvenkvError when there is no such kind of device."""
    from evenkv.bench.devices import DEVICES

    if kind not in DEVICES:
        raise EvenkvError(f"--device: wanted one of {', '.join(DEVICES)}, got {kind!r}.", "Correct it.")


def check_out(options: Options) -> None:
    """Raise EvenkvError when rows cannot be appended to the file of --out, or must not be."""
    if options.out is None:
        return
    check_writable(options.out, f"--out {options.out}")
    # Their rows do not say which they are: in one file, --resume would take the one for the other.
    is_warm = options.out.resolve().parent.name == WARM_FOLDER
    if options.warm and not is_warm:
        raise EvenkvError(
            f"--out {options.out}: with --warm, wanted a file in a folder named {WARM_FOLDER!r}: rows do not "
            "say whether they are of warm calls.",
            f"For example --out {options.out.parent / WARM_FOLDER / options.out.name}.",
        )
    if is_warm and not options.warm:
        raise EvenkvError(
            f"--out {options.out}: wanted --warm too, or another folder: one named {WARM_FOLDER!r} is for "
            "rows of warm calls.",
            "Add --warm, or give a file in another folder.",
        )


def check_writable(path: Path, named: str) -> None:
    """Raise EvenkvError unless rows could be appended to the file; leaves no trace on the disk."""
    remedy = "Give another file with --out, or mend the rights."
    try:
        place = path.resolve()
        if place.is_dir():
            raise EvenkvError(
                f"{named}: wanted a file to append rows to, got a directory.",
                f"For example --out {path / 'rows.jsonl'}.",
            )
        if place.exists():
            if not place.is_file():
                raise EvenkvError(f"{named}: wanted a plain file, got a pipe or a device.", remedy)
            place.open("ab").close()
            return
        folder = next(parent for parent in place.parents if parent.exists())
        if not folder.is_dir():
            raise EvenkvError(f"{named}: wanted a file in a folder, but {folder} is a file.", remedy)
        # Not the file itself: another process may be about to create and fill it.
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        why = getattr(error, "strerror", None) or error
        raise EvenkvError(f"{named}: cannot be written: {why}.", remedy) from None


def check_rows(path: Path, rows: Iterable[Any], standin: bool) -> None:
    """Raise EvenkvError when the file has measured rows and the stand-in would add its own, or vice versa."""
    from evenkv.bench.standin import GPU

    others = sorted({row.gpu for row in rows if (row.gpu == GPU) != standin})
    if others and standin:
        raise EvenkvError(
            f"{path}: wanted a file of the stand-in's rows, got one with rows of {', '.join(others)}.",
            "Give another file with --out: a model's times do not belong among them.",
        )
    if others:
        raise EvenkvError(
            f"{path}: wanted a file of measured rows, got one with rows of the stand-in, a model's.",
            "Move it away, or give another file with --out.",
        )


@contextmanager
def told_interruption(paths: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Turns an interruption inside into an EvenkvError that says whether rows were written, and where.

    Parameters
    ----------
    paths : callable
        Gives the files that rows may go to.
    """
    before = _sizes(paths())
    try:
        yield
    except KeyboardInterrupt:
        after = _sizes(paths())
        raise interrupted([path for path in after if after[path] != before.get(path, 0)]) from None


def interrupted(written: Sequence[Path] = ()) -> EvenkvError:
    """The error of an interrupted run; `written` are the files that it appended to."""
    if not written:
        return EvenkvError(
            "Interrupted before a case was finished: no row was written.", "Start it again.", exit_code=1
        )
    files = ", ".join(str(path) for path in written)
    remedy = "Go on with the same command and --resume."
    return EvenkvError(f"Interrupted; finished rows are in {files}.", remedy, exit_code=1)


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    return {path: path.stat().st_size if path.exists() else 0 for path in paths}
