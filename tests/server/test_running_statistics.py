"""BatchNorm's running statistics among the params: rules average their values, and none treats them as weights."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.server import SERVERS, begun, rebased
from fedjax_async.types import Facts, Info, Message, ServerAlgorithm
from tests.server.made_up import arrival, received, uploading

AVERAGING = ["fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "asgd", "asynfl", "fedbuff", "fadas", "ca2fl"]
AVERAGING += ["fedstale", "mifa", "ace", "malenia", "ringleader", "area", "port", "fedstaleweight", "pisces"]
CORRECTED = ["dc_asgd", "dc_asgd_a", "orthograd", "orthopos", "orthostrict", "orthodyn"]


def params_of(weight, statistic):
    return {"params": {"w": jnp.full(3, weight)}, "batch_stats": {"var": jnp.full(2, statistic)}}


@functools.cache
def run_of(name, **options):
    """From (start, change, staleness), [steps, 2] each, to the server's statistics and weights after these steps."""
    server = SERVERS[name](**options)

    def function(start, change, staleness):
        state, row = begun(server, params_of(0.0, 1.0), Facts(2))
        rows = [row, row]
        for step, client in np.ndindex(start.shape):
            upload, begun_at = params_of(1.0 + client, change[step, client]), params_of(0.0, start[step, client])
            given = arrival(upload, begun_at, staleness[step, client], client, weight=4.0, closes=client == 1)
            state, rows[client], _ = received(server)(state, rows[client], uploading(name, given))
        end = server.params(state)
        return end["batch_stats"]["var"], end["params"]["w"]

    return jax.jit(function)


def after_steps(name, start, change, staleness=None, **options):
    staleness = np.zeros(np.shape(start)) if staleness is None else staleness
    found = run_of(name, **options)(
        np.asarray(start, float), np.asarray(change, float), np.asarray(staleness, np.int32)
    )
    return [np.asarray(each) for each in found]


@pytest.mark.float64
@pytest.mark.parametrize("name", AVERAGING + CORRECTED)
def test_statistics_become_the_mean_of_the_clients_own(name):
    """For any staleness: in the second step one client started where those of the first did, another elsewhere."""
    weak = {"strength": 0.01} if name == "dc_asgd_a" else {}  # a strong correction turns the weights around
    stale = np.ones((2, 2)) if name == "fedstaleweight" else None  # its fresh uploads weigh nothing
    statistics, weights = after_steps(name, [[1.0, 1.0], [1.0, 3.0]], [[0.2, 0.4], [-0.1, -2.5]], stale, **weak)
    np.testing.assert_allclose(statistics, np.full(2, (0.9 + 0.5) / 2), rtol=1e-12)
    assert np.all(weights > 0)


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
        uploads = [[1.0, 1.0], [1.0, 3.0]], [[0.2, 0.4], [-0.1, -2.5]]
        for ours, theirs in zip(
            after_steps("by_hand", *uploads), after_steps("fedbuff", *uploads, server_lr=1.0), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


ALONG_A_CURVE = {"asynccurve"}  # its models and statistics move a part of the way together
RATED = sorted(name for name, rule in SERVERS.items() if "server_lr" in inspect.signature(rule).parameters)


@pytest.mark.float64
@pytest.mark.parametrize("name", sorted({*RATED} - ALONG_A_CURVE))
def test_the_servers_rate_moves_weights_and_not_statistics(name):
    steps = [[1.0, 1.0], [1.0, 3.0]], [[0.2, 0.4], [-0.1, -2.5]]
    (slow, _), (usual, _) = (after_steps(name, *steps, server_lr=rate) for rate in (0.05, 0.5))
    np.testing.assert_allclose(slow, usual, rtol=1e-12)


PAIRS = st.tuples(*[st.tuples(*[st.floats(0.0, 10.0)] * 2)] * 2)
LATE = st.tuples(*[st.tuples(*[st.integers(0, 30)] * 2)] * 2)


@pytest.mark.float64
@pytest.mark.parametrize("name", sorted(SERVERS))
@given(start=PAIRS, end=PAIRS, staleness=LATE)
def test_no_rule_leaves_the_range_of_what_clients_hold(name, start, end, staleness):
    """So no running variance becomes negative, for any staleness."""
    statistics, _ = after_steps(name, start, np.subtract(end, start), staleness)
    held = [1.0, *np.ravel(end)]
    assert np.all(statistics >= min(held) - 1e-9)
    assert np.all(statistics <= max(held) + 1e-9)


@pytest.mark.float64
@pytest.mark.parametrize("name", AVERAGING + CORRECTED)
def test_statistics_have_no_part_in_how_weights_move(name):
    small, large = (after_steps(name, [[1.0, 1.0]], [[s, s]], clip=1.5)[1] for s in (0.0, 100.0))
    np.testing.assert_array_equal(small, large)
