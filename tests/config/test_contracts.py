"""Own parts that break their contract: the error names part, result and contract, before anything compiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Method, Settings, models, server, simulate
from fedjax_async.clock import Availability, Delays, Network, make_schedule
from fedjax_async.config import method, prepare
from fedjax_async.data import decode
from fedjax_async.data.problems import synthetic
from fedjax_async.local import local_training
from fedjax_async.types import Facts, Info

DATA = synthetic(clients=4, least_size=20, std_log_size=0.0, mean_log_size=1.0)
SMALL = {"dataset": DATA, "model": "logistic", "clients": 4, "steps": 1, "updates": 4}
MODEL = models.make("logistic", num_classes=10, input_shape=(60,))
RULE = server.known(server.fedbuff(), Facts(4))._replace(given=None)
CLIENT = local_training(models.decoded(MODEL, decode.as_is), optimizer=optax.sgd(0.1), batch_size=8)


def rule(**changes):
    return {"method": Method(RULE._replace(**changes))}


def model(**changes):
    return {"model": MODEL._replace(**changes)}


def client(**changes):
    return {"client": CLIENT._replace(**changes)}


def receiving(change):
    """A rule with ``change`` applied to what ``receive`` returns."""
    return rule(receive=lambda state, memory, arrival: change(*RULE.receive(state, memory, arrival)))


def scheduled(scenario):
    """Two jobs of client 0 at the same time."""
    return make_schedule(
        num_clients=1, client=[0, 0], dispatch_time=[0.0, 0.0], upload_time=[1.0, 1.0], job=[0, 1], time=[1.0, 1.0],
        closes=[True, True], local_steps=1,
    )  # fmt: skip


BROKEN = {
    "init of a model": (model(init=lambda key: 3.0), r"model.init returned 3.0: must return a pytree of float arrays"),
    "no params": (model(init=lambda key: {}), r"model.init returned \{\}: must return a pytree of float arrays"),
    "apply of a mean": (
        model(apply=lambda p, x, key=None: MODEL.apply(p, x).mean()),
        r"model.apply returned float32\[\]: must return an array of one row per example",
    ),
    "loss of a mean": (
        model(loss=lambda outputs, y: MODEL.loss(outputs, y).mean()),
        r"model.loss returned float32\[\]: must return a number per example, .* and not their mean",
    ),
    "loss of a number": (model(loss=lambda outputs, y: 0.5), r"model.loss returned 0.5: must return a number per"),
    "apply that raises": (
        model(apply=lambda p, x, key=None: p["none"]),
        r"model.apply: must be a function apply\(params, x\[, key\]\) -> outputs; it raised KeyError: 'none'",
    ),
    "no pair": (rule(init=lambda params: params), r"method.init returned .*: must return \(state, memory\)"),
    "no message": (
        rule(dispatch=lambda state, memory, request: (RULE.params(state), memory)),
        r"method.dispatch returned .*: must return \(Message, memory\)",
    ),
    "other memory": (
        rule(dispatch=lambda state, memory, request: (RULE.dispatch(state, memory, request)[0], 1.0)),
        r"method.dispatch's memory returned 1.0: must return memory of the structure \(\)",
    ),
    "nothing": (receiving(lambda *found: None), r"method.receive returned None: must return \(state, memory, Info\)"),
    "a number for Info": (
        receiving(lambda state, memory, info: (state, memory, 1.0)),
        r"method.receive returned 1.0: must return \(state, memory, Info\); the third is not an Info",
    ),
    "a pair": (receiving(lambda state, memory, info: (state, info)), r"method.receive returned \(.*must return \(stat"),
    "a vector of weights": (
        receiving(lambda state, memory, info: (state, memory, Info(jnp.ones(2)))),
        r"method.receive's Info.weight returned float32\[2\]: must return a number",
    ),
    "a column that is no scalar": (
        receiving(lambda state, memory, info: (state, memory, Info(info.weight, {"a": jnp.ones(2)}))),
        r"method.receive's Info.columns\['a'\] returned float32\[2\]: must return a number",
    ),
    "a state of other shapes": (
        receiving(lambda state, memory, info: (jax.tree.map(lambda leaf: leaf[None], state), memory, info)),
        r"method.receive's state.* returned .*: must return state: here",
    ),
    "a state of numbers": (
        receiving(lambda state, memory, info: (jax.tree.map(lambda leaf: 0.0, state), memory, info)),
        r"method.receive's state.* returned 0.0: must return state: here",
    ),
    "close without memory": (
        rule(close=lambda state, memory: state), r"method.close returned .*: must return \(state, memory\)"
    ),
    "params of nothing": (rule(params=lambda state: None), r"method.params returned None: must return params of the s"),
    "a rule that raises": (
        rule(receive=lambda state, memory, arrival: 1 / 0),
        r"method.receive: must be a function .*; it raised ZeroDivisionError: division by zero",
    ),
    "a condition on a traced value": (
        rule(receive=lambda state, memory, arrival: 1 if arrival.weight > 0 else 2),
        r"method.receive: must be .* it raised TracerBoolConversionError: a Python condition .*; use jnp.where ",
    ),
    "a family of nothing": ({"method": Method(lambda hyper: None)}, "method.server returned None: must return a Serve"),
    "step of other work": (
        client(step=lambda work, k, message, data: 0.0), r"client.step returned 0.0: must return work of the structure"
    ),
    "finish of an upload alone": (
        client(finish=lambda work, message, state: message.params), r"client.finish returned .*: must return \(upload, "
    ),
    "an upload of numbers": (
        client(finish=lambda work, message, state: (1.0, state)), r"client.finish returned 1.0: must return an upload o"
    ),
    "a state that grows": (
        client(finish=lambda work, message, state: (message.params, (state, 1))),
        r"client.finish's state returned .*: must return state of the structure",
    ),
    "delays of a function": ({"delay": lambda n, seed: lambda client: 1.0}, r"delay returned a function: must return "),
    "one duration": (
        {"delay": lambda n, seed: Delays(n, lambda *given: 1.0)},
        r"delay's durations returned 1.0: must return an array of virtual seconds, one per job: here float64\[2\]",
    ),
    "whole seconds": (
        {"delay": lambda n, seed: Delays(n, lambda clients, *given: np.ones(len(clients), int))},
        r"delay's durations returned int64\[2\]: must return an array of virtual seconds",
    ),
    "a delay that raises": ({"delay": lambda n: None}, r"delay: must be a delay model, .*; it raised TypeError"),
    "a network of nothing": ({"network": lambda n, seed: None}, r"network returned None: must return a network model"),
    "no seconds": (
        {"network": lambda n, seed: Network(n, lambda *given: None)}, r"network's seconds returned None: must return an"
    ),
    "faults of nothing": ({"faults": lambda n, seed, part: None}, r"faults returned None: must return a fault model"),
    "a window without an end": (
        {"availability": lambda n, seed, part: Availability(lambda client, time: 0.0)},
        r"availability's interval returned 0.0: must return \(start, end\)",
    ),
    "no schedule": ({"timing": lambda scenario: None}, r"timing returned None: must return a Schedule"),
    "a client with two jobs at once": ({"timing": scheduled}, r"schedule"),
    "a partition of a matrix": (
        {"partition": lambda y, n, rng: np.zeros((n, 3))}, r"partition returned float64\[4, 3\]: must return a list of "
    ),
    "a partition of truths": (
        {"partition": lambda y, n, rng: [np.ones(3, bool)] * n}, r"partition returned bool\[3\]: must return a list of "
    ),
    "an example twice": ({"partition": lambda y, n, rng: [np.arange(3)] * n}, r"partition = '12 indices': must be eac"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_each_is_named_with_its_contract(name):
    change, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as error:
        simulate(**SMALL | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", server.METHODS)
def test_the_package_keeps_its_own_contracts(name):
    """All methods, as objects, pass the same checks."""
    spec, timing = ("krum:byzantine=0", "buffer:size=4") if name == "krum" else (name, "every")
    prepare(Settings(**SMALL | {"updates": 8, "method": method(spec)._replace(timing=timing)}))


def test_whole_parts_pass():
    run = simulate(**SMALL | rule() | model() | client())
    assert run.counters["updates"] == 4
