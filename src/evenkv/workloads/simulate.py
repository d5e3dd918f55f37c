"""A small continuous-batching engine: requests arrive, decode, finish, and share one pool of pages.

Time is counted in decode steps. In each step finished requests give their pages back, waiting ones are
admitted while a place and pages are free, and every running request writes one token. Pages are handed out
first in, first out: a fresh pool gives runs of neighbours, one that has been turned over many times gives
scattered pages (`aged_pool`). When the pool runs dry, unused shared prefixes are evicted, then the youngest
request is sent back to the queue.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from evenkv.errors import EvenkvError
from evenkv.workloads.fit import Lognormal
from evenkv.workloads.step import DecodeStep, random_order, step_from_pages

# Decode steps before the snapshot, in mean output lengths: the first batch arrived together, and this many
# generations later nothing of that is left.
WARM_UP_OUTPUTS = 4
# Arrivals, in multiples of what the batch can finish, where no rate is stated: there is always one waiting.
BUSY = 1.5


@dataclass(frozen=True)
class Traffic:
    """What arrives at the engine.

    `prompt` is a request's own part, `output` the tokens it generates. With `prefix_probability` a request
    starts with one of the `prefixes` (lengths in tokens), chosen evenly; `share_prefixes` keeps their whole
    pages once in the pool, as a radix cache does. `pinned` prompts arrive first and go on to `max_context`.
    `arrival_rate` is requests per decode step; None keeps the batch full. No context passes `max_context`.
    """

    prompt: Lognormal
    output: Lognormal
    arrival_rate: float | None = None
    prefixes: tuple[int, ...] = ()
    prefix_probability: float = 1.0
    share_prefixes: bool = False
    pinned: tuple[int, ...] = ()
    max_context: int = 131072 + 1024

    def __post_init__(self) -> None:
        checks = (
            ("arrival_rate", self.arrival_rate is None or 0 < self.arrival_rate < math.inf, "above 0"),
            ("prefixes", all(length > 0 for length in self.prefixes), "lengths above 0"),
            ("prefix_probability", 0 <= self.prefix_probability <= 1, "0 to 1"),
            ("pinned", all(0 < length < self.max_context for length in self.pinned), "1 to max_context"),
            ("max_context", self.max_context > 1 + max(self.prefixes, default=0), "more than a prefix"),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise EvenkvError(f"{name}: wanted {wanted}, got {getattr(self, name)}.")


@dataclass(eq=False)
class _Request:
    own_prompt: int
    remaining: float  # tokens still to generate; infinite for a pinned request
    prefix: _Prefix | None = None
    length: int = 0
    shared_pages: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        return self.own_prompt + (self.prefix.length if self.prefix else 0)


@dataclass(eq=False)
class _Prefix:
    length: int
    pages: list[int] = field(default_factory=list)
    users: int = 0


def simulate(
    traffic: Traffic,
    *,
    batch: int,
    page_size: int,
    num_pages: int,
    seed: int,
    aged_pool: bool = False,
    empty_requests: int = 0,
) -> DecodeStep:
    """Run the engine until it is warm and `batch` requests decode together; return that step's page tables.

    Parameters
    ----------
    traffic : Traffic
        Arrivals and lengths.
    batch : int
        Requests in the step; also the engine's limit.
    page_size, num_pages : int
        Tokens in a page, and pages in the pool.
    seed : int
        Of numpy's PCG64; the same arguments give the same step.
    aged_pool : bool
        Begin with the free pages in random order instead of ascending.
    empty_requests : int
        Rows without any token to append, as CUDA-graph padding leaves them.

    Raises
    ------
    EvenkvError
        When an argument is out of range, a pinned prompt does not fit the pool, or the batch never fills.
    """
    for name, value, least in (
        ("batch", batch, 1),
        ("page_size", page_size, 1),
        ("num_pages", num_pages, 1),
        ("empty_requests", empty_requests, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise EvenkvError(f"{name}: wanted {least} or more, got {value}.")
    if len(traffic.pinned) > batch:
        raise EvenkvError(f"pinned: wanted at most batch = {batch} prompts, got {len(traffic.pinned)}.")
    engine = _Engine(traffic, batch, page_size, num_pages, seed, aged_pool)
    warm = math.ceil(WARM_UP_OUTPUTS * traffic.output.mean)
    most = 0
    for now in range(20 * warm + 1000):
        engine.step(now)
        most = max(most, len(engine.running))
        if now >= warm and len(engine.running) == batch:
            pages = [request.pages for request in engine.running] + [[]] * empty_requests
            lengths = [request.length for request in engine.running] + [0] * empty_requests
            return step_from_pages(pages, lengths, page_size, num_pages)
    raise EvenkvError(
        f"batch: wanted {batch} requests in one step, got at most {most} with {num_pages} pages of "
        f"{page_size}.",
        "Give more pages, a higher arrival rate or shorter prompts.",
    )


class _Engine:
    def __init__(
        self, traffic: Traffic, batch: int, page_size: int, num_pages: int, seed: int, aged_pool: bool
    ) -> None:
        self.traffic, self.batch, self.page_size = traffic, batch, page_size
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.num_pages = num_pages
        order = random_order(self.rng, num_pages).tolist() if aged_pool else range(num_pages)
        self.free: deque[int] = deque(order)
        self.prefixes = [_Prefix(length) for length in traffic.prefixes]
        self.running: list[_Request] = []
        for length in traffic.pinned:
            if not self._fits_alone(length):
                raise EvenkvError(
                    f"num_pages: wanted enough for the pinned prompt of {length} tokens, got {num_pages}.",
                    "Give more pages.",
                )
        self.waiting: deque[_Request] = deque(_Request(length, math.inf) for length in traffic.pinned)
        self.rate = traffic.arrival_rate or BUSY * batch / traffic.output.mean
        self.next_arrival = self._gap()

    def step(self, now: int) -> None:
        """One decode step: afterwards every running request's newest token has its slot."""
        for request in [r for r in self.running if r.remaining <= 0]:
            self.running.remove(request)
            self._release(request)
        while self.next_arrival <= now:
            self.next_arrival += self._gap()
            # A client that finds a long queue goes away; the queue would only grow.
            request = self._draw()
            if len(self.waiting) < 4 * self.batch and self._fits_alone(request.prompt):
                self.waiting.append(request)
        while self.waiting and len(self.running) < self.batch and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for request in list(self.running):
            if request in self.running:
                self._grow(request)

    def _gap(self) -> float:
        return -math.log1p(-float(self.rng.random())) / self.rate

    def _draw(self) -> _Request:
        prefix = None
        if self.prefixes and float(self.rng.random()) < self.traffic.prefix_probability:
            prefix = self.prefixes[int(float(self.rng.random()) * len(self.prefixes))]
        room = self.traffic.max_context - (prefix.length if prefix else 0) - 1
        own = min(self.traffic.prompt.draw(self.rng), room)
        output = min(self.traffic.output.draw(self.rng), room - own + 1)
        return _Request(own, output, prefix)

    def _admit(self, request: _Request) -> bool:
        """Give a waiting request the pages of its prompt, or leave everything as it is."""
        prefix, length = request.prefix, request.prompt
        shared = prefix.length // self.page_size if prefix and self.traffic.share_prefixes else 0
        if shared and not prefix.pages:
            ids = self._take(shared, spare=len(self.running))
            if ids is None:
                return False
            prefix.pages = ids
        if shared:
            prefix.users += 1
        own = self._take(-(-length // self.page_size) - shared, spare=len(self.running) + 1)
        if own is None:
            if shared:
                prefix.users -= 1
            return False
        request.pages = (prefix.pages if shared else []) + own
        request.shared_pages, request.length = shared, length
        return True

    def _grow(self, request: _Request) -> None:
        """Write one token; at a page's end this takes a page, if need be from the youngest request."""
        if request.length == len(request.pages) * self.page_size:
            while (page := self._take(1)) is None:
                victim = self.running[-1]
                if victim is request and len(self.running) == 1:
                    request.remaining = 0  # it fills the pool alone: this is as long as it gets
                    return
                self.running.remove(victim)
                self._release(victim)
                victim.own_prompt = victim.length - (victim.prefix.length if victim.prefix else 0)
                self.waiting.appendleft(victim)
                if victim is request:
                    return
            request.pages += page
        request.length += 1
        request.remaining -= 1
        if request.length >= self.traffic.max_context:
            request.remaining = 0

    def _fits_alone(self, length: int) -> bool:
        """Whether a prompt and its next token fit the empty pool; servers turn longer ones away."""
        return -(-length // self.page_size) + 1 <= self.num_pages

    def _take(self, count: int, spare: int = 0) -> list[int] | None:
        """`count` free pages while `spare` remain, unused prefixes evicted where that helps; or None."""
        for prefix in self.prefixes:
            if len(self.free) >= count + spare:
                break
            if prefix.pages and not prefix.users:
                self.free.extend(prefix.pages)
                prefix.pages = []
        if len(self.free) < count + spare:
            return None
        return [self.free.popleft() for _ in range(count)]

    def _release(self, request: _Request) -> None:
        self.free.extend(request.pages[request.shared_pages :])
        if request.shared_pages:
            request.prefix.users -= 1
        request.pages, request.shared_pages = [], 0
