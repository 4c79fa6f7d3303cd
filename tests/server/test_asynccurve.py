"""AsyncCurve and its parts: messages, averages and penalties, each in other rules too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings, geometry, server
from fedjax_async.config import prepare
from fedjax_async.local import Curve
from fedjax_async.server import METHODS, asgd, asynccurve, averaged, closed, feddyn, orthofl
from fedjax_async.server.steps import CONTROLS
from fedjax_async.server.swa import with_params
from fedjax_async.types import Facts, Message, Request, ServerAlgorithm
from tests.refusals import refusals
from tests.server.made_up import CLIENTS, D, arrival, flat, start_params, unflat


def one(rule, upload, *, state=None, extra=()):
    """State and info after one arrival that closes its step."""
    state = rule.init(start_params())[0] if state is None else state
    given = arrival(upload, start_params(), extra=extra)

    @jax.jit
    def step(state):
        state, memory, info = rule.receive(state, (), given)
        return closed(rule, state, memory)[0], info

    return step(state)


@pytest.mark.float64
def test_messages_hold_the_last_step_that_moved():
    rule = asynccurve()
    state = rule.init(start_params(), Facts(CLIENTS, True, 3, 3))[0]
    message, _ = rule.dispatch(state, (), Request())
    assert not np.any(flat(message.extra))
    for delta in np.random.default_rng(0).normal(size=(2, D)):
        before = flat(rule.params(state))
        state, _ = one(rule, Curve(unflat(delta), unflat(np.zeros(D))), state=state, extra=message.extra)
        moved = before - flat(rule.params(state))
        message, _ = rule.dispatch(state, (), Request())
        np.testing.assert_allclose(flat(message.extra), moved, rtol=1e-12)
        assert np.abs(moved).max() > 0.01
    off = asynccurve(warm="off")
    assert off.dispatch(off.init(start_params())[0], (), Request())[0].extra == ()


def test_a_step_that_is_not_finite_is_left_out_of_the_mean():
    """An upload of the largest numbers is finite, and the curve through it is not."""
    rule, large = asynccurve(step="curve"), unflat(np.full(D, 3e38))
    state = rule.init(start_params(), Facts(CLIENTS, True, 3, 3))[0]
    bad = arrival(Curve(unflat(np.full(D, -3e38)), large), start_params(), extra=large)
    state, _, info = jax.jit(rule.receive)(state, (), bad)
    assert info.weight == 0
    good = Curve(unflat(np.ones(D)), unflat(np.zeros(D)))
    moved = flat(rule.params(one(rule, good, state=state, extra=unflat(np.zeros(D)))[0])) - flat(start_params())
    assert np.isfinite(moved).all() and np.abs(moved).min() > 0


def test_steps_have_the_control_points_of_curves():
    assert set(CONTROLS) == set(geometry.CONTROL_POINTS)


def test_curves_of_another_family_than_the_servers_are_refused():
    upload = Curve(unflat(np.ones(D)), unflat(np.zeros(D)))
    with pytest.raises(ValueError, match=r"shapes of the curve's offsets = .*: must be .*the curve that clients train"):
        one(asynccurve(curve="cubic"), upload, extra=upload.offset)


# --- averages -------------------------------------------------------------------------------------


def test_outside_a_run_nothing_is_averaged():
    rule = averaged(asgd(), start=0.0)
    state, info = one(rule, unflat(np.ones(D)))
    np.testing.assert_allclose(flat(rule.params(state)), flat(start_params()) + 1.0, rtol=1e-6)
    assert info.weight == 1 and int(state.models) == 0


def average_of(models, start):
    """The averaging rule's state and params after steps to these models."""
    rule = averaged(ServerAlgorithm(lambda params: (params, ()), None, None, lambda params: params), start=start)
    state, _ = rule.init(models[0], Facts(1, True, len(models), len(models)))
    moved = jnp.bool_(True)
    state, _ = jax.lax.scan(lambda s, x: rule.close(s._replace(inner=x, changed=moved), ()), state, models)
    return state, float(rule.params(state))


def test_models_in_half_precision_are_averaged_in_full():
    """Models from 1 to 2; in bfloat16 their running mean stays at 1: the n-th moves it by less than its digits."""
    _, mean = average_of((1 + jnp.arange(600) / 600).astype(jnp.bfloat16), 0.0)
    assert abs(mean - 1.5) < 0.01


def test_the_average_begins_after_its_share_of_the_steps_whatever_its_rounding():
    """0.15 x 100 is 15.000001 in float32."""
    assert int(average_of(jnp.ones(100), 0.15)[0].models) == 85


def test_params_are_replaced_where_they_are_a_part_of_the_state():
    other = unflat(np.arange(9.0))
    for make in (asgd, orthofl, feddyn, asynccurve):
        rule = make()
        rule = rule if make is not asynccurve else rule._replace(params=lambda state: state.inner.inner.params)
        state = rule.init(start_params())[0]
        np.testing.assert_array_equal(flat(rule.params(with_params(rule, state, other))), np.arange(9.0))
    doubled = asgd()._replace(params=lambda state: jax.tree.map(lambda leaf: 2 * leaf, state.params))
    with pytest.raises(ValueError, match=r"^rule = .*computes its params.*must be one whose params are a part"):
        with_params(doubled, doubled.init(start_params())[0], other)


# --- options --------------------------------------------------------------------------------------

test_bad_options_are_refused = refusals(
    (lambda: averaged(asgd(), start=1.5), "^start = 1.5"),
    (lambda: averaged(asgd(), every=0), "^every = 0"),
    (lambda: averaged(asgd(), every=2**31), "^every = 2147483648: must be a whole number from 1 to"),
    (lambda: averaged(asgd(), overwrite=0), "^overwrite = 0"),
    (lambda: server.scale_by_dominance(0.0), "^dominance = 0.0"),
    (lambda: asynccurve(correction="orthogard"), "^correction = 'orthogard': unknown"),
    (lambda: asynccurve(correction="asgd", fraction=0.5), "^fraction = 0.5: must be left out"),
    (lambda: asynccurve(correction="dc_asgd", per="layer"), "^per = 'layer': must be left out"),
    (lambda: asynccurve(correction="orthopos", decay=0.5), "^decay = 0.5: must be left out"),
    (lambda: asynccurve(control="turn"), "^control = 'turn': unknown"),
    (lambda: asynccurve(step="jump"), "^step = 'jump': unknown"),
    (lambda: asynccurve(weighting="size"), "^weighting = 'size': must be"),
    (lambda: asynccurve(curve="quartic"), "^curve = 'quartic': unknown"),
    (lambda: asynccurve(curve="cubic", bends=2), "^bends = 2: must be left out unless curve=chain"),
    (lambda: asynccurve(curve="chain", bends=0), "^bends = 0: must be"),
)


def test_the_methods_own_optimiser_and_rate_hold_unless_others_are_given():
    def filled(**given):
        base = Settings(method="asynccurve", model="logistic", clients=5, updates=5)
        found = prepare(dataclasses.replace(base, **given)).settings
        return found.optimizer, found.lr

    assert filled() == ("adam", 0.001)
    assert filled(optimizer="sam:base=adam", lr=0.1) == ("sam:base=adam", 0.1)
    assert filled(method="fedavg") == ("sgd", 0.01) == (METHODS["fedavg"].optimizer, METHODS["fedavg"].lr)
    with pytest.raises(ValueError, match=r"^optimizer = .*Adam.*warm=off"):
        filled(optimizer="sgd")
    assert Message(()).local_steps == ()  # no leaf, so it is neither sent nor stored in a slot
