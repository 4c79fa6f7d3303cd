"""Clients that take in a second message in mid-job, against float64 NumPy; and which runs are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Settings, local
from fedjax_async.clock.midway import midway
from fedjax_async.config import prepare
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.types import ClientData, Message, Model
from tests.engine import problem
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


def job(client, state, start, steps, *, sent=True):
    """The upload, and the client's state after the job."""
    data = ClientData(jnp.asarray(X), jnp.asarray(Y), jnp.arange(ROWS), jnp.int32(0), jnp.int32(ROWS))
    message = Message({"w": jnp.asarray(start)}, (), jnp.int32(0))
    upload, after = local.run_job(client, jax.random.key(0), message, state, data, steps)
    return np.asarray(upload["w"]), after if sent else client.unsent(state, after)


@pytest.mark.float64
def test_a_share_of_the_second_message_is_mixed_into_the_unfinished_model():
    client = client_of(share=0.3)
    state, first, fresh, later = client.init({"w": jnp.zeros(D)}), *CHANCE.normal(size=(3, D))
    _, state = job(client, state, first, 2, sent=False)
    upload, state = job(client, state, fresh, 5)
    unfinished = descended(first, 2)
    trained = descended(0.7 * unfinished + 0.3 * fresh, 5)
    np.testing.assert_allclose(fresh + upload, trained, rtol=1e-12)
    upload, _ = job(client, state, later, 2)  # the first part of the next job starts from its message
    np.testing.assert_allclose(upload, descended(later, 2) - later, rtol=1e-12)


@pytest.mark.float64
def test_the_proximal_term_is_drawn_to_where_the_part_began():
    client = client_of(share=0.5, proximal=2.0)
    state, first, fresh = client.init({"w": jnp.zeros(D)}), *CHANCE.normal(size=(2, D))
    _, state = job(client, state, first, 1, sent=False)
    upload, _ = job(client, state, fresh, 2)
    start = w = (descended(first, 1) + fresh) / 2
    for _ in range(2):
        w = w - LR * (gradient(w) + 2.0 * (w - start))
    np.testing.assert_allclose(fresh + upload, w, rtol=1e-12)


@functools.cache
def trainers():
    """A client that goes on, and one that begins each part from its message."""
    one = local.going_on(problem.client(), 0.6)
    return one, one._replace(unsent=lambda before, after: after)


@pytest.mark.float64
@pytest.mark.parametrize("timing", ["midway:at=0.3", "midway:at=0.5,size=2"])
def test_the_engine_equals_the_oracle_with_second_messages(timing):
    """Each client has its own number of steps; some have one, and no second message."""
    trainer, never = trainers()
    given = problem.changed(problem.case("fedasync", timing, sizes=(3, 9, 4, 13, 6)), client=trainer)
    waves, oracle = run_waves(*given), run_reference(*given)
    problem.close(waves.params, oracle.params, 1e-12)
    other = run_reference(*problem.changed(given, client=never))
    gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), other.params, oracle.params)
    assert max(jax.tree.leaves(gaps)) > 1e-4


def test_a_client_whose_upload_is_no_change_of_params_cannot_go_on():
    two = client_of()._replace(finish=lambda work, message, kept: ((work, work), kept))
    client = local.going_on(two)
    with pytest.raises(ValueError, match=r"^what the client uploads = .*: must be the change of its params"):
        job(client, client.init({"w": jnp.zeros(D)}), np.zeros(D), 1)


SMALL = {"model": "logistic", "clients": 4, "updates": 4, "steps": 4}
test_runs_that_cannot_take_a_second_message_in_are_refused = refusals(
    ({"method": "asgd@midway"}, "timing = 'midway': must be another one: its clients keep no unfinished model"),
    (
        {"method": "fedasync@midway", "client": local.going_on_training, "compress": "topk:ratio=0.1"},
        "feedback = 'ef': must be off or ef21",
    ),
    ({"method": "fedasync@midway:at=2"}, "at = 2: must be in"),
    by=lambda given: prepare(Settings(**SMALL, **given)),
)


def test_another_rule_may_have_such_clients_and_an_own_timing_may_be_midway():
    settings = Settings(**SMALL, method="fedbuff@midway:size=2")
    run = prepare(settings, client=local.going_on_training)
    assert run.schedule.local_steps.tolist().count(2) == len(run.schedule.client)
    with pytest.raises(ValueError, match="keep no unfinished model"):
        prepare(Settings(**SMALL, method="asgd", timing=midway(at=0.25)))
