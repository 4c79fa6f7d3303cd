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
from tests.refusals import refusals


def test_the_embedded_set_is_the_one_that_was_verified():
    """It was taken from files with the published hashes of Fashion-MNIST."""
    data = fashion_mnist_6k()
    assert (data.x.shape, data.test_x.shape) == ((5000, 28, 28), (1000, 28, 28))
    assert (data.x.dtype, data.y.dtype) == (np.uint8, np.int32)
    digest = hashlib.sha256(data.x.tobytes() + data.y.tobytes() + data.test_x.tobytes() + data.test_y.tobytes())
    assert digest.hexdigest() == "e5322c7ba3d21de688f8d850228e3dc922deca406b7c780713bdb25f91d20bed"
    with np.load(FILE, allow_pickle=False) as file:
        assert "Copyright (c) 2017 Zalando SE" in str(file["licence"]) and "MIT License" in str(file["licence"])
    assert FILE.stat().st_size < 2_700_000


def test_digits_come_from_scikit_learns_file(tmp_path, monkeypatch):
    rows = np.arange(10 * 65).reshape(10, 65) % 17
    rows[:, 64] = np.arange(10)
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))
    data = read_digits(path)
    assert data.test_y.tolist() == [4, 9] and data.y.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    np.testing.assert_array_equal(data.x[4], rows[5, :64].reshape(8, 8))
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


def test_a_flip_mirrors_left_to_right_and_parts_draw_apart():
    always, never = (np.asarray(flip(probability=p)(jax.random.key(0), IMAGES)) for p in (1.0, 0.0))
    np.testing.assert_array_equal(always, IMAGES[:, :, ::-1])
    np.testing.assert_array_equal(never, IMAGES)
    half = np.asarray(flip()(jax.random.key(2), IMAGES))
    mirrored = (half == always).reshape(200, -1).all(axis=1)
    np.testing.assert_array_equal(half[~mirrored], IMAGES[~mirrored])
    assert 70 < mirrored.sum() < 130
    key = jax.random.key(3)
    by_hand = flip()(jax.random.fold_in(key, 1), crop(padding=1)(jax.random.fold_in(key, 0), IMAGES))
    np.testing.assert_array_equal(augmentation("crop:padding=1+flip")(key, IMAGES), by_hand)


RNG = np.random.default_rng(0)


def dealt(x, **options):
    y = np.arange(len(x), dtype=np.int32) % 3
    return federate(Dataset("mine", x, y, x[:6], y[:6], num_classes=3), "iid", 4, **options)


@pytest.mark.parametrize("shape", [(40, 5, 4), (40, 5, 4, 3)], ids=["grey", "colour"])
def test_images_of_the_training_part_alone_get_mean_0_and_deviation_1(shape):
    data = dealt(RNG.integers(0, 256, shape).astype(np.uint8), validation_fraction=0.3, test_fraction=0.2)
    rows = np.concatenate([data.order[o : o + n] for o, n in zip(data.offset, data.size)])
    assert 0 < len(rows) < len(data.x) < 40
    inputs, everything = (np.asarray(normalised(data, "training").decode(x), float) for x in (data.x[rows], data.x))
    np.testing.assert_allclose(inputs.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(inputs.std(axis=(0, 1, 2)), 1, atol=1e-5)
    assert np.abs(everything.mean(axis=(0, 1, 2))).max() > 1e-3, "rows held out do not count"
    plain = normalised(data, "none").decode(data.x[:2])
    assert plain.shape[-1] == inputs.shape[-1] and plain.min() >= 0 and plain.max() <= 1


def test_digits_have_16_as_their_white_without_standardisation_too():
    data = dealt(np.arange(40 * 64).reshape(40, 8, 8).astype(np.uint8) % 17)._replace(decode=decode.digits)
    assert normalised(data, "none").decode(data.x).max() == 1.0


@pytest.mark.parametrize(
    ("x", "tolerance"),
    [
        (RNG.normal([1.0, -3.0, 7.0], [2.0, 0.1, 0.0], (40, 8, 3)).astype(np.float32), {"rtol": 1e-4, "atol": 1e-5}),
        (RNG.normal(3, 2, 40).astype(np.float32), {"atol": 2e-3}),
        (RNG.normal(0, 1e-6, (40, 2)).astype(np.float16), {"atol": 2e-3}),
    ],
    ids=["three channels, one of them constant", "single numbers", "small ones in half precision"],
)
def test_measurements_are_standardised_channel_by_channel(x, tolerance):
    data, axes = dealt(x), tuple(range(max(x.ndim - 1, 1)))
    mean, std = x.mean(axis=axes, dtype=float), x.std(axis=axes, dtype=float)
    std = np.where(std == 0, 1.0, std)
    for found, wanted in zip(mean_and_std(data), (mean, std), strict=True):
        np.testing.assert_allclose(np.squeeze(found), wanted, rtol=1e-6)
    np.testing.assert_allclose(normalised(data, "training").decode(x), (x - mean) / std, **tolerance)
    np.testing.assert_array_equal(normalised(data, "none").decode(x), x)


def test_a_channel_is_constant_if_it_is_and_not_by_its_size():
    grey = np.full((30, 8, 8, 1), 31, np.uint8)  # the mean of its squares minus the square of its mean is 3e-18
    assert mean_and_std(dealt(grey))[1] == (1.0,)
    x = np.stack([np.full(40, 1e6 + 0.1), 1e-14 * RNG.normal(size=40)], axis=1)
    _, std = mean_and_std(dealt(x))
    assert std[0] == 1.0
    np.testing.assert_allclose(std[1], x[:, 1].std(), rtol=1e-9)


def test_equal_decoders_and_augmentations_are_one_function_and_the_published_constants_are_the_default():
    """Otherwise every load would compile all programs again."""
    assert fashion_mnist_6k().decode is fashion_mnist_6k().decode
    assert augmentation("crop:padding=1+flip") is augmentation("crop:padding=1+flip")
    data = federate(load("fashion_mnist_6k"), "iid", 3)
    assert normalised(data, "published") is data
    assert normalised(data, "training").decode is normalised(data, "training").decode
    mean, std = mean_and_std(data)
    np.testing.assert_allclose([*mean, *std], [0.2860, 0.3530], atol=2e-3)  # of all 60,000 images


FLIP = flip()


def checked(shape, dtype, augment=FLIP):
    return check_augment(augment, jax.ShapeDtypeStruct(shape, dtype), "flip")


FLOATS, INTEGERS = RNG.normal(size=(40, 5)).astype(np.float32), RNG.integers(0, 9, (40, 5)).astype(np.int32)
test_what_cannot_be_augmented_or_normalised_is_refused = refusals(
    (lambda: augmentation("crop:padding=0"), "padding = 0"),
    (lambda: augmentation("flip:probability=2"), "probability = 2"),
    (lambda: augmentation("flop"), "did you mean 'flip'"),
    (lambda: checked((1, 128, 9), jnp.float32), r"augment = 'flip'.*the data are not images.*float32\[128, 9\]"),
    (lambda: checked((1, 60), jnp.uint8), "the data are not images"),
    (lambda: checked((1, 4, 4), jnp.uint8, lambda key, x: x[:, 1:]), "must be one that returns uint8[1, 4, 4]"),
    (lambda: checked((1, 4, 4, 3), jnp.float16, lambda key, x: x.astype(float)), "one that returns float16[1, 4, 4, 3"),
    (lambda: normalised(dealt(FLOATS), "published"), "no constants are published for mine"),
    (lambda: normalised(dealt(INTEGERS), "training"), "neither images nor floats"),
    (lambda: normalised(dealt(INTEGERS), "none"), "neither images nor floats"),
    (lambda: normalised(dealt(FLOATS), "own"), "normalise = 'own'"),
)
