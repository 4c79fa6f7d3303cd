"""An object of the wrong type in place of a name: refused by its type, before anything reads what is in it."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
from flax import linen, nnx

from fedjax_async import Method, PeerMethod, clock, compare, models, named, server, simulate, sweep
from fedjax_async.config import Settings, own
from fedjax_async.fingerprints import fingerprint

TEXTS = ("attack", "privacy", "energy", "optimizer", "normalise", "personal", "eval_at", "decay", "memory_limit")


class Tensor:
    """As a parameter of PyTorch: it has a dtype, and refuses to become an array of NumPy."""

    dtype, shape, requires_grad = "torch.float32", (3, 5), True

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class Module:
    """As a module of PyTorch: it can be called, and holds tensors and functions."""

    def __init__(self):
        self._parameters = {"weight": Tensor()}

    def __call__(self, x):
        return x


Module.__module__, Tensor.__module__ = "torch.nn.modules.module", "torch"


class OfTorch(Module):
    pass


class WithDropout(nnx.Module):
    def __init__(self):
        self.dense, self.dropout = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(self.dense(x))


class Speechless:
    def __repr__(self):
        raise RuntimeError("no text")


OTHERS = {
    "a Linear of PyTorch": (OfTorch(), "a OfTorch"),
    "an nnx module with dropout": (WithDropout(), "a WithDropout"),
    "a linen module": (linen.Dense(3), "a Dense"),
    "a generator": ((i for i in range(3)), "a generator"),
    "a generator of NumPy": (np.random.default_rng(0), "a Generator"),
    "an object without a text": (Speechless(), "a Speechless"),
    "a Python module": (np, "a module"),
    "a budget": (clock.Until(updates=3), "a Until"),
    "a tensor": (Tensor(), "a Tensor"),
    "a random key": (jax.random.key(0), "a PRNGKeyArray"),
}
FITTING = {("model", "an nnx module with dropout"), ("model", "a linen module"), ("initial", "a tensor")}


@pytest.mark.parametrize(
    ("field", "kind"), [pair for pair in itertools.product(own.KINDS, OTHERS) if pair not in FITTING]
)
def test_every_setting_names_itself_the_object_and_what_it_takes(field, kind):
    thing, shown = OTHERS[kind]
    graphs = field == "topology" and not callable(thing)  # shown by its text
    with pytest.raises(ValueError, match=f"^{field} = .*{'' if graphs else shown}.*: must be .*{WANTED[field]}"):
        Settings(**{field: thing})


WANTED = {
    "method": "a name or a Method", "timing": "timing\\(scenario\\)", "policy": "model\\(prior\\)",
    "topology": "a networkx graph", "exchange": "exchange\\(setup\\)", "delay": "clock.Delays",
    "availability": "clock.Availability", "faults": "clock.Faults", "network": "clock.Network",
    "dataset": "a Dataset, a Federation or FederatedData", "partition": "indices of client 0",
    "augment": "augment\\(key, x\\)", "model": "a Model, or a flax", "initial": "a pytree of arrays",
    "client": "a ClientAlgorithm", "compress": "a name or a Compressor", "metrics": "a dict of names and metrics",
}  # fmt: skip


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("kind", ["a Linear of PyTorch", "an object without a text", "a generator"])
def test_settings_that_take_no_object_say_so(field, kind):
    with pytest.raises(ValueError, match=f"^{field} = .*: must be "):
        Settings(**{field: OTHERS[kind][0]})


def test_a_name_around_the_object_hides_nothing():
    with pytest.raises(ValueError, match=r"^object = 'a ServerAlgorithm': .*; wrap the rule: Method\(rule"):
        named("mine", server.fedasync())
    for field, thing in (("delay", np.ones(3)), ("model", Method(server.fedasync())), ("dataset", abs)):
        with pytest.raises(ValueError, match=f"^{field} = 'a {type(thing).__name__}': must be "):
            Settings(**{field: named("mine", thing)})
    with pytest.raises(ValueError, match=r"^attack = 'a function': must be a text: this setting takes no object"):
        Settings(attack=named("mine", lambda: None))


def test_a_named_network_of_pytorch_is_refused_as_what_it_is():
    advice = "written again in flax, and its weights may be read by initial=FILE"
    with pytest.raises(ValueError, match=f"^object = 'a OfTorch': must be .* a Model, a flax module .*{advice}"):
        named("net", OfTorch())
    with pytest.raises(ValueError, match=f"^model = 'a OfTorch': must be .*; .*{advice}"):
        simulate(model=OfTorch(), updates=1)


def test_a_class_in_place_of_a_module_is_called_a_class():
    with pytest.raises(ValueError, match=re.escape("model = 'the class Dense': ") + r".*; make one: Dense\(\.\.\.\)"):
        simulate(model=linen.Dense, updates=1)


def test_an_nnx_module_with_dropout_is_refused_by_its_state():
    for model in (WithDropout(), named("net", WithDropout())):
        with pytest.raises(ValueError, match=r"^module state = \['RngCount', 'RngKey'\]: must be nnx.Param alone"):
            simulate(model=model, updates=1)


def test_comparisons_and_sweeps_check_types_first():
    with pytest.raises(ValueError, match=r"^methods\['mine'\] = 'a OfTorch': must be a name or a Method"):
        compare({"mine": OfTorch()}, updates=1)
    for one in (OfTorch(), named("mine", lambda: None)):
        with pytest.raises(ValueError, match=r"^method = .*: must be a name or a Method"):
            compare([one], updates=1)
    with pytest.raises(ValueError, match=r"^delay = 'a WithDropout': must be a name or a delay model"):
        sweep(Settings(updates=1), {"delay": [WithDropout()]})


SMALL = {"updates": 2, "clients": 2, "model": "logistic"}
PARTS = {
    "a node's algorithm": ({"method": PeerMethod(OfTorch())}, "method.peer returned .*: must return a PeerAlgorithm"),
    "a metric": ({"metrics": {"top": Speechless()}}, r"metrics\['top'\] = 'a Speechless': must be f\(outputs, y\)"),
    "a rate": ({"lr": jax.random.key(0)}, "lr = .*key.*: must be a finite number > 0"),
    "a loss": ({"model": models.make("linear", input_shape=(4,))._replace(loss=3)}, "model.loss = '3': must be a func"),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_objects_are_named_too(part):
    change, message = PARTS[part]
    with pytest.raises(ValueError, match=f"^{message}"):
        simulate(**SMALL | change)


def test_progress_is_called_as_the_engine_calls_it():
    for wrong in (OfTorch(), lambda done, total: None, 3):
        with pytest.raises(ValueError, match=r"^progress = .*: must be a function such as results.bar"):
            simulate(**SMALL, progress=wrong)


def test_a_part_that_cannot_be_read_is_named_by_its_fingerprint():
    """For objects that reach it all the same, inside a function or a Method."""
    tensor = Tensor()
    with pytest.raises(ValueError, match=r"^fingerprint of .*'s tensor = .*Tensor .*: must be .*requires grad"):
        fingerprint(lambda x: tensor)
    delay = Settings(delay=lambda num_clients, seed: tensor, updates=2).delay
    assert str(delay) == "(object)"
    assert delay.fingerprint is None


def test_fingerprints_of_nnx_modules_read_their_keys():
    class Seeded(nnx.Module):
        def __init__(self, seed):
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    assert fingerprint(Seeded(0)) == fingerprint(Seeded(0)) != fingerprint(Seeded(1))
