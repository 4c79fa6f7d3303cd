"""AsyncManifold's bound, as printed and as its proof gives it, a run below it, and estimates of Q and D."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import Settings, simulate, theory
from fedjax_async.base.notices import NeverSwitched
from fedjax_async.config import prepare
from fedjax_async.geometry import line
from fedjax_async.local import Curve
from fedjax_async.models import MODELS
from fedjax_async.theory import (
    ManifoldConstants,
    fedasync_bound,
    largest_lr_manifold,
    manifold_bound,
    manifold_rate,
    quality,
    quality_term,
)
from fedjax_async.types import Arrival, ClientData, DataParts
from tests.refusals import refusals

SOME = ManifoldConstants(
    first=3.0, least=0.5, lowest=0.6, highest=3.5, server_steps=100.0, local_steps=4, lr=0.02, server_lr=0.5,
    smoothness=2.0, gradient=1.5, variance=0.7, staleness=3.0, quality=1.1, divergence=1.2, mu=0.3,
    proximal_smoothness=1.4, curvature=0.2, penalised_gradient=1.7,
)  # fmt: skip


def test_eq_69_as_printed_by_hand():
    got = manifold_bound(SOME, printed=True)
    a_d = 2.0**2 * (1 + 3.0**2 * 1.2**2 * 0.5**2) * (4 * 1.5**2 + 0.7) + 0.3**2 * 1.4**2 * 1.5**2
    a_gamma = 1.7**4 * 0.2**2 * (1 + 0.02**2 * 1.7**2)
    want = [
        (3.0 - 0.5) / (100 * 4 * 0.5 * 0.02),
        (1 - 1.1) * 0.6 / (4 * 0.5 * 0.02),
        0.5 * 2.0 * 4 * 0.02 * (4 * 1.5**2 + 0.7),
        0.02**2 * 4**2 * a_d,
        0.02**2 * a_gamma,
    ]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert got.total == pytest.approx(sum(want))


def test_theorem_1_as_printed_by_hand_and_the_powers_of_t():
    """The first term falls as one over the root of T, not as printed."""
    noisy = 4 * 1.5**2 + 0.7
    want = [
        (3.0 - 1.1 * 0.5) / 1000, (1 - 1.1) * 0.6 * 10, noisy / 10,
        ((1 + 3.0**2 * 1.2**2) * noisy + 1.5**2) / 100, 1.7**4 * 0.2**2 / 100 + 1.7**6 * 0.2**2 / 100**2,
    ]  # fmt: skip
    np.testing.assert_allclose(manifold_rate(SOME, printed=True), want, rtol=1e-12)
    ends = [SOME._replace(server_steps=steps) for steps in (1e4, 1e8)]
    for printed, first in ((True, -1.5), (False, -0.5)):
        low, high = (np.array(manifold_rate(end, printed=printed)[:4]) for end in ends)
        np.testing.assert_allclose(np.log(high / low) / np.log(1e4), [first, 0.5, -0.5, -1.0], rtol=1e-6)


losses = st.lists(st.floats(0.0, 10.0), min_size=2, max_size=8)


@given(loss=losses, quality=st.floats(0.2, 3.0))
def test_the_sum_of_losses_is_bounded_as_in_eq_69(loss, quality):
    steps, least = len(loss) - 1, min(loss)
    summed = sum(a - quality * b for a, b in itertools.pairwise(loss))
    after = loss[1:]
    psi = quality_term(SOME._replace(quality=quality, lowest=min(after), highest=max(after)))
    assert summed <= loss[0] - least + steps * psi + 1e-9
    assert summed <= loss[0] - quality * least + (steps - 1) * psi + 1e-9
    # Theorem 1's first terms are too small for a good curve, here for a loss that is always 1
    psi = quality_term(SOME._replace(quality=2.0, lowest=1.0, highest=1.0))
    assert steps * (1.0 - 2.0) > 1.0 - 2.0 * 1.0 + steps * psi


def test_the_noise_of_clients_enters_the_proximal_term():
    quiet = SOME._replace(smoothness=1e-9, gradient=0.0)
    assert manifold_bound(quiet, printed=True).drift == pytest.approx(0.0, abs=1e-12)
    want = 5 * (4 * 0.02) ** 2 * 0.3**2 * 1.4**2 * 0.7  # 2 / K of K mu^2 L_N^2 / 2 times the drift 5 K^2 eta^2 sigma^2
    assert manifold_bound(quiet).drift == pytest.approx(want)


@settings(max_examples=15)
@given(steps=st.integers(1, 40), lr=st.floats(1e-3, 1.0), variance=st.floats(0.1, 10.0), seed=st.integers(0, 99))
def test_eq_66_as_printed_is_below_the_drift_of_noise_alone(steps, lr, variance, seed):
    """Clients without gradient walk at random, with ``k eta^2 sigma^2`` after k steps; eq. 66 prints 4 G^2 = 0."""
    walk = np.cumsum(np.random.default_rng(seed).choice([-1.0, 1.0], size=(4000, steps)), axis=1)
    drift = lr**2 * variance * np.concatenate([[0.0], np.mean(walk**2, axis=0)])[:steps]  # of Theta_k, k = 0 .. K - 1
    np.testing.assert_allclose(drift, lr**2 * variance * np.arange(steps), rtol=0.25)
    c = SOME._replace(smoothness=1e-9, gradient=0.0, lr=lr, variance=variance, local_steps=steps)
    of_prox = (c.mu * c.proximal_smoothness) ** 2 / 2 * drift.sum()  # the term of mu in eq. 65
    assert manifold_bound(c, printed=True, beyond=True).drift <= 1e-12 < of_prox + (steps == 1)
    assert of_prox <= steps / 2 * manifold_bound(c, beyond=True).drift


@pytest.mark.parametrize("steps", [2, 3, 5, 10, 100, 1000])
def test_the_drift_is_within_eq_63_in_spite_of_the_term_that_eq_61_drops(steps):
    growth, drift = 1 + 1 / (steps - 1) + 1 / steps, 0.0
    for _ in range(steps):
        drift = growth * drift + steps  # eq. 60 at the largest eta_l mu L_N = 1 / K; unit of eta_l^2 (4 G^2 + sigma^2)
    c = SOME._replace(smoothness=1e-9, curvature=0.0, lr=1.0, mu=1.0, proximal_smoothness=1 / steps, local_steps=steps)
    assert drift * (4 * 1.5**2 + 0.7) / steps**2 <= manifold_bound(c).drift  # 2 / K of K / 2 of the drift


points = st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=2)


@pytest.mark.float64
@settings(max_examples=5)
@given(end=points, control=points, centre=points, floor=st.floats(0.01, 2.0))
def test_assumption_6_on_the_whole_curve_allows_no_q_above_one(end, control, centre, floor):
    """Erratum A9: curve and line meet at both ends, where a positive loss is equal on both."""
    a, phi, e, c = (jnp.asarray(point, float) for point in ([0.0, 0.0], control, end, centre))
    along = np.asarray(quality(lambda x: floor + jnp.sum(jnp.square(x - c)), (a, phi, e), np.linspace(0, 1, 9)))
    np.testing.assert_allclose(along[[0, -1]], 1.0, rtol=1e-9)


def test_at_the_position_of_the_step_q_may_be_above_one():
    """A curve round a hill: Q > 1 wherever a step can end."""
    points = tuple(jnp.asarray(point) for point in ([-1.0, 0.0], [0.0, 3.0], [1.0, 0.0]))
    along = quality(lambda x: 0.1 + jnp.exp(-2 * jnp.sum(jnp.square(x))), points, np.linspace(0, 1, 9)[1:-1])
    assert along.min() > 1.05 and along.max() > 3


# --- curved ambient manifolds -----------------------------------------------------------------------


def on_sphere(x, v, radius):
    """The exponential map of the sphere around 0, whose second fundamental form has the norm 1 / radius."""
    size = np.linalg.norm(v)
    if size == 0 or radius == np.inf:
        return x + v
    return np.cos(size / radius) * x + radius * np.sin(size / radius) * v / size


def tangent(x, radius=1.0):
    """The projection on the tangent space of the sphere at x; of no sphere if the radius is infinite."""
    return np.eye(len(x)) - (np.outer(x, x) / (x @ x) if radius < np.inf else 0)


def test_the_printed_theorem_fails_on_a_circle():
    """At the minimum of ``|x - (2, 0)|^2 / 2`` on the unit circle the gradient has length 1; its tangent part is 0."""
    centre, x, steps, lr = np.array([2.0, 0.0]), np.array([0.0, 1.0]), 4000, 0.02
    squares, own = [], []
    for _ in range(steps):
        gradient = x - centre
        squares.append(gradient @ gradient)
        own.append(np.sum((tangent(x) @ gradient) ** 2))
        x = on_sphere(x, -lr * tangent(x) @ gradient, 1.0)
    constants = ManifoldConstants(
        first=2.5, least=0.5, lowest=0.5, highest=2.5, server_steps=steps, local_steps=1, lr=lr, server_lr=1.0,
        smoothness=1.0, gradient=3.0, variance=0.0, curvature=1.0, penalised_gradient=3.0,
    )  # fmt: skip
    assert np.mean(own) < 0.1 and np.mean(own) <= manifold_bound(constants).total
    small = constants._replace(server_steps=1e12, lr=1e-5)  # the path stays on the circle, where the length is >= 1
    assert min(squares) >= 1 - 1e-9 > 100 * manifold_bound(small, printed=True).total


@pytest.mark.parametrize("radius", [1.0, 0.5, 2.0, np.inf])
@pytest.mark.parametrize(("local_steps", "lr", "late"), [(1, 0.1, 0), (3, 0.05, 1), (5, 0.02, 3)])
def test_an_asynchronous_run_stays_below_the_bound(local_steps, lr, late, radius):
    """``L_i = |x - c_i|^2 / 2`` on a sphere or in space; updates are ``late`` steps old; the clients take turns.

    The server steps along the geodesic of the projected displacement.
    """
    centres, server_lr, steps = np.array([[1.0, 0.0, 0.5], [-0.5, 2.0, 0.0]]), 0.8, 80
    sphere = radius < np.inf
    models = [np.array([0.0, -radius if sphere else -2.0, 0.0])]
    for step in range(steps):
        start = local = models[max(0, step - late)]
        for _ in range(local_steps):
            local = on_sphere(local, -lr * tangent(local, radius) @ (local - centres[step % 2]), radius)
        now = models[-1]
        models.append(on_sphere(now, server_lr * tangent(now, radius) @ (local - start), radius))
    mean, points = centres.mean(axis=0), np.array(models)
    loss = np.mean([np.sum((points - c) ** 2, axis=1) / 2 for c in centres], axis=0)
    gradient = max(np.linalg.norm(points - c, axis=1).max() for c in centres)
    best = mean * radius / np.linalg.norm(mean) if sphere else mean
    if sphere:
        gradient = max(np.linalg.norm(c) for c in centres) + radius  # of every point of the sphere
    constants = ManifoldConstants(
        first=loss[0], least=np.mean(np.sum((best - centres) ** 2, axis=1)) / 2, lowest=loss[1:].min(),
        highest=loss[1:].max(), server_steps=steps, local_steps=local_steps, lr=lr, server_lr=server_lr, smoothness=1.0,
        gradient=gradient, variance=0.0, staleness=late, curvature=1 / radius, penalised_gradient=gradient,
    )  # fmt: skip
    bound, flat = manifold_bound(constants), fedasync_bound(constants._replace(quality=0.5, divergence=9.0))
    squares = np.mean([np.sum((tangent(x, radius) @ (x - mean)) ** 2) for x in points[:-1]])
    assert loss.min() >= constants.least - 1e-9 and 0 < squares <= bound.total
    assert bound.quality == flat.quality == flat.curvature == 0
    assert bound.total > flat.total if sphere else bound == flat


def test_curvature_enters_by_the_smoothness_and_a_term_of_its_own():
    curved, as_flat = manifold_bound(SOME), manifold_bound(SOME._replace(curvature=0.0, smoothness=2.0 + 0.2 * 1.5))
    assert curved._replace(curvature=0.0) == pytest.approx(as_flat)
    assert curved.curvature == pytest.approx(0.02**2 * 0.2**2 * 1.7**4 / 2)


def test_learning_rates_at_which_the_drift_is_not_bounded_are_refused():
    c = SOME._replace(lr=largest_lr_manifold(SOME))
    assert c.lr == pytest.approx(1 / (0.3 * 1.4 * 4))
    assert manifold_bound(c).total > 0 and manifold_bound(c._replace(lr=9.0, mu=0.0)).total > 0
    with pytest.raises(ValueError, match=r"^lr = 0\.65.*: must be at most 0\.595238, the largest that eq\. 63 admits"):
        manifold_bound(c._replace(lr=1.1 * c.lr))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({field: -1.0}, f"{field} = -1") for field in ("server_steps", "lr", "quality", "variance", "mu")),
        ({"server_steps": np.array([10.0, 0.0])}, r"server_steps\[1\] = 0\.0: must be a finite number > 0"),
        ({"gradient": jnp.array([[1.0], [-2.0]])}, r"gradient\[1, 0\] = -2\.0: must be a finite number >= 0"),
        ({"first": np.array([3.0, np.nan])}, r"first\[1\] = nan: must be a finite number$"),
        ({"quality": np.float64(0.0)}, r"quality = 0\.0: must be a finite number > 0"),
        ({"lr": "0.1"}, r"lr = '0\.1': must be a finite number > 0"),
        ({"lowest": 4.0}, r"lowest = 4\.0: must be at most highest, 3\.5"),
        ({"server_steps": np.ones(2), "lr": np.ones(3)}, r"shapes = \{'server_steps': \(2,\), 'lr': \(3,\)\}: must be"),
    ],
)
def test_constants_out_of_range_are_named_number_by_number(change, message):
    for bound in (manifold_bound, manifold_rate, fedasync_bound):
        if bound is manifold_bound or not {"lr", "quality"} & change.keys():  # which the others set
            with pytest.raises(ValueError, match=message):
                bound(SOME._replace(**change))
    with pytest.raises(ValueError, match="mu = 0"):
        manifold_rate(SOME._replace(mu=0.0))


def test_constants_may_be_arrays_and_tracers():
    steps = np.array([10.0, 100.0])
    at_once = manifold_bound(SOME._replace(server_steps=steps))
    traced = jax.jit(lambda t: manifold_bound(SOME._replace(server_steps=t)).total)
    for k, t in enumerate(steps):
        one = manifold_bound(SOME._replace(server_steps=t)).total
        assert at_once.total[k] == pytest.approx(one) and float(traced(t)) == pytest.approx(one, rel=1e-5)
    mu, total = SOME.mu, lambda mu: manifold_bound(SOME._replace(mu=mu)).total
    slope = (total(1.01 * mu) - total(0.99 * mu)) / (0.02 * mu)
    assert float(jax.grad(total)(mu)) == pytest.approx(slope, rel=1e-3)


# --- Q and D of curves ------------------------------------------------------------------------------

A, PHI, E = (jnp.asarray(point) for point in ([0.0, 0.0], [1.0, 3.0], [2.0, 0.0]))
S = np.array([0.1, 0.5, 1.0])


def loss(params):
    return 1.0 + jnp.sum(jnp.square(params))


def test_quality_and_divergence_are_those_of_numpy():
    curve = np.stack([2 * S * (1 - S) * 1.0 + S**2 * 2.0, 2 * S * (1 - S) * 3.0], axis=1)
    want = (1 + (2 * S) ** 2) / (1 + np.sum(curve**2, axis=1)), np.linalg.norm(curve, axis=1) / (2 * S)
    # at the midpoint: the line
    for control, (of_loss, of_length), rtol in ((PHI, want, 1e-5), (line(A, E, 0.5), (1.0, 1.0), 1e-6)):
        np.testing.assert_allclose(quality(loss, (A, control, E), S), of_loss, rtol=rtol)
        np.testing.assert_allclose(theory.divergence((A, control, E), S), of_length, rtol=rtol)


CURVE = Settings(
    method="asynccurve", model="logistic", clients=3, updates=4, steps=2, eval_examples=20, partition="iid"
)


def test_a_probe_measures_quality_on_decoded_rows():
    experiment = prepare(CURVE)
    who, start = experiment.components.data, experiment.params
    change = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), start)
    offset = jax.tree.map(lambda leaf: 0.5 * leaf[::-1], change)
    rows = who.order[who.offset[1] : who.offset[1] + 20]
    part = ClientData(*map(jnp.asarray, (who.x, who.y, who.order, who.offset[1], np.int32(20))))
    arrival = Arrival(Curve(change, offset), start, jnp.int32(2), *[jnp.int32(0)] * 4, jnp.bool_(True))
    probe = theory.curve_probe(experiment, part="train", grid=1)
    found = jax.jit(lambda: probe((), (), arrival, DataParts(part, part, part)))()

    def of_inputs(params):
        model = MODELS["logistic"]()
        return jnp.mean(model.loss(model.apply(params, who.decode(jnp.asarray(who.x[rows]))), who.y[rows]))

    end = jax.tree.map(jnp.add, start, change)
    points = (start, jax.tree.map(jnp.add, line(start, end, 0.5), offset), end)
    np.testing.assert_allclose(found["quality"], quality(of_inputs, points, [0.5])[0], rtol=1e-5)
    assert who.x.dtype == np.uint8 and found["staleness"] == 2


@pytest.mark.slow
def test_a_run_of_asynccurve_has_the_columns():
    experiment = prepare(CURVE)
    probe = theory.curve_probe(experiment, part="train", grid=2)
    with pytest.warns(NeverSwitched):  # OrthoDyn, in four updates
        run = simulate(CURVE, probes={"curve": probe})
    assert run.counters["phase_changes"] == 0 and not run.updates["correction_phase"].any()
    table = run.probes["curve"]
    assert np.isfinite(table["quality"]).all() and (table["quality"] > 0).all()
    assert (table["divergence"] >= 1 - 1e-5).all()  # the curve bends orthogonally to its chord
    np.testing.assert_array_equal(table["staleness"], run.updates["staleness"])
    for part in ("test", "validation"):
        allowed = rf"must be left out, given with {part}_fraction > 0, or made for .*: no client has a {part} part"
        with pytest.raises(ValueError, match=rf"probes\['curve'\] = 'of {part} parts': {allowed}"):
            simulate(CURVE, probes={"curve": theory.curve_probe(experiment, part=part)})


test_bad_options_are_named = refusals(
    ({"position": 0.0}, "position = 0.0"),
    ({"grid": 0}, "grid = 0"),
    ({"part": "exam"}, "part = 'exam'"),
    ({"experiment": MODELS["logistic"]()}, r"^experiment = .*: must be that of config.prepare\(settings\)"),
    by=lambda options: theory.curve_probe(**{"experiment": prepare(CURVE)} | options),
)
