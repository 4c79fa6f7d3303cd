"""The parts of AsyncManifold's experiments: smoothing, phase change, corrections as probes, tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import registry
from fedjax_async.config.methods import method_of
from fedjax_async.local import Curve
from fedjax_async.models import linear
from fedjax_async.server import fedasync
from fedjax_async.server.asynccurve import asynccurve
from fedjax_async.types import Arrival
from tests.experiment import module
from tests.results.made_up import make_run

phases, corrections = (module("asynccurve", name) for name in ("phases", "corrections"))


@pytest.fixture
def study(monkeypatch):
    """The study; the methods that it registers are removed after the test."""
    monkeypatch.setattr(registry, "ADDED", {})
    return module("asynccurve", "study")


# --- smoothing, normalising, averaging --------------------------------------------------------------


def test_smoothing_is_the_truncated_gaussian():
    values = np.random.default_rng(0).normal(size=40)
    got = phases.smoothed(values, sigma=3.0)
    for at in (0, 5, 20, 39):
        near = [j for j in range(40) if abs(j - at) <= 6]
        weights = np.exp([-((j - at) ** 2) / 18 for j in near])
        np.testing.assert_allclose(got[at], weights @ values[near] / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(phases.smoothed(np.full(4, 2.5), sigma=10.0), 2.5)


def test_relative_losses_are_from_best_to_worst_and_averaged_over_runs():
    one = {"a": np.array([1.0, 5.0]), "b": np.array([3.0, 5.0]), "c": np.array([2.0, 5.0])}
    other = {"a": np.array([4.0, 0.0]), "b": np.array([2.0, 1.0])}
    found = phases.normalised(one)
    assert {name: each.tolist() for name, each in found.items()} == {"a": [0, 0], "b": [1, 0], "c": [0.5, 0]}
    mean = phases.relative([one, other], sigma=0.1)
    assert {name: each.tolist() for name, each in mean.items()} == {"a": [0.5, 0], "b": [0.5, 0.5]}


def test_a_phase_change_is_found_where_it_is_and_not_where_it_is_not():
    first, second = np.arange(100.0), np.full(100, 29.5)
    change = phases.phase_change(first, second)
    assert change == (30, 1.0, 1.0, True)
    assert not phases.phase_change(second, first).found, "the other way round"
    assert not phases.phase_change(first, second + 65).found, "the second phase is too short"
    noise = np.random.default_rng(1).normal(size=(2, 100))
    assert not phases.phase_change(*noise).found


def test_the_interval_is_gaussian():
    values = np.random.default_rng(2).normal(1.0, 0.1, 400)
    mean, half = phases.interval(values)
    assert mean == pytest.approx(values.mean()) and half == pytest.approx(2.5758 * values.std(ddof=1) / 20)


# --- corrections as probes --------------------------------------------------------------------------


def vector(seed, scale=1.0):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=6) * scale, jnp.float32)}


def arrival_of(upload, start):
    one = jnp.ones(())
    return Arrival(upload, start, jnp.int32(1), one, jnp.int32(0), one, jnp.bool_(True), jnp.int32(1), ())


def test_proposals_are_where_each_correction_leads():
    start, now, change, offset = (vector(seed) for seed in range(4))
    rule = corrections.observed(fedasync(mixing=0.5))
    state, _ = rule.init(now)
    made = corrections.proposals(now, state, arrival_of(Curve(change, offset), start), 0.25)
    made = {name: np.asarray(each["w"], np.float64) for name, each in made.items()}
    t, x, d, o = (np.asarray(each["w"], np.float64) for each in (start, now, change, offset))
    b = x - t
    orthogonal = d - (d @ b) / (b @ b) * b
    chords = {
        "asgd": d,
        "fedasync": d - b,
        "orthograd": orthogonal if d @ b <= 0 else d,
        "orthopos": orthogonal if d @ b <= 0 else d - b,
        "orthostrict": orthogonal,
        "dc_asgd_a": d - corrections.STRENGTH * d * d * b / np.sqrt(0.05 * d * d + 1e-7),
    }
    for name, chord in chords.items():
        np.testing.assert_allclose(made[name], x + 0.25 * chord, rtol=2e-5, atol=1e-6, err_msg=name)
        if name in corrections.CURVED:
            bend = made[f"{name}, curve"] - made[name]
            np.testing.assert_allclose(bend, 0.375 * o, rtol=2e-4, atol=1e-6, err_msg=name)
            turned = made[f"{name}, rotated curve"] - made[name]
            assert np.linalg.norm(turned) == pytest.approx(0.375 * np.linalg.norm(o), rel=1e-4)
            cosines = [u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v in ((o, d), (turned, chord))]
            assert cosines[0] == pytest.approx(cosines[1], abs=1e-5), "the angle to the chord is kept"
    np.testing.assert_allclose(made["asgd, rotated curve"], made["asgd, curve"], atol=1e-6)
    np.testing.assert_allclose(made["fresh, curve"], t + 0.25 * d + 0.375 * o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["fresh"], t + 0.25 * d, rtol=1e-5, atol=1e-6)


def test_observing_changes_nothing_and_keeps_the_corrections_states():
    plain = fedasync(mixing=0.5)
    seen = corrections.observed(plain)
    now = vector(0)
    (state, memory), (other, none) = plain.init(now), seen.init(now)
    square = np.zeros(6)
    for k in range(3):
        change = vector(k + 1, 0.1)
        arrival = arrival_of(change, now)
        state, memory, _ = plain.receive(state, memory, arrival)
        other, none, _ = seen.receive(other, none, arrival)
        square = 0.95 * square + 0.05 * np.square(np.asarray(change["w"], np.float64))
    np.testing.assert_array_equal(*(np.asarray(r.params(s)["w"]) for r, s in ((plain, state), (seen, other))))
    np.testing.assert_allclose(other.corrections["dc_asgd_a"][0], square, rtol=1e-5)


def test_a_probe_measures_each_proposal_on_each_part():
    model = linear(input_shape=(6,))
    x = np.random.default_rng(5).normal(size=(7, 6)).astype(np.float32)
    y = np.arange(7, dtype=np.float32)
    rule = corrections.observed(fedasync(mixing=0.5))
    now, start, change = vector(0), vector(1), vector(2)
    measured = corrections.probe(rule, model, {"test": (x, y), "train": (x[:3], y[:3])}, 0.5)
    state, memory = rule.init(now)
    found = jax.jit(measured)(state, memory, arrival_of(change, start), ())
    assert set(found) == {"staleness", *(f"{name} | {part}" for name in corrections.ENDS for part in ("test", "train"))}
    w = np.asarray(now["w"], np.float64) + 0.5 * np.asarray(change["w"], np.float64)
    for part, rows in (("test", 7), ("train", 3)):
        loss = np.mean((x[:rows] @ w - y[:rows]) ** 2) / 2
        assert float(found[f"asgd | {part}"]) == pytest.approx(loss, rel=1e-4)


# --- tables -----------------------------------------------------------------------------------------


def test_swing_is_the_mean_change_of_the_second_half(study):
    assert study.swing(np.array([0.0, 0.9, 0.5, 0.6, 0.4, 0.4])) == pytest.approx(0.1)
    assert np.isnan(study.swing(np.array([0.5])))


def test_the_table_of_made_up_runs(study):
    times = [0.0, 3.0, 6.0, 9.0, 12.0]
    slow, fast = [0.1, 0.2, 0.3, 0.5, 0.6], [0.1, 0.5, 0.7, 0.6, 0.7]
    runs = {"fedasync": [make_run(slow, times)] * 2, "new": [make_run(fast, times), make_run(slow, times)]}
    chosen = {name: {"method": name, "method.mixing": 0.4, "lr": 0.03} for name in runs}
    first, second = study.rows_of("mnist", runs, chosen, 0.5)
    assert first["accuracy (%)"].mean == pytest.approx(100 * np.mean(slow[1:]), rel=1e-6)
    assert second["accuracy (%)"].mean == pytest.approx(50 * (np.mean(slow[1:]) + np.mean(fast[1:])), rel=1e-6)
    assert first["minutes to 50 %"].mean == pytest.approx(9 / 60)
    assert second["minutes to 50 %"].mean == pytest.approx((3 + 9) / 2 / 60)
    assert (second["local rate"], second["server rate"], second["seeds"]) == (0.03, 0.4, 2)
    missed, one_of_two = study.rows_of("mnist", runs, chosen, 0.65)
    reached = [str(row["minutes to 65 %"]) for row in (missed, one_of_two)]
    assert reached == ["0 of 2 reached", "1 of 2 reached"], "each row counts its own seeds"


def test_the_table_of_seeds(study):
    slow = make_run([0.1, 0.2, 0.3, 0.5, 0.6], [0.0, 3.0, 6.0, 9.0, 12.0])._replace(counters={"rejected": 2})
    switched = slow._replace(updates={**slow.updates, "correction_phase": np.array([0, 0, 1, 1])})
    rows = study.rows_of_seeds("mnist", {"fedasync": [slow], "orthodyn": [slow, switched]}, 0.5)
    assert [row["variant"] for row in rows] == ["fedasync", "orthodyn", "orthodyn"]
    assert [row["seed"] for row in rows] == [0, 0, 1]
    assert [row["updates before the switch"] for row in rows] == [None, None, 2]
    assert rows[0]["accuracy (%)"] == pytest.approx(100 * np.mean([0.2, 0.3, 0.5, 0.6]), rel=1e-6)
    assert rows[0]["minutes to 50 %"] == pytest.approx(9 / 60) and rows[0]["rejected uploads"] == 2


def test_every_row_of_the_table_is_tried_equally_often_and_can_be_run(study):
    tried = {name: study.trials(row) for name, row in study.METHODS.items()}
    assert {len(each) for each in tried.values()} == {4}
    for option in study.ABLATIONS.values():
        point = study.without({"method": "asynccurve", "lr": 1e-3}, option)
        assert point["lr"] == 1e-3 and method_of(point["method"])
        assert study.without(point, "momentum=0.5")["method"] == f"asynccurve:{option},momentum=0.5"


def test_a_spec_may_say_that_the_control_point_keeps_its_offset():
    """The value ``none`` in a spec is ``None``."""
    start, now, change, offset = (vector(seed) for seed in range(4))
    after = []
    written = method_of("asynccurve:control=none")
    for rule in (written.server(written.hyper), asynccurve(control="none")):
        state, memory = rule.init(now)
        state, memory, _ = rule.receive(state, memory, arrival_of(Curve(change, offset), start))
        after.append(np.asarray(rule.params(rule.close(state, memory)[0])["w"]))
    np.testing.assert_array_equal(*after)
    assert not np.array_equal(after[0], np.asarray(now["w"]))
