"""What this machine has for the main job: GPU, driver, compilers, packages."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from dataclasses import dataclass

from evenkv.errors import EvenkvError
from evenkv.library import toolchain


@dataclass(frozen=True)
class Part:
    """One thing that the package uses. `found` is None when it is missing; then `remedy` says how to get it.

    `needed_for` is the work that does not run without it.
    """

    name: str
    found: str | None
    needed_for: str
    remedy: str = ""


# What docs/reproduce.md installs with, in the checkout's folder: the versions of constraints.txt, which does
# not have the FlashAttention-3 peer because only Hopper runs it.
INSTALL = "pip install -c constraints.txt -e '.[test,bench]'"
INSTALL_FA3 = "pip install tokenspeed-fa3==3.0.0.post20260810"
INSTALL_RAY = "pip install -c constraints.txt -e '.[ray]'"

# (name shown, distribution, module, what for, remedy)
_PACKAGES = (
    ("torch", "torch", "torch", "everything", INSTALL),
    ("triton", "triton", "triton", "Triton solutions", f"{INSTALL} (Linux only)"),
    ("flashinfer", "flashinfer-python", "flashinfer", "FlashInfer baselines", INSTALL),
    ("flashinfer-bench", "flashinfer-bench", "flashinfer_bench", "everything", INSTALL),
    ("tvm-ffi", "apache-tvm-ffi", "tvm_ffi", "C++ and CUDA solutions", INSTALL),
    ("fa3", "tokenspeed-fa3", "flash_attn_interface", "FlashAttention-3 baseline", INSTALL_FA3),
    ("cupti-python", "cupti-python", "cupti", "CUPTI timing in `evenkv bench`", f"{INSTALL} (Linux only)"),
    ("matplotlib", "matplotlib", "matplotlib", "plots of `evenkv bench --report`", INSTALL),
    ("ray", "ray", "ray", "`evenkv bench --ray` (optional)", INSTALL_RAY),
)
REQUIRED = ("python", "torch", "flashinfer-bench")


def inspect_machine() -> list[Part]:
    """Everything that doctor prints, missing parts included."""
    driver = driver_version()
    gpus = gpu_names()
    parts = [
        Part("python", platform.python_version(), "everything"),
        Part("GPU", ", ".join(gpus) or None, "traces and speeds", "run on a machine with an NVIDIA GPU"),
        Part("driver", driver, "traces and speeds", "install NVIDIA's driver"),
        Part("NVML", _nvml(), "clocks in rows of `evenkv bench`", "install NVIDIA's driver"),
        Part("CUDA of torch", _torch_cuda(), "traces and speeds", "install a CUDA build of torch"),
        Part(
            "nvcc",
            _compiler(toolchain.find_nvcc),
            "CUDA solutions",
            "install the CUDA toolkit, set CUDA_HOME",
        ),
        Part("g++", _compiler(toolchain.find_cxx), "C++ and CUDA solutions", "install g++, or set CXX"),
        Part("ninja", _ninja(), "C++ and CUDA solutions", INSTALL),
    ]
    for name, distribution, module, purpose, remedy in _PACKAGES:
        parts.append(Part(name, _package(distribution, module), purpose, remedy))
    return parts


def driver_version() -> str | None:
    """NVIDIA's driver version, as nvidia-smi reports it."""
    lines = _nvidia_smi("driver_version")
    return lines[0] if lines else None


def gpu_names() -> list[str]:
    """Names of the GPUs that the driver sees."""
    return _nvidia_smi("name")


def can_run(parts: list[Part]) -> bool:
    """Whether the main job runs in some form."""
    return all(part.found for part in parts if part.name in REQUIRED)


def _nvidia_smi(field: str) -> list[str]:
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _nvml() -> str | None:
    # The driver's own library: `evenkv bench` reads clocks from it without nvidia-ml-py.
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return "found"


def _torch_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.version.cuda if torch.cuda.is_available() else None


def _compiler(find) -> str | None:
    try:
        path = find()
        text = toolchain.compiler_version(path)
    except (EvenkvError, OSError):
        return None
    version = re.search(r"V(\d+(?:\.\d+)+)", text) or re.search(r"(\d+(?:\.\d+)+)", text)
    return f"{version[1] if version else 'unknown version'} ({path})"


def _ninja() -> str | None:
    try:
        toolchain.require_ninja()
    except EvenkvError:
        return None
    return "found"


def _package(distribution: str, module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
