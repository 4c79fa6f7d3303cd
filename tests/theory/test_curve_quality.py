"""Estimates of Q and D on known curves and losses, and the probe in a run of AsyncCurve."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings, simulate, theory
from fedjax_async.config.problem import data_of, model_of
from fedjax_async.geometry import line
from fedjax_async.notices import NeverSwitched

A, PHI, E = (jnp.asarray(point) for point in ([0.0, 0.0], [1.0, 3.0], [2.0, 0.0]))
S = np.array([0.1, 0.5, 1.0])


def loss(params):
    return 1.0 + jnp.sum(jnp.square(params))


def test_quality_and_divergence_are_those_of_numpy():
    curve = np.stack([2 * S * (1 - S) * 1.0 + S**2 * 2.0, 2 * S * (1 - S) * 3.0], axis=1)
    want = (1 + (2 * S) ** 2) / (1 + np.sum(curve**2, axis=1))
    np.testing.assert_allclose(theory.quality(loss, (A, PHI, E), S), want, rtol=1e-5)
    np.testing.assert_allclose(theory.divergence((A, PHI, E), S), np.linalg.norm(curve, axis=1) / (2 * S), rtol=1e-5)


def test_a_control_point_at_the_midpoint_gives_one():
    points = (A, line(A, E, 0.5), E)
    np.testing.assert_allclose(theory.quality(loss, points, S), 1.0, rtol=1e-6)
    np.testing.assert_allclose(theory.divergence(points, S), 1.0, rtol=1e-6)


@pytest.mark.slow
def test_a_run_of_asynccurve_has_the_columns():
    settings = Settings(
        method="asynccurve", model="logistic", clients=3, updates=4, steps=2, eval_examples=20, partition="iid"
    )
    data = data_of(settings)
    probe = theory.curve_probe(model_of(settings, data), part="train", grid=2)
    with pytest.warns(NeverSwitched):  # OrthoDyn, in four updates
        run = simulate(settings, probes={"curve": probe})
    assert run.counters["phase_changes"] == 0 and not run.updates["correction_phase"].any()
    table = run.probes["curve"]
    assert np.isfinite(table["quality"]).all() and (table["quality"] > 0).all()
    assert (table["divergence"] >= 1 - 1e-5).all()  # the curve bends orthogonally to its chord
    np.testing.assert_array_equal(table["staleness"], run.updates["staleness"])
    for part in ("test", "validation"):
        allowed = rf"must be left out, given with {part}_fraction > 0, or made for .*: no client has a {part} part"
        with pytest.raises(ValueError, match=rf"probes\['curve'\] = 'of {part} parts': {allowed}"):
            simulate(settings, probes={"curve": theory.curve_probe(model_of(settings, data), part=part)})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"position": 0.0}, "position = 0.0"), ({"grid": 0}, "grid = 0"), ({"part": "exam"}, "part = 'exam'")],
)
def test_bad_options_are_named(options, message):
    settings = Settings(model="logistic", updates=1)
    model = model_of(settings, data_of(settings))
    with pytest.raises(ValueError, match=message):
        theory.curve_probe(model, **options)
