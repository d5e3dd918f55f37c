"""Checks a workload against its definition before anything runs: axes, tensors in files, page tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flashinfer_bench.data import Definition, Workload
from safetensors import SafetensorError, safe_open

from evenkv.errors import EvenkvError
from evenkv.evaluate.load import refuse_lfs_pointer

_SAFETENSORS_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
}
_TABLES = ("kv_indptr", "kv_indices", "kv_last_page_len")

Fault = Callable[[str], EvenkvError]


def request_lengths(definition: Definition, workload: Workload, root: Path) -> list[int]:
    """Check the workload and return the tokens of each request.

    Parameters
    ----------
    root : Path
        The folder that blob paths in the workload are relative to.

    Raises
    ------
    EvenkvError
        When axes, inputs, files or tables disagree with each other or with the definition; it names the
        workload, the argument, what was wanted and what came.
    """

    def fault(problem: str) -> EvenkvError:
        return EvenkvError(
            f"Workload {workload.uuid} of {definition.name}: {problem}.",
            "Restore the workload's line and its blob, or draw it again.",
        )

    if set(workload.axes) != set(definition.var_axes):
        raise fault(f"axes are {sorted(workload.axes)}, wanted {sorted(definition.var_axes)}")
    if set(workload.inputs) != set(definition.inputs):
        raise fault(f"inputs are {sorted(workload.inputs)}, wanted {sorted(definition.inputs)}")
    tables = {}
    for name, shape in zip(definition.inputs, definition.get_input_shapes(workload.axes), strict=True):
        given = workload.inputs[name]
        if given.type == "safetensors":
            wanted = (_SAFETENSORS_NAMES.get(definition.inputs[name].dtype.value), tuple(shape or ()))
            tensor = _read(root / given.path, given.tensor_key, name, wanted, fault)
            if name in _TABLES:
                tables[name] = tensor
        elif name in _TABLES:
            raise fault(f"{name} is {given.type}: wanted a table in a safetensors file")
        elif shape is None and not (given.type == "scalar" and math.isfinite(given.value)):
            raise fault(f"{name} is {given.type}: wanted a finite number")
    return _lengths(definition, workload, tables, fault)


def _read(
    path: Path, key: str, name: str, wanted: tuple[str | None, tuple[int, ...]], fault: Fault
) -> np.ndarray | None:
    try:
        refuse_lfs_pointer(path)
    except EvenkvError as error:
        raise EvenkvError(fault(error.problem.rstrip(".")).problem, error.remedy) from error
    try:
        with safe_open(path, framework="numpy") as file:
            if key not in file.keys():  # noqa: SIM118 - not a mapping
                raise fault(f"{path} has no tensor {key!r}")
            view = file.get_slice(key)
            found = (view.get_dtype(), tuple(view.get_shape()))
            if found != wanted:
                raise fault(
                    f"{name} in {path} is {found[0]} {list(found[1])}, wanted {wanted[0]} {list(wanted[1])}"
                )
            return file.get_tensor(key) if name in _TABLES else None
    except (SafetensorError, OSError) as error:
        raise fault(f"{path} is no readable safetensors file ({error})") from error


def _lengths(
    definition: Definition, workload: Workload, tables: dict[str, np.ndarray], fault: Fault
) -> list[int]:
    axes = workload.axes
    page_size = definition.const_axes["page_size"]
    kv_indptr = tables["kv_indptr"].astype(np.int64)
    if len(kv_indptr) != axes["batch_size"] + 1:
        raise fault(
            f"kv_indptr has {len(kv_indptr)} entries, wanted batch_size + 1 = {axes['batch_size'] + 1}"
        )
    pages = np.diff(kv_indptr)
    if kv_indptr[0] != 0 or (pages < 0).any():
        raise fault("kv_indptr does not rise from 0")
    if kv_indptr[-1] != axes["num_kv_indices"]:
        raise fault(f"num_kv_indices is {axes['num_kv_indices']}, wanted kv_indptr[-1] = {kv_indptr[-1]}")
    ids = tables["kv_indices"]
    if ids.size and not (ids.min() >= 0 and ids.max() < axes["num_pages"]):
        raise fault(
            f"kv_indices reaches from {ids.min()} to {ids.max()}, wanted 0 to {axes['num_pages'] - 1}"
        )
    if "kv_last_page_len" not in tables:
        return (pages * page_size).tolist()
    last = tables["kv_last_page_len"].astype(np.int64)
    wrong = np.flatnonzero((pages > 0) & ((last < 1) | (last > page_size)))
    if wrong.size:
        at = int(wrong[0])
        raise fault(f"kv_last_page_len[{at}] is {last[at]}, wanted 1 to {page_size}")
    return np.where(pages > 0, (pages - 1) * page_size + last, 0).tolist()
