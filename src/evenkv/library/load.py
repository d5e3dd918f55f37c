"""Built files -> Python functions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenkv.errors import EvenkvError


def load_shared_library(path: Path, symbol: str) -> Callable[..., Any]:
    """The function that a tvm-ffi library exports as `symbol`; the library stays loaded."""
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise EvenkvError(
            f"The built library {path} does not load: {error}.",
            "Put the folder of the missing library (for CUDA, the toolkit's lib64) on LD_LIBRARY_PATH.",
        ) from error
    try:
        return getattr(module, symbol)
    except AttributeError:
        raise EvenkvError(
            f"The built library {path} exports no function {symbol!r}.",
            f"Export it with TVM_FFI_DLL_EXPORT_TYPED_FUNC({symbol}, ...).",
        ) from None


def load_python(folder: Path, package: str, entry_file: Path, symbol: str) -> Callable[..., Any]:
    """Import `entry_file` inside `folder` as a module of a package of its own and take `symbol`.

    The folder never goes on `sys.path`: two kernels may both hold a `main.py`.
    """
    if package not in sys.modules:
        sys.modules[package] = _package(folder, package)
    module_name = ".".join((package, *entry_file.with_suffix("").parts))
    try:
        module = importlib.import_module(module_name)
        return getattr(module, symbol)
    except Exception as error:
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]
        raise EvenkvError(
            f"Kernel module {folder / entry_file} gives no function {symbol!r}: "
            f"{type(error).__name__}: {error}.",
            "Install what it imports, or mend the module.",
        ) from error


def _package(folder: Path, package: str) -> types.ModuleType:
    init = folder / "__init__.py"
    if not init.is_file():
        module = types.ModuleType(package)
        module.__path__ = [str(folder)]
        return module
    spec = importlib.util.spec_from_file_location(package, init, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)
    return module


def passing_outputs(function: Callable[..., Any]) -> Callable[..., None]:
    """Adapt a function that returns `(output, lse)` to one that fills its last two arguments."""

    def fill(*arguments: Any) -> None:
        *inputs, output, lse = arguments
        returned = function(*inputs)
        for destination, value in zip((output, lse), returned, strict=True):
            if destination.shape != value.shape:
                # copy_ would broadcast a wrong shape in silence.
                raise EvenkvError(
                    f"The kernel returned shape {tuple(value.shape)}, wanted {tuple(destination.shape)}.",
                    "Mend the kernel, or pass outputs of the definition's shape.",
                )
            destination.copy_(value)

    return fill
