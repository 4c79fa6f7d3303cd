"""An object of the wrong type in place of a name: refused by its type, before anything reads what is in it."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from flax import linen, nnx

from fedjax_async import Method, clock, compare, models, named, peers, server, simulate, sweep
from fedjax_async.base.fingerprints import fingerprint
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import Settings, objects

TEXTS = ("attack", "privacy", "energy", "normalise", "personal", "eval_at", "decay", "memory_limit")


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
    "a linen module": (linen.Dense(3), "a Dense"), "a generator": ((i for i in range(3)), "a generator"),
    "a generator of NumPy": (np.random.default_rng(0), "a Generator"),
    "an object without a text": (Speechless(), "a Speechless"), "a Python module": (np, "a module"),
    "a budget": (clock.Until(updates=3), "a Until"), "a tensor": (Tensor(), "a Tensor"),
    "a random key": (jax.random.key(0), "a PRNGKeyArray"),
}  # fmt: skip
FITTING = {("model", "an nnx module with dropout"), ("model", "a linen module"), ("initial", "a tensor")}
PAIRS = [pair for pair in itertools.product(objects.KINDS, OTHERS) if pair not in FITTING]


@pytest.mark.parametrize(("field", "kind"), PAIRS)
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
    "augment": "augment\\(key, x\\)", "model": "a Model, or a module of flax", "initial": "a pytree of arrays",
    "optimizer": "an optax transformation", "client": "a ClientAlgorithm", "compress": "a name or a Compressor",
    "metrics": "a dict of names and metrics",
}  # fmt: skip


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("kind", ["a Linear of PyTorch", "an object without a text", "a generator"])
def test_settings_that_take_no_object_say_so(field, kind):
    with pytest.raises(ValueError, match=f"^{field} = .*: must be "):
        Settings(**{field: OTHERS[kind][0]})


SMALL = {"updates": 2, "clients": 2, "model": "logistic"}
ADVICE = "of PyTorch's objects, a torch.nn.Module"
CALLS = [
    # a name around the object hides nothing
    (lambda: named("mine", server.fedasync()), r"^object = 'a ServerAlgorithm': .*; wrap the rule: Method\(rule"),
    (lambda: Settings(delay=named("mine", np.ones(3))), "^delay = 'a ndarray': must be "),
    (lambda: Settings(model=named("mine", Method(server.fedasync()))), "^model = 'a Method': must be "),
    (lambda: Settings(dataset=named("mine", abs)), "^dataset = 'a builtin_function_or_method': must be "),
    (lambda: Settings(attack=named("mine", lambda: None)),
     "^attack = 'a function': must be a text: this setting takes no object"),
    (lambda: named("net", OfTorch()), f"^object = 'a OfTorch': must be .* a Model, a module .*{ADVICE}"),
    (lambda: simulate(model=OfTorch(), updates=1), f"^model = 'a OfTorch': must be .*; .*{ADVICE}"),
    (lambda: simulate(model=linen.Dense, updates=1), r"model = 'the class Dense': .*; make one: Dense\(\.\.\.\)"),
    (lambda: simulate(model=WithDropout(), updates=1), "^model.apply: must be .*; it raised TypeError: dot_general"),
    *[(lambda field=field, made=made: Settings(**{field: made}, updates=1),
       rf"^{field} = 'a function': .*; give what the factory returns: {made.__name__}\(\.\.\.\)")
      for field, made in (("delay", clock.DELAYS["lognormal"]), ("timing", clock.TIMINGS["buffer"]),
                          ("compress", COMPRESSORS["topk"]), ("topology", peers.TOPOLOGIES["gossip"]))],
    # comparisons and sweeps
    (lambda: compare({"mine": OfTorch()}, updates=1), r"^methods\['mine'\] = 'a OfTorch': must be a name or a Method"),
    (lambda: compare([OfTorch()], updates=1), "^method = .*: must be a name or a Method"),
    (lambda: compare([named("mine", lambda: None)], updates=1), "^method = .*: must be a name or a Method"),
    (lambda: sweep(Settings(updates=1), {"delay": [WithDropout()]}),
     "^delay = 'a WithDropout': must be a name or a delay model"),
    # parts of objects
    (lambda: simulate(**SMALL, method=Method(OfTorch())), "^method.rule = 'a OfTorch': must be a ServerAlgorithm, a"),
    (lambda: simulate(**SMALL, metrics={"top": Speechless()}),
     r"^metrics\['top'\] = 'a Speechless': must be f\(outputs, y\)"),
    (lambda: simulate(**SMALL, lr=jax.random.key(0)), "^lr = .*key.*: must be a finite number > 0"),
    (lambda: simulate(**SMALL | {"model": models.make("linear", input_shape=(4,))._replace(loss=3)}),
     "^model.loss = '3': must be a func"),
    *[(lambda wrong=wrong: simulate(**SMALL, progress=wrong), "^progress = .*: must be True, False, None, or a")
      for wrong in (OfTorch(), lambda done, total: None, 3)],
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS, ids=range(len(CALLS)))
def test_a_wrong_object_is_named_with_what_to_give(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
