"""OrthoFL as released, against float64 NumPy written from the notes on the released code: biases, BatchNorm, LoRA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import closed, orthofl_released
from fedjax_async.types import Arrival, Facts, Request

pytestmark = pytest.mark.float64

N, STEPS = 5, 50
SHAPES = {
    "params": {
        "dense": {"kernel": (4, 3), "bias": (3,)},
        "lora": {"down": (4, 2), "up": (2, 3)},
        "norm": {"scale": (3,), "bias": (3,)},
    },
    "batch_stats": {"norm": {"mean": (3,), "var": (3,)}},
}
PATHS = [("params", m, n) for m, tensors in SHAPES["params"].items() for n in tensors]
PATHS += [("batch_stats", "norm", n) for n in ("mean", "var")]


def get(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def build(function):
    return {top: {m: {n: function((top, m, n)) for n in t} for m, t in ms.items()} for top, ms in SHAPES.items()}


def random_tree(chance, scale=1.0):
    return build(lambda path: scale * chance.normal(size=get(SHAPES, path)))


def perpendicular(shift, change):
    """The part of a tensor's shift orthogonal to its change; the released code adds 1e-19 to the denominator."""
    return shift - (shift * change).sum() / ((change**2).sum() + 1e-19) * change


def arrivals():
    """Clients and their changes; some uploads are rejected, and client 1 never changes the LoRA factor ``up``."""
    chance = np.random.default_rng(11)
    for e in range(STEPS):
        m = int(chance.choice(N, p=[0.4, 0.3, 0.15, 0.1, 0.05]))
        change = random_tree(chance, 0.3)
        if m == 1:
            change["params"]["lora"]["up"] *= 0.0
        yield m, change, e % 9 == 4


def textbook(start):
    """S, W and the weights after each arrival; a client's message is S at that moment."""
    shared, average = dict(start), dict(start)
    sent, last = [dict(start)] * N, [0] * N
    accepted, path = 0, []
    for m, change, rejected in arrivals():
        if rejected:
            path.append((dict(shared), dict(average), 0.0))
            continue
        own = {p: sent[m][p] + get(change, p) for p in PATHS}
        b = 1.0 if accepted == 0 else 0.6 * (1 + accepted - last[m]) ** -0.5
        average = {p: (1 - b) * average[p] + b * own[p] for p in PATHS}
        shared = {
            p: own[p] if p[1] == "norm" else own[p] + perpendicular(shared[p] - sent[m][p], get(change, p))
            for p in PATHS
        }
        accepted += 1
        last[m] = accepted
        sent[m] = dict(shared)
        path.append((dict(shared), dict(average), b))
    return path


def played(start):
    rule = orthofl_released().given(Facts(N, every_closes=True))
    state, row = rule.init(start)
    rows, sent, path = [row] * N, [start] * N, []
    receive = jax.jit(rule.receive)
    for m, change, rejected in arrivals():
        upload = jax.tree.map(lambda leaf, kept=float(not rejected): jnp.asarray(leaf) * kept, change)
        weight = jnp.asarray(0.0 if rejected else 7.0)
        late = jnp.int32(3)  # the rule counts staleness itself
        arrival = Arrival(upload, sent[m], late, weight, jnp.int32(m), jnp.asarray(0.0), jnp.bool_(True))
        state, rows[m], info = receive(state, rows[m], arrival)
        state, rows[m] = closed(rule, state, rows[m])
        message, rows[m] = rule.dispatch(state, rows[m], Request(m))
        if not rejected:
            sent[m] = message.params
        path.append((message.params, rule.params(state), float(info.weight)))
    return path


def test_fifty_arrivals_equal_the_numpy_loop():
    start = random_tree(np.random.default_rng(3))
    want = textbook({p: get(start, p) for p in PATHS})
    have = played(jax.tree.map(jnp.asarray, start))
    for (shared, average, weight), (sent, evaluated, recorded) in zip(want, have, strict=True):
        assert abs(recorded - weight) < 1e-12
        for p in PATHS:
            np.testing.assert_allclose(get(sent, p), shared[p], rtol=0, atol=1e-12)
            np.testing.assert_allclose(get(evaluated, p), average[p], rtol=0, atol=1e-12)
    assert want[0][2] == 1.0 and len({round(b, 6) for *_, b in want}) > 5


def test_tensors_are_projected_apart_and_batch_norm_comes_back():
    """One client moved S; each tensor of the next client adds only the part orthogonal to its own change."""
    chance = np.random.default_rng(4)
    rule = orthofl_released()
    start = jax.tree.map(jnp.asarray, random_tree(chance))
    state, row = rule.init(start)
    rows = [row, row]
    changes = [jax.tree.map(jnp.asarray, random_tree(chance)) for _ in range(2)]
    for m, change in enumerate(changes):
        arrival = Arrival(
            change, start, jnp.int32(0), jnp.asarray(1.0), jnp.int32(m), jnp.asarray(0.0), jnp.bool_(True)
        )
        state, rows[m], _ = rule.receive(state, rows[m], arrival)
        state, rows[m] = rule.close(state, rows[m])
    sent = rule.dispatch(state, rows[1], Request(1))[0].params
    for p in PATHS:
        taken = np.asarray(get(sent, p) - get(start, p) - get(changes[1], p))
        if p[1] == "norm":
            np.testing.assert_allclose(taken, 0.0, atol=1e-15)
        else:
            assert abs((taken * np.asarray(get(changes[1], p))).sum()) < 1e-12 and np.abs(taken).max() > 1e-2
