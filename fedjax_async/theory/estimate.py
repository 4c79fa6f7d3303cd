"""The constants of the bounds, measured on a model and federated data at given parameters.

All are local: the theorems' L, sigma^2 and sigma_g^2 are suprema over all x, the functions here measure them at one x.
Use the largest over several points of a run. A network is measured as in evaluation: no dropout, fixed running
statistics. The functions take ``options``: the ``clients`` to measure, by default all; they vmap over ``width`` clients
[8] and read ``chunk`` rows of a client [256; 32 for gradients of single examples] at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import check, tree
from fedjax_async.types import Array, FederatedData, Key, Model, Params, Tree


class EstimateOptions(TypedDict, total=False):
    """What the functions measure, and how much at a time."""

    clients: Sequence[int] | None
    width: int
    chunk: int


_SMALL: EstimateOptions = {"chunk": 32}


class Estimates(NamedTuple):
    """Constants at one point, for C clients; as in ``rates.Constants``, but with L and sigma^2 for each client."""

    loss: float  # f = mean of the clients' losses, each client counted once
    squared_gradient: float  # ||grad f||^2, of the mean loss
    smoothness: np.ndarray  # [C], largest |eigenvalue| of each client's Hessian; L is their maximum
    variance: np.ndarray  # [C], mean squared error of a minibatch gradient; sigma^2 is their maximum
    heterogeneity: float  # sigma_g^2


def estimate(
    key: Key,
    model: Model,
    params: Params,
    data: FederatedData,
    *,
    batch_size: int,
    iterations: int = 50,
    **options: Unpack[EstimateOptions],
) -> Estimates:
    """All constants at ``params``. The functions below compute one constant each and explain the arguments.

    ``model`` takes decoded inputs. Means are over the ``clients`` that are measured. Memory: C * D floats for the
    gradients, ``width * chunk * D`` for those of single examples.
    """
    check.whole("batch_size", batch_size)
    check.whole("iterations", iterations)
    options = _SMALL | options
    losses, gradients = client_gradients(model, params, data, **options)
    together = jax.tree.map(lambda leaf: leaf.mean(axis=0), gradients)
    return Estimates(
        loss=float(losses.mean()),
        squared_gradient=float(tree.norm(together)) ** 2,
        smoothness=np.asarray(smoothness(key, model, params, data, iterations=iterations, **options)),
        variance=np.asarray(gradient_variance(model, params, data, batch_size=batch_size, **options)),
        heterogeneity=float(heterogeneity(gradients)),
    )


def client_gradients(
    model: Model,
    params: Params,
    data: FederatedData,
    **options: Unpack[EstimateOptions],
) -> tuple[Array, Params]:
    """Loss and gradient of each client's whole shard, ``f_i`` and ``grad f_i``: float[C] and leaves [C, ...].

    The gradient is with respect to the weights only: ``params["params"]`` of a model with running statistics.
    """

    def of_client(rows: _Rows) -> tuple[Array, Params]:
        def part(x: Array, y: Array, mask: Array) -> tuple[Array, Params]:
            return jax.value_and_grad(rows.loss)(rows.weights, x, y, mask)

        return rows.mean(part)

    return _over_clients(of_client, model, params, data, **options)


def heterogeneity(gradients: Params) -> Array:
    """sigma_g^2 = ``(1/C) sum_i ||grad f_i - grad f||^2`` of gradients with leaves [C, ...]; float[]."""

    def spread(leaf: Array) -> Array:
        return jnp.square(leaf - leaf.mean(axis=0, keepdims=True)).sum() / leaf.shape[0]

    return jnp.asarray(sum(spread(leaf) for leaf in jax.tree.leaves(gradients)))


def smoothness(
    key: Key,
    model: Model,
    params: Params,
    data: FederatedData,
    *,
    iterations: int = 50,
    **options: Unpack[EstimateOptions],
) -> Array:
    """Spectral norm of each client's Hessian by power iteration on Hessian-vector products; float[C].

    ``v <- H v / ||H v||``, ``iterations`` times from a random v (the same for all clients). The last ``||H v||`` never
    exceeds the largest |eigenvalue|. In the limit each iteration multiplies its error by the square of the ratio of the
    second largest to the largest |eigenvalue|.
    """
    check.whole("iterations", iterations)

    def of_client(rows: _Rows) -> Array:
        def product(v: Params) -> Params:
            def part(x: Array, y: Array, mask: Array) -> Params:
                return jax.jvp(lambda w: jax.grad(rows.loss)(w, x, y, mask), (rows.weights,), (v,))[1]

            return rows.mean(part)

        def step(_: Array, state: tuple[Params, Array]) -> tuple[Params, Array]:
            v, before = state
            unit = _unit(v, before)
            image = product(unit)
            return image, tree.norm(image)

        v = optax.tree.random_like(key, rows.weights, jax.random.normal)
        return jax.lax.fori_loop(0, iterations, step, (v, tree.norm(v)))[1]

    return _over_clients(of_client, model, params, data, **options)


def smoothness_between(
    model: Model,
    params: Params,
    other: Params,
    data: FederatedData,
    **options: Unpack[EstimateOptions],
) -> Array:
    """``||grad f_i(x) - grad f_i(y)|| / ||x - y||``, a lower bound on each client's L; float[C].

    It is cheaper than :func:`smoothness`, and between two distant points of a run often closer to the L that training
    meets. Raises ``ValueError`` if both params are equal.
    """
    distance = tree.norm(jax.tree.map(jnp.subtract, _weights(model, params), _weights(model, other)))
    check.require(float(distance) > 0, "other", "params", "different from params")
    (_, here), (_, there) = (client_gradients(model, p, data, **options) for p in (params, other))
    return jax.vmap(lambda a, b: tree.norm(jax.tree.map(jnp.subtract, a, b)))(here, there) / distance


def gradient_variance(
    model: Model,
    params: Params,
    data: FederatedData,
    *,
    batch_size: int,
    **options: Unpack[EstimateOptions],
) -> Array:
    """sigma_i^2 = ``E ||grad F_i(x; batch) - grad f_i(x)||^2`` for minibatches of ``local.local_training``; float[C].

    Exact, from the variance v of the gradients of single examples: a batch of b of a client's m rows, drawn without
    replacement, has ``v (m - b) / (b (m - 1))``. The last batch of an epoch holds the remaining rows, so the result is
    the mean over the steps of an epoch. It is 0 if one batch holds the whole shard. Memory: ``width * chunk * D``
    floats.
    """
    check.whole("batch_size", batch_size)

    def of_client(rows: _Rows) -> Array:
        def gradient(x: Array, y: Array, mask: Array) -> Params:
            return jax.grad(rows.loss)(rows.weights, x, y, mask)

        mean = rows.mean(gradient)

        def part(x: Array, y: Array, mask: Array) -> Array:
            def squared(x: Array, y: Array, share: Array) -> Array:
                away = jax.tree.map(jnp.subtract, gradient(x[None], y[None], jnp.ones((1,), bool)), mean)
                square = jnp.square(tree.norm(away))
                return jnp.where(share, square, jnp.zeros_like(square))

            return jax.vmap(squared)(x, y, mask).sum()

        return rows.mean(part) * _batch_factor(rows.size, batch_size)

    return _over_clients(of_client, model, params, data, **_SMALL | options)


class _Rows(NamedTuple):
    """The rows of one client."""

    weights: Params
    loss: Callable[..., Array]  # (weights, x, y, mask) -> sum of the masked losses
    fetch: Callable[[Array], tuple[Array, Array]]
    size: Array  # int32[]
    chunk: int

    def mean(self, part: Callable[[Array, Array, Array], Tree]) -> Tree:
        """``part(x, y, mask)``, summed over chunks of rows, divided by the number of rows.

        Masked rows are the first ones again: a model that normalises by its batch sees no row much more often.
        """

        def at(number: Array) -> Tree:
            position = number * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)
            mask = position < self.size
            return part(*self.fetch(position % self.size), mask)

        def add(number: Array, total: Tree) -> Tree:
            return jax.tree.map(jnp.add, total, at(number))

        chunks = (self.size + self.chunk - 1) // self.chunk
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(at, 0))
        total = jax.lax.fori_loop(0, chunks, add, zero)
        return jax.tree.map(lambda leaf: leaf / self.size.astype(leaf.dtype), total)


def _over_clients(
    of_client: Callable[[_Rows], Tree],
    model: Model,
    params: Params,
    data: FederatedData,
    *,
    clients: Sequence[int] | None = None,
    width: int = 8,
    chunk: int = 256,
) -> Tree:
    """``of_client(rows)`` of every client, ``width`` clients at a time; leaves [C, ...]."""
    chosen = _chosen(data, clients)
    check.whole("width", width)
    check.whole("chunk", chunk)
    chunk = min(chunk, int(data.size[chosen].max()))

    def all_of(params: Params, x: Array, y: Array, order: Array, offset: Array, size: Array) -> Tree:
        def loss(weights: Params, inputs: Array, labels: Array, mask: Array) -> Array:
            full = weights if model.train is None else {**params, "params": weights}
            losses = model.loss(model.apply(full, data.decode(inputs)), labels)
            return jnp.where(mask, losses, jnp.zeros_like(losses)).sum()

        def client(span: tuple[Array, Array]) -> Tree:
            first, count = span

            def fetch(position: Array) -> tuple[Array, Array]:
                index = order[first + position]
                return x[index], y[index]

            return of_client(_Rows(_weights(model, params), loss, fetch, count, chunk))

        rows = jax.lax.map(jax.vmap(client), (offset, size))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: len(chosen)], rows)

    groups = -(-len(chosen) // width)
    filled = np.resize(chosen, (groups, -(-len(chosen) // groups)))  # repeats clients to fill the last group
    pool = jax.device_put((data.x, data.y, data.order))
    offset, size = (jnp.asarray(column[filled], jnp.int32) for column in (data.offset, data.size))
    return jax.jit(all_of)(params, *pool, offset, size)


def _chosen(data: FederatedData, clients: Sequence[int] | None) -> np.ndarray:
    """The clients to measure, each with examples; int64[C]."""
    check.require(not data.streamed, "streamed", True, "False: estimates need the examples on the device")
    highest = len(data.size) - 1
    chosen = list(range(highest + 1)) if clients is None else list(clients)
    check.require(len(chosen) > 0, "clients", chosen, "at least one client, or None for all")
    for client in chosen:
        check.whole("clients", client, 0, highest)
        check.require(int(data.size[client]) > 0, f"examples of client {client}", 0, "at least 1")
    return np.asarray(chosen)


def _weights(model: Model, params: Params) -> Params:
    return params if model.train is None else params["params"]


def _batch_factor(size: Array, batch_size: int) -> Array:
    """Mean over an epoch's batches of b of m rows of ``(m - b) / (b (m - 1))``; 0 for m = 1."""
    real = jnp.result_type(float)
    last = (size - 1) % batch_size + 1
    full = (size - last) // batch_size
    m = size.astype(real)

    def factor(b: Array) -> Array:
        return (m - b) / (b * jnp.maximum(m - 1, 1.0))

    total = full.astype(real) * factor(jnp.asarray(batch_size, real)) + factor(last.astype(real))
    return total / (full + 1).astype(real)


def _unit(v: Params, norm: Array) -> Params:
    """``v / norm``, or v itself if the norm is 0 (a linear loss)."""
    factor = 1 / jnp.where(norm > 0, norm, jnp.ones_like(norm))
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), v)
