from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import DELAYS, DISTRIBUTIONS, bind_delays
from fedjax_async.clock.chance import COLUMNS, ROWS, generator
from fedjax_async.clock.seeding import Generators, words_of

words = st.integers(0, 2**32 - 1)


@given(
    st.lists(st.integers(0, 2**70), min_size=1, max_size=4),
    st.lists(st.tuples(words, words, words), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_many_generators_draw_what_numpy_s_own_draw(prefix, places):
    places = np.array(places, np.int64)
    many, size = Generators(prefix, places), (len(places), 3, 2)
    ones = [np.random.default_rng([*prefix, *place]) for place in places.tolist()]
    np.testing.assert_array_equal(many.random(size), [one.random((3, 2)) for one in ones])
    shapes = np.linspace(0.5, 4, len(places) * 2).reshape(-1, 1, 2)
    for name, parameters in (
        ("standard_normal", ()),
        ("standard_exponential", ()),
        ("standard_gamma", (shapes,)),
        ("geometric", (shapes / 5,)),
    ):
        ones = [np.random.default_rng([*prefix, *place]) for place in places.tolist()]
        expected = [getattr(one, name)(*(p[k] for p in parameters), size=(3, 2)) for k, one in enumerate(ones)]
        np.testing.assert_array_equal(getattr(many, name)(*parameters, size), expected)


def test_short_and_long_seeds():
    assert words_of(0) == [0]
    assert words_of(2**64 + 5) == [5, 0, 1]
    for prefix in ([0], [7], [2**200 + 3]):
        expected = np.random.default_rng([*prefix, 1]).random(4)
        np.testing.assert_array_equal(Generators(prefix, np.array([[1]])).random((1, 4))[0], expected)
    with pytest.raises(ValueError, match="size"):
        Generators([1], np.zeros((3, 1), int)).random((2, 4))


@pytest.mark.parametrize("family", sorted(set(DELAYS) & set(DISTRIBUTIONS)))
def test_durations_are_drawn_tile_by_tile_whatever_is_asked_for(family):
    """The contract of the streams, written out: tile (i, j) of [ROWS, COLUMNS] from (seed, noise, i, j)."""
    delays = bind_delays(family, 3 * COLUMNS, 5)
    numbers, clients = np.mgrid[0 : 2 * ROWS, 0 : 3 * COLUMNS]
    table = delays.durations(clients, numbers)
    if family != "pareto":  # its spec fixes the tail index instead of the standard deviation
        std = {"lognormal": np.sqrt(np.expm1(0.25)), "constant": 0, "exponential": 1, "half_normal": 1}.get(
            family, 0.25
        )
        ones = np.ones(COLUMNS)
        tile = DISTRIBUTIONS[family](generator(5, "noise", 2, 1), ones, std * ones, (ROWS, COLUMNS))
        np.testing.assert_array_equal(table[ROWS:, 2 * COLUMNS :], tile)
    rng = np.random.default_rng(0)
    for size in (1, 7, 300):
        who, which = rng.integers(0, 3 * COLUMNS, size), rng.integers(0, 2 * ROWS, size)
        np.testing.assert_array_equal(delays.durations(who, which), table[which, who])
    many = bind_delays(family, 1000 * COLUMNS, 5)
    who, which = rng.integers(0, 3 * COLUMNS, 400), rng.integers(0, 2 * ROWS, 400)
    far = rng.permutation(np.arange(1000) * COLUMNS)  # more tiles than are drawn together
    drawn = many.durations(np.concatenate([who, far]), np.concatenate([which, far % 40]))
    np.testing.assert_array_equal(drawn[:400], table[which, who])
    np.testing.assert_array_equal(drawn[400:], [many.durations(int(i), int(i % 40)) for i in far])
