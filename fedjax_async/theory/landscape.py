"""The loss landscape: any measure of models on a grid in a plane, and along curves through models.

A measure is ``measure(params, *data) -> pytree of scalars``; :func:`scores` makes one of a model. The models of a
grid or curve are computed where they are measured, ``batch`` at a time, so memory does not grow with the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_async.base import check
from fedjax_async.engine.evaluation import Metrics
from fedjax_async.geometry import Plane, bezier, plane_point
from fedjax_async.geometry.families import CurvePath
from fedjax_async.types import Array, Model, Params

Measure = Callable[..., Any]  # measure(params, *data) -> a pytree of scalars


@lru_cache(maxsize=32)
def scores(model: Model, total: int, *, labels: bool = True) -> Measure:
    """``measure(params, x, y) -> {"loss", "accuracy"}``: means over ``total`` examples, as in a run's evaluations.

    Args:
      model: a model that takes the rows x as they are given.
      total: the number of rows of x and y.
      labels: whether targets are classes; otherwise the accuracy is NaN.

    The same arguments give the same function, so programs compiled for it are used again.
    """
    check.whole("total", total)
    return jax.jit(partial(Metrics(model, labels).whole, total=total))


@partial(jax.jit, static_argnames=("measure", "point", "batch"))
def _measured(
    measure: Measure, point: Callable[..., Params], models: object, at: Array, data: tuple[object, ...], batch: int
) -> Any:
    """``measure(point(models, at[i]), *data)`` for each i, ``batch`` of them at a time."""
    return jax.lax.map(lambda one: measure(point(models, one), *data), at, batch_size=batch)


def loss_surface(
    measure: Measure, plane: Plane, x: ArrayLike, y: ArrayLike, data: Sequence[object] = (), *, batch: int = 1
) -> Any:
    """``measure`` at every point of a grid in a plane.

    Args:
      measure: ``measure(params, *data) -> pytree of scalars``; compiled once for each measure and shape.
      plane: as :func:`fedjax_async.geometry.plane` makes it.
      x, y: the coordinates of the grid's columns [X] and rows [Y].
      data: further arguments of ``measure``.
      batch: models measured at the same time; more is faster on a GPU, and takes more memory.

    Returns: a pytree like the result of ``measure``, with NumPy arrays [Y, X].
    """
    check.whole("batch", batch)
    columns, rows = (np.asarray(each, np.float64) for each in (x, y))
    for name, each in (("x", columns), ("y", rows)):
        check.require(each.ndim == 1 and each.size > 0, f"{name}.shape", each.shape, "(n,) with n > 0")
    at = np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)
    found = _measured(measure, plane_point, plane, jnp.asarray(at, jnp.result_type(float)), tuple(data), batch)
    return jax.tree.map(lambda values: np.asarray(values).reshape(rows.size, columns.size), found)


def loss_along(
    measure: Measure,
    points: Sequence[Params],
    s: ArrayLike,
    data: Sequence[object] = (),
    *,
    batch: int = 1,
    path: CurvePath = bezier,
) -> Any:
    """``measure`` along the Bezier curve of ``points``: two of them are a line, three a quadratic curve.

    Args:
      s: positions on the curve [P], 0 to 1 between the ends.
      measure, data, batch: as in :func:`loss_surface`.
      path: ``geometry.polygon`` for the polygonal chain through ``points`` instead.

    Returns: a pytree like the result of ``measure``, with NumPy arrays [P].
    """
    check.whole("batch", batch)
    at = jnp.asarray(s, jnp.result_type(float))
    check.require(at.ndim == 1 and at.size > 0, "s.shape", at.shape, "(n,) with n > 0")
    return jax.tree.map(np.asarray, _measured(measure, path, tuple(points), at, tuple(data), batch))


def barrier(s: ArrayLike, loss: ArrayLike) -> float:
    """The height of the barrier on a path: how far the loss rises above the line between its values at the ends.

    ``max_s loss(s) - ((1 - s) loss(0) + s loss(1))``; 0 for a path that never rises above the line, NaN if a loss is
    NaN.

    Args:
      s: positions [P] with s[0] = 0 and s[-1] = 1.
      loss: the loss there [P].

    >>> barrier([0.0, 0.5, 1.0], [1.0, 4.0, 3.0])
    2.0

    Source: Entezari et al. (2022), definition 3.1.
    """
    position, height = np.asarray(s, np.float64), np.asarray(loss, np.float64)
    check.require(
        position.ndim == 1 and position.shape == height.shape,
        "loss.shape",
        height.shape,
        f"that of s, {position.shape}",
    )
    ends = position.size > 1 and position[0] == 0 and position[-1] == 1
    check.require(bool(ends), "s", f"{position.size} positions", "positions from 0 to 1")
    return float(np.max(height - ((1.0 - position) * height[0] + position * height[-1])))
