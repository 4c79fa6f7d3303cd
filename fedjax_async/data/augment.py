"""Augmentation of training images: random crops and flips of raw rows, inside the compiled step.

An augmentation is a pure function ``augment(key, x) -> x`` of a batch of raw images [B, H, W] or [B, H, W, C]. It keeps
shape and dtype. The key is that of a local step of a job, so a job sees the same images in both engines, in any batch,
on any number of devices and after a resume. ``models.augmented`` applies it in training and never in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp

from fedjax_async.base import check, grammar, registry
from fedjax_async.types import Array, Key

Augment = Callable[[Key, Array], Array]


def crop(*, padding: int = 4) -> Augment:
    """Random crop: pad all sides by ``padding`` black pixels, then cut out the original size at a random offset.

    Each image has its own offset, uniform over all ``(2 padding + 1)^2``. Black is 0 in the raw image, before inputs
    are standardised.
    """
    check.whole("padding", padding)

    def augment(key: Key, x: Array) -> Array:
        wide = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), *((0, 0),) * (x.ndim - 3)))
        corner = jax.random.randint(key, (len(x), 2), 0, 2 * padding + 1)

        def cut(image: Array, at: Array) -> Array:
            return jax.lax.dynamic_slice(image, (at[0], at[1], *(0,) * (image.ndim - 2)), x.shape[1:])

        return jax.vmap(cut)(wide, corner)

    return augment


def flip(*, probability: float = 0.5) -> Augment:
    """Random horizontal flip: each image is mirrored, left to right, with this probability."""
    check.in_range("probability", probability, 0.0, 1.0)

    def augment(key: Key, x: Array) -> Array:
        mirrored = jax.random.bernoulli(key, float(probability), (len(x),))
        return jnp.where(mirrored.reshape(-1, *(1,) * (x.ndim - 1)), x[:, :, ::-1], x)

    return augment


AUGMENTATIONS: dict[str, Callable[..., Augment]] = {"crop": crop, "flip": flip}


@registry.cached_by_name(maxsize=16)
def augmentation(spec: str) -> Augment:
    """The augmentation of a spec such as ``crop:padding=4+flip``: its parts one after the other.

    Equal specs give the same function, so that runs share compiled programs. Each part has its own random numbers.
    """
    return chained(tuple(registry.spec("augment", AUGMENTATIONS, part).make() for part in grammar.joined(spec)))


@lru_cache(maxsize=16)
def chained(parts: tuple[Augment, ...]) -> Augment:
    """The parts one after the other, each with a key of its own."""

    def augment(key: Key, x: Array) -> Array:
        for number, part in enumerate(parts):
            x = part(jax.random.fold_in(key, number), x)
        return x

    return augment


def check_augment(augment: Augment, rows: jax.ShapeDtypeStruct, given: object) -> None:
    """Raise ``ValueError`` unless the rows are images and the augmentation keeps their shape and dtype.

    Images are uint8 rows [B, H, W], or rows [B, H, W, C] of any dtype. ``given``: the setting, for the message.
    """
    images = len(rows.shape) == 4 or (len(rows.shape) == 3 and rows.dtype == jnp.uint8)
    found = f"the data are not images (uint8 [H, W], or [H, W, C]), but {rows.dtype}{list(rows.shape[1:])}"
    check.require(images, "augment", given, f"left out: {found}")
    made = jax.eval_shape(augment, jax.eval_shape(jax.random.key, 0), rows)
    same = (getattr(made, "shape", None), getattr(made, "dtype", None)) == (rows.shape, rows.dtype)
    allowed = f"one that returns {rows.dtype}{list(rows.shape)}"
    check.require(same, "augment", f"a function that returns {made}", allowed)
