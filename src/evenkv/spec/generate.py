"""Definitions: one template and one reference, rendered for every geometry of the family."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jinja2

from evenkv.files import write_all_atomic
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, DecodeSpec

_FLASHINFER_API = "fi_api:flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"


def render_definition(spec: DecodeSpec) -> str:
    """The definition file of one geometry, inside the family or not: UTF-8 JSON ending in a newline."""
    return (
        _templates()
        .get_template("definition.json.j2")
        .render(spec=spec, tags=_tags(spec), description=_description(spec), reference=render_reference(spec))
    )


def render_reference(spec: DecodeSpec) -> str:
    """Source of the reference: a module whose `run` takes `spec.input_names` and returns output and lse."""
    return _templates().get_template("reference.py.j2").render(spec=spec)


def render_definitions() -> dict[str, str]:
    """Definition name -> exact text of its file, for the whole family, in the family's order."""
    return {spec.name: render_definition(spec) for spec in FAMILY}


def write_definitions(repo: Repository) -> list[str]:
    """Write the definitions that differ from what is rendered and remove those that left the family.

    Returns
    -------
    list of str
        Names of the definitions written or removed, sorted; empty when all was right.
    """
    changed = _differing(repo)
    write_all_atomic({path: text.encode() for path, text in changed.items() if text is not None})
    for path, text in changed.items():
        if text is None:
            path.unlink()
    return sorted(path.stem for path in changed)


def drift(repo: Repository) -> list[str]:
    """One line for every definition file that is missing, edited or left over; empty when all is right."""
    lines = []
    for path, text in _differing(repo).items():
        where = path.relative_to(repo.root)
        if text is None:
            lines.append(f"{where}: not in the family")
        else:
            lines.append(f"{where}: {'differs from its template' if path.exists() else 'missing'}")
    return sorted(lines)


def _differing(repo: Repository) -> dict[Path, str | None]:
    """Files to write (text) or to remove (None) so that the folder is what the family renders to."""
    wanted = {repo.definitions / f"{name}.json": text for name, text in render_definitions().items()}
    differing: dict[Path, str | None] = {
        path: text
        for path, text in wanted.items()
        if not path.is_file() or path.read_bytes() != text.encode()
    }
    differing.update({path: None for path in repo.definitions.glob("*.json") if path not in wanted})
    return differing


def _tags(spec: DecodeSpec) -> list[str]:
    """Upstream's vocabulary; `status` is about the reference, which tests/test_definitions.py checks."""
    tags = ["stage:decode", "status:verified"]
    tags += [f"model:{model}" for model, _ in spec.models] or ["model:generic"]
    tags += [f"tp:{size}" for size in sorted({size for _, size in spec.models})] or ["tp:1"]
    tags.append(f"quantization:{spec.kv_dtype}" if spec.is_fp8 else _FLASHINFER_API)
    return tags


def _description(spec: DecodeSpec) -> str:
    group = f"{spec.num_qo_heads} query heads over {spec.num_kv_heads} KV head{'s' * (spec.num_kv_heads > 1)}"
    text = (
        f"One decode step of grouped-query attention over a paged KV cache: {group} of {spec.head_dim}, "
        f"pages of {spec.page_size} token{'s' * (spec.page_size > 1)}."
    )
    if spec.models:
        text += " Geometry of " + ", ".join(f"{model} at TP {size}" for model, size in spec.models) + "."
    if spec.is_fp8:
        text += (
            f" The cache is {spec.kv_dtype} with one scale for each KV head."
            " This is no definition of FlashInfer-Bench: it is evenkv's own, named after its pattern."
        )
    return text


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the results are JSON and Python, not HTML
    )
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment
