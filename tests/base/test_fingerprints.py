"""Fingerprints: equal for equal source in every process, different for every change of behaviour."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import Method, models, server
from fedjax_async.base.code import package_of
from fedjax_async.base.factories import options_of
from fedjax_async.base.fingerprints import LENGTH, _sequence, fingerprint
from fedjax_async.clock import DELAYS, TIMINGS
from fedjax_async.compress import COMPRESSORS
from fedjax_async.data import PARTITIONERS

ROOT = Path(__file__).resolve().parent.parent.parent


class Pair(NamedTuple):
    left: Any
    right: Any = 2


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: Any
    note: Any = dataclasses.field(default=None, compare=False)

    def __call__(self, x):
        return self.factor * x


class Extended(Scaled):
    def __init__(self, factor, more):
        super().__init__(factor)
        object.__setattr__(self, "more", more)


class Wrapper:
    def __init__(self, function, factor):
        functools.update_wrapper(self, function)
        self.factor = factor

    def __call__(self, x):
        return self.factor * self.__wrapped__(x)


class Hidden:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value


class Defaults(dict):
    def __init__(self, default):
        self.default = default

    def __missing__(self, key):
        return self.default


def closed_over(value):
    return lambda x: x * value


def with_attribute(value):
    def f(x):
        return f.factor * x

    f.factor = value
    return f


def straight_through(slope):
    """A custom gradient: the value hides it."""
    through = jax.custom_vjp(jnp.round)
    through.defvjp(lambda x: (jnp.round(x), None), lambda _, cotangent: (slope * cotangent,))
    return through


def rule(factor=1, constant=1):
    class Rule(NamedTuple):
        left: int = 1
        by = constant

        def __call__(self, x):
            return factor * x

    return Rule()


# Everything that can hold a value, also where it does not show.
HOLDERS = {
    "closure": closed_over,
    "default": lambda value: lambda x, by=value: x * by,
    "keyword default": lambda value: lambda x, *, by=value: x * by,
    "nested closure": lambda value: lambda: closed_over(closed_over(value)),
    "attribute of a function": with_attribute,
    "partial": lambda value: functools.partial(pow, value),
    "wrapper": lambda value: Wrapper(max, value),
    "jitted": lambda value: jax.jit(closed_over(value)),
    "vmapped": lambda value: jax.vmap(closed_over(value)),
    "gradient": lambda value: jax.grad(closed_over(value)),
    "custom gradient": straight_through,
    "cached": lambda value: functools.lru_cache(closed_over(value)),
    "bound method": lambda value: Scaled(value).__call__,
    "NamedTuple": Pair,
    "method of a NamedTuple": lambda value: rule(factor=value),
    "constant of a NamedTuple": lambda value: rule(constant=value),
    "dataclass": Scaled,
    "field that does not compare": lambda value: Scaled(1, value),
    "more than the fields of a dataclass": lambda value: Extended(1, value),
    "private slot": Hidden,
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "key": lambda value: {value: "a"},
    "attribute of a dict": Defaults,
    "default of a dict": lambda value: collections.defaultdict(closed_over(value)),
    "set": lambda value: {value, "other"},
}
SCALARS = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=5), st.binary(max_size=5), st.none(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip


ALIKE = st.sampled_from([1, 1.0, True, 0, 0.0, -0.0, False])  # equal in Python, and may make different programs


@given(st.tuples(SCALARS, SCALARS) | st.tuples(ALIKE, ALIKE) | SCALARS.map(lambda value: (value, value)))
@settings(max_examples=50)
def test_equal_exactly_if_the_values_are(values):
    one, other = values
    same = type(one) is type(other) and repr(one) == repr(other)
    for name, make in HOLDERS.items():
        assert (fingerprint(make(one)) == fingerprint(make(other))) == same, name


DTYPES = st.sampled_from(["float32", "float64", "int32", "uint8", "bool"])


@given(DTYPES, st.lists(st.integers(0, 4), max_size=3), st.data())
def test_every_entry_of_an_array_counts(dtype, shape, data):
    array = np.zeros(shape, dtype)
    assert fingerprint(array) == fingerprint(array.copy()) == fingerprint(np.array(array, order="F"))
    assert fingerprint(array) != fingerprint(array.reshape(*shape, 1)) != fingerprint(array.astype("int16"))
    if array.size:
        changed = array.copy()
        changed.flat[data.draw(st.integers(0, array.size - 1))] = 1
        assert fingerprint(closed_over(array)) != fingerprint(closed_over(changed))


@pytest.mark.parametrize("make", [
    lambda k: (lambda x: x + 1, lambda x: x - 1)[k],
    lambda k: (lambda x: 2 * x, lambda x: 3 * x)[k],
    lambda k: (lambda x: jnp.sin(x) + 1, lambda x: jnp.cos(x) + 1)[k],
    lambda k: (lambda x: [2 * y for y in x], lambda x: [3 * y for y in x])[k],
    lambda k: (lambda x: x in {1, 2}, lambda x: x in {1, 3})[k],
    lambda k: (lambda *, a: a, lambda *, b: b)[k],
    lambda k: closed_over((lambda x: x + 1, lambda x: x + 2)[k]),
    lambda k: nn.Dense(k + 1),
    lambda k: nnx.Linear(4, 3, rngs=nnx.Rngs(k)),
    lambda k: optax.sgd(0.1 + k),
    lambda k: server.fedasync(mixing=0.5 + k / 9),
    lambda k: Method(server.asgd(), ("every", "buffer:size=2")[k]),
    lambda k: jnp.arange(k, k + 3),
    jax.random.key,
    np.random.default_rng,
    lambda k: collections.deque([0], maxlen=k),
    lambda k: np.ma.masked_equal([0.0, 1.0], k),
])  # fmt: skip
def test_other_code_options_or_arrays_are_another_fingerprint(make):
    assert fingerprint(make(0)) == fingerprint(make(0)) != fingerprint(make(1))
    assert len(fingerprint(make(0))) == LENGTH


def test_what_fills_with_use_does_not_count():
    @functools.singledispatch
    def kind(x):
        return 0

    by_entry = np.vectorize(lambda x: 2 * x, otypes=[float])
    before = fingerprint((kind, by_entry))
    assert (kind(1), by_entry([1])[0]) == (0, 2)
    assert fingerprint((kind, by_entry)) == before
    with pytest.raises(ValueError, match=r"it hides its function: give np\.vectorize"):
        fingerprint(np.frompyfunc(lambda x: 2 * x, 1, 1))


def test_docstrings_names_and_lines_do_not_count():
    def one(x):
        """The one."""
        return x + 1

    def other(x):

        return x + 1

    assert fingerprint(one) == fingerprint(other) == fingerprint(lambda x: x + 1)


def test_cycles_end():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(even) != fingerprint(odd) and fingerprint(loop) == fingerprint(loop)


MODELS = {
    name: functools.partial(models.make, name, input_shape=(8, 8, 3), num_classes=classes)
    for name, classes in {"linear": None, "logistic": 4, "mlp": 4, "resnet18": 4}.items()
}


@pytest.mark.parametrize("registry", [DELAYS, TIMINGS, COMPRESSORS, server.SERVERS, PARTITIONERS, MODELS])
def test_all_that_the_package_makes_has_one(registry):
    made = {}
    for name, factory in registry.items():
        if all(option.default is not option.empty for option in options_of(factory).values()):
            made[name] = fingerprint(factory())
            assert fingerprint(factory()) == made[name]
    assert len(set(made.values())) == len(made) > 3


@pytest.mark.parametrize("make", [Path(__file__).open, threading.Lock, lambda: (x for x in "ab"), lambda: iter([1])])
def test_what_has_a_hidden_state_is_named(make):
    thing = make()
    with pytest.raises(ValueError, match=r"fingerprint of kept -> closed_over.*'s value = .*: must be of functions"):
        fingerprint({"kept": closed_over(thing)})
    getattr(thing, "close", lambda: None)()


def test_traced_values_have_none():
    with pytest.raises(ValueError, match="must be taken of values, not inside a traced function"):
        jax.jit(fingerprint)(1.0)


def test_lines_of_a_package_do_not_count_and_functions_of_one_name_are_told_apart():
    def made(code, line, name="outer.<locals>.inner"):
        return types.FunctionType(code.replace(co_qualname=name, co_firstlineno=line), {"__name__": "optax.made"})

    more, less = (lambda x: x + 1).__code__, (lambda x: x - 1).__code__
    assert fingerprint(made(more, 1)) == fingerprint(made(more, 9)) != fingerprint(made(less, 1))
    assert fingerprint(made(more, 1, "<lambda>")) != fingerprint(made(less, 1, "<lambda>"))


def test_packages_are_told_from_own_code():
    assert package_of("jax.numpy") == f"jax {jax.__version__}"
    assert str(package_of("fedjax_async.server")).startswith("fedjax_async ")
    assert package_of("json.decoder") == "json"
    assert package_of("__main__") is None and package_of(__name__) is None


def test_fields_that_methods_got_later_do_not_count_while_they_are_not_given():
    older = collections.namedtuple("Method", [name for name in Method._fields if name not in {"joint", "policy"}])
    method = Method(max, "every")
    before = older(*(getattr(method, name) for name in older._fields))
    parts = [list(_sequence(each))[2:] for each in (before, method)]  # without the class
    assert parts[0] == parts[1]
    assert fingerprint(method) != fingerprint(method._replace(policy="uniform"))


# What a user's own package may use, and where it may be held.
RULES = """
import optax, jax.numpy as jnp
from flax import linen as nn
from fedjax_async import server
from own_package import held
from own_package.held import doubled

SCALE, CLASSES = 2, 3
NAMES = {"a", "b", "c", "d"}

class Net(nn.Module):
    width: int = 4
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(x)

def weight(tau, limit):
    return jnp.minimum(limit, SCALE * held.shifted(tau)) if "a" in NAMES else doubled(tau)

def fair(*, limit=4.0):
    def scale(tau):
        from own_package.held import later
        return weight(later(tau), limit)
    return server.rule(server.scale_by_staleness(scale), optimizer=optax.sgd(0.1))

def closed_over():
    module = held
    return lambda x: module.a * x

def by_default(x, module=held):
    return module.a * x

def imported():
    from own_package import held as here
    return (lambda: here.a)()

def relative():
    from .held import a
    return a

def sibling():
    from . import late
    return late.a

class Keeping:
    def __init__(self):
        self.module = held

net, rule, closure, keeping = Net(), fair(), closed_over(), Keeping()
"""
HELD = """
a = 1
def shifted(x): return x + 1
def doubled(x): return 2 * x
def later(x): return x - 1
def unused(x): return 0
"""
FILES = {"__init__": "", "held": HELD, "late": "a = 1", "rules": RULES}
USES = ("fair", "rule", "net", "closure", "by_default", "imported", "relative", "sibling", "keeping")
CHANGES = {  # what is replaced -> what uses it; an object that holds a module uses all of it
    "rules.SCALE": {"fair", "rule"},
    "rules.CLASSES": {"net"},
    "rules.doubled": {"fair", "rule"},
    "held.shifted": {"fair", "rule", "keeping"},
    "held.later": {"fair", "rule", "keeping"},
    "held.doubled.__code__": {"fair", "rule", "keeping"},
    "held.unused": {"keeping"},
    "held.a": {"closure", "by_default", "imported", "relative", "keeping"},
    "late.a": {"sibling"},
}
PROGRAM = """
import sys
from fedjax_async.base.fingerprints import fingerprint
from own_package import rules

print(*(fingerprint(getattr(rules, use)) for use in sys.argv[1:]))
"""


def test_equal_in_another_process_and_changed_by_everything_that_is_used(tmp_path, monkeypatch):
    """Wherever the module is held that has it."""
    (tmp_path / "one" / "own_package").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / "one" / "own_package" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    rules = importlib.import_module("own_package.rules")
    usual = {use: fingerprint(getattr(rules, use)) for use in USES}
    for path, uses in CHANGES.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"own_package.{path}", (lambda x: 9).__code__ if path.endswith("__code__") else 9)
            assert {use for use in USES if fingerprint(getattr(rules, use)) != usual[use]} == uses, path
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "elsewhere")])
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": path}  # sets have another order there
    command = [sys.executable, "-B", "-c", PROGRAM, *USES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(usual.values())
