"""Section 3 and appendix A of Charles and Rush in float64 at many points, and the clients of appendix C."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.theory.fedavg_dynamics import orbit, server_field, server_iterates
from fedjax_async.theory.field_examples import EXAMPLES, closed_orbit, cubic, cubic_condition, linear, rotation
from fedjax_async.theory.surrogate import surrogate_loss
from fedjax_async.theory.vector_fields import antisymmetric_part, curl, iterate

POINTS = np.random.default_rng(0).uniform(-1, 1, (200, 2))

pytestmark = pytest.mark.float64


def at(function, points=POINTS):
    """A function's values at points, compiled."""
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(function))(jnp.asarray(points)))


def largest_curls(field, orders, points=POINTS):
    """The largest curl of each ``V^k`` itself, without an identity that could hide it."""
    found = at(lambda x: jnp.stack([curl(iterate(field, k), x) for k in orders], axis=-1), points)
    return dict(zip(orders, found.max(axis=0)))


@pytest.mark.slow_cases("cubic_monomial")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_k_conservative_where_it_says(name):
    """And the gradient of its potential, if it is 1-conservative."""
    example = EXAMPLES[name]
    shape = jax.eval_shape(example.field, jax.ShapeDtypeStruct((example.dim,), "float32"))
    assert (shape.shape, shape.dtype) == ((example.dim,), "float32") and example.name == name and example.source
    assert (example.potential is not None) == example.conservative(1)
    if example.potential is not None:
        field, slope = at(lambda x: (example.field(x), jax.grad(example.potential)(x)), POINTS[:20])
        np.testing.assert_allclose(field, slope, rtol=1e-13)
    towers = name.startswith("exponential")  # an exponential of exponentials overflows soon, even from -4
    known = [k for k in range(1, 4) if example.conservative(k) is not None]
    assert 1 in known
    if name == "even_powers":  # appendix A.1
        assert [example.conservative(k) for k in range(1, 5)] == [False, True, False, True]
    worst_of = largest_curls(example.field, known[:2] if towers else known)
    worst_of |= largest_curls(example.field, known[2:], POINTS - 3) if towers and known[2:] else {}
    for k, worst in worst_of.items():
        assert worst < 1e-10 if example.conservative(k) else worst > 1e-2, (k, worst)


def test_the_polynomials_of_linear_fields():
    """Appendix A.1, up to its sign, for 500 matrices; symmetric fields are not closed under composition."""
    a, b, c, d = matrices = np.random.default_rng(1).uniform(-2, 2, (4, 500))
    expected = [
        b - c,
        (b - c) * (a + d),
        (b - c) * (a**2 + a * d + b * c + d**2),
        (b - c) * (a + d) * (a**2 + 2 * b * c + d**2),
    ]

    def entries(rows):
        return jnp.stack([antisymmetric_part(lambda x: rows @ x, k, jnp.ones(2))[0, 1] for k in range(1, 5)])

    np.testing.assert_allclose(at(entries, matrices.T.reshape(-1, 2, 2)).T, expected, atol=1e-12)
    product, x = np.array([[0, 1], [1, 0]]) @ np.array([[1, 0], [0, -1]]), np.array([0.3, -0.7])
    one = matrices[:, 0].reshape(2, 2)
    for example, rows in ((EXAMPLES["product_of_symmetric"], product), (linear("test", one), one)):
        np.testing.assert_allclose(example.field(jnp.asarray(x)), rows @ x)


@pytest.mark.parametrize("j", [1, 2, 3, 6])
def test_a_rotation_by_pi_over_j_is_k_conservative_if_j_divides_k(j):
    field, orders = rotation(j).field, range(1, 2 * j + 2)
    entries = at(lambda x: [antisymmetric_part(field, k, x)[0, 1] for k in orders], POINTS[:1])
    for k, entry in zip(orders, np.abs(entries)):
        np.testing.assert_allclose(entry, abs(2 * np.sin(k * np.pi / j)), atol=1e-13)
        assert (entry.max() < 1e-12) == (k % j == 0) == rotation(j).conservative(k)


def test_the_squares_that_are_printed():
    """Section 3, (grad x^2 y)^2 with the cross derivatives 4 x^3 and 8 x y^2; section 3.1, the sum of exponentials.

    It is not 2-conservative, though each part is k-conservative for all k.
    """
    x, y = POINTS.T
    cubed = EXAMPLES["cubic_monomial"].field
    square, entry = at(lambda p: (iterate(cubed, 2)(p), antisymmetric_part(cubed, 2, p)[0, 1]))
    np.testing.assert_allclose(square, np.stack([4 * x**3 * y, 4 * x**2 * y**2], axis=1), atol=1e-14)
    np.testing.assert_allclose(entry, 4 * x**3 - 8 * x * y**2, atol=1e-14)
    square = at(iterate(EXAMPLES["exponential_sum"].field, 2))
    first = np.exp(np.exp(x) + np.exp(x + y)) + np.exp(np.exp(x) + 2 * np.exp(x + y))
    np.testing.assert_allclose(square, np.stack([first, np.exp(np.exp(x) + 2 * np.exp(x + y))], axis=1), rtol=1e-12)
    assert largest_curls(EXAMPLES["exponential_sum"].field, [2])[2] > 0.1
    for part in (lambda x: jnp.exp(x[0]), lambda x: jnp.exp(x[0] + x[1])):
        # three nested exponentials: the largest values have few digits left
        assert max(largest_curls(lambda x, part=part: 0.1 * jax.grad(part)(x), [1, 2, 3]).values()) < 1e-10


def test_the_polynomials_of_cubic_forms():
    """Appendix A.2: D_2 = g (-4 b x^3 + 4 (3 a - 2 c) x^2 y + 4 (2 b - 3 d) x y^2 + 4 c y^3), for 500 forms."""
    forms = np.random.default_rng(2).uniform(-2, 2, (500, 4))
    a, b, c, d = forms.T[:, :, None]
    x, y = POINTS.T
    g = cubic_condition(a, b, c, d)
    expected = 4 * g * (-b * x**3 + (3 * a - 2 * c) * x**2 * y + (2 * b - 3 * d) * x * y**2 + c * y**3)

    def entries(form):
        field = cubic("test", *form).field
        return jax.vmap(lambda x: antisymmetric_part(field, 2, x)[0, 1])(jnp.asarray(POINTS))

    np.testing.assert_allclose(at(entries, forms), expected, atol=1e-10)


WHOLE = [each for each in itertools.product(range(-4, 5), repeat=4) if cubic_condition(*each) == 0 and any(each)]


def test_cubic_forms_that_are_2_conservative_are_so_for_all_k_and_not_closed_under_addition():
    """The paper has k = 3 only."""
    forms = jnp.asarray(WHOLE[:: len(WHOLE) // 6], float)

    def curls(form):
        field = cubic("test", *form).field
        return jax.vmap(lambda x: jnp.stack([curl(iterate(field, k), x) for k in (1, 2, 3, 5)]))(jnp.asarray(POINTS))

    assert at(curls, forms).max() < 1e-9
    assert cubic_condition(1, 0, 0, 0) == cubic_condition(1, 3, 3, 1) == 0  # x^3 and (x + y)^3
    assert cubic_condition(2, 3, 3, 1) != 0


# --- appendix C ---------------------------------------------------------------------------------

ORBIT = closed_orbit()


def test_regions_and_server_field_of_the_closed_orbit():
    """Eq. 16 and the true mean field, in NumPy: each client goes to the centre of its region, or stays."""
    points = np.r_[np.random.default_rng(1).uniform(-3, 3, (2000, 2)), [[9.0, 9.0]]]
    centres, weights = np.array([(1, 1), (-1, -1), (-1, 1), (1, -1)]), np.array([(5, 0.05)] * 2 + [(0.05, 5)] * 2)
    inside = np.sum(weights / 2 * (points[:, None] - centres) ** 2, axis=-1) < 1
    one, two, three, four = inside.T
    assert not np.any(one & two) and not np.any(three & four)
    assert all(np.any(first & second) for first, second in itertools.product((one, two), (three, four)))
    ends = [points + inside[:, k : k + 2] @ centres[k : k + 2] for k in (0, 2)]
    ends = [end - points * np.any(inside[:, k : k + 2], axis=1)[:, None] for end, k in zip(ends, (0, 2))]
    regions, field = at(lambda x: (ORBIT.regions(x), ORBIT.server_field(x)), points)
    np.testing.assert_array_equal(regions, inside)
    np.testing.assert_allclose(field, points - np.mean(ends, axis=0), atol=1e-15)
    assert not field[-1].any()  # far away nothing moves


def test_erratum_equation_17_has_the_other_sign_and_lacks_one_half():
    """In region I alone the printed row is (1 - x, 1 - y); the mean displacement is half of it."""
    x = jnp.array([0.9, 2.0])
    assert list(ORBIT.regions(x)) == [True, False, False, False]
    np.testing.assert_allclose(ORBIT.server_field(x), -0.5 * (1 - np.asarray(x)), atol=1e-15)
    both = jnp.array([1.0, 0.9])  # I and III: the printed row is (-x, 1 - y), and only the sign differs
    assert list(ORBIT.regions(both)) == [True, False, True, False]
    np.testing.assert_allclose(ORBIT.server_field(both), [1.0, -0.1], atol=1e-15)


def test_the_closed_orbit_has_period_8_and_a_longer_one_with_smaller_server_learning_rates():
    """Also with gradient descent on the losses themselves, 1,500 steps: 0.9805^1500 = 1e-13."""
    start = jnp.array([0.0, 1.0])
    found = jax.jit(lambda x: orbit(ORBIT.server_field, x, server_steps=40))(start)
    assert (int(found.period), int(found.start)) == (ORBIT.period, 0) == (8, 0)
    np.testing.assert_allclose(found.points[:8], ORBIT.points, atol=1e-15)
    printed = [(0, 1), (-0.5, 1), (-1, 0), (-1, -0.5), (0, -1), (0.5, -1), (1, 0), (1, 0.5)]
    np.testing.assert_array_equal(ORBIT.points, printed)
    field = server_field(ORBIT.losses, gamma=0.39, k=1500)
    found = jax.jit(lambda x: orbit(field, x, server_steps=24, tol=1e-9))(start)
    assert int(found.period) == 8
    np.testing.assert_allclose(found.points[:8], ORBIT.points, atol=1e-10)
    period = jax.jit(lambda x, lr: orbit(ORBIT.server_field, x, lr=lr, server_steps=1200).period)
    assert [int(period(start, lr)) for lr in (0.75, 0.1)] == [12, 100]


def test_the_field_of_the_closed_orbit_has_no_surrogate():
    """The line integral once round the orbit is far from 0, although start and end are the same."""
    corners = [jnp.array(point) for point in (*ORBIT.points, ORBIT.points[0])]
    integral = jax.jit(lambda x, x0: surrogate_loss(ORBIT.server_field, x, x0, nodes=200))
    assert sum(integral(b, a).value for a, b in itertools.pairwise(corners)) < -3.5
    assert integral(corners[2], corners[0]).error > 0.05


def test_momentum_and_adagrad_do_not_converge_there_either():
    start = jnp.array([0.0, 1.0])
    for optimizer in (optax.sgd(0.5, 0.3), optax.adagrad(0.5)):
        points = np.asarray(jax.jit(lambda x, o=optimizer: server_iterates(ORBIT.server_field, x, o, 300))(start))
        assert np.linalg.norm(np.diff(points[-50:], axis=0), axis=1).max() > 0.01
