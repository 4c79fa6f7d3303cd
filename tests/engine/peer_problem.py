"""A small decentralised run: random plans made here, independent of the clock's exchanges, and averaging peers."""

from __future__ import annotations

import functools
import heapq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.clock.peer_schedule import Delivery, PeerSchedule
from fedjax_async.engine.components import PeerComponents
from fedjax_async.peers import PeerAlgorithm
from fedjax_async.peers.full_models import full_models
from fedjax_async.types import Message
from tests.engine.problem import MODEL, client, data

SIZES = (9, 4, 13, 6, 1, 7)
HORIZON = 10.0


def plan(
    seed=0, *, sizes=SIZES, horizon=HORIZON, receivers=2, fragments=1, noise=0.5, late=(), leaving=(), corrupt=0.0,
    lost=0.0, at_end=False, scale=1.0,
) -> PeerSchedule:  # fmt: skip
    """A gossip run: every event mixes, with equal weights, what arrived since the previous event of its node."""
    rng, count = np.random.default_rng(seed), len(sizes)
    speed = rng.lognormal(0, 0.5, count)
    joined, left = np.zeros(count), np.full(count, np.inf)
    joined[list(late)], left[list(leaving)] = 0.3 * horizon, 0.6 * horizon
    todo = [(joined[i], i) for i in range(count)]
    heapq.heapify(todo)
    drawn = []  # (client, start, end, steps)
    while todo:
        start, who = heapq.heappop(todo)
        steps = -(-sizes[who] // 4) * 2
        end = start + scale * speed[who] * rng.lognormal(0, noise) * steps / 4
        if end <= min(horizon, left[who]):
            drawn.append((who, start, end, steps))
            heapq.heappush(todo, (end, who))
    drawn.sort(key=lambda one: (one[2 if at_end else 1], one[0]))
    pushes, arriving = [], [[] for _ in range(count)]
    for e, (who, _, end, _) in enumerate(drawn):
        for f in range(fragments):
            others = [i for i in range(count) if i != who and joined[i] <= end < left[i]]
            for to in rng.permutation(others)[:receivers].tolist():
                arrival = end + 0.1 * scale * rng.exponential() if rng.random() >= lost else np.inf
                arriving[to].append((arrival, e, f, len(pushes)))
                pushes.append([e, f, to, arrival, Delivery.LOST if np.isinf(arrival) else Delivery.WAITING, -1])
    number, seen, read = [0] * count, [0.0] * count, []
    numbers, inboxes = [], []
    for e, (who, start, end, _) in enumerate(drawn):
        moment = end if at_end else start
        there = {}
        for arrival, source, f, push in sorted(arriving[who]):
            if seen[who] < arrival <= moment:
                there[drawn[source][0], f] = (source, f)  # only the newest of each sender
                pushes[push][4:] = [Delivery.MIXED, e]
        seen[who] = moment
        inboxes.append(sorted(there.values()))
        numbers.append(number[who])
        number[who] += 1
        read += inboxes[-1]
    events, columns = [np.array(column) for column in zip(*drawn)], [np.array(column) for column in zip(*pushes)]
    size = np.array([len(inbox) for inbox in inboxes])
    return PeerSchedule(
        num_clients=count,
        client=events[0].astype(np.int32),
        number=np.array(numbers, np.int32),
        local_steps=events[3].astype(np.int32),
        start=events[1],
        end=events[2],
        mixed_at=events[2 if at_end else 1],
        mass=rng.uniform(0.1, 0.4, len(drawn)),
        inbox_bounds=np.concatenate([[0], np.cumsum(size)]).astype(np.int64),
        source=np.array([s for s, _ in read], np.int64),
        fragment=np.array([f for _, f in read], np.int32),
        weight=np.repeat(1 / (size + 1.0), size),
        push_event=columns[0].astype(np.int64),
        push_fragment=columns[1].astype(np.int32),
        receiver=columns[2].astype(np.int32),
        sent_mass=np.full(len(pushes), 0.2),
        arrival=columns[3].astype(float),
        outcome=columns[4].astype(np.int8),
        mixed_by=columns[5].astype(np.int64),
        corrupt=rng.random(len(pushes)) < corrupt,
        joined=joined,
        left=left,
        fragments=fragments,
    )  # fmt: skip


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

    components: PeerComponents
    schedule: PeerSchedule
    params: object
    key: object
    points: np.ndarray


def peer_case(peer=AVERAGE, *, who=None, points=5, **options) -> PeerCase:
    """The arguments of one run; call it inside ``jax.enable_x64`` for float64."""
    sizes = options.get("sizes", SIZES)
    schedule = plan(**options)
    components = PeerComponents(peer, who or client(), MODEL, data(sizes))
    moments = np.linspace(0, options.get("horizon", HORIZON), points)
    return PeerCase(components, schedule, MODEL.init(jax.random.key(1)), jax.random.key(2), moments)
