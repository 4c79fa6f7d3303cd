"""The oracle: a plain Python event loop, one client at a time.

Slow and simple on purpose: no waves, slots, rows or padding. Every other engine must agree with it, so it shares no
code with what it judges: it calls the algorithms and the model themselves, decides on its own which uploads are
rejected, and has its own evaluation. From the engine it takes types (``Components``, ``EvaluationPoints``,
``EngineResult``), the helpers that build rule and client from the components, the checks of user input and the lists of
each client's test rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from fedjax_async.base import tree
from fedjax_async.clock import check_schedule, trained_in_vain, with_derived_columns
from fedjax_async.engine.components import Client, Components, Hyper, Server, bound, facts_of
from fedjax_async.engine.evaluation import EvaluationPoints, owners
from fedjax_async.engine.measures import NOTHING, Measures, require_measurable
from fedjax_async.engine.probes import held_out_rows
from fedjax_async.engine.record import EngineResult, Progress, refuse
from fedjax_async.engine.reference_measures import MeasuresByHand
from fedjax_async.engine.reference_scores import ReferenceProbes, Tests, mean_of, table_of
from fedjax_async.engine.watching import Observer
from fedjax_async.local import arrival_key, job_key, run_steps
from fedjax_async.server import begun, closed
from fedjax_async.server.running_statistics import weights_in
from fedjax_async.types import Array, Arrival, ClientData, Facts, Info, Key, Message, Params, Request, Schedule, State

Trained = tuple[State, State, Array, bool, dict[str, Array]]  # upload, state of the client, norm, accepted, info


@lru_cache(maxsize=64)
def _job(client: Client) -> Wrapped:
    """Compiled: one whole job, and what is recorded of its upload."""

    def job(
        hyper: Hyper, root: Key, number: Array, version: Array, message: Message, kept: State, data: ClientData,
        who: Array, steps: Array,
    ) -> tuple[State, State, State, dict[str, Array], Array, Array]:  # fmt: skip
        one = bound(client, hyper)
        message = message._replace(version=version)
        work = run_steps(one, job_key(root, who, number), message, kept, data, steps)
        upload, after = one.finish(work, message, kept)
        unsent = after if one.unsent is None else one.unsent(kept, after)
        info = {} if one.info is None else one.info(after)
        return upload, after, unsent, info, tree.norm(weights_in(upload)), tree.is_finite((upload, after))

    return jax.jit(job)


@lru_cache(maxsize=64)
def _server(server: Server) -> dict[str, Wrapped]:
    """The rule's functions, compiled; their first argument is ``hyper``."""

    def compiled(use: Callable[..., object]) -> Wrapped:
        return jax.jit(lambda hyper, *given: use(bound(server, hyper), *given))

    named = ("receive", "dispatch", "params")
    found = {name: compiled(lambda rule, *given, name=name: getattr(rule, name)(*given)) for name in named}
    return found | {"init": compiled(begun), "close": compiled(closed)}


@lru_cache(maxsize=64)
def _own_params(client: Client) -> Wrapped:
    """Compiled: the model that a client would use after a message."""

    def own_params(hyper: Hyper, message: Message, kept: State, server_params: Params) -> Params:
        own = bound(client, hyper).own
        if own is not None:
            return own(message, kept)
        return jax.tree.map(lambda sent, full: sent.astype(full.dtype), message.params, server_params)

    return jax.jit(own_params)


class _Federation:
    """Everything that changes during a run, and what changes it: ``send``, ``train``, ``receive``; and ``evaluate``."""

    def __init__(
        self, components: Components, schedule: Schedule, params: Params, key: Key, norm_limit: float, per_client: bool,
        measures: Measures = NOTHING, facts: Facts | None = None,
    ) -> None:  # fmt: skip
        self.components, self.key = components, key
        self.real = np.dtype(jnp.result_type(float))
        self.norm_limit = np.asarray(norm_limit, self.real)
        facts, data = facts_of(schedule) if facts is None else facts, components.data
        self.hyper = {name: jnp.asarray(value, self.real) for name, value in components.hyper.items()}
        totals = np.int32(facts.updates), np.int32(facts.server_steps)
        self.rule = _server(components.rule)
        self.pool = jax.device_put((data.x, data.y, data.order))
        known = Facts(facts.num_clients, facts.every_closes, *totals)
        self.state, memory = self.rule["init"](self.hyper, params, known)
        client = bound(components.client, self.hyper)
        self.memory, self.kept = [memory] * len(data.size), [client.init(params)] * len(data.size)
        self.messages: dict[int, Message] = {}  # of jobs that are under way
        self.follow(schedule)
        self.early: dict[int, Trained] = {}  # job -> its result, if it was trained before it arrives
        self.noted_in_vain: dict[int, dict[str, Array]] = {}  # job trained in vain -> what was recorded
        self.latest: dict[int, int] = {}  # client -> its last job
        self.sent, self.malicious = 0, data.malicious
        self.tests = Tests(components.model, data.test_x, data.test_y)
        order, offset, size = held_out_rows(data, "validation")
        rows = np.concatenate([order[first : first + count] for first, count in zip(offset, size)])
        self.validation = Tests(components.model, data.x[rows], data.y[rows]) if len(rows) else None
        self.per_client = per_client and owners(data) is not None  # which refuses data without tests of clients
        self.has_own = per_client and (bool(jax.tree.leaves(memory)) or client.own is not None)
        self.by_hand = MeasuresByHand(components, measures, self.hyper, key)

    def follow(self, schedule: Schedule) -> None:
        """Go on with this schedule, which extends the one before."""
        self.schedule, self.staleness = schedule, schedule.staleness
        self.corrupt, self.in_vain = with_derived_columns(schedule).corrupt, trained_in_vain(schedule)

    def part(self, who: int) -> ClientData:
        """The training part of a client."""
        x, y, order = self.pool
        return ClientData(x, y, order, self.components.data.offset[who], self.components.data.size[who])

    def trained(self, job: int, applied: bool = True) -> Trained:
        """The result of a job; nothing changes.

        The norm is that of the client's upload, NaN if the upload or the state is not finite.
        """
        s, who, message = self.schedule, self.schedule.client[job], self.messages[job]
        upload, after, unsent, info, norm, finite = _job(self.components.client)(
            self.hyper, self.key, s.number[job], np.int32(s.version[job]), message, self.kept[who], self.part(who), who,
            s.local_steps[job],
        )  # fmt: skip
        finite = bool(finite) and bool(np.isfinite(norm))
        accepted = finite and not (applied and self.corrupt[job]) and bool(norm <= self.norm_limit)
        if not accepted:
            upload = jax.tree.map(jnp.zeros_like, upload)
        kept = (after if applied else unsent) if accepted else self.kept[who]
        return upload, kept, norm if finite else jnp.full_like(norm, jnp.nan), accepted, info

    def train(self, job: int, applied: bool = True) -> tuple[State, Message, Array, bool, dict[str, Array]]:
        """``(upload, message, norm, accepted, info)`` of a job; updates the state of its client."""
        left = self.early.pop(job) if applied and job in self.early else self.trained(job, applied)
        upload, self.kept[self.schedule.client[job]], norm, accepted, info = left
        return upload, self.messages.pop(job), norm, accepted, info

    def send(self, position: int) -> None:
        """Send the messages that leave after ``position`` arrivals."""
        s = self.schedule
        while self.sent < len(s.client) and s.dispatched_after[self.sent] == position:
            job, who = self.sent, s.client[self.sent]
            before = self.latest.get(who, -1)
            if before >= 0 and self.in_vain[before] and jax.tree.leaves(self.kept[who]):
                self.noted_in_vain[before] = self.train(before, applied=False)[-1]  # the client goes on from there
            request = self.request(who, s.dispatch_time[job], s.version[job], s.local_steps[job])
            self.messages[job], self.memory[who] = self.rule["dispatch"](
                self.hyper, self.state, self.memory[who], request
            )
            self.latest[who] = job
            self.sent += 1

    def request(self, who: int, time: float, version: int, local_steps: int) -> Request:
        """The request for a client's message."""
        weight = jnp.asarray(self.components.data.size[who], self.real)
        return Request(np.int32(who), jnp.asarray(time, self.real), np.int32(version), np.int32(local_steps), weight)

    def arrival(self, e: int, upload: State, message: Message, accepted: bool) -> Arrival:
        """What the server gets with arrival ``e``."""
        s, job = self.schedule, self.schedule.job[e]
        return Arrival(
            upload=upload,
            start=message.params,
            staleness=jnp.int32(self.staleness[e]),
            weight=jnp.asarray(self.components.data.size[s.client[job]] if accepted else 0, self.real),
            client=s.client[job],
            time=jnp.asarray(s.time[e], self.real),
            closes=s.closes[e],
            local_steps=s.local_steps[job],
            extra=message.extra,
            key=jax.jit(arrival_key)(self.key, s.client[job], s.number[job]),
            malicious=np.bool_(self.malicious is not None and self.malicious[s.client[job]]),
        )

    def receive(self, arrival: Arrival) -> Info:
        """Apply an arrival, and close the server step if it completes it; returns the rule's ``Info``."""
        who = int(arrival.client)
        self.state, self.memory[who], info = self.rule["receive"](self.hyper, self.state, self.memory[who], arrival)
        if arrival.closes:
            self.state, self.memory[who] = self.rule["close"](self.hyper, self.state, self.memory[who])
        return info

    def params(self) -> Params:
        """The global model."""
        return self.rule["params"](self.hyper, self.state)

    def on_client(self, who: int, message: Message, steps: int) -> Params:
        """The model that a client would use after a message."""
        message = message._replace(version=np.int32(steps))
        return _own_params(self.components.client)(self.hyper, message, self.kept[who], self.params())

    def evaluate(self, time: float, steps: int) -> dict[str, np.ndarray]:
        """Scores of the global model, and of the clients' own models, if they have any, on their own tests."""
        order, offset, size = held_out_rows(self.components.data, "test")
        rows = [order[offset[who] : offset[who] + size[who]] for who in range(len(self.kept))]
        parts = rows if self.per_client else None
        found = self.tests.whole(self.params(), parts)
        if self.validation is not None:
            held_out = self.validation.whole(self.params(), None)
            found |= {f"validation_{name}": score for name, score in held_out.items()}
        first = dict(zip(self.schedule.client[::-1].tolist(), self.schedule.local_steps[::-1].tolist()))

        def own_model(who: int) -> Params:
            request = self.request(who, time, steps, first.get(who, 1))
            message, _ = self.rule["dispatch"](self.hyper, self.state, self.memory[who], request)
            return self.on_client(who, message, steps)

        def start_of(who: int) -> Params:
            private = self.components.model.private is not None
            return self.on_client(who, Message(self.params()), steps) if private else self.params()

        if self.by_hand.measures.wants_anything():
            own_or_none = own_model if self.has_own else None
            found |= self.by_hand.all(self.params(), steps, self.per_client, self.pool, rows, start_of, own_or_none)
        if not self.has_own:
            return found
        own = [self.tests.each(own_model(who), own_rows) for who, own_rows in enumerate(rows)]
        columns = {name: [mean_of(scores[k]) for scores in own] for k, name in enumerate(("loss", "accuracy"))}
        return found | {f"client_own_{name}": np.stack(values) for name, values in columns.items()}


class Walk:
    """A run that goes through a schedule, arrival by arrival, and what it has recorded.

    The options are as in ``run_waves``; ``facts``: by default those of the schedule. ``follow`` replaces the schedule
    and the points by longer ones.
    """

    def __init__(
        self, components: Components, schedule: Schedule, params: Params, key: Key, points: EvaluationPoints, *,
        per_client: bool = False, on_bad: str = "reject", norm_limit: float = float("inf"),
        probes: Mapping[str, object] | None = None, measures: Measures = NOTHING, progress: Progress | None = None,
        observer: Observer | None = None, facts: Facts | None = None,
    ) -> None:  # fmt: skip
        require_measurable(components.data, measures)
        self.probing = ReferenceProbes(components, schedule, params, probes)
        self.run = _Federation(components, schedule, params, key, norm_limit, per_client, measures, facts)
        self.points, self._on_bad, self._progress, self._observer = points, on_bad, progress, observer
        self.records: list[dict[str, object]] = []
        self.scores: list[dict[str, np.ndarray]] = []
        self._kept: list[tuple[int, Params]] = []
        self._ended: list[Params] = []  # the model of the evaluation at which the observer stopped the run

    @property
    def is_over(self) -> bool:
        """Whether an observer has stopped the run. If uploads differ in size, all are trained, to count their bytes."""
        return bool(self._ended and self.records and "bits" not in self.records[-1])

    def follow(self, schedule: Schedule, points: EvaluationPoints) -> None:
        """Go on with a longer schedule and points."""
        self.run.follow(schedule)
        self.points = points

    def evaluate(self, position: int) -> None:
        """Evaluate after ``position`` arrivals, if an evaluation is due."""
        due = np.flatnonzero(self.points.position == position)
        if len(due) and not self._ended:
            closed_steps = int(np.count_nonzero(self.run.schedule.closes[:position]))
            found = self.run.evaluate(self.points.time[due[0]], closed_steps)
            for row in due:
                self.scores.append(found)
                if self._observer is not None:
                    self._observe(self._observer, int(row), {name: np.array(value) for name, value in found.items()})
                if self._ended:
                    return

    def _observe(self, observer: Observer, row: int, found: dict[str, np.ndarray]) -> None:
        verdict = observer.observe(row, found, False)
        model = jax.device_get(self.run.params()) if verdict.keep or verdict.stop else None
        self._kept.extend([(row, model)] if verdict.keep else [])
        self._ended.extend([model] if verdict.stop else [])

    def arrive(self, e: int, total: int) -> None:
        """Train the job of arrival ``e`` and apply it; ``total``: arrivals of the run."""
        run = self.run
        upload, message, norm, accepted, noted = run.train(int(run.schedule.job[e]))
        arrival = run.arrival(e, upload, message, accepted)
        self.probing.probe(run, e, arrival)
        info = run.receive(arrival)
        if run.corrupt[int(run.schedule.job[e])] or not bool(np.isfinite(norm)):
            norm = jnp.zeros_like(norm)
        self.records.append(
            {"weight": info.weight} | dict(info.columns) | noted | {"upload_norm": norm, "accepted": accepted}
        )
        refuse(int(not accepted and not self._ended), self._on_bad)
        if self._progress is not None:
            now = {"time": float(run.schedule.time[e]), "staleness": float(run.staleness[e])}
            accuracy = float(self.scores[-1]["accuracy"]) if self.scores else float("nan")
            self._progress(e + 1, total, **now, accuracy=accuracy)

    def result(self) -> EngineResult:
        """The result of the run so far."""
        run, until = self.run, int(self.points.position[len(self.scores) - 1])
        return EngineResult(
            params=self._ended[0] if self._ended else jax.device_get(run.params()),
            scores=table_of(self.scores),
            records=table_of(self.records),
            in_vain=np.array(list(run.noted_in_vain), np.int64),
            in_vain_records=table_of(list(run.noted_in_vain.values())),
            counters={"waves": until, "mean_width": 1.0},
            probes=self.probing.tables(run.schedule, until),
            rows=len(self.scores),
            kept=self._kept[-1] if self._kept else None,
        )


def run_reference(
    components: Components, schedule: Schedule, params: Params, key: Key, points: EvaluationPoints, **options: Any
) -> EngineResult:
    """Walk through the schedule, arrival by arrival; the same result as ``run_waves``. ``options``: as in ``Walk``."""
    schedule = check_schedule(schedule)
    walk = Walk(components, schedule, params, key, points, **options)
    walk.run.send(0)
    walk.evaluate(0)
    for e in range(len(schedule.job)):
        if walk.is_over:
            break
        walk.arrive(e, len(schedule.job))
        walk.run.send(e + 1)
        walk.evaluate(e + 1)
    return walk.result()
