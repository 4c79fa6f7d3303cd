"""Combined compressors: one after another, and one applied to each group of leaves of a pytree."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.compress.payload import Compressor, Dense, Payload, Sparse, to_dense
from fedjax_async.compress.quantise import qsgd
from fedjax_async.compress.sizes import bits
from fedjax_async.compress.sparse import kept, topk
from fedjax_async.types import Array, Key, Params, Traced


def chain(sparsifier: Compressor, then: Compressor) -> Compressor:
    """Keep some entries by ``sparsifier``, and compress the kept values by ``then``.

    ``ValueError`` in ``compress`` unless ``sparsifier`` sends its values unchanged, as top-k and random-k do.
    """

    def compress(key: Key, x: Array) -> Sparse:
        first, second = jax.random.split(key)
        outer = sparsifier.compress(first, x)
        fits = isinstance(outer, Sparse) and isinstance(outer.values, Dense)
        check.require(fits, "sparsifier", type(outer).__name__, "one that sends an index and plain values")
        return Sparse(outer.index, then.compress(second, outer.values.values), outer.size)

    def decompress(payload: Sparse) -> Array:
        return to_dense(jnp.asarray(payload.index), then.decompress(payload.values), payload.size)

    return Compressor(compress, decompress, bits)


def topk_qsgd(
    *,
    ratio: float = 0.1,
    levels: Traced = 7,
    scaled: bool = True,
    bucket: int | None = None,
    norm: str = "euclidean",
) -> Compressor:
    """The k = ceil(`ratio` D) largest entries, rounded to `levels` steps of their norm, `scaled` by 1/(1 + beta).

    ``Q_s(Top_k(x)) / (1 + beta)`` with ``beta = min(k/s^2, sqrt(k)/s)`` contracts by ``gamma = k / (D (1 + beta))``.
    AsynFLC gives this gamma for ``Q_s(Top_k(x))`` itself, but that contracts by ``(1 - beta) k / D``, so only for
    ``beta < 1`` (Basu et al. 2019, lemmas 1 and 2). Levels are 1, 7, 127 for the paper's 2, 4, 8 bits. ``bucket`` and
    ``norm`` as in ``qsgd``: buckets of the kept entries, each with its own norm, make beta small.
    """
    rounding = qsgd(levels=levels, scaled=scaled, bucket=bucket, norm=norm)
    of_kept = rounding.error
    error = None if of_kept is None else lambda size: of_kept(kept(ratio, size))
    return chain(topk(ratio=ratio), rounding)._replace(error=error)


def _one_group(path: tuple[object, ...]) -> Hashable:
    return ()


def on_tree(
    compressor: Compressor, like: Params, *, group: Callable[[tuple[object, ...]], Hashable] = _one_group
) -> Compressor:
    """``compressor`` for pytrees with the structure and shapes of ``like``: it gets each group of leaves as one vector.

    Args:
      group: maps a leaf's path to the name of its group (``geometry.GROUPINGS`` has whole, layer and tensor). By
        default all leaves form one vector. Each group has a random key of its own.

    Returns: a ``Compressor``. Its payload is a tuple, one entry per group, in order of their first leaves. Leaves of
    different types in one group are joined in JAX's default float type; ``decompress`` restores each leaf's type.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    groups: dict[Hashable, list[int]] = {}
    for i, (path, _) in enumerate(paths):
        groups.setdefault(group(path), []).append(i)
    shapes = [(jnp.shape(leaf), jnp.result_type(leaf)) for _, leaf in paths]

    def joined(leaves: list[Array], members: list[int]) -> Array:
        types = {shapes[i][1] for i in members}
        common = types.pop() if len(types) == 1 else jnp.result_type(float)
        return jnp.concatenate([leaves[i].reshape(-1).astype(common) for i in members])

    def compress(key: Key, tree: Params) -> Payload:
        leaves = jax.tree.leaves(tree)
        keys = [jax.random.fold_in(key, i) for i in range(len(groups))]
        return tuple(compressor.compress(k, joined(leaves, members)) for k, members in zip(keys, groups.values()))

    def decompress(payload: Payload) -> Params:
        leaves: list[Array | None] = [None] * len(shapes)
        for part, members in zip(payload, groups.values(), strict=True):
            vector, low = compressor.decompress(part), 0
            for i in members:
                shape, dtype = shapes[i]
                size = math.prod(shape)
                leaves[i] = vector[low : low + size].reshape(shape).astype(dtype)
                low += size
        return jax.tree.unflatten(structure, leaves)

    return Compressor(compress, decompress, bits)
