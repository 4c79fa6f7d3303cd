"""The scores of a trajectory's models, and their derivatives inside a scan."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.engine.components import Components
from fedjax_async.engine.evaluation import Metrics, validation_part
from fedjax_async.types import Array, Params


def where_evaluated(score: Callable[[Params], dict[str, Array]]) -> Callable[[Array, Params], dict[str, Array]]:
    """``scored(evaluated, params)``: ``score(params)`` if ``evaluated``, else zeros. Only losses have derivatives.

    Reverse mode keeps the gradients, not the examples: JAX's own reverse of a conditional inside a scan would keep the
    test set once per arrival.
    """

    @jax.custom_jvp
    def scored(evaluated: Array, params: Params) -> dict[str, Array]:
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(score, params))
        return jax.lax.cond(evaluated, score, lambda _: nothing, params)

    @scored.defjvp
    def _(primals: tuple[Array, Params], tangents: tuple[Array, Params]) -> tuple[dict[str, Array], dict[str, Array]]:
        evaluated, params = primals

        def slopes(params: Params) -> dict[str, Params]:
            names = [name for name in jax.eval_shape(score, params) if name.endswith("loss")]
            return {name: jax.grad(lambda p, name=name: score(p)[name])(params) for name in names}

        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(slopes, params))
        slope = jax.lax.cond(evaluated, slopes, lambda _: nothing, params)
        found = scored(evaluated, params)
        zero = jax.tree.map(jnp.zeros_like, found)
        return found, zero | {name: optax.tree.vdot(each, tangents[1]) for name, each in slope.items()}

    return scored


def make_score(components: Components) -> Callable[[Params], dict[str, Array]]:
    """Loss and accuracy on the test set and, where there is one, on the validation part."""
    data, model = components.data, components.model
    sets = {"": (jnp.asarray(data.test_x), jnp.asarray(data.test_y))}
    part = validation_part(data)
    if part is not None:
        rows = np.asarray(part.order)
        sets["validation_"] = (jnp.asarray(data.x[rows]), jnp.asarray(data.y[rows]))
    metrics = Metrics(model, bool(np.issubdtype(data.test_y.dtype, np.integer)))

    def score(params: Params) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for prefix, (x, y) in sets.items():
            found |= {prefix + name: value for name, value in metrics.whole(params, x, y, len(y)).items()}
        return found

    return score
