"""A module of any kind as a ``Model``: ``flax.linen``, ``flax.nnx`` or ``torch.nn``."""

from __future__ import annotations

import sys

from flax import linen

from fedjax_async.models.nnx import from_nnx, makes_nnx
from fedjax_async.models.torch_modules import from_torch_module, is_torch_module
from fedjax_async.models.wrap import from_flax
from fedjax_async.types import Model


def is_module(thing: object) -> bool:
    """Whether ``thing`` is a module of flax or PyTorch, or makes such modules.

    The latter is a factory of nnx modules, or a class of PyTorch's modules that needs no arguments.
    """
    nnx = sys.modules.get("flax.nnx")  # an nnx module exists only if flax.nnx is imported
    of_flax = isinstance(thing, linen.Module) or (nnx is not None and isinstance(thing, nnx.Module))
    return of_flax or makes_nnx(thing) or is_torch_module(thing)


def from_module(module: object, *, input_shape: tuple[int, ...]) -> Model:
    """A classifier from a module of any kind, with the cross entropy as its loss; ``input_shape`` is for linen."""
    if isinstance(module, linen.Module):
        return from_flax(module, input_shape=input_shape)
    return from_torch_module(module) if is_torch_module(module) else from_nnx(module)
