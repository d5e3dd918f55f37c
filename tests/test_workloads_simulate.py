"""The simulated engine and the fit to captured steps."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkv.errors import EvenkvError
from evenkv.workloads import plan
from evenkv.workloads.fit import Lognormal, fit_traffic
from evenkv.workloads.simulate import Traffic, _Engine, simulate
from evenkv.workloads.step import step_from_lengths

BRISK = Traffic(Lognormal(60, 0.8), Lognormal(12, 0.6))


def same(a, b):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("kv_indptr", "kv_indices", "kv_last_page_len")
    )


def test_the_same_seed_gives_the_same_step_and_another_seed_another():
    draw = lambda seed: simulate(BRISK, batch=16, page_size=16, num_pages=400, seed=seed, aged_pool=True)  # noqa: E731
    assert same(draw(5), draw(5)) and not same(draw(5), draw(6))


@given(
    batch=st.integers(1, 24),
    page_size=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 2**32),
    prompt=st.floats(1, 200),
    sigma=st.floats(0, 2),
    prefixes=st.lists(st.integers(1, 150), max_size=3),
    probability=st.floats(0, 1),
    share=st.booleans(),
    aged=st.booleans(),
    empty=st.integers(0, 3),
    tightness=st.floats(1.05, 4),
)
@settings(max_examples=40, deadline=None)
def test_any_traffic_gives_tables_without_contradiction(
    batch, page_size, seed, prompt, sigma, prefixes, probability, share, aged, empty, tightness
):
    """`simulate` checks its tables by itself; here: sharing, batch, limits, whatever the pool's pressure."""
    traffic = Traffic(
        Lognormal(prompt, sigma),
        Lognormal(6, 0.5),
        prefixes=tuple(prefixes),
        prefix_probability=probability,
        share_prefixes=share,
        max_context=400,
    )
    pages = math.ceil(batch * (-(-min(prompt, 400) // page_size) + 150 / page_size + 2) * tightness)
    try:
        step = simulate(
            traffic,
            batch=batch,
            page_size=page_size,
            num_pages=pages,
            seed=seed,
            aged_pool=aged,
            empty_requests=empty,
        )
    except EvenkvError as error:
        assert "batch: wanted" in str(error)  # too small a pool is refused by name, and nothing else may fail
        return
    assert step.batch_size == batch + empty and step.num_pages == pages
    assert (step.lengths[batch:] == 0).all()
    assert (step.lengths[:batch] >= 2).all() and step.lengths.max() <= 400
    if not (share and prefixes):
        assert len(np.unique(step.kv_indices)) == len(step.kv_indices)


def test_shared_prefixes_are_the_same_pages_in_the_same_order():
    traffic = dataclasses.replace(BRISK, prefixes=(100,), share_prefixes=True)
    step = simulate(traffic, batch=8, page_size=16, num_pages=800, seed=1)
    heads = [step.kv_indices[at : at + 6].tolist() for at in step.kv_indptr[:-1]]
    assert all(head == heads[0] for head in heads)
    # Only whole pages are shared: 100 tokens are 6 pages of 16; the rest of the prefix is each request's own.
    own = np.concatenate(
        [step.kv_indices[a + 6 : b] for a, b in zip(step.kv_indptr[:-1], step.kv_indptr[1:], strict=True)]
    )
    assert len(np.unique(own)) == len(own) and not set(own) & set(heads[0])


def test_pages_are_freed_and_used_again():
    """The pool is far smaller than what passes through it."""
    traffic = Traffic(Lognormal(100, 0.2), Lognormal(5, 0.2))
    step = simulate(traffic, batch=4, page_size=1, num_pages=600, seed=0)
    fresh = simulate(traffic, batch=4, page_size=1, num_pages=100000, seed=0)
    assert step.num_pages < fresh.kv_indices.max(), (
        "over the run more pages were handed out than the pool has"
    )


def test_an_aged_pool_scatters_and_a_fresh_one_does_not():
    traffic = Traffic(Lognormal(500, 0.1), Lognormal(5, 0.1))
    neighbours = {
        aged: np.mean(
            np.diff(
                simulate(traffic, batch=1, page_size=1, num_pages=5000, seed=2, aged_pool=aged).kv_indices
            )
            == 1
        )
        for aged in (False, True)
    }
    assert neighbours[False] > 0.95 and neighbours[True] < 0.05


def test_pressure_sends_the_youngest_back_and_no_page_is_ever_lost():
    """A pool that is too small for what it admits, watched step by step."""
    traffic = dataclasses.replace(
        BRISK, output=Lognormal(150, 0.3), prefixes=(32, 48), share_prefixes=True, pinned=(64,)
    )
    engine = _Engine(traffic, batch=6, page_size=16, num_pages=50, seed=1, aged_pool=True)
    sent_back = 0
    for now in range(600):
        before = list(engine.running)
        engine.step(now)
        sent_back += any(request in engine.waiting for request in before)
        held = [page for request in engine.running for page in request.pages[request.shared_pages :]]
        held += [page for prefix in engine.prefixes for page in prefix.pages]
        assert sorted([*held, *engine.free]) == list(range(50))
        assert engine.running[0].own_prompt == 64, "the oldest is never the victim"
        for prefix in engine.prefixes:
            assert prefix.users == sum(r.prefix is prefix and r.shared_pages > 0 for r in engine.running)
    assert sent_back > 3


def test_last_page_lengths_are_of_all_kinds():
    step = simulate(BRISK, batch=64, page_size=16, num_pages=3000, seed=0)
    assert len(set(step.kv_last_page_len.tolist())) > 10


@pytest.mark.parametrize("captured", plan.captured_steps()[1:], ids=lambda captured: captured.uuid)
def test_fitted_traffic_looks_like_the_captured_step(captured):
    fit = fit_traffic(captured.lengths)
    traffic = Traffic(fit.prompt, fit.output, prefixes=(fit.head,) if fit.head else ())
    pool = 40 * sum(captured.lengths)
    drawn = np.concatenate(
        [simulate(traffic, batch=63, page_size=1, num_pages=pool, seed=seed).lengths for seed in range(8)]
    )
    own, wanted = drawn - fit.head, np.array(captured.lengths) - fit.head
    assert abs(np.log(own).mean() - np.log(wanted).mean()) < 0.35
    assert abs(np.log(own).std() / np.log(wanted).std() - 1) < 0.3
    assert drawn.min() > fit.head


def test_fit_finds_the_parameters_of_lognormal_lengths():
    rng = np.random.default_rng(0)
    lengths = [1, *(max(1, round(300 * math.exp(0.9 * z))) for z in rng.standard_normal(4000))]
    fit = fit_traffic(lengths)
    assert fit.head == 0
    assert fit.prompt.median == pytest.approx(0.75 * 300, rel=0.05)
    assert fit.prompt.sigma == pytest.approx(0.9, rel=0.05)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": 0}, "batch: wanted 1 or more, got 0"),
        ({"num_pages": 0}, "num_pages"),
        ({"seed": -1}, "seed"),
        ({"empty_requests": -1}, "empty_requests"),
        ({"batch": 50, "num_pages": 60}, "batch: wanted 50 requests in one step, got at most"),
    ],
)
def test_bad_arguments_are_named(change, named):
    arguments = {"batch": 4, "page_size": 16, "num_pages": 500, "seed": 0, **change}
    with pytest.raises(EvenkvError, match=named):
        simulate(BRISK, **arguments)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Lognormal(0, 1), "median"),
        (lambda: Lognormal(math.nan, 1), "median"),
        (lambda: Lognormal(10, -1), "sigma"),
        (lambda: dataclasses.replace(BRISK, arrival_rate=0.0), "arrival_rate"),
        (lambda: dataclasses.replace(BRISK, prefix_probability=1.5), "prefix_probability"),
        (lambda: dataclasses.replace(BRISK, prefixes=(0,)), "prefixes"),
        (lambda: dataclasses.replace(BRISK, pinned=(10**9,)), "pinned"),
        (lambda: fit_traffic([5]), "lengths"),
        (lambda: step_from_lengths([100], 16, 3, np.random.default_rng(0)), "num_pages: wanted at least 7"),
    ],
)
def test_bad_parameters_are_named(make, named):
    with pytest.raises(EvenkvError, match=named):
        make()


def test_a_slow_arrival_rate_never_fills_the_batch():
    slow = dataclasses.replace(BRISK, arrival_rate=0.01)
    with pytest.raises(EvenkvError, match="higher arrival rate"):
        simulate(slow, batch=16, page_size=16, num_pages=500, seed=0)
