"""Parts of one's own as a newcomer writes them wrongly: one line that names the part and says what to write."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedjax_async import Method, Settings, cli, compare, data, models, named, register, registry, server, simulate
from fedjax_async.clock import Delays, Draws
from fedjax_async.config import prepare
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.local import local_training
from fedjax_async.results import comparison
from fedjax_async.server import METHODS
from fedjax_async.types import Run

X, Y = np.linspace(-1, 1, 200, dtype=np.float32).reshape(40, 5), np.arange(40) % 3
IMAGES = np.zeros((40, 8, 8), np.uint8)
SMALL = {"model": "logistic", "clients": 5, "steps": 1, "batch_size": 8, "updates": 4}
RULE = server.fedasync()
SCAFFOLD = server.scaffold()
RUN = Run({}, (), {}, {}, {}, {}, None)


def dealt(x=X, y=Y):
    return data.from_arrays([(x[:20], y[:20]), (x[20:30], y[20:30])], test=(x[30:], y[30:]))


OWN = {"dataset": dealt(), "model": "logistic", "steps": 1, "batch_size": 8, "updates": 4}
IMAGE_DATA = {**OWN, "dataset": dealt(IMAGES)}
ONE_HOT = {**OWN, "dataset": dealt(X, np.eye(3, dtype=np.float32)[Y])}


def only_batch_size(model, *, batch_size):
    return local_training(model, optimizer=optax.sgd(0.1), batch_size=batch_size)


def only_lr(model, *, lr):
    return local_training(model, optimizer=optax.sgd(lr), batch_size=8)


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
    return {"delay": lambda num_clients, seed: Delays(num_clients, durations)}


def client(**changes):
    model = models.decoded(models.make("logistic", num_classes=3, input_shape=(5,)), data.decode.as_is)
    return local_training(model, optimizer=optax.sgd(0.1), batch_size=8)._replace(**changes)


class Training(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(3)(x)


class Required(nn.Module):
    @nn.compact
    def __call__(self, x, temperature):
        return nn.Dense(3)(x) / temperature


PARTS = [
    # settings that local training does not take
    ({"method": Method(RULE, client=only_lr, optimizer="adam")}, r"^method.optimizer = 'adam': must be left out"),
    ({"method": Method(RULE, client=only_batch_size, lr=0.5)}, r"^method.lr = 0.5: must be left out"),
    ({"client": only_batch_size, "lr": 0.5}, r"^lr = 0.5: must be left out: the client algorithm"),
    ({"client": only_lr, "decay": "cosine"}, r"^decay = 'cosine': must be left out"),
    # rules and factories
    ({"method": Method(server.scaffold)}, r"^method.server = 'a function': must be .*call a factory: Method\(f\(\)\)"),
    ({"method": server.scaffold}, r"^method = 'a function': must be a name or a Method; call the factory: Method\(f"),
    (
        {"method": Method(RULE, client=client())},
        r"^method.client = 'a ClientAlgorithm': must be a factory .*client= of",
    ),
    ({"method": Method(RULE, client=positional)}, r"^method.client = 'positional\(model, lr\)': must be f\(model, \*"),
    (
        {"method": Method(RULE, client=without_default)},
        r"optimizer, lr, batch_size, .*the option alpha needs a default",
    ),
    ({"client": without_default}, r"^client = 'without_default\(model, \*, lr, alpha\)': must be .* alpha needs"),
    ({"client": 3}, r"^client = 3: must be a text, or a ClientAlgorithm, or a factory of one"),
    (
        {"method": Method(SCAFFOLD._replace(receive=receive_ci, given=None))},
        r"^method.receive: .*KeyError: 'ci' \(the client uploads \{'output': \{'bias': float32\[3\], ",
    ),
    # clients
    (
        {"client": client(begin=lambda key, message, state, data: state["a"])},
        r"^client.begin: .*it raised TypeError: .* \(client.init returned \(\)\)",
    ),
    (
        {"client": client(init=lambda p: jnp.ones(3), finish=lambda w, message, state: (message.params, ()))},
        r"^client.finish's state returned \(\): must return state .*\(client.init returned float32\[3\]\)",
    ),
    # delays
    (
        {"delay": by_order},
        r"^delay's durations: must be the same whenever .*clock.Draws\(seed, \"NAME\", clients, numbe",
    ),
    (
        delays(lambda clients, numbers, *sizes: np.ones(len(clients))),
        r"^delay's durations returned float64\[2\]: must .*float64\[2, 2\], from durations\(clients, numbers, local_st",
    ),
    (delays(lambda clients, numbers, *sizes: 1 + 0 * (clients + numbers)), r"int64\[2\]: .*add .astype\(float\)"),
    (
        delays(lambda clients, numbers: 1.0),
        r"function durations\(clients, numbers, local_steps, bytes_down, bytes_up\)",
    ),
    ({"delay": lambda num_clients: None}, r"^delay: must be a delay model, model\(num_clients, seed\) -> .*TypeError"),
    # data and models
    ({"clients": 9}, r"^clients = 9: must be left out, or 2: the data come for 2 clients$"),
    (
        {**ONE_HOT, "model": nn.Dense(3)},
        r"^model = 'a Dense': must be .*models.from_flax\(net, .*not one-hot or floats",
    ),
    (
        {**ONE_HOT, "model": models.from_flax(nn.Dense(3), input_shape=(5,))},
        r"^data.y = 'float32\[3, 3\]': must be integer labels .*argmax.*loss=",
    ),
    (
        {**IMAGE_DATA, "model": nn.Dense(3)},
        r"^model.apply returned float32\[3, 8, 8, 3\]: must return \[3, classes\] .* x is float32\[3, 8, 8, 1\]: flat",
    ),
    (
        {**IMAGE_DATA, "model": models.from_flax(nn.Dense(3), input_shape=(8, 8))},
        r"^model.apply: must be .*it raised .*\(x is float32\[3, 8, 8, 1\]\)",
    ),
    ({"model": Training()}, r"^argument of Training.__call__ = 'training': must be called train \(or deterministic\)"),
    ({"model": Required()}, r"^argument of Required.__call__ = 'temperature': must .*others need a default"),
]


@pytest.mark.parametrize(("changes", "message"), PARTS, ids=range(len(PARTS)))
def test_a_wrong_part_is_named_with_what_to_write(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        prepare(Settings(**{**OWN, **changes}))
    assert "\n" not in str(error.value)


CALLS = [
    (lambda: simulate(data=dealt(), clients=10, updates=4), r"^clients = 10: must be left out, or 2"),
    (
        lambda: simulate(data=[(X, Y)], updates=4),
        r"^data = 'a list': must be FederatedData; data.from_arrays\(clients=",
    ),
    (lambda: simulate(dataset=[(X, Y)], updates=4), r"^dataset = .*FederatedData \(data.from_arrays makes one"),
    (
        lambda: register("method", "never")(RULE),
        r"^method never = 'a ServerAlgorithm': .*wrap it: def never\(\): return",
    ),
    (
        lambda: register("method", "never")(Method(RULE)),
        r"^method never = 'a Method': .*the rule alone; its timing, clie",
    ),
    (lambda: register("client", "never")(client()), r"^client never = 'a Client.*wrap it: def never\(model\): return"),
    (lambda: compare({"mine": "fedasync"}, **SMALL), r"^methods\['mine'\] = 'fedasync': must be a Method"),
    (lambda: compare(["fedasync"], **SMALL, method="fedavg"), r"^method = 'fedavg': must be left out beside methods"),
    (lambda: compare(["fedasync"], **SMALL, rate=3), r"^setting = 'rate': unknown"),
    (lambda: comparison([RUN]), r"^runs = 'a list': must be a dict, method -> list of its runs"),
    (lambda: comparison(RUN), r"^runs = 'a Run': must be a dict"),
    (lambda: comparison({"a": RUN}), r"^runs\['a'\] = 'a Run': must be a list of its runs, one a seed: \[run\]$"),
    (lambda: comparison({"a": []}), r"^runs\['a'\] = 'a list': must be a list of its runs"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=range(len(CALLS)))
def test_a_wrong_call_is_named_with_what_to_write(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_registered_factory_of_a_method_is_told_to_return_the_rule(monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    register("method", "whole")(lambda: Method(RULE))
    with pytest.raises(
        ValueError, match=r"^method whole = 'a Method': must be a factory of a ServerAlgorithm \(timing"
    ):
        prepare(Settings(**{**OWN, "method": "whole"}))


# --- what is taken ----------------------------------------------------------------------------------


def test_right_parts_pass():
    prepare(Settings(**{**OWN, "delay": by_index}))
    prepare(Settings(**{**OWN, "method": Method(RULE, client=for_checkers)}))
    prepare(Settings(**{**OWN, "clients": 2}))
    assert not registry.options_of(for_checkers)["lr"].default > 0.1


def test_a_factory_as_client_is_that_of_a_method():
    """On images: the model that the factory gets decodes them."""
    settings = {**SMALL, "lr": 0.3, "eval_examples": 40}
    run = simulate(client=named("mine", only_lr), **settings)
    same = simulate(method=Method(server.fedasync(), client=only_lr), **settings)
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(run.params["output"][name], same.params["output"][name])
    assert (run.settings["client"], run.settings["lr"], run.settings["decay"]) == ("mine", 0.3, "constant")
    assert run.settings["optimizer"] is None and same.settings["optimizer"] is None  # the factory takes the rate alone
    assert as_dict(from_dict(run.settings)) == run.settings


def test_what_a_factory_ignores_is_not_recorded():
    made = prepare(Settings(**{**OWN, "method": Method(RULE, client=only_batch_size)}))
    assert made.described["lr"] is None and made.described["optimizer"] is None
    assert prepare(Settings(**{**OWN, "method": Method(RULE, client=METHODS["feddyn"].client)})).described["lr"] == 0.01


def test_compare_takes_keywords_and_a_dict():
    runs = compare({"fedasync": "fedasync", "mine": Method(RULE)}, **SMALL, eval_examples=40, progress=False)
    assert list(runs) == ["fedasync", "mine"] and runs["mine"][0].settings["method"] == "mine"
    np.testing.assert_array_equal(*(one.params["output"]["kernel"] for (one,) in runs.values()))


def test_list_shows_no_docstring_of_a_preset_for_a_factory_without_one(monkeypatch, capsys):
    monkeypatch.setattr(registry, "ADDED", {})
    register("method", "undescribed")(lambda: RULE)
    assert cli.main(["list", "methods"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "undescribed" in line]
    assert line.strip() == "undescribed"
