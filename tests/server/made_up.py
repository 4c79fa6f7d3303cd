"""Random arrivals on a nested pytree, as flat NumPy vectors and as the stacked ``Arrival`` that rules take."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import factories, tree
from fedjax_async.local import Curve
from fedjax_async.server import begun, closed
from fedjax_async.server.floco import Simplex
from fedjax_async.server.regions import Region
from fedjax_async.server.running_statistics import weights_of
from fedjax_async.server.scaffold import Change
from fedjax_async.types import Arrival, Facts
from tests.server.textbook import CLIENTS, Upload

D = 9  # of a kernel [3, 2], a bias [2] and a number
LENGTH = 50
KEY = jax.random.key(17)


def flat(params):
    """One vector of a pytree; leading axes shared by all leaves stay."""
    lead = params["scale"].shape
    return np.concatenate([np.asarray(leaf).reshape((*lead, -1)) for leaf in jax.tree.leaves(params)], axis=-1)


def unflat(vectors, dtype=None):
    """The pytree of ``[..., D]``, with the leading axes on every leaf."""
    lead = vectors.shape[:-1]
    kernel, bias, scale = (jnp.asarray(part, dtype) for part in np.split(vectors, [6, 8], axis=-1))
    return {"layer": [kernel.reshape(*lead, 3, 2), bias], "scale": scale.reshape(lead)}


def random_uploads(seed, count=LENGTH, *, closes=0.4, rejected=0.15, most_stale=12):
    """Arrivals with random deltas, starts, staleness, example counts, closings and rejections."""
    chance = np.random.default_rng(seed)
    uploads = []
    for _ in range(count):
        lost = chance.random() < rejected
        uploads.append(
            Upload(
                delta=chance.normal(size=D) * (not lost),
                start=chance.normal(size=D),
                staleness=int(chance.integers(0, most_stale)),
                examples=0.0 if lost else float(chance.integers(1, 200)),
                closes=bool(chance.random() < closes),
            )
        )
    return uploads


def closing(uploads, at=None):
    """The same uploads, each closing its step, or only those with the numbers ``at``."""
    return [u._replace(closes=at is None or i in at) for i, u in enumerate(uploads)]


def stacked(uploads):
    """All arrivals as one ``Arrival`` with a leading axis, in JAX's default float type."""
    real = jnp.result_type(float)
    count = len(uploads)
    return Arrival(
        upload=unflat(np.array([u.delta for u in uploads]), real),
        start=unflat(np.array([u.start for u in uploads]), real),
        staleness=jnp.asarray([u.staleness for u in uploads], jnp.int32),
        weight=jnp.asarray([u.examples for u in uploads], real),
        client=jnp.arange(count, dtype=jnp.int32) % CLIENTS,
        time=jnp.arange(count, dtype=real),
        closes=jnp.asarray([u.closes for u in uploads]),
        local_steps=jnp.asarray([1 + int(u.examples) % 3 for u in uploads], jnp.int32),
    )


def arrival(upload, start, staleness=0, client=0, *, weight=1.0, closes=True, **more):
    """One arrival."""
    weight, time = jnp.asarray(weight), jnp.asarray(0.0)
    return Arrival(upload, start, jnp.int32(staleness), weight, jnp.int32(client), time, jnp.bool_(closes), **more)


def uploading(name, arrivals, inner=1, regions=False):
    """The same arrivals in the form that rule ``name`` takes: clients of some rules upload two trees.

    ``inner``: inner points of the curves that clients of asynccurve upload; ``regions``: those of floco are sent.
    """
    change, weights = arrivals.upload, weights_of(arrivals.upload)
    if name == "adpsgd":  # it draws neighbours
        return arrivals._replace(key=jax.random.split(KEY, jnp.shape(arrivals.weight)))
    if name == "scaffold":
        return arrivals._replace(upload=Change(change, weights))
    if name == "asynccurve":  # the offsets of ``textbook_loops``
        of_point = [
            jax.tree.map(lambda leaf, j=j: (0.5 * jnp.sin((3.0 + j) * leaf)).astype(leaf.dtype), weights)
            for j in range(inner)
        ]
        axis = jnp.ndim(arrivals.weight)
        offset = of_point[0] if inner == 1 else jax.tree.map(lambda *rows: jnp.stack(rows, axis=axis), *of_point)
        return arrivals._replace(upload=Curve(change, offset), extra=jax.tree.map(jnp.zeros_like, weights))
    if name == "floco":  # offsets that do not change, of three vertices
        axis = jnp.ndim(arrivals.weight)
        none = jax.tree.map(lambda leaf: jnp.zeros_like(jnp.stack([leaf, leaf], axis=axis)), weights)
        given = arrivals._replace(upload=Simplex(change, none), extra=none)
        if not regions:
            return given
        shape = jnp.shape(arrivals.weight)
        return given._replace(extra=Region(none, jnp.full((*shape, 3), 1 / 3), jnp.ones(shape)))
    return arrivals


def received(server):
    """``(state, memory, arrival) -> (state, memory, info)``: receive an arrival, and close its step if it closes it."""

    def step(state, memory, arrival):
        state, memory, info = server.receive(state, memory, arrival)
        after = closed(server, state, memory)
        return *tree.where(arrival.closes, after, (state, memory)), info

    return step


def start_params(seed=99, dtype=None):
    return unflat(np.random.default_rng(seed).normal(size=D), dtype or jnp.result_type(float))


def receive_all(server, params, arrivals, *, always_closes=False, clients=CLIENTS):
    """Scan ``receive`` and ``close`` over stacked arrivals: final state, params after each, recorded weights.

    The rule is told that there are ``clients`` clients; the arrivals are from the first seven.
    """
    steps = jnp.sum(arrivals.closes, dtype=jnp.int32)
    facts = Facts(clients, always_closes, len(arrivals.staleness), steps)

    def one(carry, arrival):
        state, table = carry
        before = tree.gather(table, arrival.client)
        if always_closes:
            state, memory, info = server.receive(state, before, arrival)
            state, memory = closed(server, state, memory)
        else:
            state, memory, info = received(server)(state, before, arrival)
        return (state, tree.scatter(table, arrival.client, memory)), (server.params(state), info.weight)

    state, memory = begun(server, params, facts)
    table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (CLIENTS, *leaf.shape)), memory)
    (state, _), (path, weights) = jax.lax.scan(one, (state, table), arrivals)
    return state, path, weights


@cache
def _compiled(factory, always_closes, clients, fixed, traced):
    def program(params, arrivals, *values):
        server = factory(**dict(fixed), **dict(zip(traced, values)))
        arrivals = uploading(factory.__name__, arrivals)
        return receive_all(server, params, arrivals, always_closes=always_closes, clients=clients)

    return jax.jit(program)


def run(factory, params, uploads, *, always_closes=False, clients=CLIENTS, **options):
    """Final state, params after each arrival [E, D], weights [E]; options annotated ``Traced`` are traced.

    Runs are filled up to one length with rejected arrivals that close nothing, so that few programs are compiled.
    """
    lost = Upload(np.zeros(D), np.zeros(D), 0, 0.0, False)
    static = {key for key, p in factories.options_of(factory).items() if not factories.is_traced(p)}
    fixed = tuple((key, value) for key, value in options.items() if key in static)
    traced = {key: float(value) for key, value in options.items() if key not in static}
    arrivals = stacked([*uploads, *[lost] * (LENGTH - len(uploads))])
    values = [jnp.asarray(value, float) for value in traced.values()]
    program = _compiled(factory, always_closes, clients, fixed, tuple(traced))
    state, path, weights = program(params, arrivals, *values)
    return state, flat(path)[: len(uploads)], np.asarray(weights)[: len(uploads)]
