"""Two generated problems with known properties: least squares with a known optimum, and logistic ``synthetic``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base.check import in_range, non_negative, positive, require, whole
from fedjax_async.data import decode
from fedjax_async.data.federated import Dataset


class Quadratic(NamedTuple):
    """Client i's loss is f_i(w) = 1/2 (w - b_i)^T A_i (w - b_i) + noise^2 / 2; the objective f is the mean of the f_i.

    ``optimum`` minimises f; ``minimum`` is the value of f there. All arrays are float64.
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
    is exactly f_i. The rows are sqrt(n) Q A_i^(1/2) with Q [n, D] orthonormal. The targets are a_j . b_i plus noise
    of mean square ``noise``^2 that is orthogonal to the rows (so b_i stays the client's optimum, while
    minibatch gradients are noisy there).

    A_i has eigenvalues spaced geometrically from ``smallest`` (strong convexity) to ``largest`` (smoothness) and a
    random rotation: one for each client, or one for all with ``same_curvature``. ``heterogeneity`` >= 0 is exactly
    zeta, where zeta^2 = (1/N) sum_i |grad f_i(w*)|^2; with 0 all clients have the same optimum. Training set and test
    set are both the rows of all clients, so that the test loss is f. Needs ``examples`` >= ``dim`` (with noise, >
    ``dim``) and, for zeta > 0, at least two clients. Raises ``ValueError`` for options out of range.
    """
    for field, value in {"clients": clients, "dim": dim, "examples": examples}.items():
        whole(field, value, 1)
    positive("smallest", smallest)
    in_range("largest", largest, smallest, np.inf)
    non_negative("heterogeneity", heterogeneity)
    non_negative("noise", noise)
    least = dim + (noise > 0)
    require(examples >= least, "examples", examples, f"at least {least}, so that the rows can have the curvature")
    require(heterogeneity == 0 or clients > 1, "clients", clients, "at least 2 when heterogeneity > 0")
    whole("seed", seed, 0)
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
    distance = optimum - local_optima
    minimum = 0.5 * float(np.einsum("ni,nij,nj->", distance, curvature, distance)) / clients + 0.5 * float(noise) ** 2
    dataset = Dataset("quadratic", x, y, x, y, decode.as_is, groups=groups)
    return Quadratic(dataset, curvature, local_optima, optimum, minimum)


def _optima(curvature: np.ndarray, zeta: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """w* [D] and b [N, D] with (1/N) sum_i |A_i (w* - b_i)|^2 = zeta^2. The gradients are linear in the spread of b."""
    clients, dim, _ = curvature.shape
    centre, spread = rng.standard_normal(dim), rng.standard_normal((clients, dim))
    middle = np.linalg.solve(curvature.sum(axis=0), np.einsum("nij,nj->i", curvature, spread))
    gradients = np.einsum("nij,nj->ni", curvature, middle - spread)
    rms = np.sqrt(np.mean(np.sum(gradients**2, axis=1)))
    scale = zeta / rms if zeta else 0.0
    return centre + scale * middle, centre + scale * spread


def _orthogonal_noise(q: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random vector [n] of mean square 1, orthogonal to the columns of q [n, D]; zero if n = D."""
    if q.shape[0] == q.shape[1]:
        return np.zeros(len(q))
    e = rng.standard_normal(len(q))
    e -= q @ (q.T @ e)
    return e * np.sqrt(len(e)) / np.linalg.norm(e)


@functools.wraps(quadratic_problem)
def quadratic(**options: Any) -> Dataset:
    """The data set of ``quadratic_problem``; the registry shows that function's options and docstring."""
    return quadratic_problem(**options).dataset


def synthetic(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    features: int = 60,
    classes: int = 10,
    mean_log_size: float = 4.0,
    std_log_size: float = 2.0,
    least_size: int = 50,
    same_model: bool = False,
    seed: int = 0,
) -> Dataset:
    """Logistic synthetic(alpha, beta): 60 features, 10 classes, lognormal client sizes, natural clients.

    Client k labels its inputs by y = argmax(W_k x + b_k), with the entries of W_k, b_k ~ N(u_k, 1) and
    u_k ~ N(0, ``alpha``); with ``same_model`` all clients have the same W and b. Its inputs are x ~ N(v_k, S),
    S diagonal with S_jj = j^-1.2, the entries of v_k ~ N(B_k, 1), B_k ~ N(0, ``beta``): beta sets the distance
    between the inputs of different clients. alpha and beta are variances, as in the paper. A client has ``least_size``
    + lognormal(``mean_log_size``, ``std_log_size``) training examples, and a ninth as many test examples.
    x is float32 [M, features], y int32 [M].

    Note: in the published definition u_k shifts the scores of all classes equally, so ``alpha`` changes the models
    but no label. It is kept for comparison. The tasks differ because every client draws its own W_k.

    Source: Shamir, Srebro and Zhang (2014); Li et al., FedProx (2020), section 5.1.
    """
    for field, value in {"alpha": alpha, "beta": beta, "std_log_size": std_log_size}.items():
        non_negative(field, value)
    positive("mean_log_size", mean_log_size)
    whole("clients", clients, 1)
    whole("features", features, 1)
    whole("classes", classes, 2)
    whole("least_size", least_size, 1)
    whole("seed", seed, 0)
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(mean_log_size, std_log_size, clients).astype(np.int64) + least_size
    deviation = np.arange(1, features + 1) ** -0.6  # square root of S_jj
    model_mean = rng.normal(0, np.sqrt(alpha), clients)
    input_mean = rng.normal(0, np.sqrt(beta), clients)
    train: list[tuple[np.ndarray, np.ndarray]] = []
    test: list[tuple[np.ndarray, np.ndarray]] = []
    for k in range(clients):
        if k == 0 or not same_model:
            weights = rng.normal(model_mean[k], 1, (features, classes))
            bias = rng.normal(model_mean[k], 1, classes)
        centre = rng.normal(input_mean[k], 1, features)
        extra = -(-int(sizes[k]) // 9)
        x = centre + deviation * rng.standard_normal((sizes[k] + extra, features))
        y = np.argmax(x @ weights + bias, axis=1).astype(np.int32)
        train.append((x[extra:].astype(np.float32), y[extra:]))
        test.append((x[:extra].astype(np.float32), y[:extra]))
    (x, y), (test_x, test_y) = (tuple(map(np.concatenate, zip(*pool))) for pool in (train, test))
    groups = np.repeat(np.arange(clients, dtype=np.int32), sizes)
    return Dataset("synthetic", x, y, test_x, test_y, decode.as_is, num_classes=classes, groups=groups)
