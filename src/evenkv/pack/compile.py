"""Device-compile CUDA kernels for several targets without a GPU, and read what ptxas says of them."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evenkv.errors import EvenkvError
from evenkv.files import write_atomic
from evenkv.library import toolchain
from evenkv.pack.manifest import Kernel
from evenkv.pack.render import pack_solution
from evenkv.spec.family import DecodeSpec

ARCHS = ("sm_80", "sm_90a", "sm_100a")

# A target that does not end in this time is a fault of the source (runaway templates), not patience.
_DEADLINE_S = 900
_MAX_JOBS = 2

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


@dataclass(frozen=True)
class FunctionUsage:
    """What ptxas reports of one function: registers a thread; bytes of stack, spills and static smem."""

    name: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem: int = 0


@dataclass(frozen=True)
class CompileUnit:
    """One `.cu` file with the quoted headers it reaches, as rendered; several definitions may share it."""

    kernel: str
    source: str
    files: tuple[tuple[str, str], ...]
    specs: tuple[str, ...]


@dataclass(frozen=True)
class CompileResult:
    """One unit on one target.

    `ok` means compiled and without spills. `registers`, `stack`, `spill_stores`, `spill_loads` and `smem`
    are the largest over `functions`. `seconds` is what the compiler took, also when the result comes from
    the cache (`cached`). `log` is what the compiler printed.
    """

    kernel: str
    source: str
    specs: tuple[str, ...]
    arch: str
    compiled: bool
    functions: tuple[FunctionUsage, ...]
    seconds: float
    log: str
    cached: bool = False

    @property
    def ok(self) -> bool:
        return self.compiled and self.spill_stores == 0 and self.spill_loads == 0

    @property
    def registers(self) -> int:
        return max((f.registers for f in self.functions), default=0)

    @property
    def stack(self) -> int:
        return max((f.stack for f in self.functions), default=0)

    @property
    def spill_stores(self) -> int:
        return max((f.spill_stores for f in self.functions), default=0)

    @property
    def spill_loads(self) -> int:
        return max((f.spill_loads for f in self.functions), default=0)

    @property
    def smem(self) -> int:
        return max((f.smem for f in self.functions), default=0)


def compile_units(kernels: Sequence[Kernel], specs: Sequence[DecodeSpec]) -> list[CompileUnit]:
    """The distinct device compilations: one unit for equal texts of a `.cu` file and its headers."""
    units: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]] = {}
    for kernel in kernels:
        if kernel.manifest.language != "cuda":
            continue
        for spec in specs:
            if not kernel.supports(spec):
                continue
            contents = {s.path: s.content for s in pack_solution(kernel, spec).sources}
            for source in (path for path in contents if path.endswith(".cu")):
                files = tuple((path, contents[path]) for path in sorted(_reached(source, contents)))
                units.setdefault((kernel.name, source, files), []).append(spec.name)
    return [CompileUnit(k, source, files, tuple(names)) for (k, source, files), names in units.items()]


def compile_check(
    kernels: Sequence[Kernel],
    specs: Sequence[DecodeSpec],
    archs: Sequence[str] = ARCHS,
    progress: Callable[[int, int, CompileResult], None] | None = None,
    jobs: int = _MAX_JOBS,
) -> list[CompileResult]:
    """Compile the device code of every CUDA kernel for every target, with flashinfer-bench's flags.

    Parameters
    ----------
    kernels, specs
        What to compile; kernels of other languages and geometries they do not support are passed over.
    archs : sequence of str
        Targets such as "sm_90a".
    progress : callable, optional
        Called as `progress(done, total, result)` after every target, in the caller's thread.
    jobs : int
        Compilers at a time, at most 2.

    Returns
    -------
    list of CompileResult
        In the order of units and targets. A source that does not compile is a result, not an exception.

    Raises
    ------
    EvenkvError
        When nvcc is missing, or a target's name is not of the form sm_XX.
    """
    tasks = [(unit, arch) for unit in compile_units(kernels, specs) for arch in archs]
    if not tasks:
        return []
    nvcc = toolchain.find_nvcc()
    flags = {arch: _flags(arch) for arch in archs}
    results: dict[int, CompileResult] = {}
    pool = ThreadPoolExecutor(max(1, min(jobs, _MAX_JOBS)))
    try:
        waiting = {
            pool.submit(_compile_cached, nvcc, flags[arch], unit, arch): at
            for at, (unit, arch) in enumerate(tasks)
        }
        for future in as_completed(waiting):
            result = results[waiting[future]] = future.result()
            if progress is not None:
                progress(len(results), len(tasks), result)
    finally:
        # An interrupt must not sit through what has not started yet.
        pool.shutdown(wait=True, cancel_futures=True)
    return [results[at] for at in range(len(tasks))]


def parse_ptxas(log: str) -> tuple[FunctionUsage, ...]:
    """Usage of every function in the output of `ptxas -v`, in the order in which it is printed."""
    usage: dict[str, FunctionUsage] = {}
    entry = current = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = current = match[1]
            usage.setdefault(entry, FunctionUsage(entry))
        elif match := _PROPERTIES.search(line):
            current = match[1]
            usage.setdefault(current, FunctionUsage(current))
        elif (match := _STACK.search(line)) and current is not None:
            stack, stores, loads = map(int, match.groups())
            usage[current] = replace(usage[current], stack=stack, spill_stores=stores, spill_loads=loads)
        elif (match := _USED.search(line)) and entry is not None:
            smem = _SMEM.search(line)
            used = replace(usage[entry], registers=int(match[1]), smem=int(smem[1]) if smem else 0)
            usage[entry] = used
    return tuple(usage.values())


def _reached(source: str, contents: dict[str, str]) -> set[str]:
    """`source` and all packed files it includes in quotes, found beside the includer or from the root."""
    reached, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for name in _INCLUDE.findall(contents[path]):
            candidates = (posixpath.normpath(posixpath.join(posixpath.dirname(path), name)), name)
            waiting += [c for c in candidates if c in contents][:1]
    return reached


def _flags(arch: str) -> tuple[str, ...]:
    match = re.fullmatch(r"sm_(\d+[a-z]?)", arch)
    if match is None:
        raise EvenkvError(f"Unknown target {arch!r}.", "Name targets as nvcc does, for example sm_90a.")
    target = f"-gencode=arch=compute_{match[1]},code={arch}"
    return (*toolchain.NVCC_FLAGS, target, "-cubin", "-Xptxas", "-v")


def _compile_cached(nvcc: Path, flags: tuple[str, ...], unit: CompileUnit, arch: str) -> CompileResult:
    key_inputs = (unit.source, unit.files, flags, toolchain.compiler_version(nvcc))
    key = hashlib.sha256(json.dumps(key_inputs).encode()).hexdigest()[:32]
    cache_file = toolchain.cache_folder() / "compile" / f"{key}.json"
    result = _from_cache(cache_file, unit, arch)
    if result is None:
        result = _compile(nvcc, flags, unit, arch)
        # A failure may be the machine's (a full disk, a deadline), so only success is kept.
        if result.compiled:
            record = asdict(result)
            kept = {name: record[name] for name in ("functions", "seconds", "log")}
            write_atomic(cache_file, json.dumps(kept).encode())
    return result


def _from_cache(path: Path, unit: CompileUnit, arch: str) -> CompileResult | None:
    try:
        record = json.loads(path.read_bytes())
        functions = tuple(FunctionUsage(**usage) for usage in record["functions"])
        seconds, log = float(record["seconds"]), str(record["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CompileResult(unit.kernel, unit.source, unit.specs, arch, True, functions, seconds, log, True)


def _compile(nvcc: Path, flags: tuple[str, ...], unit: CompileUnit, arch: str) -> CompileResult:
    with tempfile.TemporaryDirectory(prefix="evenkv-compile-") as name:
        folder = Path(name)
        for path, content in unit.files:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode())
        command = [str(nvcc), *flags, *_include_flags(folder), "-o", str(folder / "out.cubin")]
        start = time.perf_counter()
        try:
            ran = subprocess.run(
                [*command, str(folder / unit.source)], capture_output=True, text=True, timeout=_DEADLINE_S
            )
            log, compiled = ran.stdout + ran.stderr, ran.returncode == 0
        except subprocess.TimeoutExpired:
            log, compiled = f"nvcc did not end within {_DEADLINE_S} s.", False
        seconds = time.perf_counter() - start
    functions = parse_ptxas(log) if compiled else ()
    log = log.replace(f"{folder}/", "")
    return CompileResult(unit.kernel, unit.source, unit.specs, arch, compiled, functions, seconds, log)


def _include_flags(folder: Path) -> Iterator[str]:
    import tvm_ffi.libinfo

    for path in (folder, tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()):
        yield f"-I{path}"
