"""Virtual arrays: every kind of index gives the values of an ordinary array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.data import Generated, Identity, client_rows, generate, generated


def numbered(parameters, client, position):
    """x is made from the client and the position; y is a class."""
    x = jnp.stack([parameters["base"] + client, position]).astype(jnp.uint8)
    return x, (client + position) % 3


def numbered_data(sizes, base=0, function=numbered, **fields):
    parameters = {"base": np.int32(base)}
    x, y = generate(numbered, np.arange(4), np.zeros(4), parameters)
    defaults = {"test_x": x, "test_y": y, "parameters": parameters, "num_classes": 3}
    return generated(function, sizes=np.asarray(sizes), **(defaults | fields))


@settings(max_examples=4)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), base=st.integers(0, 200))
def test_every_client_reads_its_own_examples(sizes, base):
    data = numbered_data(sizes, base)
    assert (data.x.dtype, data.x.shape[1:], data.y.shape) == (np.uint8, (2,), (len(data.x),))
    x, y = np.asarray(data.x[:]), np.asarray(data.y[:])
    for client, size in enumerate(sizes):
        rows = client_rows(data, client)
        np.testing.assert_array_equal(x[rows], np.c_[np.full(size, base + client), np.arange(size)])
        np.testing.assert_array_equal(y[rows], (client + np.arange(size)) % 3)


def test_any_index_gives_the_same_values():
    data = numbered_data([3, 5, 2])
    everything = np.asarray(data.x[:])
    assert everything.shape == (15, 2)
    index = jnp.array([[7, 0], [11, 6]])
    np.testing.assert_array_equal(data.x[index], everything[index])
    np.testing.assert_array_equal(data.x[6], everything[6])
    np.testing.assert_array_equal(data.x[2:9:3], everything[2:9:3])
    np.testing.assert_array_equal(jax.jit(lambda x, i: x[i])(data.x, index), everything[index])
    np.testing.assert_array_equal(jax.vmap(lambda i: data.x[data.order[i]])(index), everything[index])


def test_identity_is_a_range():
    order = Identity((5,))
    assert (len(order), order.dtype) == (5, np.int32)
    np.testing.assert_array_equal(order[1:4], np.arange(1, 4, dtype=np.int32))
    assert order[jnp.int32(3)] == 3
    assert jax.tree.leaves(order) == [] and jax.jit(lambda o: o)(order) == order


@pytest.mark.parametrize("array", [Identity((5,)), Generated((), numbered, 0, 1, (5, 2), np.dtype(np.uint8))])
def test_nothing_loops_over_a_virtual_array_for_ever(array):
    for consume in (list, np.asarray, iter):
        with pytest.raises(TypeError):
            consume(array)


def test_other_parameters_are_the_same_program():
    traces = []

    @jax.jit
    def read(x, index):
        traces.append(1)
        return x[index]

    index = jnp.arange(3)
    first, second = (np.asarray(read(numbered_data([4, 4], base).x, index)) for base in (0, 5))
    assert len(traces) == 1
    np.testing.assert_array_equal(second[:, 0], first[:, 0] + 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [3, 0]}, "^sizes = "),
        ({"sizes": [1.5]}, "^sizes = "),
        ({"sizes": np.zeros(0, np.int32)}, "^sizes = "),
        ({"sizes": [2**30, 1, 1]}, "^sizes = '3 clients, the largest of 1073741824 examples': must be at most 2147"),
        ({"test_y": np.zeros(3, np.int32)}, "^test_y = "),
        ({"test_x": np.zeros((0, 2)), "test_y": np.zeros(0)}, "^test_x = 'no rows'"),
        ({"test_x": np.zeros((4, 3), np.uint8)}, "^test_x = "),
        ({"function": lambda p, c, i: c}, "^function = "),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        numbered_data(**({"sizes": [2, 2]} | change))
