"""The delay-corrected rules, AsyncCurve and FedMRUR once more: float64 NumPy, written from the papers' formulas.

In the pseudo-gradients of AsyncManifold (2025), eq. 15 and Algorithm 1 with its errors corrected: ``Delta = Theta^t -
Theta_i``, ``b = Theta^t - Theta^tau``, step ``Theta^tau - eta mean(Delta_hat)``. AsyncCurve is in points of curves
instead of steps along them.
"""

import copy

import numpy as np

from tests.geometry import textbook as geometry
from tests.server.textbook import CLIENTS, Rule
from tests.server.textbook_loops import GROUPS

# --- delay corrections: ``(Delta, b) -> Delta_hat``; an object may have a memory --------------------


class Corrected(Rule):
    """Each delta is corrected against the model at its arrival; the mean is subtracted when the step closes."""

    per = "whole"

    def begin(self, x, uploads):
        self.correct = self.corrector()
        self.correct.total = len(uploads)  # for OrthoDyn, which may switch after a share of the run

    def direction(self, x, u):
        self.after = copy.deepcopy(self.correct)
        return self.after(-u.delta, u.start - x)

    def taken(self, x, t):
        self.correct = self.after
        return t._replace(direction=-t.direction)


class DCASGD(Corrected):
    """Zheng et al. (2017), eq. 10."""

    strength = 0.04

    def corrector(self):
        return lambda delta, b: geometry.corrected(delta, b, self.strength, np.diag(delta * delta))


class DCASGDa(Corrected):
    """Zheng et al. (2017), eq. 14."""

    strength, decay, eps = 2.0, 0.95, 1e-7

    def corrector(self):
        return geometry.DCASGDa(9, self.strength, self.decay, self.eps)


def ortho(alpha, theta, per):
    """OrthoCorrect(alpha, theta_0), group by group."""
    groups = GROUPS[per]
    return lambda delta, b: np.concatenate([geometry.ortho_correct(delta[g], b[g], alpha, theta) for g in groups])


class Ortho(Corrected):
    alpha, theta = 0.0, 0.0

    def corrector(self):
        return ortho(self.alpha, self.theta, self.per)


PHASES = {"asgd": (0.0, -2.0), "fedasync": (1.0, -2.0), "orthograd": (0.0, 0.0), "orthopos": (1.0, 0.0)}


class OrthoDyn(Corrected):
    """With either switch; of three phases, the second ends between the first and the end of the run or of the norm."""

    phases, switch, fraction, second_fraction, decay = "orthograd+orthopos", "norm", 0.5, None, 0.99

    def corrector(self):
        share = self.switch == "share"
        second = (self.fraction + share) / 2 if self.second_fraction is None else self.second_fraction
        phases = [ortho(*PHASES[phase], self.per) for phase in self.phases.split("+")]
        return geometry.OrthoDyn((self.fraction, second)[: len(phases) - 1], phases, self.decay, share=share)


# --- AsyncCurve and FedMRUR -------------------------------------------------------------------------


def geodesic(x, y, s):
    """A geodesic of the hyperboloid of curvature -1, by interpolation with hyperbolic sines."""
    p, q = geometry.lift(x), geometry.lift(y)
    d = np.arccosh(max(1.0, -geometry.lorentz_product(p, q)))
    return ((np.sinh((1 - s) * d) * p + np.sinh(s * d) * q) / np.sinh(d))[1:] if d > 1e-9 else x


class AsyncCurve(OrthoDyn):
    """Algorithm 1; the correction is OrthoDyn or one of its phases, the curve has one or several inner points."""

    server_lr, lowest, swa, momentum, cycle, overwrite = 0.6, 0.2, 0.75, 0.0, 10, None
    dominance, control, step, momentum_on, correction = True, "rotation", "curve", "curve", "orthodyn"
    curve, bends = "quadratic", 1

    def corrector(self):
        return super().corrector() if self.correction == "orthodyn" else ortho(*PHASES[self.correction], self.per)

    def begin(self, x, uploads):
        super().begin(x, uploads)
        self.counts, self.average, self.models, self.tau = np.zeros(CLIENTS), x, 0, 0
        self.sizes = {}
        self.velocity = self.along = np.zeros_like(x)
        self.begins = self.swa * sum(u.closes for u in uploads)

    def scale(self, u, client):
        """The position on the curve."""
        accepted = self.counts.sum()
        eta = self.server_lr * (1 + (self.lowest - 1) * (accepted % self.cycle) / max(self.cycle - 1, 1))
        self.counts[client] += 1
        self.sizes[client] = u.examples
        if self.weighting == "examples":  # eq. 32, times N
            eta *= u.examples / np.mean([size for size in self.sizes.values() if size > 0])
        return min(1.0, eta / (CLIENTS * self.counts[client] / (accepted + 1)) if self.dominance else eta)

    def share(self, u):
        return 1.0

    def taken(self, x, t):
        self.correct, change = self.after, -t.direction
        if self.momentum_on == "curve":
            self.along = change = change + self.momentum * self.along
        return self.moved(x, t.u, change, t.scale) - x

    def moved(self, x, u, change, position):
        """Theta^{tau+1} for a single client, from points: the old curve, the corrected end, the turned inner points."""
        end, points = x + change, []
        if self.step == "geodesic":
            return geodesic(x, end, position)
        inner = 2 if self.curve == "cubic" else self.bends
        for j in range(inner):
            share = (j + 1) / (inner + 1)
            offset = offset_of(u.delta, j)
            turned = geometry.rotation(u.delta, change) @ offset if self.control == "rotation" else offset
            points.append(x + share * change + (turned if self.step == "curve" else 0.0))
        return (geometry.polygon if self.curve == "chain" else geometry.bezier)([x, *points, end], position)

    def close(self, x, waiting):
        self.velocity = np.mean(waiting, axis=0) + self.momentum * self.velocity * (self.momentum_on == "space")
        x = x + self.velocity
        if self.tau >= self.begins and self.tau % self.cycle == 0:
            self.average = (self.average * self.models + x) / (self.models + 1)
            self.models += 1
        if self.overwrite is not None and self.models and self.tau % self.overwrite == 0:
            x = self.average
        self.tau += 1
        return x

    def shown(self, x):
        return self.average if self.models else x


def offset_of(delta, j=0):
    """The offsets of inner points from the chord that ``made_up.uploading`` makes up."""
    return 0.5 * np.sin((3.0 + j) * delta)


class FedMRUR(Rule):
    """An et al. (2023): the mean, at the mean length."""

    reaggregate = True

    def combine(self, directions, shares):
        mean, p = super().combine(directions, shares), shares / shares.sum()
        return mean * (p @ np.linalg.norm(directions, axis=1)) / np.linalg.norm(mean) if self.reaggregate else mean
