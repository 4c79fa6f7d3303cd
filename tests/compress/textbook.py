"""Compressors in NumPy, float64, written from their definitions; and test vectors."""

import numpy as np

MAKERS = {
    "gaussian": lambda rng, size: rng.normal(size=size),
    "heavy tails": lambda rng, size: rng.standard_t(2, size=size),
    "ties": lambda rng, size: rng.integers(-2, 3, size=size).astype(float),
    "constant": lambda rng, size: np.full(size, -0.75),
    "one spike": lambda rng, size: np.where(np.arange(size) == size // 2, 5.0, 0.0),
    "zeros": lambda rng, size: np.where(np.arange(size) % 2 == 0, 0.0, -0.0),
}  # fmt: skip


def vector(kind, size, seed=0):
    return MAKERS[kind](np.random.default_rng(seed), size).astype(np.float32)


def largest(x, k):
    """Ascending indices of the k largest |x|, the first ones among equals."""
    return np.sort(np.argsort(-np.abs(np.asarray(x, np.float64)), kind="stable")[:k])


def topk(x, k):
    out = np.zeros(len(x))
    index = largest(x, k)
    out[index] = x[index]
    return out


def sign(x):
    return np.where(np.asarray(x) >= 0, 1.0, -1.0)


def scaled_sign(x):
    x = np.asarray(x, np.float64)
    return np.abs(x).sum() / max(1, len(x)) * sign(x)


def square(x):
    return float(np.sum(np.asarray(x, np.float64) ** 2))


def beta(size, steps, norm="euclidean"):
    """Bound on the relative variance of QSGD."""
    return min(size / steps**2 / (4 if norm == "max" else 1), size**0.5 / steps)


def weight_clusters(x, start, *, max_iter, tolerance):
    """WCP of a vector by a matrix of all distances: the decoded vector, and the table with zero in slot 0.

    ``start``: the K - 1 others.
    """
    others, before = np.sort(start), None
    for t in range(max_iter):
        table = np.sort(np.append(others, 0.0))
        zero = int((others < 0).sum())
        label = nearest(x, table)
        loss = ((x - table[label]) ** 2).sum()
        for j in range(len(table)):
            if (label == j).any():
                table[j] = x[label == j].mean()
        others = np.sort(np.delete(table, zero))
        if t > 0 and abs(loss - before) <= tolerance * before:
            break
        before = loss
    table = np.append(0.0, others)
    return np.sort(table)[nearest(x, np.sort(table))], table


def nearest(x, table):
    """Positions in an ascending table: the number of midpoints below x, and the lowest of equal entries.

    Checked against all distances.
    """
    place = np.searchsorted(table, table[(x[:, None] > (table[1:] + table[:-1]) / 2).sum(axis=1)])
    distances = np.abs(x[:, None] - table)
    np.testing.assert_allclose(distances[np.arange(len(x)), place], distances.min(axis=1), rtol=1e-12, atol=1e-14)
    return place


def released_clusters(x, slots, *, drawn, max_iter=3, tolerance=0.05):
    """The clustering of PushCen-ADFL's released code: the sorted table [K], and the index of each entry of x.

    Written from a description of what that code does. Its K ``slots`` keep their places until they are sorted at the
    end. In the first assignment all of them stand as they were given; slot 0 becomes zero after each update of the
    means. An entry goes to the nearest slot, to the lower one of two that are equally near. ``drawn(t)``: entries of
    ``x - mean(x)`` that refill empty slots in iteration t, one for each slot in the order of their values.
    """
    x, slots, before = x - np.mean(x), np.array(slots, float), np.inf
    for t in range(max_iter):
        label = np.argmin(np.abs(x[:, None] - slots), axis=1)
        loss = np.sum((x - slots[label]) ** 2)
        order = np.argsort(np.argsort(slots, kind="stable"))
        means = [
            slot + np.mean(x[label == j] - slot) if j in label else drawn(t)[order[j]] for j, slot in enumerate(slots)
        ]
        slots = np.array([0.0, *means[1:]])
        if t >= 1 and abs(loss - before) < tolerance * before:
            break
        before = loss
    table = np.sort(slots)
    return table, np.argmin(np.abs(x[:, None] - table), axis=1)
