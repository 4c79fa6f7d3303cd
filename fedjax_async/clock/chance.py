"""The clock's chance: every draw is a function of the seed, a named stream and a place, never of the order of asking.

What belongs to a client or a job is *hashed*: its number is a scrambling of (seed, stream, client, job), so any
batch of them costs a few array operations and no memory. NumPy's generators serve what is one sequence for
the whole plan: permutations, cohorts, decks.

Draws are exact on one machine: the same NumPy version on the same kind of processor gives the same bits,
whatever the size of a batch. Elsewhere they may differ in the last bit, because NumPy's logarithms and
cosines of arrays follow the instructions that a processor has. Uniform draws are the same everywhere.
``save_schedule`` carries a schedule from one machine to another exactly.

Source of the hash: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with the
constants of Stafford's variant 13, as in SplitMix64.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from types import EllipsisType

import numpy as np

# One constant for the clock as a whole keeps its generators apart from those of other rooms: NumPy pads
# short seeds with zeros, so [5] and [5, 0] are the same stream.
_CLOCK = 0xC10C
_STREAMS = {"sampling": 4, "rounds": 6, "substitutes": 7, "traces": 12, "devices": 3}

_WORD = (1 << 64) - 1
_PLACE, _TURN = np.uint64(0x9E3779B97F4A7C15), 0xD1342543DE82EF95  # odd steps of places and of turns

_BLOCK = 1024  # clients whose once-for-all draws are made together

Where = np.ndarray | EllipsisType


def generator(seed: int, stream: str, *place: int) -> np.random.Generator:
    """The generator of one stream of the clock at one place."""
    return np.random.default_rng([seed, _CLOCK, _STREAMS[stream], *place])


def _scramble(words: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every bit depends on every bit; works in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


class Draws:
    """Random numbers at many places, with the methods of a NumPy generator.

    ``place`` are integers >= 0 or arrays of them that broadcast. Every call gives one number a place,
    float64 of their ``shape`` (at least 1-d), and independent of the calls before; with ``where``, a mask of
    that shape, only the numbers of these places. A number depends on nothing but the seed, the stream,
    its place and how many calls came before.
    """

    def __init__(self, seed: int, stream: str, *place: np.ndarray | int):
        root = hashlib.blake2b(f"{stream} {seed}".encode(), digest_size=8).digest()
        keys = np.array([int.from_bytes(root, "little")], np.uint64)
        for word in place:
            keys = _scramble(keys + np.atleast_1d(word).astype(np.uint64) * _PLACE)
        self._keys, self._turn = keys, 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is drawn."""
        return self._keys.shape

    def _words(self, where: Where = ...) -> np.ndarray:
        self._turn += 1
        return _scramble(self._keys[where] + np.uint64(self._turn * _TURN & _WORD))

    def apart(self) -> Draws:
        """Draws at the same places for who makes more calls where neighbours need them; counts as one call."""
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
        out, rest = np.empty(self.shape), np.ones(self.shape, np.bool_)
        while rest.any():
            x, share, mode = draws.standard_normal(rest), 1 - draws.random(rest), d[rest]
            v = (1 + x / np.sqrt(9 * mode)) ** 3
            with np.errstate(divide="ignore", invalid="ignore"):
                bad = ~((v > 0) & (np.log(share) < x**2 / 2 + mode * (1 - v + np.log(v))))
            out[rest] = mode * v
            rest[rest] = bad
        return np.where(shape < 1, out * small ** (1 / np.minimum(shape, 1)), out)

    def geometric(self, p: np.ndarray) -> np.ndarray:
        """Number of trials up to the first success, as float64."""
        with np.errstate(divide="ignore"):
            return np.maximum(1, np.ceil(np.log1p(-self.random()) / np.log1p(-np.asarray(p))))


def once_a_client(draw: Callable[[np.ndarray], np.ndarray]) -> Callable[[int], float]:
    """``value(client)``, where ``draw(clients) -> float64``: a block of neighbours at a time, when first needed."""
    blocks: dict[int, array] = {}

    def value(client: int) -> float:
        k, place = divmod(client, _BLOCK)
        if k not in blocks:
            blocks[k] = array("d", draw(np.arange(k * _BLOCK, (k + 1) * _BLOCK)).tobytes())
        return blocks[k][place]

    return value


def deck(seed: int, stream: str, cards: int, count: int, *place: int) -> np.ndarray:
    """``count`` draws from ``cards`` cards without replacement, reshuffled when they run out; int64[count].

    The first draws are the same whatever ``count``, so adding clients leaves the others as they were.
    """
    shuffles = -(-count // cards)
    return np.argsort(generator(seed, stream, *place).random((shuffles, cards)), axis=1).reshape(-1)[:count]
