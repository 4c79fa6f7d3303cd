"""Options that several rules have in common, and how a rule takes them over."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fedjax_async import check, registry
from fedjax_async.server.staleness import Weight, staleness_weight
from fedjax_async.server.transforms import Transform, chain, clip_by_norm, limit_staleness
from fedjax_async.types import ServerAlgorithm

Factory = Callable[..., ServerAlgorithm]


def takes(**groups: Callable[..., Any]) -> Callable[[Factory], Factory]:
    """Let a factory take over the options of ``groups``, each a function of keyword-only options.

    ``@takes(guards=guard_rails)`` makes ``f(*, server_lr, guards)`` an ``f(*, server_lr, clip, ...)``
    that hands the result of ``guard_rails(clip=...)`` on as ``guards``. So rules share options without
    repeating them, and whoever asks for the signature (registry, command line, sweeps) sees each.
    """
    taken = {name: registry.options_of(group) for name, group in groups.items()}

    def decorate(factory: Factory) -> Factory:
        own = [p for name, p in registry.options_of(factory).items() if name not in groups]
        parameters = own + [p for options in taken.values() for p in options.values()]

        @functools.wraps(factory)
        def rule(**options: Any) -> ServerAlgorithm:
            built = {
                name: group(**{key: options.pop(key) for key in taken[name] if key in options})
                for name, group in groups.items()
            }
            return factory(**options, **built)

        signature = inspect.Signature(parameters, return_annotation="ServerAlgorithm")
        rule.__signature__ = signature  # type: ignore[attr-defined]
        rule.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": "ServerAlgorithm"}
        return rule

    return decorate


def guard_rails(*, clip: Any = None, max_staleness: Any = None, overstale: Any = None) -> Transform:
    """What every rule does to an arriving direction before it discounts it; nothing by default.

    Args:
      clip: scale it down to at most this Euclidean norm (:func:`clip_by_norm`).
      max_staleness: an upload staler than this is rejected, or
      overstale: multiplied by this factor in [0, 1] (:func:`limit_staleness`).
    """
    if clip is not None:
        check.positive("clip", clip)
    needs = "left out: it needs max_staleness"
    check.require(max_staleness is not None or overstale is None, "overstale", overstale, needs)
    limits = [] if max_staleness is None else [limit_staleness(max_staleness, 0.0 if overstale is None else overstale)]
    return chain(*([] if clip is None else [clip_by_norm(clip)]), *limits)


def discount(
    *, staleness: str = "polynomial", exponent: Any = None, slope: Any = None, threshold: Any = None
) -> Weight:
    """The staleness weight of a rule; options left ``None`` keep the weight's own default.

    Args:
      staleness: ``constant``, ``hinge`` (options ``slope`` a = 10, ``threshold`` b = 4) or
        ``polynomial`` (option ``exponent`` = 0.5).
    """
    return staleness_weight(staleness, exponent=exponent, slope=slope, threshold=threshold)
