"""Typical mistakes in parts of one's own: one line names the part and says what to write."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedjax_async import Method, Settings, Spec, compare, data, models, named, register, server, simulate
from fedjax_async.clock import Availability, Delays, Draws, Faults, JobFaults, Network, make_schedule, waves
from fedjax_async.compress import Compressor
from fedjax_async.config import method, prepare
from fedjax_async.config.experiment import resolve
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.config.watching import asked
from fedjax_async.data.problems import synthetic
from fedjax_async.local import local_training
from fedjax_async.server import METHODS
from fedjax_async.types import Info, Message, Stop
from tests.refusals import refusals
from tests.told import is_refused, refusal

X, Y = np.linspace(-1, 1, 200, dtype=np.float32).reshape(40, 5), np.arange(40) % 3
IMAGES = np.zeros((40, 8, 8), np.uint8)
CODES = np.arange(200).reshape(40, 5) // 2
SMALL = {"model": "logistic", "clients": 5, "steps": 1, "batch_size": 8, "updates": 4}
RULE = server.fedasync()
SCAFFOLD = server.scaffold()
SGD = optax.sgd(0.1)


def dealt(x=X, y=Y):
    return data.from_arrays([(x[:20], y[:20]), (x[20:30], y[20:30])], test=(x[30:], y[30:]))


OWN = {"dataset": dealt(), "model": "logistic", "steps": 1, "batch_size": 8, "updates": 4}
IMAGE_DATA = {"dataset": dealt(IMAGES)}
ONE_HOT = {"dataset": dealt(X, np.eye(3, dtype=np.float32)[Y])}
TARGETS = {"dataset": dealt(X, X[:, 0])}
SCAFFOLDED = {"method": "scaffold"}


def only_batch_size(model, *, batch_size):
    return local_training(model, optimizer=optax.sgd(0.1), batch_size=batch_size)


def only_lr(model, *, lr):
    return local_training(model, optimizer=optax.sgd(lr), batch_size=8)


def only_optimizer(model, *, optimizer):
    return local_training(model, optimizer=optimizer)


def positional(model, lr):
    return only_lr(model, lr=lr)


def without_default(model, *, lr, alpha):
    return only_lr(model, lr=lr)


def for_checkers(model: NotImported, *, lr: NotImported = 0.1) -> NotImported:  # noqa: F821
    return only_lr(model, lr=lr)


def receive_ci(state, memory, arrival):
    return SCAFFOLD.receive(state, memory, arrival._replace(upload=arrival.upload["ci"]))


def by_order(num_clients, seed):
    rng = np.random.default_rng(seed)
    return Delays(num_clients, lambda clients, numbers, *sizes: 1 + rng.random(np.broadcast(clients, numbers).shape))


def by_index(num_clients, seed):
    return Delays(num_clients, lambda clients, numbers, *sizes: 1 + Draws(seed, "mine", clients, numbers).random())


def delays(durations):
    return lambda num_clients, seed: Delays(num_clients, durations)


def faults(draw):
    return lambda num_clients, seed, part: Faults(draw)


def started(value):
    return {"output": {"kernel": np.full((5, 3), value), "bias": np.zeros(3)}}


def client(**changes):
    model = models.decoded(models.make("logistic", num_classes=3, input_shape=(5,)), data.decode.as_is)
    return local_training(model, optimizer=optax.sgd(0.1), batch_size=8)._replace(**changes)


def raising(*given):
    raise KeyError("mine")


class Training(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(3)(x)


class Required(nn.Module):
    @nn.compact
    def __call__(self, x, temperature):
        return nn.Dense(3)(x) / temperature


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.Dropout(0.5, rng_collection="noise", deterministic=not train)(x))


MODEL = models.make("logistic", num_classes=3, input_shape=(5,))
DEALING = {"dataset": synthetic(clients=4, least_size=20, std_log_size=0.0, mean_log_size=1.0), "clients": 4}


def broadcasting(outputs, y):
    return jnp.square(outputs - y[None]).mean(-1)


def with_loss(loss):
    return models.from_flax(nn.Dense(1), input_shape=(5,), loss=loss)


def rule(**changes):
    return Method(RULE._replace(**changes))


def receiving(change):
    return rule(receive=lambda *given: change(*RULE.receive(*given)))


def recording(info):
    return rule(receive=lambda state, memory, arrival: (state, memory, info(arrival)))


def scheduled(scenario):
    """Two jobs of client 0 at the same time."""
    when = {"dispatch_time": [0.0, 0.0], "upload_time": [1.0, 1.0], "time": [1.0, 1.0], "dispatched_after": [0, 0]}
    return make_schedule(num_clients=2, client=[0, 0], job=[0, 1], closes=True, local_steps=1, **when)


# A setting, or a function of the client, rule or model, and what is said after its name (or after ^); other settings.
PARTS = [
    # settings that local training does not take
    ("method", Method(RULE, client=only_lr, optimizer="adam"), "^method.optimizer = 'adam': must be left out"),
    ("method", Method(RULE, client=only_batch_size, lr=0.5), "^method.lr = 0.5: must be left out"),
    ("lr", 0.5, " = 0.5: must be left out: the client algorithm", {"client": only_batch_size}),
    ("decay", "cosine", " = 'cosine': must be left out", {"client": only_lr}),
    # rules and factories
    ("method", Method(lambda x: 3), "^method.rule = 'a function': must be a ServerAlgorithm, a PeerAlgorithm"),
    ("method", server.scaffold, r" = 'a function': must be .*; wrap the factory: Method\(f\), or Spec\(f, o"),
    ("method", Method(RULE, client=client()), "^method.client = 'a ClientAlgorithm': must be a factory .*client= of"),
    ("method", Method(RULE, client=positional), r"^method.client = 'positional\(model, lr\)': must be f\(model, \*"),
    ("method", Method(RULE, client=without_default), "optimizer, lr, batch_size, .*the option alpha needs a default"),
    ("client", without_default, r" = 'without_default\(model, \*, lr, alpha\)': must be .* alpha needs"),
    ("client", 3, " = 3: must be a text, or a ClientAlgorithm, or a factory of one"),
    ("method", Method(SCAFFOLD._replace(receive=receive_ci)),
     r"^method.receive: .*KeyError: 'ci' \(the client uploads \{'output': \{'bias': float32\[3\], "),
    ("client", only_optimizer,
     r"^method.receive: .*; the clients of scaffold itself upload what it takes: leave out client\)", SCAFFOLDED),
    # clients
    ("client.begin", lambda key, message, state, data: state["a"],
     r": .*it raised TypeError: .* \(client.init returned \(\); this rule sends message.extra = \(\)\)"),
    ("client.finish", lambda w, message, state: (w / message.local_steps, state),
     r": .*it raised TypeError: .*; message.local_steps is missing in finish\)"),
    ("client", client(init=lambda p: jnp.ones(3), finish=lambda w, message, state: (message.params, ())),
     r"^client.finish's state returned \(\): must return state .*\(client.init returned float32\[3\]\)"),
    ("client.info", lambda state: 3, r" returned 3: must return \{name: number\}"),
    ("client.info", raising, r": must be a function info\(state\) -> .*it raised KeyError: 'mine'"),
    ("client.info", lambda state: {"client": 1.0}, "^name of a column of client.info = 'client': must be a text other"),
    ("client.own", lambda message, state: 3, " returned 3: must return params of the structure"),
    ("client.unsent", lambda before, after: 3, " returned 3: must return state of the struct"),
    ("client.step", lambda work, k, message, data: 0.0, " returned 0.0: must return work of the structure"),
    ("client.finish", lambda work, message, state: message.params, r" returned .*: must return \(upl"),
    ("client.finish", lambda work, message, state: (1.0, state), " returned 1.0: must return an upl"),
    ("client.finish", lambda work, message, state: (message.params, (state, 1)),
     "'s state returned .*: must return state of the structure"),
    # rules: what they send and record, and how they take the facts
    ("method.init", 5, r": must be a function init\(params\[, facts\]\); it raised TypeError: 'int' object"),
    ("method.init", lambda: 5, r": must be a function init.*; it raised TypeError: .*\(\) takes 0 pos"),
    ("method.init", lambda params, facts, more: 5, ": .*; it raised TypeError: .* argument: 'more'"),
    ("method.init", lambda params, facts: facts["N"], ": .*; it raised TypeError: 'Facts' object is not"),
    ("method.init", lambda params, facts: 5, r" returned 5: must return \(state, memory\)"),
    ("method.init", lambda params: params, r" returned .*: must return \(state, memory\)"),
    ("method.init", raising, ": .*it raised KeyError: 'mine'"),
    ("method.dispatch", lambda state, memory, request: (Message({"w": jnp.zeros(2)}), memory),
     r"'s Message.params returned \{'w': float32\[2\]\}: must return params of the structure"),
    ("method.dispatch", lambda state, memory, request: (state, memory), r" returned .*: must return \(Message, memor"),
    ("method.dispatch", lambda state, memory, request: (Message(RULE.params(state)), 1.0),
     r"'s memory returned 1.0: must return memory of the structure \(\)"),
    ("method", recording(lambda arrival: Info("w")), "^method.receive's Info.weight returned 'w': must return a num"),
    ("method", recording(lambda arrival: Info(arrival.weight, {3: arrival.weight})),
     "^name of a column of method.receive's Info.columns = 3: must be a text"),
    ("method", recording(lambda arrival: Info(arrival.weight, {"time": arrival.weight})),
     "^name of a column of method.receive's Info.columns = 'time': must be a text other than client, job, time, "),
    ("method", receiving(lambda *found: None), r"^method.receive returned None: must return \(state, memory, Info\)"),
    ("method", receiving(lambda state, memory, info: (state, memory, 1.0)),
     r"^method.receive returned 1.0: must return \(state, memory, Info\); the third is not an Info"),
    ("method", receiving(lambda state, memory, info: (state, info)), r"^method.receive returned \(.*must return \(st"),
    ("method", receiving(lambda state, memory, info: (state, memory, Info(jnp.ones(2)))),
     r"^method.receive's Info.weight returned float32\[2\]: must return a number"),
    ("method", receiving(lambda state, memory, info: (state, memory, Info(info.weight, {"a": jnp.ones(2)}))),
     r"^method.receive's Info.columns\['a'\] returned float32\[2\]: must return a number"),
    ("method", receiving(lambda state, *rest: (jax.tree.map(lambda leaf: leaf[None], state), *rest)),
     "^method.receive's state.* returned .*: must return state: here"),
    ("method", receiving(lambda state, *rest: (jax.tree.map(lambda leaf: 0.0, state), *rest)),
     "^method.receive's state.* returned 0.0: must return state: here"),
    ("method.close", lambda state, memory: state, r" returned .*: must return \(state, memory\)"),
    ("method.params", lambda state: None, " returned None: must return params of the s"),
    ("method.receive", lambda *given: 1 / 0, "must be a function .*; it raised ZeroDivisionError: division by zero"),
    ("method.receive", lambda state, memory, arrival: 1 if arrival.weight > 0 else 2,
     ": must be .* it raised TracerBoolConversionError: a Python condition .*; use jnp.where "),
    ("method", Method(lambda hyper: RULE), "^method.rule = 'a function': must be a ServerAlgorithm, a PeerAlgor"),
    ("method", Method(lambda: 3), "^method.rule returned 3: must return a ServerAlgorithm"),
    ("method", Method(lambda: None), "^method.rule returned None: must return a ServerAlgorithm"),
    ("method", Spec(lambda: {}["b"]), "^method.rule: must be a factory of a ServerAlgorithm; it raised KeyError: '"),
    # faults, compressors, delays and other models of the clock
    ("faults", faults(raising), r": must be of draw\(clients, numbers\) -> clock.JobFaults; it raised KeyError: 'min"),
    ("faults", faults(lambda clients, numbers: 3), ": what draw returned = 3: must be JobFaults"),
    ("faults", faults(lambda *jobs: JobFaults(factor="x")), "draw's JobFaults.factor = 'x': must be numbers > 0, one"),
    ("faults", faults(lambda *jobs: JobFaults(lost=np.zeros(5, bool))), "draw's JobFaults.lost = .* True or False, on"),
    ("faults", lambda n, seed, part: None, " returned None: must return a fault model"),
    ("compress", Compressor(3, 3, 3), ".compress = 3: must be a function"),
    ("delay", lambda n, seed: lambda client: 1.0, " returned a function: must return "),
    ("delay", delays(lambda *given: 1.0), r"durations returned 1.0: must return an array of .* here float64\[2\]"),
    ("delay", delays(lambda clients, *given: np.ones(len(clients), int)),
     r"'s durations returned int64\[2\]: must return an array of virtual seconds, one per job"),
    ("delay", by_order, r"'s durations: must be the same at every call.*clock.Draws\(seed, \"NAME\", clients, numbe"),
    ("delay", delays(lambda clients, numbers, *sizes: np.ones(len(clients))),
     r"'s durations returned float64\[2\]: must .*float64\[2, 2\], from durations\(clients, numbers, local_st"),
    ("delay", delays(lambda clients, numbers, *sizes: 1 + 0 * (clients + numbers)), r"int64\[2\]: .*add .astype\(floa"),
    ("delay", delays(lambda clients, numbers: 1.0), r"durations\(clients, numbers, local_steps, bytes_down, bytes_up"),
    ("delay", lambda num_clients: None, r": must be a delay model, model\(num_clients, seed\) -> .*TypeError"),
    ("network", lambda n, seed: None, " returned None: must return a network model"),
    ("network", lambda n, seed: Network(n, lambda *given: None), "'s seconds returned None: must return an"),
    ("availability", lambda n, seed, part: Availability(lambda client, time: 0.0),
     r"'s interval returned 0.0: must return \(start, end\)"),
    ("timing", lambda scenario: None, " returned None: must return a Schedule"),
    ("timing", scheduled, r": .*schedule.dispatch_time\[1\] = 0.0 .*: must not be before client 0 is done with its j"),
    # models
    ("model.init", lambda key: 3.0, " returned 3.0: must return a pytree of float arrays"),
    ("model.init", lambda key: {}, r" returned \{\}: must return a pytree of float arrays"),
    ("model.apply", lambda *given: MODEL.apply(*given).mean(), r" returned float32\[\]: must return an array of one"),
    ("model.loss", lambda *given: MODEL.loss(*given).mean(), r" returned float32\[\]: .* number per .* not their mean"),
    ("model.loss", lambda outputs, y: 0.5, " returned 0.5: must return a number per"),
    ("model.apply", lambda p, x, key=None: p["none"],
     r": must be a function apply\(params, x\[, key\]\) -> outputs; it raised KeyError: 'none'"),
    ("model", Training(), "^argument of Training.__call__ = 'training': must be called train .or deterministic"),
    ("model", Required(), "^argument of Required.__call__ = 'temperature': must .*others need a default"),
    # flax raises an error, or the model has no outputs
    ("model", nn.Dense(0), "^module = Dense: must be a module that takes .*ZeroDiv|^model outputs = 0: must be"),
    ("model", Noisy(), r"^model.apply: must be a function apply\(params, x, key\) -> .*raised InvalidRngError"),
    ("model", nn.Dense(3), r" = 'a Dense': must be .*models.from_flax\(net, .*not one-hot or floats", ONE_HOT),
    ("model", models.from_flax(nn.Dense(3), input_shape=(5,)),
     r"^data.y = 'float32\[3, 3\]': must be integer labels .*argmax.*loss=", ONE_HOT),
    ("model", nn.Dense(3),
     r".apply returned float32\[3, 8, 8, 3\]: must return \[3, cl.* x is float32\[3, 8, 8, 1\]: flat", IMAGE_DATA),
    ("model", models.from_flax(nn.Dense(3), input_shape=(8, 8)),
     r".apply: must be .*it raised .*\(x is float32\[3, 8, 8, 1\]\)", IMAGE_DATA),
    ("model", with_loss(broadcasting),
     r".loss = 'mixes examples \(outputs are float32\[3, 1\], y is float32\[3\]\)': must be of each example", TARGETS),
    ("model", "char_gru:last=true", "^inputs = 'float32': must be codes, whole numbers"),
    ("model", "char_transformer:last=true,vocabulary=90",
     "^vocabulary of char_transformer = 90: must be at least 100: codes in test_x of own reach 99",
     {"dataset": dealt(CODES)}),
    ("model", "char_gru:last=true", "^smallest code in x of own = -74: must be at least 0", {"dataset": dealt(-CODES)}),
    ("initial", started(np.nan), "^initial, output/kernel = 'NaN or infinite': must be finite numbers"),
    ("initial", started(1j), "^type of output/kernel in initial = 'complex128': must be real numbers"),
    # data
    ("partition", lambda y, n, rng: np.zeros((n, 3)), r" returned float64\[4, 3\]: must return a list", DEALING),
    ("partition", lambda y, n, rng: [np.ones(3, bool)] * n, r" returned bool\[3\]: must return a list", DEALING),
    ("partition", lambda y, n, rng: [np.arange(3)] * n, " = '12 indices': must be eac", DEALING),
    ("clients", 9, " = 9: must be left out, or 2: the data have 2 clients$"),
]  # fmt: skip


@pytest.mark.parametrize("row", PARTS, ids=[f"{row[0]} {i}" for i, row in enumerate(PARTS)])
def test_a_wrong_part_is_named_with_what_to_write(row):
    field, value, says, *others = row
    owner, _, name = field.partition(".")
    if name:
        value = {"client": client, "method": rule, "model": MODEL._replace}[owner](**{name: value})
    given = OWN | {owner: value} | (others[0] if others else {})
    assert re.search(says if says.startswith("^") else f"^{field}.*{says}", refusal(lambda: prepare(Settings(**given))))


test_a_wrong_call_is_named_with_what_to_write = refusals(
    (lambda: simulate(data=dealt(), clients=10, updates=4), r"^clients = 10: must be left out, or 2"),
    (lambda: simulate(dataset=dealt(), clients=10, updates=4), r"^clients = 10: must be left out, or 2"),
    (lambda: simulate(data=[(X, Y)], updates=4), r"^data = 'a list': must be FederatedData; data.from_arrays\(clients"),
    (lambda: simulate(dataset=[(X, Y)], updates=4), r"^dataset = .*FederatedData \(data.from_arrays makes one"),
    (lambda: register("method", "never")(RULE), r"^method never = 'a ServerAlgorithm': .*wrap it: def never\(\): retu"),
    (lambda: register("method", "never")(Method(RULE)),
     r"^method never = 'a Method': .*the rule alone; its timing, clie"),
    (lambda: register("client", "never")(client()), r"^client never = 'a Client.*wrap it: def never\(model\): return"),
    (lambda: compare({"mine=": "fedasync"}, **SMALL), r"^label = 'mine=': must be 1 to 60 printable characters"),
    (lambda: compare(["fedasync"], **SMALL, method="fedavg"), r"^method = 'fedavg': must be left out beside methods"),
    (lambda: simulate(data=dealt(), dataset="mnist", updates=4),
     r"^dataset = 'mnist': must be left out: data are given"),
    (lambda: simulate(**SMALL, metrics=lambda outputs, y: y), r"^metrics = 'a function': must be a text, or a dict of"),
    (lambda: simulate(**SMALL, probes={"p": lambda: {}}), r"^probes\['p'\]: must be a function f\(state, .*TypeError"),
    (lambda: simulate(**SMALL, probes={"p": raising}), r"^probes\['p'\]: must be .*it raised KeyError: 'mine'"),
    (lambda: asked(lambda evaluation: Stop(3), None), r"^return of callback .* = Stop\(why=3\): must be None, or Stop"),
    (lambda: asked(lambda evaluation: Stop(" "), None), r"^return of callback .* = Stop\(why=' '\): must be None"),
    (lambda: server.rule(3, optimizer=SGD), r"^transforms\[0\] = 3: must be a Transform"),
    (lambda: server.rule(lambda d: d, optimizer=SGD), r"^transforms\[0\] = 'a function': must be a Transform"),
    (lambda: server.rule(optimizer=0.1), r"^optimizer = 0.1: must be an optax transformation"),
    (lambda: server.rule(optimizer=SGD, aggregate=3), r"^aggregate = 3: must be an Aggregate"),
    (lambda: server.rule(optimizer=SGD, rate=3), r"^rate = 3: must be a function of the staleness"),
    (lambda: server.scale_by_staleness(3), r"^weight = 3: must be a function of the staleness"),
    (lambda: models.from_flax(3, input_shape=(5,)), r"^module = 3: must be a flax.linen module"),
    (lambda: models.from_flax(nn.Dense(3), input_shape=(5,), loss=3), r"^loss = 3: must be a function"),
    (lambda: local_training(3, optimizer=SGD), r"^model = 3: must be a Model"),
    (lambda: local_training(models.make("logistic"), optimizer=3), r"^optimizer = 3: must be an optax transformation"),
    (lambda: data.load(3), r"^dataset = 3: must be a text such as 'mnist'"),
    (lambda: data.federate(3), r"^dataset = 3: must be a Dataset or a Federation"),
    (lambda: data.write_folder("o", 3), r"^data = 3: must be FederatedData"),
    (lambda: waves(3), r"^schedule = 3: must be a Schedule"),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "factory", "says"), [
    ("optimizer", lambda lr: 3, "optimizer wrong: what its factory returned = 3: must be .*an optax transf"),
    ("decay", lambda: 3, "decay wrong: what its factory returned = 3: must be .*a function of the v"),
    ("method", lambda: Method(RULE), r"method wrong = 'a Method': must be a factory of a ServerAlgorithm \(timing"),
])  # fmt: skip
def test_a_registered_factory_that_returns_something_else(nothing_stays_registered, kind, factory, says):
    register(kind, "wrong")(factory)
    is_refused(f"^{says}", lambda: prepare(Settings(**{**OWN, kind: "wrong"})))


@pytest.mark.parametrize("changes", [
    {"delay": by_index}, {"method": Method(RULE, client=for_checkers)}, {"clients": 2},
    {"method": rule(), "model": MODEL, "client": client()},
    TARGETS | {"model": with_loss(lambda outputs, y: jnp.square(outputs[:, 0] - y))},
])  # fmt: skip
def test_right_parts_pass(changes):
    prepare(Settings(**{**OWN, **changes}))


@pytest.mark.parametrize("name", METHODS)
def test_the_package_keeps_its_own_contracts(name):
    resolve(Settings(**OWN | {"method": method(name)}))


def test_a_factory_as_client_is_that_of_a_method():
    """With images: the model that the factory gets decodes them."""
    settings = {**SMALL, "lr": 0.3, "eval_examples": 40, "engine": "reference"}
    run = simulate(client=named("mine", only_lr), **settings)
    same = simulate(method=Method(server.fedasync(), client=only_lr), **settings)
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(run.params["output"][name], same.params["output"][name])
    assert (run.settings["client"], run.settings["lr"], run.settings["decay"]) == ("mine", 0.3, "constant")
    assert run.settings["optimizer"] is None and same.settings["optimizer"] is None  # the factory takes only the rate
    assert as_dict(from_dict(run.settings)) == run.settings


def test_what_a_factory_ignores_is_not_recorded():
    made = prepare(Settings(**{**OWN, "method": Method(RULE, client=only_batch_size)}))
    assert made.described["lr"] is None and made.described["optimizer"] is None
    assert prepare(Settings(**{**OWN, "method": Method(RULE, client=METHODS["feddyn"].client)})).described["lr"] == 0.01
