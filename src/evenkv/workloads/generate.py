"""The committed workloads and blobs, bit for bit, from `plan.py` and nothing else."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flashinfer_bench.data import Trace

from evenkv.files import write_all_atomic
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, DecodeSpec
from evenkv.workloads import plan, store

# Names of the recipes, written into every blob. A recipe that changes its tables takes a new name.
_SIMULATED = "evenkv.workloads.simulate, version 1"
_PERMUTED = "seeded permutation of the pool: the captured page assignment was not public"


@dataclass(frozen=True)
class CommittedSet:
    """Workloads by definition, and blobs by path relative to the trace set's root."""

    workloads: dict[str, list[Trace]]
    blobs: dict[str, bytes]


def planned_uuid(spec: DecodeSpec, position: int, step: plan.PlannedStep) -> str:
    """`synth-<short name>-<nn>-<label>`, unique over the whole set."""
    return f"synth-{spec.short_name}-{position:02d}-{step.label}"


def generate(
    specs: Sequence[DecodeSpec] = FAMILY, progress: Callable[[str], None] = lambda name: None
) -> CommittedSet:
    """Draw the committed workloads of `specs`.

    Parameters
    ----------
    specs : sequence of DecodeSpec
        Members of the family.
    progress : callable
        Told each definition's name when it is done.
    """
    drawn: dict[str, Any] = {}
    result = CommittedSet({}, {})
    for spec in specs:
        scales = _scales(spec, result.blobs)
        synthetic = []
        for position, step in enumerate(plan.planned_steps(spec), 1):
            path = store.blob_path(plan.blob_owner(step, spec.page_size), step.label)
            if path not in drawn:
                drawn[path] = step.draw(spec.page_size)
                result.blobs[path] = store.to_blob(
                    store.step_tensors(drawn[path]), _about(step, spec.page_size)
                )
            uuid = planned_uuid(spec, position, step)
            stored = {**_stored(path, store.step_tensors(drawn[path])), **scales(step.label)}
            scale = store.default_sm_scale(spec)
            synthetic.append(store.make_workload(spec, drawn[path], uuid, stored, scale))
        result.workloads[spec.name] = _in_order(_captured(spec, result.blobs), synthetic)
        progress(spec.name)
    return result


def regenerate(
    repo: Repository,
    specs: Sequence[DecodeSpec] = FAMILY,
    *,
    check: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Bring the committed workloads of `specs` back to what `generate` gives; added ones stay.

    Returns
    -------
    list of str
        Files that differed, relative to the root, sorted. They are left as they are when `check` is set.
    """
    wanted = generate(specs, progress)
    contents: dict[str, bytes] = dict(wanted.blobs)
    for definition, workloads in wanted.workloads.items():
        path = store.workloads_path(repo, definition)
        ours = {trace.workload.uuid for trace in workloads}
        prefix = f"synth-{definition.removeprefix('gqa_paged_decode_')}-"
        added = [
            trace
            for trace in store.load_workloads(path, definition)
            if trace.workload.uuid not in ours and not trace.workload.uuid.startswith(prefix)
        ]
        contents[path.relative_to(repo.root).as_posix()] = store.to_jsonl([*workloads, *added])
    changed = {
        name: content
        for name, content in contents.items()
        if not (repo.root / name).is_file() or (repo.root / name).read_bytes() != content
    }
    if not check:
        # Blobs come first in the mapping: no line ever points at a file that is not there yet.
        write_all_atomic({repo.root / name: content for name, content in changed.items()})
    return sorted(changed)


def _in_order(captured: list[Trace], synthetic: list[Trace]) -> list[Trace]:
    """Captured steps early, so that runs of a few workloads meet them: after the first drawn one, or, where
    there are several, in front."""
    if len(captured) == 1:
        return [synthetic[0], *captured, *synthetic[1:]]
    return captured + synthetic


def _captured(spec: DecodeSpec, blobs: dict[str, bytes]) -> list[Trace]:
    workloads = []
    for captured in plan.captured_steps():
        if captured.definition != spec.name:
            continue
        step = captured.draw()
        stem = captured.uuid if captured.uuid.startswith("captured-") else f"captured-{captured.uuid}"
        path = store.blob_path(spec.name, stem)
        about = {
            "captured": captured.record,
            "kv_indices": _PERMUTED,
            "seed": captured.seed,
            "generator": "numpy PCG64",
        }
        blobs[path] = store.to_blob(store.step_tensors(step), about)
        stored = _stored(path, store.step_tensors(step))
        workloads.append(store.make_workload(spec, step, captured.uuid, stored, captured.sm_scale))
    return workloads


def _about(step: plan.PlannedStep, page_size: int) -> dict[str, Any]:
    about = dataclasses.asdict(step)  # every number that the recipe takes
    about["traffic"]["share_prefixes"] = page_size == 1
    return {
        "synthetic": _SIMULATED,
        **about,
        "page_size": page_size,
        "seed": step.seed(page_size),
        "generator": "numpy PCG64",
    }


def _stored(path: str, tensors: dict[str, np.ndarray]) -> dict[str, store.StoredTensor]:
    return {name: store.StoredTensor(path, name) for name in tensors}


def _scales(spec: DecodeSpec, blobs: dict[str, bytes]) -> Callable[[str], dict[str, store.StoredTensor]]:
    """fp8 scales of all of a definition's workloads in one small file, a pair of tensors for each label."""
    if not spec.is_fp8:
        return lambda label: {}
    seed = zlib.crc32(spec.name.encode())
    rng = np.random.Generator(np.random.PCG64(seed))
    tensors = {
        f"{step.label}.{name}": tensor
        for step in plan.planned_steps(spec)
        for name, tensor in store.draw_scales(spec, rng).items()
    }
    path = store.blob_path(spec.name, "scales")
    about = {"synthetic": "log-uniform from 0.5 to 2", "seed": seed, "generator": "numpy PCG64"}
    blobs[path] = store.to_blob(tensors, about)
    return lambda label: {
        name: store.StoredTensor(path, f"{label}.{name}") for name in ("k_scale", "v_scale")
    }
