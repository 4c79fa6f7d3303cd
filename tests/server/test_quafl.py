"""QuAFL's clients: the models from which they go on, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import SERVERS
from fedjax_async.types import Request
from tests.server.made_up import D, arrival, flat, received, start_params, unflat

CLIENTS, SIZE = 5, 2


@pytest.mark.float64
def test_clients_and_server_go_on_from_their_averages():
    """Algorithm of the authors' code without quantisation, for 30 polls of two clients."""
    rule, chance = SERVERS["quafl"](size=SIZE), np.random.default_rng(6)
    receive, dispatch = jax.jit(received(rule)), jax.jit(rule.dispatch)
    state, row = rule.init(start_params())
    rows, x = [row] * CLIENTS, flat(start_params())
    own = np.tile(x, (CLIENTS, 1))
    for _ in range(30):
        asked = chance.choice(CLIENTS, SIZE, replace=False)
        trained = own.copy()
        for k, who in enumerate(asked):
            np.testing.assert_allclose(flat(dispatch(state, rows[who], Request())[0].params), own[who], rtol=1e-10)
            trained[who] = own[who] + chance.normal(size=D)
            change = unflat(trained[who] - own[who], float)
            given = arrival(change, unflat(own[who], float), 0, int(who), closes=k == SIZE - 1)
            state, rows[who], info = receive(state, rows[who], given)
            assert info.weight == 1
        for who in asked:
            own[who] = (x + SIZE * trained[who]) / (SIZE + 1)
        x = (x + sum(trained[who] for who in asked)) / (SIZE + 1)
        np.testing.assert_allclose(flat(state.params), x, rtol=1e-10)


def test_a_rejected_client_goes_on_from_the_model_that_it_had():
    rule = SERVERS["quafl"]()
    state, row = rule.init(start_params())
    lost = arrival(jax.tree.map(jnp.zeros_like, start_params()), start_params(), weight=0.0)
    after, same, info = received(rule)(state, row, lost)
    jax.tree.map(np.testing.assert_array_equal, (after.params, same), (state.params, row))
    assert info.weight == 0
