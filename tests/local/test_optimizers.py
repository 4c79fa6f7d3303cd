"""Named optimisers and decays against their formulas."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.base import factories, tree
from fedjax_async.local import DECAYS, OPTIMIZERS
from tests.geometry.textbook import lift, lorentz_exp, lorentz_product
from tests.local import textbook
from tests.refusals import refusals

GRADIENTS = np.random.default_rng(0).normal(size=(6, 5))
CLIPPED = GRADIENTS * np.minimum(1, 1.5 / np.linalg.norm(GRADIENTS, axis=1, keepdims=True))
START = np.random.default_rng(1).normal(size=5)


def descend(optimizer):
    optimizer = optax.with_extra_args_support(optimizer)
    params, state = {"w": jnp.asarray(START)}, optimizer.init({"w": jnp.asarray(START)})

    def step(carry, g):
        # of a linear function, so that sharpness-aware optimisers find the same gradient nearby
        return tree.optimize(optimizer, {"w": g}, carry[1], carry[0], grad_fn=lambda w, _: {"w": g}), None

    (params, _), _ = jax.lax.scan(step, (params, state), jnp.asarray(GRADIENTS))
    return params["w"]


def momentum_sgd(lr, momentum=0.0, nesterov=False, weight_decay=0.0):
    given = [lambda w, g=g: g for g in GRADIENTS]
    return textbook.sgd(START, given, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def along_geodesics(lr, beta=1.0):
    """In R^(D+1): the gradient (0, g) of a function of the space part, made tangent in the Lorentz product."""
    w = START
    for g in GRADIENTS:
        point, slope = lift(w, beta), np.concatenate([[0.0], g])
        tangent = slope + lorentz_product(point, slope) / beta * point
        w = lorentz_exp(w, -lr * tangent[1:], beta)
    return w


OPTIMISED = [
    ("riemannian_sgd", {}, along_geodesics(0.1)), ("riemannian_sgd", {"beta": 3.0}, along_geodesics(0.1, 3.0)),
    ("sgd", {}, momentum_sgd(0.1)), ("sgd", {"momentum": 0.9}, momentum_sgd(0.1, 0.9)),
    ("sgd", {"momentum": 0.9, "nesterov": True}, momentum_sgd(0.1, 0.9, True)),
    ("sgd", {"momentum": 0.5, "weight_decay": 0.2}, momentum_sgd(0.1, 0.5, weight_decay=0.2)),
    ("adam", {}, textbook.adam(START, GRADIENTS, lr=0.1)),
    ("adam", {"b1": 0.5, "b2": 0.9, "eps": 0.1}, textbook.adam(START, GRADIENTS, lr=0.1, b1=0.5, b2=0.9, eps=0.1)),
    ("adamw", {}, textbook.adam(START, GRADIENTS, lr=0.1, weight_decay=1e-4)),
    ("adamw", {"weight_decay": 0.3}, textbook.adam(START, GRADIENTS, lr=0.1, weight_decay=0.3)),
    ("adamw", {"clip": 1.5}, textbook.adam(START, CLIPPED, lr=0.1, weight_decay=1e-4)),
    ("riemannian_sgd", {"manifold": "euclidean"}, momentum_sgd(0.1)),
]  # fmt: skip


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options", "expected"), OPTIMISED)
def test_optimisers_are_their_formulas_and_numbers_may_be_traced(name, options, expected):
    np.testing.assert_allclose(descend(OPTIMIZERS[name](0.1, **options)), expected, rtol=1e-9)
    if {"nesterov", "clip", "manifold"} & options.keys():
        return
    values = {key: jnp.asarray([value, value / 2]) for key, value in {"lr": 0.1, **options}.items()}
    found = jax.jit(jax.vmap(lambda values: descend(OPTIMIZERS[name](**values))))(values)
    np.testing.assert_allclose(found[0], expected, rtol=1e-9)
    assert np.abs(found[1] - expected).max() > 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_take_the_learning_rate_first(name):
    parameters = list(inspect.signature(OPTIMIZERS[name]).parameters.values())
    assert parameters[0].name == "lr" and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
    assert len(factories.options_of(OPTIMIZERS[name])) == len(parameters) - 1
    assert factories.summary(OPTIMIZERS[name]).endswith(".")
    schedule = OPTIMIZERS[name](lambda count: 0.1 * 0.5**count)  # any optax schedule is a learning rate
    assert np.all(np.isfinite(descend(schedule)))


BELOW_1 = [-0.1, 1.0, "much"]
BAD = [
    *[(name, "lr", value) for name in OPTIMIZERS for value in (0, -1.0, float("nan"), "fast", None)],
    *[("sgd", "momentum", value) for value in BELOW_1],
    *[(name, "weight_decay", value) for name in ("sgd", "adamw") for value in (-0.1, float("inf"))],
    *[(name, field, value) for name in ("adam", "adamw") for field in ("b1", "b2") for value in BELOW_1],
    *[(name, "eps", value) for name in ("adam", "adamw") for value in (0, -1e-8)],
    ("adamw", "clip", 0), ("riemannian_sgd", "beta", 0.0), ("riemannian_sgd", "beta", "much"),
]  # fmt: skip
test_bad_optimiser_options_are_refused = refusals(
    *((OPTIMIZERS[name], {"lr": 0.1, field: value}, rf"^{field} = .*: must be ") for name, field, value in BAD),
    (OPTIMIZERS["riemannian_sgd"], {"lr": 0.1, "manifold": "sphere"}, "^manifold = 'sphere': unknown"),
    (
        OPTIMIZERS["riemannian_sgd"],
        {"lr": 0.1, "manifold": "euclidean", "beta": 1.0},
        "^beta = 1.0: must be left out",
    ),
    (DECAYS["exponential"], {"rate": 0}, "^rate = 0: must be a finite number > 0$"),
    (DECAYS["exponential"], {"every": 0}, "^every = 0: must be a whole number from 1 to 2147483647$"),
    (DECAYS["cosine"], {"steps": 2**31}, "^steps = 2147483648: must be a whole number from 1 to "),
    (DECAYS["cosine"], {"steps": 0}, "^steps = 0: must be a whole number from 1 to 2147483647$"),
    (DECAYS["cosine"], {"floor": 1.5}, "^floor = 1.5: must be between 0.0 and 1.0$"),
    (DECAYS["warmup"], {"steps": 0.5}, "^steps = 0.5: must be a whole number from 1 to 2147483647$"),
    (DECAYS["linear"], {"floor": -1}, "^floor = -1: must be between 0.0 and 1.0$"),
    by=lambda make, options: make(**options),
)


@pytest.mark.float64
def test_a_riemannian_step_takes_its_rate_from_a_schedule():
    rates = 0.1 * 0.5 ** np.arange(len(GRADIENTS))
    w = START
    for rate, g in zip(rates, GRADIENTS, strict=True):
        w = lorentz_exp(w, -rate * (g + w * (w @ g)))
    found = descend(OPTIMIZERS["riemannian_sgd"](lambda count: 0.1 * 0.5**count))
    np.testing.assert_allclose(found, w, rtol=1e-9)


VERSIONS = np.array([0, 1, 5, 10, 40, 1000])
FORMULAS = {
    "exponential": ({"rate": 0.9, "every": 4}, 0.9 ** (VERSIONS / 4)),
    "cosine": ({"steps": 40, "floor": 0.2}, 0.2 + 0.8 * (1 + np.cos(np.pi * np.minimum(VERSIONS / 40, 1))) / 2),
    "warmup": ({"steps": 10}, np.minimum(1.0, (VERSIONS + 1) / 10)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_decays_by_version_are_their_formulas(name):
    """For a version that is an int32 tracer, or a plain int as in ``Message``'s default."""
    options, expected = FORMULAS[name]
    with jax.enable_x64(True):
        decay = DECAYS[name](**options)
        found = jax.jit(jax.vmap(decay))(jnp.asarray(VERSIONS, jnp.int32))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(decay(5), expected[2], rtol=1e-12)
    assert DECAYS[name]()(jnp.int32(3)).dtype == jnp.float32


def test_constant_is_no_decay_and_the_linear_one_begins_full_in_each_job():
    assert DECAYS["constant"]() is None and set(DECAYS) == {"constant", "linear", *FORMULAS}
    factor = DECAYS["linear"](floor=0.25).factor
    np.testing.assert_allclose(factor(jnp.arange(4), jnp.int32(4)), [1, 13 / 16, 10 / 16, 7 / 16], rtol=1e-6)
    np.testing.assert_allclose(DECAYS["linear"]().factor(jnp.arange(2), jnp.int32(2)), [1, 0.5])


@pytest.mark.parametrize(("kind", "size"), [(jnp.bfloat16, 10), (jnp.float16, 5e4)])  # squares beyond float16
def test_gradients_of_16_bits_are_shortened_to_a_traced_length(kind, size):
    def step(clip):
        optimizer, params = OPTIMIZERS["adamw"](0.1, clip=clip, eps=1.0), {"w": jnp.ones(2, kind)}
        return tree.optimize(optimizer, {"w": size * params["w"]}, optimizer.init(params), params)[0]["w"]

    moved = 1 - jax.jit(step)(jnp.float32(2**0.5)).astype(float)  # the gradient is then (1, 1)
    np.testing.assert_allclose(moved, 0.1 * 1 / (1 + 1.0), rtol=0.05)
