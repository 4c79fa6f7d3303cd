"""The data sets that need no network, and inputs as models take them: decoded, augmented, normalised."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.data import Dataset, decode, digits, fashion_mnist_6k, federate, load
from fedjax_async.data.augment import augmentation, check_augment, crop, flip
from fedjax_async.data.embedded import FILE, read_digits
from fedjax_async.data.normalise import mean_and_std, normalised


def test_the_embedded_set_is_the_one_that_was_verified():
    """It was taken from files with the published hashes of Fashion-MNIST."""
    data = fashion_mnist_6k()
    assert (data.x.shape, data.test_x.shape) == ((5000, 28, 28), (1000, 28, 28))
    assert (data.x.dtype, data.y.dtype) == (np.uint8, np.int32)
    digest = hashlib.sha256(data.x.tobytes() + data.y.tobytes() + data.test_x.tobytes() + data.test_y.tobytes())
    assert digest.hexdigest() == "e5322c7ba3d21de688f8d850228e3dc922deca406b7c780713bdb25f91d20bed"
    for labels, count in ((data.y, 500), (data.test_y, 100)):
        assert np.bincount(labels).tolist() == [count] * 10
    with np.load(FILE, allow_pickle=False) as file:
        assert "Copyright (c) 2017 Zalando SE" in str(file["licence"]) and "MIT License" in str(file["licence"])
    assert FILE.stat().st_size < 2_700_000


def test_digits_from_a_file(tmp_path):
    rows = np.arange(10 * 65).reshape(10, 65) % 17
    rows[:, 64] = np.arange(10)
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))
    data = read_digits(path)
    assert data.test_y.tolist() == [4, 9]
    assert data.y.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    np.testing.assert_array_equal(data.x[4], rows[5, :64].reshape(8, 8))


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="scikit-learn = not installed: needed for dataset = 'digits'"):
        digits()


@pytest.mark.parametrize(
    ("function", "shape", "mean", "std"),
    [
        (decode.mnist, (4, 28, 28), 0.1307, 0.3081),
        (decode.fashion_mnist, (4, 28, 28), 0.2860, 0.3530),
        (decode.cifar10, (4, 32, 32, 3), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        (decode.unit_images, (4, 5, 6), 0.0, 1.0),
        (decode.unit_images, (4, 5, 6, 3), 0.0, 1.0),
        (decode.digits, (2, 8, 8), 0.3058 * 16 / 255, 0.3764 * 16 / 255),
    ],
)
def test_image_decoders_against_numpy(function, shape, mean, std):
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    expected = ((x if x.ndim == 4 else x[..., None]) / 255.0 - np.array(mean)) / np.array(std)
    (out,) = jax.jit(jax.vmap(function))(jnp.asarray(x)[None])
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_decoders_are_the_same_object_every_time():
    """Otherwise every load would compile all programs again."""
    assert fashion_mnist_6k().decode is fashion_mnist_6k().decode
    assert hash(decode.mnist) == hash(decode.mnist)


# --- augmentation: crops and flips computed by hand -------------------------------------------------

IMAGES = np.random.default_rng(0).integers(1, 256, (200, 4, 3, 2)).astype(np.uint8)  # without black


@pytest.mark.parametrize("x", [IMAGES, IMAGES[..., 0]], ids=["colour", "grey"])
def test_a_crop_is_one_of_the_windows_of_the_padded_image_and_each_is_as_likely(x):
    found = np.asarray(jax.jit(crop(padding=2))(jax.random.key(1), x))
    assert found.shape == x.shape and found.dtype == np.uint8
    wide = np.pad(x, ((0, 0), (2, 2), (2, 2), *((0, 0),) * (x.ndim - 3)))
    windows = np.stack([wide[:, i : i + 4, j : j + 3] for i in range(5) for j in range(5)], axis=1)
    same = (windows == found[:, None]).reshape(len(x), 25, -1).all(axis=2)
    assert (same.sum(axis=1) == 1).all()
    assert np.abs(same.mean(axis=0) - 1 / 25).max() < 4 * np.sqrt(1 / 25 / len(x)), "no window is preferred"


def test_a_flip_mirrors_left_to_right():
    always, never = (np.asarray(flip(probability=p)(jax.random.key(0), IMAGES)) for p in (1.0, 0.0))
    np.testing.assert_array_equal(always, IMAGES[:, :, ::-1])
    np.testing.assert_array_equal(never, IMAGES)
    half = np.asarray(flip()(jax.random.key(2), IMAGES))
    mirrored = (half == always).reshape(200, -1).all(axis=1)
    np.testing.assert_array_equal(half[~mirrored], IMAGES[~mirrored])
    assert 70 < mirrored.sum() < 130


def test_equal_specs_are_one_function_and_parts_draw_apart():
    both = augmentation("crop:padding=1+flip")
    assert both is augmentation("crop:padding=1+flip")
    key = jax.random.key(3)
    by_hand = flip()(jax.random.fold_in(key, 1), crop(padding=1)(jax.random.fold_in(key, 0), IMAGES))
    np.testing.assert_array_equal(both(key, IMAGES), by_hand)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("crop:padding=0", "padding = 0"), ("flip:probability=2", "probability = 2"), ("flop", "did you mean 'flip'")],
)
def test_bad_augmentations_name_the_option(spec, message):
    with pytest.raises(ValueError, match=message):
        augmentation(spec)


@pytest.mark.parametrize(
    ("augment", "shape", "dtype", "message"),
    [
        (flip(), (1, 128, 9), jnp.float32, r"augment = 'flip'.*the data are not images.*float32\[128, 9\]"),
        (flip(), (1, 60), jnp.uint8, "the data are not images"),
        (lambda key, x: x[:, 1:], (1, 4, 4), jnp.uint8, r"must be one that returns uint8\[1, 4, 4\]"),
        (lambda key, x: x.astype(float), (1, 4, 4, 3), jnp.float16, r"one that returns float16\[1, 4, 4, 3\]"),
    ],
)
def test_what_is_no_image_or_does_not_stay_one_is_refused(augment, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        check_augment(augment, jax.ShapeDtypeStruct(shape, dtype), "flip")


# --- inputs standardised by the training part's own statistics --------------------------------------

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


@pytest.mark.parametrize(
    "x",
    [RNG.normal(3, 2, 40).astype(np.float32), RNG.normal(0, 1e-6, (40, 2)).astype(np.float16)],
    ids=["single", "half"],
)
def test_single_numbers_and_small_ones_in_half_precision_are_standardised(x):
    found = np.asarray(normalised(dealt(x), "training").decode(x[:7]), np.float64)
    np.testing.assert_allclose(found, (x[:7] - x.mean(axis=0, dtype=float)) / x.std(axis=0, dtype=float), atol=2e-3)


def test_a_channel_is_constant_if_it_is_and_not_by_its_size():
    grey = np.full((30, 8, 8, 1), 31, np.uint8)  # the mean of its squares minus the square of its mean is 3e-18
    assert mean_and_std(dealt(grey))[1] == (1.0,)
    x = np.stack([np.full(40, 1e6 + 0.1), 1e-14 * RNG.normal(size=40)], axis=1)
    _, std = mean_and_std(dealt(x))
    assert std[0] == 1.0
    np.testing.assert_allclose(std[1], x[:, 1].std(), rtol=1e-9)


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
def test_inputs_that_cannot_be_normalised_are_refused(x, how, message):
    with pytest.raises(ValueError, match=message):
        normalised(dealt(x), how)
