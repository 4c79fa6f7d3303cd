"""FedASMU's learned weights: which way they move, and that they stay finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import SERVERS
from tests.server.made_up import arrival, flat, received, start_params


def levels_after(second, *, rate=0.1, size=1.0):
    """A client's numbers after two uploads: of its first model, and of a delta ``second`` times the way there."""
    rule = SERVERS["fedasmu"](rate=rate)
    state, row = rule.init(start_params())
    way = jax.tree.map(lambda leaf: jnp.full_like(leaf, size), start_params())
    for factor in (1.0, second):
        upload = jax.tree.map(lambda leaf, factor=factor: leaf * jnp.asarray(factor, leaf.dtype), way)
        state, row, info = received(rule)(state, row, arrival(upload, rule.params(state), 3))
    return np.array([row.level, row.power, row.floor]), float(info.weight), flat(rule.params(state))


def test_a_client_that_goes_on_the_same_way_gets_more_weight_and_one_that_goes_back_less():
    usual, *_ = levels_after(0.0)
    more, large, _ = levels_after(0.5)
    less, small, _ = levels_after(-0.5)
    np.testing.assert_array_equal(usual, np.float32([1.0, 0.5, 0.0]))
    assert more[0] > 1 > less[0] and more[1] < 0.5 < less[1] and more[2] > 0 == less[2]
    assert large > small


@pytest.mark.parametrize("second", [1.0, -1.0])
@pytest.mark.parametrize("size", [1e4, 1e18, 1e30])
def test_large_deltas_leave_numbers_and_model_finite(second, size):
    numbers, weight, params = levels_after(second, rate=100.0, size=size)
    assert (numbers >= 0).all() and (numbers <= 1e6).all() and 0 <= weight <= 1 and np.isfinite(params).all()
