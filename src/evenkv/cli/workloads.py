"""`evenkv workloads`: import official ones, draw more, take an engine's log, restore the committed set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenkv.cli.output import print_json, progress_bar
from evenkv.errors import EvenkvError
from evenkv.paths import Repository, find_repository
from evenkv.spec.family import FAMILY

if TYPE_CHECKING:
    from evenkv.workloads.add import Added

# What needs torch is imported where it is used: it takes seconds, and `--help` does not need it.
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

# Options by the Python argument whose name a fault begins with.
_OPTIONS = {
    "definition": "definition",
    "count": "count",
    "batch": "batch",
    "median": "median",
    "sigma": "sigma",
    "arrival_rate": "arrival-rate",
    "prefixes": "prefix",
    "prefix_probability": "prefix-probability",
    "max_context": "max-context",
    "empty_requests": "empty",
    "seed": "seed",
    "num_pages": "num-pages",
    "every": "every",
}

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Definition = Annotated[str, typer.Option(help="Definition that the workloads are for.")]
_Out = Annotated[Path | None, typer.Option(help="Trace set to add to; this one when left out.")]


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Root of a local clone of the data set flashinfer-trace.")],
    definition: Annotated[
        list[str] | None, typer.Option(help="Only this definition; may be repeated.")
    ] = None,
    out: _Out = None,
    as_json: _Json = False,
) -> None:
    """Take the official workloads from a clone of the upstream data set, uuids and all."""
    from evenkv.workloads.add import known_definition
    from evenkv.workloads.importing import import_workloads

    with _options_named("import"):
        specs = [known_definition(name) for name in definition] if definition else FAMILY
    with progress_bar() as show:
        results = import_workloads(_trace_set(out), path, specs, show)
    _report(results, as_json)


@app.command()
def synth(
    definition: _Definition,
    count: Annotated[int, typer.Option(help="Steps to draw.")] = 1,
    batch: Annotated[int, typer.Option(help="Requests in a step.")] = 32,
    prompt_median: Annotated[float, typer.Option(help="Median prompt, tokens.")] = 512,
    prompt_sigma: Annotated[float, typer.Option(help="Sigma of the prompt's natural logarithm.")] = 1.0,
    output_median: Annotated[float, typer.Option(help="Median output, tokens.")] = 128,
    output_sigma: Annotated[float, typer.Option(help="Sigma of the output's natural logarithm.")] = 0.8,
    arrival_rate: Annotated[
        float | None,
        typer.Option(help="Requests a decode step, Poisson; enough to fill the batch by default."),
    ] = None,
    prefix: Annotated[
        list[int] | None, typer.Option(help="Length of a prompt prefix that requests share; may be repeated.")
    ] = None,
    prefix_probability: Annotated[float, typer.Option(help="Part of the requests that have one.")] = 1.0,
    max_context: Annotated[int, typer.Option(help="Longest context, tokens.")] = 132096,
    empty: Annotated[
        int, typer.Option(help="Empty requests to append; flashinfer-bench refuses their lse of -inf.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the first step; the others count on from it.")] = 0,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages in the pool; twice the expected need by default.")
    ] = None,
    out: _Out = None,
    as_json: _Json = False,
) -> None:
    """Draw decode steps from a simulated continuous-batching engine with the parameters that you state."""
    from evenkv.workloads import synth as synthesis
    from evenkv.workloads.add import add_workloads, known_definition
    from evenkv.workloads.fit import Lognormal
    from evenkv.workloads.simulate import Traffic

    with _options_named("synth"):
        spec = known_definition(definition)
    with _options_named("synth", of="prompt"):
        prompt = Lognormal(prompt_median, prompt_sigma)
    with _options_named("synth", of="output"):
        output = Lognormal(output_median, output_sigma)
    with _options_named("synth"), progress_bar() as show:
        traffic = Traffic(
            prompt,
            output,
            arrival_rate=arrival_rate,
            prefixes=tuple(prefix or ()),
            prefix_probability=prefix_probability,
            share_prefixes=spec.page_size == 1,
            max_context=max_context,
        )
        drawn = synthesis.draw(
            spec,
            traffic,
            batch=batch,
            count=count,
            seed=seed,
            num_pages=num_pages,
            empty_requests=empty,
            progress=show,
        )
    _report([add_workloads(_trace_set(out), spec, drawn)], as_json)


@app.command()
def capture(
    log: Annotated[
        Path, typer.Argument(help='JSONL, one decode step a line: {"lengths": [812, 90], "num_pages": 4096}.')
    ],
    definition: _Definition,
    every: Annotated[int, typer.Option(help="Take each so-many-th step.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the permutation that assigns pages.")] = 0,
    out: _Out = None,
    as_json: _Json = False,
) -> None:
    """Make workloads of the per-step request lengths that a serving engine logged."""
    from evenkv.workloads.add import add_workloads, known_definition, read_log

    with _options_named("capture"):
        spec = known_definition(definition)
        steps = read_log(log, spec, every=every, seed=seed)
    _report([add_workloads(_trace_set(out), spec, steps)], as_json)


@app.command()
def regenerate(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when a file differs.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Bring the committed workloads back to what their seeds give; added ones stay."""
    from evenkv.workloads.generate import regenerate as restore

    repo = find_repository()
    with progress_bar() as show:
        changed = restore(repo, check=check, progress=_counted(show, len(FAMILY)))
    if as_json:
        print_json({"ok": not (check and changed), "changed": changed})
    else:
        for name in changed:
            typer.echo(name)
        typer.echo(f"{len(changed)} files {'differ' if check else 'written'}.", err=check and bool(changed))
    if check and changed:
        raise typer.Exit(1)


def _trace_set(out: Path | None) -> Repository:
    return find_repository() if out is None else Repository(out.resolve())


@contextmanager
def _options_named(command: str, of: str = "") -> Iterator[None]:
    """Tell faults of a Python argument as faults of the option that it comes from.

    Parameters
    ----------
    command : str
        Whose help a fault without a remedy points at.
    of : str
        What the option's name begins with where the argument's does not: `median` of "prompt".
    """
    try:
        yield
    except EvenkvError as error:
        name, _, said = error.problem.partition(": ")
        option = _OPTIONS.get(name)
        if option is None:
            raise
        option = f"--{of}-{option}" if of else f"--{option}"
        remedy = error.remedy or f"See `evenkv workloads {command} --help`."
        raise EvenkvError(f"{option}: {said}", remedy, error.exit_code) from error


def _counted(show: Callable[[str, float], None], total: int) -> Callable[[str], None]:
    """Progress told by names alone, as shares of `total`."""
    done = 0

    def progress(name: str) -> None:
        nonlocal done
        done += 1
        show(name, done / total)

    return progress


def _report(results: list[Added], as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [
            {"definition": r.definition, "path": str(r.path), **r.counts, "uuids": r.uuids} for r in results
        ]
        print_json({"ok": True, "definitions": rows})
        return
    for result in results:
        counts = ", ".join(f"{count} {what}" for what, count in result.counts.items())
        typer.echo(f"{result.path}: {counts}")
        if len(results) == 1:
            for uuid in result.uuids:
                typer.echo(f"  {uuid}")
