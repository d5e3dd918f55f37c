"""More simulated steps, with parameters of the caller's choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from evenkv.errors import EvenkvError
from evenkv.spec.family import DecodeSpec
from evenkv.workloads import store
from evenkv.workloads.add import NewWorkload
from evenkv.workloads.simulate import Traffic, simulate

_POOL_SLACK = 2.0


def draw(
    spec: DecodeSpec,
    traffic: Traffic,
    *,
    batch: int,
    count: int = 1,
    seed: int = 0,
    num_pages: int | None = None,
    empty_requests: int = 0,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[NewWorkload]:
    """Draw `count` steps with seeds counting on from `seed`; every parameter goes into the recipe.

    Raises
    ------
    EvenkvError
        When an argument is out of range or the batch never fills (see `simulate`).
    """
    if count < 1:
        raise EvenkvError(f"count: wanted 1 or more, got {count}.")
    pool = expected_pool(spec, traffic, batch) if num_pages is None else num_pages
    drawn = []
    for number in range(count):
        progress(f"step {number + 1} of {count}", number / count)
        settings = {
            "batch": batch,
            "page_size": spec.page_size,
            "num_pages": pool,
            "seed": seed + number,
            "aged_pool": True,
            "empty_requests": empty_requests,
        }
        recipe = {"synthetic": "evenkv.workloads.simulate, version 1", "generator": "numpy PCG64"}
        recipe |= {"traffic": dataclasses.asdict(traffic), **settings}
        step = simulate(traffic, **settings)
        drawn.append(NewWorkload("synth", step, store.default_sm_scale(spec), recipe))
    return drawn


def expected_pool(spec: DecodeSpec, traffic: Traffic, batch: int) -> int:
    """Pages for twice the context that `batch` requests in flight are expected to have, and some to spare."""
    prefix = max(traffic.prefixes, default=0) * traffic.prefix_probability
    # Outputs in flight are longer than outputs on the whole, by e^(sigma^2).
    generated = traffic.output.mean * math.exp(traffic.output.sigma**2) / 2
    context = min(prefix + traffic.prompt.mean + generated, traffic.max_context)
    return math.ceil(_POOL_SLACK * batch * context / spec.page_size) + 2 * batch
