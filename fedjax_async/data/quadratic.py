"""A federated least-squares problem whose optimum, constants and heterogeneity are known exactly."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.check import in_range, non_negative, positive, require, whole
from fedjax_async.data import decode
from fedjax_async.data.dataset import Dataset


class Quadratic(NamedTuple):
    """Client i's loss is f_i(w) = 1/2 (w - b_i)^T A_i (w - b_i) + noise^2 / 2; the goal is their mean f.

    ``optimum`` minimises f; ``minimum`` is f there. All arrays are float64.
    """

    dataset: Dataset
    curvature: np.ndarray  # A [N, D, D]
    local_optima: np.ndarray  # b [N, D]
    optimum: np.ndarray  # w* [D]
    minimum: float

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        """Gradient of f_i at w; float64[D]."""
        return self.curvature[client] @ (w - self.local_optima[client])


def quadratic_problem(
    *,
    clients: int = 10,
    dim: int = 10,
    examples: int = 32,
    heterogeneity: float = 1.0,
    smallest: float = 0.1,
    largest: float = 1.0,
    noise: float = 0.0,
    same_curvature: bool = False,
    seed: int = 0,
) -> Quadratic:
    """Least squares with a known optimum and exactly controlled heterogeneity; natural clients.

    Client i has n = ``examples`` rows (a_j, y_j) with loss 1/2 (a_j . w - y_j)^2, chosen so that their mean
    is exactly f_i: the rows are sqrt(n) Q A_i^(1/2) with Q [n, D] orthonormal, the targets a_j . b_i plus noise
    of mean square ``noise``^2 that is orthogonal to the rows (so b_i stays the client's optimum, while
    minibatch gradients are noisy there).

    A_i has eigenvalues spaced geometrically from ``smallest`` (strong convexity) to ``largest``
    (smoothness) and a random rotation of its own, or a shared one with ``same_curvature``.
    ``heterogeneity`` >= 0 is exactly zeta, where zeta^2 = (1/N) sum_i |grad f_i(w*)|^2; with 0 all
    clients share one optimum. Both the training and the test pool are all clients' rows, so that the test
    loss is f. Needs ``examples`` >= ``dim`` (> with noise) and, for zeta > 0, at least two clients.
    """
    for field, value in {"clients": clients, "dim": dim, "examples": examples}.items():
        whole(field, value, 1)
    positive("smallest", smallest)
    in_range("largest", largest, smallest, np.inf)
    non_negative("heterogeneity", heterogeneity)
    non_negative("noise", noise)
    least = dim + (noise > 0)
    require(examples >= least, "examples", examples, f"at least {least}, so that the rows can carry the curvature")
    require(heterogeneity == 0 or clients > 1, "clients", clients, "at least 2 when heterogeneity > 0")
    rng = np.random.default_rng(seed)
    eigenvalues = np.geomspace(smallest, largest, dim)
    bases = np.linalg.qr(rng.standard_normal((1 if same_curvature else clients, dim, dim)))[0]
    bases = np.broadcast_to(bases, (clients, dim, dim))
    curvature = np.einsum("nij,j,nkj->nik", bases, eigenvalues, bases)
    root = np.einsum("nij,j,nkj->nik", bases, np.sqrt(eigenvalues), bases)
    optimum, local_optima = _optima(curvature, heterogeneity, rng)

    rows, targets = [], []
    for i in range(clients):
        q = np.linalg.qr(rng.standard_normal((examples, dim)))[0]
        a = np.sqrt(examples) * q @ root[i]
        rows.append(a)
        targets.append(a @ local_optima[i] + noise * _orthogonal_noise(q, rng))
    x, y = np.concatenate(rows), np.concatenate(targets)
    groups = np.repeat(np.arange(clients, dtype=np.int32), examples)
    away = optimum - local_optima
    minimum = 0.5 * float(np.einsum("ni,nij,nj->", away, curvature, away)) / clients + 0.5 * float(noise) ** 2
    dataset = Dataset("quadratic", x, y, x, y, decode.as_is, groups=groups)
    return Quadratic(dataset, curvature, local_optima, optimum, minimum)


def _optima(curvature: np.ndarray, zeta: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """w* [D] and b [N, D] with (1/N) sum_i |A_i (w* - b_i)|^2 = zeta^2; the gradients are linear in the spread of b."""
    clients, dim, _ = curvature.shape
    centre, spread = rng.standard_normal(dim), rng.standard_normal((clients, dim))
    middle = np.linalg.solve(curvature.sum(axis=0), np.einsum("nij,nj->i", curvature, spread))
    gradients = np.einsum("nij,nj->ni", curvature, middle - spread)
    rms = np.sqrt(np.mean(np.sum(gradients**2, axis=1)))
    scale = zeta / rms if zeta else 0.0
    return centre + scale * middle, centre + scale * spread


def _orthogonal_noise(q: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random vector [n] of mean square 1, orthogonal to the columns of q [n, D]; zero if there is none."""
    if q.shape[0] == q.shape[1]:
        return np.zeros(len(q))
    e = rng.standard_normal(len(q))
    e -= q @ (q.T @ e)
    return e * np.sqrt(len(e)) / np.linalg.norm(e)


@functools.wraps(quadratic_problem)
def quadratic(**options: Any) -> Dataset:
    """The data set of ``quadratic_problem``, which has the options and the docstring shown by the registry."""
    return quadratic_problem(**options).dataset
