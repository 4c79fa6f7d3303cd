"""Options that several rules have in common; a rule takes them over with ``registry.takes``."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_async import check
from fedjax_async.server.staleness import Weight, staleness_weight
from fedjax_async.server.transforms import Transform, chain, clip_by_norm, scale_overstale
from fedjax_async.types import Traced


def guard_rails(
    *, clip: Traced | None = None, overstale_after: Traced | None = None, overstale: Traced | None = None
) -> Transform:
    """What every rule does to an arriving direction before it discounts it; nothing by default.

    Args:
      clip: scale it down to at most this Euclidean norm (:func:`clip_by_norm`).
      overstale_after: an upload staler than this is rejected by the rule, or
      overstale: multiplied by this factor in [0, 1] (:func:`scale_overstale`). The run's ``max_staleness`` is another
        thing: the server then drops the upload before it counts, and the clock knows.
    """
    if clip is not None:
        check.positive("clip", clip)
    needs = "left out: it needs overstale_after"
    check.require(overstale_after is not None or overstale is None, "overstale", overstale, needs)
    limits = (
        [] if overstale_after is None else [scale_overstale(overstale_after, 0.0 if overstale is None else overstale)]
    )
    return chain(*([] if clip is None else [clip_by_norm(clip)]), *limits)


def discount(
    *,
    staleness: str = "polynomial",
    exponent: Traced | None = None,
    slope: Traced | None = None,
    threshold: Traced | None = None,
) -> Weight:
    """The staleness weight of a rule; options left ``None`` keep the weight's own default.

    Args:
      staleness: ``constant``, ``hinge`` (options ``slope`` a = 10, ``threshold`` b = 4) or
        ``polynomial`` (option ``exponent`` = 0.5).
    """
    return staleness_weight(staleness, exponent=exponent, slope=slope, threshold=threshold)


class Adaptive(NamedTuple):
    """What an optimiser with two moments is told, in optax's order."""

    server_lr: Traced
    b1: Traced
    b2: Traced
    eps: Traced


def adaptive(*, server_lr: Traced = 0.01, b1: Traced = 0.9, b2: Traced = 0.99, eps: Traced = 1e-3) -> Adaptive:
    """Rate, decay of the first and of the second moment in [0, 1), and what is added to the latter's root."""
    check.positive("server_lr", server_lr)
    check.below_one("b1", b1)
    check.below_one("b2", b2)
    check.positive("eps", eps)
    return Adaptive(server_lr, b1, b2, eps)
