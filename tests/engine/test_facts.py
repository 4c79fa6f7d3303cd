"""A rule takes the facts of its run in ``init``, or does without; what is made of it in a run takes them too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Facts, Method, server, simulate
from fedjax_async.config.checked_parts import checked_rule
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.flat import FlatServer, opened
from fedjax_async.engine.storage import StoringServer
from fedjax_async.server import SERVERS, begun, swa
from fedjax_async.server.orthofl import by_average, by_last, orthogonal
from fedjax_async.types import Info, Message, ServerAlgorithm
from tests.engine.problem import case, changed, close, same

FACTS = Facts(7, True, 40, 20)
PARAMS = {"w": jnp.arange(3.0), "b": jnp.ones(())}


def adding(init) -> ServerAlgorithm:
    """Add each upload; ``init`` is the user's own."""

    def receive(state, memory, arrival):
        return jax.tree.map(jnp.add, state, arrival.upload), memory, Info(arrival.weight)

    return ServerAlgorithm(init, receive, lambda state, memory, _: (Message(state), memory), lambda state: state)


def with_option(params, scale=1.0):
    return jax.tree.map(lambda leaf: scale * leaf, params), ()


def with_known(params, known):
    assert known.num_clients > 1
    return params, ()


def with_any(*given):
    return with_known(*given)


INITS = [  # without facts, and with them
    lambda params: (params, ()),
    with_option,
    functools.partial(with_option),
    lambda params, facts=None: with_known(params, facts),
    with_known,
    with_any,
    jax.jit(with_known),
]

WRAPPERS = {
    "none": lambda rule: rule,
    "swa": lambda rule: swa.averaged(rule, start=0.25),
    "attack": lambda rule: server.attacked(rule, server.Attack(server.attackers(share=0.0)), norm_limit=9.0),
    "privacy": lambda rule: server.differentially_private(rule, clip=0.05, quantile=0.5),
    "slots": lambda rule: StoringServer(rule, "bfloat16")({}),
    "flat": lambda rule: FlatServer(rule)({}),
    "checks": lambda rule: checked_rule(rule, PARAMS),
    "average": lambda rule: by_average(rule, orthogonal("whole")),
    "last": lambda rule: by_last(rule, orthogonal("whole")),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rule_begins_alike_whether_its_init_takes_facts_or_not(wrapper):
    want, *others = (opened(begun(WRAPPERS[wrapper](adding(init)), PARAMS, FACTS)) for init in INITS)
    for have in others:
        same(have, want)


@pytest.mark.parametrize("name", SERVERS)
def test_by_hand_a_rule_is_that_of_a_single_client(name):
    rule = SERVERS[name]()
    one, other = (jax.eval_shape(rule.init, *given) for given in ((PARAMS,), (PARAMS, Facts())))
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.float64
def test_a_function_of_a_rule_may_be_replaced_where_the_rule_takes_facts():
    """Half of the upload is received: half the step for AsynFL, which divides by the number of clients."""
    made, problem = SERVERS["asynfl"](), case("asynfl", "buffer:size=3")

    def receive(state, memory, arrival):
        return made.receive(state, memory, arrival._replace(upload=jax.tree.map(lambda d: d / 2, arrival.upload)))

    halved, half, whole = (
        run_waves(*changed(problem, rule=rule)).params
        for rule in (made._replace(receive=receive), SERVERS["asynfl"](server_lr=0.5), made)
    )
    close(halved, half, 1e-12)
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(halved), jax.tree.leaves(whole))) > 1e-4


SMALL = {"dataset": "quadratic", "model": "linear", "partition": "natural", "steps": 1, "updates": 4}


@pytest.mark.float64
def test_a_replaced_function_takes_effect_in_simulate():
    made = adding(with_known)

    def receive(state, memory, arrival):
        state, memory, info = made.receive(state, memory, arrival)
        return state, memory, info._replace(columns={"mine": arrival.staleness})

    run = simulate(method=Method(made._replace(receive=receive)), **SMALL)
    np.testing.assert_array_equal(run.updates["mine"], run.updates["staleness"])


def scaled() -> ServerAlgorithm:
    """A rule with functions that all depend on the number of clients: its state is the model times that number."""

    def init(params, facts):
        model = jax.tree.map(lambda leaf: facts.num_clients * leaf, params)
        return (model, jnp.zeros(facts.num_clients), facts.static), ()

    def receive(state, memory, arrival):
        model, counts, facts = state
        model = jax.tree.map(lambda w, u: w + facts.num_clients * u, model, arrival.upload)
        return (model, counts.at[arrival.client].add(1), facts), memory, Info(arrival.weight)

    def params(state):
        return jax.tree.map(lambda leaf: leaf / len(state[1]), state[0])

    return ServerAlgorithm(init, receive, lambda state, memory, _: (Message(params(state)), memory), params)


@pytest.mark.float64
def test_a_rule_takes_the_facts_of_the_run_wherever_it_is_used():
    problem = case(scaled())
    close(run_waves(*problem).params, run_reference(*problem).params, 1e-12)
    found, usual = (simulate(method=Method(rule), **SMALL) for rule in (scaled(), adding(with_option)))
    close(found.params, usual.params, 1e-12)


def test_static_facts_have_no_leaves_and_totals_are_leaves():
    static = FACTS.static
    assert jax.tree.leaves(static) == [] and hash(static) == hash(Facts(7, True).static)
    assert (static.num_clients, static.every_closes, static.updates) == (7, True, None)
    assert jax.tree.leaves(FACTS) == [40, 20]
    traced = []
    count = jax.jit(lambda facts: (traced.append(facts.num_clients), facts.updates + jnp.zeros(facts.num_clients))[1])
    for facts in (FACTS, Facts(7, True, 50, 3), Facts(8, True, 50, 3)):
        assert count(facts).shape == (facts.num_clients,)
    assert traced == [7, 8]
