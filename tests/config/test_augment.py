"""A run with augmented images: evaluations are not augmented. ``test_worlds.py`` draws augmentations, too."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import Settings, data, fingerprint, simulate
from fedjax_async.config.settings import as_dict
from fedjax_async.data import augmentation

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


def test_evaluations_see_the_images_as_they_are():
    plain, augmented = (simulate(**SERVED, engine="reference", augment=augment) for augment in (None, AUGMENT))
    assert "augment" not in plain.settings and augmented.settings["augment"] == AUGMENT
    assert np.abs(kernel(plain) - kernel(augmented)).max() > 1e-3
    assert plain.evaluations["loss"][0] == augmented.evaluations["loss"][0]
    weights, bias = (np.asarray(augmented.params["output"][name], np.float64) for name in ("kernel", "bias"))
    logits = (IMAGES.test_x.reshape(12, -1) / 255) @ weights + bias
    loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(12), IMAGES.test_y])
    np.testing.assert_allclose(augmented.evaluations["loss"][-1], loss, rtol=1e-5)


def test_an_own_function_takes_the_place_of_a_name():
    def darker(key, x):
        return x // 2

    given = as_dict(Settings(**SERVED, augment=darker))
    assert given["own"]["augment"] == {given["augment"]: fingerprint(darker)}
    with pytest.raises(ValueError, match=r"augment = 0\.5: must be a text, or a function"):
        simulate(**SERVED, augment=0.5)


@pytest.mark.parametrize(("probability", "mirrored"), [(0, 0), (1, 3)])
def test_whole_numbers_are_probabilities_too(probability, mirrored):
    """They were refused as no function of images."""
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    found = np.asarray(augmentation(f"flip:probability={probability}")(jax.random.key(0), images))
    assert sum(not np.array_equal(one, other) for one, other in zip(found, images)) == mirrored
