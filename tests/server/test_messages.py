"""Rules that send each client weights of its own: OrthoFL and its ablations, AD-PSGD and QuAFL."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.geometry import GROUPINGS
from fedjax_async.server import SERVERS
from fedjax_async.server.adpsgd import PAIRINGS
from fedjax_async.types import Facts, Request
from tests.server.books import BOOKS
from tests.server.made_up import CLIENTS, D, arrival, flat, received, start_params, unflat
from tests.server.textbook import Upload

TARGETS = np.random.default_rng(4).normal(size=(CLIENTS, D))
CASES = [
    *(("orthofl", {"per": per}, 1) for per in GROUPINGS),
    ("orthofl", {}, 1),
    ("orthofl", {"reference": "shared", "per": "whole"}, 1),
    ("orthofl_no_average", {"per": "tensor"}, 1),
    ("orthofl_no_average", {}, 1),
    *(("orthofl_pairwise", {"per": per}, 1) for per in ("layer", "whole")),
    ("orthofl_released", {}, 1),
    ("adpsgd", {"pairing": "ring", "server_lr": 0.5}, 1),
    # several uploads a server step: whoever closes it hears of the others
    ("orthofl", {}, 3),
    ("orthofl_pairwise", {"per": "whole"}, 2),
    ("quafl", {"size": 2}, 2),
]


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options", "together"), CASES)
def test_messages_and_models_of_fifty_uploads_equal_numpy(name, options, together):
    """Clients train from what they were sent: part of the way to their optima, bent by a nonlinearity."""
    rule, chance = SERVERS[name](**options), np.random.default_rng(0)
    receive, dispatch = jax.jit(received(rule)), jax.jit(rule.dispatch)
    state, row = rule.init(start_params(), Facts(CLIENTS))
    rows, x = [row] * CLIENTS, flat(start_params())
    starts, last = np.tile(x, (CLIENTS, 1)), np.zeros(CLIENTS, int)
    keys = jax.random.split(jax.random.key(5), 50)
    book = BOOKS[name](**options, **({"keys": keys} if name == "adpsgd" else {}))
    book.begin(x, [])
    for e in range(50 // together):
        clients = chance.choice(CLIENTS, together, replace=False).tolist()
        for i in clients:
            change, stale, closes = 0.3 * np.tanh(TARGETS[i] - starts[i]), e - last[i], i == clients[-1]
            given = unflat(change, float), unflat(starts[i], float), stale, i
            state, rows[i], info = receive(state, rows[i], arrival(*given, closes=closes, key=keys[e]))
            x, weight = book.arrive(x, Upload(change, starts[i], stale, 1.0, closes), i)
            np.testing.assert_allclose(info.weight, weight, rtol=1e-12)
        for i in clients:
            message, rows[i] = dispatch(state, rows[i], Request(client=i))
            starts[i], last[i] = flat(message.params), e + 1
            np.testing.assert_allclose(starts[i], book.sent(x, i), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(flat(rule.params(state)), x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["orthofl", "shared", "orthofl_no_average", "orthofl_pairwise", "adpsgd", "quafl"])
def test_an_upload_that_the_rule_rejects_leaves_its_client_and_the_others_where_they_were(name):
    make = functools.partial(SERVERS["orthofl"], reference="shared") if name == "shared" else SERVERS[name]
    rule = make(overstale_after=1)
    state, row = rule.init(start_params(), Facts(CLIENTS))
    zero = jax.tree.map(jnp.zeros_like, start_params())
    given = arrival(start_params(1), start_params(), 0, 1, key=jax.random.key(1))
    state, _, _ = received(rule)(state, row, given)  # so that the models differ
    seen = jax.jit(
        lambda *now: (rule.params(now[0]), *(rule.dispatch(*now, Request(client=i))[0].params for i in (0, 1)))
    )
    before = seen(state, row)
    for lost in (given._replace(staleness=jnp.int32(5)), given._replace(upload=zero, weight=jnp.asarray(0.0))):
        after, memory, info = received(rule)(state, row, lost)
        assert info.weight == 0
        jax.tree.map(np.testing.assert_array_equal, seen(after, memory), before)


# --- OrthoFL ------------------------------------------------------------------------------------


@pytest.mark.float64
def test_a_client_that_nobody_overtook_keeps_its_own_weights():
    """Exactly, because ``W - W_seen`` is zero."""
    server = SERVERS["orthofl"]()
    state, row = server.init(start_params())
    start = flat(start_params())
    for _ in range(3):
        change = 0.3 * np.tanh(TARGETS[0] - start)
        state, row, _ = received(server)(state, row, arrival(unflat(change, float), unflat(start, float)))
        message, row = server.dispatch(state, row, Request())
        np.testing.assert_array_equal(flat(message.params), start + change)
        start = flat(message.params)


def sent_after(rule, start, changes, weights=(1.0, 1.0)):
    """What ``rule`` sends client 1 after one upload of client 0 and one of client 1, from one start."""
    state, row = rule.init(start, Facts(2))
    rows = [row, row]
    for client, (change, weight) in enumerate(zip(changes, weights)):
        given = arrival(change, start, client, client, weight=weight)
        state, rows[client], _ = received(rule)(state, rows[client], given)
    return rule.dispatch(state, rows[1], Request())[0].params


@pytest.mark.float64
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("orthofl", options) for options in ({}, {"per": "whole"}, {"reference": "shared"})),
        *((name, {}) for name in ("orthofl_no_average", "orthofl_pairwise")),
    ],
)
def test_running_statistics_stay_the_clients_own_and_do_not_decide_what_is_orthogonal(name, options):
    start, sent = {"params": {"w": jnp.zeros(3)}, "batch_stats": {"mean": jnp.zeros(2)}}, []
    for size in (1.0, 5.0):
        first = jax.tree.map(lambda leaf, size=size: size ** (len(leaf) == 2) * jnp.arange(1.0, 1 + len(leaf)), start)
        second = jax.tree.map(lambda leaf: -leaf[::-1], first)
        found = sent_after(SERVERS[name](**options), start, [first, second])
        np.testing.assert_array_equal(found["batch_stats"]["mean"], second["batch_stats"]["mean"])
        assert np.abs(found["params"]["w"] - second["params"]["w"]).max() > 0.1
        sent.append(found["params"]["w"])
    np.testing.assert_array_equal(*sent)


@pytest.mark.float64
def test_batch_norm_comes_back_from_the_released_code_as_the_client_has_it():
    """Scale, bias and statistics; the other client's shift is not zero."""
    start = {"params": {"norm": {"scale": jnp.ones(3), "bias": jnp.zeros(3)}, "dense": {"kernel": jnp.ones((3, 2))}}}
    start |= {"batch_stats": {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}}

    def change(leaf, k):
        return jnp.cos(k + leaf + jnp.arange(leaf.size, dtype=float).reshape(leaf.shape))

    changes = [jax.tree.map(lambda leaf, k=k: change(leaf, k), start) for k in (0.0, 1.0)]
    sent, own = sent_after(SERVERS["orthofl_released"](), start, changes), jax.tree.map(jnp.add, start, changes[1])
    same = jax.tree.map(lambda a, b: bool(np.abs(a - b).max() < 1e-14), sent, own)
    norm = {"scale": True, "bias": True}
    assert same["params"] == {"norm": norm, "dense": {"kernel": False}}
    assert same["batch_stats"] == {"norm": {"mean": True, "var": True}}


@pytest.mark.float64
def test_what_does_not_change_takes_the_whole_shift_over_in_the_released_code():
    """A tensor, such as a frozen factor of an adapter, and all weights of a rejected client."""
    rule = SERVERS["orthofl_released"]()
    first = {"adapter": {"down": jnp.arange(1.0, 9).reshape(4, 2), "up": jnp.arange(6.0).reshape(2, 3)}}
    start = jax.tree.map(jnp.zeros_like, first)
    second = {"adapter": {"down": jnp.ones((4, 2)), "up": jnp.zeros((2, 3))}}
    sent = sent_after(rule, start, [first, second])
    np.testing.assert_allclose(sent["adapter"]["up"], first["adapter"]["up"], rtol=1e-14)
    rejected = sent_after(rule, start, [first, start], weights=(1.0, 0.0))
    jax.tree.map(np.testing.assert_array_equal, rejected, first)


# --- AD-PSGD ------------------------------------------------------------------------------------

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
