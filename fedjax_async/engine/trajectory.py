"""A whole run as one pure function of its hyperparameters and first params, which JAX differentiates.

The schedule is planned, so a run is a fixed sequence of arrivals: a scan over them. For every arrival it trains the job
from the message in its slot, lets the server receive the upload, and sends the messages that are due. Nothing here is
batched in waves: reverse mode needs the order of arrivals.

Reverse mode keeps what each arrival started from, a few copies of the params, and computes its local steps once more
(``trajectory_job.py``). Where that needs too much memory, it keeps only what the scan carries at the beginning of every
*segment* of arrivals, and computes each segment twice. Segments of ``sqrt(E)`` arrivals need the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.clock import check_schedule, with_derived_columns
from fedjax_async.clock.waves import allocate
from fedjax_async.engine.components import (
    Components,
    bound,
    facts_of,
    first_states,
)
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.kernels import FinishedJob, finished
from fedjax_async.engine.tables import malicious
from fedjax_async.engine.trajectory_job import put, repeated, take
from fedjax_async.engine.trajectory_scores import make_score, where_evaluated
from fedjax_async.engine.unsent import all_training
from fedjax_async.local import arrival_key, job_key
from fedjax_async.server import begun, closed
from fedjax_async.types import (
    Array,
    Arrival,
    ClientData,
    Facts,
    Key,
    Message,
    Params,
    Request,
    Schedule,
    ServerAlgorithm,
    State,
    Whole,
)


class PerClient(NamedTuple):
    """A hyperparameter with a value for each client."""

    values: Array  # float[N]


class PerStaleness(NamedTuple):
    """A hyperparameter with a value for each staleness; larger ones take the last value."""

    values: Array  # float[], one entry per staleness, from 0


class PerExample(NamedTuple):
    """A factor for the loss of each training example; only for ``example_weight``."""

    values: Array  # float[M], in the order of the data's rows


MOST_KEPT = 4 * 2**30  # bytes that reverse mode may keep for all arrivals; above that, segments are computed twice
EXAMPLE_WEIGHT = "example_weight"  # in ``hyper``: factors of the training losses


Varying = Mapping[str, object]  # name -> a scalar, PerClient, PerStaleness or PerExample


class Carried(NamedTuple):
    """What the scan carries from one arrival to the next."""

    server: State
    memory: State  # rows of the server about clients, [N, ...]
    clients: State  # rows of clients, [N, ...]
    slots: Message  # start models, [S, ...]


class SentMessages(NamedTuple):
    """The messages that are sent after each arrival, padded to L, the most after any one."""

    active: Array  # bool[E, L], false for padding
    slot: Array  # int32[E, L]
    client: Array  # int32[E, L]
    time: Array  # float[E, L]
    version: Array  # int32[E, L]
    steps: Array  # int32[E, L]


class ScanInputs(NamedTuple):
    """The inputs of the scan, one entry per arrival, in order."""

    client: Array  # int32[E]
    number: Array  # int32[E]
    steps: Array  # int32[E]
    slot: Array  # int32[E]
    version: Array  # int32[E]
    staleness: Array  # int32[E]
    time: Array  # float[E]
    closes: Array  # bool[E]
    corrupt: Array  # bool[E]
    malicious: Array  # bool[E]
    applied: Array  # bool[E]
    evaluated: Array  # bool[E], whether the model is evaluated after it
    sent: SentMessages


def at(hyper: Varying, client: Whole, staleness: Whole = 0) -> dict[str, Any]:
    """The hyperparameters of one arrival: scalars, except for the factors of all examples."""

    def value(entry: object) -> object:
        if isinstance(entry, PerClient):
            return entry.values[client]
        if isinstance(entry, PerStaleness):
            return entry.values[jnp.minimum(staleness, len(entry.values) - 1)]
        return entry.values if isinstance(entry, PerExample) else entry

    return {name: value(entry) for name, entry in hyper.items()}


def make_trajectory(
    components: Components,
    schedule: Schedule,
    key: Key,
    points: EvaluationPoints,
    *,
    norm_limit: float = math.inf,
    segment: int | None = None,
) -> Callable[[Varying, Params], dict[str, Array]]:
    """``f(hyper, params) -> scores``: the run of ``schedule`` from ``params``, as a pure function.

    ``hyper``: the numbers of ``components.hyper`` by name, each a scalar, :class:`PerClient` or :class:`PerStaleness`.
    It may also have ``example_weight``, factors of the training losses: one of these or :class:`PerExample`.
    ``scores``: ``loss`` and ``accuracy`` on the test set, ``validation_loss`` and ``validation_accuracy`` where clients
    hold examples out, float[V], one entry per point; and ``params``, those at the end. ``segment``: how many arrivals
    reverse mode computes from one carry that it keeps; by default all, or the square root of their number if all would
    need more than 4 GiB. Raises ``ValueError`` for an invalid schedule or ``segment``.
    """
    schedule = check_schedule(schedule)
    params = jax.eval_shape(components.model.init, jax.eval_shape(jax.random.key, 0))
    _, memory, kept = first_states(components, params, facts_of(schedule))
    training, applied, position = schedule, np.ones(len(schedule.job), np.bool_), points.position
    if jax.tree.leaves(kept):
        training, applied, after = all_training(schedule)
        position = after[points.position]
    run = _Run(components, schedule, training, applied, key, norm_limit, bool(jax.tree.leaves(memory)))
    count = len(training.job)
    if segment is None:
        needed = count * kept_bytes(components, params, facts_of(schedule))
        segment = max(count, 1) if needed <= MOST_KEPT else math.ceil(math.sqrt(count))
    check.whole("segment", segment)
    blocks, first = run.steps(position, segment)
    once = segment >= count
    score = make_score(components)
    scored = where_evaluated(score)

    def trajectory(hyper: Varying, params: Params) -> dict[str, Array]:
        def step(carried: Carried, one: ScanInputs) -> tuple[Carried, dict[str, Array]]:
            carried = run.arrive(hyper, carried, one)
            return carried, scored(one.evaluated, run.rule(hyper, 0).params(carried.server))

        def through(carried: Carried, some: ScanInputs) -> tuple[Carried, dict[str, Array]]:
            return jax.lax.scan(step, carried, some)

        carried = run.begin(hyper, params, first)
        before = score(run.rule(hyper, 0).params(carried.server))
        rows = {name: [value[None]] for name, value in before.items()}
        for some in blocks:
            carried, found = jax.lax.scan(
                through if once else jax.checkpoint(through, prevent_cse=False), carried, some
            )
            for name, values in found.items():
                rows[name].append(values.reshape(-1))
        scores = {name: jnp.concatenate(parts)[position] for name, parts in rows.items()}
        return scores | {"params": run.rule(hyper, 0).params(carried.server)}

    return trajectory


def kept_bytes(components: Components, params: Params, facts: Facts) -> int:
    """About how many bytes reverse mode keeps for an arrival: state, message and rows, before and after it."""
    return 2 * tree.num_bytes((first_states(components, params, facts), params))


class _Run:
    """The tables of a run, and what happens at an arrival."""

    def __init__(
        self, components: Components, schedule: Schedule, training: Schedule, applied: np.ndarray, key: Key,
        norm_limit: float, personal: bool,
    ) -> None:  # fmt: skip
        self.components, self.schedule, self.applied, self.key = components, training, applied, key
        self.facts = facts_of(schedule)
        self.norm_limit = norm_limit
        data = components.data
        self.pool = tuple(jnp.asarray(part) for part in (data.x, data.y, data.order))
        self.offset, self.size = jnp.asarray(data.offset), jnp.asarray(data.size)
        count = len(training.job)
        self.slots = allocate(training, np.arange(count + 1), personal)
        self.longest = int(training.local_steps[training.job].max(initial=1))
        sent = np.diff(self.slots.write_bounds)
        self.most_sent = max(int(sent[1:].max(initial=1)), 1)  # messages after an arrival
        # Whether `_sent` pads nothing that trains; what is sent after the last arrival trains nothing.
        self.always_sends = bool(sent[0] > 0 and (sent[1:count] == self.most_sent).all())

    def rule(self, hyper: Varying, client: Whole, staleness: Whole = 0) -> ServerAlgorithm:
        """The server rule for an arrival."""
        return bound(self.components.rule, at(hyper, client, staleness))

    def part(self, client: Whole, weight: Array | None) -> ClientData:
        """The training part of a client; ``weight``: factors of the losses."""
        x, y, order = self.pool
        return ClientData(x, y, order, self.offset[client], self.size[client], weight)

    def begin(self, hyper: Varying, params: Params, first: SentMessages) -> Carried:
        """The carry at the start of the run, with the first messages sent."""
        clients = len(self.components.data.size)

        def rows(one: State) -> State:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (clients, *leaf.shape)), one)

        state, memory = begun(self.rule(hyper, 0), params, self.facts)
        kept = bound(self.components.client, at(hyper, 0)).init(params)
        message, _ = self.rule(hyper, 0).dispatch(state, memory, Request(jnp.int32(0)))
        message = message._replace(version=jnp.int32(0))
        slots = jax.tree.map(lambda leaf: jnp.zeros((self.slots.count, *leaf.shape), leaf.dtype), message)
        return self.send(hyper, Carried(state, rows(memory), rows(kept), slots), first)

    def send(self, hyper: Varying, carried: Carried, sent: SentMessages) -> Carried:
        """Write the messages that are due into their slots."""

        def one(carried: Carried, due: SentMessages) -> tuple[Carried, None]:
            weight = self.size[due.client].astype(jnp.result_type(float))
            request = Request(due.client, due.time, due.version, due.steps, weight)
            before, memory = take(carried.memory, due.client)
            message, row = self.rule(hyper, due.client).dispatch(carried.server, before, request)
            message, slots = message._replace(version=jnp.int32(0)), carried.slots
            if not self.always_sends:  # tree.where, since a conditional would copy the tables
                old, slots = take(slots, due.slot)
                message = tree.where(due.active, message, old)
                row = tree.where(due.active, row, before)
            memory, slots = put(memory, due.client, row), put(slots, due.slot, message)
            return carried._replace(memory=memory, slots=slots), None

        if len(sent.active) == 1:
            return one(carried, jax.tree.map(lambda column: column[0], sent))[0]
        return jax.lax.scan(one, carried, sent)[0]

    def train(self, hyper: Varying, message: Message, before: State, one: ScanInputs) -> FinishedJob:
        """The upload of the job that arrives, as ``kernels.finished`` returns it."""
        numbers = at(hyper, one.client, one.staleness)
        client = bound(self.components.client, numbers)
        data = self.part(one.client, numbers.get(EXAMPLE_WEIGHT))
        message = message._replace(version=one.version, local_steps=one.steps)
        work = client.begin(job_key(self.key, one.client, one.number), message, before, data)

        def step(work: State, k: Array, given: tuple[dict[str, Any], Message, Array]) -> State:
            numbers, message, owner = given
            data = self.part(owner, numbers.get(EXAMPLE_WEIGHT))
            stepped: State = bound(self.components.client, numbers).step(work, k, message, data)
            return stepped

        work = repeated(step, work, (numbers, message, one.client), one.steps, self.longest)
        limit = jnp.asarray(self.norm_limit, jnp.result_type(float))
        return finished(client, work, message, before, limit, one.corrupt, one.applied)

    def arrive(self, hyper: Varying, carried: Carried, one: ScanInputs) -> Carried:
        """Train the job of an arrival, let the server receive it, and send what is due."""
        message, slots = take(carried.slots, one.slot)
        (before, row), (clients, memory) = take((carried.clients, carried.memory), one.client)
        upload, after, _, accepted, _ = self.train(hyper, message, before, one)
        real = jnp.result_type(float)
        arrival = Arrival(
            upload=upload,
            start=message.params,
            staleness=one.staleness,
            weight=jnp.where(accepted, self.size[one.client], 0).astype(real),
            client=one.client,
            time=one.time,
            closes=one.closes,
            local_steps=one.steps,
            extra=message.extra,
            key=arrival_key(self.key, one.client, one.number),
            malicious=one.malicious,
        )
        rule = self.rule(hyper, one.client, one.staleness)

        def received(both: tuple[State, State]) -> tuple[State, State]:
            state, memory, _ = rule.receive(*both, arrival)
            if self.facts.every_closes:
                return closed(rule, state, memory)
            return jax.lax.cond(one.closes, lambda b: closed(rule, *b), lambda b: b, (state, memory))

        both = (carried.server, row)
        both = received(both) if self.applied.all() else jax.lax.cond(one.applied, received, lambda b: b, both)
        carried = carried._replace(
            server=both[0],
            memory=put(memory, one.client, both[1]),
            clients=put(clients, one.client, after),
            slots=slots,
        )
        return self.send(hyper, carried, one.sent)

    def steps(self, position: np.ndarray, segment: int) -> tuple[list[ScanInputs], SentMessages]:
        """The arrivals in segments, ``[segments, segment, ...]``, then the rest as one segment; the first messages."""
        s, real = self.schedule, np.dtype(jnp.result_type(float))
        job, count = s.job, len(s.job)
        columns: dict[str, Any] = {
            "client": s.client[job],
            "number": s.number[job],
            "steps": s.local_steps[job].astype(np.int32),
            "slot": self.slots.start_slot[job],
            "version": s.version[job].astype(np.int32),
            "staleness": s.staleness.astype(np.int32),
            "time": s.time.astype(real),
            "closes": s.closes,
            "corrupt": with_derived_columns(s).corrupt[job] & self.applied,
            "malicious": malicious(self.components.data)[s.client[job]],
            "applied": self.applied,
            "evaluated": np.isin(np.arange(1, count + 1), position),
        }
        at_start = max(int(self.slots.write_bounds[1]), 1)
        first = jax.tree.map(lambda column: column[0], self._sent(0, 1, at_start, real))
        whole = ScanInputs(**columns, sent=self._sent(1, count + 1, self.most_sent, real))
        whole_segments = count // segment * segment
        blocks = [(0, whole_segments, segment), (whole_segments, count, count - whole_segments)]

        def cut(low: int, high: int, length: int) -> ScanInputs:
            return jax.tree.map(lambda column: column[low:high].reshape(-1, length, *column.shape[1:]), whole)

        return [cut(*block) for block in blocks if block[1] > block[0]], first

    def _sent(self, low: int, high: int, most: int, real: np.dtype) -> SentMessages:
        """The messages due after ``low .. high-1`` arrivals, padded to ``most`` each."""
        s, slots = self.schedule, self.slots
        per = np.diff(slots.write_bounds)[low:high]
        active = np.arange(most) < per[:, None]
        index = np.where(active, slots.write_bounds[low:high, None] + np.arange(most), 0)
        job = slots.write_job[index]
        columns: dict[str, Any] = {
            "active": active,
            "slot": slots.write_slot[index],
            "client": slots.write_client[index].astype(np.int32),
            "time": s.dispatch_time[job].astype(real),
            "version": s.version[job].astype(np.int32),
            "steps": s.local_steps[job].astype(np.int32),
        }
        return SentMessages(**columns)
