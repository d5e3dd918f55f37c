"""The compilers that builds use, found the way flashinfer-bench's builder (tvm-ffi) finds them."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from evenkv.errors import EvenkvError

# Exactly what tvm-ffi passes on Linux. The library passes nothing more, so that packed and library
# builds give equal bits; compile checks use the same flags for the same reason.
CXX_FLAGS = ("-std=c++17", "-fPIC", "-O2")
NVCC_FLAGS = ("-Xcompiler", "-fPIC", "-std=c++17", "-O2")

_ARCH_VARIABLE = "TVM_FFI_CUDA_ARCH_LIST"


def cache_folder() -> Path:
    """EVENKV_CACHE, else `~/.cache/evenkv`; not created here."""
    override = os.environ.get("EVENKV_CACHE")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "evenkv"


def find_nvcc() -> Path:
    """The CUDA compiler.

    Raises
    ------
    EvenkvError
        When no CUDA toolkit is found.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if home:
        candidate = Path(home) / "bin" / "nvcc"
    elif on_path:
        candidate = Path(on_path)
    else:
        candidate = Path("/usr/local/cuda/bin/nvcc")
    if os.access(candidate, os.X_OK):
        return candidate
    raise EvenkvError(
        f"No CUDA compiler: nvcc is not on PATH and {candidate} does not run.",
        "Install the CUDA toolkit (12.8 or later knows sm_100a) and set CUDA_HOME to its folder.",
    )


def find_cxx() -> Path:
    """The C++ compiler: $CXX, else `c++`.

    Raises
    ------
    EvenkvError
        When there is none.
    """
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        raise EvenkvError(
            f"No C++ compiler: {name!r} is not found.", "Install g++, or set CXX to a compiler."
        )
    return Path(found)


def compiler_version(compiler: Path) -> str:
    """What `--version` prints, asked once for each file and modification time."""
    return _version(str(compiler), compiler.stat().st_mtime_ns)


@functools.lru_cache
def _version(compiler: str, _modified: int) -> str:
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    if answer.returncode != 0:
        raise EvenkvError(
            f"{compiler} --version failed: {answer.stderr.strip() or 'no message'}.",
            "Mend the compiler first.",
        )
    return answer.stdout.strip()


def cuda_arch() -> str:
    """Compute capabilities that a CUDA build is for, as tvm-ffi words them ("9.0").

    TVM_FFI_CUDA_ARCH_LIST when set, else what nvidia-smi reports of the first GPU.

    Raises
    ------
    EvenkvError
        When neither is there.
    """
    return os.environ.get(_ARCH_VARIABLE) or _first_gpu_capability()


@functools.lru_cache
def _first_gpu_capability() -> str:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    if not answer.strip():
        raise EvenkvError(
            "No GPU to build CUDA code for: nvidia-smi reports no compute capability.",
            f"Run on a machine with an NVIDIA GPU, or set {_ARCH_VARIABLE}, for example to 9.0.",
        )
    return answer.strip().splitlines()[0].strip()


def host_machine() -> str:
    """Processor family and C library: a cache on a shared disk must not mix them."""
    return f"{platform.machine()} {' '.join(platform.libc_ver())}"


def require_ninja() -> None:
    """See to it that tvm-ffi finds `ninja`, also when the environment's scripts are not on PATH.

    Raises
    ------
    EvenkvError
        When it is not installed.
    """
    if shutil.which("ninja"):
        return
    scripts = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=scripts):
        # `.venv/bin/evenkv` run without activating the environment.
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
        return
    raise EvenkvError("The build tool `ninja` is not found.", "Run `pip install ninja`.")
