"""Kernel folders as Python callables: build once, keep under a key that names all that went in.

flashinfer-bench keys its cache by the sources alone. This one also keys by compilers, flags, architecture
and passing style, so that a measurement never runs a stale build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
from flashinfer_bench.data import Solution

from evenkv.errors import EvenkvError
from evenkv.files import write_atomic
from evenkv.library import toolchain
from evenkv.library.load import load_python, load_shared_library, passing_outputs
from evenkv.pack.manifest import find_kernel
from evenkv.pack.render import pack_solution
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec

_CXX_SUFFIXES = (".cpp", ".cc", ".cxx", ".c")
_CUDA_SUFFIXES = (".cu",)
_ENTRY = "entry.json"
_LIBRARY = "kernel.so"

# g++, nvcc, ptxas and ld; ninja's own "FAILED" line says nothing that these do not.
_COMPLAINT = re.compile(r"\berror\b|cannot find|undefined reference|undefined symbol")

_built: dict[str, Callable[..., None]] = {}
_built_guard = threading.Lock()


def build_kernel(name: str, spec: DecodeSpec) -> Callable[..., None]:
    """Build the kernel `name` for `spec`, or take it from the cache.

    Parameters
    ----------
    name : str
        A folder of `evenkv/kernels`, e.g. "evenkv_cuda".
    spec : DecodeSpec
        Any geometry that the kernel supports, inside the family of definitions or not.

    Returns
    -------
    callable
        Takes the inputs in the order of `spec.input_names`, then `output` (bf16
        `[batch, num_qo_heads, head_dim]`) and `lse` (float32 `[batch, num_qo_heads]`), and fills those two.

    Raises
    ------
    EvenkvError
        Unknown kernel, geometry it does not support, missing compiler or GPU, or code that does not build.
    """
    # The kernels lie inside the package: no trace set is needed to build them.
    return build_solution(pack_solution(find_kernel(Repository(Path()), name), spec))


def build_solution(solution: Solution) -> Callable[..., None]:
    """Build any solution, packed here or elsewhere; `build_kernel` says what comes back."""
    inputs = build_inputs(solution)
    key = cache_key(inputs)
    with _built_guard:
        if key not in _built:
            _built[key] = _build(solution, inputs, key)
        return _built[key]


def build_inputs(solution: Solution) -> dict[str, Any]:
    """All that decides the bits of a build: sources, entry, style, compilers with versions, flags, arch.

    Raises
    ------
    EvenkvError
        When a compiler or the GPU that the sources ask for is missing.
    """
    spec = solution.spec
    inputs: dict[str, Any] = {
        "sources": {source.path: source.content for source in solution.sources},
        "language": spec.language.value,
        "entry_point": spec.entry_point,
        "destination_passing_style": spec.destination_passing_style,
        "binding": spec.binding.value if spec.binding else None,
    }
    if not _is_compiled(solution):
        # Read when the module is imported, so an interpreted module must not be served as a compiled one.
        inputs["triton_interpret"] = os.environ.get("TRITON_INTERPRET", "0")
        return inputs

    import tvm_ffi

    cxx = toolchain.find_cxx()
    inputs |= {
        "tvm_ffi": tvm_ffi.__version__,
        "machine": toolchain.host_machine(),
        "cxx": [str(cxx), toolchain.compiler_version(cxx), *toolchain.CXX_FLAGS],
    }
    if _files(solution, _CUDA_SUFFIXES):
        nvcc = toolchain.find_nvcc()
        inputs["nvcc"] = [str(nvcc), toolchain.compiler_version(nvcc), *toolchain.NVCC_FLAGS]
        inputs["arch"] = toolchain.cuda_arch()
    return inputs


def cache_key(inputs: dict[str, Any]) -> str:
    """sha256 (first 32 hex digits) of the build inputs in a fixed order."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


def _build(solution: Solution, inputs: dict[str, Any], key: str) -> Callable[..., None]:
    if solution.spec.binding is not None and solution.spec.binding.value != "tvm-ffi":
        raise EvenkvError(
            f"Solution {solution.name} has the binding {solution.spec.binding.value!r}.",
            "The library builds 'tvm-ffi' bindings; run this one through flashinfer-bench.",
        )
    root = toolchain.cache_folder() / "library"
    entry = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        # The kernel's lock, not a marker file: a process that is killed lets go of it.
        with filelock.FileLock(root / f"{key}.lock"):
            if not _is_whole(entry, solution):
                _make_entry(entry, solution, inputs)
            function = _load(entry, solution, key)
    except OSError as error:
        raise EvenkvError(
            f"The build cache {root} cannot be used: {error}.",
            "Set EVENKV_CACHE to a folder with free space.",
        ) from error
    if not solution.spec.destination_passing_style:
        return passing_outputs(function)
    return function


def _load(entry: Path, solution: Solution, key: str) -> Callable[..., Any]:
    symbol = solution.get_entry_symbol()
    if _is_compiled(solution):
        return load_shared_library(entry / _LIBRARY, symbol)
    return load_python(entry / "sources", f"evenkv_built_{key}", solution.get_entry_path(), symbol)


def _is_compiled(solution: Solution) -> bool:
    return solution.spec.language.value in ("cuda", "cpp")


def _files(solution: Solution, suffixes: tuple[str, ...]) -> list[str]:
    return [source.path for source in solution.sources if Path(source.path).suffix in suffixes]


def _is_whole(entry: Path, solution: Solution) -> bool:
    """Whether the entry's files are those that were written: a truncated disk or an edit means rebuild."""
    try:
        record = json.loads((entry / _ENTRY).read_text(encoding="utf-8"))
        for source in solution.sources:
            if (entry / "sources" / source.path).read_bytes() != source.content.encode():
                return False
        if _is_compiled(solution):
            return _digest(entry / _LIBRARY) == record["library_sha256"]
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make_entry(entry: Path, solution: Solution, inputs: dict[str, Any]) -> None:
    work = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        for source in solution.sources:
            path = work / "sources" / source.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.content.encode())
        record = {key: value for key, value in inputs.items() if key != "sources"}
        record["solution"] = solution.name
        if _is_compiled(solution):
            os.replace(_compile(work, solution), work / _LIBRARY)
            shutil.rmtree(work / "objects")
            record["library_sha256"] = _digest(work / _LIBRARY)
        (work / _ENTRY).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        os.replace(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(work: Path, solution: Solution) -> Path:
    import tvm_ffi.cpp

    toolchain.require_ninja()
    objects = work / "objects"
    objects.mkdir()
    sources = work / "sources"
    try:
        library = tvm_ffi.cpp.build(
            name="kernel",
            cpp_files=[str(sources / path) for path in _files(solution, _CXX_SUFFIXES)],
            cuda_files=[str(sources / path) for path in _files(solution, _CUDA_SUFFIXES)],
            extra_include_paths=[str(sources)],
            build_directory=str(objects),
        )
    except RuntimeError as error:
        raise _build_fault(work, solution, str(error)) from error
    return Path(library)


def _build_fault(work: Path, solution: Solution, log: str) -> EvenkvError:
    """One line out of a compiler's pages, the rest kept beside the cache entries."""
    log = log.replace(f"{work / 'sources'}/", "")
    kept = work.parent / f"{solution.name}.log"
    write_atomic(kept, log.encode())
    first = next((line for line in log.splitlines() if _COMPLAINT.search(line)), "no line says why")
    remedy = f"Mend the source; the whole log is {kept}."
    if "cannot find -lcudart" in first:
        remedy = f"Set CUDA_HOME to the CUDA toolkit's folder (the one with lib64); the whole log is {kept}."
    return EvenkvError(f"Solution {solution.name} does not build: {first.strip()}.", remedy)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
