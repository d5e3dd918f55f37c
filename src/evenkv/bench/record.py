"""The record of measurements: `results/roofline/<gpu>.jsonl`, one row a (case, implementation), append only.

A later row of the same case, implementation and GPU takes the place of an earlier one (`latest`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from evenkv.bench.case import Case
from evenkv.errors import EvenkvError

Status = Literal["ok", "refused", "wrong", "oom", "skipped"]
Timer = Literal["cupti", "events"]

IMPLEMENTATIONS = (
    "evenkv-cuda",
    "evenkv-triton",
    "flashinfer-tc",
    "flashinfer-cc",
    "flashinfer-xqa",
    "fa3",
)
OURS = tuple(name for name in IMPLEMENTATIONS if name.startswith("evenkv-"))
# Its error against fp32 is the measure of the others' errors.
ERROR_PEER = "flashinfer-tc"
MIN_ITERATIONS = 100

_MEASURED = (
    "graph_us",
    "eager_us",
    "host_us",
    "iterations",
    "spread",
    "copy_peak_gbps",
    "matched_copy_us",
    "pct_copy_peak",
    "pct_matched_copy",
    "max_abs_err",
    "rel_err",
    "timer",
    "sm_clock_mhz",
)


class TornLineWarning(UserWarning):
    """A results file ends in half a row, as an interrupted run leaves it; `path` is the file's."""

    def __init__(self, path: Path, done: str) -> None:
        super().__init__(f"{path}: the last line is cut off, as an interruption leaves it; {done}.")
        self.path = path


class Row(BaseModel):
    """One (case, implementation) on one GPU. Times in microseconds, medians of `iterations`.

    `status` "ok" has every measured field; another status has a `reason`. `reason` of an "ok" row is null or
    says why the number is shaky ("unstable: ..."). `spread` is (p10, p90) of `graph_us`; both percentages are
    of `graph_us`. `copy_peak_gbps` is 1e9 bytes a second, read and write counted. `source_hash` is of our
    kernel's sources: the implementation's own, in a peer's row that of evenkv-cuda in the same run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    case: dict[str, Any]
    impl: str
    status: Status
    reason: str | None
    kv_bytes: int
    graph_us: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    iterations: int | None = None
    spread: tuple[float, float] | None = None
    copy_peak_gbps: float | None = None
    matched_copy_us: float | None = None
    pct_copy_peak: float | None = None
    pct_matched_copy: float | None = None
    max_abs_err: float | None = None
    rel_err: float | None = None
    timer: Timer | None = None
    gpu: str
    sm_clock_mhz: tuple[float, float] | None = None
    driver: str | None
    cuda: str | None
    torch: str | None
    peer_version: str | None = None
    source_hash: str
    commit: str | None
    when: str

    @field_validator("case")
    @classmethod
    def _is_a_case(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            return Case.from_json(value).to_json()
        except EvenkvError as error:
            raise ValueError(error.problem) from None

    @model_validator(mode="after")
    def _status_decides_fields(self) -> Row:
        if self.status == "ok":
            missing = [name for name in _MEASURED if getattr(self, name) is None]
            if missing:
                raise ValueError(f"status ok wants {', '.join(missing)}")
            if self.iterations is not None and self.iterations < MIN_ITERATIONS:
                raise ValueError(f"iterations: wanted {MIN_ITERATIONS} or more, got {self.iterations}")
        elif not self.reason:
            raise ValueError(f"status {self.status} wants a reason")
        return self

    def the_case(self) -> Case:
        return Case.from_json(self.case)

    @property
    def unstable(self) -> bool:
        return self.status == "ok" and (self.reason or "").startswith("unstable")


def gpu_file_name(gpu: str) -> str:
    """`nvidia-h200` for "NVIDIA H200": a GPU's rows lie in `<this>.jsonl`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def when() -> str:
    """Now, as rows and the machine's log say it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows, on the disk when this returns; several processes may do so at once."""
    append_lines(path, (row.model_dump_json() for row in rows))


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines of JSON, on the disk when this returns; several processes may do so at once.

    A line that an interrupted run left half-written is removed first: each is there whole or not at all.

    Raises
    ------
    EvenkvError
        When the file cannot be written, e.g. on a full disk (exit code 1: what was there is kept).
    """
    try:
        _append(path, lines)
    except OSError as error:
        remedy = "Free space or mend the rights, then go on with the same command and --resume."
        raise EvenkvError(f"{path}: cannot be written: {error.strerror}.", remedy, exit_code=1) from error


def _append(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _drop_torn_line(handle, path)
        for line in lines:
            rest = memoryview(f"{line}\n".encode())
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.fsync(handle)  # once for all: a case has six, and a run waits for it
    finally:
        os.close(handle)


def load_rows(path: Path) -> list[Row]:
    """Rows of a file in its order; a missing file has none. A torn last line is left out with a warning.

    Raises
    ------
    EvenkvError
        When a line is not a row of this schema (it names file and line), or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        remedy = "Give a file of rows that can be read."
        raise EvenkvError(f"{path}: rows cannot be read: {error.strerror}.", remedy) from error
    *lines, rest = content.split(b"\n")
    if rest:
        warnings.warn(TornLineWarning(path, "left out"), stacklevel=2)
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each (case, implementation, GPU), in the order of first appearance."""
    found: dict[tuple[Case, str, str], Row] = {}
    for row in rows:
        found[row.the_case(), row.impl, row.gpu] = row
    return list(found.values())


def by_case(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    """Rows of one GPU by case and implementation; the last one of each counts."""
    cases: dict[Case, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.the_case(), {})[row.impl] = row
    return cases


def _parse(path: Path, number: int, line: bytes) -> Row:
    remedy = "Move the file away, or correct or remove the line."
    if line.startswith(b"version https://git-lfs"):
        fetch = f'Fetch it with `git lfs pull --include "{path}"`.'
        raise EvenkvError(f"{path} is a Git LFS pointer, not the rows.", fetch)
    try:
        values = json.loads(line)
    except ValueError as error:
        raise EvenkvError(f"{path}, line {number}: not JSON: {error}.", remedy) from None
    try:
        return Row.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        what = f"{place}: {first['msg']}" if place else first["msg"]
        raise EvenkvError(f"{path}, line {number}: not a row of this schema: {what}.", remedy) from None


def _drop_torn_line(handle: int, path: Path) -> None:
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    end, block = size, 65536
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    warnings.warn(TornLineWarning(path, "removed"), stacklevel=4)
    os.ftruncate(handle, end)
