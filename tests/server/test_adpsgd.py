"""AD-PSGD: who averages with whom, what the nodes are sent, and that averages leave the mean alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import SERVERS
from fedjax_async.server.adpsgd import PAIRINGS
from fedjax_async.types import Facts, Request
from tests.server.made_up import D, arrival, flat, received, start_params, unflat

NEIGHBOURS = {  # of node i among n
    "complete": lambda i, n: {*range(n)} - {i} or {i},
    "ring": lambda i, n: {(i + 1) % n, (i - 1) % n},
    "bipartite": lambda i, n: {*range(1, n, 2)} if i % 2 == 0 and n > 1 else {i},
}


@pytest.mark.parametrize("nodes", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_neighbours_are_drawn_evenly(pairing, nodes):
    keys = jax.random.split(jax.random.key(5), 3000)
    draw = jax.jit(jax.vmap(lambda key, node: PAIRINGS[pairing](key, node, nodes), (0, None)))
    for node in range(nodes):
        drawn, counts = np.unique(draw(keys, jnp.int32(node)), return_counts=True)
        assert set(drawn.tolist()) == NEIGHBOURS[pairing](node, nodes)
        fair = 3000 / len(drawn)
        assert np.abs(counts - fair).max() < 5 * np.sqrt(fair)


@pytest.mark.float64
def test_each_node_has_a_model_of_its_own_and_averages_leave_the_mean_alone():
    """Against matrices: the gradient of Algorithm 1 is at the model that was sent, the step at the averaged one."""
    nodes, rule = 5, SERVERS["adpsgd"](pairing="ring", server_lr=0.5)
    receive, chance = jax.jit(received(rule)), np.random.default_rng(2)
    state, memory = rule.init(start_params(), Facts(nodes))
    sent = models = chance.normal(size=(nodes, D))
    state = state._replace(models=unflat(models, float))
    for e in range(40):
        node, key = int(chance.integers(nodes)), jax.random.key(e)
        change = chance.normal(size=D) - 0.1 * sent[node]
        given = arrival(unflat(change, float), unflat(sent[node], float), 1, node, key=key)
        before, sent = models, sent.copy()
        state, memory, info = receive(state, memory, given)
        models = flat(state.models)
        (other,) = {*np.flatnonzero(np.any(models != before, axis=1)).tolist()} - {node}
        assert info.weight == 1 and other in NEIGHBOURS["ring"](node, nodes)
        averaged = before.copy()
        averaged[[node, other]] = before[[node, other]].mean(axis=0)
        np.testing.assert_allclose(models[node], averaged[node] + 0.5 * change, rtol=1e-12)
        np.testing.assert_allclose(np.delete(models, node, 0), np.delete(averaged, node, 0), rtol=1e-12)
        np.testing.assert_allclose(flat(rule.params(state)), before.mean(axis=0) + 0.5 * change / nodes, rtol=1e-10)
        sent[node] = flat(rule.dispatch(state, memory, Request(client=node))[0].params)
        np.testing.assert_array_equal(sent[node], models[node])


def test_a_rejected_upload_averages_nothing():
    rule = SERVERS["adpsgd"]()
    state, memory = rule.init(start_params(), Facts(3))
    state, memory, _ = rule.receive(state, memory, arrival(start_params(1), start_params(), key=jax.random.key(1)))
    lost = arrival(jax.tree.map(jnp.zeros_like, start_params()), start_params(), weight=0.0, key=jax.random.key(2))
    after, _, info = rule.receive(state, memory, lost._replace(client=jnp.int32(1)))
    jax.tree.map(np.testing.assert_array_equal, after.models, state.models)
    assert info.weight == 0


def test_a_node_has_the_running_statistics_that_it_trained_and_its_neighbour_the_average():
    def params_of(weight, statistic):
        return {"params": {"w": jnp.full(3, weight)}, "batch_stats": {"var": jnp.full(2, statistic)}}

    rule = SERVERS["adpsgd"]()
    state, memory = rule.init(params_of(0.0, 1.0), Facts(2))
    state = state._replace(
        models=jax.tree.map(lambda leaf: leaf * jnp.full_like(leaf, 2.0).at[0].set(1.0), state.models)
    )
    given = arrival(params_of(1.0, 0.5), params_of(7.0, 4.0), key=jax.random.key(0))  # ends at a variance of 4.5
    after, _, _ = rule.receive(state, memory, given)
    np.testing.assert_allclose(after.models["batch_stats"]["var"], [[4.5, 4.5], [1.5, 1.5]])
    np.testing.assert_allclose(after.models["params"]["w"], [[1.0] * 3, [0.0] * 3])
