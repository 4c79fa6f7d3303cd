"""The oracle of decentralised runs: a plain Python loop, one event at a time.

Slow and simple on purpose: no waves, slots or rows of many nodes. Messages stay in a dictionary until their last reader
has mixed them. It calls the algorithms and the model themselves, and has its own evaluation. From the engine it takes
types, the checks of user input and the lists of each node's test rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from fedjax_async.base import check, tree
from fedjax_async.clock import at_or_before
from fedjax_async.engine.components import Client, Components, Hyper, Peer, bound
from fedjax_async.engine.peer_points import GLOBAL_TESTS, checked_points
from fedjax_async.engine.probes import held_out_rows
from fedjax_async.engine.record import EngineResult, Progress, refuse
from fedjax_async.engine.reference_scores import Tests, table_of
from fedjax_async.engine.watching import Observer
from fedjax_async.local import job_key, run_steps
from fedjax_async.peers import Event
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.peers.statistics import mass_after_mixing
from fedjax_async.server.running_statistics import weights_in
from fedjax_async.types import Array, ClientData, Key, Params, State

MassOfEvent = tuple[Array, Array]  # of a node after mixing, and the part of it that it keeps


@lru_cache(maxsize=64)
def _mixing(peer: Peer) -> dict[str, Callable[..., State]]:
    """The functions of a node before its training, compiled; their first argument is ``hyper``."""

    def add(
        hyper: Hyper, inbox: State, row: State, message: State, weight: Array, corrupt: Array
    ) -> tuple[State, Array]:
        refused = corrupt | ~tree.is_finite(message)
        added = bound(peer, hyper).add(inbox, row, message, weight)
        return tree.where(refused, inbox, added), refused

    named: dict[str, Callable[..., State]] = {
        name: lambda hyper, *given, name=name: getattr(bound(peer, hyper), name)(*given) for name in _FUNCTIONS
    }

    def wake(hyper: Hyper, row: State, inbox: State, root: Key, who: Array, number: Array, mass: MassOfEvent) -> State:
        return bound(peer, hyper).wake(row, inbox, Event(job_key(root, who, number), *mass))

    return {name: jax.jit(function) for name, function in (named | {"add": add, "wake": wake}).items()}


_FUNCTIONS = ("init", "open", "params")


@lru_cache(maxsize=64)
def _training(peer: Peer, client: Client) -> Wrapped:
    """Compiled: local training and push, the part of an event after the mixing."""

    def train(
        hyper: Hyper, root: Key, row: State, kept: State, data: ClientData, who: Array, number: Array, steps: Array,
        mass: MassOfEvent, limit: Array,
    ) -> tuple[State, State, State, dict[str, Array]]:  # fmt: skip
        node, one, key = bound(peer, hyper), bound(client, hyper), job_key(root, who, number)
        message = node.start(row)._replace(version=number)
        upload, after = one.finish(run_steps(one, key, message, kept, data, steps), message, kept)
        info = {} if one.info is None else one.info(after)
        norm = tree.norm(weights_in(upload))
        finite = tree.is_finite((upload, after)) & jnp.isfinite(norm)
        accepted = finite & (norm <= limit)
        upload = jax.tree.map(lambda leaf: jnp.where(accepted, leaf, jnp.zeros_like(leaf)), upload)
        row, messages, columns = node.push(row, upload, Event(key, *mass))
        record = {**columns, **info, "upload_norm": jnp.where(finite, norm, 0.0), "accepted": accepted}
        return row, tree.where(accepted, after, kept), messages, record

    return jax.jit(train)


class _Nodes:
    """All nodes, the messages that are still to be read, and what happens at an event."""

    def __init__(self, components: Components, schedule: PeerSchedule, params: Params, key: Key, limit: float):
        self.components, self.schedule, self.key = components, schedule, key
        self.real = np.dtype(jnp.result_type(float))
        self.limit = np.asarray(limit, self.real)
        self.hyper = {name: jnp.asarray(value, self.real) for name, value in components.hyper.items()}
        data = components.data
        self.pool = jax.device_put((data.x, data.y, data.order))
        self.peer = _mixing(components.rule)
        self.train = _training(components.rule, components.client)
        count = schedule.num_clients
        self.rows = [self.peer["init"](self.hyper, params)] * count
        self.kept = [bound(components.client, self.hyper).init(params)] * count
        self.messages: dict[tuple[int, int], State] = {}  # (event, fragment) -> message
        pairs = zip(schedule.source.tolist(), schedule.fragment.tolist())
        self.readers: dict[tuple[int, int], int] = {}  # inboxes that have not yet mixed the message
        for pair in pairs:
            self.readers[pair] = self.readers.get(pair, 0) + 1
        pushes = zip(schedule.push_event.tolist(), schedule.push_fragment.tolist(), schedule.receiver.tolist())
        self.corrupt = {push for push, bad in zip(pushes, schedule.corrupt.tolist()) if bad}
        self.mass = mass_after_mixing(schedule)

    def event(self, e: int) -> dict[str, object]:
        """Mix, train and push; returns what is recorded of the event."""
        s, who = self.schedule, int(self.schedule.client[e])
        row, refused = self.rows[who], 0
        inbox = self.peer["open"](self.hyper, row)
        for d in range(s.inbox_bounds[e], s.inbox_bounds[e + 1]):
            pair = int(s.source[d]), int(s.fragment[d])
            message, weight = self.messages[pair], jnp.asarray(s.weight[d], self.real)
            inbox, bad = self.peer["add"](self.hyper, inbox, row, message, weight, (*pair, who) in self.corrupt)
            refused += int(bad)
            self.readers[pair] -= 1
            if not self.readers[pair]:
                del self.messages[pair]
        mass = jnp.asarray(self.mass[e], self.real), jnp.asarray(s.mass[e], self.real)
        row = self.peer["wake"](self.hyper, row, inbox, self.key, np.int32(who), s.number[e], mass)
        x, y, order = self.pool
        part = ClientData(x, y, order, self.components.data.offset[who], self.components.data.size[who])
        self.rows[who], self.kept[who], messages, record = self.train(
            self.hyper, self.key, row, self.kept[who], part, np.int32(who), s.number[e], s.local_steps[e],
            mass, self.limit,
        )  # fmt: skip
        for fragment in range(s.fragments):
            if self.readers.get((e, fragment)):
                self.messages[e, fragment] = jax.tree.map(lambda leaf, f=fragment: leaf[f], messages)
        return {**record, "refused_messages": refused}

    def model(self, who: int) -> Params:
        """The model of a node."""
        return self.peer["params"](self.hyper, self.rows[who])


class _Tests:
    """Scores of the nodes' models: on their own test parts, and on the global test set."""

    def __init__(self, components: Components, schedule: PeerSchedule) -> None:
        data, self.schedule = components.data, schedule
        self.tests, self.total = Tests(components.model, data.test_x, data.test_y), len(data.test_y)
        order, offset, size = held_out_rows(data, "test")
        self.parts = [order[first : first + count] for first, count in zip(offset, size)]
        self.real = np.dtype(jnp.result_type(float))

    def mean(self, params: Params, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean loss and accuracy over rows of the test set; NaN without rows."""
        if not len(rows):
            return self.real.type(np.nan), self.real.type(np.nan)
        loss, hit = (values.mean(dtype=np.float64).astype(self.real) for values in self.tests.each(params, rows))
        return loss, hit

    def all(self, models: list[Params], time: float, with_global: bool | None) -> dict[str, object]:
        """One evaluation; ``with_global``: also on the global test set (False: NaN, None: without these columns)."""
        online = (self.schedule.joined <= time) & (time < self.schedule.left)
        own = [self.mean(model, rows) for model, rows in zip(models, self.parts)]
        found: dict[str, object] = {"loss": [loss for loss, _ in own], "accuracy": [hit for _, hit in own]}
        rows = np.arange(self.total) if with_global else np.zeros(0, np.int64)
        if with_global is not None:
            whole = [self.mean(model, rows) for model in models]
            found |= {"global_loss": [loss for loss, _ in whole], "global_accuracy": [hit for _, hit in whole]}
        nan = self.real.type(np.nan)
        there = [model for model, yes in zip(models, online) if yes]
        apart, scores = nan, (nan, nan)
        if there:
            average = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *there)
            away = [jax.tree.map(np.subtract, weights_in(model), weights_in(average)) for model in there]
            each = [sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(d)) for d in away]
            apart, scores = self.real.type(np.mean(each)), self.mean(average, rows)
        found["consensus"] = apart
        return found if with_global is None else found | dict(zip(("average_loss", "average_accuracy"), scores))


def run_peer_reference(
    components: Components,
    schedule: PeerSchedule,
    params: Params,
    key: Key,
    points: np.ndarray,
    *,
    global_tests: str = "all",
    on_bad: str = "reject",
    norm_limit: float = float("inf"),
    progress: Progress | None = None,
    observer: Observer | None = None,
) -> EngineResult:
    """Walk through the schedule, event by event; the same result as ``run_peer_waves``.

    It has no probes and no scores on validation parts.
    """
    times = checked_points(points)
    check.one_of("global_tests", global_tests, GLOBAL_TESTS)
    nodes, tests = _Nodes(components, schedule, params, key, norm_limit), _Tests(components, schedule)
    by_end = np.argsort(schedule.end, kind="stable")
    visible = at_or_before(schedule.end[by_end], times)  # how many of by_end each evaluation sees
    events = np.sort(by_end[: visible[-1]])
    # as the next evaluation sees them
    shown = [jax.device_get(nodes.model(who)) for who in range(schedule.num_clients)]
    latest: dict[int, Params] = {}  # event -> the node's model after it, until an evaluation has seen it
    scores: list[dict[str, np.ndarray]] = []
    records: list[dict[str, object]] = []
    kept: list[tuple[int, Params]] = []

    def evaluate(row: int) -> bool:
        """Evaluate; returns whether the observer stops the run."""
        first = visible[row - 1] if row else 0
        for e in by_end[first : visible[row]].tolist():  # a node's events come in their order
            shown[schedule.client[e]] = latest.pop(e)
        edge = row in (0, len(times) - 1)
        with_global = {"all": True, "ends": edge, "never": None}[global_tests]
        scores.append({n: np.asarray(v) for n, v in tests.all(shown, times[row], with_global).items()})
        if observer is None:
            return False
        verdict = observer.observe(row, {name: np.array(value) for name, value in scores[-1].items()}, False)
        if verdict.keep:
            kept[:] = [(row, _stacked(shown))]
        return verdict.stop

    ready = [int(max(by_end[:count], default=-1)) for count in visible]  # the last event before each evaluation
    row, ended = 0, False
    while row < len(times) and ready[row] < 0 and not ended:
        ended, row = evaluate(row), row + 1
    for done, e in enumerate(events.tolist(), 1):
        if ended:
            break
        records.append(nodes.event(e))
        who = int(schedule.client[e])
        latest[e] = jax.device_get(nodes.model(who))
        refuse(int(not records[-1]["accepted"]), on_bad)
        while row < len(times) and ready[row] <= e and not ended:
            ended, row = evaluate(row), row + 1
        if progress is not None:
            now = {"time": float(schedule.end[e]), "accuracy": _mean_of(scores[-1]["accuracy"])}
            progress(done, len(events), staleness=float("nan"), **now)
    executed = np.sort(by_end[: visible[row - 1]])
    position = {e: i for i, e in enumerate(events.tolist())}
    return EngineResult(
        params=_stacked(shown),
        scores=table_of(scores),
        records=table_of([jax.device_get(records[position[e]]) for e in executed.tolist()]),
        counters={"waves": len(executed), "mean_width": 1.0},
        events=executed,
        rows=row,
        kept=kept[-1] if kept else None,
    )


def _stacked(models: list[Params]) -> Params:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *models)


def _mean_of(values: np.ndarray) -> float:
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else float("nan")
