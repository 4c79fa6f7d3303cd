"""The antisymmetry of real local training against dense Jacobians of ``local.run_job`` and NumPy, and its probe."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_async import Settings, simulate
from fedjax_async.compress import sign
from fedjax_async.config import prepare
from fedjax_async.local import batch, curve_training, feedback, job_key, local_training, run_job
from fedjax_async.local.batches import seed_of
from fedjax_async.models import MODELS, NEED_WEIGHTS, OF_TEXT, decoded, make
from fedjax_async.theory import curl_probe, local_displacement, training_curl
from fedjax_async.theory.vector_fields import estimate_mean_curl
from fedjax_async.types import ClientData, Message, Model
from tests.engine.problem import MODEL, SIZES, data
from tests.refusals import refusals

SETTING = {"method": "fedavg", "clients": len(SIZES), "batch_size": 4, "server_steps": 3, "lr": 0.2}
DIM = 66  # parameters of MODEL; with as many pairs estimates are exact
BIG = {"lenet5_orthofl", "lenet5_cifar", "cnn", "alexnet", "vgg11", "resnet18", "resnet18_1d", "mobilenetv2"}

pytestmark = pytest.mark.float64


def relative(matrix):
    return np.linalg.norm(matrix - matrix.T) / np.linalg.norm(matrix + matrix.T)


def mean_curl(field, x, pairs, key):
    """The curl of a single client's field."""
    return estimate_mean_curl(key, lambda _, x: field(x), jnp.ones(1), x, pairs=pairs).mean


def part(who, client):
    return ClientData(*map(jnp.asarray, (who.x, who.y, who.order, who.offset[client], who.size[client])))


def dense(experiment, params, number, steps):
    """The Jacobian of each client's displacement, through the engine's own loop of any length; [N, D, D]."""
    client = experiment.components.client(experiment.components.hyper)
    flat, unravel = ravel_pytree(params)

    def moved(v, own, key, steps):
        upload, _ = run_job(client, key, Message(unravel(v)), (), own, steps)
        return -ravel_pytree(upload)[0]

    jacobian = jax.jit(jax.jacfwd(moved))
    who = experiment.components.data
    keys = [job_key(experiment.key, client, number) for client in range(len(who.size))]
    return np.stack([jacobian(flat, part(who, c), key, jnp.int32(k)) for c, (key, k) in enumerate(zip(keys, steps))])


@pytest.mark.slow_cases("changes0-steps0-0-examples")
@pytest.mark.parametrize(
    ("changes", "steps", "number", "weighting"),
    [
        ({"epochs": 2.0}, [6, 2, 8, 4, 2], 0, "examples"),
        (
            {"steps": 3, "optimizer": "sgd:momentum=0.5", "server_steps": 9}
            | {"method": "fedprox:proximal=0.3@participation"},  # jobs of several rounds
            [6, 3, 6, 3, 12],
            2,
            "uniform",
        ),
    ],
)
def test_it_equals_the_dense_jacobians_of_the_engines_jobs(changes, steps, number, weighting):
    experiment = prepare(Settings(**SETTING | changes), data=data(), model=MODEL)
    found = training_curl(jax.random.key(0), experiment, pairs=DIM, number=number, weighting=weighting)
    jacobians = dense(experiment, experiment.params, number, steps)
    np.testing.assert_allclose(found.parts.value, [relative(each) for each in jacobians], rtol=1e-7)
    weights = np.array(SIZES, float) if weighting == "examples" else np.ones(5)
    mean = np.tensordot(weights / weights.sum(), jacobians, 1)
    np.testing.assert_allclose(found.mean.value, relative(mean), rtol=1e-7)
    assert found.mean.value > 1e-3 and not np.any(found.parts.standard_error)


@pytest.mark.parametrize("batch_size", [5, 12])
def test_minibatches_of_a_quadratic_loss_as_numpy_multiplies_them(batch_size):
    """``I - V`` has the Jacobian ``I - prod_k (I - gamma H_k)``, H_k the Hessian of the k-th minibatch.

    Whole shards are conservative: their Hessians are equal.
    """
    gamma, key, dim, steps, rows = 0.1, jax.random.key(3), 4, 5, 12
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((rows, dim)), rng.standard_normal(rows)
    model = Model(lambda key: jnp.zeros(dim), lambda w, x, key=None: x @ w, lambda out, y: (out - y) ** 2 / 2)
    own = ClientData(*map(jnp.asarray, (x, y, np.arange(rows, dtype=np.int32), np.int32(0), np.int32(rows))))
    product = np.eye(dim)
    for k in range(steps):
        position, mask = jax.jit(batch, static_argnums=3)(seed_of(key), jnp.int32(k), own.size, batch_size)
        chosen = x[np.asarray(position)[np.asarray(mask)]]
        product = (np.eye(dim) - gamma * chosen.T @ chosen / len(chosen)) @ product
    client = local_training(model, optimizer=optax.sgd(gamma), batch_size=batch_size)
    field = local_displacement(client, key, Message(jnp.ones(dim)), own, steps)
    found = jax.jit(lambda x: mean_curl(field, x, dim, jax.random.key(0)))(jnp.ones(dim)).value
    np.testing.assert_allclose(found, relative(np.eye(dim) - product), atol=1e-12)
    assert found < 1e-12 if batch_size == 12 else found > 1e-3


@pytest.mark.parametrize(("batch_size", "order"), [(4, 1), (13, 2)])
def test_it_grows_linearly_in_the_learning_rate_with_the_square_for_whole_shards(batch_size, order):
    params, own = MODEL.init(jax.random.key(1)), part(data(), 2)  # 13 examples

    def at(gamma):
        client = local_training(MODEL, optimizer=optax.sgd(gamma), batch_size=batch_size)
        field = local_displacement(client, jax.random.key(3), Message(params), own, 4)
        return mean_curl(field, params, DIM, jax.random.key(0)).value

    values = jax.jit(jax.vmap(at))(jnp.array([0.002, 0.001, 0.0005]))
    np.testing.assert_allclose(values[:-1] / values[1:], 2**order, rtol=0.03)


def test_the_probe_measures_the_field_of_the_run_at_the_servers_model():
    """At the last arrival, which is not applied yet, it is the model of a shorter run."""
    setting = SETTING | {"epochs": 1.0, "engine": "reference"}
    given = {"data": data(), "model": MODEL}
    experiment = prepare(Settings(**setting), **given)
    probe = curl_probe(experiment, pairs=DIM)
    run = simulate(**given, **setting, probes={"curl": probe})
    before = simulate(**given, **setting | {"server_steps": 2})
    seen = run.probes["curl"]
    expected = training_curl(jax.random.key(1), experiment, before.params, pairs=DIM)
    np.testing.assert_allclose(seen["server"][-1], expected.mean.value, rtol=1e-6)
    np.testing.assert_allclose(seen["clients"][-1], expected.parts.value.mean(), rtol=1e-6)
    assert seen["server"][0] != seen["server"][-1] and not seen["server_error"].any()
    # new directions for clients that arrive at the same time
    setting = SETTING | {"server_steps": 1, "steps": 2, "delay": "constant"}
    probe = curl_probe(prepare(Settings(**setting), **given), clients=[2], pairs=2)
    seen = simulate(**given, **setting, probes={"curl": probe}).probes["curl"]
    assert len(set(seen["time"])) == 1 and len(set(seen["server"])) == len(SIZES)


def shapes(name):
    """Trace the estimate for a model of the registry, with derivatives in both directions; nothing is computed."""
    small = name in ("logistic", "linear", "mlp", "lenet5")
    shape = (128, 9) if name == "resnet18_1d" else ((28, 28, 1) if small else (32, 32, 3))
    shape = (6,) if name in OF_TEXT else shape
    model = make(name, num_classes=None if name == "linear" else 4, input_shape=shape)
    labels = jax.ShapeDtypeStruct(
        (8, *(shape if name in OF_TEXT else ())), jnp.float32 if name == "linear" else jnp.int32
    )
    client = local_training(decoded(model, lambda x: x), optimizer=optax.sgd(0.1), batch_size=4)

    def measured(key, params, x, y):
        own = ClientData(x, y, jnp.arange(8, dtype=jnp.int32), jnp.int32(0), jnp.int32(8))
        field = local_displacement(client, key, Message(params), own, 2)
        point = params if model.train is None else {"params": params["params"]}
        return mean_curl(field, point, 2, key)

    with jax.enable_x64(False):
        params = jax.eval_shape(model.init, jax.random.key(0))
        x = jax.ShapeDtypeStruct((8, *shape), jnp.float32)
        return jax.eval_shape(measured, jax.random.key(0), params, x, labels)


@pytest.mark.slow_cases(*BIG, "char_transformer", "lenet5")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NEED_WEIGHTS])
def test_every_model_can_be_differentiated_in_both_directions(name):
    assert shapes(name).value.shape == ()


def test_uploads_that_are_no_change_of_the_weights_are_refused():
    params, own = MODEL.init(jax.random.key(1)), part(data(), 0)
    curve = curve_training(MODEL, optimizer=optax.adam(0.1), batch_size=4, warm="off")
    signs = feedback(local_training(MODEL, optimizer=optax.sgd(0.1), batch_size=4), sign())  # constants: no derivative
    for client, message in ((curve, "upload = .* a change of the message's params"), (signs, "'compressed'")):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(local_displacement(client, jax.random.key(0), Message(params), own, 2), params)


OUT_OF_RANGE = [
    ({"clients": [5]}, "clients = 5"),
    ({"clients": []}, "clients = "),
    ({"number": -1}, "number = -1"),
    ({"weighting": "size"}, "weighting = 'size'"),
    ({"pairs": 1}, "pairs = 1"),
]
FUNCTIONS = (curl_probe, partial(training_curl, jax.random.key(0)))
test_bad_input = refusals(
    *((function, *case) for function in FUNCTIONS for case in OUT_OF_RANGE),
    by=lambda function, options: function(prepare(Settings(**SETTING, steps=1), data=data(), model=MODEL), **options),
)
