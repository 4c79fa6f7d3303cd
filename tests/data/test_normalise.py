"""Inputs standardised by the training part's own statistics."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.data import Dataset, federate, load
from fedjax_async.data.normalise import mean_and_std, normalised

RNG = np.random.default_rng(0)


def dealt(x, test_x=None, **options):
    y = np.arange(len(x), dtype=np.int32) % 3
    data = Dataset("mine", x, y, x[:6] if test_x is None else test_x, y[:6], num_classes=3)
    return federate(data, "iid", 4, **options)


@pytest.mark.parametrize("shape", [(40, 5, 4), (40, 5, 4, 3)], ids=["grey", "colour"])
def test_images_of_the_training_part_alone_get_mean_0_and_deviation_1(shape):
    data = dealt(RNG.integers(0, 256, shape).astype(np.uint8), validation_fraction=0.3, test_fraction=0.2)
    rows = np.concatenate([data.order[o : o + n] for o, n in zip(data.offset, data.size)])
    assert 0 < len(rows) < len(data.x) < 40
    inputs = np.asarray(normalised(data, "training").decode(data.x[rows]), np.float64)
    np.testing.assert_allclose(inputs.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(inputs.std(axis=(0, 1, 2)), 1, atol=1e-5)
    everything = np.asarray(normalised(data, "training").decode(data.x), np.float64)
    assert np.abs(everything.mean(axis=(0, 1, 2))).max() > 1e-3, "rows held out do not count"
    plain = normalised(data, "none").decode(data.x[:2])
    assert plain.shape[-1] == inputs.shape[-1] and plain.min() >= 0 and plain.max() <= 1


def test_measurements_are_standardised_channel_by_channel():
    x = RNG.normal([1.0, -3.0, 7.0], [2.0, 0.1, 0.0], (40, 8, 3)).astype(np.float32)
    data = dealt(x)
    mean, std = mean_and_std(data)
    np.testing.assert_allclose(mean, x.mean(axis=(0, 1), dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(std, [*x.std(axis=(0, 1), dtype=np.float64)[:2], 1.0], rtol=1e-6)
    np.testing.assert_allclose(normalised(data, "training").decode(x), (x - mean) / std, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(normalised(data, "none").decode(x), x)


def test_equal_statistics_are_one_function_and_the_published_constants_are_the_default():
    data = federate(load("fashion_mnist_6k"), "iid", 3)
    assert normalised(data, "published") is data
    assert normalised(data, "training").decode is normalised(data, "training").decode
    mean, std = mean_and_std(data)
    np.testing.assert_allclose([*mean, *std], [0.2860, 0.3530], atol=2e-3)  # of all 60,000 images


@pytest.mark.parametrize(
    ("x", "how", "message"),
    [
        (RNG.normal(size=(40, 5)).astype(np.float32), "published", "no constants are published for mine"),
        (RNG.integers(0, 9, (40, 5)).astype(np.int32), "training", "neither images nor floats"),
        (RNG.integers(0, 9, (40, 5)).astype(np.int32), "none", "neither images nor floats"),
        (RNG.normal(size=(40, 5)).astype(np.float32), "own", "normalise = 'own'"),
    ],
)
def test_what_cannot_be_done_is_refused(x, how, message):
    with pytest.raises(ValueError, match=message):
        normalised(dealt(x), how)
