"""FedAvg's field, optimisers on it, orbits, and the surrogate loss as a line integral."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.theory.fedavg_dynamics import mean_displacement, orbit, server_field, server_iterates
from fedjax_async.theory.surrogate import surrogate_loss
from tests.refusals import refusals
from tests.server import textbook

pytestmark = pytest.mark.float64


def logistic_losses(orthogonal, clients=3):
    """Clients' logistic losses on trees {"w": [2, 2], "b": [1]}, with features that are orthogonal or not."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((clients, 5, 5))
    if orthogonal:
        features = np.linalg.qr(features)[0] * np.array([1.0, 2.0, 0.5, 1.5, 1.0])[:, None]

    def loss(rows, x):
        flat = jnp.concatenate([x["w"].reshape(-1), x["b"]])
        return jnp.sum(jax.nn.softplus(-(jnp.asarray(rows) @ flat)))

    return [partial(loss, rows) for rows in features]


def random_trees(count):
    values = jnp.asarray(np.random.default_rng(1).standard_normal((count, 5)))
    return [{"w": each[:4].reshape(2, 2), "b": each[4:]} for each in values]


def test_the_server_field_is_the_mean_of_hand_written_local_training():
    """Eq. 2, and one round of eq. 3 is the mean of the clients' models; ``mean_displacement`` takes any map."""
    field = mean_displacement([lambda x: 0.5 * x, lambda x: x + 1], k=2)
    np.testing.assert_allclose(field(jnp.float64(4)), (3 - 2) / 2)
    losses = logistic_losses(orthogonal=False)
    (x,) = random_trees(1)
    models = []
    for loss in losses:
        local, slope = x, jax.jit(jax.grad(loss))
        for _ in range(4):
            local = jax.tree.map(lambda w, g: w - 0.3 * np.asarray(g), local, slope(local))
        models.append(local)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *models)
    after = jax.tree.map(lambda w, v: w - v, x, jax.jit(server_field(losses, 0.3, 4))(x))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-13), after, mean)


# --- surrogate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_surrogate_depends_on_the_path_where_the_field_is_not_conservative(orthogonal):
    field = server_field(logistic_losses(orthogonal), 0.3, 5)
    end, start, *corners = random_trees(6)
    direct = jax.jit(lambda: surrogate_loss(field, end, start))()
    integral = jax.jit(lambda via: surrogate_loss(field, end, start, via=via))
    errors = [direct.error, *(integral(corner).error for corner in corners)]
    assert abs(direct.value) > 0.1
    assert max(errors) < 1e-8 if orthogonal else min(errors[0], np.median(errors[1:])) > 1e-4


def test_the_gradient_of_the_surrogate_is_the_field():
    field = server_field(logistic_losses(orthogonal=True), 0.3, 3)
    x, x0 = random_trees(2)
    found = jax.jit(jax.grad(lambda x: surrogate_loss(field, x, x0).value))(x)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-8), found, field(x))


def test_the_surrogate_of_known_fields():
    """n nodes are exact for degree 2 n - 1, n - 1 nodes are not; the error is curl times area."""

    def field(x):
        return jax.grad(lambda x: x[0] ** 3 * x[1] ** 3)(x)  # degree 5

    end, start = jnp.array([1.5, -0.5]), jnp.array([0.2, 1.0])
    three, two = (surrogate_loss(field, end, start, nodes=nodes) for nodes in (3, 2))
    np.testing.assert_allclose(three.value, 1.5**3 * (-0.5) ** 3 - 0.2**3, rtol=1e-13)
    assert three.error < 1e-14 and two.error > 1e-3
    # curl 2 everywhere; the triangle over a base of length L has area L^2 / 4
    turned = surrogate_loss(lambda x: jnp.stack([-x[1], x[0]]), jnp.array([3.0, 4.0]), jnp.zeros(2))
    np.testing.assert_allclose(turned, (0, 2 * 25 / 4), rtol=1e-12, atol=1e-14)
    one = surrogate_loss(jnp.cos, jnp.array([2.0]), jnp.array([0.5]))
    np.testing.assert_allclose(one, (np.sin(2) - np.sin(0.5), 0), rtol=1e-13, atol=1e-14)
    none = surrogate_loss(jnp.cos, jnp.ones(3), jnp.ones(3))
    assert none.value == none.error == 0


def test_dtypes_of_surrogate_and_iterates():
    dtype = "float32"
    x = jnp.ones(3, dtype)
    field = server_field([lambda x: jnp.sum(x**4)], 0.01, 3)
    assert {each.dtype for each in jax.jit(lambda x: surrogate_loss(field, x, 0 * x))(x)} == {jnp.dtype(dtype)}
    for optimizer in (optax.sgd(1.0), optax.sgd(0.5, 0.9), optax.adagrad(0.1), optax.adam(0.1)):
        assert server_iterates(field, x, optimizer, 2).dtype == dtype


# --- optimisers and orbits ----------------------------------------------------------------------


def test_optimisers_follow_their_formulas():
    """FedAvg, FedAvgM and FedAdagrad against NumPy on a linear field."""
    matrix = np.array([[1.0, 0.3], [0.3, 0.5]])
    start, eta, m = np.array([1.0, -2.0]), 0.4, 0.6
    rules = {
        "fedavg": (optax.sgd(eta), (textbook.add(-eta), None)),
        "fedavgm": (optax.sgd(eta, m), textbook.momentum(-eta, m)),
        "fedadagrad": (optax.adagrad(eta, initial_accumulator_value=0.0), textbook.adagrad(-eta, 1e-7, 0.0)),
    }
    for name, (optimizer, (step, first)) in rules.items():
        points, state = [start], first
        for _ in range(6):
            point, state = step(points[-1], matrix @ points[-1], state)
            points.append(point)
        found = server_iterates(lambda x: jnp.asarray(matrix) @ x, jnp.asarray(start), optimizer, 6)
        np.testing.assert_allclose(found, points, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-6), ("float32", 1e6), ("float64", 1.0)])
def test_an_orbit_finds_the_period_at_any_scale(dtype, scale):
    """A rotation by 2 pi / period."""

    @jax.jit
    def found(angle):
        turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
        return orbit(lambda x: x - turn @ x, jnp.asarray([scale, 0.5 * scale], dtype), server_steps=20)

    for period in (1, 2, 3, 5, 8):
        cycle = found(jnp.asarray(2 * np.pi / period, dtype))
        assert (int(cycle.period), int(cycle.start)) == (period, 0)
    assert int(found(jnp.asarray(2 * np.pi / 8 * 1.001, dtype)).period) == 0


def orbit_of(field, x, server_steps, **options):
    """Points, period and start of an orbit, compiled as a whole."""
    found = jax.jit(lambda x: orbit(field, x, server_steps=server_steps, **options))(x)
    return found.points, (int(found.period), int(found.start))


def test_orbits_with_a_cycle_from_some_step_on_and_without_one():
    """7 6 5 4 3 2 1 0 2 1 0 2 ...: the cycle starts at step 5."""
    points, cycle = orbit_of(lambda x: x - jnp.where(x > 0, x - 1, 2 * jnp.ones_like(x)), jnp.array([7.0]), 30)
    np.testing.assert_array_equal(points[:9, 0], [7, 6, 5, 4, 3, 2, 1, 0, 2])
    assert cycle == (3, 5)
    assert orbit_of(jnp.ones_like, jnp.zeros(2), 15)[1] == (0, 0)
    assert orbit_of(lambda x: -jnp.square(x), jnp.array([3.0]), 30)[1][0] == 0, "it overflows"
    points, cycle = orbit_of(lambda x: {"x": 0.5 * x["x"]}, {"x": jnp.ones(2)}, 60, tol=1e-6)
    np.testing.assert_allclose(points["x"][:3, 0], [1, 0.5, 0.25])
    gap = 2.0 ** -np.arange(61) * np.sqrt(2)  # from x_t to x_{t+1}: half of x_t
    assert cycle == (1, np.argmax(gap / 2 <= 1e-6))
    turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])  # period 4, to be seen twice
    cycles = [orbit_of(lambda x: x - turn @ x, jnp.array([1.0, 0.0]), steps)[1][0] for steps in (6, 7)]
    assert cycles == [0, 4]


X = {"w": jnp.ones(2), "b": jnp.ones(())}


test_bad_input = refusals(
    (lambda: surrogate_loss(lambda x: x, X, X | {"w": jnp.ones(3)}), r"^x0 = .*: must be of the form of x, "),
    (lambda: orbit(lambda x: (x["w"], x["b"]), X), r"^result of the field = .*: must be of the form of its argument, "),
    (lambda: surrogate_loss(lambda x: x["w"], X, X), r"^result of the field = "),
    (lambda: server_field([], 0.1, 1), "number of clients = 0"),
    (lambda: server_field([jnp.sum], 0.1, 0), "k = 0"),
    (lambda: server_field([jnp.sum], -1, 1), "gamma = -1"),
    (lambda: surrogate_loss(jnp.cos, jnp.ones(2), jnp.zeros(2), nodes=0), "nodes = 0"),
    (lambda: orbit(jnp.cos, jnp.ones(2), lr=0), "lr = 0"),
    (lambda: orbit(jnp.cos, jnp.ones(2), server_steps=0), "server_steps = 0"),
    (lambda: orbit(jnp.cos, jnp.ones(2), tol=-1.0), "tol = -1"),
)
