"""Objects of the user's own in place of names: same results, kept apart by their fingerprints."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from flax import linen, nnx

from fedjax_async import Method, Settings, Spec, fingerprint, models, named, register, server, simulate, sweep
from fedjax_async.base import identity
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import AVAILABILITY, DELAYS, FAULTS, NETWORKS, TIMINGS, Delays, make_schedule
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import execute, own, plan_groups, prepare
from fedjax_async.config.grid import expand
from fedjax_async.config.methods import method
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.data import PARTITIONERS, federate
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.data.problems import synthetic
from fedjax_async.local import local_training
from fedjax_async.types import Info, Message, ServerAlgorithm, Traced
from tests.refusals import refusals
from tests.told import is_refused, same, warned

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 6}


def equal(one, other):
    same(*((run.params, run.schedule.time, run.schedule.client) for run in (one, other)))


# field -> the spec and the object that does the same; they fit together in one run
OBJECTS = {
    "method": ("fedbuff:server_lr=0.5", lambda: method("fedbuff:server_lr=0.5")),
    "timing": ("buffer:size=2", lambda: TIMINGS["buffer"](size=2)),
    "delay": ("lognormal:mean=60", lambda: DELAYS["lognormal"](mean=60)),
    "availability": ("sessions:on=5,off=5", lambda: AVAILABILITY["sessions"](on=5, off=5)),
    "faults": ("drop:probability=0.5", lambda: FAULTS["drop"](probability=0.5)),
    "network": ("link:down=1e4", lambda: NETWORKS["link"](down=1e4)),
    "dataset": ("fashion_mnist_6k", fashion_mnist_6k),
    "partition": ("dirichlet:alpha=0.5", lambda: PARTITIONERS["dirichlet"](alpha=0.5)),
    "model": ("logistic", lambda: models.make("logistic", num_classes=10, input_shape=(28, 28, 1))),
    "compress": ("topk:ratio=0.1", lambda: COMPRESSORS["topk"](ratio=0.1)),
}  # fmt: skip


def test_objects_run_as_their_names_do():
    given = SMALL | {"engine": "reference"}
    run = simulate(**given | {field: make() for field, (_, make) in OBJECTS.items()})
    equal(run, simulate(**given | {field: spec for field, (spec, _) in OBJECTS.items()}))
    found = {field: [*names.values()] for field, names in run.settings["own"].items()}
    assert found == {field: [fingerprint(make())] for field, (_, make) in OBJECTS.items()}


@pytest.mark.parametrize("field", OBJECTS)
def test_settings_come_back_from_a_file_with_the_same_objects_only(field):
    make = OBJECTS[field][1]
    assert Settings(**SMALL | {field: make()}) == Settings(**SMALL | {field: make()}) != Settings(**SMALL)
    before = Settings(**SMALL | {field: named("mine", make())})
    content = as_dict(before)
    assert from_dict(content, {field: make()}) == before  # the object takes the name in the file
    assert from_dict(content, {field: named("mine", make())}) == before
    alone = from_dict(content)
    assert as_dict(alone) == content
    is_refused(rf"^{field} = 'mine': is a part of your own; give it again \({field}=...\)", prepare, alone)
    is_refused(f"^{field} = 'mine': must be the code that", from_dict, content, {field: named("mine", jnp.sin)})
    is_refused(f"^{field} = 'other': must be named 'mine'", from_dict, content, {field: named("other", make())})
    is_refused("^client = .*: must be left out: the run has no object", from_dict, content, {"client": make()})


def test_a_client_algorithm_trains_and_its_begin_is_told_the_local_steps():
    """Also when only shapes are computed: a client may use K in ``begin``."""
    data = fashion_mnist_6k()
    model = models.decoded(models.make("logistic", num_classes=10, input_shape=(28, 28, 1)), data.decode)
    client = local_training(model, optimizer=optax.sgd(0.05), batch_size=32)

    def begin(key, message, state, data):
        message = message._replace(params=jax.tree.map(lambda leaf: leaf * (message.local_steps / 2), message.params))
        return client.begin(key, message, state, data)

    given = SMALL | {"steps": 2, "engine": "reference"}
    run = simulate(client=named("by_steps", client._replace(begin=begin)), **given)
    equal(run, simulate(lr=0.05, **given))
    assert run.settings["client"] == "by_steps" and run.settings["lr"] is None


def test_seeds_deal_an_own_data_set_anew():
    pool = fashion_mnist_6k()._replace(name="mine")
    runs = [prepare(Settings(dataset=pool, seed=seed, **SMALL)) for seed in (0, 0, 1)]
    orders = [run.components.data.order for run in runs]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    np.testing.assert_array_equal(orders[0], prepare(Settings(**SMALL)).components.data.order)
    assert runs[0].described["dataset"] == "mine"


def test_data_that_are_dealt_already_are_used_as_they_are():
    data = federate(fashion_mnist_6k(), "iid", 5, seed=9)
    small = {name: value for name, value in SMALL.items() if name != "clients"}
    run = prepare(Settings(dataset=data, **small))
    assert run.described["clients"] == 5 and run.described["partition"] == "natural"
    says = "partition = 'iid': must be left out: the clients' data are given"
    is_refused(says, simulate, data=data, partition="iid", **small)
    is_refused("data = 'mnist': must be FederatedData; a data set by its name is data", simulate, data="mnist", **small)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(10)(x.reshape(x.shape[0], -1))


class Nnx(nnx.Module):
    def __init__(self):
        layer = nnx.Linear(784, 10, rngs=nnx.Rngs(0))
        self.layers = nnx.List([layer]) if hasattr(nnx, "List") else [layer]

    def __call__(self, x):
        return self.layers[0](x.reshape(x.shape[0], -1))


def test_flax_modules_are_models():
    wrapped = models.from_flax(Linen(), input_shape=(28, 28, 1))
    alone, given = (prepare(Settings(**SMALL | {"model": thing})) for thing in (Linen(), wrapped))
    jax.tree.map(np.testing.assert_array_equal, alone.params, given.params)
    x = np.ones((2, 28, 28, 1), np.float32)
    outputs = [run.components.model.apply(run.params, x) for run in (alone, given)]
    np.testing.assert_array_equal(*outputs)
    with pytest.warns(RunWarning, match="the same for every seed"):
        given = {"model": named("net", Nnx()), "partition": "iid", "updates": 40, "engine": "reference"}
        run = simulate(**SMALL | given)
    assert run.evaluations["loss"][-1] < run.evaluations["loss"][0]
    assert set(run.params) == {"layers"} and run.settings["model"] == "net"


test_a_plain_name_stands_for_an_object = refusals(
    *((name, server.asgd(), "^name = .*: must be of letters, digits")
      for name in ("", "..", "a b", "a:b", "a@b", "a,b", "a/b", "ä", 5, None)),
    *(("mine", thing, "^object = .*: must be an object of your own") for thing in (5, "fedasync", None, [1], {"a": 1})),
    by=named,
)  # fmt: skip


def fair(*, gain: Traced = 0.5, power: float = 1.0):
    return server.fedasync(mixing=gain**power)


def test_the_spec_of_a_rule_is_a_method_whose_options_are_swept_and_kept(tmp_path):
    base = SMALL | {"method": Spec(fair), "dataset": "fashion_mnist_6k"}
    found = sweep(base, {"method.gain": [0.25, 0.75]}, out=tmp_path / "sweep")
    assert [point.name for point in found.points] == ["gain=0.25", "gain=0.75"]
    assert len(plan_groups([point.settings for point in found.points])) == 1
    for gain, run in zip((0.25, 0.75), found.runs, strict=True):
        alone = simulate(**SMALL, method=f"fedasync:mixing={gain}")
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), run.params, alone.params)
    given = {**SMALL, "plots": False, "out": tmp_path / "run"}
    run, again = (simulate(**given, method=Spec(fair, gain=0.75)) for _ in range(2))  # the second is read
    equal(run, again)
    assert run.settings["method"] == "fair:gain=0.75"
    assert re.fullmatch(r"<Run: fair:gain=0.75, 6 updates, loss [\d.]+, accuracy [\d.]+>", repr(run))
    says = "code of method 'fair:gain=0.75'|method = 'fair:gain=0.25', saved 'fair:gai"
    is_refused(says, simulate, **given, method=Spec(fair, gain=0.25))
    says = "'method.gian': fair has no option 'gian'; did you mean 'method.gain'"
    is_refused(says, sweep, base, {"method.gian": [0.1, 0.2]})


def rush(*, long: float = 2.0):
    def model(num_clients, seed):
        return Delays(num_clients, lambda clients, numbers, *sizes: long + 0.0 * (clients + numbers))

    return model


def pulled(model, *, optimizer, batch_size, pull: Traced = 0.1):
    return local_training(model, optimizer=optimizer, batch_size=batch_size, proximal=pull)


# test_wrong_values.py has more of them, for every setting
test_wrong_objects_are_refused = refusals(
    ({"model": Linen(), "dataset": "quadratic:clients=4"}, r"must be a Model of models.from_flax\(net, .*loss="),
    ({"method": server.asgd()}, r"^method = 'a ServerAlgorithm': must be a name or a .*; wrap the rule: Method\("),
    ({"client": optax.sgd(0.1)}, "^client = .*: must be a ClientAlgorithm, a factory of one, .*, or a name registered"),
    # specs that no run can call
    ({"method": Spec(fair, 3)}, r"^arguments of method.rule = \(3,\): must be left out"),
    ({"method": Method(fair, client=Spec(pulled, 3))}, r"^arguments of method.client = \(3,\): must be left out"),
    ({"method": Spec(fair, gain=np.ones(2))}, "^method.rule: option gain = .*: must be a single number"),
    by=lambda change: simulate(**SMALL | change),
)


def test_the_spec_of_any_factory_is_a_part_whose_options_are_swept():
    base = SMALL | {"method": Spec(fair), "client": Spec(pulled), "delay": Spec(rush), "lr": 0.3, "steps": 3}
    found = sweep(base, points=[{"client.pull": 0.5, "delay.long": 1.0}, {"client.pull": 0.9, "delay.long": 4.0}])
    assert [run.schedule.time[-1] / run.schedule.time[0] for run in found.runs] == [2.0] * 2
    assert [run.schedule.time[0] for run in found.runs] == [1.0, 4.0]
    one, other = (run.params["output"]["kernel"] for run in found.runs)
    assert np.abs(one - other).max() > 1e-4
    inside = Method(Spec(fair), client=Spec(pulled))
    alike = sweep(base | {"method": inside, "client": None}, {"method.pull": [0.5], "delay.long": [1.0]})
    equal(alike.run(0), found.run(0))
    assert len(plan_groups([point.settings for point in found.points])) == 1
    is_refused(r"^option gain of positional = 1: must be keyword-only: def positional\(", Spec, positional, gain=1)


def test_several_options_of_a_spec_are_set_together():
    points = [{"method.gain": 0.4}, {"method.gain": 0.5, "method.power": 2.0}]
    points += [{"method": Spec(fair), "method.gain": 0.3}]
    found = expand(SMALL | {"method": Spec(fair, power=1.5)}, points=points)
    texts = ["power=1.5,gain=0.4", "power=2.0,gain=0.5", "gain=0.3"]
    assert [str(point.settings.method) for point in found] == [f"fair:{text}" for text in texts]
    assert len(expand(SMALL | {"method": Spec(fair)}, {"method.gain": [0.3, 0.5], "method.power": [1.0, 2.0]})) == 4
    unnamed = expand(SMALL | {"method": Method(Spec(fair))}, {"method.gain": [0.3, 0.5]})
    texts = [str(point.settings.method) for point in unnamed]
    assert texts == [str(Settings(**SMALL, method=point.settings.method.thing).method) for point in unnamed]
    assert texts[0] != texts[1]


def test_a_rule_with_an_array_as_default_runs_again():
    ones = np.ones(1)

    def weighted(*, by=ones, gain: Traced = 0.5):
        return server.fedasync(mixing=gain * float(by[0]))

    equal(*(simulate(**SMALL, method=Spec(weighted)) for _ in range(2)))


def positional(gain=1.0):
    return server.fedasync(mixing=gain)


@pytest.mark.parametrize("registered", [False, True])
def test_a_timing_that_ignores_conditions_is_said(nothing_stays_registered, registered):
    def in_turn(scenario):
        done = np.arange(scenario.until.updates)
        before = np.maximum(done - 3, 0)
        when = {"dispatch_time": before.astype(float), "upload_time": done + 1.0, "time": done + 1.0}
        how = {"job": done, "closes": done >= 0, "dispatched_after": before, "local_steps": np.ones(len(done), int)}
        return make_schedule(num_clients=scenario.num_clients, client=done % scenario.num_clients, **how, **when)

    timing = in_turn
    if registered:
        timing = "in_turn"
        register("timing", timing)(lambda: in_turn)
    given = {"faults": "drop:probability=0.9", "timeout": 1.0, "max_staleness": 0}
    given["availability"] = "joins:share=1,by=99"
    says = "faults, timeout, max_staleness, availability: without effect on this plan; a timing of your own must"
    _, (line,) = warned(prepare, Settings(**SMALL, timing=timing, **given), kind=RunWarning)
    assert line.startswith(says)
    assert warned(prepare, Settings(**SMALL, timing=timing), kind=RunWarning)[1] == []


def test_a_list_of_graphs_may_have_a_name(tmp_path):
    turns = named("turns", [nx.cycle_graph(4), nx.star_graph(3)])
    given = SMALL | {"method": "async_dfedavg", "dataset": "fashion_mnist_6k", "plots": False, "engine": "reference"}
    run = simulate(**given, topology=turns, out=tmp_path)
    assert run.settings["topology"] == "turns"
    same(run.params, simulate(**given, topology=[nx.cycle_graph(4), nx.star_graph(3)]).params)


def test_a_name_needs_a_fingerprint_and_a_bare_object_does_not():
    hidden = iter([1])
    thing, other = (Method(server.asgd()._replace(params=lambda state: (hidden, state.params)[1])) for _ in range(2))
    is_refused(r"fingerprint of rule -> params -> .*'s hidden = <list_iterator", named, "mine", thing)
    plain = as_dict(Settings(updates=5))
    assert "own" not in plain and "client" not in plain and from_dict(plain) == Settings(updates=5)
    content = as_dict(Settings(method=thing, updates=1))
    assert content["method"] == "(object)" and content["own"] == {"method": {"(object)": None}}
    assert Settings(method=thing, updates=1) == Settings(method=thing, updates=1)
    assert Settings(method=thing, updates=1) != Settings(method=other, updates=1)


def test_a_sweep_over_objects_and_names():
    mine = named("mine", Method(server.asgd()))
    points = expand(SMALL, {"method": ["fedasync", mine], "lr": [0.1, 0.2]})
    assert [point.name for point in points] == [
        "method=fedasync,lr=0.1", "method=fedasync,lr=0.2", "method=mine,lr=0.1", "method=mine,lr=0.2",
    ]  # fmt: skip
    assert points[3].settings == Settings(**SMALL | {"method": mine, "lr": 0.2})
    with pytest.raises(ValueError, match=r"'method.limit': must be left out: mine is an object and has no options"):
        expand(SMALL | {"method": mine}, {"method.limit": [1, 2]})


TINY = {
    "dataset": synthetic(clients=2), "clients": 2, "model": "logistic", "steps": 1, "updates": 1, "delay": "constant",
}  # fmt: skip


def moved(factor):
    """A function ``receive`` that adds ``factor`` times the delta."""

    def receive(state, memory, arrival):
        return jax.tree.map(lambda p, d: p + factor * d, state, arrival.upload), memory, Info(arrival.weight)

    return receive


class SaysItIsEqual:
    """Compares equal to all of its class, whatever it holds."""

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return isinstance(other, SaysItIsEqual)

    def __hash__(self):
        return 0

    def __call__(self, *given):
        return moved(self.factor)(*given)


def rule_with(receive):
    return RULE._replace(receive=receive)


def scaled(factor):
    return rule_with(moved(factor))


RULE = ServerAlgorithm(
    init=lambda params: (params, ()),
    receive=moved(1.0),
    dispatch=lambda state, memory, request: (Message(state), memory),
    params=lambda state: state,
)
HOLDER = SaysItIsEqual(1.0)
FACTOR = [1.0]


def reads_a_variable(state, memory, arrival):
    return jax.tree.map(lambda p, d: p + FACTOR[0] * d, state, arrival.upload), memory, Info(arrival.weight)


def with_variable(factor):
    FACTOR[0] = factor
    return rule_with(reads_a_variable)


def with_attribute(factor):
    HOLDER.factor = factor
    return rule_with(HOLDER)


def with_equals(factor):
    return rule_with(SaysItIsEqual(factor))


WAYS = {
    "closures": scaled, "objects that say they are equal": with_equals, "a variable that changes": with_variable,
    "an attribute that changes": with_attribute,
}  # fmt: skip


def change_of(server_rule):
    experiment = prepare(Settings(**TINY, method=Method(server_rule)))
    before = np.asarray(experiment.params["output"]["kernel"])
    return np.asarray(execute(experiment).params["output"]["kernel"]) - before


@pytest.mark.slow_cases("closures", "a variable that changes", "an attribute that changes")
@pytest.mark.parametrize("way", WAYS)
def test_no_two_own_rules_share_a_program(way):
    """Runs one after the other; the last has the first factor again, for which a program is compiled."""
    factors = [0.25, 4.0, 0.25]
    changes = [change_of(WAYS[way](factor)) for factor in factors]
    assert np.abs(changes[0]).max() > 1e-3
    for factor, change in zip(factors, changes):
        np.testing.assert_allclose(change / factor, changes[0] / factors[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_no_two_own_rules_have_the_same_settings(way):
    """By these settings, folders and checkpoints distinguish runs."""
    one, again, other = (as_dict(Settings(**TINY, method=named("mine", Method(WAYS[way](x))))) for x in (1.0, 1.0, 2.0))
    assert one == again
    assert identity.difference(one, other).startswith("code of method 'mine' = ")


def test_equal_runs_share_their_programs():
    thing = Method(scaled(0.5))
    assert own.lasting(thing) == own.lasting(thing) and own.lasting(thing).rule.receive is thing.rule.receive
    one, other = SaysItIsEqual(1.0), SaysItIsEqual(2.0)
    assert own.lasting(one) is own.lasting(one) and own.lasting(one) != own.lasting(other)
