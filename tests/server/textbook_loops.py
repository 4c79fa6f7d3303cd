"""The rules that remember each client, and OrthoFL, once more: float64 NumPy, written from the papers' formulas."""

import numpy as np

from tests.server.textbook import CLIENTS, FedAsync, Rule

LAYERS = [slice(0, 8), slice(8, 9)]  # of the vector of nine numbers: a kernel with its bias, and a scalar
TENSORS = [slice(0, 6), slice(6, 8), slice(8, 9)]
WHOLE = [slice(0, 9)]
GROUPS = {"layer": LAYERS, "tensor": TENSORS, "whole": WHOLE}


class CA2FL(Rule):
    """Wang et al. (2024), Algorithm 2: the caches are kept, and their mean is computed anew at every step.

    With ``beta``: FedStale, Rodio and Neglia (2024).
    """

    beta = 1.0

    def begin(self, x, uploads):
        self.cache, self.at_step = np.zeros((2, CLIENTS, len(x)))

    def close(self, x, waiting):
        changes = [t.direction - self.beta * self.at_step[t.client] for t in waiting]
        x = x + self.server_lr * (self.beta * self.at_step.mean(axis=0) + np.mean(changes, axis=0))
        for t in waiting:
            self.cache[t.client] = t.direction
        self.at_step = self.cache.copy()
        return x


class MIFA(Rule):
    """Gu et al. (2021), Algorithm 1, and ACE, Chang et al. (2025): the mean of a table of last updates."""

    wait = False

    def begin(self, x, uploads):
        self.table, self.heard = np.zeros((CLIENTS, len(x))), set()

    def close(self, x, waiting):
        for t in waiting:
            self.table[t.client] = t.direction
            self.heard.add(t.client)
        return x if self.wait and len(self.heard) < CLIENTS else x + self.server_lr * self.table.mean(axis=0)


class Area(Rule):
    """Iakovidou and Kim (2024): every K arrivals, the mean of a table of all clients' last models."""

    def begin(self, x, uploads):
        self.models = np.tile(x, (CLIENTS, 1))

    def close(self, x, waiting):
        for t in waiting:
            self.models[t.client] = t.u.start + t.direction
        return self.models.mean(axis=0)


class Malenia(Rule):
    """Tyurin and Richtarik (2023): ``(1/n) sum_i (1/B_i) sum_j Delta_ij`` over the clients of a step."""

    def close(self, x, waiting):
        of_client = [[t.direction for t in waiting if t.client == i] for i in sorted({t.client for t in waiting})]
        return x + self.server_lr * np.mean([np.mean(each, axis=0) for each in of_client], axis=0)


class ADPSGD(Rule):
    """Lian et al. (2018), Algorithm 1: ``X <- X W_k``, then ``x_i <- x_i - gamma g(x_hat)``; the mean is evaluated.

    ``drawn(e, node)``: the node with which ``node`` averages at arrival e.
    """

    at_once = True

    def begin(self, x, uploads):
        self.models, self.e = np.tile(x, (CLIENTS, 1)), -1

    def seen(self, u, client):
        self.e += 1
        return u

    def close(self, x, waiting):
        ((_, i, direction, *_),) = waiting
        j, mixing = self.drawn(self.e, i), np.eye(CLIENTS)
        if j != i:
            mixing[[i, i, j, j], [i, j, i, j]] = 0.5
        self.models = mixing @ self.models
        self.models[i] = self.models[i] + self.server_lr * direction
        return self.models.mean(axis=0)

    def sent(self, x, client):
        return self.models[client]


class Ringleader(Rule):
    """Maranjyan and Richtarik (2025): lists of deltas; a client's turn is an upload that closes a step."""

    def begin(self, x, uploads):
        self.now, self.early, self.had_turn, self.closing = {}, {}, set(), None

    def seen(self, u, client):
        if self.closing is not None:  # what the arrival before leaves behind, also if it was rejected
            self.had_turn.add(self.closing)
            if len(self.had_turn) == CLIENTS:
                self.now, self.early, self.had_turn = self.early, {}, set()
        self.closing, self.accepted = client if u.closes else None, False
        return u

    def taken(self, x, t):
        self.accepted = True
        table = self.early if t.client in self.had_turn and not t.u.closes else self.now
        table.setdefault(t.client, []).append(t.direction)
        return t

    def close(self, x, waiting):
        means = [np.mean(deltas, axis=0) for deltas in self.now.values()]
        return x + self.server_lr * np.mean(means, axis=0) if self.accepted else x


class QuAFL(Rule):
    """Zakerinia et al. (2024) without quantisation.

    ``x <- x / (s + 1) + s / (s + 1) mean_i y_i``; a client's own model becomes ``x / (s + 1) + s / (s + 1) y_i``.
    """

    size = 10

    def begin(self, x, uploads):
        self.own = np.tile(x, (CLIENTS, 1))

    def close(self, x, waiting):
        trained = [t.u.start + t.direction for t in waiting]
        for t, model in zip(waiting, trained):
            self.own[t.client] = (x + self.size * model) / (self.size + 1)
        return x / (self.size + 1) + self.size / (self.size + 1) * np.mean(trained, axis=0)

    def sent(self, x, client):
        return self.own[client]


class Port(Rule):
    """Su and Li (2022), with the weights of the authors' code."""

    likeness_weight, age_weight, bound = 1.0, 3.0, 10.0

    def direction(self, x, u):
        way, delta = x - u.start, u.delta
        lengths = np.linalg.norm(way) * np.linalg.norm(delta)
        self.cosine = way @ delta / lengths if u.staleness > 0 and lengths > 0 else 1.0
        return delta

    def share(self, u):
        likeness, age = (self.cosine + 1) / 2, self.bound / (u.staleness + self.bound)
        return u.examples * (self.likeness_weight * likeness + self.age_weight * age)


class DelayAdaptive(Rule):
    """Koloskova et al. (2022), eq. 11: a late gradient has the step of Mishchenko et al. (2022), or none."""

    tolerated, late = CLIENTS, "shorten"

    def s(self, tau):
        return 1.0 if tau <= self.tolerated else 0.0 if self.late == "drop" else self.tolerated / tau

    def close(self, x, waiting):
        directions = [t.scale * t.direction for t in waiting if t.scale > 0]
        return x + self.server_lr * np.mean(directions, axis=0) if directions else x


class FADAS(Rule):
    """Wang et al. (2024), Algorithm 1 and its delay-adaptive rate."""

    b1, b2, eps, tolerated, adaptation = 0.9, 0.99, 1e-8, 1.0, "inverse"

    def begin(self, x, uploads):
        self.m = self.v = self.largest = np.zeros(len(x))

    def close(self, x, waiting):
        mean, oldest = np.mean([t.direction for t in waiting], axis=0), max(t.u.staleness for t in waiting)
        self.m, self.v = self.b1 * self.m + (1 - self.b1) * mean, self.b2 * self.v + (1 - self.b2) * mean**2
        self.largest = np.maximum(self.largest, self.v)
        late = max(oldest, 1)
        rates = {"inverse": min(self.server_lr, 1 / late), "scaled": self.server_lr / late, "off": self.server_lr}
        rate = rates[self.adaptation] if oldest > self.tolerated else self.server_lr
        return x + rate * self.m / (np.sqrt(self.largest) + self.eps)


class FedStaleWeight(Rule):
    """Ma et al. (2024): updates weighted by their client's mean staleness, over the sum of the weights."""

    window = 5

    def begin(self, x, uploads):
        self.tracked = [[] for _ in range(CLIENTS)]

    def scale(self, u, client):
        self.tracked[client].append(u.staleness)
        return float(np.mean(self.tracked[client][-self.window :]))

    def close(self, x, waiting):
        total = sum(t.scale for t in waiting)
        return x + self.server_lr * sum(t.scale / total * t.direction for t in waiting) if total > 0 else x


class FedNova(Rule):
    """Wang et al. (2020), eq. 6; an upload of n examples took ``1 + n mod 3`` local steps."""

    weighting = "examples"

    def close(self, x, waiting):
        total, local = sum(t.share for t in waiting), [1 + int(t.u.examples) % 3 for t in waiting]
        steps = sum(t.share / total * tau for t, tau in zip(waiting, local))
        return x + self.server_lr * steps * sum(t.share / total * t.direction / tau for t, tau in zip(waiting, local))


class FedDyn(Rule):
    """Acar et al. (2021), Algorithm 1, the server's side; guard rails bound the step to the client's model."""

    towards, h = True, 0.0

    def close(self, x, waiting):
        self.h = self.h - self.alpha / CLIENTS * sum(t.u.delta for t in waiting)
        return x + np.mean([t.direction for t in waiting], axis=0) - self.h / self.alpha


# --- OrthoFL: a moving average, and messages that keep the client's own change --------------------


def perpendicular(vector, direction, groups):
    out = vector.copy()
    for g in groups:
        square = direction[g] @ direction[g]
        if square > 0:
            out[g] = vector[g] - (vector[g] @ direction[g]) / square * direction[g]
    return out


def outside(vector, rows, groups):
    """The part of ``vector`` outside the span of ``rows``, by least squares."""
    out = vector.copy()
    for g in groups:
        out[g] = vector[g] - rows[:, g].T @ np.linalg.lstsq(rows[:, g].T, vector[g], rcond=1e-10)[0]
    return out


class OrthoFL(FedAsync):
    """Algorithm 1 with ``s = tau + 1``; or the client's change is projected on the complement of the others' changes.

    ``W_seen``: the average right after the client's last upload; before the server step, if it had several uploads.
    """

    per, pairwise = "layer", False

    def begin(self, x, uploads):
        self.seen_last, self.changes = np.tile(x, (CLIENTS, 1)), np.zeros((CLIENTS, len(x)))
        self.messages = np.tile(x, (CLIENTS, 1))

    def taken(self, x, t):
        (u, client, *_), shift = t, x - self.seen_last[t.client]
        if self.pairwise:
            others = np.delete(self.changes, client, axis=0)
            self.messages[client] = u.start + outside(u.delta, others, GROUPS[self.per]) + shift
        else:
            self.messages[client] = u.start + u.delta + perpendicular(shift, u.delta, GROUPS[self.per])
        self.changes[client], self.seen_last[client] = u.delta, x
        return t

    def close(self, x, waiting):
        x = super().close(x, waiting)
        if len(waiting) == 1:
            self.seen_last[waiting[0].client] = x
        return x

    def sent(self, x, client):
        return self.messages[client]


class OrthoFLShared(OrthoFL):
    """The shift of the weights sent last, as in the released code; the first update of the average has weight 1."""

    begun = False

    def begin(self, x, uploads):
        self.shared = x

    def scale(self, u, client):
        whole, self.begun = not self.begun, True
        return 1.0 if whole else super().scale(u, client)

    def taken(self, x, t):
        start, delta = t.u.start, t.u.delta
        self.shared = start + delta + perpendicular(self.shared - start, delta, GROUPS[self.per])
        return t

    def close(self, x, waiting):
        return Rule.close(self, x, waiting)

    def sent(self, x, client):
        return self.shared


class OrthoFLReleased(OrthoFLShared):
    """The released code, where tau counts the others' updates since the client's last."""

    per = "tensor"

    def begin(self, x, uploads):
        super().begin(x, uploads)
        self.accepted, self.own_last = 0, [0] * CLIENTS

    def seen(self, u, client):
        return u._replace(staleness=self.accepted - self.own_last[client])

    def taken(self, x, t):
        self.accepted += 1
        self.own_last[t.client] = self.accepted
        return super().taken(x, t)


class HandedOn(Rule):
    """OrthoFL without moving average: ``W <- w_m + (W - start_m)_perp`` at every arrival."""

    at_once, per = True, "layer"

    def close(self, x, waiting):
        ((u, _, direction, *_),) = waiting
        return u.start + direction + perpendicular(x - u.start, u.delta, GROUPS[self.per])
