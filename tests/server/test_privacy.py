"""Clips, noise and sums, against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import tree
from fedjax_async.config.protection import multipliers
from fedjax_async.server import PRIVACY, SERVERS, asgd, differentially_private, fedbuff, known
from fedjax_async.server.privacy import combined, noised
from fedjax_async.types import Facts
from tests.server.made_up import (
    CLIENTS,
    D,
    closing,
    flat,
    random_uploads,
    received,
    stacked,
    start_params,
    unflat,
)

SUMMING = {"fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedasync", "asgd", "fedbuff", "asynfl", "fadas"}
KEYS = jax.random.split(jax.random.key(3), 12)
UPLOADS = closing(random_uploads(1, 12, rejected=0.2), at=[2, 5, 8, 11])


def norms(uploads):
    return np.array([np.linalg.norm(u.delta) for u in uploads])


def path_of(rule, uploads):
    """Model and columns after each arrival of float64 uploads, [E, D] and a column each."""
    arrivals = stacked(uploads)._replace(key=KEYS[: len(uploads)])
    state, memory = rule.init(start_params())

    def one(carry, arrival):
        *carry, info = received(rule)(*carry, arrival)
        return tuple(carry), (rule.params(carry[0]), info.columns)

    _, (path, columns) = jax.jit(lambda carry: jax.lax.scan(one, carry, arrivals))((state, memory))
    return flat(path), {name: np.asarray(column) for name, column in columns.items()}


def averaged(uploads, clips, noise):
    """FedBuff without staleness weights in NumPy: the model after each arrival; ``clips`` [E], ``noise`` [E, D]."""
    x, path, buffer = flat(start_params()), [], []
    for u, clip, own in zip(uploads, clips, noise):
        if u.examples > 0:
            buffer.append(u.delta * min(1.0, clip / np.linalg.norm(u.delta)) + own)
        if u.closes:
            x, buffer = x + np.mean(buffer, axis=0), []
        path.append(x)
    return np.array(path)


def adapted(uploads, clip, quantile, rate, draws):
    """The clip before each arrival, as Andrew et al. (2021) move it when a step closes."""
    found, below, count = [], 0.0, 0
    for u, draw in zip(uploads, draws):
        found.append(clip)
        if u.examples > 0:
            below, count = below + (np.linalg.norm(u.delta) <= clip) + draw, count + 1
        if u.closes:
            clip, below, count = clip * np.exp(-rate * (below / count - quantile)), 0.0, 0
    return np.array(found)


@pytest.mark.float64
@pytest.mark.parametrize("adapts", [False, True])
def test_clip_and_noise_equal_numpy(adapts):
    rule = fedbuff(staleness="constant", server_lr=1.0)
    own = {"quantile": 0.4, "rate": 0.7, "count_deviation": 0.3} if adapts else {}
    path, columns = path_of(differentially_private(rule, clip=2.5, deviation=0.2, **own), UPLOADS)
    zero = jax.tree.map(jnp.zeros_like, start_params())
    units = np.array([flat(noised(key, zero, jnp.float64(1.0))) for key in KEYS])
    draws = [0.3 * float(jax.random.normal(jax.random.fold_in(key, 1), (), float)) for key in KEYS]
    clips = adapted(UPLOADS, 2.5, 0.4, 0.7, draws) if adapts else np.full(12, 2.5)
    np.testing.assert_allclose(path, averaged(UPLOADS, clips, 0.2 * clips[:, None] * units), rtol=1e-12)
    np.testing.assert_allclose(columns["clip"], clips, rtol=1e-12)
    assert len(set(clips.tolist())) == (4 if adapts else 1)
    accepted = np.array([u.examples > 0 for u in UPLOADS])
    np.testing.assert_array_equal(columns["clipped"], accepted & (norms(UPLOADS) > clips))
    assert 0 < columns["clipped"].sum() < 12 > accepted.sum(), "the uploads must try both sides of the clip"


@pytest.mark.float64
def test_a_rule_without_close_has_an_adaptive_clip_too():
    closed = asgd()
    open_one = closed._replace(receive=received(closed), close=None, given=None)
    rules = [differentially_private(r, clip=1.0, quantile=0.5) for r in (closed, open_one)]
    found = [path_of(rule, closing(UPLOADS))[1]["clip"] for rule in rules]
    np.testing.assert_array_equal(*found)


def test_noise_is_gaussian_independent_and_of_the_key():
    large = {"a": jnp.zeros((200, 100)), "b": jnp.zeros(20_000)}
    one, same, other = (noised(KEYS[i], large, jnp.float32(3.0)) for i in (0, 0, 1))
    a, b, c = one["a"].ravel(), one["b"], other["b"]
    np.testing.assert_array_equal(a, same["a"].ravel())
    for values in (a, b, c):
        assert abs(values.mean()) < 0.1 and abs(values.std() - 3) < 0.05
        assert abs((np.abs(values) < 3).mean() - 0.6827) < 0.02
    for left, right in ((a, b), (b, c)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.03


def test_private_leaves_are_neither_clipped_nor_noised():
    arrival = tree.gather(stacked(closing(random_uploads(0, 1, rejected=0.0))), 0)._replace(key=KEYS[0])
    rule = differentially_private(asgd(), clip=0.1, deviation=1.0, stays=lambda path: path[0] == "scale")
    state, _, _ = received(rule)(*rule.init(start_params()), arrival)
    moved = jax.tree.map(jnp.subtract, rule.params(state), start_params())
    np.testing.assert_allclose(moved["scale"], arrival.upload["scale"], rtol=1e-5)
    assert np.abs(moved["layer"][0] - arrival.upload["layer"][0]).max() > 0.05


def results(name):
    """Params after a step of three uploads, and of three others with the same weighted sum, [2, D]."""
    uploads = closing(random_uploads(4, 3, rejected=0.0, most_stale=6), at=[2])
    rule, arrivals = known(SERVERS[name](), Facts(CLIENTS)), stacked(uploads)

    def after(upload):
        def one(carry, arrival):
            *carry, info = received(rule)(*carry, arrival)
            return tuple(carry), info.weight

        (state, _), weights = jax.lax.scan(one, rule.init(start_params()), arrivals._replace(upload=upload))
        return rule.params(state), weights

    weight = after(arrivals.upload)[1][:, None]
    shift = jnp.asarray(np.random.default_rng(8).normal(size=D))[None]
    moved = jnp.concatenate([weight[1:2] * shift, -weight[:1] * shift, 0 * shift])
    both = jax.tree.map(lambda u, m: jnp.stack([u, u + m]), arrivals.upload, unflat(moved))
    return jax.vmap(lambda upload: after(upload)[0])(both)


@pytest.mark.float64
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("fedasync", "asynfl") else [pytest.mark.slow]) for n in sorted(SUMMING)]
)
def test_rules_of_sums_use_uploads_only_through_their_weighted_sum(name):
    one, other = flat(jax.jit(results, static_argnums=0)(name))
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert np.abs(one - flat(start_params())).max() > 1e-4


def test_which_rules_are_of_sums():
    assert {name for name, factory in SERVERS.items() if factory().sums} == SUMMING
    assert not fedbuff(clip=1.0).sums and fedbuff(overstale_after=2.0).sums


def test_the_noise_is_divided_between_uploads_and_count():
    """Andrew et al. (2021), Theorem 1: the noise of both together is worth that of z alone."""
    for z, count, uploads in ((1.0, None, 100), (2.0, None, 5), (0.5, 0.3, 10), (1e-6, None, 10)):
        found = multipliers(z, 0.5, count, uploads)
        assert found.below == pytest.approx(max(z, uploads / 20) if count is None else count)
        assert found.uploads**-2 + (2 * found.below) ** -2 == pytest.approx(z**-2)
    assert multipliers(1e200, 0.5, None, 10).uploads == pytest.approx(1e200 * 0.75**-0.5)
    assert multipliers(0.7, None, None, 10) == (0.7, 0.0) and multipliers(0.0, 0.5, None, 10) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("part", "options", "says"),
    [
        ("dp", {"clip": 0}, "clip = 0: must be a finite number > 0"),
        ("dp", {"noise": -1}, "noise = -1: must be a finite number >= 0"),
        ("dp", {"noise": 1e-200, "quantile": 0.5}, "noise = 1e-200: must be 0, or at least 1e-06"),
        ("dp_sgd", {"noise": 1e-7}, "noise = 1e-07: must be 0, or at least 1e-06"),
        ("dp", {"quantile": 1.0}, "quantile = 1.0: must be at least 0 and below 1"),
        ("dp", {"quantile": 0.5, "rate": 0}, "rate = 0: must be a finite number > 0"),
        ("dp", {"count_noise": 1}, "count_noise = 1: must be left out without quantile"),
        ("dp", {"quantile": 0.5, "count_noise": 0.5}, "count_noise = 0.5: must be above noise / 2 = 0.5"),
        ("dp_sgd", {"clip": float("inf")}, "clip = inf: must be a finite number > 0"),
        ("dp_sgd", {"noise": "much"}, "noise = 'much': must be a finite number >= 0"),
        ("secure", {"size": 1}, "size = 1: must be a whole number >= 2"),
    ],
)
def test_wrong_options_are_refused(part, options, says):
    with pytest.raises(ValueError) as error:
        PRIVACY[part](**options)
    assert str(error.value) == says


def test_two_parts_of_a_kind_are_refused():
    with pytest.raises(ValueError, match=r"^parts for secure sums = 2: must be at most one of a kind$"):
        combined([PRIVACY["secure"](), PRIVACY["secure"](size=3)])
