"""Edits of the authored sources, and what both instruments begin with: a launch that prints what it was told.

A launch whose sm_scale is PRINT computes nothing; it prints what the launch before it noted.
"""

from __future__ import annotations

Edit = tuple[str, str, str]  # file, text, replacement

PRINT = 12345.0

_BEFORE_HELPERS = "// Named barriers of a block: some"
_ENTRY = "  const Schedule& schedule = shared.schedule;\n"


def after(file: str, text: str, code: str) -> Edit:
    """`code` behind `text`, on a line of its own."""
    return (file, text, f"{text}{code}\n")


def before(file: str, text: str, code: str) -> Edit:
    """`code` before `text`, on a line of its own."""
    return (file, text, f"{code}\n{text}")


def instrument(helpers: str, print_noted: str, at_entry: str) -> list[Edit]:
    """Device functions, the launch that calls `print_noted`, and what every other launch does first."""
    printing = f"  if (p.sm_scale == {PRINT}f) {{\n    {print_noted}\n    return;\n  }}"
    return [
        ("kernel.cu", "#include <algorithm>", "#include <algorithm>\n#include <cstdio>"),
        before("ptx.cuh", _BEFORE_HELPERS, helpers),
        before("kernel.cuh", _ENTRY, f"{printing}\n  {at_entry}"),
    ]
