"""Which cases there are: the roofline protocol's grid, its subsets, and cases of the user's own."""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from evenkv.bench.case import Case, lognormal
from evenkv.errors import EvenkvError, count_of
from evenkv.evaluate.load import refuse_lfs_pointer
from evenkv.spec.family import parse_name
from evenkv.workloads.plan import captured_steps

MAX_KV_BYTES = 80 * 10**9
"""The protocol is made for one card of 80 GB: larger caches are listed as skipped, on larger cards too."""

BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = tuple(1024 << step for step in range(8))
QO_HEADS = 32
KV_HEADS = (32, 8, 4)
HEAD_DIM = 128
PAGE_SIZES = (16, 64)
KV_DTYPES = ("bfloat16", "float8_e4m3fn")
SKEWED_BATCHES = (8, 32, 128)
SKEWED_MEANS = (2048, 8192, 32768)
SKEWED_SIGMAS = (0.5, 1.0, 1.5)
SEED = 0
ONE_LONG = (131072,) + (1024,) * 63
TENSOR_PARALLEL_HEADS = ((5, 1), (6, 1), (8, 1), (10, 2), (20, 4))
# (batch, context): one long request, small steps, the sizes between launch-bound and bandwidth-bound.
_TENSOR_PARALLEL_POINTS = (
    (1, 1024),
    (1, 131072),
    (8, 8192),
    (32, 4096),
    (64, 8192),
    (128, 2048),
    (256, 8192),
)
_SKEW_OF_REGIMES = lognormal(8192, 1.0, SEED)


def uniform() -> list[Case]:
    """5 batches x 8 contexts x 3 KV-head counts x 2 page sizes x 2 dtypes, caches beyond 80 GB included."""
    return [
        _case(batch, context, None, kv, ps, dtype)
        for kv, ps, dtype in _geometries()
        for batch, context in itertools.product(BATCHES, CONTEXTS)
    ]


def skewed() -> list[Case]:
    """Lognormal lengths, and one long request among short ones, for each of the grid's geometries."""
    cases = []
    for kv, ps, dtype in _geometries():
        for batch, mean, sigma in itertools.product(SKEWED_BATCHES, SKEWED_MEANS, SKEWED_SIGMAS):
            cases.append(_case(batch, None, lognormal(mean, sigma, SEED), kv, ps, dtype))
        cases.append(_case(len(ONE_LONG), None, ONE_LONG, kv, ps, dtype))
    return cases


def tensor_parallel() -> list[Case]:
    """Head counts of models cut over 2 to 8 GPUs: page 16, and page 1 where an engine was seen to use it."""
    pages = [(heads, 16) for heads in TENSOR_PARALLEL_HEADS] + [((5, 1), 1)]
    return [
        Case(batch, context, None, qo, kv, HEAD_DIM, ps, kv_dtype=dtype)
        for ((qo, kv), ps), dtype in itertools.product(pages, KV_DTYPES)
        for batch, context in _TENSOR_PARALLEL_POINTS
    ]


def captured() -> list[Case]:
    """The captured decode steps that ship with the package: lengths as an engine had them."""
    cases = []
    for step in captured_steps():
        spec = parse_name(step.definition)
        lengths = tuple(int(n) for n in step.lengths)
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
        cases.append(Case(len(lengths), None, lengths, *heads, kv_dtype=spec.kv_dtype))
    return cases


def regimes() -> list[Case]:
    """A small set that fills the table of regimes (`evenkv.bench.regimes`)."""
    points = [
        *[(batch, 1024, 8) for batch in (1, 8)],  # launch-bound
        *[(1, 32768, 8), (32, 4096, 4), (1, 131072, 4), (128, 1024, 4)],  # 128 to 512 MiB
        *[(32, 4096, 8), (1, 131072, 8), (8, 32768, 8), (128, 2048, 8)],  # 512 MiB to 2 GiB
        *[(256, 8192, 8), (256, 8192, 4), (128, 2048, 32)],  # 2 GiB and more
    ]
    cases = [_case(batch, context, None, kv, 16, "bfloat16") for batch, context, kv in points]
    # fp8 halves the bytes: batches or contexts are doubled where that keeps a case in its regime.
    points = [
        *[(1, 65536, 8), (32, 4096, 8), (1, 131072, 8), (128, 2048, 4)],
        *[(8, 65536, 8), (32, 8192, 8), (128, 4096, 8), (128, 2048, 8)],
        *[(256, 8192, 8), (256, 8192, 4), (128, 4096, 32)],
    ]
    cases += [_case(batch, context, None, kv, 16, "float8_e4m3fn") for batch, context, kv in points]
    last, middle = ONE_LONG[::-1], (*ONE_LONG[1:32], ONE_LONG[0], *ONE_LONG[32:])
    for dtype in KV_DTYPES:
        for lengths in (ONE_LONG, last, middle):
            cases.append(_case(len(lengths), None, lengths, 8, 16, dtype))
        cases.append(_case(32, None, _SKEW_OF_REGIMES, 8, 16, dtype))
    # Shown beside a skewed batch: the uniform one of the same bytes (to half a token a request).
    cases += [uniform_partner(case) for case in cases if case.lengths is not None]
    cases.append(Case(64, 8192, None, 5, 1, HEAD_DIM, 1))
    return _unique([*cases, *captured()])


def smoke() -> list[Case]:
    """Twelve cases over all regimes, for a run of less than a minute."""
    bf16, fp8 = KV_DTYPES
    small, large = [c for c in captured() if (c.num_qo_heads, c.num_kv_heads) == (5, 1)][:2]
    return [
        _case(1, 1024, None, 8, 16, bf16),
        _case(32, 4096, None, 8, 16, bf16),
        _case(256, 8192, None, 8, 16, bf16),
        _case(len(ONE_LONG), None, ONE_LONG, 8, 16, bf16),
        _case(32, None, _SKEW_OF_REGIMES, 8, 16, bf16),
        _case(1, 131072, None, 8, 16, fp8),
        _case(32, 4096, None, 8, 16, fp8),
        _case(len(ONE_LONG), None, ONE_LONG, 8, 16, fp8),
        _case(32, 4096, None, 4, 64, bf16),
        Case(64, 8192, None, 5, 1, HEAD_DIM, 1),
        small,
        large,
    ]


def protocol() -> list[Case]:
    """Everything: what has to have a row for the claim to be complete."""
    return _unique([*uniform(), *skewed(), *captured(), *tensor_parallel(), *regimes()])


PRESETS: Mapping[str, Callable[[], list[Case]]] = {
    "smoke": smoke,
    "regimes": regimes,
    "protocol": protocol,
}


def uniform_partner(case: Case) -> Case:
    """The uniform batch of the same geometry, requests and (to half a token a request) bytes."""
    context = max(1, round(case.total_tokens() / case.batch))
    return Case(case.batch, context, None, **_geometry_of(case))


def load_cases(path: Path) -> list[Case]:
    """Cases of a file: a JSON list of case objects, or JSON lines of case objects or of result rows.

    Raises
    ------
    EvenkvError
        When the file is missing or no such list; it names the entry.
    """
    text = _cases_text(path)
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    except (ValueError, RecursionError) as error:
        raise EvenkvError(f"--cases {path}: not JSON: {error}.", "Give a JSON list or JSON lines.") from None
    cases = []
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, dict) and isinstance(entry.get("case"), dict):
            entry = entry["case"]
        try:
            cases.append(Case.from_json(entry))
        except EvenkvError as error:
            raise EvenkvError(f"--cases {path}, entry {number}: {error.problem}", error.remedy) from None
    if not cases:
        raise EvenkvError(f"--cases {path}: it has no cases.", "Give a JSON list or JSON lines.")
    return _unique(cases)


def _cases_text(path: Path) -> str:
    remedy = "Give a file of cases: a JSON list, or JSON lines."
    if path.is_dir():
        raise EvenkvError(f"--cases {path}: wanted a file, got a directory.", remedy)
    if not path.exists():
        raise EvenkvError(f"--cases {path}: no such file.", remedy)
    if not path.is_file():
        raise EvenkvError(f"--cases {path}: wanted a plain file, got a pipe or a device.", remedy)
    try:
        refuse_lfs_pointer(path)
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise EvenkvError(f"--cases {path}: wanted UTF-8 text, got other bytes: {error}.", remedy) from None
    except OSError as error:
        raise EvenkvError(f"--cases {path}: cannot be read: {error.strerror}.", remedy) from None
    except EvenkvError as error:
        raise EvenkvError(f"--cases: {error.problem}", error.remedy) from None


def select(cases: Sequence[Case], pattern: str | None) -> list[Case]:
    """Cases whose name contains the pattern or, where it has `*` or `?`, matches it from end to end.

    Raises
    ------
    EvenkvError
        When none does.
    """
    if pattern is None:
        return list(cases)
    wanted = pattern.lower()
    glob = any(sign in wanted for sign in "*?")
    chosen = [
        case
        for case in cases
        if (fnmatch.fnmatchcase(case.name.lower(), wanted) if glob else wanted in case.name.lower())
    ]
    if not chosen:
        remedy = "See the names with --list."
        if glob:
            remedy += " With * or ? a pattern has to match a name from end to end: begin and end it with *."
        count = count_of(len(cases), "case")
        raise EvenkvError(
            f"--only {pattern!r} matches none of {count}; they are named like {cases[0].name!r}.", remedy
        )
    return chosen


def is_skipped(case: Case) -> bool:
    """Whether the protocol leaves the case out: its cache passes 80 GB."""
    return case.kv_bytes() > MAX_KV_BYTES


def _geometries() -> Iterable[tuple[int, int, str]]:
    return itertools.product(KV_HEADS, PAGE_SIZES, KV_DTYPES)


def _case(
    batch: int, context: int | None, lengths: None | str | tuple[int, ...], kv: int, ps: int, dtype: str
) -> Case:
    return Case(batch, context, lengths, QO_HEADS, kv, HEAD_DIM, ps, kv_dtype=dtype)


def _geometry_of(case: Case) -> dict:
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "layout", "kv_dtype")
    return {name: getattr(case, name) for name in names}


def _json_lines(text: str) -> list:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))
