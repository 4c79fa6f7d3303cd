"""Options that several rules have in common; a rule takes them over with ``registry.takes``."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedjax_async import check
from fedjax_async.server.staleness import Weight, staleness_weight
from fedjax_async.server.transforms import Transform, chain, clip_by_norm, limit_staleness


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


class Adaptive(NamedTuple):
    """What an optimiser with two moments is told, in optax's order."""

    server_lr: Any
    b1: Any
    b2: Any
    eps: Any


def adaptive(*, server_lr: Any = 0.01, b1: Any = 0.9, b2: Any = 0.99, eps: Any = 1e-3) -> Adaptive:
    """Rate, decay of the first and of the second moment in [0, 1), and what is added to the latter's root."""
    check.positive("server_lr", server_lr)
    check.below_one("b1", b1)
    check.below_one("b2", b2)
    check.positive("eps", eps)
    return Adaptive(server_lr, b1, b2, eps)
