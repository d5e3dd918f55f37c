"""Lognormal lengths, and the traffic that would show a captured decode step.

A captured step gives the context lengths of the requests in flight, nothing more: how much of a context was
prompt and how much had been generated is not in it. `fit_traffic` states what it assumes of that split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenkv.errors import EvenkvError

# Assumed, not fitted: the part of the context beyond the common head that was generated, and the spread of
# output lengths. Decode steps alone cannot tell these.
GENERATED_SHARE = 0.25
OUTPUT_SIGMA = 0.8


@dataclass(frozen=True)
class Lognormal:
    """Token counts whose logarithm is normal: `median` in tokens, `sigma` of the natural logarithm."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (self.median > 0 and math.isfinite(self.median)):
            raise EvenkvError(f"median: wanted a positive number of tokens, got {self.median}.")
        if not 0 <= self.sigma <= 5:
            raise EvenkvError(f"sigma: wanted 0 to 5, got {self.sigma}.")

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, rng: np.random.Generator) -> int:
        """One token count, at least 1."""
        return max(1, round(self.median * math.exp(self.sigma * float(rng.standard_normal()))))


@dataclass(frozen=True)
class TrafficFit:
    """`head` tokens common to all prompts, then a request's own `prompt`, then its `output`."""

    head: int
    prompt: Lognormal
    output: Lognormal


def fit_traffic(lengths: Sequence[int]) -> TrafficFit:
    """Traffic whose requests in flight are about as long as the captured ones.

    The shortest request bounds a head that all prompts share (a system prompt). What is left of each
    length is fitted by the mean and standard deviation of its logarithm.

    Parameters
    ----------
    lengths : sequence of int
        Context lengths of one captured step, at least two.

    Raises
    ------
    EvenkvError
        When there are fewer than two lengths, or one is empty.
    """
    if len(lengths) < 2 or min(lengths) < 1:
        raise EvenkvError(
            f"lengths: wanted two or more requests of at least 1 token, got {len(lengths)} with "
            f"{min(lengths, default=0)} in the shortest.",
            "Fit to a larger step.",
        )
    head = min(lengths) - 1
    logs = np.log(np.asarray(lengths, dtype=np.float64) - head)
    median, sigma = math.exp(float(logs.mean())), float(logs.std(ddof=1))
    # A request is in flight as long as its output is, so long outputs are met more often and at half their
    # way: the expected number of generated tokens is E[output^2] / (2 E[output]).
    generated = GENERATED_SHARE * median
    output = Lognormal(max(1.0, 2 * generated * math.exp(-1.5 * OUTPUT_SIGMA**2)), OUTPUT_SIGMA)
    return TrafficFit(head, Lognormal(max(1.0, (1 - GENERATED_SHARE) * median), sigma), output)
