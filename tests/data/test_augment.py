"""Augmentation: crops and flips computed by hand, equal specs, refused options."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.data.augment import augmentation, check_augment, crop, flip

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
def test_bad_specs_name_the_option(spec, message):
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
