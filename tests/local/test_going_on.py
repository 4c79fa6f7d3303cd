"""Clients that take in a second message in mid-job, against NumPy and the oracle; and which runs are refused."""

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
from tests.local.textbook import sgd
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


def descended(w, steps, proximal=0.0):
    return sgd(w, [lambda w: X.T @ (X @ w - Y) / ROWS] * steps, lr=LR, proximal=proximal)


def job(client, state, start, steps, *, sent=True):
    """The upload, and the client's state after the job."""
    data = ClientData(jnp.asarray(X), jnp.asarray(Y), jnp.arange(ROWS), jnp.int32(0), jnp.int32(ROWS))
    message = Message({"w": jnp.asarray(start)}, (), jnp.int32(0))
    upload, after = local.run_job(client, jax.random.key(0), message, state, data, steps)
    return np.asarray(upload["w"]), after if sent else client.unsent(state, after)


@pytest.mark.float64
@pytest.mark.parametrize("proximal", [0.0, 2.0])
def test_a_share_of_the_second_message_is_mixed_into_the_unfinished_model(proximal):
    """The proximal term pulls to where the part began."""
    client = client_of(share=0.3, proximal=proximal)
    state, first, fresh, later = client.init({"w": jnp.zeros(D)}), *CHANCE.normal(size=(3, D))
    _, state = job(client, state, first, 2, sent=False)
    upload, state = job(client, state, fresh, 5)
    begun = 0.7 * descended(first, 2, proximal) + 0.3 * fresh
    np.testing.assert_allclose(fresh + upload, descended(begun, 5, proximal), rtol=1e-12)
    upload, _ = job(client, state, later, 2)  # the first part of the next job starts from its message
    np.testing.assert_allclose(later + upload, descended(later, 2, proximal), rtol=1e-12)


@pytest.mark.float64
def test_the_engine_equals_the_oracle_with_second_messages():
    """Each client has its own number of steps; some have one, and no second message. Worlds hardly ever have midway."""
    given = problem.case("fedasync", "midway:at=0.5,size=2", sizes=(3, 9, 4, 13, 6))
    goes_on = local.going_on(problem.client(), 0.6)
    given = problem.changed(given, client=goes_on)
    want = run_reference(*given)
    problem.close(run_waves(*given).params, want.params, 1e-12)
    never = run_reference(*problem.changed(given, client=goes_on._replace(unsent=lambda before, after: after)))
    assert np.abs(never.params["output"]["kernel"] - want.params["output"]["kernel"]).max() > 1e-4


def test_a_client_whose_upload_is_no_change_of_params_cannot_go_on():
    two = client_of()._replace(finish=lambda work, message, kept: ((work, work), kept))
    client = local.going_on(two)
    with pytest.raises(ValueError, match=r"^what the client uploads = .*: must be the change of its params"):
        job(client, client.init({"w": jnp.zeros(D)}), np.zeros(D), 1)


SMALL = {"model": "logistic", "clients": 4, "updates": 4, "steps": 4}
GOING = {"client": local.going_on_training}
test_runs_that_cannot_take_a_second_message_in_are_refused = refusals(
    ({"method": "asgd@midway"}, "timing = 'midway': must be another one: its clients keep no unfinished model"),
    ({"method": "asgd", "timing": midway(at=0.25)}, "keep no unfinished model"),
    ({"method": "fedasync@midway", "compress": "topk:ratio=0.1"} | GOING, "feedback = 'ef': must be off or ef21"),
    ({"method": "fedasync@midway:at=2"}, "at = 2: must be in"),
    by=lambda given: prepare(Settings(**SMALL, **given)),
)


def test_another_rule_may_have_such_clients():
    run = prepare(Settings(**SMALL, method="fedbuff@midway:size=2"), **GOING)
    assert run.schedule.local_steps.tolist().count(2) == len(run.schedule.client)
