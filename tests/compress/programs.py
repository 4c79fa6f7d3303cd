"""Compiled compressors, which several files of tests share."""

import functools

import jax


@functools.cache
def compiled(factory, **options):
    """``key, x -> (payload, x_hat, bits)``."""
    compressor = factory(**options)

    def everything(key, x):
        payload = compressor.compress(key, x)
        return payload, compressor.decompress(payload), compressor.bits(payload)

    return jax.jit(everything)
