"""Compressors of updates, the exact size of what they send, and its bytes.

``COMPRESSORS`` are factories of pure functions on one vector; ``on_tree`` takes them to pytrees, ``bits`` and
``values_bits`` count in a compiled run what ``encode`` makes on the host, and ``decode`` reads.
"""

from collections.abc import Callable

from fedjax_async.compress.compose import chain, on_tree, topk_qsgd
from fedjax_async.compress.payload import Compressor, Dense, Levels, Payload, Signs, Sparse
from fedjax_async.compress.quantise import cast, identity, levels_of, qsgd
from fedjax_async.compress.signs import scaled_sign, sign
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
}

__all__ = [
    "COMPRESSORS",
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
    "identity",
    "levels_of",
    "most_bits",
    "on_tree",
    "qsgd",
    "randk",
    "scaled_sign",
    "sign",
    "topk",
    "topk_fast",
    "topk_qsgd",
    "values_bits",
    "wire_bytes",
]
