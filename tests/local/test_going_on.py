"""Clients that take in a second message in mid-job, against float64 NumPy; and which runs are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Settings, local
from fedjax_async.clock.midway import midway
from fedjax_async.config import prepare
from fedjax_async.server.fedasmu import fedasmu_client, learned_share
from fedjax_async.types import ClientData, Message, Model
from tests.refusals import refusals

LR, D, ROWS = 0.1, 3, 6
CHANCE = np.random.default_rng(8)
X, Y = CHANCE.normal(size=(ROWS, D)), CHANCE.normal(size=ROWS)
MODEL = Model(
    lambda key: {"w": jnp.zeros(D)},
    lambda params, x, key=None: x @ params["w"],
    lambda outputs, y: 0.5 * (outputs - y) ** 2,
)


def client_of(factory=local.going_on_training, **options):
    return factory(MODEL, optimizer=optax.sgd(LR), batch_size=ROWS, **options)


def gradient(w):
    return X.T @ (X @ w - Y) / ROWS


def descended(w, steps):
    for _ in range(steps):
        w = w - LR * gradient(w)
    return w


def job(client, state, start, version, steps, *, sent=True):
    """The upload, and the client's state after the job."""
    data = ClientData(jnp.asarray(X), jnp.asarray(Y), jnp.arange(ROWS), jnp.int32(0), jnp.int32(ROWS))
    message = Message({"w": jnp.asarray(start)}, (), jnp.int32(version))
    upload, after = local.run_job(client, jax.random.key(0), message, state, data, steps)
    return np.asarray(upload["w"]), after if sent else client.unsent(state, after)


@pytest.mark.float64
def test_a_share_of_the_second_message_is_mixed_into_the_unfinished_model():
    client = client_of(share=0.3)
    state, first, fresh, later = client.init({"w": jnp.zeros(D)}), *CHANCE.normal(size=(3, D))
    _, state = job(client, state, first, 4, 2, sent=False)
    upload, state = job(client, state, fresh, 9, 5)
    unfinished = descended(first, 2)
    trained = descended(0.7 * unfinished + 0.3 * fresh, 5)
    np.testing.assert_allclose(fresh + upload, trained, rtol=1e-12)
    upload, _ = job(client, state, later, 11, 2)  # the first part of the next job starts from its message
    np.testing.assert_allclose(upload, descended(later, 2) - later, rtol=1e-12)


@pytest.mark.float64
def test_the_proximal_term_is_drawn_to_where_the_part_began():
    client = client_of(share=0.5, proximal=2.0)
    state, first, fresh = client.init({"w": jnp.zeros(D)}), *CHANCE.normal(size=(2, D))
    _, state = job(client, state, first, 0, 1, sent=False)
    upload, _ = job(client, state, fresh, 1, 2)
    start = w = (descended(first, 1) + fresh) / 2
    for _ in range(2):
        w = w - LR * (gradient(w) + 2.0 * (w - start))
    np.testing.assert_allclose(fresh + upload, w, rtol=1e-12)


def share(numbers, o, g, mu):
    """Eqs. 7 and 8, from gamma and upsilon; o and g count from 1."""
    phi = numbers[0] / np.sqrt(g) * (1 - numbers[1] / np.sqrt(g - o + 1))
    return mu * phi / (1 + mu * phi)


@pytest.mark.float64
def test_fedasmu_learns_how_much_to_take():
    """Three jobs; derivatives by complex steps, which are exact."""
    mu, rate = 0.8, 0.2
    client = client_of(fedasmu_client, take_strength=mu, take_level=2.0, take_factor=0.6, take_rate=rate)
    state, numbers = client.init({"w": jnp.zeros(D)}), np.array([2.0, 0.6])
    for began, now in ((0, 3), (3, 4), (4, 20)):
        start, fresh = CHANCE.normal(size=(2, D))
        _, state = job(client, state, start, began, 2, sent=False)
        upload, state = job(client, state, fresh, now, 3)
        unfinished, o, g = descended(start, 2), began + 1, now + 1
        beta = share(numbers, o, g, mu)
        mixed = (1 - beta) * unfinished + beta * fresh
        trained = descended(mixed, 3)
        np.testing.assert_allclose(fresh + upload, trained, rtol=1e-12)
        slope = -(trained - mixed) @ (fresh - unfinished)
        steps = [slope * share(numbers + 1e-30j * unit, o, g, mu).imag / 1e-30 for unit in np.eye(2)]
        numbers = np.maximum(numbers - rate * np.array(steps), 0.0)
        np.testing.assert_allclose([state.numbers.level, state.numbers.factor], numbers, rtol=1e-12)
    assert abs(numbers - [2.0, 0.6]).min() > 1e-3


def test_nothing_is_taken_of_a_model_that_is_not_newer_and_more_of_a_newer_one():
    blend = learned_share(strength=1.0, level=1.0, factor=0.5, rate=1.0)
    weights = [float(blend.weight(blend.init(), jnp.int32(9), jnp.int32(now))) for now in (9, 10, 14)]
    assert weights[0] == 0 and 0 < weights[1] < weights[2] < 1
    kept = blend.learned(blend.init(), jnp.int32(9), jnp.int32(9), jnp.asarray(1.0))
    assert kept == blend.init()


def test_what_was_learned_stays_finite():
    blend = learned_share(strength=1.0, level=1.0, factor=0.5, rate=1.0)
    for slope in (np.inf, -np.inf, np.nan, 1e30, -1e30):
        after = blend.learned(blend.init(), jnp.int32(0), jnp.int32(3), jnp.float32(slope))
        assert 0 <= after.level <= 1e6 and 0 <= after.factor <= 1e6
        assert 0 <= blend.weight(after, jnp.int32(0), jnp.int32(3)) <= 1


def test_a_client_whose_upload_is_no_change_of_params_cannot_go_on():
    two = client_of()._replace(finish=lambda work, message, kept: ((work, work), kept))
    client = local.going_on(two, local.constant_share())
    with pytest.raises(ValueError, match=r"^what the client uploads = .*: must be the change of its params"):
        job(client, client.init({"w": jnp.zeros(D)}), np.zeros(D), 0, 1)


SMALL = {"model": "logistic", "clients": 4, "updates": 4, "steps": 4}
test_runs_that_cannot_take_a_second_message_in_are_refused = refusals(
    ({"method": "asgd@midway"}, "timing = 'midway': must be another one: its clients keep no unfinished model"),
    ({"method": "fedasmu", "compress": "topk:ratio=0.1"}, "feedback = 'ef': must be off or ef21"),
    ({"method": "fedasmu@midway:at=2"}, "at = 2: must be in"),
    by=lambda given: prepare(Settings(**SMALL, **given)),
)


def test_any_rule_may_have_such_clients_and_an_own_timing_may_be_midway():
    settings = Settings(**SMALL, method="fedbuff@midway:size=2")
    run = prepare(settings, client=local.going_on_training)
    assert run.schedule.local_steps.tolist().count(2) == len(run.schedule.client)
    with pytest.raises(ValueError, match="keep no unfinished model"):
        prepare(Settings(**SMALL, method="asgd", timing=midway(at=0.25)))
