"""Engine equals oracle for what the registries have no name for; ``tests/test_worlds.py`` draws from the registries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Method, simulate
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.types import Info, Message, ServerAlgorithm
from tests.engine.problem import case, close

pytestmark = pytest.mark.float64


def scaled(count: int) -> ServerAlgorithm:
    """A rule with functions that all depend on the number of clients: its state is the model times that number."""

    def given(facts):
        return scaled(facts.num_clients)

    def init(params):
        return (jax.tree.map(lambda leaf: count * leaf, params), jnp.zeros(count)), ()

    def receive(state, memory, arrival):
        model = jax.tree.map(lambda w, u: w + count * u, state[0], arrival.upload)
        return (model, state[1].at[arrival.client].add(1)), memory, Info(arrival.weight)

    def params(state):
        return jax.tree.map(lambda leaf: leaf / count, state[0])

    return ServerAlgorithm(
        init, receive, lambda state, memory, _: (Message(params(state)), memory), params, given=given
    )


def test_a_rule_is_given_the_facts_of_the_run_wherever_it_is_used():
    problem = case(scaled(1))
    waves, oracle = run_waves(*problem), run_reference(*problem)
    close(waves.params, oracle.params, 1e-12)
    settings = {"dataset": "quadratic", "model": "linear", "partition": "natural", "steps": 1, "updates": 4}
    found, usual = simulate(method=Method(scaled(1)), **settings), simulate(method="asgd", **settings)
    close(found.params, usual.params, 1e-5)


def test_proximal_client_equals_oracle():
    given = case("fedasync", proximal=0.5)
    close(run_waves(*given).params, run_reference(*given).params, 1e-9)
    plain = case("fedasync")
    gap = np.abs(run_waves(*given).params["output"]["kernel"] - run_waves(*plain).params["output"]["kernel"])
    assert gap.max() > 1e-4
