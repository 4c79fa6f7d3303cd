"""PushCen-ADFL's bound, as printed and as its proof gives it, and runs that must stay below it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.theory import PushCenConstants, largest_lr_pushcen, pushcen_bound, shares_of_masses
from tests.refusals import refusals

SOME = PushCenConstants(
    gap=3.0, events=200.0, clients=5, local_steps=4, lr=0.02, smoothness=2.0, variance=0.7, heterogeneity=0.3,
    squared_gradient=1.5, error=0.1, share=0.05, largest_share=0.6, sent=0.5, weight=0.2, radius=1.1, staleness=3.0,
    disagreement=0.4, contraction=0.8, of_drift=1.2, of_stale_drift=0.9, of_error=0.6,
)  # fmt: skip
DRIFT = 2 * 4**2 * 0.02**2 * (1.5 + 16 * 0.2**2 * 1.1**2)
CONSENSUS = 0.4 / (200 * 0.2) + ((1.2 + 0.9 * 9) * DRIFT + 0.6 * 0.1**2) / 0.2


def test_the_theorem_as_printed_by_hand():
    got = pushcen_bound(SOME, printed=True, beyond=True)
    want = [
        2 * 3.0 / (0.02 * 4 * 0.05 * 200),
        2 * (0.7 + 0.3),
        2 * 2.0 * 0.5**2 * 0.1**2,
        4 * 2.0**2 * 5 / 0.05 * CONSENSUS,
        2.0 / 0.05 * DRIFT,
        0,
    ]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert got.total == pytest.approx(sum(want))


def test_the_bound_derived_again_by_hand():
    """From the inequality of one event, summed and divided by ``eta E g / 2``."""
    move, low, high = 0.02 * 4, 0.05, 0.6
    far = 4 * 5 * CONSENSUS + 4 * 3.0**2 * DRIFT + 2 * 0.1**2
    along = sum((e / 4) ** 2 for e in range(4)) * DRIFT
    event = [
        3.0 / 200,
        2 * 0.02 * high * 4 * 0.3,
        2 / move * 0.5 * 0.1**2 + 2.0 * (0.5 * 0.1) ** 2,
        2 * 0.02 * high * 2.0**2 * 2 * 4 * far,
        2 * 0.02 * high * 2.0**2 * 2 * along + 2.0 * high**2 * DRIFT,
        8 * 0.02 * high * 4 * 0.2**2 * 4 * 1.1**2,
    ]
    got = pushcen_bound(SOME)
    np.testing.assert_allclose(got, np.array(event) / (move * low / 2), rtol=1e-12)
    assert pushcen_bound(SOME, distance=far).total == pytest.approx(got.total)
    assert pushcen_bound(SOME, distance=0.0).mixing == 0


def test_largest_learning_rate_and_shares():
    assert largest_lr_pushcen(SOME) == pytest.approx(1 / 64)
    assert largest_lr_pushcen(SOME._replace(weight=40.0)) == pytest.approx(1 / 160)
    assert shares_of_masses(0.5, 2.0, 10) == pytest.approx((0.025, 0.4))
    with pytest.raises(ValueError, match=r"^lr = 0\.02: must be at most 0\.015625, the largest that Theorem C\.7"):
        pushcen_bound(SOME, printed=True)
    swept = pushcen_bound(SOME._replace(lr=np.array([0.01, 0.02]))).total
    assert swept.shape == (2,) and swept[1] == pytest.approx(pushcen_bound(SOME).total)


# --- the steps of the proof ---------------------------------------------------------------------


def test_eq_112_fails_with_three_quarters_and_holds_with_a_half():
    a, near, other = 1.0, -0.5, -0.5  # grad F, grad f_i(w) - grad f_i(w_bar), grad f_i(w_bar) - grad F
    product = a * (a + near + other)
    assert product < 0.75 * a**2 - near**2 - other**2
    assert product == 0.5 * a**2 - near**2 - other**2


def test_eq_107_needs_the_whole_square():
    drift, delta = 1.0, 1.0
    assert (drift + delta) ** 2 / 2 > drift**2 / 2 + delta**2
    assert (drift + delta) ** 2 / 2 == drift**2 + delta**2


def test_the_mixed_model_may_be_further_away_than_the_consensus_error():
    """Ten models at 0, one of mass 5 and the others of mass 1/2; one message of mass 1/2 has an error of 1."""
    masses = np.array([0.5] * 9 + [5.0])
    mean = 0.5 * 1.0 / (masses.sum() + 0.5)
    mixed = 0.5 * 1.0 / (0.5 + 0.5)
    assert (mixed - mean) ** 2 > 10 * np.mean((0 - mean) ** 2 * np.ones(10))
    assert (mixed - mean) ** 2 <= 4 * 10 * mean**2 + 2 * 1.0**2  # eq. 72


# --- runs ---------------------------------------------------------------------------------------


class Followed(NamedTuple):
    """Numbers of a run, one an event."""

    gradients: np.ndarray  # ||grad F(w_bar)||^2 before the event
    distances: np.ndarray  # ||w^(t+1/3) - w_bar||^2
    disagreements: np.ndarray  # E_con before the event; one more at the end
    drifts: np.ndarray  # ||Delta||^2
    shares: np.ndarray  # gamma
    sent: np.ndarray  # c
    constants: PushCenConstants


def follow(
    seed, *, clients=4, events=400, lr=0.05, steps=3, error=0.0, weight=0.0, spread=1.0, start=1.0,
    fixed=False, calm=False,
):  # fmt: skip
    """Push-sum training of ``f_i(w) = sum (h (w - b_i)^2) / 2`` on a ring with exact gradients and delayed messages.

    Messages have an error of length ``error``, in random directions or, if ``fixed``, always in the same direction. If
    ``calm``, clients take turns and messages have no delay.
    """
    rng, size = np.random.default_rng(seed), 3
    h, b = rng.uniform(0.5, 1.0, size), spread * rng.normal(size=(clients, size))
    best = b.mean(axis=0)
    w, mass = np.tile(best + start * rng.normal(size=size), (clients, 1)), np.ones(clients)
    inbox: list[list] = [[] for _ in range(clients)]
    anchors = rng.normal(size=(clients, size))
    towards = rng.normal(size=size)
    seen = {name: [] for name in ("gradients", "distances", "disagreements", "drifts", "shares", "sent")}
    norms, squares, waits = [0.0], [0.0], 0

    def loss(x):
        return float(np.mean(np.sum(h * (x - b) ** 2, axis=1)) / 2)

    def average():
        waiting = [message for box in inbox for message in box]
        total = mass.sum() + sum(m for _, m, _ in waiting)
        return (mass @ w + sum((m * x for x, m, _ in waiting), np.zeros(size))) / total, total

    first = average()[0]
    for t in range(events):
        i = t % clients if calm else int(rng.integers(clients))
        mean, total = average()
        seen["gradients"].append(np.sum((h * (mean - best)) ** 2))
        seen["disagreements"].append(np.mean(np.sum((w - mean) ** 2, axis=1)))
        taken = [message for message in inbox[i] if calm or rng.random() < 0.8]
        inbox[i] = [message for message in inbox[i] if not any(message is one for one in taken)]
        waits = max([waits, *(t - at for _, _, at in taken)])
        new = mass[i] + sum(m for _, m, _ in taken)
        mixed = (mass[i] * w[i] + sum((m * x for x, m, _ in taken), np.zeros(size))) / new
        seen["distances"].append(np.sum((mixed - mean) ** 2))
        x = mixed.copy()
        for _ in range(steps):
            gradient = h * (x - b[i])
            norms += [np.linalg.norm(x), np.linalg.norm(anchors[i]) if weight else 0.0]
            squares.append(np.sum(gradient**2))
            x = x - lr * gradient - 2 * lr * weight * (x - anchors[i])
        seen["drifts"].append(np.sum((x - mixed) ** 2))
        receivers = {(i + 1) % clients, (i + 2) % clients} - {i}
        each = new / (len(receivers) + 1)
        away = towards if fixed else rng.normal(size=size)
        wrong = x + error * away / np.linalg.norm(away)
        for j in receivers:
            inbox[j].append((wrong, each, t))
        w[i], mass[i] = x, each
        seen["shares"].append(new / total)
        seen["sent"].append(new / total * len(receivers) / (len(receivers) + 1))
    mean, total = average()
    seen["disagreements"].append(np.mean(np.sum((w - mean) ** 2, axis=1)))
    assert total == pytest.approx(clients)
    columns = {name: np.array(values) for name, values in seen.items()}
    spread_of = max(np.sum((h * (b[i] - best)) ** 2) for i in range(clients))
    constants = PushCenConstants(
        gap=loss(first) - loss(best), events=events, clients=clients, local_steps=steps, lr=lr, smoothness=h.max(),
        variance=0.0, heterogeneity=spread_of, squared_gradient=max(squares), error=error,
        share=columns["shares"].min(), largest_share=columns["shares"].max(), sent=columns["sent"].max(), weight=weight,
        radius=max(norms), staleness=waits, disagreement=columns["disagreements"][0],
    )  # fmt: skip
    return Followed(*columns.values(), constants)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    lr=st.sampled_from([0.003, 0.05, 0.3]),
    steps=st.sampled_from([1, 3]),
    error=st.sampled_from([0.0, 0.1]),
    weight=st.sampled_from([0.0, 0.5]),
    spread=st.sampled_from([0.0, 1.0]),
)
def test_runs_stay_below_the_bound_derived_again(seed, lr, steps, error, weight, spread):
    run = follow(seed, events=150, lr=lr, steps=steps, error=error, weight=weight, spread=spread)
    bound = pushcen_bound(run.constants, distance=run.distances.mean())
    assert run.gradients.mean() <= bound.total
    square = run.constants.squared_gradient + 16 * (weight * run.constants.radius) ** 2
    assert (run.drifts <= 2 * (lr * steps) ** 2 * square).all()


def lemma_3_holds(run, c):
    """Eq. 63 at every event of a run."""
    before, after = run.disagreements[:-1], run.disagreements[1:]
    late = [run.drifts[max(0, t - int(c.staleness)) : t].sum() for t in range(len(run.drifts))]
    perturbed = c.of_drift * run.drifts + c.of_stale_drift * c.staleness * np.array(late) + c.of_error * c.error**2
    return bool((after <= c.contraction * before + perturbed + 1e-15).all())


def test_a_small_learning_rate_leaves_the_printed_bound_below_the_floor_of_compression():
    """Errors in one direction shift ``w_bar`` at each event, and small steps pull it back slowly."""
    start = {"spread": 0.0, "start": 0.0}
    run = follow(0, clients=2, events=8000, lr=1e-3, steps=1, error=1.0, fixed=True, calm=True, **start)
    assert run.constants.heterogeneity == 0 and run.constants.gap == pytest.approx(0)
    constants = run.constants._replace(contraction=0.5, of_drift=9.0, of_stale_drift=0.01, of_error=9.0)
    assert lemma_3_holds(run, constants) and constants.lr < largest_lr_pushcen(constants)
    assert run.gradients.mean() > 10 * pushcen_bound(constants, printed=True).total
    assert run.gradients.mean() < pushcen_bound(constants, distance=run.distances.mean()).total


def test_the_printed_bound_forgets_the_pull_of_the_anchor():
    """One client, trained to the minimum of loss plus regulariser; there the gradient of the loss is not zero."""
    run = follow(1, clients=1, events=3000, lr=1e-3, steps=2, weight=0.5, spread=0.0, start=0.0)
    constants = run.constants._replace(contraction=0.5, of_drift=9.0, of_stale_drift=0.01, of_error=9.0)
    assert lemma_3_holds(run, constants) and constants.lr < largest_lr_pushcen(constants)
    assert run.gradients.mean() > 2 * pushcen_bound(constants, printed=True).total
    assert run.gradients.mean() < pushcen_bound(constants, distance=0.0).total and run.distances.max() < 1e-20


test_constants_out_of_range_are_refused = refusals(
    (lambda: pushcen_bound(SOME._replace(lr=0.0)), "lr = 0.0: must be a finite number > 0"),
    (lambda: pushcen_bound(SOME._replace(share=1.5)), "share = 1.5: must be between 0 and 1"),
    (lambda: pushcen_bound(SOME._replace(contraction=1.0)), "contraction = 1.0: must be at least 0 and below 1"),
    (lambda: pushcen_bound(SOME._replace(error=-1.0)), "error = -1.0: must be a finite number >= 0"),
    (lambda: pushcen_bound(SOME._replace(of_error=float("nan"))), "of_error = nan"),
    (lambda: pushcen_bound(SOME, distance=-1), "distance = -1"),
    (lambda: pushcen_bound(SOME._replace(share=0.7)), r"share = 0\.7: must be at most 0\.6"),
    (lambda: shares_of_masses(2, 1, 5), "most = 1: must be a number >= 2"),
    (lambda: shares_of_masses(jnp.float32(2), jnp.float32(1), 5), "most = "),
    (lambda: pushcen_bound(SOME._replace(share=np.array([0.5, 1.5]))), r"^share\[1\] = 1\.5: must be between 0 and 1"),
)
