"""OrthoFL and its ablations: the messages of 50 steps against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.geometry import GROUPINGS
from fedjax_async.server import SERVERS
from fedjax_async.types import Facts, Request
from tests.server.made_up import D, arrival, flat, received, start_params, unflat
from tests.server.textbook_loops import LAYERS, TENSORS, WHOLE, outside, perpendicular

pytestmark = pytest.mark.float64

CLIENTS, STEPS = 5, 50
SLICES = {"layer": LAYERS, "tensor": TENSORS, "whole": WHOLE, "default": LAYERS}
TARGETS = np.random.default_rng(4).normal(size=(CLIENTS, D))


def trained(start, client):
    """A client's change: part of the way to its own optimum, bent by a nonlinearity."""
    return 0.3 * np.tanh(TARGETS[client] - start)


def order(seed=0):
    """The arriving clients, with staleness = arrivals since the client was sent its start."""
    who = np.random.default_rng(seed).integers(0, CLIENTS, STEPS)
    last = np.zeros(CLIENTS, int)
    stale = []
    for t, m in enumerate(who):
        stale.append(t - last[m])
        last[m] = t + 1
    return who, stale


def play(server, facts=Facts()):
    """Global params after each arrival, and the next message to the arriving client."""
    receive, dispatch = jax.jit(received(server)), jax.jit(server.dispatch)
    state, row = server.init(start_params(), facts)
    rows, starts = [row] * CLIENTS, []
    for m in range(CLIENTS):
        message, rows[m] = dispatch(state, rows[m], Request())
        starts.append(flat(message.params))
    path, sent = [], []
    for m, tau in zip(*order()):
        given = arrival(unflat(trained(starts[m], m), float), unflat(starts[m], float), tau, m)
        state, rows[m], _ = receive(state, rows[m], given)
        message, rows[m] = dispatch(state, rows[m], Request())
        starts[m] = flat(message.params)
        path.append(flat(server.params(state)))
        sent.append(starts[m])
    return np.array(path), np.array(sent)


def paper(groups, mixing=0.6, pairwise=False):
    """Algorithm 1 with ``s = tau + 1``; or the client's change projected on the complement of the others' changes."""
    w = flat(start_params())
    starts, seen = np.tile(w, (CLIENTS, 1)), np.tile(w, (CLIENTS, 1))
    changes = np.zeros((CLIENTS, D))
    path, sent = [], []
    for m, tau in zip(*order()):
        change = trained(starts[m], m)
        uploaded, shift = starts[m] + change, w - seen[m]
        if pairwise:
            others = np.delete(changes, m, axis=0)
            goes_on = starts[m] + outside(change, others, groups) + shift
        else:
            goes_on = uploaded + perpendicular(shift, change, groups)
        b = mixing * (tau + 1) ** -0.5
        w = (1 - b) * w + b * uploaded
        starts[m], seen[m], changes[m] = goes_on, w, change
        path.append(w)
        sent.append(goes_on)
    return np.array(path), np.array(sent)


def code(groups, mixing=0.6, averaged=True):
    """The released code: the shift of the weights sent last; the first update of the average has weight 1."""
    w = shared = flat(start_params())
    starts = np.tile(w, (CLIENTS, 1))
    path, sent = [], []
    for t, (m, tau) in enumerate(zip(*order())):
        change = trained(starts[m], m)
        b = 1.0 if t == 0 else mixing * (tau + 1) ** -0.5
        w = (1 - b) * w + b * (starts[m] + change)
        shared = starts[m] + change + perpendicular(shared - starts[m], change, groups)
        starts[m] = shared
        path.append(w if averaged else shared)
        sent.append(shared)
    return np.array(path), np.array(sent)


VERSIONS = {
    "orthofl": ({}, paper),
    "orthofl, shared": ({"reference": "shared"}, code),
    "orthofl_no_average": ({}, lambda groups: code(groups, averaged=False)),
    "orthofl_pairwise": ({}, lambda groups: paper(groups, pairwise=True)),
    "orthofl_released": ({}, code),
}


CASES = [("orthofl", per) for per in GROUPINGS]
CASES += [("orthofl, shared", "whole"), ("orthofl_no_average", "tensor"), ("orthofl_no_average", "default")]
CASES += [("orthofl_pairwise", "layer"), ("orthofl_pairwise", "whole"), ("orthofl_released", "tensor")]


@pytest.mark.parametrize(("version", "per"), CASES)
def test_fifty_steps_equal_numpy(version, per):
    options, book = VERSIONS[version]
    if per != "default" and version != "orthofl_released":  # it has no other grouping
        options = options | {"per": per}
    have = play(SERVERS[version.split(",")[0]](**options), Facts(CLIENTS))
    for mine, theirs in zip(have, book(SLICES[per])):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_client_that_nobody_overtook_keeps_its_own_weights():
    """Equal up to rounding, because ``W - W_seen`` is exactly zero."""
    server = SERVERS["orthofl"]()
    state, row = server.init(start_params())
    start = flat(start_params())
    for _ in range(3):
        change = trained(start, 0)
        given = arrival(unflat(change, float), unflat(start, float), 0, 0)
        state, row, _ = received(server)(state, row, given)
        message, row = server.dispatch(state, row, Request())
        np.testing.assert_array_equal(flat(message.params), start + change)
        start = flat(message.params)


STATISTICS_CASES = [
    ("orthofl", {}),
    ("orthofl", {"per": "whole"}),
    ("orthofl", {"reference": "shared"}),
    ("orthofl_no_average", {}),
    ("orthofl_pairwise", {}),
]


@pytest.mark.parametrize(("name", "options"), STATISTICS_CASES)
def test_running_statistics_stay_the_clients_own(name, options):
    server = SERVERS[name](**options)
    params = {"params": {"w": jnp.zeros(3)}, "batch_stats": {"mean": jnp.zeros(2)}}
    state, row = server.init(params, Facts(2))
    other = row
    up = jax.tree.map(lambda leaf: leaf + jnp.arange(1.0, 1 + len(leaf)), params)
    given = arrival(up, params, 0, 0)
    state, row, _ = received(server)(state, row, given)
    late = given._replace(upload=jax.tree.map(lambda leaf: -leaf[::-1], up), client=jnp.int32(1))
    state, other, _ = received(server)(state, other, late)
    sent = server.dispatch(state, other, Request())[0].params
    np.testing.assert_array_equal(sent["batch_stats"]["mean"], late.upload["batch_stats"]["mean"])
    assert np.abs(sent["params"]["w"] - late.upload["params"]["w"]).max() > 0.1


def test_statistics_do_not_decide_what_is_orthogonal():
    """``per="whole"``: the same weights are sent whatever the statistics are."""
    sent = []
    for size in (0.0, 5.0):
        server = SERVERS["orthofl"](per="whole")
        params = {"params": {"w": jnp.zeros(2)}, "batch_stats": {"mean": jnp.zeros(1)}}
        state, row = server.init(params)
        other = row
        for client, change in enumerate(([1.0, 1.0], [1.0, 0.0])):
            up = {"params": {"w": jnp.asarray(change)}, "batch_stats": {"mean": jnp.full(1, size)}}
            state, other, _ = received(server)(state, row, arrival(up, params, client, client))
        sent.append(server.dispatch(state, other, Request())[0].params["params"]["w"])
    np.testing.assert_array_equal(sent[0], sent[1])
    np.testing.assert_allclose(sent[0], [1.0, 0.6])


@pytest.mark.parametrize("name", ["orthofl", "orthofl_pairwise"])
def test_an_upload_that_the_rule_rejects_leaves_its_client_where_it_was(name):
    server = SERVERS[name](overstale_after=1)
    state, row = server.init(jnp.zeros(2))
    state, row, info = received(server)(state, row, arrival(jnp.full(2, 9.0), jnp.zeros(2), 5, 0))
    assert info.weight == 0
    np.testing.assert_array_equal(server.dispatch(state, row, Request())[0].params, np.zeros(2))


def handed_back(changes, start, weights=(1.0, 1.0)):
    """What ``orthofl_released`` sends client 1 after one upload of client 0 and one of client 1, from one start."""
    rule = SERVERS["orthofl_released"]()
    state, row = rule.init(start, Facts(2))
    rows = [row, row]
    for client, (change, weight) in enumerate(zip(changes, weights)):
        given = arrival(change, start, 0, client, weight=weight)
        state, rows[client], _ = received(rule)(state, rows[client], given)
    return rule.dispatch(state, rows[1], Request())[0].params


def test_batch_norm_comes_back_from_the_released_code_as_the_client_has_it():
    """Scale, bias and statistics; the other client's shift is not zero."""
    start = {"params": {"norm": {"scale": jnp.ones(3), "bias": jnp.zeros(3)}, "dense": {"kernel": jnp.ones((3, 2))}}}
    start |= {"batch_stats": {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}}

    def change(leaf, k):
        return jnp.cos(k + leaf + jnp.arange(leaf.size, dtype=float).reshape(leaf.shape))

    changes = [jax.tree.map(lambda leaf, k=k: change(leaf, k), start) for k in (0.0, 1.0)]
    sent, own = handed_back(changes, start), jax.tree.map(jnp.add, start, changes[1])
    same = jax.tree.map(lambda a, b: bool(np.abs(a - b).max() < 1e-14), sent, own)
    norm = {"scale": True, "bias": True}
    assert same["params"] == {"norm": norm, "dense": {"kernel": False}}
    assert same["batch_stats"] == {"norm": {"mean": True, "var": True}}


def test_a_tensor_that_does_not_change_takes_the_whole_shift_over_in_the_released_code():
    """Such as a frozen factor of an adapter."""
    first = {"adapter": {"down": jnp.arange(1.0, 9).reshape(4, 2), "up": jnp.arange(6.0).reshape(2, 3)}}
    start = jax.tree.map(jnp.zeros_like, first)
    second = {"adapter": {"down": jnp.ones((4, 2)), "up": jnp.zeros((2, 3))}}
    np.testing.assert_allclose(handed_back([first, second], start)["adapter"]["up"], first["adapter"]["up"], rtol=1e-14)


def test_a_rejected_client_continues_from_the_shared_weights_of_the_released_code():
    nothing, first = jnp.zeros(4), jnp.arange(1.0, 5)
    np.testing.assert_array_equal(handed_back([first, nothing], nothing, weights=(1.0, 0.0)), first)
