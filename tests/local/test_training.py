"""The local trainer against float64 NumPy, the state and contract of a job, and its number of steps."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedjax_async.local import DECAYS, OPTIMIZERS, job_key, local_steps, local_training, run_job
from fedjax_async.types import Message, Model
from tests.local import textbook
from tests.local.made_up import MODEL, client_data, flat, message, slopes, start_vector
from tests.refusals import refusals


def plain(optimizer=None, **options):
    return local_training(MODEL, optimizer=optimizer or optax.sgd(0.3), **{"batch_size": 8} | options)


@pytest.mark.float64
@pytest.mark.parametrize(("client", "steps", "options", "version"), [
    (0, 6, {}, 0),  # 23 examples in batches of 8: two epochs with a partial last batch
    (0, 8, {"momentum": 0.9}, 0), (0, 7, {"momentum": 0.8, "nesterov": True}, 0),
    (2, 7, {"weight_decay": 0.1, "momentum": 0.5, "proximal": 0.7}, 0),  # 32 examples: no partial batch
    (0, 6, {"momentum": 0.9, "proximal": 0.2}, 5),  # scaled by 1/(1 + version)
    (1, 5, {"proximal": 1.5}, 0),  # 5 examples: each batch is all of them
])  # fmt: skip
def test_training_is_the_textbooks_and_numbers_may_be_traced(client, steps, options, version):
    key, start = jax.random.key(3), start_vector()
    scale = (lambda v: 1.0 / (1.0 + v.astype(float))) if version else None

    @jax.jit
    def train(numbers):
        local = {name: numbers.get(name, value) for name, value in options.items() if name != "proximal"}
        sgd, proximal = OPTIMIZERS["sgd"](numbers["lr"], **local), numbers.get("proximal", 0.0)
        own = plain(sgd, proximal=proximal, scale=scale)
        return run_job(own, key, message(version), (), client_data(client), steps)

    upload, state = train({"lr": 0.4} | {name: value for name, value in options.items() if name != "nesterov"})
    want = textbook.sgd(start, slopes(key, client, 8, steps), lr=0.4, scale=1 / (1 + version), **options) - start
    assert state == () and np.abs(want).max() > 0.05
    np.testing.assert_allclose(flat(upload), want, rtol=1e-9, atol=1e-12)


def test_a_job_is_its_steps_uploads_trained_minus_start_and_keeps_no_optimiser_state():
    algorithm, data, sent = plain(optax.adam(0.1)), client_data(), message()
    step, key = jax.jit(algorithm.step), jax.random.key(1)
    assert algorithm.init(sent.params) == ()
    work = first = algorithm.begin(key, sent, (), data)
    for k in range(5):
        work = step(work, jnp.int32(k), sent, data)
    (upload, state), again = (algorithm.finish(work, sent, ()) for _ in range(2))  # may be called again
    np.testing.assert_array_equal(flat(upload), flat(work.params) - flat(sent.params))
    np.testing.assert_array_equal(flat(upload), flat(again[0]))
    fresh = algorithm.begin(key, sent, state, data)
    assert np.any(flat(work.optimizer)) and not np.any(flat(fresh.optimizer))
    jax.tree.map(np.testing.assert_array_equal, fresh.params, first.params)
    run = jax.jit(lambda steps: run_job(algorithm, key, sent, (), data, steps)[0])
    np.testing.assert_allclose(flat(run(5)), flat(upload), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(flat(run(0)), 0.0)


def test_the_same_job_trains_the_same_and_another_number_or_client_otherwise():
    root, algorithm, data, sent = jax.random.key(8), plain(), client_data(), message()
    run = jax.jit(lambda key: run_job(algorithm, key, sent, (), data, 2)[0]["w"])
    uploads = {(i, n): np.asarray(run(job_key(root, jnp.int32(i), jnp.int32(n)))) for i in range(3) for n in range(3)}
    np.testing.assert_array_equal(uploads[1, 2], run(job_key(root, 1, 2)))
    assert len({upload.tobytes() for upload in uploads.values()}) == 9
    assert not np.array_equal(uploads[1, 2], run(job_key(jax.random.key(9), 1, 2)))


def test_the_dropout_key_is_new_in_every_step_and_follows_from_the_jobs():
    """Of a model whose gradient is noise from the key."""
    start, key, data = {"w": jnp.zeros(())}, jax.random.key(6), client_data()

    def apply(params, x, key=None):
        return params["w"] * jax.random.normal(key, ()) * jnp.ones(x.shape[0])

    algorithm = local_training(Model(lambda key: start, apply, lambda outputs, y: outputs), optimizer=optax.sgd(1.0))
    run = jax.jit(lambda steps: run_job(algorithm, key, Message(start), (), data, steps)[0]["w"])
    noise = -np.diff([float(run(steps)) for steps in range(6)])
    expected = [float(jax.random.normal(jax.random.fold_in(key, k), ())) for k in range(5)]
    np.testing.assert_allclose(noise, expected, rtol=1e-4, atol=1e-6)
    assert len(set(expected)) == 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_params_and_optimiser_state_keep_their_dtype(name):
    """Also in bfloat16 with a rate and a decay traced in float32: a loop would refuse another dtype."""
    data, sent = client_data(), message(3, jnp.bfloat16)
    data = data._replace(x=data.x.astype(jnp.bfloat16))

    def run(lr, mu):
        algorithm = plain(OPTIMIZERS[name](lr), proximal=mu, scale=DECAYS["exponential"](rate=0.5))
        return run_job(algorithm, jax.random.key(0), sent, (), data, 3)[0]

    upload = jax.eval_shape(run, jnp.float32(0.1), jnp.float32(0.1))
    assert jax.tree.map(lambda leaf: leaf.dtype, upload) == {"w": jnp.bfloat16, "b": jnp.bfloat16}


test_bad_options_are_refused = refusals(
    ({"batch_size": 0}, "^batch_size = 0: must be a whole number >= 1$"),
    ({"batch_size": 2.5}, "^batch_size = 2.5: must be a whole number >= 1$"),
    ({"proximal": -0.1}, "^proximal = -0.1: must be a finite number >= 0$"),
    ({"proximal": "strong"}, "^proximal = 'strong': must be a finite number >= 0$"),
    by=lambda options: plain(**options),
)  # fmt: skip
test_what_correct_returns_is_like_the_gradient = refusals(
    (lambda gradient: jax.tree.map(lambda leaf: leaf[None], gradient), "^what correct returned = .*: must be like the"),
    (lambda gradient: {"w": gradient["w"]}, "^what correct returned = .*: must be like the gradient"),
    by=lambda wrong: run_job(
        plain(correct=lambda gradient, weights, message: wrong(gradient)),
        jax.random.key(0), message(), (), client_data(), 2,
    ),
)  # fmt: skip


# --- the number of local steps ----------------------------------------------------------------


@given(
    size=st.lists(st.integers(1, 70_000), min_size=1, max_size=5),
    batch_size=st.integers(1, 300),
    hundredths=st.integers(1, 2000),
)
@example(size=[100, 3200], batch_size=1, hundredths=7)
@example(size=[10, 20, 100], batch_size=1, hundredths=110)
def test_steps_are_exact_for_decimal_epochs_and_at_least_one(size, batch_size, hundredths):
    """Also where binary floats are inexact: 0.07 of 100 batches are 7 steps."""
    found = local_steps(np.array(size), batch_size=batch_size, epochs=hundredths / 100)
    whole, part = divmod(Fraction(hundredths, 100), 1)
    for n, steps in zip(size, found):
        per_epoch = -(-n // batch_size)
        assert steps == whole * per_epoch + math.ceil(part * per_epoch)
    assert local_steps(np.array(size), batch_size=batch_size, epochs=1e-9).tolist() == [1] * len(size)
    same = local_steps(np.array(size), batch_size=batch_size, steps=hundredths)
    assert same.tolist() == [hundredths] * len(size) and found.dtype == same.dtype == np.int32


test_bad_steps_are_refused = refusals(
    ({}, "^epochs = None, steps = None: give exactly one"),
    ({"epochs": 1, "steps": 1}, "^epochs = 1, steps = 1: give exactly one"),
    ({"epochs": 0}, "^epochs = 0: must be a finite number > 0"), ({"epochs": -1.0}, "^epochs = -1.0: must be"),
    ({"epochs": float("nan")}, "^epochs = nan: must be"), ({"epochs": float("inf")}, "^epochs = inf: must be"),
    ({"epochs": 1e10}, "^epochs = 10000000000.0: must be fewer than"),
    ({"epochs": "two"}, "^epochs = 'two': must be"),
    ({"steps": 0}, "^steps = 0: must be a whole number from 1 to"),
    ({"steps": 1.5}, "^steps = 1.5: must be a whole number from 1 to"),
    ({"epochs": 1, "batch_size": 0}, "^batch_size = 0: must be a whole number >= 1"),
    by=lambda options: local_steps(np.array([100, 96, 10, 1]), **{"batch_size": 32, **options}),
)  # fmt: skip
