"""Workloads beside the committed ones: drawn with stated parameters, or from an engine's log."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flashinfer_bench.data import Trace

from evenkv.errors import EvenkvError
from evenkv.files import write_all_atomic
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, DecodeSpec, parse_name
from evenkv.workloads import store
from evenkv.workloads.step import DecodeStep, pages_of, step_from_lengths

# Pool over need, where a log does not say how large the pool was.
_POOL_SLACK = 1.25
_MOST_PAGES = 2**27  # a pool beyond any GPU, and what a permutation can still be drawn of


@dataclass(frozen=True)
class NewWorkload:
    """A step to store: `recipe` goes into the blob and names the workload, `<kind>-<hash of the recipe>`."""

    kind: str
    step: DecodeStep
    sm_scale: float
    recipe: dict[str, Any]

    def uuid(self, spec: DecodeSpec) -> str:
        text = json.dumps({"definition": spec.name, **self.recipe}, sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Added:
    """What a command did to one definition's workloads: uuids in order, counts, and the file they are in."""

    definition: str
    uuids: list[str]
    counts: dict[str, int]
    path: Path


def known_definition(name: str) -> DecodeSpec:
    """The geometry of a definition that the package ships.

    Raises
    ------
    EvenkvError
        When the name is not one of them.
    """
    try:
        spec = parse_name(name)
    except EvenkvError:
        spec = None
    if spec is None or spec not in FAMILY:
        raise EvenkvError(
            f"definition: wanted one that the package ships, got {name!r}.",
            "List them with `ls definitions/gqa_paged`.",
        )
    return spec


def add_workloads(repo: Repository, spec: DecodeSpec, new: Iterable[NewWorkload]) -> Added:
    """Store steps as workloads of one definition, blobs and lines together or not at all.

    The same recipe gives the same uuid, so adding it twice leaves one workload.

    Raises
    ------
    EvenkvError
        When the definition's present file is broken.
    """
    contents: dict[Path, bytes] = {}
    workloads: list[Trace] = []
    for item in new:
        uuid = item.uuid(spec)
        tensors = store.step_tensors(item.step)
        if spec.is_fp8:
            seed = int(hashlib.sha256(uuid.encode()).hexdigest()[:8], 16)
            tensors |= store.draw_scales(spec, np.random.Generator(np.random.PCG64(seed)))
        path = store.blob_path(spec.name, uuid)
        contents[repo.root / path] = store.to_blob(tensors, item.recipe)
        stored = {name: store.StoredTensor(path, name) for name in tensors}
        workloads.append(store.make_workload(spec, item.step, uuid, stored, item.sm_scale))
    file = store.workloads_path(repo, spec.name)
    merged, counts = store.merge(store.load_workloads(file, spec.name), workloads)
    contents[file] = store.to_jsonl(merged)
    write_all_atomic(contents)
    return Added(spec.name, list(dict.fromkeys(w.workload.uuid for w in workloads)), counts, file)


def read_log(path: Path, spec: DecodeSpec, *, every: int = 1, seed: int = 0) -> list[NewWorkload]:
    """Decode steps that a serving engine logged, as workloads.

    Parameters
    ----------
    path : Path
        Called `log` in errors, as the command calls it.
        JSONL, one line a decode step: `lengths` (tokens of each request in the batch, the new token
        included), and optionally `step`, `num_pages`, `sm_scale`. Other fields are ignored.
    every : int
        Take each so-many-th step, the first one included.
    seed : int
        Of the permutation that assigns pages, which a log of lengths does not hold.

    Returns
    -------
    list of NewWorkload
        Requests of length 0 (padding) are left out: flashinfer-bench refuses the -inf that they give.

    Raises
    ------
    EvenkvError
        Naming the file, or the line and the field, what was wanted and what came.
    """
    for argument, value, least in (("every", every, 1), ("seed", seed, 0)):
        if value < least:
            raise EvenkvError(f"{argument}: wanted {least} or more, got {value}.")
    text = _log_text(path)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise EvenkvError(
            f"log: wanted one JSON object a line, got the empty file {path}.", "Log some steps first."
        )
    # Every line is checked, taken or not: a broken log should not pass because its fault was skipped.
    steps = [_logged_step(line, f"{path}:{number}", spec, seed) for number, line in lines]
    return steps[::every]


def _log_text(path: Path) -> str:
    remedy = "Give the engine's log: JSONL, one decode step a line."
    if path.is_dir():
        raise EvenkvError(f"log: wanted a file, got the folder {path}.", remedy)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise EvenkvError(f"log: wanted a file, got {path}: no such file.", remedy) from error
    except OSError as error:
        raise EvenkvError(f"log: {path} cannot be read: {error.strerror}.", remedy) from error
    except UnicodeDecodeError as error:
        raise EvenkvError(f"log: wanted UTF-8 text, got {path}: {error}.", remedy) from error


def _logged_step(line: str, where: str, spec: DecodeSpec, seed: int) -> NewWorkload:
    def fail(field: str, wanted: str, got: Any) -> EvenkvError:
        shown = json.dumps(got)
        return EvenkvError(
            f"{where}: {field}: wanted {wanted}, got {shown if len(shown) < 80 else shown[:77] + '...'}.",
            "Correct the line, or leave it out.",
        )

    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise EvenkvError(f"{where}: wanted a JSON object, got {error}.", "Correct the line.") from error
    if not isinstance(record, dict):
        raise fail("line", "a JSON object", record)
    lengths = record.get("lengths")
    if not isinstance(lengths, list) or not lengths or not all(_is_count(length) for length in lengths):
        raise fail("lengths", f"a list of whole numbers, 0 to {_MOST_PAGES}", lengths)
    lengths = [length for length in lengths if length]
    if not lengths:
        raise fail("lengths", "at least one request that has tokens", record["lengths"])
    needed = int(pages_of(lengths, spec.page_size).sum())
    num_pages = record.get("num_pages")
    if num_pages is None:
        num_pages = math.ceil(_POOL_SLACK * needed)
    if not _is_count(num_pages) or not needed <= num_pages:
        raise fail(
            "num_pages",
            f"a whole number from {needed} (the pages that the lengths fill) to {_MOST_PAGES}",
            num_pages,
        )
    sm_scale = record.get("sm_scale", store.default_sm_scale(spec))
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)) or not 0 < sm_scale < math.inf:
        raise fail("sm_scale", "a positive number", sm_scale)
    recipe = {
        "captured": {"lengths": lengths, "num_pages": num_pages, "sm_scale": sm_scale},
        "kv_indices": "seeded permutation of the pool: a log of lengths has no page ids",
        "seed": seed,
        "generator": "numpy PCG64",
    }
    if "step" in record:
        recipe["captured"]["step"] = record["step"]
    rng = np.random.Generator(np.random.PCG64(seed))
    step = step_from_lengths(lengths, spec.page_size, num_pages, rng)
    return NewWorkload("capture", step, float(sm_scale), recipe)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_PAGES
