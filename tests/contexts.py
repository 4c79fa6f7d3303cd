"""JAX's lowering shares MLIR contexts: loading the dialects of a new one takes 6 ms, a tenth of the tests' time.

It holds for the process that imports this module, if its JAX makes contexts with the function named here. A context
keeps the types and attributes of its programs, so each thread makes a new one after 200 programs.
"""

from __future__ import annotations

import threading

from jax._src.interpreters import mlir

PROGRAMS = 200
MADE = getattr(mlir, "make_ir_context", None)
KEPT = threading.local()


def shared() -> mlir.ir.Context:
    """The context of this thread, for one program more."""
    if not getattr(KEPT, "left", 0):
        KEPT.context, KEPT.left = MADE(), PROGRAMS
    KEPT.left -= 1
    return KEPT.context


if MADE is not None:
    mlir.make_ir_context = shared
