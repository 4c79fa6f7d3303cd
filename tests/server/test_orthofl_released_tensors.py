"""OrthoFL as released against NumPy, with projections by tensor (as in the released code) or by layer."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import closed, known, orthofl_released
from fedjax_async.types import Arrival, Facts, Request

N, ARRIVALS, MIXING = 5, 50, 0.6
SHAPES = {
    ("params", "conv", "kernel"): (3, 2, 4),
    ("params", "conv", "bias"): (4,),
    ("params", "norm", "scale"): (4,),
    ("params", "norm", "bias"): (4,),
    ("params", "adapter", "down"): (4, 2),
    ("params", "adapter", "up"): (2, 3),
    ("params", "head", "kernel"): (3, 2),
    ("params", "head", "bias"): (2,),
    ("batch_stats", "norm", "mean"): (4,),
    ("batch_stats", "norm", "var"): (4,),
}
FROZEN = ("params", "adapter", "up")  # client 1 never changes it
CHANCE = np.random.default_rng(21)


def numbers(scale):
    return {path: scale * CHANCE.normal(size=shape) for path, shape in SHAPES.items()}


START = numbers(1.0)
UPLOADS = [  # client, its change, whether the server accepts it
    (int(CHANCE.choice(N, p=[0.35, 0.25, 0.2, 0.1, 0.1])), numbers(0.3), e % 7 != 3) for e in range(ARRIVALS)
]
for _client, _change, _ in UPLOADS:
    if _client == 1:
        _change[FROZEN] = np.zeros(SHAPES[FROZEN])


def nested(tensors):
    tree: dict = {"params": {}, "batch_stats": {}}
    for (top, module, name), tensor in tensors.items():
        tree[top].setdefault(module, {})[name] = jnp.asarray(tensor)
    return tree


def flattened(tree):
    return {(top, module, name): np.asarray(tree[top][module][name]) for top, module, name in SHAPES}


def handed_back(shared, start, change, group):
    """``w_m + (S - start_m)_perp``, projected in each ``group`` of tensors; BatchNorm's tensors are the client's."""
    shift = {p: shared[p] - start[p] for p in SHAPES}
    below = dict.fromkeys(map(group, SHAPES), 1e-19)
    along = dict.fromkeys(below, 0.0)
    for p in SHAPES:
        along[group(p)] += (shift[p] * change[p]).sum()
        below[group(p)] += (change[p] ** 2).sum()
    taken = {p: shift[p] - along[group(p)] / below[group(p)] * change[p] for p in SHAPES}
    return {p: start[p] + change[p] + (0.0 if p[1] == "norm" else taken[p]) for p in SHAPES}


def by_tensor(path):
    return path


def by_layer(path):
    return path[:2]


@cache
def textbook(group):
    """For each arrival: the next message of the client (S), W, and the recorded weight."""
    shared = average = START
    sent = [START] * N
    others: dict[int, int] = dict.fromkeys(range(N), 0)  # accepted arrivals of others since each client's last
    first, path = True, []
    for m, change, accepted in UPLOADS:
        b = 0.0
        if accepted:
            b = 1.0 if first else MIXING * (1 + others[m]) ** -0.5
            first = False
            average = {p: (1 - b) * average[p] + b * (sent[m][p] + change[p]) for p in SHAPES}
            shared = handed_back(shared, sent[m], change, group)
            others = {i: count + 1 for i, count in others.items()} | {m: 0}
        sent[m] = shared
        path.append((shared, average, b))
    return path


@cache
def played():
    """The same by the rule, and the start of each client."""
    with jax.enable_x64(True):
        rule = known(orthofl_released(mixing=MIXING), Facts(N, every_closes=True))
        receive, close = jax.jit(rule.receive), jax.jit(lambda state, memory: closed(rule, state, memory))
        state, row = rule.init(nested(START))
        rows, sent, path = [row] * N, [nested(START)] * N, []
        for m, change, accepted in UPLOADS:
            start = sent[m]
            upload = nested({p: tensor * accepted for p, tensor in change.items()})
            weight, zero, closes = jnp.asarray(9.0 * accepted), jnp.asarray(0.0), jnp.bool_(True)
            arrival = Arrival(upload, start, jnp.int32(0), weight, jnp.int32(m), zero, closes)
            state, rows[m], info = receive(state, rows[m], arrival)
            state, rows[m] = close(state, rows[m])
            message, rows[m] = rule.dispatch(state, rows[m], Request(client=m))
            sent[m] = message.params
            path.append(
                (flattened(message.params), flattened(rule.params(state)), float(info.weight), flattened(start))
            )
        return path


def largest(one, other, paths=tuple(SHAPES)):
    return max(float(np.abs(one[p] - other[p]).max()) for p in paths)


def test_what_is_sent_evaluated_and_recorded_equals_numpy():
    """A rejected client continues from S, like all clients."""
    for (shared, average, weight), (sent, evaluated, recorded, _) in zip(textbook(by_tensor), played(), strict=True):
        assert largest(shared, sent) < 1e-12
        assert largest(average, evaluated) < 1e-12
        assert abs(weight - recorded) < 1e-12


def test_the_arrivals_are_what_they_are_for():
    weights = [weight for *_, weight, _ in played()]
    assert weights[0] == 1.0 and len({round(w, 9) for w in weights}) > 5
    assert {m for m, _, _ in UPLOADS} == set(range(N))
    assert weights.count(0.0) == sum(not ok for *_, ok in UPLOADS) > 5
    assert any(m == 1 and ok for m, _, ok in UPLOADS[1:])


@pytest.mark.parametrize("module", ["conv", "head", "adapter"])
def test_a_projection_by_layer_would_differ(module):
    """Weight and bias are projected apart, and so are the two factors of an adapter."""
    paths = [p for p in SHAPES if p[1] == module]
    assert largest(textbook(by_layer)[-1][0], played()[-1][0], paths) > 1e-3


def test_batch_norm_comes_back_as_the_client_has_it():
    """Scale, bias and both statistics; the others' shift is not zero, but the client does not take it over."""
    paths = [p for p in SHAPES if p[1] == "norm"]
    assert len(paths) == 4
    shared, shifts = START, []
    for (_, change, accepted), (sent, _, _, start) in zip(UPLOADS, played()):
        if accepted:
            assert largest(sent, {p: start[p] + change[p] for p in paths}, paths) < 1e-14
            shifts.append(largest(shared, start, paths))
        shared = sent
    assert np.median(shifts) > 0.1


def test_a_tensor_that_does_not_change_takes_the_whole_shift_over():
    shared, moved = START, 0.0
    for (m, _, accepted), (sent, _, _, start) in zip(UPLOADS, played()):
        if m == 1 and accepted:
            assert np.abs(sent[FROZEN] - shared[FROZEN]).max() < 1e-14
            moved = max(moved, np.abs(sent[FROZEN] - start[FROZEN]).max())
        shared = sent
    assert moved > 0.1
