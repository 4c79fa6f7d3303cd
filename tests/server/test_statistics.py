"""BatchNorm's running statistics among the params: every rule moves them by the mean, none as if they were weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.server import SERVERS
from fedjax_async.types import Arrival

LEARNT = {"server_lr": 0.25}
AVERAGING = ["fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "asgd", "fadas", "ca2fl"]


def params_of(weight, statistic):
    return {"params": {"w": jnp.full(3, weight)}, "batch_stats": {"var": jnp.full(2, statistic)}}


def after_steps(name, statistics, **options):
    """Params after steps of two arrivals each, whose statistics change by these amounts."""
    server = SERVERS[name](**options)
    state, row = server.init(params_of(0.0, 1.0))
    rows = [row, row]
    for pair in statistics:
        for client, change in enumerate(pair):
            given = Arrival(
                params_of(1.0 + client, change), params_of(0.0, 1.0), jnp.int32(0), jnp.asarray(4.0), jnp.int32(client),
                jnp.asarray(0.0), jnp.bool_(client == 1),
            )  # fmt: skip
            state, rows[client], _ = server.receive(state, rows[client], given)
    return server.params(state)


@pytest.mark.parametrize("name", AVERAGING)
def test_statistics_move_by_the_mean_of_what_arrives(name):
    with jax.enable_x64(True):
        options = LEARNT | ({"num_clients": 2} if name == "ca2fl" else {})
        end = after_steps(name, [(0.2, 0.4), (-0.1, -0.3)], **options)
        np.testing.assert_allclose(end["batch_stats"]["var"], np.full(2, 1.0 + 0.3 - 0.2))
        assert np.all(end["params"]["w"] > 0)


@pytest.mark.parametrize("name", AVERAGING)
def test_statistics_have_no_part_in_how_weights_move(name):
    with jax.enable_x64(True):
        small, large = (after_steps(name, [(s, s)], clip=1.5)["params"]["w"] for s in (0.0, 100.0))
        np.testing.assert_array_equal(small, large)
