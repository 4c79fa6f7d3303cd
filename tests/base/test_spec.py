"""Specs: equal and hashed by value, pytrees of their traced numbers, changed by ``put``."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async import Spec, server, types
from fedjax_async.base.spec import leaf_names
from fedjax_async.server import PARTS, SERVERS
from tests.refusals import refusals


def rule(*, gain: types.Traced = 0.5, power: types.Traced = 0.0, depth: int = 2, name: str = "a", on: bool = False):
    return gain, power, depth, name, on


def outer(first, *, inner, scale: types.Traced = 2.0):
    return first, inner, scale


def test_it_makes_what_the_factory_makes():
    assert Spec(rule, gain=0.1, name="b").make() == rule(gain=0.1, name="b")
    nested = Spec(outer, Spec(rule), inner=Spec(rule, depth=3).later("gain"))
    first, inner, scale = nested.make()
    assert (first, scale, inner(gain=9)) == (rule(), 2.0, rule(gain=9, depth=3))


@pytest.mark.parametrize(("one", "other", "equal"), [
    (Spec(rule), Spec(rule, gain=0.5), True),  # defaults are values
    (Spec(rule, gain=1), Spec(rule, gain=1.0), True),  # of a traced number, 1 is 1.0
    (Spec(rule, depth=1), Spec(rule, depth=True), False),
    (Spec(rule, depth=1), Spec(rule, depth=1.0), False),
    (Spec(rule, gain=math.nan), Spec(rule, gain=math.nan), True),
    (Spec(rule, power=0), Spec(rule, power=0.1), False),  # zero may switch a term off
    (Spec(rule, gain=0.1, name="b"), Spec(rule, name="b", gain=0.1), True),
    (Spec(rule), Spec(functools.partial(rule)), False),
    (Spec(rule), Spec(rule).later(), False),
    (Spec(outer, 1, inner=Spec(rule)), Spec(outer, 1, inner=Spec(rule, gain=0.5)), True),
])  # fmt: skip
def test_two_are_equal_if_they_make_the_same(one, other, equal):
    assert (one == other) == equal
    assert not equal or hash(one) == hash(other)
    assert (jax.tree.structure(one) == jax.tree.structure(other)) >= equal


def test_arrays_and_tracers_equal_themselves_and_have_no_hash():
    gain = jnp.float32(0.5)
    assert Spec(rule, gain=gain) == Spec(rule, gain=gain)
    assert Spec(rule, gain=gain) != Spec(rule, gain=jnp.float32(0.5))
    with pytest.raises(TypeError, match="unhashable: rule has arrays among its numbers"):
        hash(Spec(rule, gain=gain))
    compared = []
    jax.jit(lambda gain: compared.append(Spec(rule, gain=gain) == Spec(rule, gain=gain)) or gain)(gain)
    assert compared == [True]


def test_the_leaves_are_the_traced_numbers_and_have_names():
    spec = Spec(outer, Spec(rule, gain=0.25).but(scope="server"), inner=Spec(rule, power=3).but(scope="client"))
    assert jax.tree.leaves(spec) == [0.25, 0.5, 3.0, 2.0]
    assert list(leaf_names(spec)) == ["server.gain", "client.gain", "client.power", "scale"]
    nested = Spec(outer, 1, inner=Spec(outer, 2, inner=Spec(rule)))
    assert list(leaf_names(nested)) == ["inner.inner.gain", "inner.scale", "scale"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(spec)]
    assert paths == [".0.gain", ".inner.gain", ".inner.power", ".scale"]


@given(gain=st.floats(allow_nan=False), depth=st.integers(-3, 3), name=st.text(min_size=1))
def test_flattening_and_unflattening_gives_the_same_spec(gain, depth, name):
    spec = Spec(outer, depth, inner=Spec(rule, gain=gain, depth=depth, name=name))
    leaves, structure = jax.tree.flatten(spec)
    again = jax.tree.unflatten(structure, leaves)
    assert again == spec
    assert jax.tree.structure(again) == structure
    assert again.make() == (depth, (gain, 0.0, depth, name, False), 2.0)


def test_zeros_that_a_transformation_puts_in_stay_leaves():
    spec = jax.tree.map(lambda leaf: 0.0 * leaf, Spec(rule))
    assert jax.tree.structure(spec) == jax.tree.structure(Spec(rule))


def test_specs_of_one_structure_are_stacked_traced_once_and_differentiated():
    traces = []

    def changed(spec):
        traces.append(spec)
        gain, power, *_ = spec.make()
        return gain**3 + power

    specs = [Spec(rule, gain=gain, power=0.5) for gain in (0.2, 0.4, 0.8)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *specs)
    np.testing.assert_allclose(jax.jit(jax.vmap(changed))(stacked), [0.508, 0.564, 1.012], rtol=1e-6)
    assert len(traces) == 1
    gradient = jax.grad(changed)(specs[0])
    assert isinstance(gradient, Spec)
    np.testing.assert_allclose([gradient.options["gain"], gradient.options["power"]], [0.12, 1.0], rtol=1e-6)


@pytest.mark.parametrize("factory", [*SERVERS.values(), *PARTS.values()], ids=[*SERVERS, *PARTS])
def test_every_rule_and_part_is_a_value(factory):
    spec = Spec(factory)
    assert spec == Spec(factory) and hash(spec) == hash(Spec(factory))
    leaves, structure = jax.tree.flatten(spec)
    assert type(jax.tree.unflatten(structure, leaves).make()) is type(spec.make())


test_a_wrong_option_is_refused_with_the_nearest = refusals(
    (lambda: Spec(rule, gian=0.1), r"rule has no option 'gian'; did you mean 'gain'\? \(options: gain, power, .*\)"),
    (lambda: Spec(rule).put("gian", 0.1), "rule has no option 'gian'; did you mean 'gain'"),
    (lambda: Spec(rule).put("gain.x", 0.1), "option = 'gain.x': must be gain: it is no spec"),
)


def test_put_gives_another_spec_and_the_first_stays():
    spec = Spec(outer, 1, inner=Spec(rule).but(scope="client"), scale=3.0)
    changed = spec.put("inner.gain", 0.75)
    assert list(leaf_names(changed)) == list(leaf_names(spec))
    assert (spec.options["inner"].options["gain"], changed.options["inner"].options["gain"]) == (0.5, 0.75)
    with pytest.raises(AttributeError, match="a Spec does not change"):
        spec.late = True


def test_it_prints_as_the_command_line_writes_it():
    assert str(Spec(server.fedasync, mixing=0.4)) == "fedasync:mixing=0.4"
    assert str(Spec(server.fedasync)) == "fedasync"
    assert str(Spec(rule, name="a,b", on=True)) == 'rule:name="a,b",on=true'
