"""Attacks: the forged uploads against float64 NumPy, and the loss of accuracy of averaging rules and of others."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.server import ATTACKS, asgd, attacked
from tests.server.made_up import closing, flat, random_uploads, received, stacked, start_params

COUNT = 30
MALICIOUS = np.arange(COUNT) % 3 == 1
UPLOADS = closing(random_uploads(2, COUNT, rejected=0.1))
HONEST = np.array([u.delta for u in UPLOADS])
ACCEPTED = np.array([u.examples > 0 for u in UPLOADS])
FORGED = [name for name in ATTACKS if name != "label_flip"]


def received_uploads(attack, norm_limit=None):
    """The change of ASGD's model at each arrival, [E, D], and the columns."""
    arrivals = stacked(UPLOADS)._replace(malicious=MALICIOUS)
    rule = attacked(asgd(), attack, start_params(), norm_limit)

    def one(carry, arrival):
        *after, info = received(rule)(*carry, arrival)
        change = jax.tree.map(lambda new, old: new - old, rule.params(after[0]), rule.params(carry[0]))
        return tuple(after), (change, info)

    _, (changes, info) = jax.jit(lambda c: jax.lax.scan(one, c, arrivals))(rule.init(start_params()))
    return flat(changes), info


def seen_before(e):
    """Moving mean and variance of the honest uploads before arrival ``e``."""
    mean, variance, count = np.zeros(HONEST.shape[1]), np.zeros(HONEST.shape[1]), 0
    for upload in HONEST[:e][ACCEPTED[:e] & ~MALICIOUS[:e]]:
        count += 1
        gain = 1 / min(count, 10)
        off = upload - mean
        mean, variance = mean + gain * off, (1 - gain) * (variance + gain * off**2)
    return mean, variance, count


def by_hand(name, e):
    mean, variance, count = seen_before(e)
    if name == "sign_flip":
        return -2.0 * HONEST[e]
    if name == "scaled":
        return 7.0 * HONEST[e]
    if count == 0:
        return HONEST[e]
    return mean - 1.5 * np.sqrt(variance) if name == "alie" else -0.5 * mean


@pytest.mark.float64
@pytest.mark.parametrize("name", FORGED)
def test_forged_uploads_equal_numpy(name):
    attack = ATTACKS[name](**{"sign_flip": {"scale": 2.0}, "scaled": {"factor": 7.0}}.get(name, {}))
    found, info = received_uploads(attack)
    want = [by_hand(name, e) if MALICIOUS[e] and ACCEPTED[e] else HONEST[e] for e in range(COUNT)]
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(info.columns["malicious"], MALICIOUS)
    np.testing.assert_allclose(info.columns["sent_norm"], np.linalg.norm(want, axis=1), rtol=1e-9)
    if name == "alie":  # at most ten uploads: plain mean and variance
        mean, variance, count = seen_before(9)
        rows = HONEST[:9][ACCEPTED[:9] & ~MALICIOUS[:9]]
        assert count == len(rows) >= 3
        np.testing.assert_allclose((mean, variance), (rows.mean(axis=0), rows.var(axis=0)), rtol=1e-9)


def test_a_forged_upload_above_the_norm_limit_is_rejected():
    norms = np.linalg.norm(HONEST, axis=1)
    limit = 1.5 * float(norms.max())
    found, info = received_uploads(ATTACKS["scaled"](factor=2.0), limit)
    rejected = MALICIOUS & ACCEPTED & (2 * norms > limit)
    assert 0 < rejected.sum() < (MALICIOUS & ACCEPTED).sum()
    np.testing.assert_array_equal(info.weight == 0, rejected | ~ACCEPTED)
    assert not np.any(found[rejected]) and np.all(np.any(found[ACCEPTED & ~rejected], axis=1))


def test_forged_uploads_that_are_not_finite_are_rejected_and_counted():
    """Honest uploads of about 100 times the largest float32 overflow; the model stays finite, in both engines."""
    small = {"model": "logistic", "clients": 4, "updates": 8, "steps": 1, "batch_size": 4, "eval_examples": 20}
    attacked_by = {**small, "lr": 100.0, "method": "asgd", "attack": "scaled:factor=3e38,clients=1"}
    runs = [simulate(**attacked_by, engine=engine) for engine in ("waves", "reference")]
    for run in runs:
        malicious = run.updates["malicious"]
        assert 0 < malicious.sum() < 8 and run.counters["rejected"] == malicious.sum()
        np.testing.assert_array_equal(run.updates["accepted"], ~malicious)
        assert np.all(run.updates["upload_norm"] > 0) and not np.any(run.updates["sent_norm"][malicious])
        assert np.isfinite(run.evaluations["loss"]).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *(run.params for run in runs))


def test_attackers_are_drawn_by_the_seed_or_given():
    drawn = [ATTACKS["alie"](share=0.25).who.drawn(20, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert [int(one.sum()) for one in drawn] == [5, 5, 5]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()
    given = ATTACKS["alie"](clients="0+3+7").who.drawn(8, np.random.default_rng(0))
    assert np.flatnonzero(given).tolist() == [0, 3, 7]
    assert ATTACKS["alie"](clients=2).who.clients == (2,)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sign_flip", {"share": 1.5}, "share = 1.5: must be between 0 and 1"),
        ("sign_flip", {"clients": "0,1"}, "clients = '0,1': must be numbers of clients joined by +"),
        ("sign_flip", {"clients": True}, "clients = True: must be numbers of clients joined by +"),
        ("sign_flip", {"scale": 0}, "scale = 0: must be a finite number > 0"),
        ("scaled", {"factor": -1}, "factor = -1: must be a finite number > 0"),
        ("alie", {"z": 0}, "z = 0: must be a finite number > 0"),
        ("inner_product", {"epsilon": None}, "epsilon = None: must be a finite number > 0"),
    ],
)
def test_wrong_options_are_refused(name, options, says):
    with pytest.raises(ValueError) as error:
        ATTACKS[name](**options)
    assert str(error.value).startswith(says)


def test_a_client_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="clients = 9: must be a whole number from 0 to 7"):
        ATTACKS["alie"](clients="0+9").who.drawn(8, np.random.default_rng(0))


# attack -> a rule that it harms, the least loss in points, a rule that resists it, and the most points by which this
# rule is below the first rule without attack
HARM = {
    "sign_flip:scale=5": ("fedbuff", 30, "fedmedian", 15),
    "scaled:factor=50": ("fedbuff", 10, "fedmedian", 10),
    "label_flip:share=0.2": ("fedbuff", 5, "fedmedian", 15),
    "alie": ("fedmedian", 4, "fedbuff", 8),
    "inner_product:epsilon=5": ("fedbuff", 30, "trimmed_mean:trim=0.3", 15),
}
USUAL = {
    **{"model": "logistic", "clients": 20, "partition": "iid", "delay": "exponential", "updates": 100, "steps": 2},
    **{"batch_size": 16, "lr": 0.2, "timing": "buffer:size=10", "eval_updates": 100},
}


def accuracy(method, attack=None):
    return 100 * simulate(**USUAL, method=method, attack=attack).evaluations["accuracy"][-1]


@pytest.mark.slow_cases("sign_flip:scale=5")
@pytest.mark.parametrize(
    "attack", [pytest.param(a, marks=[] if a.startswith("sign") else [pytest.mark.slow]) for a in HARM]
)
def test_what_an_attack_costs(attack):
    harmed, points, robust, kept = HARM[attack]
    usual = accuracy(harmed)
    assert usual - accuracy(harmed, attack) > points
    assert usual - accuracy(robust, attack) < kept
