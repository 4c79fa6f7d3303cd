"""The geometry once more: float64 NumPy on vectors, with the matrices and sums of the definitions, and decimals."""

import math
from decimal import Decimal, localcontext

import numpy as np


def bezier(points, s):
    """Bernstein's form."""
    n = len(points) - 1
    return sum(math.comb(n, j) * s**j * (1 - s) ** (n - j) * p for j, p in enumerate(points))


def bezier_length(points, pieces=20_000):
    """The length of a fine polygonal chain on the curve."""
    on_curve = np.stack([bezier(points, s) for s in np.linspace(0.0, 1.0, pieces + 1)])
    return np.linalg.norm(np.diff(on_curve, axis=0), axis=1).sum()


def polygon(points, s):
    n = len(points) - 1
    j = min(int(s * n), n - 1) if n else 0
    return points[0] if n == 0 else points[j] + (s * n - j) * (points[j + 1] - points[j])


def control_point(start, end, displacement, gamma):
    """Eq. 30, with the projection as a matrix."""
    delta = start - end
    square = delta @ delta
    projector = np.outer(delta, delta) / square if square else np.zeros((len(delta), len(delta)))
    return (start + end) / 2 + (displacement - gamma * projector @ displacement)


def rotation(u, w):
    """The matrix that turns u to the direction of w in their plane, or nothing if they have none."""
    e1, unit = u / np.linalg.norm(u), w / np.linalg.norm(w)
    e2 = unit - (unit @ e1) * e1
    if np.linalg.norm(e2) < 1e-12:
        return np.eye(len(u))
    e2 = e2 / np.linalg.norm(e2)
    cos, sin = unit @ e1, unit @ e2
    in_plane = (cos - 1) * (np.outer(e1, e1) + np.outer(e2, e2)) + sin * (np.outer(e2, e1) - np.outer(e1, e2))
    return np.eye(len(u)) + in_plane


def surgery(d1, d2):
    return d1 - (d1 @ d2) / (d2 @ d2) * d2 if d1 @ d2 < 0 else d1


def corrected(delta, drift, lam, matrix):
    """Eq. 15: ``Delta + lambda M (Theta^tau - Theta^t)``, and ``drift = b = Theta^t - Theta^tau``."""
    return delta + lam * matrix @ (-drift)


def ortho_correct(delta, drift, alpha, threshold):
    """The paper's case distinction, with erratum A1; lambda and M for :func:`corrected`."""
    if not delta.any() or not drift.any():
        return delta
    cos = delta @ drift / (np.linalg.norm(delta) * np.linalg.norm(drift))
    lam = delta @ drift / (drift @ drift) if cos <= threshold or threshold == 1 else alpha  # cos may round above 1
    return corrected(delta, drift, lam, np.eye(len(delta)))


class DCASGDa:
    """Zheng et al. (2017), with the mean square as state."""

    def __init__(self, size, lam=2.0, m=0.95, eps=1e-7):
        self.lam, self.m, self.eps, self.ms = lam, m, eps, np.zeros(size)

    def __call__(self, delta, drift):
        self.ms = self.m * self.ms + (1 - self.m) * delta * delta
        lam = self.lam / np.sqrt(self.ms + self.eps)
        return corrected(delta, drift, 1.0, np.diag(lam * delta * delta))


ORTHOGRAD, ORTHOPOS = (lambda d, b, alpha=alpha: ortho_correct(d, b, alpha, 0.0) for alpha in (0.0, 1.0))


class OrthoDyn:
    """A phase after the other, each a correction.

    A phase ends when the weighted mean of the lengths falls under its fraction of the mean's maximum, or if ``share``,
    after its fraction of the ``total`` arrivals.
    """

    total = np.inf

    def __init__(self, fractions=(0.5,), phases=(ORTHOGRAD, ORTHOPOS), decay=0.99, *, share=False):
        self.fractions, self.phases, self.decay, self.share = (*fractions, None), phases, decay, share
        self.lengths, self.largest, self.phase = [], 0.0, 0

    def ends(self, average):
        """Whether the current phase has ended."""
        fraction = self.fractions[self.phase]
        if fraction is None:  # the last one
            return False
        return len(self.lengths) > fraction * self.total if self.share else average < fraction * self.largest

    def __call__(self, delta, drift):
        self.lengths.append(np.linalg.norm(delta))
        average = np.average(self.lengths[::-1], weights=self.decay ** np.arange(len(self.lengths)))
        self.largest = max(self.largest, average)
        while self.ends(average):
            self.phase += 1
        return self.phases[self.phase](delta, drift)


def lift(x, beta=1.0):
    """The point of the hyperboloid, time first."""
    return np.concatenate([[np.sqrt(beta + x @ x)], x])


def lorentz_product(p, q):
    return p[1:] @ q[1:] - p[0] * q[0]


def lorentz_exp(x, v, beta=1.0):
    """The exponential map in R^(D+1), from the tangent vector whose space part is v; the space part of the result."""
    p = lift(x, beta)
    v = np.concatenate([[x @ v / p[0]], v])  # tangent: <p, v>_L = 0
    size = np.sqrt(max(lorentz_product(v, v), 0.0))
    root = np.sqrt(beta)
    moved = np.cosh(size / root) * p + (root * np.sinh(size / root) / size if size else 1.0) * v
    np.testing.assert_allclose(lorentz_product(moved, moved), -beta, rtol=1e-6)
    return moved[1:]


def exact_lorentz(x, y, beta=1.0):
    """``(d, gradient by x)`` straight from the definition, in decimals of 250 digits."""
    with localcontext() as context:
        context.prec = 250
        x, y = ([Decimal(float(a)) for a in each] for each in (x, y))
        beta = Decimal(float(beta))
        x_time, y_time = ((beta + sum(a * a for a in each)).sqrt() for each in (x, y))
        cosh = (x_time * y_time - sum(a * b for a, b in zip(x, y, strict=True))) / beta
        sinh = max(cosh * cosh - 1, Decimal(0)).sqrt()
        distance = beta.sqrt() * (cosh + sinh).ln()
        slope = [(y_time / x_time * a - b) / (beta.sqrt() * sinh) if sinh else Decimal(0) for a, b in zip(x, y)]
        return float(distance), np.array([float(g) for g in slope])


def exact_square(x, y, beta=1.0):
    """``<p - q, p - q>_L`` of the lifted points, in decimals."""
    with localcontext() as context:
        context.prec = 250
        x, y = ([Decimal(float(a)) for a in each] for each in (x, y))
        x_time, y_time = ((Decimal(float(beta)) + sum(a * a for a in each)).sqrt() for each in (x, y))
        return float(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) - (x_time - y_time) ** 2)
