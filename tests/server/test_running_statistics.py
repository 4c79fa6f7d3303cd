"""BatchNorm's running statistics among the params: rules average their values, and none treats them as weights."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import SERVERS, rebased, scale_by_dominance, scale_by_staleness
from fedjax_async.server.averaging import over_clients
from fedjax_async.server.step_size import Participation
from fedjax_async.types import Arrival, Facts, Info, Message, ServerAlgorithm
from tests.server.made_up import receive_all, uploading

AVERAGING = ["fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "asgd", "asynfl", "fedbuff", "fadas", "ca2fl"]
AVERAGING += ["fedstale", "mifa", "ace", "malenia", "ringleader", "area", "port", "fedstaleweight", "pisces"]
CORRECTED = ["dc_asgd", "dc_asgd_a", "orthograd", "orthopos", "orthostrict", "orthodyn"]
ALONG_A_CURVE = {"asynccurve"}  # its models and statistics move a part of the way together
RATED = sorted(name for name, rule in SERVERS.items() if "server_lr" in inspect.signature(rule).parameters)


def params_of(weight, statistic):
    """Leading axes of the numbers are those of the leaves."""
    return {
        "params": {"w": jnp.multiply.outer(weight, jnp.ones(3))},
        "batch_stats": {"var": jnp.multiply.outer(statistic, jnp.ones(2))},
    }


def ends(name, start, change, staleness=None, **options):
    """The server's statistics [R, 2] and weights [R, 3] after R runs of two clients, of one program.

    ``start``, ``change``, ``staleness``: [R, steps, 2], of the statistics; options: [R] each.
    """

    @jax.jit
    @jax.vmap
    def run(start, change, staleness, options):
        client = jnp.arange(start.size, dtype=jnp.int32) % 2
        weights = jnp.where(client == 1, 2.0, 1.0)
        upload, begun_at = params_of(weights, change.ravel()), params_of(jnp.zeros(start.size), start.ravel())
        time, weight, ones = jnp.zeros(start.size), jnp.full(start.size, 4.0), jnp.ones_like(client)
        arrivals = Arrival(upload, begun_at, staleness.ravel(), weight, client, time, client == 1, ones)
        rule, params = SERVERS[name](**options), params_of(jnp.asarray(0.0), jnp.asarray(1.0))
        _, path, _ = receive_all(rule, params, uploading(name, arrivals), clients=2)
        return path["batch_stats"]["var"][-1], path["params"]["w"][-1]

    start, change = np.asarray(start, float), np.asarray(change, float)
    late = np.zeros(start.shape, np.int32) if staleness is None else np.asarray(staleness, np.int32)
    return [np.asarray(end) for end in run(start, change, late, {key: np.array(v) for key, v in options.items()})]


# two steps in which one client started where both of the first did, another elsewhere
STARTS, CHANGES = [[1.0, 1.0], [1.0, 3.0]], [[0.2, 0.4], [-0.1, -2.5]]


def drawn(count=300):
    """Statistics at the starts and ends of jobs, and staleness [count, 2, 2], zeros and equal numbers among them."""
    chance = np.random.default_rng(5)
    pairs = chance.choice([0.0, 1.0, 10.0, np.nan], size=(2, count, 2, 2), p=[0.1, 0.1, 0.1, 0.7])
    start, end = np.where(np.isnan(pairs), chance.uniform(0.0, 10.0, pairs.shape), pairs)
    return start, end, chance.integers(0, 31, start.shape) * chance.integers(0, 2, start.shape)


class Runs(NamedTuple):
    slow: Any  # of the two steps, at a low and at a high rate of the server; each (statistics, weights)
    fast: Any
    small: Any  # of clipped uploads with small and with large statistics
    large: Any
    usual: Any  # of the two steps by the rule's defaults
    drawn: Any  # of the drawn jobs, [300, 2] and [300, 3]


def runs(name):
    """All runs of a rule, in one program."""
    first, last, late = drawn()
    none, many = np.zeros((1, 2, 2)), len(first) + 1
    starts = np.concatenate([[STARTS] * 2, [none[0] + 1] * 2, [STARTS], first])
    changes = np.concatenate([[CHANGES] * 2, none, none + 100.0, [CHANGES], last - first])
    parameters = inspect.signature(SERVERS[name]).parameters
    rates = {"server_lr": [0.05, 0.5, *[parameters["server_lr"].default] * (2 + many)]} if name in RATED else {}
    clip = [np.inf, np.inf, 1.5, 1.5, *[np.inf] * many]
    first_late = none + 1 if name == "fedstaleweight" else none  # its fresh uploads weigh nothing
    found = ends(name, starts, changes, np.concatenate([*[first_late] * 5, late]), clip=clip, **rates)
    return Runs(*([each[i] for each in found] for i in range(5)), [each[5:] for each in found])


@pytest.mark.float64
@pytest.mark.parametrize("name", SERVERS)
def test_no_rule_treats_statistics_as_weights(name):
    found, (_, end, _) = runs(name), drawn()
    # no rule leaves the range of what clients hold, so no running variance becomes negative, for any staleness
    held = np.concatenate([np.ones((len(end), 1)), end.reshape(len(end), -1)], axis=1)
    assert np.all(found.drawn[0] >= held.min(axis=1, keepdims=True) - 1e-9)
    assert np.all(found.drawn[0] <= held.max(axis=1, keepdims=True) + 1e-9)
    if name in RATED and name not in ALONG_A_CURVE:  # the server's rate moves weights alone
        np.testing.assert_allclose(found.slow[0], found.fast[0], rtol=1e-12)
        assert np.all(found.slow[1] != found.fast[1])
    if name in AVERAGING + CORRECTED:
        # statistics become the mean of the clients' own, for any staleness
        np.testing.assert_allclose(found.usual[0], np.full(2, (0.9 + 0.5) / 2), rtol=1e-12)
        turned = name == "dc_asgd_a"  # its strong correction turns the weights around
        assert np.all((found.usual[1] > 0) != turned)
        # they have no part in how weights move
        np.testing.assert_array_equal(found.small[1], found.large[1])


def test_rare_clients_move_statistics_no_further_than_to_their_own():
    """Client 1 arrives once in four times: its weight among two clients is 2, its variance is 0.2 at a server's 1."""
    real, whole = jnp.asarray(1.0), jnp.int32(1)
    start = params_of(0.0 * real, real)
    late = Arrival(params_of(real, -0.8 * real), start, whole, real, whole, real, jnp.bool_(True))
    state = Participation(jnp.array([3, 0], jnp.int32), jnp.int32(3))
    for transform in (scale_by_dominance(4.0), scale_by_staleness(lambda tau: 2.0 * tau.astype(float))):
        moved, _, weight = transform.update(late.upload, state, start, late)
        assert weight == 2 and np.all(moved["params"]["w"] == 2)
        np.testing.assert_allclose(moved["batch_stats"]["var"], -0.8, rtol=1e-6)


def test_more_uploads_than_clients_move_statistics_no_further_than_to_their_mean():
    start, change, one = params_of(0.0, 1.0), params_of(1.0, -0.8), jnp.asarray(1.0)
    aggregate, late = over_clients(), Arrival(change, start, *jnp.ones((5, 1), jnp.int32))
    total = aggregate.init(start, Facts(2))
    for _ in range(5):  # from a fast client, in a step of a timing that waits for as many: fresh:size=5
        total = aggregate.add(total, change, one, late)
    direction, weight, _ = aggregate.close(total)
    assert weight == 5 and np.all(direction["params"]["w"] == 2.5)
    np.testing.assert_allclose(direction["batch_stats"]["var"], -0.8, rtol=1e-6)


def test_a_rule_of_ones_own_adds_up_what_rebased_returns(monkeypatch):
    def by_hand():
        def receive(state, memory, arrival):
            params, total = state
            upload = rebased(arrival, params).upload
            return (params, jax.tree.map(lambda t, d: t + d / 2, total, upload)), memory, Info(jnp.asarray(1.0))

        def close(state, memory):
            return (jax.tree.map(jnp.add, *state), jax.tree.map(jnp.zeros_like, state[1])), memory

        def init(params):
            return (params, jax.tree.map(jnp.zeros_like, params)), ()

        return ServerAlgorithm(
            init, receive, lambda state, memory, _: (Message(state[0]), memory), lambda s: s[0], close
        )

    monkeypatch.setitem(SERVERS, "by_hand", by_hand)
    with jax.enable_x64(True):
        theirs = ends("fedbuff", [STARTS], [CHANGES], server_lr=[1.0])
        for one, other in zip(ends("by_hand", [STARTS], [CHANGES]), theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
