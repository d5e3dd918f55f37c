"""Edits of the authored sources, as the labs make them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

Edit = tuple[str, str, str]  # file, text, replacement
SOURCES = Path(__file__).parents[1] / "src/evenkv/kernels/evenkv_cuda"


def after(file: str, text: str, code: str) -> Edit:
    """`code` behind `text`, on a line of its own."""
    return (file, text, f"{text}{code}\n")


def before(file: str, text: str, code: str) -> Edit:
    """`code` before `text`, on a line of its own."""
    return (file, text, f"{code}\n{text}")


def constants(file: str) -> list[tuple[str, dict[str, str]]]:
    """The statements of an authored source that define constants, and the values that they give by name."""
    statements = re.findall(r"^constexpr [^;]+;", (SOURCES / file).read_text(), re.MULTILINE)
    return [(statement, dict(re.findall(r" (k\w+) = ([^,;]+)", statement))) for statement in statements]


def apply(variant: str, edits: Iterable[Edit], contents: dict[str, str]) -> None:
    """Edits `contents`, the sources by file name, in place. An edit that hits nothing is an error."""
    for file, text, replacement in edits:
        if file not in contents or text not in contents[file]:
            raise SystemExit(f"variant {variant}: {file} does not hold {text!r}; amend its edits")
        contents[file] = contents[file].replace(text, replacement)
