"""What the labs measure: the list of cases, and the names that spell out a case that is not in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenkv.spec.family import DecodeSpec

KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
SCOUT = DecodeSpec(5, 1, 128, 1)
MOST_TOKENS = 1 << 30  # of a batch: what one call takes


@dataclass(frozen=True)
class LabCase:
    name: str
    spec: DecodeSpec
    lengths: tuple[int, ...]
    padding: float = 1.0  # kv_indices is so many times longer than the requests' pages


def _alike(batch: str, context: str) -> list[int]:
    return [int(context)] * int(batch)


def _log_normal(batch: str, mean: str, sigma: str) -> list[float]:
    """A few long requests among many short ones. The mean is that of the tokens, not of their logarithms."""
    spread = float(sigma)
    drawn = np.random.default_rng(0).lognormal(np.log(int(mean)) - spread**2 / 2, spread, int(batch))
    return drawn.tolist()


def _jitter(batch: str, context: str) -> list[float]:
    """Within 20 % of a length: what a batch looks like that is even but for chance."""
    return np.random.default_rng(1).uniform(0.8 * int(context), 1.2 * int(context), int(batch)).tolist()


def _listed(lengths: str) -> list[int]:
    return [int(length) for length in lengths.split("+")]


_COUNT = r"([1-9]\d{0,6})"
_LENGTHS: tuple[tuple[str, Callable[..., list]], ...] = (
    (rf"b{_COUNT} L{_COUNT}", _alike),
    (rf"logn b{_COUNT} mean{_COUNT} sigma(\d(?:\.\d+)?)", _log_normal),
    (rf"jitter b{_COUNT} L{_COUNT}", _jitter),
    (r"([1-9]\d*(?:\+[1-9]\d*)*)", _listed),
)
SPELLINGS = (
    "'b8 L1024 kv8 bf16', 'jitter b32 L4096 kv8 bf16', 'logn b32 mean8192 sigma1 kv8 fp8', "
    "'91+5668 kv4 bf16' (32 query heads, page_size 16), 'h5 b64 L8192', 'h5 91+5668' (5, page_size 1), "
    "'padded 1.9 b8 L4096 kv8 bf16' (a longer kv_indices, as in a captured graph's buffers)"
)


def spelled_case(name: str) -> LabCase | None:
    """The case that a name spells out, as SPELLINGS does; None where it spells none."""
    match = re.fullmatch(r"(?:padded (\d(?:\.\d+)?) )?(h5 )?(.+?)(?: kv(1|2|4|8|16|32) (bf16|fp8))?", name)
    if match is None or (match[2] is None) == (match[4] is None):
        return None
    padding = max(1.0, float(match[1] or 1))
    spec = SCOUT if match[2] else DecodeSpec(32, int(match[4]), 128, 16, KV_DTYPES[match[5]])
    for pattern, draw in _LENGTHS:
        if words := re.fullmatch(pattern, match[3]):
            lengths = tuple(max(1, int(length)) for length in draw(*words.groups()))
            return LabCase(name, spec, lengths, padding) if sum(lengths) * padding <= MOST_TOKENS else None
    return None


def choose_cases(parts: list[str]) -> list[LabCase]:
    """Cases that are spelled out, and those whose names hold a part; all when nothing is asked."""
    chosen: dict[str, LabCase] = {}
    for part in parts:
        spelled = spelled_case(part)
        hits = [spelled] if spelled else [case for case in lab_cases() if part in case.name]
        if not hits:
            raise SystemExit(f"case {part!r}: wanted part of a name in the list, or a name like {SPELLINGS}")
        chosen |= {case.name: case for case in hits}
    return list(chosen.values()) or lab_cases()


def lab_cases() -> list[LabCase]:
    """Where versions differ: tiny, small, mid-size, large, uneven, one long request among short ones."""
    names = []
    for label in KV_DTYPES:
        names += [
            f"{lengths} {label}"
            for lengths in (
                "b1 L1024 kv8",
                "b8 L1024 kv8",
                "b1 L131072 kv8",
                "b32 L4096 kv4",
                "b32 L4096 kv8",
                "b128 L2048 kv8",
                "b256 L8192 kv8",
                "jitter b32 L4096 kv8",
                "logn b32 mean8192 sigma1 kv8",
            )
        ]
    cases = [case for name in [*names, "h5 b64 L8192", "h5 91+5668"] if (case := spelled_case(name))]
    for label, kv_dtype in KV_DTYPES.items():
        skewed = (131072, *[1024] * 63)
        cases.append(LabCase(f"128k+63x1k kv8 {label}", DecodeSpec(32, 8, 128, 16, kv_dtype), skewed))
    return [
        *cases,
        LabCase("91 tokens h5", SCOUT, (91,)),
        LabCase("63 requests h5", SCOUT, _captured_lengths()),
    ]


def _captured_lengths() -> tuple[int, ...]:
    """Tokens of the requests of the captured Llama 4 Scout step."""
    text = (Path(__file__).parents[1] / "src/evenkv/workloads/captured.json").read_text()
    indptr = next(w["kv_indptr"] for w in json.loads(text)["workloads"] if len(w["kv_indptr"]) == 64)
    return tuple(after - before for before, after in zip(indptr, indptr[1:], strict=False))
