"""The local trainer against float64 NumPy, and the state and contract of a job."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.local import DECAYS, OPTIMIZERS, job_key, local_training, run_job, run_steps
from fedjax_async.types import Message, Model
from tests.local import textbook
from tests.local.made_up import MODEL, client_data, flat, groups, message, pool, start_arrays
from tests.refusals import refusals


def plain(lr=0.3, **options):
    return local_training(MODEL, optimizer=optax.sgd(lr), **options)


def job(algorithm, key, steps, *, client=0, message_=None, size=None):
    return run_job(algorithm, key, message_ or message(), (), client_data(client, size=size), steps)


@pytest.mark.parametrize(("client", "steps", "options", "version"), [
    (0, 6, {}, 0),  # 23 examples in batches of 8: two epochs with a partial last batch
    (0, 8, {"momentum": 0.9}, 0), (0, 7, {"momentum": 0.8, "nesterov": True}, 0),
    (2, 7, {"weight_decay": 0.1}, 0),  # 32 examples: no partial batch
    (2, 7, {"weight_decay": 0.1, "momentum": 0.5, "proximal": 0.7}, 0),
    (0, 6, {"proximal": 1.5}, 0),
    (0, 6, {"momentum": 0.9, "proximal": 0.2}, 5),  # scaled by 1/(1 + version)
    (1, 5, {"momentum": 0.9}, 0),  # 5 examples: each batch is all of them
])  # fmt: skip
def test_training_is_the_textbooks(client, steps, options, version):
    key, batch_size, lr = jax.random.key(3), 8, 0.4
    proximal = options.get("proximal", 0.0)
    local = {name: value for name, value in options.items() if name != "proximal"}
    with jax.enable_x64(True):
        algorithm = local_training(
            MODEL,
            optimizer=OPTIMIZERS["sgd"](lr, **local),
            batch_size=batch_size,
            proximal=proximal,
            scale=(lambda v: 1.0 / (1.0 + v.astype(float))) if version else None,
        )
        upload, state = job(algorithm, key, steps, client=client, message_=message(version))
        (w, b), (x, y, _) = start_arrays(), pool()
        minibatches = groups(key, client, batch_size, steps)
        expected = textbook.train(w, b, x, y, minibatches, lr=lr, scale=1 / (1 + version), **options)
        assert state == ()
        np.testing.assert_allclose(upload["w"], expected[0] - w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(upload["b"], expected[1] - b, rtol=1e-9, atol=1e-12)
    assert np.abs(expected[0] - w).max() > 0.05


def test_a_job_is_its_steps_and_uploads_trained_minus_start():
    algorithm, data, sent = local_training(MODEL, optimizer=optax.adam(0.1), batch_size=8), client_data(), message()
    step = jax.jit(algorithm.step)
    work = algorithm.begin(jax.random.key(1), sent, (), data)
    for k in range(5):
        work = step(work, jnp.int32(k), sent, data)
    uploads = [algorithm.finish(work, sent, ())[0] for _ in range(2)]  # may be called again
    np.testing.assert_array_equal(flat(uploads[0]), flat(work.params) - flat(sent.params))
    np.testing.assert_array_equal(flat(uploads[0]), flat(uploads[1]))
    whole, _ = job(algorithm, jax.random.key(1), 5)
    np.testing.assert_allclose(flat(whole), flat(uploads[0]), rtol=1e-5, atol=1e-7)
    none, _ = job(algorithm, jax.random.key(1), 0)
    np.testing.assert_array_equal(flat(none), 0.0)


def test_optimiser_state_does_not_outlive_a_job():
    algorithm, data, sent = local_training(MODEL, optimizer=optax.adam(0.1), batch_size=8), client_data(), message()
    assert algorithm.init(sent.params) == ()
    run = jax.jit(lambda key, state: run_steps(algorithm, key, sent, state, data, 4))
    first = run(jax.random.key(0), ())
    _, state = algorithm.finish(first, sent, ())
    fresh = algorithm.begin(jax.random.key(0), sent, state, data)
    left, right = jax.tree.leaves(first.optimizer), jax.tree.leaves(fresh.optimizer)
    assert all(np.any(a != b) for a, b in zip(left, right)) and all(np.all(b == 0) for b in right)
    np.testing.assert_array_equal(flat(run(jax.random.key(0), state).params), flat(first.params))


def test_the_same_job_trains_the_same_and_another_number_or_client_otherwise():
    root, algorithm, data, sent = jax.random.key(8), plain(batch_size=8), client_data(), message()
    keys = {(i, n): job_key(root, jnp.int32(i), jnp.int32(n)) for i in range(3) for n in range(3)}
    run = jax.jit(lambda key: run_job(algorithm, key, sent, (), data, 2)[0]["w"])
    uploads = {where: np.asarray(run(key)) for where, key in keys.items()}
    np.testing.assert_array_equal(uploads[1, 2], run(job_key(root, 1, 2)))
    assert len({upload.tobytes() for upload in uploads.values()}) == 9
    assert not np.array_equal(uploads[1, 2], run(job_key(jax.random.key(9), 1, 2)))


def noise_model():
    """A model whose gradient is noise from the key, so that training reveals the keys."""

    def apply(params, x, key=None):
        return params["w"] * jax.random.normal(key, ()) * jnp.ones(x.shape[0])

    return Model(lambda key: {"w": jnp.zeros(())}, apply, lambda outputs, y: outputs)


def test_the_dropout_key_is_new_in_every_step_and_follows_from_the_jobs():
    algorithm, key, data = (
        local_training(noise_model(), optimizer=optax.sgd(1.0), batch_size=8),
        jax.random.key(6),
        client_data(),
    )
    run = jax.jit(lambda steps: run_job(algorithm, key, Message({"w": jnp.zeros(())}), (), data, steps)[0]["w"])
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
        decay = DECAYS["exponential"](rate=0.5)
        algorithm = local_training(MODEL, optimizer=OPTIMIZERS[name](lr), batch_size=8, proximal=mu, scale=decay)
        return run_job(algorithm, jax.random.key(0), sent, (), data, 3)[0]

    upload = jax.eval_shape(run, jnp.float32(0.1), jnp.float32(0.1))
    assert jax.tree.map(lambda leaf: leaf.dtype, upload) == {"w": jnp.bfloat16, "b": jnp.bfloat16}


def test_hyperparameters_may_be_traced():
    """A sweep over learning rate, momentum and proximal weight is a vmap; Python floats give the same."""
    key, sweep = jax.random.key(0), [(0.1, 0.0, 0.0), (0.3, 0.9, 0.5)]

    @jax.jit
    @jax.vmap
    def run(lr, momentum, mu):
        local = OPTIMIZERS["sgd"](lr, momentum=momentum)
        return job(local_training(MODEL, optimizer=local, batch_size=8, proximal=mu), key, 4)[0]["w"]

    with jax.enable_x64(True):
        swept = run(*map(jnp.array, zip(*sweep)))
        (w, b), (x, y, _) = start_arrays(), pool()
        for found, (lr, momentum, mu) in zip(swept, sweep):
            options = {"lr": lr, "momentum": momentum, "proximal": mu}
            expected, _ = textbook.train(w, b, x, y, groups(key, 0, 8, 4), **options)
            np.testing.assert_allclose(found + w, expected, rtol=1e-9, atol=1e-12)


test_bad_options_are_refused = refusals(
    ({"batch_size": 0}, "^batch_size = 0: must be a whole number >= 1$"),
    ({"batch_size": 2.5}, "^batch_size = 2.5: must be a whole number >= 1$"),
    ({"proximal": -0.1}, "^proximal = -0.1: must be a finite number >= 0$"),
    ({"proximal": "strong"}, "^proximal = 'strong': must be a finite number >= 0$"),
    by=lambda options: plain(**options),
)  # fmt: skip


@pytest.mark.parametrize("wrong", [
    lambda gradient: jax.tree.map(lambda leaf: leaf[None], gradient),  # would be broadcast
    lambda gradient: {"w": gradient["w"]},
])  # fmt: skip
def test_what_correct_returns_is_like_the_gradient(wrong):
    client = plain(correct=lambda gradient, weights, message: wrong(gradient))
    with pytest.raises(ValueError, match=r"^what correct returned = .*: must be like the gradient"):
        job(client, jax.random.key(0), 2)
