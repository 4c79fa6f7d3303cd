"""Compiled programs of decentralised runs, shared between runs that have the same components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Wrapped

from fedjax_async.base import tree
from fedjax_async.engine import kernels, peer_kernels, programs
from fedjax_async.engine.compiling import jitted
from fedjax_async.engine.devices import everywhere, placed, spread
from fedjax_async.engine.peer_kernels import NodeJobs
from fedjax_async.engine.programs import Shapes
from fedjax_async.engine.scoring import PeerScoring, rows_of_run
from fedjax_async.engine.tables import PeerTables, StackShape
from fedjax_async.types import Array, Params, State


@lru_cache(maxsize=64)
def start(what: NodeJobs, nodes: int, slots: int, mesh: Mesh | None) -> Wrapped:
    """Jitted :func:`peer_kernels.make_peer_start`."""
    return jitted(peer_kernels.make_peer_start(what, nodes, slots), out_shardings=everywhere(mesh))


@lru_cache(maxsize=64)
def write(one_by_one: bool, mesh: Mesh | None) -> Wrapped:
    """Jitted :func:`peer_kernels.make_write`."""
    return programs.applying(peer_kernels.make_write(one_by_one), mesh)


@lru_cache(maxsize=64)
def own(scoring: PeerScoring, mesh: Mesh | None) -> Wrapped:
    """Jitted :meth:`PeerScoring.own`."""
    return _over_nodes(scoring.own, mesh)


@lru_cache(maxsize=64)
def whole(scoring: PeerScoring, mesh: Mesh | None) -> Wrapped:
    """Jitted :meth:`PeerScoring.whole`."""
    return _over_nodes(scoring.whole, mesh)


def _over_nodes(score: Callable[..., object], mesh: Mesh | None) -> Wrapped:
    """Jitted ``score(tables, rows, nodes)``; each device evaluates its share of the nodes."""
    if mesh is not None:
        whole, share = everywhere(mesh).spec, spread(mesh).spec  # type: ignore[union-attr]
        score = jax.shard_map(score, mesh=mesh, in_specs=(whole, whole, share), out_specs=share, check_vma=False)
    return jitted(score)


@lru_cache(maxsize=64)
def together(scoring: PeerScoring, mesh: Mesh | None) -> Wrapped:
    """Jitted :meth:`PeerScoring.together`."""

    def gathered(
        tables: PeerTables, rows: State, run: Array, online: Array, parts: list[dict[str, Array]], now: Array
    ) -> dict[str, Array]:
        parts = jax.lax.with_sharding_constraint(parts, everywhere(mesh))
        return scoring.together(tables, rows, run, online, parts, now)

    return jitted(scoring.together if mesh is None else gathered, out_shardings=everywhere(mesh))


@lru_cache(maxsize=64)
def models_of(what: NodeJobs, nodes: int) -> Wrapped:
    """Jitted ``models_of(tables, rows, run) -> params`` of a run's nodes [N, ...]: a copy; the rows are donated."""

    def models(tables: PeerTables, rows: State, run: Array) -> Params:
        peer, rows = what.at(tables, run)[0], rows_of_run(rows, run, nodes, len(tables.key))
        return jax.tree.map(jnp.copy, jax.vmap(peer.params)(rows))

    return jitted(models)


class PeerPrograms(NamedTuple):
    """All programs that a run calls: compiled, so that no thread traces."""

    start: Compiled
    buffers: Compiled
    train: dict[int, Compiled]  # by width
    write: Compiled
    own: Compiled  # scores of nodes on their own tests
    whole: Compiled | None  # scores of nodes on the global test set; None under global_tests = "never"
    together: Compiled
    models: Compiled

    def number(self) -> int:
        """How many programs there are."""
        return len(self.train) + 6 + (self.whole is not None)


def peer_shapes(
    what: NodeJobs, shape: StackShape, batching: str, tables: PeerTables, params: Params, mesh: Mesh | None
) -> Shapes:
    """What a run will allocate on the device; nothing is compiled."""
    carry = jax.eval_shape(start(what, shape.num_clients, shape.slot_count, mesh), tables, params)
    whole = batching == "loop"
    empty = tree.shapes(kernels.empty_buffers, tables, carry.readable, given=(what, shape.capacity, whole))
    empty = empty._replace(started=()) if whole else empty
    if mesh is not None:
        carry, empty = placed(carry, everywhere(mesh)), placed(empty, spread(mesh))
    return Shapes(carry, empty)


def compile_peer_programs(
    scoring: PeerScoring,
    shape: StackShape,
    widths: Sequence[int],
    batching: str,
    tables: PeerTables,
    params: Params,
    shapes: Shapes,
    *,
    node_blocks: Sequence[np.ndarray],
    mesh: Mesh | None = None,
) -> PeerPrograms:
    """Compile ahead of time, since JAX keeps settings such as ``enable_x64`` per thread, and lanes are threads.

    ``node_blocks``: the numbers of the nodes that each call of an evaluation scores.
    """
    programs.shed()
    what, (carry, empty) = scoring.what, shapes[:2]
    rows, nodes = carry.memory, node_blocks[0]
    scores = [score(scoring, mesh) for score in ((own, whole) if scoring.globally else (own,))]
    part: dict[str, Array] = {}
    for score in scores:
        part |= jax.eval_shape(score, tables, rows, nodes)
    parts = [part if mesh is None else placed(part, spread(mesh)) for _ in node_blocks]
    run, online = np.int32(0), np.zeros(shape.num_clients, np.bool_)
    compiled = [score.lower(tables, rows, nodes).compile() for score in scores]
    return PeerPrograms(
        start=start(what, shape.num_clients, shape.slot_count, mesh).lower(tables, params).compile(),
        buffers=programs.zeros(tree.frozen(empty), mesh).lower().compile(),
        train=programs.compiled_training(what, widths, batching, tables, carry, empty, mesh),
        write=write(jax.default_backend() == "cpu", mesh).lower(tables, carry, empty, np.zeros(2, np.int32)).compile(),
        own=compiled[0],
        whole=compiled[1] if scoring.globally else None,
        together=together(scoring, mesh).lower(tables, rows, run, online, parts, np.array(False)).compile(),
        models=models_of(what, shape.num_clients).lower(tables, rows, run).compile(),
    )
