"""Geometry of models and their changes, as pure functions on any pytree, in O(D) time and memory.

Start with :func:`project_out` (``projection.py``): the part of one change orthogonal to another, as one vector, by
layer or by tensor. Then read ``corrections.py`` (delay corrections of stale changes), ``bezier.py`` (curves through
models), ``plane.py`` (the plane through three models), ``rotation.py`` (a curve's control point when its ends move),
``hyperbolic.py`` (distance and penalty of the Lorentz model), ``manifold.py`` (exponential and logarithm maps,
Riemannian SGD) and ``simplex.py`` (mixtures of several models). ``vectors.py`` holds the scalar products and lengths
that all of them use.
"""

from fedjax_async.geometry.bezier import (
    bezier,
    bezier_derivative,
    bezier_length,
    bezier_points,
    control_point,
    line,
    polygon,
)
from fedjax_async.geometry.corrections import (
    CORRECTIONS,
    PHASE_COLUMN,
    PHASES,
    Correction,
    Trend,
    asgd,
    dc_asgd,
    dc_asgd_a,
    fedasync,
    gradient_surgery,
    norm_falls,
    ortho_correct,
    orthocorrect,
    orthodyn,
    orthograd,
    orthopos,
    orthostrict,
    steps_pass,
)
from fedjax_async.geometry.hyperbolic import (
    LorentzPoint,
    lorentz_distance,
    lorentz_inner,
    lorentz_penalty,
    lorentz_project,
)
from fedjax_async.geometry.manifold import MANIFOLDS, Manifold, euclidean, geodesic, lorentz, riemannian_sgd
from fedjax_async.geometry.plane import Plane, plane, plane_coordinates, plane_point
from fedjax_async.geometry.projection import GROUPINGS, orthonormalise, project_out, project_out_span
from fedjax_async.geometry.rotation import CONTROL_POINTS, keep_offset, reflect, rotate, rotate_offset
from fedjax_async.geometry.simplex import centroid, sample_simplex, sample_weights, simplex, simplex_point

__all__ = [
    "CONTROL_POINTS",
    "CORRECTIONS",
    "GROUPINGS",
    "MANIFOLDS",
    "PHASES",
    "PHASE_COLUMN",
    "Correction",
    "LorentzPoint",
    "Manifold",
    "Plane",
    "Trend",
    "asgd",
    "bezier",
    "bezier_derivative",
    "bezier_length",
    "bezier_points",
    "centroid",
    "control_point",
    "dc_asgd",
    "dc_asgd_a",
    "euclidean",
    "fedasync",
    "geodesic",
    "gradient_surgery",
    "keep_offset",
    "line",
    "lorentz",
    "lorentz_distance",
    "lorentz_inner",
    "lorentz_penalty",
    "lorentz_project",
    "norm_falls",
    "ortho_correct",
    "orthocorrect",
    "orthodyn",
    "orthograd",
    "orthonormalise",
    "orthopos",
    "orthostrict",
    "plane",
    "plane_coordinates",
    "plane_point",
    "polygon",
    "project_out",
    "project_out_span",
    "reflect",
    "riemannian_sgd",
    "rotate",
    "rotate_offset",
    "sample_simplex",
    "sample_weights",
    "simplex",
    "simplex_point",
    "steps_pass",
]
