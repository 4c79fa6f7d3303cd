"""Median, trimmed mean and Krum: against NumPy, against bad uploads, and the buffer they share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import server
from fedjax_async.base import tree
from fedjax_async.clock import Until, plan
from fedjax_async.server import check_capacity, fedbuff, fedmedian, krum, trimmed_mean
from fedjax_async.server.robust import median
from tests.server import textbook
from tests.server.books import BOOKS
from tests.server.made_up import D, closing, flat, random_uploads, receive_all, run, stacked, start_params, unflat
from tests.server.textbook import Upload

ROBUST = {"fedmedian": fedmedian, "trimmed_mean": trimmed_mean, "krum": krum}
# All tests use these options, mostly traced, so that few programs are compiled.
OPTIONS = {fedmedian: {}, trimmed_mean: {"trim": 0.2}, krum: {"byzantine": 1, "select": 1}}

seeds = st.integers(0, 2**31)


def play(factory, params, uploads, **options):
    """Final state, params after each arrival, weights; no staleness weight, and a buffer that is large enough."""
    return run(factory, params, uploads, **{"size": 16, "exponent": 0.0} | OPTIONS.get(factory, {}) | options)


def once(factory, deltas, **options):
    """The params after one server step of these fresh deltas [n, D], from zeros."""
    uploads = [Upload(d, np.zeros(D), 0, 1.0, i == len(deltas) - 1) for i, d in enumerate(deltas)]
    return play(factory, unflat(np.zeros(D), jnp.result_type(float)), uploads, **options)[1][-1]


# --- against NumPy ------------------------------------------------------------------------------

SETTINGS = [
    ("fedmedian", {}),
    *(("trimmed_mean", {"trim": trim}) for trim in (0.0, 0.1, 0.34, 0.49)),
    *(("krum", {"byzantine": f, "select": m}) for f, m in ((0, 1), (2, 1), (4, 1), (0, 3), (1, 4), (3, 99))),
]


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_many_steps_equal_the_numpy_loop(name, options):
    """60 server steps of 1 to 16 uploads, some rejected, and a last one that does not close."""
    ends = np.cumsum(np.random.default_rng(21).integers(1, 17, size=60))
    last = int(ends[-1])
    uploads = closing(random_uploads(21, last + 6), at=(ends - 1).tolist())
    params = start_params()
    _, path, weights = play(ROBUST[name], params, uploads, exponent=0.5, **options)
    expected, effective = textbook.play(flat(params), uploads, BOOKS[name](**options))
    np.testing.assert_allclose(path, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(weights, effective, rtol=1e-12)
    np.testing.assert_array_equal(path[last:], path[[last - 1]].repeat(6, axis=0))


@pytest.mark.float64
def test_a_robust_aggregate_goes_with_any_optimiser_and_transform():
    def made():
        weight = server.scale_by_staleness(server.staleness_weight("hinge"))
        return server.rule(weight, optimizer=optax.adam(0.1), aggregate=server.buffered(16, median))

    move, state = textbook.adam(lr=0.1, b1=0.9, b2=0.999, eps=1e-8)
    book = textbook.Median(move=move, state=state, staleness="hinge")
    uploads, params = random_uploads(5), start_params()
    _, path, _ = run(made, params, uploads)
    np.testing.assert_allclose(path, textbook.play(flat(params), uploads, book)[0], rtol=1e-10, atol=1e-12)


# --- bad uploads ---------------------------------------------------------------------------------


def plain_mean(*, size, exponent):
    """FedBuff, which has no option ``size``."""
    del size
    return fedbuff(exponent=exponent, server_lr=1.0)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, f=st.integers(0, 6), extra=st.integers(0, 3), data=st.data())
def test_bad_uploads_do_not_get_through(seed, f, extra, data):
    """f of n >= 2 f + 3 uploads at 1e6, all equal or scattered, at any position in the step."""
    chance = np.random.default_rng(seed)
    n = min(2 * f + 3 + extra, 16)
    spread = data.draw(st.sampled_from([0.0, 1.0]))
    honest = 0.3 + 0.1 * chance.normal(size=(n - f, D))
    bad = 1e6 * (1.0 + spread * chance.normal(size=(f, D)))
    order = chance.permutation(n)
    deltas = np.concatenate([honest, bad])[order]
    low, high = honest.min(axis=0) - 1e-12, honest.max(axis=0) + 1e-12
    one = once(krum, deltas, byzantine=f)
    assert (one == honest).all(axis=1).any()
    several = once(krum, deltas, byzantine=f, select=n - f)
    np.testing.assert_allclose(several, honest.mean(axis=0), rtol=1e-10)
    middle = once(fedmedian, deltas)
    trimmed = once(trimmed_mean, deltas, trim=min(np.ceil(100 * f / n) / 100, 0.5))
    assert np.all((low <= middle) & (middle <= high)) and np.all((low <= trimmed) & (trimmed <= high))
    assert f == 0 or np.linalg.norm(once(plain_mean, deltas)) > 1e4


def test_bfloat16_medians_are_exact_and_means_rounded_once():
    n = 7
    deltas = np.random.default_rng(n).normal(size=(n, D))
    half = unflat(deltas, jnp.bfloat16)
    arrivals = stacked([Upload(d, d, 0, 1.0, i == n - 1) for i, d in enumerate(deltas)])
    arrivals = arrivals._replace(upload=half, start=half)
    rounded, moved = np.float64(flat(half)), {}
    for name, factory in ROBUST.items():
        path = flat(receive_all(factory(), unflat(np.zeros(D), jnp.bfloat16), arrivals)[1])
        assert path.dtype == jnp.bfloat16
        moved[name] = np.float64(path[-1])
    np.testing.assert_array_equal(moved["fedmedian"], np.median(rounded, axis=0))
    assert (moved["krum"] == rounded).all(axis=1).any()
    np.testing.assert_allclose(moved["trimmed_mean"], textbook.TrimmedMean().combine(rounded, None), rtol=2**-8)


# --- the buffer ---------------------------------------------------------------------------------


@pytest.mark.float64
@pytest.mark.parametrize("name", ROBUST)
def test_a_step_longer_than_the_buffer_is_not_silently_wrong(name):
    deltas = np.random.default_rng(0).normal(size=(6, D))
    five = {"size": 5, "overstale_after": 8}
    assert np.isfinite(once(ROBUST[name], deltas[:5], **five)).all()
    assert np.isnan(once(ROBUST[name], deltas, **five)).all()


@pytest.mark.parametrize(
    ("timing", "longest"), [("every", 1), ("buffer:size=4", 4), ("cohort:size=6", 6), ("window:length=0.9", None)]
)
def test_schedules_with_longer_steps_are_refused(timing, longest):
    schedule = plan(
        timing, "exponential:mean=1", num_clients=8, local_steps=np.ones(8, np.int32), until=Until(updates=40), seed=0
    )
    found = max(map(len, np.split(np.arange(40), np.flatnonzero(schedule.closes) + 1)))
    assert found == (longest or found)

    def of_size(size):
        return krum(size=size, byzantine=jnp.int32(0)).init  # traced, so that any size is allowed

    check_capacity(of_size(found)(start_params())[0], found)
    for enough in (of_size(found), fedbuff().init):
        check_capacity(jax.eval_shape(enough, start_params())[0], found)
    if found > 1:
        shapes = jax.eval_shape(of_size(found - 1), start_params())[0]
        with pytest.raises(ValueError, match=rf"^size of the rule's buffer = {found - 1}: must be at least {found},"):
            check_capacity(shapes, found)


def test_only_a_closing_arrival_pays_for_the_median():
    """The work on all rows is in a branch of the program, which only a closing arrival takes."""
    server = krum()
    state = jax.eval_shape(server.init, start_params())[0]
    arrival = jax.eval_shape(lambda: tree.gather(stacked(random_uploads(0, 1)), 0))
    program, closing = jax.make_jaxpr(server.receive)(state, (), arrival), jax.make_jaxpr(server.close)(state, ())
    used, paid = ({equation.primitive.name for equation in one.eqns} for one in (program, closing))
    assert not {"sort", "while", "scan", "argsort"} & used and {"while", "scan"} & paid
