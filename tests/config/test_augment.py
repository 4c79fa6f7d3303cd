"""A run with augmented images: a job sees the same images in every way of execution; evaluations are not augmented."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import data, fingerprint, simulate, sweep

RNG = np.random.default_rng(0)
IMAGES = data.Dataset(
    "images",
    *(RNG.integers(0, 256, (60, 6, 6)).astype(np.uint8), np.arange(60, dtype=np.int32) % 3),
    *(RNG.integers(0, 256, (12, 6, 6)).astype(np.uint8), np.arange(12, dtype=np.int32) % 3),
)
SMALL = {"dataset": IMAGES, "model": "logistic", "clients": 4, "steps": 3, "batch_size": 4, "partition": "iid"}
SERVED = {**SMALL, "method": "fedbuff@buffer:size=2", "delay": "exponential", "updates": 16, "eval_updates": 8}
AUGMENT = "crop:padding=2+flip"


def kernel(run):
    return np.asarray(run.params["output"]["kernel"])


@pytest.fixture(scope="module")
def augmented():
    return simulate(**SERVED, augment=AUGMENT)


def test_the_oracle_and_other_batches_see_the_same_images(augmented):
    for other in ({"engine": "reference"}, {"batching": "vmap", "max_width": 2}):
        np.testing.assert_allclose(kernel(simulate(**SERVED, **other, augment=AUGMENT)), kernel(augmented), atol=1e-6)
    assert augmented.settings["augment"] == AUGMENT


@pytest.mark.slow
def test_a_rate_that_falls_within_the_job_is_that_of_the_oracle():
    own = {"decay": "linear:floor=0.1", "optimizer": "adamw:clip=0.5"}
    one, other = (simulate(**SERVED, **own, engine=engine) for engine in ("waves", "reference"))
    np.testing.assert_allclose(kernel(one), kernel(other), atol=1e-6)
    assert np.abs(kernel(one) - kernel(simulate(**SERVED, **own | {"decay": "constant"}))).max() > 1e-3


def test_evaluations_see_the_images_as_they_are(augmented):
    plain = simulate(**SERVED)
    assert "augment" not in plain.settings
    assert np.abs(kernel(plain) - kernel(augmented)).max() > 1e-3
    assert plain.evaluations["loss"][0] == augmented.evaluations["loss"][0]
    weights, bias = (np.asarray(augmented.params["output"][name], np.float64) for name in ("kernel", "bias"))
    logits = (IMAGES.test_x.reshape(12, -1) / 255) @ weights + bias
    loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(12), IMAGES.test_y])
    np.testing.assert_allclose(augmented.evaluations["loss"][-1], loss, rtol=1e-5)


def test_a_sweep_gives_each_run_the_images_that_it_has_alone(augmented):
    found = sweep(SERVED | {"augment": AUGMENT}, seeds=2, progress=False)
    np.testing.assert_allclose(kernel(found.run(0)), kernel(augmented), atol=1e-6)


@pytest.mark.slow
def test_nodes_without_a_server_train_on_augmented_images_too():
    nodes = {**SMALL, "method": "async_dfedavg", "delay": "exponential", "time": 3.0, "test_fraction": 0.2}
    runs = [simulate(**nodes, augment=AUGMENT, **other) for other in ({}, {"engine": "reference"})]
    for one, other in zip(*(jax.tree.leaves(run.params) for run in runs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_own_function_takes_the_place_of_a_name():
    def darker(key, x):
        return x // 2

    run = simulate(**SERVED, augment=darker)
    assert run.settings["own"]["augment"] == {run.settings["augment"]: fingerprint(darker)}
    with pytest.raises(ValueError, match=r"augment = 0\.5: must be a text, or a function"):
        simulate(**SERVED, augment=0.5)
