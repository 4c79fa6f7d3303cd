"""The plane through three models: coordinates in it, and the models at these coordinates."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_async.geometry.projection import project_out
from fedjax_async.geometry.vectors import inner, leaves, length, rebuild, unit
from fedjax_async.types import Array, Params

FLAT = 1e-5  # three models span no plane if the third is nearer to the line of the others, relative to the distances


class Plane(NamedTuple):
    """``origin + x first + y second``: x and y are distances in the space of the parameters."""

    origin: Params
    first: Params  # of length 1
    second: Params  # of length 1, orthogonal to ``first``


def plane(one: Params, two: Params, three: Params) -> Plane:
    """The plane through three models. It cannot be traced, because it tests their distances.

    ``one`` is at (0, 0), ``two`` at (x, 0) with x > 0, and ``three`` has y > 0 (Gram-Schmidt on the two differences,
    all parameters as one vector).

    Args:
      one, two, three: pytrees of the same structure and shapes.

    Raises: ``ValueError`` if the three are on one line, or two of them equal.

    Source: Garipov et al. (2018), appendix A.1.
    """
    first, second, *lengths = _axes(one, two, three)
    width, reach, height = map(float, lengths)
    if not width > 0:
        raise ValueError("plane: must go through three different models, but the first two are equal")
    if not height > FLAT * max(width, reach):
        raise ValueError("plane: must go through three models that are not on one line")
    return Plane(one, first, second)


@jax.jit
def _axes(one: Params, two: Params, three: Params) -> tuple[Params, Params, Array, Array, Array]:
    """Both unit vectors, the lengths of both differences, and the part of the second orthogonal to the first."""
    along = jax.tree.map(jnp.subtract, two, one)
    aside = jax.tree.map(jnp.subtract, three, one)
    rest = project_out(aside, along, per="whole")
    rest = project_out(rest, along, per="whole")  # again: the first leaves a rounding error proportional to ``aside``
    directions = (rebuild(unit(leaves(side)), one) for side in (along, rest))
    return *directions, *(length(leaves(side)) for side in (along, aside, rest))


def plane_point(plane: Plane, at: ArrayLike) -> Params:
    """The model at the coordinates ``at`` = (x, y), float[2]; in the dtypes of the plane's origin."""
    x, y = jnp.asarray(at, jnp.result_type(float))
    sides = zip(*map(leaves, plane), strict=True)
    return rebuild([origin + (x * first + y * second) for origin, first, second in sides], plane.origin)


def plane_coordinates(plane: Plane, params: Params) -> Array:
    """The coordinates (x, y) of the point of the plane that is nearest to ``params``; float[2]."""
    offset = leaves(jax.tree.map(jnp.subtract, params, plane.origin))
    return jnp.stack([inner(offset, leaves(plane.first)), inner(offset, leaves(plane.second))])
