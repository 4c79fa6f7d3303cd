"""Random draws of the clock: each is a function of the seed, a named stream and a counter, never of the order of draws.

A *counter* is one or more integers, such as client and job, as in counter-based generators. Draws of a client or a
job are *hashed*: the number is a hash of (seed, stream, client, job). Any batch of them costs a few array operations
and no memory. Permutations, cohorts and draws without replacement are each one sequence for the whole schedule:
NumPy's generators draw them.

Draws are exact on one machine: the same NumPy version on the same kind of processor gives the same bits,
whatever the size of a batch. On another machine they may differ in the last bit, because NumPy's logarithms and
cosines of arrays depend on the instructions of the processor. Uniform draws are the same everywhere.
``save_schedule`` carries a schedule from one machine to another exactly.

The second half of the file holds the *families* of positive random durations, registry ``FAMILIES``. A family is
``sample(draws, mean, std) -> float64``: one number for each counter of ``draws``. Means (positive) and standard
deviations (non-negative) are arrays that broadcast against the shape of ``draws``; the callers check their signs.
Every family keeps the mean, except ``normal`` and ``normal_or_mean``: what they do with draws <= 0 raises it. The
docstring of a family says what it does with ``std``.

Source of the hash: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with the
constants of Stafford's variant 13, as in SplitMix64.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from types import EllipsisType

import numpy as np

# One constant for the whole clock keeps its generators apart from those of other rooms: NumPy pads
# short seeds with zeros, so [5] and [5, 0] are the same stream.
_CLOCK = 0xC10C
_STREAMS = {
    "sampling": 4,
    "rounds": 6,
    "substitutes": 7,
    "devices": 3,
    "energy": 13,
    "policy": 20,
    "polls": 21,
}

_WORD = (1 << 64) - 1
_ODD, _TURN = np.uint64(0x9E3779B97F4A7C15), 0xD1342543DE82EF95  # odd multipliers of counters and of calls

_BLOCK = 1024  # clients drawn at once by ``once_a_client``

Where = np.ndarray | EllipsisType


def generator(seed: int, stream: str, *counter: int) -> np.random.Generator:
    """NumPy's generator of one stream of the clock at one counter."""
    return np.random.default_rng([seed, _CLOCK, _STREAMS[stream], *counter])


def _scramble(words: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every bit depends on every bit; works in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


class Draws:
    """Random numbers at many counters, with the methods of a NumPy generator.

    ``counter``: integers >= 0, or arrays of them that broadcast. Every call gives one number for each counter:
    float64 of the common ``shape`` (at least 1-d), statistically independent of earlier calls. With ``where``, a mask
    of that shape, a call gives only the numbers of the marked counters. A number depends only on the seed, the stream,
    its counter and how many calls came before.
    """

    def __init__(self, seed: int, stream: str, *counter: np.ndarray | int):
        root = hashlib.blake2b(f"{stream} {seed}".encode(), digest_size=8).digest()
        keys = np.array([int.from_bytes(root, "little")], np.uint64)
        for word in counter:
            keys = _scramble(keys + np.atleast_1d(word).astype(np.uint64) * _ODD)
        self._keys, self._turn = keys, 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is drawn."""
        return self._keys.shape

    def _words(self, where: Where = ...) -> np.ndarray:
        self._turn += 1
        return _scramble(self._keys[where] + np.uint64(self._turn * _TURN & _WORD))

    def apart(self) -> Draws:
        """New draws at the same counters, for a caller that needs more numbers at some counters than at others.

        They count as one call of these draws, however many calls they get.
        """
        draws = Draws.__new__(Draws)
        draws._keys, draws._turn = self._words(), 0
        return draws

    def random(self, where: Where = ...) -> np.ndarray:
        """Uniform in [0, 1)."""
        return (self._words(where) >> np.uint64(11)) * 2.0**-53

    def standard_exponential(self, where: Where = ...) -> np.ndarray:
        """Exponential of mean 1."""
        return -np.log1p(-self.random(where))

    def standard_normal(self, where: Where = ...) -> np.ndarray:
        """Standard normal, by the method of Box and Muller (1958)."""
        return np.sqrt(2 * self.standard_exponential(where)) * np.cos(2 * np.pi * self.random(where))

    def standard_gamma(self, shape: np.ndarray) -> np.ndarray:
        """Gamma of scale 1, by the rejection method of Marsaglia and Tsang (2000)."""
        shape = np.broadcast_to(shape, self.shape)
        small, draws = 1 - self.random(), self.apart()
        d = np.where(shape < 1, shape + 1, shape) - 1 / 3
        out, rejected = np.empty(self.shape), np.ones(self.shape, np.bool_)
        while rejected.any():
            x, share, mode = draws.standard_normal(rejected), 1 - draws.random(rejected), d[rejected]
            v = (1 + x / np.sqrt(9 * mode)) ** 3
            with np.errstate(divide="ignore", invalid="ignore"):
                again = ~((v > 0) & (np.log(share) < x**2 / 2 + mode * (1 - v + np.log(v))))
            out[rejected] = mode * v
            rejected[rejected] = again
        return np.where(shape < 1, out * small ** (1 / np.minimum(shape, 1)), out)

    def geometric(self, p: np.ndarray) -> np.ndarray:
        """Number of trials up to and including the first success; ``p``: probability of success; float64."""
        with np.errstate(divide="ignore"):
            return np.maximum(1, np.ceil(np.log1p(-self.random()) / np.log1p(-np.asarray(p))))


def once_a_client(draw: Callable[[np.ndarray], np.ndarray]) -> Callable[[int], float]:
    """``value(client)``: one number per client from ``draw(clients) -> float64``, drawn in blocks and kept."""
    blocks: dict[int, array] = {}

    def value(client: int) -> float:
        k, offset = divmod(client, _BLOCK)
        if k not in blocks:
            blocks[k] = array("d", draw(np.arange(k * _BLOCK, (k + 1) * _BLOCK)).tobytes())
        return blocks[k][offset]

    return value


def dice(seed: int, stream: str, sides: int, count: int) -> np.ndarray:
    """``count`` numbers below ``sides``, with replacement; int64[count]. A larger count begins with the same ones."""
    return generator(seed, stream).integers(sides, size=count)


def deck(seed: int, stream: str, cards: int, count: int, *counter: int) -> np.ndarray:
    """``count`` numbers below ``cards``, without replacement, from all again when none is left; int64[count].

    The first draws are the same whatever ``count``, so adding clients changes nothing for the others.
    """
    shuffles = -(-count // cards)
    return np.argsort(generator(seed, stream, *counter).random((shuffles, cards)), axis=1).reshape(-1)[:count]


# --- families of durations ----------------------------------------------------------------------

Distribution = Callable[[Draws, np.ndarray, np.ndarray], np.ndarray]

# A smaller share of the mean as std is no spread: numbers that are so near to each other cannot be told apart where the
# families compute with their differences.
_LEAST_SPREAD = 1e-9
_HALF_NORMAL_MEAN = np.sqrt(2 / np.pi)
_HALF_NORMAL_STD = np.sqrt(1 - 2 / np.pi)


def constant(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Always the mean; ``std`` is ignored."""
    return mean * np.ones(draws.shape)


def normal(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gaussian with this mean and std, redrawn while <= 0.

    The distribution is the Gaussian conditioned on being positive, so its mean is above ``mean`` and its
    standard deviation below ``std`` (noticeably so from ``std > mean / 2``).
    """
    draws = draws.apart()
    out = mean + std * draws.standard_normal()
    mean, std = np.broadcast_to(mean, out.shape), np.broadcast_to(std, out.shape)
    while (bad := out <= 0).any():
        out[bad] = mean[bad] + std[bad] * draws.standard_normal(bad)
    return out


def normal_or_mean(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gaussian with this mean and std; a draw <= 0 is replaced by the mean, which raises the mean."""
    out = mean + std * draws.standard_normal()
    return np.where(out > 0, out, mean)


def lognormal(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Lognormal with this mean and std: ``s = sqrt(ln(std^2/mean^2 + 1))``, ``m = ln(mean) - s^2/2``."""
    variance = np.log1p(np.square(np.divide(std, mean)))
    return np.exp(np.log(mean) - variance / 2 + np.sqrt(variance) * draws.standard_normal())


def half_normal(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Shifted half-normal ``a + s|Z|`` with this mean and std.

    Matching both moments needs ``s = std / sqrt(1 - 2/pi)`` and ``a = mean - s sqrt(2/pi)``. Where that
    would make ``a`` negative (``std > 0.7555 mean``), ``a`` is 0 and only the mean is matched: the plain
    half-normal, with a std of 0.7555 of its mean.
    """
    scale = np.minimum(np.divide(std, _HALF_NORMAL_STD), np.divide(mean, _HALF_NORMAL_MEAN))
    return mean - scale * _HALF_NORMAL_MEAN + scale * np.abs(draws.standard_normal())


def uniform(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Uniform on ``mean -+ sqrt(3) std``, which matches both moments.

    (The 5th to 95th percentile of a Gaussian would be ``mean -+ 1.645 std``: nearly the same range.)
    Where the lower end would be negative (``std > 0.577 mean``) the range is ``(0, 2 mean)`` and only
    the mean is matched.
    """
    half = np.minimum(np.sqrt(3) * std, mean)
    return mean + half * (1 - 2 * draws.random())


def exponential(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Exponential with this mean (its std is the mean too); ``std`` is ignored."""
    return mean * draws.standard_exponential()


def gamma(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gamma with this mean and std: shape ``(mean/std)^2``, scale ``std^2/mean``. The mean if std < 1e-9 mean."""
    varies = np.greater(std, _LEAST_SPREAD * np.asarray(mean))
    spread = np.where(varies, std, 1.0)
    drawn = draws.standard_gamma(np.square(np.divide(mean, spread))) * np.square(spread) / mean
    return np.where(varies, drawn, mean)


def pareto(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Pareto type I with this mean and std: tail index ``1 + sqrt(1 + (mean/std)^2)``, always above 2.

    The mean if std < 1e-9 mean.
    """
    varies = np.greater(std, _LEAST_SPREAD * np.asarray(mean))
    index = 1 + np.sqrt(1 + np.square(np.divide(mean, np.where(varies, std, 1.0))))
    return np.where(varies, _pareto(draws, mean, index), mean)


def pareto_tail(index: float) -> Distribution:
    """Pareto type I of a fixed tail index > 1; ``std`` is ignored (its own is infinite if index <= 2)."""

    def sample(draws: Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
        return _pareto(draws, mean, index)

    return sample


def _pareto(draws: Draws, mean: np.ndarray, index: np.ndarray | float) -> np.ndarray:
    # P(X > x) = (smallest / x)^index and E X = smallest index / (index - 1)
    smallest = mean * (1 - 1 / np.asarray(index))
    return smallest * np.exp(draws.standard_exponential() / index)


# Families that ignore ``std``, and why.
UNSPREAD = {"constant": "which never varies", "exponential": "whose deviation is its mean"}

FAMILIES: dict[str, Distribution] = {
    "constant": constant,
    "normal": normal,
    "normal_or_mean": normal_or_mean,
    "lognormal": lognormal,
    "half_normal": half_normal,
    "uniform": uniform,
    "exponential": exponential,
    "gamma": gamma,
    "pareto": pareto,
}
