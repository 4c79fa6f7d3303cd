"""A small decentralised run: plans of the clock, and averaging peers that are in no registry."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.clock import Until
from fedjax_async.engine.components import Components
from fedjax_async.local import local_steps
from fedjax_async.peers import PeerAlgorithm, plan_peers
from fedjax_async.peers.full_mixing import full_models
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import Message
from tests.engine.problem import MODEL, client, data

SIZES = (9, 4, 13, 6, 1, 7)
FRAGMENTS = "divshare:omega=0.5"  # two, as those of ``halves``
# Lost and corrupt messages, a node that joins late, and one that leaves.
EVERYTHING = {
    "faults": "drop:probability=0.2+corrupt:probability=0.2",
    "availability": "joins:share=0.2,by=3+leaves:share=0.2,by=6",
}


def plan(exchange, sizes, horizon, seed=0, **conditions) -> PeerSchedule:
    """A gossip run; the masses, which full models do not use, are random."""
    schedule = plan_peers(
        exchange, "lognormal:mean=0.6,heterogeneity=0.5", num_clients=len(sizes),
        local_steps=local_steps(np.array(sizes), batch_size=4, epochs=2.0), until=Until(time=horizon), seed=seed,
        topology="gossip:receivers=2", network="link:latency=0.1", message_bytes=1000, **conditions,
    )  # fmt: skip
    return schedule._replace(mass=np.random.default_rng(seed).uniform(0.1, 0.4, len(schedule.client)))


def nothing_stays(path):
    return False


AVERAGE = full_models(nothing_stays)


@functools.cache
def halves():
    """Two fragments, hidden and output layer, padded to one length.

    The row counts the mixed messages, and has what the event told the node when it mixed.
    """

    def flat(params, part):
        leaves = jax.tree.leaves(params[part])
        vector = jnp.concatenate([leaf.ravel() for leaf in leaves])
        return jnp.pad(vector, (0, 64 - len(vector)))

    def add(inbox, row, message, weight):
        which, values = message
        total, count = inbox
        own = jnp.stack([flat(row[0], "hidden"), flat(row[0], "output")])
        chosen = (jnp.arange(2, dtype=jnp.int32) == which)[:, None]
        return total + jnp.where(chosen, weight.astype(total.dtype) * (values[None] - own), 0), count + 1

    def wake(row, inbox, event):
        change = {}
        for i, part in enumerate(("hidden", "output")):
            leaves, structure = jax.tree.flatten(row[0][part])
            ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
            pieces = jnp.split(inbox[0][i, : sum(leaf.size for leaf in leaves)], ends)
            change[part] = jax.tree.unflatten(structure, [p.reshape(x.shape) for p, x in zip(pieces, leaves)])
        return jax.tree.map(jnp.add, row[0], change), row[1] + inbox[1], told(event)

    def told(event):
        return jnp.stack([jnp.asarray(event.mass, jnp.result_type(float)), jax.random.uniform(event.key)])

    def push(row, upload, event):
        params = jax.tree.map(jnp.add, row[0], upload)
        values = jnp.stack([flat(params, "hidden"), flat(params, "output")])
        now = told(event)
        columns = {"mixed": row[1], "mass_seen": now[0], "drawn": now[1], "told": (row[2] == now).all()}
        return (params, *row[1:]), (jnp.arange(2, dtype=jnp.int32), values), columns

    return PeerAlgorithm(
        init=lambda params: (params, jnp.int32(0), jnp.zeros(2)),
        open=lambda row: (jnp.zeros((2, 64)), jnp.int32(0)),
        add=add,
        wake=wake,
        start=lambda row: Message(row[0]),
        push=push,
        params=lambda row: row[0],
        fragments=2,
    )


class PeerCase(NamedTuple):
    """The arguments of both engines, in order."""

    components: Components
    schedule: PeerSchedule
    params: object
    key: object
    points: np.ndarray


def peer_case(peer=AVERAGE, exchange="mean", *, sizes=SIZES, horizon=10.0, points=5, **conditions) -> PeerCase:
    """The arguments of one run; call it inside ``jax.enable_x64`` for float64."""
    schedule = plan(exchange, sizes, horizon, **conditions)
    components = Components(peer, client(), MODEL, data(sizes))
    moments = np.linspace(0, horizon, points)
    return PeerCase(components, schedule, MODEL.init(jax.random.key(1)), jax.random.key(2), moments)
