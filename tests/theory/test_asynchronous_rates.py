"""The bounds of FedBuff and FedAsync by hand, and beside runs in NumPy on quadratics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.theory.asynchronous_rates import (
    BufferedConstants,
    fedasync_factor,
    fedasync_gap_bound,
    fedbuff_bound,
    largest_lr_fedbuff,
)
from tests.refusals import refusals

C = BufferedConstants(3.0, 200, 4, 0.05, 0.5, 2.0, 0.7, 0.3, 1.1, 3.0)


def test_fedbuff_by_hand():
    bound = fedbuff_bound(C)
    alpha, beta = 4 * 0.05, 4 * 0.05**2  # sums over the local steps
    np.testing.assert_allclose(bound.optimisation, 2 * 3.0 / (0.5 * alpha * 200))
    late = 3 * 2.0**2 * 4 * beta * (0.5**2 * 3.0**2 + 1)
    np.testing.assert_allclose(bound.variance, (2.0 / 2 * 0.5 * beta / alpha + late) * 0.7)
    np.testing.assert_allclose(bound.heterogeneity, late * (0.3 + 1.1))
    np.testing.assert_allclose(bound.total, sum(bound))
    np.testing.assert_allclose(largest_lr_fedbuff(C), 1 / (2.0 * 0.5 * 4))
    assert fedbuff_bound(C._replace(lr=largest_lr_fedbuff(C))).total > 0
    assert fedbuff_bound(C._replace(lr=1.0), beyond=True).total > bound.total
    assert fedbuff_bound(C, beyond=True) == bound


def curvatures(rng, clients, dim, low=0.2, high=2.0):
    bases = np.linalg.qr(rng.standard_normal((clients, dim, dim)))[0]
    return np.einsum("cij,cj,ckj->cik", bases, rng.uniform(low, high, (clients, dim)), bases)


@pytest.mark.parametrize(("buffer", "flight"), [(1, 1), (2, 4), (3, 6)])
def test_a_run_of_fedbuff_on_quadratics_is_below_its_bound(buffer, flight):
    """Random clients, with ``flight`` jobs in flight; they arrive in the order of their start."""
    rng = np.random.default_rng(buffer)
    clients, dim, steps, server_lr, rounds = 5, 6, 4, 0.5, 300
    curvature, optima = curvatures(rng, clients, dim), rng.standard_normal((clients, dim))
    lr = 0.02 / (2.0 * server_lr * steps)  # small: the first term of the bound is large

    def slopes(w):
        return np.einsum("cij,cj->ci", curvature, w - optima)

    def loss(w):
        return np.sum((w - optima) * slopes(w)) / 2 / clients

    lowest = np.linalg.solve(curvature.sum(axis=0), np.einsum("cij,cj->i", curvature, optima))
    w = first = rng.standard_normal(dim) * 3
    jobs, version, waiting = [(rng.integers(clients), w, 0)] * flight, 0, []
    squares, spreads, largest, late = [], [], [], []
    while version < rounds:
        client, start, since = jobs.pop(0)
        x = start.copy()
        for _ in range(steps):
            each = slopes(x)
            largest.append((each**2).sum(axis=1).max())
            spreads.append(((each - each.mean(axis=0)) ** 2).sum(axis=1).mean())
            x -= lr * curvature[client] @ (x - optima[client])
        waiting.append(x - start)
        late.append(version - since)
        if len(waiting) == buffer:
            squares.append((slopes(w).mean(axis=0) ** 2).sum())
            w, waiting, version = w + server_lr * np.mean(waiting, axis=0), [], version + 1
        jobs.append((rng.integers(clients), w, version))
    constants = BufferedConstants(
        loss(first) - loss(lowest), rounds, steps, lr, server_lr, 2.0, 0.0, max(spreads), max(largest), max(late)
    )
    assert (max(late) == 0) == (flight == 1)
    bound = fedbuff_bound(constants).total
    assert 0.05 * bound < np.mean(squares) < bound


@pytest.mark.parametrize(("delay", "sigma"), [(0, 0.5), (1, 0.0), (4, 0.5)])
def test_runs_of_fedasync_are_below_the_bound(delay, sigma):
    """Every arrival is ``delay`` steps late; the gap is the mean of 200 runs with noise, or that of one without."""
    rng = np.random.default_rng(delay)
    curvature = curvatures(rng, 1, 4)[0]
    low, high = np.linalg.eigvalsh(curvature)[[0, -1]]
    mixing, lr, local, rounds = 0.6, 1 / high, 3, 60
    runs = 200 if sigma else 1
    x = np.broadcast_to(rng.standard_normal(4), (runs, 4)).copy()
    history = [x] * (delay + 1)
    gaps = []
    for _ in range(rounds + 1):
        gaps.append(np.einsum("ri,ij,rj->r", x, curvature, x).mean() / 2)
        client = history[-delay - 1].copy()
        for _ in range(local):
            noise = sigma / 2 * rng.standard_normal(client.shape)  # variance sigma^2 in all
            client -= lr * (client @ curvature + noise)
        x = (1 - mixing) * x + mixing * client
        history.append(x)
    factor = fedasync_factor(mixing, lr, low, local, smoothness=high)
    noise = lr * high * sigma**2 / (2 * low)
    bound = fedasync_gap_bound(gaps[0], np.arange(rounds + 1), factor, staleness=delay, noise=noise)
    assert np.all(np.array(gaps) <= bound * (1 + 1e-12))
    assert bound[-1] < gaps[0] + noise


def test_the_factor_of_fedasync():
    np.testing.assert_allclose(fedasync_factor(0.5, 0.1, 2.0, 3, smoothness=5.0), 0.5 + 0.5 * 0.8**3)
    assert fedasync_factor(1.0, 0.5, 2.0, 1, smoothness=2.0) == 0  # one client, one step to the minimum
    assert fedasync_gap_bound(3.0, 9, 0.5, staleness=3) == 3.0 * 0.5**3
    traced = jax.vmap(lambda steps: fedasync_gap_bound(3.0, steps, 0.5, staleness=3))(jnp.arange(10))
    np.testing.assert_allclose(traced, fedasync_gap_bound(3.0, np.arange(10), 0.5, staleness=3))


test_bad_input = refusals(
    (lambda: fedbuff_bound(C._replace(lr=0.0)), "lr"),
    (lambda: fedbuff_bound(C._replace(squared_gradient=-1.0)), "squared_gradient"),
    (lambda: largest_lr_fedbuff(C._replace(server_lr=0.0)), "server_lr"),
    (lambda: fedbuff_bound(C._replace(lr=0.26)), "lr = 0.26: must be at most 0.25, the largest that Theorem 1"),
    (lambda: fedbuff_bound(C._replace(server_lr=np.array([0.5, 4.0]))), "lr = 0.05: must be at most 0.03125"),
    (lambda: fedasync_factor(1.5, 0.1, 1.0, 1, smoothness=1.0), "mixing"),
    (lambda: fedasync_factor(0.5, 0.6, 1.0, 1, smoothness=2.0), "lr = 0.6: must be at most 0.5"),
    (lambda: fedasync_factor(0.5, 0.1, 3.0, 1, smoothness=2.0), "convexity = 3.0: must be at most 2"),
    (lambda: fedasync_gap_bound(1.0, 1, 1.5), "factor"),
    (lambda: fedasync_gap_bound(1.0, 1, 0.5, staleness=-1), "staleness"),
    (lambda: fedbuff_bound(C._replace(gap=np.array([1.0, -1.0]))), r"^gap\[1\] = -1"),
    (lambda: fedasync_gap_bound(np.array([1.0, np.nan]), 1, 0.5), r"^gap\[1\] = nan"),
)
