"""Files that are there whole or not at all, and generated blocks inside written pages."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from evenkv.errors import EvenkvError


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file through a temporary neighbour: nobody ever meets half of it."""
    write_all_atomic({path: content})


def write_all_atomic(contents: Mapping[Path, bytes]) -> None:
    """Write several files: all lie on the disk under temporary names before the first moves.

    A full disk or an unwritable folder therefore leaves every old file as it was. Order matters where one
    file points at another: they take their places in the mapping's order.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            staged.append((Path(name), path))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp makes files private; a data set is for everyone that may read its folder.
            os.chmod(name, 0o644)
        for temporary, path in staged:
            os.replace(temporary, path)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def replace_block(page: str, text: str, markers: tuple[str, str], block: str) -> str:
    """`text` with `block` between the two markers; `page` is its name in the error.

    Raises
    ------
    EvenkvError
        When the markers are not there exactly once, in order.
    """
    begin, end = (text.find(marker) for marker in markers)
    if any(text.count(marker) != 1 for marker in markers) or end < begin:
        raise EvenkvError(
            f"{page}: wanted the lines {markers[0]} and {markers[1]}, once each and in this order.",
            "Restore them around the tables.",
        )
    return f"{text[: begin + len(markers[0])]}\n{block}\n{text[end:]}"
