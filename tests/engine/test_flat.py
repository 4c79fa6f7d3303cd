"""States as vectors, as an accelerator keeps them (``engine/flat.py``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import tree
from fedjax_async.engine.flat import Flat, flat, flattened, opened
from fedjax_async.engine.programs import shapes_of
from fedjax_async.engine.stack_facts import stack_facts
from fedjax_async.engine.stacking import layout_of, make_member, placed, shape_of
from fedjax_async.models import STATISTICS
from fedjax_async.server.running_statistics import weights_and_statistics
from tests.engine.problem import case, on_an_accelerator

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.uint32])
LEAVES = st.builds(lambda shape, dtype, one: jnp.full(shape, one, dtype), SHAPES, DTYPES, st.integers(0, 9))
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("ab"), inner)
)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


@settings(max_examples=30)  # each shape compiles
@given(TREES)
def test_a_pytree_has_one_vector_for_each_dtype_and_is_the_same_when_it_is_opened(value):
    made = flat(value)
    same(opened((made, jnp.int32(1))), (value, jnp.int32(1)))
    vectors = jax.tree.leaves(made)
    assert len(vectors) == len({leaf.dtype for leaf in jax.tree.leaves(value)})
    assert all(vector.ndim == 1 for vector in vectors)


def test_rows_of_a_table_of_flat_states_are_opened_as_rows():
    rows = [{"w": jnp.full((2, 3), float(k)), "b": jnp.full(2, -float(k)), "n": jnp.int32(k)} for k in range(4)]
    table = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(flat, rows))
    same(opened(table), jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    same(opened(tree.gather(table, 2)), rows[2])


def test_a_typed_key_is_kept():
    state = {"key": jax.random.key(3), "w": jnp.ones(2)}
    found = opened(flat(state))
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(state["key"]))


def test_running_statistics_are_still_told_from_weights():
    upload = {"dense": jnp.array([3.0, 4.0]), STATISTICS: {"mean": jnp.array([100.0])}}
    weights, statistics = weights_and_statistics(flat(upload))
    assert tree.norm(weights) == 5.0
    assert jax.tree.leaves(statistics) == [100.0]


def test_a_state_without_leaves_stays_as_it_is():
    assert flat(()) == () and not isinstance(flat({}), Flat)


def test_on_a_cpu_components_stay_as_they_are():
    components = case("fedbuff").components
    assert flattened(components) is components


def test_off_the_cpu_states_messages_and_uploads_are_vectors():
    with on_an_accelerator():
        member = make_member(*case("scaffold", "every", steps=2, updates=5))
        member = member._replace(components=flattened(member.components))
        layout = layout_of([member], max_width=4, batching="vmap")
        shape = shape_of(layout)
        carry, buffers, _ = shapes_of(placed([member], layout, shape, stack_facts([member], layout, shape)))
    for held in (carry.server, carry.clients, carry.slots.params, carry.slots.extra, buffers.left, buffers.after):
        leaves = jax.tree.leaves(held)
        assert isinstance(held, Flat) and len(leaves) == len({leaf.dtype for leaf in leaves})
