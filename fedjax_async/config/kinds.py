"""The type of an object in place of a name: checked before anything else reads the object.

Fingerprints read all of an object, and some objects of other programs cannot be read. So the type is checked first, and
the error names the setting, what was given and what it takes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import optax

from fedjax_async.base import check
from fedjax_async.base.method import Method
from fedjax_async.base.spec import Spec
from fedjax_async.compress import Compressor
from fedjax_async.config import objects
from fedjax_async.data import Dataset, Federation
from fedjax_async.models import is_module
from fedjax_async.peers import PeerAlgorithm, Topology
from fedjax_async.peers.topologies import is_graphs
from fedjax_async.types import ClientAlgorithm, FederatedData, Model, ServerAlgorithm


def _is_torch(thing: object) -> bool:
    """Whether it is an object of PyTorch, or of a class that inherits from one of PyTorch's."""
    return any(base.__module__.partition(".")[0] == "torch" for base in type(thing).__mro__)


def _is_function(thing: object) -> bool:
    """Whether it can be called, and is no network: a network can be called too, but is only ever a model."""
    return callable(thing) and not is_module(thing) and not _is_torch(thing)


def _is_factory(thing: object) -> bool:
    """Whether it is a function of options alone: a factory, of which a run needs what it returns."""
    try:
        return callable(thing) and all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(thing).parameters.values())
    except ValueError:  # it has no signature
        return False


def _is_part(thing: object) -> bool:
    return _is_function(thing) and not _is_factory(thing)


_FITS: dict[str, Callable[[object], bool]] = {
    "method": lambda thing: isinstance(thing, Method),
    "topology": lambda thing: isinstance(thing, Topology) or is_graphs(thing) or _is_part(thing),
    "dataset": lambda thing: isinstance(thing, (Dataset, Federation, FederatedData)),
    "model": lambda thing: isinstance(thing, Model) or is_module(thing),
    "initial": objects.is_params,
    "client": lambda thing: isinstance(thing, ClientAlgorithm) or _is_function(thing),
    "optimizer": lambda thing: isinstance(thing, optax.GradientTransformation) or _is_function(thing),
    "compress": lambda thing: isinstance(thing, Compressor),
    "metrics": lambda thing: isinstance(thing, Mapping),  # ``config.measures`` checks the metrics in it
}  # all others are functions
_TAKES = {
    "method": "a name or a Method, or the Spec of a rule",
    "model": "a name, a Model, or a module of flax.linen, flax.nnx or torch.nn",
    "initial": f"a text, or {objects.KINDS['initial']}",
    "client": "a ClientAlgorithm, a factory of one, f(model, *, ...), its Spec, or a name registered for a factory",
    "metrics": f"a text, or {objects.KINDS['metrics']}",
}


def require_kind(field: str, thing: object) -> None:
    """``ValueError`` that names the setting, the object and what the setting takes, if it does not take the object."""
    if not (field in objects.SPECS and isinstance(thing, Spec)) and not _FITS.get(field, _is_part)(thing):
        takes = _TAKES.get(field, f"a name or {objects.KINDS[field]}")
        check.require(False, field, objects.shown(thing), takes + _advice(field, thing))


def require_some_kind(thing: object) -> None:
    """``ValueError`` unless at least one setting takes the object."""
    good = isinstance(thing, Spec) or any(_FITS.get(field, _is_function)(thing) for field in objects.KINDS)
    allowed = "an object of your own that a setting takes, such as a Method, a Model, a module or FederatedData"
    check.require(good, "object", objects.shown(thing), f"{allowed}{_advice('', thing)}")


def _is_nnx(thing: type) -> bool:
    """Whether it is a class of modules of ``flax.nnx``."""
    return any(base.__module__.startswith("flax.nnx") for base in thing.__mro__)


def _advice(field: str, thing: Any) -> str:  # noqa: PLR0911 (a line for each kind)
    """What to do instead, for objects that are often given in place of another; ``field``: empty if not known."""
    if field in ("method", "") and isinstance(thing, ServerAlgorithm):
        return "; wrap the rule: Method(rule, timing='every')"
    if field in ("method", "") and isinstance(thing, PeerAlgorithm):
        return "; wrap the algorithm: Method(algorithm)"
    if field == "method" and callable(thing):
        return "; wrap the factory: Method(f), or Spec(f, option=...)"
    if field == "model" and isinstance(thing, type):
        fresh = " or, for other weights with each seed, lambda rngs: {0}(..., rngs=rngs)" if _is_nnx(thing) else ""
        return f"; make one: {thing.__name__}(...)" + fresh.format(thing.__name__)
    if field in ("model", "") and _is_torch(thing):
        return "; of PyTorch's objects, a torch.nn.Module"
    if field == "model" and callable(thing) and "torch" in sys.modules:
        return "; of a function that makes modules of PyTorch, models.from_torch_module(f)"
    return f"; give what the factory returns: {thing.__name__}(...)" if field and _is_factory(thing) else ""
