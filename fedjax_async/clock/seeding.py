"""Many of NumPy's generators at once: seeding them one by one would take most of the time of planning.

``np.random.default_rng(words)`` hashes its seed words into the state of a PCG64. Both the hash and the
generator are fixed by NumPy's compatibility policy (NEP 19), so the hash can be done here for thousands of
seeds with whole arrays; the numbers themselves are drawn by NumPy's own generator, set to one state after
the other.

Source: O'Neill, "Developing a seed_seq alternative" (2015) and "PCG" (2014); numpy.random.SeedSequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_POOL = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_WORD = (1 << 32) - 1
_PCG_MULT, _PCG_MASK = 0x2360ED051FC65DA44385DF649FCCF645, (1 << 128) - 1

Words = list[np.ndarray]  # uint32[seeds] each


def words_of(value: int) -> list[int]:
    """A non-negative integer as 32-bit words, the lowest first, as NumPy takes seeds apart."""
    words = [value & _WORD]
    while value := value >> 32:
        words.append(value & _WORD)
    return words


class _Hash:
    """The running hash of a seed sequence: its constant changes with every word, whatever the words are."""

    def __init__(self, start: int, factor: int):
        self._constant, self._factor = start, factor

    def __call__(self, word: np.ndarray) -> np.ndarray:
        word = word ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & _WORD
        word = word * np.uint32(self._constant)
        return word ^ word >> _SHIFT


def _mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = one * _MIX_LEFT - other * _MIX_RIGHT
    return mixed ^ mixed >> _SHIFT


def states(words: Words) -> list[tuple[int, int]]:
    """The (state, increment) of PCG64 seeded with each of the sequences ``[w[k] for w in words]``."""
    hashed = _Hash(_INIT_A, _MULT_A)
    nothing = np.zeros_like(words[0])
    pool = [hashed(words[i] if i < len(words) else nothing) for i in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashed(pool[source]))
    for word in words[_POOL:]:
        pool = [_mix(one, hashed(word)) for one in pool]
    out = _Hash(_INIT_B, _MULT_B)
    halves = [out(pool[i % _POOL]).astype(np.uint64) for i in range(2 * _POOL)]
    quarters = [(halves[2 * i] | halves[2 * i + 1] << np.uint64(32)).tolist() for i in range(4)]
    found = []
    for high, low, stream_high, stream_low in zip(*quarters):
        increment = ((stream_high << 64 | stream_low) << 1 | 1) & _PCG_MASK
        found.append((((increment + (high << 64 | low)) * _PCG_MULT + increment) & _PCG_MASK, increment))
    return found


class Generators:
    """One generator a place, used like one: what is drawn has a leading axis over the places.

    ``prefix`` are the seed words that all have in common, ``places`` int[places, words] the others. Each
    may be asked for one array only; the numbers are those of ``np.random.default_rng([*prefix, *place])``.
    """

    def __init__(self, prefix: Sequence[int], places: np.ndarray):
        self._prefix = [word for value in prefix for word in words_of(value)]
        self._places = places

    def _draw(self, method: Callable[..., Any], size: tuple[int, ...], *parameters: np.ndarray) -> np.ndarray:
        count = len(self._places)
        if size[0] != count:
            raise ValueError(f"size = {size}: must begin with the {count} places")
        common = [np.full(count, word, np.uint32) for word in self._prefix]
        drawn = np.empty(size)
        bits: Any = np.random.PCG64(0)
        rng = np.random.Generator(bits)
        inner: dict[str, int] = {}
        outer = {"bit_generator": "PCG64", "state": inner, "has_uint32": 0, "uinteger": 0}
        each = [one if one.ndim == len(size) and len(one) == count else [one] * count for one in parameters]
        shape = size[1:]
        for k, (value, increment) in enumerate(states(common + list(self._places.T.astype(np.uint32)))):
            inner["state"], inner["inc"] = value, increment
            bits.state = outer
            drawn[k] = method(rng, *(one[k] for one in each), size=shape)
        return drawn

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        """Uniform in [0, 1)."""
        return self._draw(np.random.Generator.random, size)

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Standard normal."""
        return self._draw(np.random.Generator.standard_normal, size)

    def standard_exponential(self, size: tuple[int, ...]) -> np.ndarray:
        """Exponential of mean 1."""
        return self._draw(np.random.Generator.standard_exponential, size)

    def standard_gamma(self, shape: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
        """Gamma of scale 1."""
        return self._draw(np.random.Generator.standard_gamma, size, np.asarray(shape))

    def geometric(self, p: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
        """Number of trials up to the first success, as float64."""
        return self._draw(np.random.Generator.geometric, size, np.asarray(p))
