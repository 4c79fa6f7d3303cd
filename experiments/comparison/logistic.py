"""A logistic problem with a known optimum: classes in Gaussian noise, and clients with few classes each.

Importing this file registers the data set ``label_mixture``. Its test set is the training part of all clients, so that
the test loss of a run is the objective itself; each client has validation rows of its own beside its training rows.
"""

from __future__ import annotations

import functools

import numpy as np

from fedjax_async import register
from fedjax_async.base import check
from fedjax_async.data import Federation, decode
from fedjax_async.types import FederatedData

FEATURES, CLASSES = 10, 5
DISTANCE = (
    2.0  # of the class centres from the origin, in deviations of the noise: about a quarter of the labels is wrong
)
HELD_OUT = 8  # validation rows of a client
SMALLEST_GRADIENT = 1e-10


@register("dataset", "label_mixture")
def label_mixture(*, alpha: float = 0.1, rows: int = 40) -> Federation:
    """Five classes in Gaussian noise: x | y ~ N(centre_y, S), and y ~ p_k with p_k ~ Dir(``alpha``) for client k.

    S is diagonal, S_jj = 1 / j, and so are the squares of the centres' entries: conditioning as of real inputs.
    Every client has ``rows`` training rows, so that the mean over clients is the mean over rows.
    """
    check.real_positive("alpha", alpha)
    check.whole("rows", rows)
    return Federation("label_mixture", lambda clients, seed: dealt(clients or 10, seed, alpha, rows))


@functools.lru_cache(maxsize=16)
def dealt(clients: int, seed: int, alpha: float, rows: int) -> FederatedData:
    """The clients' rows, x float32 [N (rows + held out), 10]; the first ``N rows`` of them are trained on."""
    rng = np.random.default_rng((seed, 51))
    scale = np.arange(1, FEATURES + 1) ** -0.5
    centres = rng.standard_normal((CLASSES, FEATURES))
    centres *= DISTANCE / np.linalg.norm(centres, axis=1, keepdims=True)
    shares = rng.dirichlet(np.full(CLASSES, alpha), clients)
    total = rows + HELD_OUT
    y = np.stack([rng.choice(CLASSES, total, p=share) for share in shares])
    x = (centres[y] + rng.standard_normal((clients, total, FEATURES))) * scale
    x = np.concatenate([x[:, :rows].reshape(-1, FEATURES), x[:, rows:].reshape(-1, FEATURES)]).astype(np.float32)
    y = np.concatenate([y[:, :rows].ravel(), y[:, rows:].ravel()]).astype(np.int32)
    order, trained = np.arange(len(y), dtype=np.int32), clients * rows
    parts = {
        "offset": np.arange(clients, dtype=np.int32) * rows,
        "size": np.full(clients, rows, np.int32),
        "validation_order": order,
        "validation_offset": trained + np.arange(clients, dtype=np.int32) * HELD_OUT,
        "validation_size": np.full(clients, HELD_OUT, np.int32),
    }
    return FederatedData(
        name="label_mixture", x=x, y=y, order=order, test_x=x[:trained], test_y=y[:trained], decode=decode.as_is,
        num_classes=CLASSES, **parts,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def minimum(clients: int, seed: int, alpha: float, rows: int = 40) -> float:
    """The smallest loss of a logistic model on the training rows, in float64; :func:`smallest_loss` says how."""
    data = dealt(clients, seed, alpha, rows)
    return smallest_loss(np.asarray(data.test_x, np.float64), np.asarray(data.test_y), CLASSES)


def smallest_loss(x: np.ndarray, y: np.ndarray, classes: int) -> float:
    """The infimum of the mean cross entropy of a multinomial logistic model with intercept, by Newton's method.

    x float64 [M, D], y int [M]. The scores of the last class are zero, which takes nothing from the model. Of separable
    classes it is found to about 1e-9. Raises ``RuntimeError`` if the gradient does not vanish in 100 steps.
    """
    inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    hits = np.eye(classes)[y][:, :-1]
    weights = np.zeros((inputs.shape[1], classes - 1))
    loss, gradient, hessian = _at(inputs, hits, y, weights)
    for _ in range(100):
        if np.linalg.norm(gradient) < SMALLEST_GRADIENT:
            return loss
        step = np.linalg.solve(hessian + 1e-12 * np.eye(len(hessian)), gradient)
        size = 1.0
        while size > 1e-8:
            moved = _at(inputs, hits, y, weights - size * step.reshape(weights.shape))
            if moved[0] <= loss + 1e-15:
                break
            size /= 2
        weights, (loss, gradient, hessian) = weights - size * step.reshape(weights.shape), moved
    raise RuntimeError(f"label_mixture: no optimum is found; the gradient is still {np.linalg.norm(gradient):.1e}")


def _at(inputs: np.ndarray, hits: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, ...]:
    """Loss, gradient [D (C - 1)] and Hessian at the weights [D, C - 1]."""
    scores = np.concatenate([inputs @ weights, np.zeros((len(inputs), 1))], axis=1)
    scores -= scores.max(axis=1, keepdims=True)
    total = np.log(np.exp(scores).sum(axis=1))
    loss = float(np.mean(total - scores[np.arange(len(y)), y]))
    p = np.exp(scores - total[:, None])[:, :-1]
    gradient = inputs.T @ (p - hits) / len(y)
    curvature = p[:, :, None] * (np.eye(p.shape[1]) - p[:, None, :])
    hessian = np.einsum("mi,mab,mj->iajb", inputs, curvature, inputs, optimize=True) / len(y)
    return loss, gradient.ravel(), hessian.reshape(gradient.size, gradient.size)
