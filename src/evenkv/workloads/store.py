"""Workloads on disk: lines of `workloads/gqa_paged/<definition>.jsonl` and the safetensors they point at."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from flashinfer_bench.data import Trace
from pydantic import ValidationError

from evenkv.errors import EvenkvError
from evenkv.paths import OP_TYPE, Repository
from evenkv.spec.family import DecodeSpec
from evenkv.workloads.step import DecodeStep, check_step

# The metadata key of our blobs: one JSON object that says how the tables came about. A single key, because
# safetensors writes several in no fixed order.
METADATA_KEY = "evenkv"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `path` from the trace set's root, with forward slashes, and `key` in the file."""

    path: str
    key: str

    def to_input(self) -> dict[str, str]:
        return {"type": "safetensors", "path": self.path, "tensor_key": self.key}


def blob_path(definition: str, file_stem: str) -> str:
    """`blob/workloads/gqa_paged/<definition>/<stem>.safetensors`."""
    return f"blob/workloads/{OP_TYPE}/{definition}/{file_stem}.safetensors"


def workloads_path(repo: Repository, definition: str) -> Path:
    return repo.workloads / f"{definition}.jsonl"


def default_sm_scale(spec: DecodeSpec) -> float:
    return 1.0 / math.sqrt(spec.head_dim)


def step_tensors(step: DecodeStep) -> dict[str, np.ndarray]:
    """The step's int32 tables by the definition's input names."""
    tensors = {"kv_indptr": step.kv_indptr, "kv_indices": step.kv_indices}
    if step.page_size > 1:
        tensors["kv_last_page_len"] = step.kv_last_page_len
    return tensors


def draw_scales(spec: DecodeSpec, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """fp8 scales, float32 `[num_kv_heads]`, spread evenly in the logarithm from 0.5 to 2."""
    return {
        name: np.exp2(2.0 * rng.random(spec.num_kv_heads) - 1.0).astype(np.float32)
        for name in ("k_scale", "v_scale")
    }


def to_blob(tensors: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> bytes:
    """A safetensors file: the same tensors and the same `about` give the same bytes."""
    text = json.dumps(about, sort_keys=True, ensure_ascii=False)
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return safetensors.numpy.save(arrays, metadata={METADATA_KEY: text})


def make_workload(
    spec: DecodeSpec, step: DecodeStep, uuid: str, stored: Mapping[str, StoredTensor], sm_scale: float
) -> Trace:
    """A workload trace: random q, k_cache and v_cache, the other tensors from `stored`."""
    inputs: dict[str, Any] = {}
    for name in spec.input_names:
        if name == "sm_scale":
            inputs[name] = {"type": "scalar", "value": sm_scale}
        elif name in ("q", "k_cache", "v_cache"):
            inputs[name] = {"type": "random"}
        else:
            inputs[name] = stored[name].to_input()
    workload = {"uuid": uuid, "axes": step.axes(), "inputs": inputs}
    return Trace.model_validate({"definition": spec.name, "workload": workload})


def to_jsonl(workloads: Iterable[Trace]) -> bytes:
    """The one formatting of workload files: a line each, newline at the end."""
    lines = [json.dumps(w.model_dump(mode="json"), ensure_ascii=False) + "\n" for w in workloads]
    return "".join(lines).encode()


def load_workloads(path: Path, definition: str) -> list[Trace]:
    """Workloads of one definition; an absent file holds none.

    Raises
    ------
    EvenkvError
        Naming file and line of what is not a workload of `definition`, or repeats a uuid otherwise.
    """
    if not path.exists():
        return []
    refuse_lfs_pointers(path.parent, [path])
    workloads: dict[str, Trace] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvenkvError(f"{path}: cannot be read as UTF-8 text: {error}.", "Restore the file.") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            trace = Trace.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "line"
            raise EvenkvError(f"{where}: {place}: {first['msg']}.", "Correct or remove the line.") from error
        if trace.definition != definition or not trace.is_workload_trace():
            raise EvenkvError(
                f"{where}: wanted a workload of {definition}, got "
                f"{'an evaluation' if not trace.is_workload_trace() else trace.definition}.",
                "Move the line to its own file.",
            )
        uuid = trace.workload.uuid
        if workloads.setdefault(uuid, trace) != trace:
            raise EvenkvError(
                f"{where}: uuid {uuid} is there already, with other content.", "Keep one of them."
            )
    return list(workloads.values())


def merge(present: Sequence[Trace], new: Sequence[Trace]) -> tuple[list[Trace], dict[str, int]]:
    """Put `new` in the place of those with the same uuid, else at the end; count what became of each."""
    merged = {trace.workload.uuid: trace for trace in present}
    counts = {"added": 0, "replaced": 0, "unchanged": 0}
    for trace in new:
        old = merged.get(trace.workload.uuid)
        counts["added" if old is None else "unchanged" if old == trace else "replaced"] += 1
        merged[trace.workload.uuid] = trace
    return list(merged.values()), counts


def refuse_lfs_pointers(root: Path, paths: Iterable[Path]) -> None:
    """Refuse Git LFS pointers: what a clone holds where large files should be.

    Raises
    ------
    EvenkvError
        Naming the first pointer and the one command that fetches all of them.
    """
    pointers = [path for path in dict.fromkeys(paths) if path.is_file() and _is_lfs_pointer(path)]
    if not pointers:
        return
    names = [path.relative_to(root).as_posix() for path in pointers]
    folders = dict.fromkeys(name.rpartition("/")[0] for name in names)
    # Single files while the command stays readable, whole folders beyond that.
    patterns = names if len(names) <= 3 else [f"{folder}/*" if folder else "*" for folder in folders]
    raise EvenkvError(
        f"{pointers[0]}: wanted the file itself, got a Git LFS pointer ({len(pointers)} such in all).",
        f'Fetch with `git -C {root} lfs pull --include "{",".join(patterns)}"`.',
    )


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def load_blob(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file.

    Raises
    ------
    EvenkvError
        When the file is missing, a Git LFS pointer, or broken.
    """
    if not path.is_file():
        raise EvenkvError(f"{path}: no such file.", "Restore it, or import or draw the workload again.")
    refuse_lfs_pointers(path.parent, [path])
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, OSError) as error:
        raise EvenkvError(f"{path}: not a readable safetensors file: {error}.", "Restore it.") from error


def blob_about(path: Path) -> dict[str, Any] | None:
    """How evenkv made a blob, or None where it did not."""
    with safetensors.safe_open(str(path), framework="numpy") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    return None if text is None else json.loads(text)


def check_workload(root: Path, spec: DecodeSpec, trace: Trace, where: str) -> DecodeStep:
    """Hold a workload against its definition: inputs, shapes, dtypes, constraints, page tables.

    Parameters
    ----------
    root : Path
        The trace set that the safetensors paths are relative to.
    where : str
        Begins every message, e.g. file and line.

    Returns
    -------
    DecodeStep
        The workload's page tables.

    Raises
    ------
    EvenkvError
        Naming the input or axis, what was wanted and what came.
    """

    def fail(what: str) -> None:
        raise EvenkvError(f"{where}: {what}.", "Correct the workload, or draw it again.")

    axes, inputs = trace.workload.axes, trace.workload.inputs
    for axis in ("batch_size", "num_pages", "len_indptr", "num_kv_indices"):
        if axis not in axes:
            fail(f"axes: wanted {axis}, got {sorted(axes)}")
    if set(inputs) != set(spec.input_names):
        fail(f"inputs: wanted {sorted(spec.input_names)}, got {sorted(inputs)}")
    if axes["len_indptr"] != axes["batch_size"] + 1:
        fail(f"len_indptr: wanted batch_size + 1 = {axes['batch_size'] + 1}, got {axes['len_indptr']}")
    scale = inputs["sm_scale"]
    if scale.type != "scalar" or isinstance(scale.value, bool) or not 0 < scale.value < math.inf:
        fail(f"sm_scale: wanted a positive scalar, got {scale}")
    wanted = {
        "kv_indptr": ("int32", axes["len_indptr"]),
        "kv_indices": ("int32", axes["num_kv_indices"]),
        "kv_last_page_len": ("int32", axes["batch_size"]),
        "k_scale": ("float32", spec.num_kv_heads),
        "v_scale": ("float32", spec.num_kv_heads),
    }
    tensors: dict[str, np.ndarray] = {}
    files: dict[Path, dict[str, np.ndarray]] = {}
    for name, (dtype, length) in wanted.items():
        if name not in inputs:
            continue
        if inputs[name].type != "safetensors":
            fail(f"{name}: wanted a safetensors input, got {inputs[name].type}")
        path = resolve_blob(root, inputs[name].path, where)
        content = files[path] = files.get(path) or load_blob(path)
        if inputs[name].tensor_key not in content:
            fail(f"{name}: wanted key {inputs[name].tensor_key!r} in {path}, got {sorted(content)}")
        tensor = content[inputs[name].tensor_key]
        if str(tensor.dtype) != dtype or tensor.shape != (length,):
            fail(f"{name}: wanted {dtype} [{length}], got {tensor.dtype} {list(tensor.shape)}")
        tensors[name] = tensor
    for name in ("k_scale", "v_scale"):
        if name in tensors and not (np.isfinite(tensors[name]).all() and (tensors[name] > 0).all()):
            fail(f"{name}: wanted positive numbers, got {tensors[name].tolist()}")
    indptr = tensors["kv_indptr"]
    last = tensors.get("kv_last_page_len")
    if last is None:
        last = np.minimum(np.diff(indptr), 1).astype(np.int32)
    step = DecodeStep(spec.page_size, axes["num_pages"], indptr, tensors["kv_indices"], last)
    check_step(step, where)
    return step


def resolve_blob(root: Path, path: str, where: str) -> Path:
    """The file that a workload's relative path means; paths that leave the trace set are refused."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise EvenkvError(
            f"{where}: path: wanted one inside the trace set, got {path!r}.", "Correct the workload's path."
        )
    return root / path
