"""Decentralised methods written from the papers: softmax regression in float64 NumPy.

Chance (keys, orders of examples, random entries) comes from the package, where it has its own tests.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.compress import centroids
from fedjax_async.compress.clustering import random_entries
from fedjax_async.local import job_key
from fedjax_async.local.anchored import _CLUSTERING
from fedjax_async.local.batches import seed_of
from fedjax_async.peers.divshare_tensors import _NUMBERED
from fedjax_async.peers.pushcen_adfl import _FIRST
from tests.compress.textbook import released_clusters, weight_clusters
from tests.local.textbook import Adam, batches, gradient

LAMBDA, K, LR, BATCH = 0.3, 4, 0.05, 4


# --- chance ---------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="reference")
def drawn(w, key, reference="paper"):
    """K - 1 random entries of the weights, as the package draws them under the key of a job."""
    own = jax.random.fold_in(key, _CLUSTERING)
    return centroids.random_tables({"w": w}, K, own, reference=reference)["w"][1:]


@jax.jit
def refills(w, key):
    """Random entries for empty clusters [3, K], as the package draws them under the key of a job."""
    own = jax.random.fold_in(jax.random.fold_in(key, _CLUSTERING), 2**31)
    x = w.ravel() - w.mean()
    return jnp.stack([random_entries(jax.random.fold_in(own, t), x, K) for t in range(3)])


# --- local training -------------------------------------------------------------------------------


def descending(now, g):
    return now - LR * g


def stored(size, steps):
    """Batches in the order of the examples, without the last partial one."""
    count = max(1, size // BATCH)
    return [list(range(k % count * BATCH, min(size, (k % count + 1) * BATCH))) for k in range(steps)]


def train(w, b, x, y, groups, steps, anchor=None, mask=None, per_epoch=1):
    """``steps``: how each tensor moves along its gradient; an Adam keeps its moments from job to job."""
    now = [w, b]
    for k, rows in enumerate(groups):
        if mask is not None and k % per_epoch == 0:
            now[0] = now[0] * mask
        grads = list(gradient(*now, x[rows], y[rows]))
        if anchor is not None:
            target, factor = anchor
            grads[0] = grads[0] + 2 * factor * (now[0] - target)
        now = [step(leaf, g) for step, leaf, g in zip(steps, now, grads)]
    return now


# --- nodes ----------------------------------------------------------------------------------------


class Full:
    """Async-DFedAvg, SWIFT, D-PSGD: ``w + sum c (w_j - w)``; with ``masses`` SGP."""

    def __init__(self, w, b, masses=False):
        self.w, self.b, self.masses, self.steps = w, b, masses, [descending] * 2

    def mix(self, inbox, key):
        self.w, self.b = (own + sum(c * (m[i] - own) for m, c in inbox) for i, own in enumerate((self.w, self.b)))

    def fit(self, x, y, groups, key, mass):
        w, b = train(self.w, self.b, x, y, groups, self.steps)
        if self.masses:  # x = s z moves by the step that was computed at z
            w, b = ((mass * old + (new - old)) / mass for old, new in ((self.w, w), (self.b, b)))
        self.w, self.b = w, b

    def send(self, key):
        return [(self.w, self.b)]


class Sender(Full):
    """A node that sends its model only when it has moved by ``trigger`` since it last did; else it repeats that one."""

    def __init__(self, w, b, trigger):
        super().__init__(w, b)
        self.trigger, self.last, self.withheld = trigger, (w, b), []

    def send(self, key):
        moved = np.sqrt(sum(np.sum((now - old) ** 2) for now, old in zip((self.w, self.b), self.last)))
        self.withheld.append(moved < self.trigger)
        self.last = self.last if self.withheld[-1] else (self.w, self.b)
        return [self.last]


class PushCen(Full):
    def __init__(self, w, b, released=False, mask=True):
        super().__init__(w, b)
        self.steps, self.released, self.mask = [Adam(LR).step, Adam(LR).step], released, mask
        self.g = self.v = None

    def mix(self, inbox, key):
        total = sum(c for _, c in inbox)
        base = self.v if self.released else self.g
        super().mix([((m[0][m[1]].reshape(self.w.shape), m[2]), c) for m, c in inbox], key)
        if inbox and self.released and base is None:  # before any training; ``w`` is the mean of the messages now
            self.g = self.cluster(self.w, jax.random.fold_in(key, _FIRST))[0]
        elif inbox:
            spoken = sum(c * m[0] for m, c in inbox)
            self.g = spoken / total if base is None else (1 - total) * base + spoken

    def cluster(self, w, key):
        reference = "released" if self.released else "paper"
        start = np.append(0.0, drawn(w, key, reference)) if self.g is None else self.g
        if not self.released:
            x = w.ravel()
            _, table = weight_clusters(x, start[1:], max_iter=3, tolerance=0.05)
            return table, np.argmin(np.abs(x[:, None] - table), axis=1)
        rows = np.asarray(refills(w, key))
        return released_clusters(w.ravel(), start, drawn=lambda t: rows[t])

    def fit(self, x, y, groups, key, mass):
        table, index = self.cluster(self.w, key)
        if self.released and self.g is None:
            self.g = table
        target = (table if self.g is None else self.g)[index].reshape(self.w.shape)
        mask = (table[index] != 0).reshape(self.w.shape) if self.mask else None
        factor = LAMBDA / (self.w.size if self.released else 1)
        per_epoch = max(1, len(y) // BATCH) if self.released else -(-len(y) // BATCH)
        groups = stored(len(y), len(groups)) if self.released else groups
        self.w, self.b = train(self.w, self.b, x, y, groups, self.steps, (target, factor), mask, per_epoch)

    def send(self, key):
        table, index = self.cluster(self.w, key)
        self.v = table
        return [(table, index, self.b)]


class DivShare(Full):
    """Fragments as dictionaries of entries; a receiver averages each entry over all who sent it."""

    def __init__(self, w, b, pieces):
        super().__init__(w, b)
        self.pieces = pieces  # of each fragment: the entries of (w, b)

    def mix(self, inbox, key):
        new = [self.w.ravel().copy(), self.b.copy()]
        for i, own in enumerate((self.w.ravel(), self.b)):
            values: dict[int, list[float]] = {d: [own[d]] for d in range(len(own))}
            for message, _ in inbox:
                for d, value in message[i].items():
                    values[d].append(value)
            for d, known in values.items():
                new[i][d] = np.mean(known)
        self.w, self.b = new[0].reshape(self.w.shape), new[1]

    def send(self, key):
        return [
            tuple({int(d): v.ravel()[d] for d in p} for v, p in zip((self.w, self.b), piece)) for piece in self.pieces
        ]


class TensorFragments(Full):
    """Of each message one of two tensors, or both where there is one fragment; the draws are the package's."""

    def __init__(self, w, b, fragments):
        super().__init__(w, b)
        self.fragments, self.number = fragments, 0

    def mix(self, inbox, key):
        kept = {"b": [self.b], "w": [self.w]}  # in the order of the leaves
        for position, ((w, b, number), _) in enumerate(inbox):
            chance = jax.random.fold_in(jax.random.fold_in(jax.random.key(number), self.number), position)
            drawn = int(jax.random.randint(chance, (), 0, self.fragments, jnp.int32))
            shuffled = np.argsort(np.asarray(jax.random.bits(jax.random.key(number), (2,), jnp.uint32)))
            parts = np.array_split(shuffled, self.fragments)
            for tensor in parts[drawn]:
                kept["bw"[tensor]].append((b, w)[tensor])
        self.w, self.b = np.mean(kept["w"], axis=0), np.mean(kept["b"], axis=0)

    def send(self, key):
        self.number = np.uint32(jax.random.bits(jax.random.fold_in(key, _NUMBERED), (1,), jnp.uint32)[0])
        return [(self.w, self.b, self.number)]


class Choco(Full):
    """``x += gamma sum w_ij (x_hat_j - x_hat_i)``, with a copy of every neighbour's x_hat; SPARQ-SGD with a trigger."""

    def __init__(self, w, b, keep, gamma, trigger=0.0):
        super().__init__(w, b)
        self.trigger, self.withheld = trigger, []
        self.keep, self.gamma, self.copy, self.seen = keep, gamma, np.zeros(w.size + b.size), {}

    def mix(self, inbox, key):
        flat = self.flat()
        for (who, q), _ in inbox:
            self.seen[who] = self.seen.get(who, 0) + q
        flat = flat + self.gamma * sum(c * (self.seen[who] - self.copy) for (who, _), c in inbox)
        self.b, self.w = flat[: self.b.size], flat[self.b.size :].reshape(self.w.shape)

    def flat(self):
        return np.concatenate([self.b, self.w.ravel()])

    def send(self, key):
        gap = self.flat() - self.copy
        self.withheld.append(np.linalg.norm(gap) < self.trigger)
        q = np.where(np.abs(gap) >= np.sort(np.abs(gap))[-self.keep], gap, 0.0) * (not self.withheld[-1])
        self.copy = self.copy + q
        return [q]


def run(schedule, nodes, data, root, who_sends=False):
    """All nodes' ``(w, b)`` at the end."""
    sent = {}
    for e, i in enumerate(schedule.client):
        entries = range(schedule.inbox_bounds[e], schedule.inbox_bounds[e + 1])
        inbox = [(sent[schedule.source[d], schedule.fragment[d]], schedule.weight[d]) for d in entries]
        key = job_key(root, i, schedule.number[e])
        nodes[i].mix(inbox, key)
        rows = data.order[data.offset[i] : data.offset[i] + data.size[i]]
        seed = tuple(int(word) for word in seed_of(key))
        groups = batches(seed, len(rows), BATCH, int(schedule.local_steps[e]))
        mass = schedule.mass[e] + schedule.sent_mass[schedule.push_event == e].sum()
        nodes[i].fit(data.x[rows], data.y[rows], groups, key, mass)
        for fragment, message in enumerate(nodes[i].send(key)):
            sent[e, fragment] = (int(i), message) if who_sends else message
    return nodes
