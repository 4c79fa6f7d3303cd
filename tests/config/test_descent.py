"""Tuning along the gradient of a whole run: it descends, stays in range, and refuses what it cannot do."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Method, Settings, server, simulate
from fedjax_async.config import PerStaleness, descent, tune
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import resolved
from tests.told import is_refused

SETTINGS = Settings(
    method="fedasync:mixing=0.2,exponent=0", model="logistic", clients=4, updates=8, steps=2, validation_fraction=0.1,
    partition="iid", lr=0.01, dataset="fashion_mnist_6k",
)  # fmt: skip


def test_it_descends_on_the_validation_loss_and_the_settings_are_those_found():
    """Data with validation parts need no fraction; the tests that are slow have one."""
    given = Settings(method=SETTINGS.method, model="logistic", updates=8, steps=2, lr=0.01)
    tuned = tune(given, ["method.mixing", "lr"], steps=2, rate=0.5, data=data_of(resolved(SETTINGS)))
    assert tuned.losses.shape == (3,) and tuned.best == 2
    assert (np.diff(tuned.losses) < 0).all()
    assert tuned.values["lr"][0] == pytest.approx(0.01) and tuned.values["lr"][-1] > 0.025
    assert 0.2 < tuned.values["method.mixing"][-1] < 1  # the logit keeps it below 1 for any step
    assert tuned.settings.lr == pytest.approx(tuned.values["lr"][-1])
    run = simulate(tuned.settings, engine="reference")
    assert run.evaluations["validation_loss"][-1] == pytest.approx(tuned.losses[-1], rel=1e-4)


@pytest.mark.slow
def test_a_value_a_staleness_over_two_seeds():
    tuned = tune(SETTINGS, {"method.mixing": "staleness"}, steps=1, rate=0.5, seeds=(0, 1), staleness_values=3)
    assert tuned.settings is None and isinstance(tuned.hyper["server.mixing"], PerStaleness)
    weights = tuned.values["method.mixing"]
    runs = [simulate(SETTINGS, seed=seed) for seed in (0, 1)]
    used = {min(int(s), 2) for run in runs for s in np.unique(run.updates["staleness"])}
    assert max(run.updates["staleness"].max() for run in runs) > 2 and weights.shape == (2, 3)
    np.testing.assert_allclose(weights[0], 0.2, rtol=1e-6)
    assert set(np.flatnonzero(weights[1] != weights[0])) == used
    np.testing.assert_array_equal(tuned.hyper["server.mixing"].values, weights[tuned.best])
    ends = [run.evaluations["validation_loss"][-1] for run in runs]
    assert np.mean(ends) == pytest.approx(tuned.losses[0], rel=1e-4)


def test_each_seed_has_its_own_numbers(monkeypatch):
    """The noise of an upload follows from the schedule; all seeds had that of the first."""
    planned = descent.trajectory

    def with_noise(settings, **options):
        def function(hyper, params):
            return {"validation_loss": jnp.stack([hyper["lr"] * hyper["noise"]])}

        found = planned(settings, **options)
        return found._replace(function=function, hyper={**found.hyper, "noise": jnp.float32(settings.seed)})

    monkeypatch.setattr(descent, "trajectory", with_noise)
    assert tune(SETTINGS, ["lr"], steps=1, seeds=(1, 5)).losses[0] == pytest.approx(3 * SETTINGS.lr)


def test_a_local_step_without_gradient_is_refused_before_the_run_is_planned(monkeypatch):
    monkeypatch.setattr(descent, "trajectory", lambda *_, **__: pytest.fail("it was planned and traced"))
    with pytest.raises(ValueError, match="method = 'asynccurve:order=after': must be one with local training in loops"):
        tune(replace(SETTINGS, method="asynccurve:order=after"), ["lr"])


@pytest.mark.slow
def test_objects_are_part_of_the_settings_and_have_no_options_to_tune():
    base = replace(SETTINGS, method="fedasync", updates=2)
    tuned = tune(base, ["method.server_lr"], steps=1, method="asgd:server_lr=0.5")
    assert tuned.settings.method == f"asgd:server_lr={float(tuned.values['method.server_lr'][tuned.best])}"
    given = Method(server.fedasync(mixing=0.3))
    is_refused(r"method.mixing'?: must be .* is an object", tune, base, ["method.mixing"], method=given)


def test_a_number_without_slope_is_refused():
    start = {"method.swa.start": np.float32(0.3)}
    with pytest.raises(ValueError, match=r"names = 'method.swa.start': must be .*its gradient is 0 at the start"):
        descent._descended([lambda free: (1.0, {"method.swa.start": np.float32(0)})], start, optax.sgd(0.1), 1)


@pytest.mark.parametrize(("options", "message"), [
    ({"names": ["mixing"]}, "names = 'mixing': must be one of method.mixing, lr"),
    ({"names": []}, "names = .*: must be at least one path"),
    ({"names": {"lr": "example"}}, r"names\['lr'\] = 'example'"),
    ({"names": 3}, "names = 3: must be at least one path"),
    ({"names": ["lr", "lr"]}, r"names = \['lr', 'lr'\]: must be paths that are different"),
    ({"settings": replace(SETTINGS, validation_fraction=None)}, "validation_fraction = None: must be given"),
    pytest.param({"memory_limit": "160KB"}, "memory_limit = '0.00016GB': must be at least .*GB for this run's gradient",
                 marks=pytest.mark.slow),
    ({"memory_limit": "150KB"}, "memory_limit = '150KB': must be at least 0.00016GB: .* 8 arrivals keeps 5 models"),
    ({"last": 100}, "last = 100"), ({"seeds": 0}, "seeds = 0: must be a whole number from 1"),
    ({"seeds": [1, 1]}, "seeds = .*: must be different seeds"),
    ({"optimizer": optax.sgd(0.1), "rate": 0.2}, "rate = 0.2: must be left out beside an optimizer"),
    ({"optimizer": "adam"}, "optimizer = 'adam': must be an optax transformation"),
])  # fmt: skip
def test_what_cannot_be_tuned_is_refused_before_the_descent(options, message):
    is_refused(message, tune, **{"settings": SETTINGS, "names": ["lr"], **options})
