"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


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
