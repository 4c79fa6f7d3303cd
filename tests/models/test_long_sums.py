"""Weight gradients summed in parts, as on an accelerator (``models/long_sums.py``)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.models.long_sums import POSITIONS, RESULTS, parts_of, product, summed_over_positions
from fedjax_async.models.lowerings import LOWERINGS


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def dots(function, *given):
    """Shapes of the results of all matrix products of a function."""
    eqns = jax.make_jaxpr(function)(*given).jaxpr.eqns
    return [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("positions", "results", "parts"),
    [(8 * POSITIONS, 25 * 6, 8), (POSITIONS - 1, 6, 1), (3 * POSITIONS + 1, 6, 1), (8 * POSITIONS, RESULTS + 1, 1)],
)
def test_a_long_sum_with_few_results_has_equal_parts(positions, results, parts):
    assert parts_of(positions, results) == parts


def test_on_a_cpu_a_sum_is_taken_whole():
    assert parts_of(100 * POSITIONS, 6) == 1


@pytest.mark.float64
@pytest.mark.usefixtures("on_a_gpu")
def test_in_parts_a_product_and_both_gradients_are_the_same():
    rng = np.random.default_rng(0)
    rows, kernel = jnp.asarray(rng.normal(size=(4 * POSITIONS, 5))), jnp.asarray(rng.normal(size=(5, 3)))

    def loss(product):
        return jax.value_and_grad(lambda rows, kernel: jnp.sum(jnp.sin(product(rows, kernel))), argnums=(0, 1))

    parts, whole = loss(product)(rows, kernel), loss(jnp.matmul)(rows, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), parts, whole)
    assert any(shape[0] == 4 for shape in dots(loss(product), rows, kernel))
    np.testing.assert_allclose(summed_over_positions(rows.T, rows.T), rows.T @ rows, rtol=1e-10, atol=1e-9)


@pytest.mark.float64
@pytest.mark.parametrize("lowering", ["im2col", "tiled"])
def test_a_convolution_s_weight_gradient_is_summed_in_parts(monkeypatch, lowering):
    rng = np.random.default_rng(0)
    x, kernel = jnp.asarray(rng.normal(size=(16, 36, 36, 1))), jnp.asarray(rng.normal(size=(5, 5, 1, 2)))

    def loss(kernel):
        return jnp.sum(jnp.sin(LOWERINGS[lowering](x, kernel, (1, 1), ((0, 0), (0, 0)))))

    whole = jax.grad(loss)(kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("fedjax_async.models.long_sums.POSITIONS", 256)
    np.testing.assert_allclose(jax.grad(loss)(kernel), whole, rtol=1e-9, atol=1e-9)
    assert any(len(shape) == 3 for shape in dots(jax.grad(loss), kernel))
