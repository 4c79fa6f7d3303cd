"""PushCen-ADFL: its bound as printed and derived again, runs below it, Lemmas C.3 and C.5, eq. 21, and each erratum."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Until
from fedjax_async.local import anchored_training
from fedjax_async.local.anchored import Dictionary
from fedjax_async.models.wrap import cross_entropy
from fedjax_async.peers import contraction, plan_peers
from fedjax_async.peers.statistics import corrupt_entries
from fedjax_async.theory import (
    PushCenConstants,
    anchor_distances,
    anchor_sum_bound,
    consensus_constants,
    largest_lr_pushcen,
    pushcen_bound,
    shares_of_masses,
    training_over_clustering,
)
from fedjax_async.types import ClientData, Message, Model
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
    far = 4 * 5 * CONSENSUS + 4 * 3.0**2 * DRIFT + 2 * 0.1**2  # as in eq. 72
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


def test_eq_112_holds_with_a_half_only_and_eq_107_with_the_whole_square_only():
    a, near, other = 1.0, -0.5, -0.5  # grad F, grad f_i(w) - grad f_i(w_bar), grad f_i(w_bar) - grad F
    assert 0.5 * a**2 - near**2 - other**2 == a * (a + near + other) < 0.75 * a**2 - near**2 - other**2
    drift, delta = 1.0, 1.0
    assert drift**2 / 2 + delta**2 < (drift + delta) ** 2 / 2 == drift**2 + delta**2


def test_the_mixed_model_may_be_further_away_than_the_consensus_error():
    """Ten models at 0, of mass 9.5 in all; the node of mass 1/2 gets a message of mass 1/2 with an error of 1."""
    mean, mixed = 0.5 / (9.5 + 0.5), 0.5
    assert 10 * mean**2 < (mixed - mean) ** 2 <= 4 * 10 * mean**2 + 2 * 1.0**2  # eq. 72


# --- runs ---------------------------------------------------------------------------------------


class Followed(NamedTuple):
    """Numbers of a run, one an event."""

    gradients: np.ndarray  # ||grad F(w_bar)||^2 before the event
    distances: np.ndarray  # ||w^(t+1/3) - w_bar||^2
    disagreements: np.ndarray  # E_con before the event; one more at the end
    drifts: np.ndarray  # ||Delta||^2
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
    seen = {name: [] for name in Followed._fields[:-1]}
    norms, squares, waits, shares, sent = [0.0], [0.0], 0, [], []

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
        shares.append(new / total)
        sent.append(new / total * len(receivers) / (len(receivers) + 1))
    mean, total = average()
    seen["disagreements"].append(np.mean(np.sum((w - mean) ** 2, axis=1)))
    assert total == pytest.approx(clients)
    spread_of = max(np.sum((h * (b[i] - best)) ** 2) for i in range(clients))
    constants = PushCenConstants(
        gap=loss(first) - loss(best), events=events, clients=clients, local_steps=steps, lr=lr, smoothness=h.max(),
        variance=0.0, heterogeneity=spread_of, squared_gradient=max(squares), error=error, share=min(shares),
        largest_share=max(shares), sent=max(sent), weight=weight, radius=max(norms), staleness=waits,
        disagreement=seen["disagreements"][0],
    )  # fmt: skip
    return Followed(*map(np.array, seen.values()), constants)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), lr=st.sampled_from([0.003, 0.05, 0.3]), chosen=st.tuples(*[st.booleans()] * 4))
def test_runs_stay_below_the_bound_derived_again(seed, lr, chosen):
    steps, error, weight, spread = np.where(chosen, [3, 0.1, 0.5, 1.0], [1, 0, 0, 0])
    run = follow(seed, events=150, lr=lr, steps=int(steps), error=error, weight=weight, spread=spread)
    assert run.gradients.mean() <= pushcen_bound(run.constants, distance=run.distances.mean()).total
    square = run.constants.squared_gradient + 16 * (weight * run.constants.radius) ** 2
    assert (run.drifts <= 2 * (lr * steps) ** 2 * square).all()


@pytest.mark.parametrize(
    ("how", "times"),
    [
        # errors in one direction shift w_bar at each event, and small steps pull it back slowly
        ({"seed": 0, "clients": 2, "events": 8000, "steps": 1, "error": 1.0, "fixed": True, "calm": True}, 10),
        # one client, trained to the minimum of loss plus regulariser; there the gradient of the loss is not zero
        ({"seed": 1, "clients": 1, "events": 3000, "steps": 2, "weight": 0.5}, 2),
    ],
    ids=["the floor of compression", "the pull of the anchor"],
)
def test_the_printed_bound_forgets(how, times):
    run = follow(**how, lr=1e-3, spread=0.0, start=0.0)
    c = run.constants._replace(contraction=0.5, of_drift=9.0, of_stale_drift=0.01, of_error=9.0)
    assert c.heterogeneity == 0 and c.gap == pytest.approx(0) and c.lr < largest_lr_pushcen(c)
    late = [run.drifts[max(0, t - int(c.staleness)) : t].sum() for t in range(len(run.drifts))]
    perturbed = c.of_drift * run.drifts + c.of_stale_drift * c.staleness * np.array(late) + c.of_error * c.error**2
    assert (run.disagreements[1:] <= c.contraction * run.disagreements[:-1] + perturbed + 1e-15).all()  # eq. 63
    distance = run.distances.mean()
    assert (
        times * pushcen_bound(c, printed=True).total < run.gradients.mean() < pushcen_bound(c, distance=distance).total
    )
    assert distance < 1e-20 or how["clients"] > 1


# --- lemmas -----------------------------------------------------------------------------------------

LR, WEIGHT, STEPS = 0.2, 0.7, 12


@pytest.mark.float64
@pytest.mark.parametrize("mask", [True, False])
def test_lemma_c5_bounds_the_distance_to_the_anchor_along_real_local_training(mask):
    """Of the package's anchored training of a softmax regression: every step, and the sum over the steps."""
    key = jax.random.key(0)
    start = {"kernel": 2 * jax.random.normal(key, (5, 3))}
    model = Model(lambda _: start, lambda params, x, key=None: x @ params["kernel"], cross_entropy)
    client = anchored_training(model, optimizer=optax.sgd(LR), batch_size=20, anchor=WEIGHT, mask=mask)
    x = jax.random.normal(jax.random.key(1), (20, 5))
    data = ClientData(x, jnp.arange(20) % 3, jnp.arange(20), jnp.int32(0), jnp.int32(20))
    tables = Dictionary({"kernel": jnp.array([0.0, -1.0, 1.0, 2.0])}, jnp.bool_(True))
    message = Message(start, tables)._replace(version=jnp.int32(0), local_steps=jnp.int32(STEPS))
    work = jax.jit(client.begin)(key, message, client.init(start), data)
    anchor, kept = work.anchor.weights["kernel"], work.anchor.mask["kernel"]
    step, slope = jax.jit(client.step), jax.jit(jax.grad(lambda w: model.loss(x @ w, data.y).mean()))
    distances, squares = [], []
    for k in range(STEPS):
        weights = work.inner.params["kernel"]
        # one batch is an epoch, and each epoch begins with the mask
        now = jnp.where(kept, weights, 0) if mask else weights
        squares.append(float(jnp.sum(slope(now) ** 2)))
        distances.append(float(jnp.sum((now - anchor) ** 2)))
        work = step(work, jnp.int32(k), message, data)
    distances.append(float(jnp.sum((work.inner.params["kernel"] - anchor) ** 2)))
    bounds = anchor_distances(distances[0], squares, LR, WEIGHT)
    assert bounds.shape == (STEPS + 1,) and bounds[0] == distances[0]
    assert np.all(np.array(distances) <= bounds * (1 + 1e-12)) and bounds[-1] < 20 * distances[-1]
    assert sum(distances[:-1]) <= bounds[:-1].sum() <= anchor_sum_bound(distances[0], squares, LR, WEIGHT)


def test_erratum_eq_95_as_printed_fails_for_a_constant_gradient():
    """The steps rest where the pull balances the gradient, ``||u|| = g / (2 lambda)``."""
    lr, weight, gradient, steps = 0.01, 0.5, 3.0, 1000
    u, total = gradient / (2 * weight), 0.0
    for _ in range(steps):
        total += u**2
        u = abs((1 - 2 * lr * weight) * u + lr * gradient)
    squares = np.full(steps, gradient**2)
    start = (gradient / (2 * weight)) ** 2
    assert total > 4 * anchor_sum_bound(start, squares, lr, weight, printed=True)
    assert total <= anchor_sum_bound(start, squares, lr, weight)


def test_eq_92_holds_with_smaller_terms_for_all_vectors():
    rng = np.random.default_rng(0)
    for _ in range(500):
        lr, u, g = rng.uniform(0.01, 3), rng.standard_normal(4), rng.standard_normal(4) * rng.uniform(0, 5)
        a = rng.uniform(0.001, 0.5)
        weight = a / lr
        new = np.sum(((1 - 2 * a) * u - lr * g) ** 2)
        closer = (1 - a) * (1 - 2 * a) * np.sum(u**2) + (1 - a) * lr / weight * np.sum(g**2)
        assert new <= closer + 1e-12
        assert closer <= anchor_distances(np.sum(u**2), [np.sum(g**2)], lr, weight)[1] + 1e-12


def test_constants_of_lemma_c3_are_those_of_its_steps():
    """Eqs. 72 to 74 at one event, for random models, in which every inequality of the proof is taken."""
    rng, nodes, late = np.random.default_rng(1), 5, 3
    for _ in range(200):
        w, mean = rng.standard_normal((nodes, 2)), rng.standard_normal(2)
        old = w[:late] + 0.3 * rng.standard_normal((late, 2))  # models that messages still carry
        errors, drift, move = 0.1 * rng.standard_normal((late, 2)), rng.standard_normal(2), 0.05
        part = rng.dirichlet(np.ones(late + 1))
        mixed = part[0] * w[-1] + part[1:] @ (old + errors)
        after = np.concatenate([w[:-1], [mixed + drift]])
        consensus = np.mean(np.sum((after - mean - move * np.array([1.0, 0.0])) ** 2, axis=1))
        error = max(np.linalg.norm(errors, axis=1).max(), move)  # w_bar moves by at most c eps_c, here c = 1
        gone = np.sum((w[:late] - old) ** 2, axis=1).max()  # at most tau times the sum of squared drifts
        c = consensus_constants(nodes, 1.0)
        before = np.mean(np.sum((w - mean) ** 2, axis=1))
        assert consensus <= 18 * before + c.of_drift * drift @ drift + c.of_stale_drift * gone + c.of_error * error**2
    assert consensus_constants(4, 0.5) == (1.0, 4.0, 2.5)


def test_eq_21_at_the_papers_settings():
    assert training_over_clustering(400, 1, 3, 32) == pytest.approx(400 / 96)
    assert training_over_clustering(1600, 2, 5, 16) == 40


def planned(exchange, topology, nodes=5):
    return plan_peers(
        exchange, "lognormal:heterogeneity=0.7", num_clients=nodes, local_steps=1, until=Until(updates=120),
        topology=topology, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("exchange", ["push_sum", "mean:capacity=3", "swift"])
def test_the_coefficient_bounds_how_far_apart_models_are_after_each_window(exchange):
    """Random numbers as models, mixed by the plan without training; messages in between carry old ones."""
    plan = planned(exchange, "ring" if exchange == "swift" else "gossip:receivers=2")
    found = contraction(plan, 20)
    assert found.begin.tolist() == [0, 20, 40, 60, 80, 100]
    assert 0 < found.coefficient.min() < 0.8 and found.coefficient.max() <= 1  # 1: a slow node has no event
    assert found.rate == pytest.approx(found.coefficient.max() ** (1 / 20))
    rng = np.random.default_rng(2)
    models, sent, apart = rng.standard_normal(5), {}, []
    for event, node in enumerate(plan.client):
        if event % 20 == 0:
            inbox = plan.source[plan.inbox_bounds[event] : plan.inbox_bounds[event + 20]]
            known = [*models, *(sent[old] for old in inbox if old < event)]
            apart.append(max(known) - min(known))
        own = models[node]
        for entry in range(plan.inbox_bounds[event], plan.inbox_bounds[event + 1]):
            models[node] += plan.weight[entry] * (sent[plan.source[entry]] - own)
        sent[event] = models[node]
        if event % 20 == 19:
            assert np.ptp(models) <= found.coefficient[event // 20] * apart[-1] + 1e-12


def test_what_does_not_contract_and_what_does_at_once():
    """Receivers of corrupt messages mix their own models in their place."""
    plan = planned("mean", "ring")
    for none in (planned("alone", "ring"), plan._replace(corrupt=np.ones_like(plan.corrupt))):
        assert contraction(none, 30).rate == 1
    half = plan._replace(corrupt=np.arange(len(plan.corrupt)) % 2 == 0)
    marked = corrupt_entries(half)
    assert 0 < marked.sum() < len(marked)
    expected = contraction(plan._replace(weight=np.where(marked, 0.0, plan.weight)), 30).coefficient
    np.testing.assert_array_equal(contraction(half, 30).coefficient, expected)
    rounds = contraction(planned("dpsgd", "complete", nodes=3), 6)
    np.testing.assert_allclose(rounds.coefficient[1:], 0, atol=1e-12)  # every round all nodes take the common mean


test_constants_out_of_range_are_refused = refusals(
    (lambda: pushcen_bound(SOME._replace(lr=0.0)), "lr = 0.0: must be a finite number > 0"),
    (lambda: pushcen_bound(SOME._replace(contraction=1.0)), "contraction = 1.0: must be at least 0 and below 1"),
    (lambda: pushcen_bound(SOME._replace(error=-1.0)), "error = -1.0: must be a finite number >= 0"),
    (lambda: pushcen_bound(SOME._replace(of_error=float("nan"))), "of_error = nan"),
    (lambda: pushcen_bound(SOME, distance=-1), "distance = -1"),
    (lambda: pushcen_bound(SOME._replace(share=0.7)), r"share = 0\.7: must be at most 0\.6"),
    (lambda: pushcen_bound(SOME._replace(share=np.array([0.5, 1.5]))), r"^share\[1\] = 1\.5: must be between 0 and 1"),
    (lambda: shares_of_masses(2, 1, 5), "most = 1: must be a number >= 2"),
    (lambda: shares_of_masses(jnp.float32(2), jnp.float32(1), 5), "most = "),
    (lambda: anchor_distances(-1, [1], 0.1, 1), "^start = "),
    (lambda: anchor_distances(1, [1], 0.6, 1), "^lr = 0.6: must be at most 0.5"),
    (lambda: anchor_distances(1, [-1], 0.1, 1), "^squared_gradients = "),
    (lambda: anchor_sum_bound(1, [1], 0.1, 0), "^weight = "),
    (lambda: consensus_constants(0, 0.5), "^clients = "),
    (lambda: consensus_constants(3, 1.5), "^sent = "),
    (lambda: training_over_clustering(0, 1, 1, 2), "^samples = "),
    (lambda: training_over_clustering(1, 1, 1, 0), "^k = "),
    (lambda: contraction(planned("mean", "ring"), 121), "^window = 121: must be at most 120"),
    (lambda: contraction(planned("divshare", "gossip"), 10), "^schedule = "),
)
