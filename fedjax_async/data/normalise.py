"""Standardise inputs: with the constants published for a data set, with those of the training part, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax.numpy as jnp
import numpy as np

from fedjax_async.base.check import one_of, require
from fedjax_async.data.decode import as_is, digits, unit_digits, unit_images, usual
from fedjax_async.types import Array, FederatedData

NORMALISATIONS = ("published", "training", "none")


def normalised(data: FederatedData, how: str) -> FederatedData:
    """``data`` with the decoder that ``how`` names.

    Args:
      how: ``published``: the data set's own decoder, which standardises with published constants; ``training``:
        ``(x - mean) / deviation`` of each channel (the last axis), over the clients' training rows, without test and
        validation parts; ``none``: images scaled to [0, 1], other inputs as they are.

    Raises: ``ValueError`` for ``published`` without published constants, for ``training`` or ``none`` with integers
    that are not images (token ids), and for ``training`` with data that are not in memory.
    """
    one_of("normalise", how, NORMALISATIONS)
    plain = usual(data.x) if isinstance(data.x, np.ndarray) else as_is
    if how == "published":
        has = data.decode not in (as_is, unit_images, unit_digits)
        require(has, "normalise", how, f"training or none: no constants are published for {data.name}")
        return data
    floats = np.issubdtype(data.x.dtype, np.floating)
    require(plain is unit_images or floats, "normalise", how, f"left out: {data.name} has neither images nor floats")
    if how == "none":
        return data._replace(decode=unit_digits if data.decode is digits else plain)
    in_memory = isinstance(data.x, np.ndarray) and isinstance(data.order, np.ndarray) and not data.streamed
    require(in_memory, "normalise", how, f"published or none: the inputs of {data.name} are not in memory")
    return data._replace(decode=_standardising(plain, *mean_and_std(data)))


def mean_and_std(data: FederatedData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the clients' training rows; images count as scaled to [0, 1].

    Rows without a channel axis (grey images, single numbers) have one channel. A constant channel has deviation 1.
    """
    parts = [data.order[start : start + size] for start, size in zip(data.offset, data.size)]
    x = data.x[np.concatenate(parts)]
    if x.dtype == np.uint8:  # exact and fast: from the counts of the 256 values
        channels = x.reshape(-1, 1) if x.ndim == 3 else x.reshape(-1, x.shape[-1])
        counts = np.stack([np.bincount(channel, minlength=256) for channel in channels.T])
        values = np.arange(256) / 255.0
        mean = counts @ values / len(channels)
        std = np.sqrt(np.maximum(counts @ values**2 / len(channels) - mean**2, 0.0))
        constant = np.count_nonzero(counts, axis=1) == 1
    else:
        channels = x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1).astype(np.float64)
        mean, std = channels.mean(axis=0), channels.std(axis=0)
        constant = channels.min(axis=0) == channels.max(axis=0)
    # the deviation of a constant channel may be a rounding error, and that of one in small units as small
    return tuple(mean.tolist()), tuple(np.where(constant | (std < np.finfo(np.float32).tiny), 1.0, std).tolist())


@lru_cache(maxsize=64)
def _standardising(
    plain: Callable[[Array], Array], mean: tuple[float, ...], std: tuple[float, ...]
) -> Callable[[Array], Array]:
    """``x -> (plain(x) - mean) / std``, channel by channel; equal numbers give the same function."""

    def decode(x: Array) -> Array:
        inputs = plain(x)
        # a small deviation is 0 in float16
        wide = inputs if inputs.dtype.itemsize >= 4 else inputs.astype(jnp.float32)
        shape = (*(1,) * (inputs.ndim - 1), -1)
        centre, spread = (jnp.array(values, wide.dtype).reshape(shape) for values in (mean, std))
        return ((wide - centre) / spread).astype(inputs.dtype)

    return decode
