"""The binding of evenkv_cuda on a CPU, its launcher played by a stub: what it refuses, what it passes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import tvm_ffi.cpp

from evenkv.library import toolchain
from evenkv.library.load import load_shared_library
from evenkv.numerics.problem import make_problem
from evenkv.pack.manifest import find_kernel
from evenkv.pack.render import pack_solution
from evenkv.paths import find_repository
from evenkv.spec.family import DecodeSpec

SPEC = DecodeSpec(32, 8, 128, 16, "float8_e4m3fn")
NAMES = (*SPEC.input_names, "output", "lse")

# Fails with what it was told, so that a test can read it.
LAUNCHER = """
#include <string>
#include "params.h"
#include "scratch.h"
namespace evenkv {
const char* launch_decode(DecodeParams& p, int32_t device, void*) {
  static std::string told;
  told = "batch " + std::to_string(p.batch) + ", pages " + std::to_string(p.num_pages) + " of " +
         std::to_string(p.page_size) + ", listed " + std::to_string(p.num_kv_indices) + ", KV heads " +
         std::to_string(p.num_kv_heads) + ", strides " + std::to_string(p.q_stride_batch) + " " +
         std::to_string(p.q_stride_head) + " " + std::to_string(p.k_stride_page) + " " +
         std::to_string(p.v_stride_slot) + ", parts " + std::to_string(p.invariant_tokens) + " " +
         std::to_string(p.always_cut);
  return told.c_str();
}
const char* fill_scratch(int32_t) { return nullptr; }
int32_t last_tensor_copies() { return 0; }
}  // namespace evenkv
"""

Change = Callable[[torch.Tensor], torch.Tensor]


def _build(folder: Path, device: str) -> Path:
    toolchain.require_ninja()
    for source in pack_solution(find_kernel(find_repository(), "evenkv_cuda"), SPEC).sources:
        if source.path.endswith((".h", ".cuh", ".cpp")):
            (folder / source.path).write_text(source.content.replace("kDLCUDA", device))
    (folder / "launcher.cpp").write_text(LAUNCHER)
    files = [str(folder / name) for name in ("binding.cpp", "launcher.cpp")]
    objects = folder / "objects"
    objects.mkdir()
    return Path(
        tvm_ffi.cpp.build(
            name="kernel",
            cpp_files=files,
            extra_include_paths=[str(folder)],
            build_directory=str(objects),
        )
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("binding"), "kDLCPU")


def _arguments(**changes: Change) -> list[torch.Tensor | float]:
    problem = make_problem(SPEC, [40, 0, 7], seed=1)
    arguments = dict(zip(NAMES, (*problem.inputs(), *problem.empty_outputs()), strict=True))
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    return list(arguments.values())


def _moved(t: torch.Tensor, elements: int) -> torch.Tensor:
    return t.new_empty(t.numel() + elements)[elements:].view(t.shape)


def _wider(t: torch.Tensor, elements: int) -> torch.Tensor:
    return t.new_empty(*t.shape[:-1], t.shape[-1] + elements)[..., : t.shape[-1]]


def _every_second(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2]


TENSORS = [name for name in NAMES if name != "sm_scale"]
FIXED = [name for name in TENSORS if name != "kv_indices"]
REFUSED: list[tuple[str, Change, type[Exception], str]] = [
    *((name, lambda t: t.double(), TypeError, "wanted .*, got float64") for name in TENSORS),
    *((name, lambda t: t[None], ValueError, r"wanted shape \[.*\], got \[1, ") for name in TENSORS),
    *((name, lambda t: t[..., :-1], ValueError, r"wanted shape \[") for name in FIXED),
    *((name, _every_second, ValueError, "wanted a last dimension of stride 1, got 2") for name in TENSORS),
    *((name, lambda t: _wider(t, 8), ValueError, "wanted a contiguous tensor") for name in ("output", "lse")),
    *((name, lambda t: _moved(t, 8), ValueError, "multiples of 16") for name in ("k_cache", "v_cache")),
    *((name, lambda t: _wider(t, 8), ValueError, "multiples of 16") for name in ("k_cache", "v_cache")),
    ("output", lambda t: _moved(t, 4), ValueError, "multiples of 16"),
    ("q", lambda t: _moved(t, 1), ValueError, "multiples of 4"),
    ("kv_indices", lambda t: t.new_empty((1 << 26) + 1), ValueError, "wanted at most 1073741824 slots"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "kind", "message"), REFUSED)
def test_a_wrong_argument_is_named(
    library: Path, name: str, change: Change, kind: type[Exception], message: str
) -> None:
    for symbol in ("run", "run_batch_invariant", "run_always_cut"):
        with pytest.raises(kind, match=f"^{name}: .*{message}"):
            load_shared_library(library, symbol)(*_arguments(**{name: change}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "4096 128 16384 1024"),
        ({"q": lambda t: _moved(t, 2)}, "4096 128 16384 1024"),
        ({"q": lambda t: _wider(t, 2)}, "4160 130 16384 1024"),
        ({"k_cache": lambda t: _wider(t, 16)}, "4096 128 18432 1024"),
        ({"v_cache": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "4096 128 16384 128"),
    ],
)
def test_what_the_launcher_is_told(library: Path, changes: dict[str, Change], told: str) -> None:
    arguments = _arguments(**changes)
    pages, listed = (len(arguments[NAMES.index(name)]) for name in ("k_cache", "kv_indices"))  # type: ignore[arg-type]
    shapes = f"batch 3, pages {pages} of 16, listed {listed}, KV heads 8"
    for symbol, parts in (("run", "0 0"), ("run_batch_invariant", "2048 0"), ("run_always_cut", "0 1")):
        with pytest.raises(RuntimeError, match=f"^{shapes}, strides {told}, parts {parts}$"):
            load_shared_library(library, symbol)(*arguments)


def test_host_tensors_are_refused(tmp_path: Path) -> None:
    run = load_shared_library(_build(tmp_path, "kDLCUDA"), "run")
    with pytest.raises(ValueError, match="^q: wanted a CUDA tensor, got device type 1"):
        run(*_arguments())
