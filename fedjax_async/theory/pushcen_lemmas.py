"""Lemmas of PushCen-ADFL's analysis as numbers: the anchor's pull (C.5), constants of consensus (C.3), costs (eq. 21).

What the paper does not say, each shown by a test:

- Eq. 95 prints ``eta / lambda^2`` for ``1 / lambda^2``: unrolling eq. 93 sums ``(eta / lambda) / (eta lambda)``. As
  printed it fails for eta < 1/4, at a constant gradient.
- Eq. 92 holds although its proof's inequality of Young lacks a factor eta; with the right one both terms are smaller by
  the factors ``1 - 2 eta lambda`` and ``1 - eta lambda``.
- Steps 1 to 4 of Lemma C.3's proof multiply the consensus error by up to ``2 + 16``, so its contraction rho < 1 comes
  from step 5 alone, which is about windows of events and not about one (see ``pushcen_rate.py``).

Source: PushCen-ADFL (2026), appendices B and C.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_async.base import check


class ConsensusConstants(NamedTuple):
    """C_1, C_2 and C_3 of eq. 63; fields of ``PushCenConstants``."""

    of_drift: float
    of_stale_drift: float
    of_error: float


def consensus_constants(clients: int, sent: float) -> ConsensusConstants:
    """The constants to which steps 1 to 4 of Lemma C.3's proof add up: ``4 / N``, ``16 / N``, ``8 / N + 2 c^2``.

    The activated node's distance enters the mean over N nodes with 1 / N, doubled for its training (eq. 73) and for the
    move of ``w_bar`` (eq. 74); eq. 72 has the factors 4 tau of older drifts and 2 of the error. As in the paper, only
    compression moves ``w_bar``; training moves it too (eq. 102).

    Args:
      clients: N.
      sent: c, the largest share of all mass that an event sends, in [0, 1] (eq. 103).
    """
    check.whole("clients", clients)
    check.in_range("sent", sent, 0, 1)
    return ConsensusConstants(4 / clients, 16 / clients, 8 / clients + 2 * sent**2)


def anchor_distances(start: float, squared_gradients: ArrayLike, lr: float, weight: float) -> np.ndarray:
    """Lemma C.5, eq. 94: bounds of ``E ||w_e - w~||^2`` before each local step and after the last one; float64[E + 1].

    ``u_{e+1} <= (1 - eta lambda) u_e + (eta / lambda) s_e``.

    Args:
      start: ``||w_0 - w~||^2`` [w^2].
      squared_gradients: s, float[E]: ``||grad f(w_e)||^2 + sigma^2``, or the square of each step's own gradient for the
        bound of one trajectory (eq. 92) [l^2/w^2].
      lr: eta > 0 of SGD [w^2/l].
      weight: lambda > 0 with ``eta lambda <= 1 / 2`` [l/w^2].
    """
    squares = _checked(start, squared_gradients, lr, weight)
    found = [float(start)]
    for square in squares:
        found.append((1 - lr * weight) * found[-1] + lr / weight * square)
    return np.array(found)


def anchor_sum_bound(
    start: float, squared_gradients: ArrayLike, lr: float, weight: float, *, printed: bool = False
) -> float:
    """Eq. 95, corrected: ``sum_{e<E} E ||w_e - w~||^2 <= start / (eta lambda) + sum_e s_e / lambda^2``.

    ``printed``: with ``eta / lambda^2``, which is no bound. Arguments as for :func:`anchor_distances`.
    """
    squares = _checked(start, squared_gradients, lr, weight)
    return float(start / (lr * weight) + (lr if printed else 1.0) / weight**2 * squares.sum())


def training_over_clustering(samples: float, epochs: float, iterations: float, k: int) -> float:
    """Eq. 21: the operations of local training over those of one WCP, ``N E / (T k)``, up to constant factors.

    Of the paper's k-means, which compares each weight with all K centroids. With sorted centroids the assignment costs
    ``log2 K`` comparisons (``compress.centroids``).

    Args:
      samples: N of a client.
      epochs: E of a local update.
      iterations: T of the clustering.
      k: centroids a layer.
    """
    for name, value in {"samples": samples, "epochs": epochs, "iterations": iterations}.items():
        check.positive(name, value)
    check.whole("k", k)
    return samples * epochs / (iterations * k)


def _checked(start: float, squared_gradients: ArrayLike, lr: float, weight: float) -> np.ndarray:
    check.non_negative("start", start)
    check.positive("lr", lr)
    check.positive("weight", weight)
    check.require(lr * weight <= 0.5, "lr", lr, f"at most {0.5 / weight:g}, which is 1 / (2 weight)")
    squares = np.asarray(squared_gradients, np.float64)
    good = squares.ndim == 1 and bool((np.isfinite(squares) & (squares >= 0)).all())
    check.require(good, "squared_gradients", squared_gradients, "one axis of finite numbers >= 0")
    return squares
