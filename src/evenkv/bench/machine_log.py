"""What a run saw of the machine and a row has no field for: `<gpu>.machine.log` beside `<gpu>.jsonl`.

JSON lines, append only. Rows tell what a kernel does; these lines tell under which temperature and throttling
it did so, what planning took the peers that plan, which of their settings was the fastest, and how long
nothing takes on this GPU.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from evenkv.bench.case import Case
from evenkv.bench.protocol import Outcome
from evenkv.bench.record import append_lines, when
from evenkv.errors import EvenkvError


class RunEntry(BaseModel):
    """The start of a run. `launch_floor_us` is a kernel that does nothing, by the rows' timer, L2 cold.

    `read_gbps` is what a plain reduction of torch reads: cards of one name differ in it, and what reads a
    cache feels that more than the copy does. Older lines have none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["run"] = "run"
    when: str
    gpu: str
    copy_peak_gbps: float
    launch_floor_us: float | None
    read_gbps: float | None = None


class CaseEntry(BaseModel):
    """One case: the least and the most of `temperature_c` beside the timed rounds of all implementations.

    `plan_us` is the host's time of planning, by implementation, for those that plan; `settings` are those
    chosen where an implementation has several.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["case"] = "case"
    when: str
    case: str
    temperature_c: tuple[float, float] | None
    throttle_reasons: tuple[str, ...]
    plan_us: dict[str, float]
    settings: dict[str, str]


Entry = RunEntry | CaseEntry
_LINE: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def log_path(rows_path: Path) -> Path:
    """Of the rows file's log."""
    return rows_path.with_name(f"{rows_path.stem}.machine.log")


def log_run(
    rows_path: Path,
    gpu: str,
    copy_peak_gbps: float,
    launch_floor_us: float | None,
    read_gbps: float | None,
) -> None:
    """Append the start of a run."""
    _append(
        rows_path,
        RunEntry(
            when=when(),
            gpu=gpu,
            copy_peak_gbps=round(copy_peak_gbps, 2),
            launch_floor_us=None if launch_floor_us is None else round(launch_floor_us, 3),
            read_gbps=None if read_gbps is None else round(read_gbps, 1),
        ),
    )


def log_case(rows_path: Path, case: Case, outcomes: Mapping[str, Outcome]) -> None:
    """Append what the outcomes tell of the machine; nothing where they tell nothing."""
    seen = [o.temperature_c for o in outcomes.values() if o.temperature_c is not None]
    entry = CaseEntry(
        when=when(),
        case=case.name,
        temperature_c=(min(low for low, _ in seen), max(high for _, high in seen)) if seen else None,
        throttle_reasons=tuple(sorted({why for o in outcomes.values() for why in o.throttle_reasons})),
        plan_us={name: round(o.plan_us, 2) for name, o in outcomes.items() if o.plan_us},
        settings={name: o.setting for name, o in outcomes.items() if o.setting not in (None, "default")},
    )
    if entry.temperature_c or entry.plan_us:
        _append(rows_path, entry)


def load_log(rows_path: Path) -> list[Entry]:
    """The lines of a rows file's log; none where there is none. A last line that was cut off is left out.

    Raises
    ------
    EvenkvError
        When a line is of another schema.
    """
    path = log_path(rows_path)
    if not path.is_file():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line]


def launch_floor_us(entries: Iterable[Entry]) -> float | None:
    """Median over the runs; None where nobody measured it."""
    found = [e.launch_floor_us for e in entries if isinstance(e, RunEntry) and e.launch_floor_us]
    return statistics.median(found) if found else None


def describe(entries: Sequence[Entry]) -> str | None:
    """A paragraph for the results page; None without entries."""
    cases = [entry for entry in entries if isinstance(entry, CaseEntry)]
    parts = []
    if floor := launch_floor_us(entries):
        parts.append(f"a kernel that does nothing takes {floor:.1f} us")
    if reads := [e.read_gbps for e in entries if isinstance(e, RunEntry) and e.read_gbps]:
        parts.append(f"a plain reduction reads at {statistics.median(reads):.0f} GB/s")
    if warm := [entry.temperature_c for entry in cases if entry.temperature_c]:
        low, high = min(low for low, _ in warm), max(high for _, high in warm)
        parts.append(f"{low:.0f} to {high:.0f} degrees Celsius")
        throttled = Counter(why for entry in cases for why in entry.throttle_reasons)
        seen = ", ".join(f"{why} in {count} cases" for why, count in sorted(throttled.items()))
        parts.append(f"throttled: {seen or 'never'}")
    names = sorted({name for entry in cases for name in entry.plan_us})
    for name in names:
        plans = [entry.plan_us[name] for entry in cases if name in entry.plan_us]
        took = f"{statistics.median(plans):.0f} us on the host (median of {len(plans)})"
        parts.append(f"{name} plans for {took}")
    return f"The machine: {'; '.join(parts)}." if parts else None


def append_log(rows_path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append lines of another run's log, as plain objects."""
    for entry in entries:
        _append(rows_path, _LINE.validate_python(entry))


def _append(rows_path: Path, entry: Entry) -> None:
    append_lines(log_path(rows_path), [entry.model_dump_json()])


def _parse(path: Path, number: int, line: str) -> Entry:
    try:
        return _LINE.validate_json(line)
    except ValidationError as error:
        said = str(error).splitlines()[0]
        raise EvenkvError(
            f"{path}, line {number}: not a line of this log: {said}.",
            "Move the file away, or remove the line.",
        ) from None
