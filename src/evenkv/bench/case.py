"""One case of the roofline grid: a batch's lengths and the geometry of its cache."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from evenkv.errors import EvenkvError, count_of
from evenkv.numerics.bytes import kv_bytes, pages_of
from evenkv.spec.family import DecodeSpec

KV_DTYPES = ("bfloat16", "float8_e4m3fn")
LAYOUTS = ("NHD", "HND")
_INT32_MAX = 2**31 - 1
# Drawing more would take minutes and gigabytes before anyone asks whether the case fits a GPU.
_MAX_DRAWN = 1_000_000
_LOGNORMAL = re.compile(r"lognormal\(\s*([\d.]+)\s*,\s*([\d.]+)\s*,\s*(\d+)\s*\)")
_FIELDS_REMEDY = "Write cases as rows of results/roofline have them (field `case`)."


class Family(NamedTuple):
    """What cases must share for their K and V caches to be one allocation."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str
    layout: str
    num_qo_heads: int


@dataclass(frozen=True)
class Case:
    """A decode step to measure.

    Attributes
    ----------
    batch : int
        Requests; 1,000,000 or fewer where their lengths are drawn.
    context : int or None
        Tokens of every request; None when `lengths` says them.
    lengths : None, str or tuple of int
        None for a uniform batch; "lognormal(mean,sigma,seed)" for drawn ones, where `mean` is the mean of the
        distribution in tokens; else the tokens of each request, in the batch's order.
    kv_dtype : str
        "bfloat16" or "float8_e4m3fn" (with one float32 scale a KV head); q and output are bfloat16.

    Raises
    ------
    EvenkvError
        When a field is out of range, or not exactly one of `context` and `lengths` is given.
    """

    batch: int
    context: int | None
    lengths: None | str | tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    layout: str = "NHD"
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            if not _is_int(value := getattr(self, name)) or not 1 <= value <= _INT32_MAX:
                raise _fault(name, "a whole number that fits int32, 1 or more", value)
        if self.kv_dtype not in KV_DTYPES:
            raise _fault("kv_dtype", f"one of {', '.join(KV_DTYPES)}", self.kv_dtype)
        if self.layout not in LAYOUTS:
            raise _fault("layout", f"one of {', '.join(LAYOUTS)}", self.layout)
        if self.num_qo_heads % self.num_kv_heads:
            raise _fault("num_qo_heads", f"a multiple of num_kv_heads={self.num_kv_heads}", self.num_qo_heads)
        if (self.context is None) == (self.lengths is None):
            raise _fault("context", "exactly one of context and lengths", (self.context, self.lengths))
        if self.context is not None and not (_is_int(self.context) and 1 <= self.context <= _INT32_MAX):
            raise _fault("context", "tokens that fit int32, 1 or more", self.context)
        if isinstance(self.lengths, str):
            _parse_lognormal(self.lengths)
            if self.batch > _MAX_DRAWN:
                raise _fault("batch", f"{_MAX_DRAWN} or fewer drawn lengths", self.batch)
        elif self.lengths is not None:
            if not all(_is_int(n) and 0 <= n <= _INT32_MAX for n in self.lengths):
                raise _fault("lengths", "whole numbers that fit int32, 0 or more", self.lengths)
            if len(self.lengths) != self.batch:
                wanted, got = count_of(self.batch, "number"), count_of(len(self.lengths), "number")
                raise EvenkvError(
                    f"case: lengths: wanted {wanted} for batch={self.batch}, got {got}.", _FIELDS_REMEDY
                )

    def request_lengths(self) -> list[int]:
        """Tokens of each request, in the batch's order; drawn ones are the same on every machine."""
        if self.context is not None:
            return [self.context] * self.batch
        if isinstance(self.lengths, str):
            return list(_draw(self.batch, self.lengths))
        assert self.lengths is not None
        return list(self.lengths)

    def total_tokens(self) -> int:
        """Tokens of all requests; a uniform batch, however large, makes no list for it."""
        return self.batch * self.context if self.context is not None else sum(self.request_lengths())

    def longest(self) -> int:
        """Tokens of the longest request; as cheap."""
        return self.context if self.context is not None else max(self.request_lengths())

    def spec(self) -> DecodeSpec:
        return DecodeSpec(self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size, self.kv_dtype)

    def kv_bytes(self) -> int:
        """Bytes of K and V of all tokens, each read once."""
        # Of their sum, which is the same number: bytes of K and V are so many a token.
        return kv_bytes(self.spec(), [self.total_tokens()])

    def num_pages(self) -> int:
        """Pages that the requests occupy."""
        if self.context is not None:
            return self.batch * pages_of(self.context, self.page_size)
        return sum(pages_of(n, self.page_size) for n in self.request_lengths())

    @property
    def family(self) -> Family:
        return Family(
            self.num_kv_heads, self.head_dim, self.page_size, self.kv_dtype, self.layout, self.num_qo_heads
        )

    @property
    def name(self) -> str:
        """Short, for people: `b32 L4096 h32/8 ps16 bf16`. Cases of one grid differ in it."""
        dtype = "fp8" if self.kv_dtype.startswith("float8") else "bf16"
        dim = "" if self.head_dim == 128 else f" d{self.head_dim}"
        layout = "" if self.layout == "NHD" else f" {self.layout}"
        heads = f"h{self.num_qo_heads}/{self.num_kv_heads}"
        return f"b{self.batch} {self._lengths_name()} {heads} ps{self.page_size} {dtype}{dim}{layout}"

    def _lengths_name(self) -> str:
        if self.context is not None:
            return f"L{self.context}"
        if isinstance(self.lengths, str):
            mean, sigma, seed = _parse_lognormal(self.lengths)
            return f"logn({mean:.12g},{sigma:g},{seed})"
        assert self.lengths is not None
        runs: list[list[int]] = []
        for length in self.lengths:
            if runs and runs[-1][1] == length:
                runs[-1][0] += 1
            else:
                runs.append([1, length])
        if len(runs) <= 3:
            return "+".join(f"{count}x{length}" for count, length in runs)
        return f"list(sum {sum(self.lengths)}, max {max(self.lengths)})"

    def to_json(self) -> dict[str, Any]:
        """The row's `case` object."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.lengths, tuple):
            values["lengths"] = list(self.lengths)
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Case:
        """A case from a row's `case` object; layout and kv_dtype may be left out.

        Raises
        ------
        EvenkvError
            When a field is missing, unknown or out of range.
        """
        known = {field.name for field in fields(Case)}
        optional = {"context", "lengths", "layout", "kv_dtype"}
        if not isinstance(values, Mapping):
            raise EvenkvError(f"case: wanted an object, got {values!r}.", _FIELDS_REMEDY)
        if unknown := sorted(set(values) - known):
            raise EvenkvError(f"case: unknown fields {unknown}, wanted {sorted(known)}.", _FIELDS_REMEDY)
        missing = [name for name in sorted(known - optional) if name not in values]
        if values.get("context") is None and values.get("lengths") is None:
            missing.append("one of context and lengths")
        if missing:
            raise EvenkvError(f"case: missing: {', '.join(missing)}.", _FIELDS_REMEDY)
        lengths = values.get("lengths")
        if lengths is not None and not isinstance(lengths, (str, list, tuple)):
            raise _fault("lengths", 'null, "lognormal(mean,sigma,seed)" or a list', lengths)
        kept = tuple(lengths) if isinstance(lengths, list) else lengths
        return Case(**{"context": None, **values, "lengths": kept})


def lognormal(mean: float, sigma: float, seed: int) -> str:
    """The `lengths` of drawn requests, in its one spelling."""
    return f"lognormal({mean:.12g},{sigma:g},{seed})"


@lru_cache(maxsize=4096)
def _draw(batch: int, lengths: str) -> tuple[int, ...]:
    mean, sigma, seed = _parse_lognormal(lengths)
    normal = np.random.Generator(np.random.PCG64(seed)).standard_normal(batch)
    # The mean of a lognormal is e^(mu + sigma^2 / 2).
    tokens = np.rint(np.exp(math.log(mean) - sigma * sigma / 2 + sigma * normal))
    return tuple(int(n) for n in np.clip(tokens, 1, _INT32_MAX))


def _parse_lognormal(lengths: str) -> tuple[float, float, int]:
    match = _LOGNORMAL.fullmatch(lengths)
    try:
        mean, sigma, seed = float(match[1]), float(match[2]), int(match[3])  # type: ignore[index]
    except (TypeError, ValueError):
        raise _fault("lengths", '"lognormal(mean,sigma,seed)"', lengths) from None
    if mean < 1 or sigma > 4:
        raise _fault("lengths", "a mean of 1 or more and a sigma of 4 or less", lengths)
    return mean, sigma, seed


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fault(name: str, wanted: str, got: object) -> EvenkvError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return EvenkvError(f"case: {name}: wanted {wanted}, got {shown}.", _FIELDS_REMEDY)
