"""Geometry of model changes: projections of pytrees, layer by layer or as one vector."""

from fedjax_async.geometry.projection import GROUPINGS, orthonormalise, project_out, project_out_span

__all__ = ["GROUPINGS", "orthonormalise", "project_out", "project_out_span"]
