"""Clips, noise, sums and forged uploads against float64 NumPy; what attacks cost averaging rules and others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import server, simulate
from fedjax_async.base import tree
from fedjax_async.config.protection import multipliers
from fedjax_async.server import ATTACKS, PRIVACY, SERVERS, asgd, differentially_private, fedbuff
from fedjax_async.server.privacy import combined, noised
from tests.refusals import refusals
from tests.server.made_up import closing, flat, random_uploads, received, stacked, start_params

SUMMING = {
    *("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedasync", "asgd", "fedbuff", "asynfl", "fadas"),
    *("delay_adaptive_asgd", "fedcompass", "pisces"),
}
KEYS = jax.random.split(jax.random.key(3), 12)
UPLOADS = closing(random_uploads(1, 12, rejected=0.2), at=[2, 5, 8, 11])


def norms(uploads):
    return np.array([np.linalg.norm(u.delta) for u in uploads])


def path_of(rule, uploads, **more):
    """Model [E, D] and info after each arrival of float64 uploads, with more columns of the arrivals."""
    arrivals = stacked(uploads)._replace(**more)

    def one(carry, arrival):
        *carry, info = received(rule)(*carry, arrival)
        return tuple(carry), (rule.params(carry[0]), info)

    _, (path, info) = jax.jit(lambda carry: jax.lax.scan(one, carry, arrivals))(rule.init(start_params()))
    return flat(path), info


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
@pytest.mark.parametrize(
    ("deviation", "adapts", "closes_by_itself"), [(0.2, False, False), (0.2, True, False), (0.0, True, True)]
)
def test_clip_and_noise_equal_numpy(deviation, adapts, closes_by_itself):
    rule = fedbuff(staleness="constant", server_lr=1.0)
    if closes_by_itself:
        rule = rule._replace(receive=received(rule), close=None)
    own = {"quantile": 0.4, "rate": 0.7, "count_deviation": 0.3} if adapts else {}
    path, info = path_of(differentially_private(rule, clip=2.5, deviation=deviation, **own), UPLOADS, key=KEYS)
    columns = jax.tree.map(np.asarray, info.columns)
    zero = jax.tree.map(jnp.zeros_like, start_params())
    units = np.array([flat(noised(key, zero, jnp.float64(1.0))) for key in KEYS])
    noisy = 0.3 if deviation else 0.0
    draws = [noisy * float(jax.random.normal(jax.random.fold_in(key, 1), (), float)) for key in KEYS]
    clips = adapted(UPLOADS, 2.5, 0.4, 0.7, draws) if adapts else np.full(12, 2.5)
    np.testing.assert_allclose(path, averaged(UPLOADS, clips, deviation * clips[:, None] * units), rtol=1e-12)
    np.testing.assert_allclose(columns["clip"], clips, rtol=1e-12)
    assert len(set(clips.tolist())) == (4 if adapts else 1)
    accepted = np.array([u.examples > 0 for u in UPLOADS])
    np.testing.assert_array_equal(columns["clipped"], accepted & (norms(UPLOADS) > clips))
    assert 0 < columns["clipped"].sum() < 12 > accepted.sum(), "the uploads must try both sides of the clip"


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


def test_which_rules_are_of_sums():
    assert {name for name, factory in SERVERS.items() if factory().sums} == SUMMING
    assert not fedbuff(clip=1.0).sums and fedbuff(overstale_after=2.0, overstale=0.5).sums
    # the server would see the sum of those that it does not reject
    assert not fedbuff(overstale_after=2.0).sums and not server.delay_adaptive_asgd(late="drop").sums
    assert not server.delay_adaptive_asgd(tolerated=0).sums and server.delay_adaptive_asgd(tolerated=0.5).sums


def test_the_noise_is_divided_between_uploads_and_count():
    """Andrew et al. (2021), Theorem 1: the noise of both together is worth that of z alone."""
    for z, count, uploads in ((1.0, None, 100), (2.0, None, 5), (0.5, 0.3, 10), (1e-6, None, 10)):
        found = multipliers(z, 0.5, count, uploads)
        assert found.below == pytest.approx(max(z, uploads / 20) if count is None else count)
        assert found.uploads**-2 + (2 * found.below) ** -2 == pytest.approx(z**-2)
    assert multipliers(1e200, 0.5, None, 10).uploads == pytest.approx(1e200 * 0.75**-0.5)
    assert multipliers(0.7, None, None, 10) == (0.7, 0.0) and multipliers(0.0, 0.5, None, 10) == (0.0, 0.0)


COUNT = 30
MALICIOUS = np.arange(COUNT) % 3 == 1
SENT = closing(random_uploads(2, COUNT, rejected=0.1))
HONEST = np.array([u.delta for u in SENT])
ACCEPTED = np.array([u.examples > 0 for u in SENT])
FORGED = [name for name in ATTACKS if name != "label_flip"]


def received_uploads(attack, norm_limit=None):
    """The change of ASGD's model at each arrival, [E, D], and the columns."""
    path, info = path_of(server.attacked(asgd(), attack, start_params(), norm_limit), SENT, malicious=MALICIOUS)
    return np.diff(path, axis=0, prepend=flat(start_params())[None]), info


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
    np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(info.columns["malicious"], MALICIOUS)
    np.testing.assert_allclose(info.columns["sent_norm"], np.linalg.norm(want, axis=1), rtol=1e-10)


def test_a_forged_upload_above_the_norm_limit_is_rejected():
    norms = np.linalg.norm(HONEST, axis=1)
    limit = 1.5 * float(norms.max())
    found, info = received_uploads(ATTACKS["scaled"](factor=2.0), limit)
    rejected = MALICIOUS & ACCEPTED & (2 * norms > limit)
    assert 0 < rejected.sum() < (MALICIOUS & ACCEPTED).sum()
    np.testing.assert_array_equal(info.weight == 0, rejected | ~ACCEPTED)
    assert not np.any(found[rejected]) and np.all(np.any(found[ACCEPTED & ~rejected], axis=1))


def test_forged_uploads_that_are_not_finite_are_rejected_and_counted():
    """Honest uploads of about 100 times the largest float32 overflow; the model stays finite."""
    small = {"model": "logistic", "clients": 4, "updates": 8, "steps": 1, "batch_size": 4, "eval_examples": 20}
    run = simulate(**small, lr=100.0, method="asgd", attack="scaled:factor=3e38,clients=1")
    malicious = run.updates["malicious"]
    assert 0 < malicious.sum() < 8 and run.counters["rejected"] == malicious.sum()
    np.testing.assert_array_equal(run.updates["accepted"], ~malicious)
    assert np.all(run.updates["upload_norm"] > 0) and not np.any(run.updates["sent_norm"][malicious])
    assert np.isfinite(run.evaluations["loss"]).all()


def test_attackers_are_drawn_by_the_seed_or_given():
    drawn = [ATTACKS["alie"](share=0.25).who.drawn(20, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert [int(one.sum()) for one in drawn] == [5, 5, 5]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()
    given = ATTACKS["alie"](clients="0+3+7").who.drawn(8, np.random.default_rng(0))
    assert np.flatnonzero(given).tolist() == [0, 3, 7]
    assert ATTACKS["alie"](clients=2).who.clients == (2,)


test_wrong_options_are_refused = refusals(
    ("dp", {"clip": 0}, "^clip = 0: must be a finite number > 0$"),
    ("dp", {"noise": -1}, "^noise = -1: must be a finite number >= 0$"),
    ("dp", {"noise": 1e-200, "quantile": 0.5}, "^noise = 1e-200: must be 0, or at least 1e-06$"),
    ("dp_sgd", {"noise": 1e-7}, "^noise = 1e-07: must be 0, or at least 1e-06$"),
    ("dp", {"quantile": 1.0}, "^quantile = 1.0: must be at least 0 and below 1$"),
    ("dp", {"quantile": 0.5, "rate": 0}, "^rate = 0: must be a finite number > 0$"),
    ("dp", {"count_noise": 1}, "^count_noise = 1: must be left out without quantile$"),
    ("dp", {"quantile": 0.5, "count_noise": 0.5}, "^count_noise = 0.5: must be above noise / 2 = 0.5$"),
    ("dp_sgd", {"clip": float("inf")}, "^clip = inf: must be a finite number > 0$"),
    ("dp_sgd", {"noise": "much"}, "^noise = 'much': must be a finite number >= 0$"),
    ("secure", {"size": 1}, "^size = 1: must be a whole number >= 2$"),
    ("sign_flip", {"share": 1.5}, "^share = 1.5: must be between 0 and 1$"),
    ("sign_flip", {"clients": "0,1"}, r"^clients = '0,1': must be numbers of clients joined by \+, such as 0\+3\+7$"),
    ("sign_flip", {"clients": True}, r"^clients = True: must be numbers of clients joined by \+, such as 0\+3\+7$"),
    ("sign_flip", {"scale": 0}, "^scale = 0: must be a finite number > 0$"),
    ("scaled", {"factor": -1}, "^factor = -1: must be a finite number > 0$"),
    ("alie", {"z": 0}, "^z = 0: must be a finite number > 0$"),
    ("inner_product", {"epsilon": None}, "^epsilon = None: must be a finite number > 0$"),
    by=lambda name, options: (PRIVACY | ATTACKS)[name](**options),
)


test_parts_that_do_not_fit_are_refused = refusals(
    (
        lambda: combined([PRIVACY["secure"](), PRIVACY["secure"](size=3)]),
        "^parts for secure sums = 2: must be at most one of a kind$",
    ),
    (lambda: ATTACKS["alie"](clients="0+9").who.drawn(8, None), "clients = 9: must be a whole number from 0 to 7"),
)


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


@pytest.mark.slow
@pytest.mark.parametrize("attack", HARM)
def test_what_an_attack_costs(attack):
    harmed, points, robust, kept = HARM[attack]
    usual = accuracy(harmed)
    assert usual - accuracy(harmed, attack) > points
    assert usual - accuracy(robust, attack) < kept
