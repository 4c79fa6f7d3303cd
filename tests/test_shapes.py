"""Shapes and dtypes at the boundaries of the kernels, in the alphabet of ``types.py``, checked by beartype."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import Array, Bool, Float32, Int32, PyTree, UInt32, jaxtyped

from fedjax_async.local import batch, permute
from fedjax_async.models import MODELS, NEED_WEIGHTS, OF_TEXT

B, CLASSES = 4, 10
checked = jaxtyped(typechecker=beartype)


def test_minibatches():
    @checked
    def checked_batch(
        seed: UInt32[Array, "2"], k: Int32[Array, ""], size: Int32[Array, ""], length: int
    ) -> tuple[Int32[Array, "4"], Bool[Array, "4"]]:
        return batch(seed, k, size, length)

    @checked
    def checked_permute(
        seed: UInt32[Array, "2"], epoch: Int32[Array, ""], position: Int32[Array, "4"], size: Int32[Array, ""]
    ) -> Int32[Array, "4"]:
        return permute(seed, epoch, position, size)

    seed, three, ten = jnp.array([1, 2], jnp.uint32), jnp.int32(3), jnp.int32(10)
    position, _ = checked_batch(seed, three, ten, B)
    checked_permute(seed, three, position, ten)


@pytest.mark.slow_cases("mobilenetv2", "resnet18", "resnet18_1d")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NEED_WEIGHTS])
def test_models(name):
    """The model ``linear`` has targets that are not classes."""
    shape = inspect.signature(MODELS[name]).parameters["input_shape"].default
    model = MODELS[name]() if name == "linear" else MODELS[name](num_classes=CLASSES)
    outputs_of = Float32[Array, "B"] if name == "linear" else Float32[Array, "B ... classes"]
    of_labels = shape if name in OF_TEXT else ()

    @checked
    def forward(params: PyTree[Float32[Array, "..."]], x: Float32[Array, "B ..."]) -> outputs_of:
        return model.apply(params, x, jax.random.key(1))

    @checked
    def losses(outputs: outputs_of, y: Int32[Array, "B ..."]) -> Float32[Array, "4"]:
        return model.loss(outputs, y)

    params = jax.eval_shape(model.init, jax.random.key(0))
    outputs = jax.eval_shape(forward, params, jax.ShapeDtypeStruct((B, *shape), jnp.float32))
    assert outputs.shape == ((B,) if name == "linear" else (B, *of_labels, CLASSES))
    jax.eval_shape(losses, outputs, jax.ShapeDtypeStruct((B, *of_labels), jnp.int32))
