"""Small kernel folders for the tests of packing and building."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

CPP_MANIFEST: dict[str, Any] = {
    "name": "adder",
    "author": "evenkv",
    "language": "cpp",
    "entry_point": "binding.cpp::run",
    "destination_passing_style": True,
    "binding": "tvm-ffi",
    "target_hardware": ["cpu"],
    "dependencies": [],
    "trace_set": "main",
    "description": "Adds the group size.",
    "sources": ["**/*.cpp", "**/*.h"],
    "supports": {
        "kv_dtypes": ["bfloat16"],
        "head_dims": [128],
        "max_group_size": 8,
        "group_sizes": None,
        "page_sizes": [1, 16],
    },
    "config_templates": {"definition.h": "definition.h.j2"},
}

CPP_FILES = {
    "binding.cpp": (
        "#include <tvm/ffi/function.h>\n"
        '#include "detail/offset.h"\n'
        "static int64_t run(int64_t x) { return x + kOffset; }\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);\n"
    ),
    # CRLF and an accent: packing must not touch a byte.
    "detail/offset.h": '#pragma once\r\n#include "definition.h"\r\n// écart\r\n'
    "constexpr int kOffset = kGroupSize;\r\n",
    "definition.h.j2": "#pragma once\nconstexpr int kGroupSize = {{ spec.group_size }};\n",
    "notes.md": "not packed\n",
}


def manifest(**changes: Any) -> dict[str, Any]:
    """The C++ manifest with fields replaced."""
    return {**copy.deepcopy(CPP_MANIFEST), **changes}


def make_folder(
    root: Path, fields: dict[str, Any] | None = None, files: dict[str, str] | None = None
) -> Path:
    """Write a kernel folder under `root`, named as its manifest says."""
    fields = manifest() if fields is None else fields
    folder = root / fields["name"]
    for path, text in (CPP_FILES if files is None else files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    (folder / "kernel.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder
