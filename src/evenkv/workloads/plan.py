"""The committed workloads: captured steps and the drawn ones, by definition. Only data and who gets what."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from evenkv.spec.family import FAMILY, SEED_DEFINITION, DecodeSpec
from evenkv.workloads.fit import Lognormal, TrafficFit, fit_traffic
from evenkv.workloads.simulate import Traffic, simulate
from evenkv.workloads.step import DecodeStep, step_from_lengths

# Elements of one token's K (num_kv_heads * head_dim) up to which the large steps of `LEAN` and `DEEP` fit:
# their pools of 262,144 and 524,288 tokens are then 512 MiB of bf16 a cache.
_LEAN_ELEMENTS = 1024
_DEEP_ELEMENTS = 512


@dataclass(frozen=True)
class PlannedStep:
    """A simulated step; `pool_tokens` is the pool's size, whatever the page size."""

    label: str
    batch: int
    traffic: Traffic
    pool_tokens: int
    aged_pool: bool = True

    def seed(self, page_size: int) -> int:
        """From the name alone: a step stays what it is when others come or go."""
        return zlib.crc32(f"{self.label}-ps{page_size}".encode())

    def draw(self, page_size: int) -> DecodeStep:
        # A radix cache works by tokens, so prefixes are shared at page_size 1.
        traffic = replace(self.traffic, share_prefixes=page_size == 1)
        return simulate(
            traffic,
            batch=self.batch,
            page_size=page_size,
            num_pages=self.pool_tokens // page_size,
            seed=self.seed(page_size),
            aged_pool=self.aged_pool,
        )


@dataclass(frozen=True)
class CapturedStep:
    """A step that an engine really ran: lengths, pool and scale as captured, page ids drawn."""

    definition: str
    uuid: str
    kv_indptr: tuple[int, ...]
    num_pages: int
    page_size: int
    sm_scale: float
    record: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request; the captured steps have page_size 1, where pages are tokens."""
        return np.diff(self.kv_indptr).tolist()

    @property
    def seed(self) -> int:
        return zlib.crc32(self.uuid.encode())

    def draw(self) -> DecodeStep:
        rng = np.random.Generator(np.random.PCG64(self.seed))
        step = step_from_lengths(self.lengths, self.page_size, self.num_pages, rng)
        assert step.kv_indptr.tolist() == list(self.kv_indptr)
        return step


# The step of 91 tokens came without a uuid; this name is ours.
_OWN_UUIDS = {91: "captured-llama4-scout-tp8-91"}


@cache
def captured_steps() -> tuple[CapturedStep, ...]:
    """The captured steps that ship with the package (`captured.json`), in the file's order."""
    text = Path(__file__).with_name("captured.json").read_text(encoding="utf-8")
    return tuple(
        CapturedStep(
            definition=record["definition"],
            uuid=record.get("uuid") or _OWN_UUIDS[record["kv_indptr"][-1]],
            kv_indptr=tuple(record["kv_indptr"]),
            num_pages=record["num_pages"],
            page_size=record["page_size"],
            sm_scale=record["sm_scale"],
            record=record,
        )
        for record in json.loads(text)["workloads"]
    )


@cache
def captured_fit(definition: str) -> TrafficFit:
    """Traffic fitted to the largest captured step of a definition."""
    return fit_traffic(max((c.lengths for c in captured_steps() if c.definition == definition), key=len))


def _traffic(
    median: float, sigma: float, output: float = 60, output_sigma: float = 0.6, **more: Any
) -> Traffic:
    return Traffic(Lognormal(median, sigma), Lognormal(output, output_sigma), **more)


def _as_captured(definition: str, **more: Any) -> Traffic:
    fit = captured_fit(definition)
    return Traffic(fit.prompt, fit.output, prefixes=(fit.head,), **more)


_SCOUT = _as_captured(SEED_DEFINITION, max_context=16384)
_LLAMA = _as_captured("gqa_paged_decode_h32_kv8_d128_ps1", max_context=4096)


def planned_steps(spec: DecodeSpec) -> tuple[PlannedStep, ...]:
    """The drawn steps of one definition. The first four are a spread: runs that stop early still see one of
    each kind (one short request, skewed, large, uniform)."""
    elements = spec.num_kv_heads * spec.head_dim
    long, one_long, full = _LARGE_LEAN if elements <= _LEAN_ELEMENTS else _LARGE_WIDE
    steps = [_SHORT, _SKEWED, long, _UNIFORM, *_COMMON, one_long, full]
    if elements <= _DEEP_ELEMENTS and spec.page_size > 1:
        steps.append(_DEEP)
    if spec.name == SEED_DEFINITION:
        steps += _SEED_ONLY
    return tuple(steps)


def blob_owner(step: PlannedStep, page_size: int) -> str:
    """Name of the first definition with that page size and step: its folder holds the tables for all."""
    return next(s.name for s in FAMILY if s.page_size == page_size and step in planned_steps(s))


# One 32-head KV cache takes 8 KiB a token, so pools that every definition shares end at 65,536 tokens.
_SHORT = PlannedStep("b001-short", 1, _traffic(800, 0.3), 2048, aged_pool=False)
_SKEWED = PlannedStep("b032-skewed", 32, _traffic(500, 1.2, max_context=16384), 57344)
_UNIFORM = PlannedStep("b016-uniform", 16, _traffic(2048, 0.05), 49152, aged_pool=False)
_COMMON = (
    PlannedStep("b064-scout", 64, _SCOUT, 32768),
    PlannedStep("b008-chat", 8, _traffic(900, 0.6, 120), 16384),
    PlannedStep("b128-brief", 128, _traffic(90, 0.5, 40), 40960),
    PlannedStep("b001-book", 1, _traffic(32000, 0.1), 40960, aged_pool=False),
    PlannedStep("b064-llama", 64, _LLAMA, 65536),
    PlannedStep("b004-mixed", 4, _traffic(5000, 1.0, max_context=32768), 57344),
)
_LARGE_LEAN = (
    PlannedStep("b064-long", 64, _traffic(3200, 0.4, 100), 262144),
    PlannedStep("b032-one-131072", 32, _traffic(1000, 0.4, pinned=(131072,)), 196608),
    PlannedStep("b128-full", 128, _traffic(1600, 0.3), 262144),
)
_LARGE_WIDE = (
    PlannedStep("b012-long", 12, _traffic(3500, 0.3), 57344),
    PlannedStep("b032-one-32768", 32, _traffic(500, 0.4, pinned=(32768,)), 57344),
    PlannedStep("b128-half", 128, _traffic(330, 0.3), 65536),
)
_DEEP = PlannedStep("b128-deep", 128, _traffic(3400, 0.3), 524288)
_SEED_ONLY = (
    PlannedStep("b002-pair", 2, _traffic(10000, 0.2), 32768),
    PlannedStep("b012-spread", 12, _traffic(1500, 1.5, max_context=32768), 65536),
    PlannedStep("b024-scout", 24, _SCOUT, 53173),
    PlannedStep("b040-agents", 40, _traffic(300, 0.8, prefixes=(1024, 2048), prefix_probability=0.9), 49152),
    PlannedStep("b096-scout", 96, _SCOUT, 53173),
    PlannedStep(
        "b128-assistants",
        128,
        replace(_SCOUT, prefixes=(128, 256, 512), prefix_probability=0.7),
        65536,
    ),
)
