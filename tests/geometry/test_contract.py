"""The contract of every function on trees: dtypes and shapes, jit and vmap, finite gradients at zero, O(D) memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedjax_async import geometry
from fedjax_async.geometry import CORRECTIONS, MANIFOLDS
from tests.geometry.made_up import trees

OF_ORTHOCORRECT = {"orthograd", "orthopos", "orthostrict"}  # it with other numbers


def corrected(name):
    correction = CORRECTIONS[name]()
    return lambda x, y, z: correction.correct(x, y, correction.init(x))[0]


# functions of three trees, whose result is a tree like the first, or a scalar
FUNCTIONS = {
    "bezier": lambda x, y, z: geometry.bezier((x, y, z), 0.3),
    "bezier_derivative": lambda x, y, z: geometry.bezier_derivative((x, y, z), 0.3),
    "bezier_length": lambda x, y, z: geometry.bezier_length((x, y, z)),
    "polygon": lambda x, y, z: geometry.polygon((x, y, z), 0.3),
    "control_point": lambda x, y, z: geometry.control_point(x, y, z, gamma=0.7),
    "rotate": geometry.rotate,
    "rotate_offset": lambda x, y, z: geometry.rotate_offset(x, (y, z), (z, x)),
    "project_out": lambda x, y, z: geometry.project_out(x, y),
    "lorentz_distance": lambda x, y, z: geometry.lorentz_distance(x, y),
    "lorentz_penalty": lambda x, y, z: geometry.lorentz_penalty(x, y),
    "centroid": lambda x, y, z: geometry.centroid(geometry.simplex((x, y, z))),
    **{f"correct {name}": corrected(name) for name in CORRECTIONS if name not in OF_ORTHOCORRECT},
    **{
        f"geodesic {name}": lambda x, y, z, make=make: geometry.geodesic(make(), x, y, 0.3)
        for name, make in MANIFOLDS.items()
    },
}


def total(result):
    return sum(jnp.sum(leaf.astype(jnp.result_type(float))) for leaf in jax.tree.leaves(result))


@functools.cache
def with_gradients(name):
    """``(x, y, z) -> (result, gradients of its total)``, compiled."""

    def both(*each):
        result = FUNCTIONS[name](*each)
        return total(result), result

    @jax.jit
    def compiled(*each):
        (_, result), slopes = jax.value_and_grad(both, (0, 1, 2), has_aux=True)(*each)
        return result, slopes

    return compiled


def sizes(jaxpr):
    """The sizes of all values that a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_are_as_one_by_one_dtypes_are_kept_and_gradients_finite(name):
    function = FUNCTIONS[name]
    x, y, z = trees(0, 3)
    alone, _ = with_gradients(name)(x, y, z)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, 2.0 * leaf]), (x, y, z))
    together = jax.jit(jax.vmap(function))(*twice)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6), together, alone)
    x_mixed, *mixed = ({**each, "dense": jax.tree.map(jnp.bfloat16, each["dense"])} for each in (x, y, z))
    result = jax.eval_shape(function, x_mixed, *mixed)
    if jax.tree.structure(result) == jax.tree.structure(x):
        types = jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), result)
        assert types == jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), x_mixed)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (x, y, z))
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(jax.eval_shape(function, *wide)))
        jax.eval_shape(function, x, y, z)
    # zero and equal points included
    nothing = jax.tree.map(jnp.zeros_like, x)
    for case in [(x, y, z), (x, x, x), (nothing, nothing, nothing), (x, nothing, z), (nothing, y, z), (x, y, nothing)]:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(with_gradients(name)(*case)[1]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_value_is_larger_than_the_params_and_a_tree_without_leaves_is_fine(name):
    wide = {"layer": {"kernel": jnp.ones((50, 40)), "bias": jnp.ones(40)}}
    program = jax.make_jaxpr(jax.grad(lambda *each: total(FUNCTIONS[name](*each))))(wide, wide, wide)
    assert max(sizes(program.jaxpr)) <= 3 * 50 * 40  # a simplex of three holds three
    assert name == "centroid" or jax.tree.leaves(jax.jit(FUNCTIONS[name])({}, {}, {})) in ([], [0.0], [1.0])


@pytest.mark.float64
@pytest.mark.parametrize(
    "name", ["bezier", "bezier_length", "control_point", "rotate", "project_out", "lorentz_penalty"]
)
def test_gradients_are_those_of_finite_differences(name):
    points, ways = trees(1, 3, 0.3), trees(2, 3)
    value = jax.jit(lambda points: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(FUNCTIONS[name](*points))))
    _, slope = jax.jvp(value, (points,), (ways,))
    ahead, behind = (jax.tree.map(lambda p, w, h=h: p + h * w, points, ways) for h in (1e-6, -1e-6))
    np.testing.assert_allclose(slope, (value(ahead) - value(behind)) / 2e-6, rtol=1e-5)
