"""Compressors of updates, the exact sizes of their messages, and the messages as bytes.

Start with ``COMPRESSORS``: factories of pure functions on one vector. ``payload.py`` has the contract, ``sparse.py``,
``quantise.py`` and ``centroids.py`` the compressors, ``compose.py`` chains of them and :func:`on_tree`, which
compresses a pytree. ``sizes.py`` counts the bits of a message inside a compiled run. ``wire.py`` makes and reads its
bytes on the host, from the fields of ``fields.py`` and the bit codes of ``codes.py``. ``centroids.py`` also encodes
whole models for peers (:func:`wcp`), with the k-means of ``clustering.py``.
"""

from collections.abc import Callable

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.compress.centroids import (Clustered as Clustered, from_payloads as from_payloads,
    is_weight as is_weight, is_weight_released as is_weight_released, lookup as lookup, mask as mask,
    nearest_centroids as nearest_centroids, payloads as payloads, random_tables as random_tables, wcp as wcp)
from fedjax_async.compress.compose import chain as chain, on_tree as on_tree, topk_qsgd as topk_qsgd
from fedjax_async.compress.payload import (Buckets as Buckets, Centroids as Centroids, Compressor as Compressor,
    Dense as Dense, Levels as Levels, Payload as Payload, Signs as Signs, Sparse as Sparse)
from fedjax_async.compress.quantise import (cast as cast, identity as identity, levels_of as levels_of, qsgd as qsgd,
    scaled_sign as scaled_sign, sign as sign)
from fedjax_async.compress.sizes import (bits as bits, most_bits as most_bits, values_bits as values_bits,
    wire_bytes as wire_bytes)
from fedjax_async.compress.sparse import randk as randk, topk as topk, topk_fast as topk_fast
from fedjax_async.compress.wire import decode as decode, encode as encode
# fmt: on

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

lazy.set_all(__name__)
