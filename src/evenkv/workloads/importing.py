"""Official workloads, from a local clone of the upstream data set (flashinfer-trace)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flashinfer_bench.data import Trace

from evenkv.errors import EvenkvError
from evenkv.files import write_all_atomic
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, DecodeSpec
from evenkv.workloads import store
from evenkv.workloads.add import Added


def import_workloads(
    repo: Repository,
    clone: Path,
    specs: Sequence[DecodeSpec] = FAMILY,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[Added]:
    """Copy the workloads and blobs of `specs` out of a clone; uuids stay as they are.

    A workload whose uuid is here already takes the place of ours: the official one has the real page ids.
    Everything is read and checked before anything is written.

    Parameters
    ----------
    repo : Repository
        Where they go.
    clone : Path
        Root of the clone: a folder with `workloads/` and `blob/`.
    specs : sequence of DecodeSpec
        Definitions to look for; those without a file in the clone are passed over.
    progress : callable
        Told what is being read, and the share that is done.

    Raises
    ------
    EvenkvError
        When the folder is no such clone or holds none of the definitions, when files are Git LFS pointers
        (with the command that fetches them), or when a workload breaks its definition's contract.
    """
    if not (clone / "workloads").is_dir():
        raise EvenkvError(
            f"{clone}: wanted a clone of the flashinfer-trace data set, got no folder {clone / 'workloads'}.",
            "Clone the data set and give the clone's root.",
        )
    found = _find(clone, specs)
    if not found:
        raise EvenkvError(
            f"{clone}: wanted workloads of {_names(specs)}, got none in {clone / 'workloads'}.",
            "Give the data set's root, or another definition.",
        )
    store.refuse_lfs_pointers(clone, [path for path, _ in found])
    loaded = [(path, spec, store.load_workloads(path, spec.name)) for path, spec in found]
    blobs = {
        store.resolve_blob(clone, item.path, f"{path} {trace.workload.uuid}")
        for path, _, traces in loaded
        for trace in traces
        for item in trace.workload.inputs.values()
        if item.type == "safetensors"
    }
    store.refuse_lfs_pointers(clone, sorted(blobs))

    contents: dict[Path, bytes] = {}
    results: list[Added] = []
    for done, (path, spec, traces) in enumerate(loaded):
        progress(spec.name, done / len(loaded))
        for trace in traces:
            store.check_workload(clone, spec, trace, f"{path}: {trace.workload.uuid}")
        file = store.workloads_path(repo, spec.name)
        official = [_here(trace, clone, repo, contents) for trace in traces]
        merged, counts = store.merge(store.load_workloads(file, spec.name), official)
        contents[file] = store.to_jsonl(merged)
        results.append(Added(spec.name, [trace.workload.uuid for trace in official], counts, file))
    write_all_atomic(contents)
    return results


def _find(clone: Path, specs: Sequence[DecodeSpec]) -> list[tuple[Path, DecodeSpec]]:
    by_name = {spec.name: spec for spec in specs}
    files = sorted((clone / "workloads").rglob("*.jsonl"))
    return [(path, by_name[path.stem]) for path in files if path.stem in by_name]


def _here(trace: Trace, clone: Path, repo: Repository, contents: dict[Path, bytes]) -> Trace:
    """The workload with its blobs' paths in our layout; their bytes go to `contents`.

    Raises
    ------
    EvenkvError
        When another file already lies where a blob would go.
    """
    moved = trace.model_copy(deep=True)
    for name, item in moved.workload.inputs.items():
        if item.type != "safetensors":
            continue
        item.path = store.blob_path(trace.definition, Path(item.path).stem)
        source = clone / trace.workload.inputs[name].path
        target, content = repo.root / item.path, source.read_bytes()
        present = contents.get(target) or (target.read_bytes() if target.is_file() else content)
        if present != content:
            raise EvenkvError(
                f"{target}: wanted to put {source} there, got another file of that name.",
                "Move one of them away.",
            )
        contents[target] = content
    return moved


def _names(specs: Sequence[DecodeSpec]) -> str:
    return specs[0].name if len(specs) == 1 else f"any of {len(specs)} definitions"
