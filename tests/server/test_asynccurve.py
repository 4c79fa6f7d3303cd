"""AsyncCurve and its parts: identities, messages, averages and penalties, each in other rules too."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import geometry, simulate
from fedjax_async.local import Curve
from fedjax_async.server import (
    asgd,
    asynccurve,
    averaged,
    closed,
    fedasync,
    fedavg,
    fedbuff,
    feddyn,
    known,
    orthodyn,
    orthofl,
    rule,
    scale_by_dominance,
    towards_client,
)
from fedjax_async.server.orthofl import by_average, orthogonal
from fedjax_async.server.steps import CONTROLS, STEPS
from fedjax_async.server.swa import with_params
from fedjax_async.types import Arrival, Facts, Request
from tests.server.made_up import (
    CLIENTS,
    D,
    closing,
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


def path_of(server, uploads, *, offsets=True):
    """The same for clients that upload curves; without ``offsets`` these are straight."""
    arrivals = uploading("asynccurve", stacked(uploads))
    if not offsets:
        curve = arrivals.upload
        arrivals = arrivals._replace(upload=curve._replace(offset=jax.tree.map(np.zeros_like, curve.offset)))
    return plain_path(server, uploads, arrivals)


@pytest.mark.float64
@pytest.mark.parametrize("step", ["curve", "line"])
def test_without_displacements_it_is_orthodyns_straight_step(step):
    uploads = random_uploads(2)
    have, _ = path_of(asynccurve(server_lr=0.4, step=step, **PLAIN), uploads, offsets=False)
    want, _ = plain_path(orthodyn(server_lr=0.4), uploads)
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-14)
    bent, _ = path_of(asynccurve(server_lr=0.4, **PLAIN), uploads)
    assert np.abs(bent - want).max() > 0.1


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


@pytest.mark.float64
@pytest.mark.parametrize("name", ["fedasync", "asynccurve"])
def test_fedasync_is_the_sum_of_eq_7(name):
    """Updates from one model, applied one after the other, are ASGD with the rate ``alpha (1 - alpha)^(k - i)``."""
    alpha = 0.3
    start = flat(start_params())
    uploads = [u._replace(start=start) for u in closing(random_uploads(8, 6, rejected=0.0))]
    if name == "fedasync":
        path, _ = plain_path(fedasync(mixing=alpha, staleness="constant"), uploads)
    else:
        path, _ = path_of(asynccurve(correction="fedasync", step="line", server_lr=alpha, **PLAIN), uploads)
    for k in range(len(uploads)):
        gradients = [-u.delta for u in uploads[: k + 1]]
        want = start - sum(alpha * (1 - alpha) ** (k - i) * g for i, g in enumerate(gradients))
        np.testing.assert_allclose(path[k], want, rtol=1e-11, atol=1e-13)


@pytest.mark.float64
@pytest.mark.parametrize("control", CONTROLS)
def test_a_step_along_the_curve_is_its_point(control):
    """In changes and offsets, against ``geometry`` in points."""
    chance = np.random.default_rng(1)
    old, start, delta, change, offset = (unflat(chance.normal(size=9)) for _ in range(5))

    def plus(*trees):
        return jax.tree.map(lambda *leaves: sum(leaves), *trees)

    old, start, delta, change, offset = jax.tree.map(np.asarray, (old, start, delta, change, offset))
    ends = (old, plus(old, delta)), (start, plus(start, change))

    @jax.jit
    def by_points(ends, t):
        phi = plus(geometry.line(*ends[0], 0.5), offset)
        return geometry.bezier((ends[1][0], geometry.CONTROL_POINTS[control](phi, *ends), ends[1][1]), t)

    @jax.jit
    def by_changes(t):
        return STEPS["curve"](start, change, CONTROLS[control](offset, delta, change), t)

    point, moved = by_points(ends, jnp.asarray(0.3)), by_changes(jnp.asarray(0.3))
    np.testing.assert_allclose(flat(plus(start, moved)), flat(point), rtol=1e-12)
    assert set(CONTROLS) == set(geometry.CONTROL_POINTS)


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
    one, zero = (np.asarray(value, change["scale"].dtype) for value in (1, 0))
    arrival = Arrival(upload, start_params(), np.int32(0), one, np.int32(client), zero, np.bool_(True), extra=extra)
    return compiled(server)(state, arrival)


@pytest.mark.float64
def test_messages_hold_the_last_step_that_moved():
    server = known(asynccurve(), Facts(CLIENTS, True, 3, 3))
    state = server.init(start_params())[0]
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
def test_the_dominance_penalty_is_eta_over_n_p_up_to_the_end_of_the_curve():
    clients = [0, 0, 0, 1, 0, 2, 2]
    server = known(asynccurve(server_lr=0.5, lowest=1.0), Facts(4, True, 7, 7))
    state, positions = None, []
    for client in clients:
        state, info = one(server, client, np.ones(9), extra=(), state=state)
        positions.append(float(info.weight))
    want = [min(1.0, 0.5 * (i + 1) / (4 * clients[: i + 1].count(c))) for i, c in enumerate(clients)]
    np.testing.assert_allclose(positions, want, rtol=1e-12)
    assert min(want) < 0.2 and max(want) > 0.7


def dominated(uploads, limit):
    """The factors ``min(limit, 1 / (N p_i))`` of the accepted arrivals."""
    counts, factors = np.zeros(CLIENTS), []
    for i, u in enumerate(uploads):
        counts[i % CLIENTS] += u.examples > 0
        factors.append(min(limit, counts.sum() / (CLIENTS * counts[i % CLIENTS])) if u.examples > 0 else 0.0)
    return np.array(factors)


@pytest.mark.float64
def test_the_dominance_penalty_works_in_other_rules():
    uploads = random_uploads(3)
    fair = rule(scale_by_dominance(1.5), optimizer=optax.sgd(1.0))
    have, weights = plain_path(fair, uploads)
    want = dominated(uploads, 1.5)
    np.testing.assert_allclose(weights, want, rtol=1e-12)
    scaled = [u._replace(delta=f * u.delta) for u, f in zip(uploads, want)]
    np.testing.assert_allclose(have, plain_path(asgd(), scaled)[0], rtol=1e-11, atol=1e-13)

    average = rule(towards_client(), scale_by_dominance(1.0), optimizer=optax.sgd(0.6))
    ortho, weights = plain_path(by_average(average, orthogonal("layer")), uploads)
    np.testing.assert_allclose(weights, dominated(uploads, 1.0), rtol=1e-12)
    assert np.abs(ortho - plain_path(orthofl(staleness="constant"), uploads)[0]).max() > 1e-3
    assert np.sum((want > 0) & (want < 1)) > 0


def averages(path, uploads, start, every):
    """SWA by hand, of the rule's own path; steps without an accepted upload do not count."""
    models, out, tau, fresh = [], [], 0, False
    total = sum(u.closes for u in uploads)
    for x, u in zip(path, uploads):
        fresh |= u.examples > 0
        if u.closes and fresh:
            if tau >= start * total and tau % every == 0:
                models.append(x)
            tau, fresh = tau + 1, False
        out.append(np.mean(models, axis=0) if models else x)
    return np.array(out)


@pytest.mark.float64
@pytest.mark.parametrize("make", [fedbuff, orthofl], ids=["fedbuff", "orthofl"])
def test_any_rule_may_be_evaluated_by_its_average(make):
    uploads = random_uploads(4)
    plain, _ = plain_path(make(), uploads)
    have, _ = plain_path(averaged(make(), start=0.2, every=2), uploads)
    np.testing.assert_allclose(have, averages(plain, uploads, 0.2, 2), rtol=1e-11, atol=1e-13)
    assert np.abs(have - plain).max() > 0.1
    never, _ = plain_path(averaged(make(), start=1.0), uploads)
    np.testing.assert_allclose(never, plain, rtol=1e-12)


@pytest.mark.float64
def test_periodic_averaging_overwrites_the_model():
    uploads = closing(random_uploads(6, rejected=0.0))
    x, models, want = flat(start_params()), [], []
    for tau, u in enumerate(uploads):
        x = x + u.delta
        if tau >= 0.2 * len(uploads):
            models.append(x)
        if models and tau % 5 == 0:
            x = np.mean(models, axis=0)
        want.append(np.mean(models, axis=0) if models else x)
    have, _ = plain_path(averaged(asgd(), start=0.2, overwrite=5), uploads)
    np.testing.assert_allclose(have, want, rtol=1e-10, atol=1e-12)


def test_outside_a_run_nothing_is_averaged():
    server = averaged(asgd(), start=0.0)
    state, info = one(server, 0, np.ones(9), extra=(), upload=unflat(np.ones(9)))
    np.testing.assert_allclose(flat(server.params(state)), flat(start_params()) + 1.0, rtol=1e-6)
    assert info.weight == 1 and int(state.models) == 0


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: averaged(asgd(), start=1.5), "start = 1.5"),
        (lambda: averaged(asgd(), every=0), "every = 0"),
        (lambda: averaged(asgd(), overwrite=0), "overwrite = 0"),
        (lambda: scale_by_dominance(0.0), "dominance = 0.0"),
        (lambda: asynccurve(correction="orthogard"), "correction = 'orthogard': unknown"),
        (lambda: asynccurve(correction="asgd", fraction=0.5), "fraction = 0.5: must be left out"),
        (lambda: asynccurve(correction="dc_asgd", per="layer"), "per = 'layer': must be left out"),
        (lambda: asynccurve(correction="orthopos", decay=0.5), "decay = 0.5: must be left out"),
        (lambda: asynccurve(control="turn"), "control = 'turn': unknown"),
        (lambda: asynccurve(step="jump"), "step = 'jump': unknown"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(message)


def test_bytes_are_those_of_curves():
    small = {"model": "logistic", "clients": 5, "steps": 2, "updates": 10, "delay": "exponential"}
    plain = simulate(method="fedasync", **small).evaluations
    run = simulate(method="asynccurve:correction=orthograd", **small)
    curve = run.evaluations
    cold = simulate(method="asynccurve:correction=orthograd,warm=off", **small).evaluations
    for column, times in (("bytes_up", 2), ("bytes_down", 2)):
        np.testing.assert_array_equal(curve[column], times * plain[column])
    np.testing.assert_array_equal(cold["bytes_down"], plain["bytes_down"])
    np.testing.assert_array_equal(curve["time"], plain["time"])  # a job's virtual time is as in FedAvg
    np.testing.assert_array_equal(run.updates["gradients"], 2 * run.updates["local_steps"])  # its work is twice
    assert (run.counters["local_steps"], run.counters["gradients"]) == (20, 40)
