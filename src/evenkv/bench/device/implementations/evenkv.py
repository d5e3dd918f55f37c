"""Our kernels, built by the library from the same sources that are packed: one launch, no plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenkv.bench.case import Case
from evenkv.bench.device.implementations.base import Implementation, Prepared, bf16_outputs
from evenkv.bench.device.inputs import Tensors
from evenkv.errors import EvenkvError
from evenkv.library.build import build_kernel
from evenkv.library.toolchain import find_cxx, find_nvcc, require_ninja
from evenkv.pack.manifest import find_kernel
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec

# Requests that evenkv_triton cuts, whatever the geometry and the GPU; 128 MiB of caches at 32 KV heads of 256
# in bf16, and half or less in the usual geometries.
_CUT_BATCH, _CUT_CONTEXT = 2, 2048


class EvenkvKernel(Implementation):
    """`evenkv-cuda` or `evenkv-triton`: the folder `evenkv/kernels/evenkv_cuda` or `..._triton`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._functions: dict[DecodeSpec, Callable[..., None]] = {}

    @property
    def _kernel(self) -> str:
        return self.name.replace("-", "_")

    def _language(self) -> str:
        return find_kernel(Repository(Path()), self._kernel).manifest.language

    def missing(self) -> str | None:
        try:
            if self._language() == "cuda":
                find_nvcc()
                find_cxx()
                require_ninja()
            else:
                import triton  # noqa: F401
        except (EvenkvError, ImportError) as error:
            return str(error)
        return None

    def build_key(self, case: Case) -> Hashable:
        # Triton too: of sizes it compiles no more than `build_cases` has, and each geometry takes it seconds.
        return case.spec().short_name

    def build_cases(self, case: Case) -> tuple[Case, ...]:
        smallest = super().build_cases(case)
        if self._language() != "triton":
            return smallest
        # Triton compiles one kernel for requests that stay whole and one for those that are cut.
        return (*smallest, replace(case, batch=_CUT_BATCH, context=_CUT_CONTEXT, lengths=None))

    def prepare(self, case: Case, tensors: Tensors, setting: str) -> Prepared:
        spec = case.spec()
        if spec not in self._functions:  # packing anew to ask the build cache takes milliseconds
            self._functions[spec] = build_kernel(self._kernel, spec)
        return _PreparedKernel(self._functions[spec], case, tensors)


class _PreparedKernel(Prepared):
    def __init__(self, function: Callable[..., None], case: Case, tensors: Tensors) -> None:
        self._function = function
        self.returned = bf16_outputs(case, tensors.q.device)
        inputs: list[Any] = [getattr(tensors, name) for name in case.spec().input_names]
        self._arguments = (*inputs, *self.returned)

    def call(self) -> None:
        self._function(*self._arguments)
