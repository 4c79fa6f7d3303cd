"""Local training once more: the shuffle in pure Python integers, the trainer in float64 NumPy."""

from __future__ import annotations

import numpy as np

WORD, PASSES = 2**32, 24


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


def swap_or_not(seed: tuple[int, int], epoch: int, size: int) -> list[int]:
    """The whole permutation: in round r, x and its mirror image ``pivot - x`` may swap places."""
    base = lowbias32(seed[0] ^ lowbias32((seed[1] + epoch * 0x9E3779B9) % WORD))
    word = [lowbias32((base + i * 0x9E3779B9) % WORD) for i in range(3 * PASSES)]
    result = []
    for position in range(size):
        x = position
        for a, b, pivot in zip(word[:PASSES], word[PASSES:], word[2 * PASSES :]):
            mirror = (pivot - x) % size
            if (a * max(x, mirror) + b) % WORD >= WORD // 2:
                x = mirror
        result.append(x)
    return result


def batches(seed: tuple[int, int], size: int, batch_size: int, steps: int) -> list[list[int]]:
    """The first ``steps`` minibatches: epoch after epoch, each cut into runs of ``batch_size``."""
    orders = [swap_or_not(seed, epoch, size) for epoch in range(-(-steps * batch_size // size))]
    return [order[low : low + batch_size] for order in orders for low in range(0, size, batch_size)][:steps]


def gradient(w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of the mean cross-entropy of softmax regression, ``softmax(x w + b)``."""
    scores = x @ w + b
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y), p.mean(axis=0)


def sgd(start, gradients, *, lr, momentum=0.0, nesterov=False, weight_decay=0.0, proximal=0.0, scale=1.0):
    """SGD from a vector; ``gradients``: of each step, a function of the weights."""
    w, velocity = start, 0.0
    for gradient in gradients:
        g = gradient(w) + proximal * (w - start) + weight_decay * w
        velocity = momentum * velocity + g
        w = w - scale * lr * (g + momentum * velocity if nesterov else velocity)
    return w


class Adam:
    """Adam; with ``weight_decay``, AdamW. ``corrected``: its moments at the start are already corrected."""

    def __init__(self, lr, *, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, m=0.0, v=0.0, corrected=False):
        self.lr, self.b, self.eps, self.weight_decay = lr, np.array([b1, b2]), eps, weight_decay
        self.moments, self.t, self.corrected = (m, v), 0, corrected

    def step(self, w, g, factor=1.0):
        self.t += 1
        self.moments = [b * old + (1 - b) * new for b, old, new in zip(self.b, self.moments, (g, g * g))]
        m, v = self.moments if self.corrected else (a / (1 - b**self.t) for b, a in zip(self.b, self.moments))
        return w - factor * self.lr * (m / (np.sqrt(v) + self.eps) + self.weight_decay * w)


def adam(w, gradients, **options):
    """Adam along given gradients."""
    optimizer = Adam(**options)
    for g in gradients:
        w = optimizer.step(w, g)
    return w
