"""AsyncCurve and its parts: identities, messages, averages and penalties, each in other rules too."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings, geometry
from fedjax_async.config import prepare
from fedjax_async.local import Curve
from fedjax_async.server import (
    METHODS,
    asgd,
    asynccurve,
    averaged,
    closed,
    fedasync,
    fedavg,
    feddyn,
    orthofl,
    scale_by_dominance,
    step_size,
)
from fedjax_async.server.steps import CONTROLS
from fedjax_async.server.swa import with_params
from fedjax_async.types import Facts, Message, Request, ServerAlgorithm
from tests.refusals import refusals
from tests.server.made_up import (
    CLIENTS,
    D,
    arrival,
    flat,
    random_uploads,
    receive_all,
    stacked,
    start_params,
    unflat,
    uploading,
)

# the general family's plainest member: no schedule, penalty, average or warm moments
PLAIN = {"lowest": 1.0, "dominance": False, "swa": 1.0, "warm": "off"}


def plain_path(server, uploads, arrivals=None):
    """Params after each arrival, and the recorded weights."""
    arrivals = stacked(uploads) if arrivals is None else arrivals
    path, weights = jax.jit(lambda: receive_all(server, start_params(), arrivals)[1:])()
    return flat(path), np.asarray(weights)


def path_of(server, uploads):
    """The same for clients that upload curves."""
    return plain_path(server, uploads, uploading("asynccurve", stacked(uploads)))


INSTANCES = {
    "FedAsync": ({"correction": "fedasync", "server_lr": 0.6}, fedasync(staleness="constant")),
    "ASGD": ({"correction": "asgd", "server_lr": 0.3}, asgd(server_lr=0.3)),
    "FedAvg": ({"correction": "asgd", "server_lr": 1.0}, fedavg(weighting="uniform")),
}


@pytest.mark.float64
@pytest.mark.parametrize(("options", "instance"), INSTANCES.values(), ids=INSTANCES)
def test_other_methods_are_instances_on_the_line(options, instance):
    uploads = random_uploads(5)
    have, _ = path_of(asynccurve(step="line", **options, **PLAIN), uploads)
    want, _ = plain_path(instance, uploads)
    np.testing.assert_allclose(have, want, rtol=1e-11, atol=1e-13)


@cache
def compiled(server):
    """``(state, arrival) -> (state, info)``, for an arrival that closes its step."""

    def step(state, arrival):
        state, memory, info = server.receive(state, (), arrival)
        return closed(server, state, memory)[0], info

    return jax.jit(step)


def one(server, client, delta, *, extra, state=None, upload=None):
    """State and info after one arrival of ``client`` that closes its step."""
    state = server.init(start_params())[0] if state is None else state
    change = unflat(delta)
    upload = Curve(change, unflat(np.zeros(D), change["scale"].dtype)) if upload is None else upload
    return compiled(server)(state, arrival(upload, start_params(), client=client, extra=extra))


@pytest.mark.float64
def test_messages_hold_the_last_step_that_moved():
    server = asynccurve()
    state = server.init(start_params(), Facts(CLIENTS, True, 3, 3))[0]
    message, _ = server.dispatch(state, (), Request())
    assert not np.any(flat(message.extra))
    deltas = np.random.default_rng(0).normal(size=(2, 9))
    before = flat(server.params(state))
    for client, delta in enumerate(deltas):
        state, _ = one(server, client, delta, extra=message.extra, state=state)
        now = flat(server.params(state))
        message, _ = server.dispatch(state, (), Request())
        np.testing.assert_allclose(flat(message.extra), before - now, rtol=1e-12)
        assert np.abs(before - now).max() > 0.01
        before = now
    off = asynccurve(warm="off")
    assert off.dispatch(off.init(start_params())[0], (), Request())[0].extra == ()


@pytest.mark.float64
def test_positions_by_examples_are_eq_32_once_all_clients_have_arrived():
    """``w_i eta`` with eta over N and without the penalty; ``w_i eta / p_i`` with it."""
    sizes, who = np.array([10.0, 30.0, 60.0]), [0, 1, 2, 2, 0, 2, 1]
    for dominance in (False, True):
        size = step_size(lambda tau: jnp.asarray(0.2), dominance=dominance, weighting="examples")
        state, of, found = size.init(Facts(3)), jax.jit(size.of), []
        for client in who:
            one_arrival = arrival((), (), client=client, weight=sizes[client])
            position, state = of(one_arrival, state)
            found.append(float(position))
        for k in range(2, len(who)):
            client = who[k]
            w, p = sizes[client] / sizes.sum(), who[: k + 1].count(client) / (k + 1)
            assert found[k] == pytest.approx(min(1.0, 0.2 * w / p if dominance else 3 * w * 0.2))
        seen = sizes[:2].mean()  # the third client counts as the mean of the two that have arrived
        assert found[1] == pytest.approx(0.2 * sizes[1] / seen / (3 * 0.5 if dominance else 1))


def test_steps_have_the_control_points_of_curves():
    assert set(CONTROLS) == set(geometry.CONTROL_POINTS)


@pytest.mark.float64
@pytest.mark.parametrize("control", ["rotation", "none"])
def test_a_quadratic_curve_given_as_a_cubic_one_takes_the_same_steps(control):
    """Degree elevation: both inner points of the cubic curve have two thirds of the control point's offset."""
    uploads = random_uploads(5)
    arrivals = uploading("asynccurve", stacked(uploads))
    raised = jax.tree.map(lambda leaf: np.stack([2 / 3 * leaf] * 2, axis=1), arrivals.upload.offset)
    arrivals_of = {"quadratic": arrivals, "cubic": arrivals._replace(upload=arrivals.upload._replace(offset=raised))}
    have = [plain_path(asynccurve(curve=c, control=control), uploads, each)[0] for c, each in arrivals_of.items()]
    np.testing.assert_allclose(have[1], have[0], rtol=1e-11, atol=1e-13)


def test_curves_of_another_family_than_the_servers_are_refused():
    upload = Curve(unflat(np.ones(D)), unflat(np.zeros(D)))
    with pytest.raises(ValueError, match=r"shapes of the curve's offsets = .*: must be .*the curve that clients train"):
        one(asynccurve(curve="cubic"), 0, np.ones(D), extra=unflat(np.zeros(D)), upload=upload)


def test_outside_a_run_nothing_is_averaged():
    server = averaged(asgd(), start=0.0)
    state, info = one(server, 0, np.ones(9), extra=(), upload=unflat(np.ones(9)))
    np.testing.assert_allclose(flat(server.params(state)), flat(start_params()) + 1.0, rtol=1e-6)
    assert info.weight == 1 and int(state.models) == 0


def test_models_in_half_precision_are_averaged_in_full():
    """Models from 1 to 2; in bfloat16 their running mean stays at 1: the n-th moves it by less than its digits."""
    count = 600
    server = averaged(ServerAlgorithm(lambda params: (params, ()), None, None, lambda params: params), start=0.0)

    def one(state, i):
        model = (1 + i.astype(jnp.float32) / count).astype(jnp.bfloat16)
        return server.close(state._replace(inner=model, changed=jnp.bool_(True)), ())

    state, _ = server.init(jnp.bfloat16(1.0), Facts(1, True, count, count))
    state, _ = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    assert abs(float(server.params(state)) - 1.5) < 0.01


def test_the_average_begins_after_its_share_of_the_steps_whatever_its_rounding():
    """0.15 x 100 is 15.000001 in float32."""
    server = averaged(ServerAlgorithm(lambda params: (params, ()), None, None, lambda params: params), start=0.15)
    state, _ = server.init(jnp.float32(1.0), Facts(1, True, 100, 100))
    state, _ = jax.lax.scan(lambda s, _: server.close(s._replace(changed=jnp.bool_(True)), ()), state, length=100)
    assert int(state.models) == 85


def test_params_are_replaced_where_they_are_a_part_of_the_state():
    other = unflat(np.arange(9.0))
    for make in (asgd, orthofl, feddyn, asynccurve):
        server = make()
        server = server if make is not asynccurve else server._replace(params=lambda state: state.inner.inner.params)
        state = server.init(start_params())[0]
        np.testing.assert_array_equal(flat(server.params(with_params(server, state, other))), np.arange(9.0))
    doubled = asgd()._replace(params=lambda state: jax.tree.map(lambda leaf: 2 * leaf, state.params))
    with pytest.raises(ValueError, match=r"^rule = .*computes its params.*must be one whose params are a part"):
        with_params(doubled, doubled.init(start_params())[0], other)


test_bad_options_are_refused = refusals(
    (lambda: averaged(asgd(), start=1.5), "^start = 1.5"),
    (lambda: averaged(asgd(), every=0), "^every = 0"),
    (lambda: averaged(asgd(), overwrite=0), "^overwrite = 0"),
    (lambda: scale_by_dominance(0.0), "^dominance = 0.0"),
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
