"""Landscapes: grids, paths and barriers of known losses, and learned curves against Adam in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import geometry, theory
from fedjax_async.models import MODELS
from fedjax_async.types import Model
from tests.local.textbook import Adam
from tests.refusals import refusals

START, END = ({"w": jnp.asarray(values)} for values in ([-1.0, 0.0], [1.0, 0.0]))
S = np.linspace(0.0, 1.0, 21)


def quadratic(params, centre):
    return jnp.sum(jnp.square(params["w"] - centre))


def drawn(measure):
    """A measure as a loss that needs no key."""
    return lambda params, key, *data: measure(params, *data)


def test_a_surface_is_the_measure_at_each_point():
    plane = geometry.plane(START, END, {"w": jnp.asarray([0.0, 2.0])})  # x and y are w's entries, x from -1 on
    x, y = np.linspace(0.0, 2.0, 5), np.linspace(-1.0, 1.0, 3)
    centre = np.array([0.5, -0.25], np.float32)
    found = theory.loss_surface(quadratic, plane, x, y, (centre,), batch=4)
    want = (x[None, :] - 1.5) ** 2 + (y[:, None] + 0.25) ** 2
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_paths_and_their_barriers_are_those_of_a_known_quadratic():
    centre = np.array([0.0, 0.0], np.float32)
    loss = theory.loss_along(quadratic, (START, END), S, (centre,))
    np.testing.assert_allclose(loss, (2 * S - 1) ** 2, atol=1e-6)
    assert theory.barrier(S, loss) == 0.0  # convex: never above its chord
    assert theory.barrier(S, -loss) == pytest.approx(1.0, abs=1e-6)  # concave: 0 in the middle, -1 at the ends
    middle = geometry.line(START, END, 0.5)
    curve = theory.loss_along(quadratic, (START, middle, END), S, (centre,))
    np.testing.assert_allclose(curve, loss, atol=1e-6)  # with the control point at the midpoint it is the line
    assert np.isnan(theory.barrier([0.0, 0.5, 1.0], [1.0, np.nan, 1.0]))


@pytest.mark.float64
def test_the_control_point_is_that_of_adam_in_numpy():
    steps, lr, centre = 20, 0.05, np.array([0.3, 1.0])
    key = jax.random.key(3)
    ends = [{"w": jnp.asarray(each["w"], jnp.float64)} for each in (START, END)]
    found, losses = theory.learned_control_point(drawn(quadratic), *ends, key, (centre,), steps=steps, lr=lr)
    draws = [float(jax.random.uniform(jax.random.split(one)[0])) for one in jax.random.split(key, steps)]
    a, e = (np.asarray(each["w"], np.float64) for each in (START, END))
    phi, adam, want = (a + e) / 2, Adam(lr), []
    for s in draws:
        point = (1 - s) ** 2 * a + 2 * s * (1 - s) * phi + s**2 * e
        want.append(float(np.sum((point - centre) ** 2)))
        slope = 2 * s * (1 - s) * 2 * (point - centre)
        phi = adam.step(phi, slope)
    np.testing.assert_allclose(found["w"], phi, rtol=1e-10)
    np.testing.assert_allclose(losses, want, rtol=1e-10)
    control, losses = theory.learned_control_point(drawn(quadratic), *ends, key, (centre,), steps=0)
    assert losses.shape == (0,) and not np.any(control["w"]), "at the midpoint"


def test_a_learned_curve_goes_around_a_hill():
    def hill(params):
        return jnp.exp(-4.0 * jnp.sum(jnp.square(params["w"])))

    end = {"w": jnp.asarray([1.0, 0.2])}  # not symmetric: on the line the slope points to one side
    control, _ = theory.learned_control_point(drawn(hill), START, end, jax.random.key(0), steps=200, lr=0.05)
    line, curve = (theory.loss_along(hill, points, S) for points in ((START, end), (START, control, end)))
    assert theory.barrier(S, curve) < 0.2 and theory.barrier(S, line) > 0.9


def test_scores_are_means_over_the_examples_and_programs_are_shared():
    model = MODELS["logistic"](input_shape=(3,), num_classes=4)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)).astype(np.float32), rng.integers(0, 4, 30).astype(np.int32)
    params = model.init(jax.random.key(0))
    measure = theory.scores(model, 30)
    assert measure is theory.scores(model, 30) and theory.batch_loss(model) is theory.batch_loss(model)
    other = jax.tree.map(jnp.ones_like, params)
    found = theory.loss_along(measure, (params, other), np.array([0.0, 1.0]), (x, y))
    for index, each in enumerate((params, other)):
        outputs = np.asarray(model.apply(each, x), np.float64)
        chosen = np.log(np.sum(np.exp(outputs), axis=-1)) - outputs[np.arange(30), y]
        assert found["loss"][index] == pytest.approx(chosen.mean(), rel=1e-5)
        assert found["accuracy"][index] == pytest.approx(np.mean(np.argmax(outputs, -1) == y))


def test_a_model_with_running_statistics_learns_as_in_training():
    def normalised(params, x, key, mask):
        mean = jnp.sum(x * mask[:, None], axis=0, keepdims=True) / jnp.sum(mask)
        return (x - mean) @ params["w"], {**params, "mean": x[0]}

    def fails(params, x, key=None):
        raise AssertionError("with running statistics, outputs are those of training")

    model = Model(lambda key: {}, fails, lambda outputs, y: jnp.square(outputs - y), normalised)
    ends = [
        {"w": jnp.asarray([0.0, 1.0]), "mean": jnp.asarray([1.0, 1.0])},
        {"w": jnp.asarray([2.0, 0.0]), "mean": jnp.asarray([3.0, 5.0])},
    ]
    data = (jnp.asarray([[0.0, 0.0], [1.0, 2.0], [-1.0, 1.0]]), jnp.asarray([0.0, 1.0, 1.0]))
    loss = theory.batch_loss(model, 4)
    control, _ = theory.learned_control_point(loss, *ends, jax.random.key(0), data, steps=5, lr=0.1)
    np.testing.assert_array_equal(control["mean"], [2.0, 3.0])  # the statistics stay on the line
    assert np.abs(np.asarray(control["w"]) - [1.0, 0.5]).min() > 0.01


test_bad_arguments_are_named = refusals(
    (lambda: theory.barrier([0.0, 1.0], [1.0]), r"loss.shape = \(1,\): must be that of s, \(2,\)"),
    (lambda: theory.barrier([0.0, 0.9], [1.0, 1.0]), "s = '2 positions': must be positions from 0 to 1"),
    (lambda: theory.loss_along(quadratic, (START, END), 0.5), r"s.shape = \(\)"),
    (lambda: theory.loss_along(quadratic, (START, END), S, batch=0), "batch = 0"),
    (lambda: theory.learned_control_point(drawn, START, END, jax.random.key(0), steps=-1), "steps = -1: must"),
    (lambda: theory.learned_control_point(drawn, START, END, jax.random.key(0), lr=0.0), "lr = 0.0: must be"),
)
