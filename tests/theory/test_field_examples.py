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


def off_diagonal(field, k, points=POINTS):
    """The entry (1, 2) of D_k(V) at each point: what appendix A calls D_k."""
    return at(lambda x: antisymmetric_part(field, k, x)[0, 1], points)


def largest_curls(field, orders, points=POINTS):
    """The largest curl of each ``V^k`` itself, without an identity that could hide it."""
    found = at(lambda x: jnp.stack([curl(iterate(field, k), x) for k in orders], axis=-1), points)
    return dict(zip(orders, found.max(axis=0)))


@pytest.mark.slow_cases("cubic_monomial")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_k_conservative_where_it_says(name):
    example = EXAMPLES[name]
    towers = name.startswith("exponential")  # an exponential of exponentials overflows soon, even from -4
    known = [k for k in range(1, 4) if example.conservative(k) is not None]
    assert 1 in known
    if name == "even_powers":  # appendix A.1
        assert [example.conservative(k) for k in range(1, 5)] == [False, True, False, True]
    worst_of = largest_curls(example.field, known[:2] if towers else known)
    worst_of |= largest_curls(example.field, known[2:], POINTS - 3) if towers and known[2:] else {}
    for k, worst in worst_of.items():
        assert worst < 1e-10 if example.conservative(k) else worst > 1e-2, (k, worst)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_gradient_of_its_potential(name):
    example = EXAMPLES[name]
    assert (example.potential is not None) == example.conservative(1)
    if example.potential is not None:
        field, slope = at(lambda x: (example.field(x), jax.grad(example.potential)(x)), POINTS[:20])
        np.testing.assert_allclose(field, slope, rtol=1e-13)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_shape_and_dtype(name):
    example = EXAMPLES[name]
    shape = jax.eval_shape(example.field, jax.ShapeDtypeStruct((example.dim,), "float32"))
    assert (shape.shape, shape.dtype) == ((example.dim,), "float32")
    assert example.name == name and example.source


def test_the_polynomials_of_linear_fields():
    """Appendix A.1, up to its sign, for 500 matrices."""
    a, b, c, d = matrices = np.random.default_rng(1).uniform(-2, 2, (4, 500))
    expected = [
        b - c,
        (b - c) * (a + d),
        (b - c) * (a**2 + a * d + b * c + d**2),
        (b - c) * (a + d) * (a**2 + 2 * b * c + d**2),
    ]

    def entries(field):
        return jnp.stack([antisymmetric_part(field, k, jnp.ones(2))[0, 1] for k in range(1, len(expected) + 1)])

    found = at(lambda rows: entries(lambda x: rows @ x), matrices.T.reshape(-1, 2, 2))
    np.testing.assert_allclose(found.T, expected, atol=1e-12)
    field = linear("test", [[a[0], b[0]], [c[0], d[0]]]).field
    np.testing.assert_allclose(jax.jit(lambda: entries(field))(), found[0], atol=1e-12)


@pytest.mark.parametrize("j", [1, 2, 3, 6])
def test_a_rotation_by_pi_over_j_is_k_conservative_if_j_divides_k(j):
    field, orders = rotation(j).field, range(1, 2 * j + 2)
    entries = at(lambda x: [antisymmetric_part(field, k, x)[0, 1] for k in orders], POINTS[:1])
    for k, entry in zip(orders, np.abs(entries)):
        np.testing.assert_allclose(entry, abs(2 * np.sin(k * np.pi / j)), atol=1e-13)
        assert (entry.max() < 1e-12) == (k % j == 0) == rotation(j).conservative(k)


def test_symmetric_linear_fields_are_not_closed_under_composition():
    one, other = np.array([[0, 1], [1, 0]]), np.array([[1, 0], [0, -1]])
    field = EXAMPLES["product_of_symmetric"].field
    for x in POINTS[:5]:
        np.testing.assert_allclose(field(jnp.asarray(x)), one @ other @ x)


def test_the_cubic_monomial():
    """Section 3: (grad x^2 y)^2 = (4 x^3 y, 4 x^2 y^2), with the cross derivatives 4 x^3 and 8 x y^2."""
    field = EXAMPLES["cubic_monomial"].field
    x, y = POINTS.T
    square = at(iterate(field, 2))
    np.testing.assert_allclose(square, np.stack([4 * x**3 * y, 4 * x**2 * y**2], axis=1), atol=1e-14)
    np.testing.assert_allclose(off_diagonal(field, 2), 4 * x**3 - 8 * x * y**2, atol=1e-14)


def test_the_sum_of_exponentials():
    """Section 3.1: the square as printed; not 2-conservative, though each part is k-conservative for all k."""
    x, y = POINTS.T
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

    found = jax.jit(jax.vmap(entries))(jnp.asarray(forms))
    np.testing.assert_allclose(found, expected, atol=1e-10)


WHOLE = [each for each in itertools.product(range(-4, 5), repeat=4) if cubic_condition(*each) == 0 and any(each)]


def test_the_condition_of_cubic_forms_is_met_by_sums_of_orthogonal_cubes():
    """Beyond the paper: l <x, u>^3 + m <x, v>^3 with orthogonal u, v meets g = 0, and the converse.

    g does not change under rotation. Rotate f's largest value on the circle to (1, 0): there b = 0, a > 0 and
    c <= 3 a / 2, so that g = c (3 a - c) = 0 leaves c = 0, the sum of two cubes. Checked on all small whole solutions.
    """
    assert len(WHOLE) > 100
    angles = np.linspace(0, 2 * np.pi, 20_001)
    cos, sin = np.cos(angles), np.sin(angles)
    for a, b, c, d in WHOLE:
        values = a * cos**3 + b * cos**2 * sin + c * cos * sin**2 + d * sin**3
        top = np.argmax(values)
        u, v = np.array([cos[top], sin[top]]), np.array([-sin[top], cos[top]])
        at_v = a * v[0] ** 3 + b * v[0] ** 2 * v[1] + c * v[0] * v[1] ** 2 + d * v[1] ** 3
        x, y = POINTS.T
        cubes = values[top] * (POINTS @ u) ** 3 + at_v * (POINTS @ v) ** 3
        np.testing.assert_allclose(cubes, a * x**3 + b * x**2 * y + c * x * y**2 + d * y**3, atol=0.02)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_cubic_forms_that_are_2_conservative_are_so_for_all_k(k):
    """The paper has k = 3 only."""
    forms = jnp.asarray(WHOLE[:: len(WHOLE) // 6], float)

    def curls(form):
        return jax.vmap(lambda x: curl(iterate(cubic("test", *form).field, k), x))(jnp.asarray(POINTS))

    assert at(curls, forms).max() < 1e-9


def test_cubic_forms_that_are_2_conservative_are_not_closed_under_addition():
    assert cubic_condition(1, 0, 0, 0) == cubic_condition(1, 3, 3, 1) == 0  # x^3 and (x + y)^3
    assert cubic_condition(2, 3, 3, 1) != 0


# --- appendix C ---------------------------------------------------------------------------------

ORBIT = closed_orbit()


def in_words(x, y):
    """The regions of eq. 16 and the true mean field at one point, in NumPy."""

    def square(alpha, beta, xc, yc):
        return alpha / 2 * (y - yc) ** 2 + beta / 2 * (x - xc) ** 2

    inside = [square(0.05, 5, 1, 1), square(0.05, 5, -1, -1), square(5, 0.05, -1, 1), square(5, 0.05, 1, -1)]
    inside = [each < 1 for each in inside]
    first = (1, 1) if inside[0] else ((-1, -1) if inside[1] else (x, y))
    second = (-1, 1) if inside[2] else ((1, -1) if inside[3] else (x, y))
    return inside, (x - (first[0] + second[0]) / 2, y - (first[1] + second[1]) / 2)


def test_regions_and_server_field_of_the_closed_orbit():
    points = np.r_[np.random.default_rng(1).uniform(-3, 3, (2000, 2)), [[9.0, 9.0]]]
    regions, field = at(lambda x: (ORBIT.regions(x), ORBIT.server_field(x)), points)
    for i, (x, y) in enumerate(points):
        inside, expected = in_words(x, y)
        np.testing.assert_array_equal(regions[i], inside)
        np.testing.assert_allclose(field[i], expected, atol=1e-15)
    assert not field[-1].any()  # far away nothing moves
    one, two, three, four = regions.T
    assert not np.any(one & two) and not np.any(three & four)
    for first, second in itertools.product((one, two), (three, four)):
        assert np.any(first & second)


def test_erratum_equation_17_has_the_other_sign_and_lacks_one_half():
    """In region I alone the printed row is (1 - x, 1 - y); the mean displacement is half of it."""
    x = jnp.array([0.9, 2.0])
    assert list(ORBIT.regions(x)) == [True, False, False, False]
    np.testing.assert_allclose(ORBIT.server_field(x), -0.5 * (1 - np.asarray(x)), atol=1e-15)
    both = jnp.array([1.0, 0.9])  # I and III: the printed row is (-x, 1 - y), and only the sign differs
    assert list(ORBIT.regions(both)) == [True, False, True, False]
    np.testing.assert_allclose(ORBIT.server_field(both), [1.0, -0.1], atol=1e-15)


def test_the_closed_orbit_has_period_8():
    found = jax.jit(lambda x: orbit(ORBIT.server_field, x, server_steps=40))(jnp.array([0.0, 1.0]))
    assert (int(found.period), int(found.start)) == (ORBIT.period, 0) == (8, 0)
    np.testing.assert_allclose(found.points[:8], ORBIT.points, atol=1e-15)
    printed = [(0, 1), (-0.5, 1), (-1, 0), (-1, -0.5), (0, -1), (0.5, -1), (1, 0), (1, 0.5)]
    np.testing.assert_array_equal(ORBIT.points, printed)


def test_the_period_is_8_with_many_local_steps_in_place_of_convergence():
    """Gradient descent on the losses themselves, 1,500 steps: 0.9805^1500 = 1e-13."""
    field = server_field(ORBIT.losses, gamma=0.39, k=1500)
    found = jax.jit(lambda x: orbit(field, x, server_steps=24, tol=1e-9))(jnp.array([0.0, 1.0]))
    assert int(found.period) == 8
    np.testing.assert_allclose(found.points[:8], ORBIT.points, atol=1e-10)


@pytest.mark.parametrize(("lr", "period"), [(0.75, 12), (0.1, 100)])
def test_smaller_server_learning_rates_have_longer_periods(lr, period):
    found = jax.jit(lambda x: orbit(ORBIT.server_field, x, lr=lr, server_steps=1200))(jnp.array([0.0, 1.0]))
    assert int(found.period) == period


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
