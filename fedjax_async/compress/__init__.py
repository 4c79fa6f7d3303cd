"""Compressors of updates, the exact sizes of their messages, and the messages as bytes.

Start with ``COMPRESSORS``: factories of pure functions on one vector. ``payload.py`` has the contract, ``sparse.py``,
``quantise.py`` and ``centroids.py`` the compressors, ``compose.py`` chains of them and :func:`on_tree`, which
compresses a pytree. ``sizes.py`` counts the bits of a message inside a compiled run. ``wire.py`` makes and reads its
bytes on the host, from the fields of ``fields.py`` and the bit codes of ``codes.py``. ``centroids.py`` also encodes
whole models for peers (:func:`wcp`), with the k-means of ``clustering.py``.
"""

from collections.abc import Callable

from fedjax_async.compress.centroids import (
    Clustered,
    from_payloads,
    is_weight,
    is_weight_released,
    lookup,
    mask,
    nearest_centroids,
    payloads,
    random_tables,
    wcp,
)
from fedjax_async.compress.compose import chain, on_tree, topk_qsgd
from fedjax_async.compress.payload import Buckets, Centroids, Compressor, Dense, Levels, Payload, Signs, Sparse
from fedjax_async.compress.quantise import cast, identity, levels_of, qsgd, scaled_sign, sign
from fedjax_async.compress.sizes import bits, most_bits, values_bits, wire_bytes
from fedjax_async.compress.sparse import randk, topk, topk_fast
from fedjax_async.compress.wire import decode, encode

COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "identity": identity,
    "topk": topk,
    "topk_fast": topk_fast,
    "randk": randk,
    "sign": sign,
    "scaled_sign": scaled_sign,
    "qsgd": qsgd,
    "topk_qsgd": topk_qsgd,
    "cast": cast,
    "centroids": nearest_centroids,
}

__all__ = [
    "COMPRESSORS",
    "Buckets",
    "Centroids",
    "Clustered",
    "Compressor",
    "Dense",
    "Levels",
    "Payload",
    "Signs",
    "Sparse",
    "bits",
    "cast",
    "chain",
    "decode",
    "encode",
    "from_payloads",
    "identity",
    "is_weight",
    "is_weight_released",
    "levels_of",
    "lookup",
    "mask",
    "most_bits",
    "nearest_centroids",
    "on_tree",
    "payloads",
    "qsgd",
    "randk",
    "random_tables",
    "scaled_sign",
    "sign",
    "topk",
    "topk_fast",
    "topk_qsgd",
    "values_bits",
    "wcp",
    "wire_bytes",
]
