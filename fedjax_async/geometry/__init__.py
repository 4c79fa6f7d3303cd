"""Geometry of models and their changes, as pure functions on any pytree, in O(D) time and memory.

Start with :func:`project_out` (``projection.py``): the part of one change orthogonal to another, as one vector, by
layer or by tensor. Then read ``corrections.py`` (delay corrections of stale changes), ``bezier.py`` (curves through
models), ``families.py`` (curves between two models, by name), ``plane.py`` (the plane through three models),
``rotation.py`` (a curve's control point when its ends move),
``hyperbolic.py`` (distance and penalty of the Lorentz model), ``manifold.py`` (exponential and logarithm maps,
Riemannian SGD) and ``simplex.py`` (mixtures of several models). ``vectors.py`` holds the scalar products and lengths
that all of them use.
"""

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.geometry.bezier import (bezier as bezier, bezier_derivative as bezier_derivative,
    bezier_length as bezier_length, bezier_points as bezier_points, control_point as control_point, line as line,
    polygon as polygon)
from fedjax_async.geometry.corrections import (CORRECTIONS as CORRECTIONS, PHASES as PHASES,
    PHASE_COLUMN as PHASE_COLUMN, Correction as Correction, Trend as Trend, asgd as asgd, dc_asgd as dc_asgd,
    dc_asgd_a as dc_asgd_a, fedasync as fedasync, gradient_surgery as gradient_surgery, norm_falls as norm_falls,
    ortho_correct as ortho_correct, orthocorrect as orthocorrect, orthodyn as orthodyn, orthograd as orthograd,
    orthopos as orthopos, orthostrict as orthostrict, share_passes as share_passes, steps_pass as steps_pass)
from fedjax_async.geometry.families import (FAMILIES as FAMILIES, CurveFamily as CurveFamily, chain as chain,
    cubic as cubic, family as family, quadratic as quadratic)
from fedjax_async.geometry.hyperbolic import (LorentzPoint as LorentzPoint, lorentz_distance as lorentz_distance,
    lorentz_inner as lorentz_inner, lorentz_penalty as lorentz_penalty, lorentz_project as lorentz_project)
from fedjax_async.geometry.manifold import (MANIFOLDS as MANIFOLDS, Manifold as Manifold, euclidean as euclidean,
    geodesic as geodesic, lorentz as lorentz, riemannian_sgd as riemannian_sgd)
from fedjax_async.geometry.plane import (Plane as Plane, plane as plane, plane_coordinates as plane_coordinates,
    plane_point as plane_point)
from fedjax_async.geometry.projection import (GROUPINGS as GROUPINGS, orthonormalise as orthonormalise,
    project_out as project_out, project_out_span as project_out_span)
from fedjax_async.geometry.rotation import (CONTROL_POINTS as CONTROL_POINTS, keep_offset as keep_offset,
    reflect as reflect, rotate as rotate, rotate_offset as rotate_offset)
from fedjax_async.geometry.simplex import (centroid as centroid, sample_simplex as sample_simplex,
    sample_weights as sample_weights, simplex as simplex, simplex_point as simplex_point)

lazy.set_all(__name__)
