"""The oracle: a plain Python event loop, one client at a time, with the same kernels.

Slow on purpose and simple on purpose: no waves, slots, rows or padding. Every other engine must
agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.clock import check_schedule, trained_in_vain
from fedjax_async.engine.evaluation import Points, make_evaluate, owners
from fedjax_async.engine.kernels import finished
from fedjax_async.engine.own import differs, make_own, now_of, own_tests, rows_at
from fedjax_async.engine.pieces import Client, Pieces, Server, bound, facts_of, rule_of
from fedjax_async.engine.probes import checked, columns_of, held_out_rows, numbers_of, probe_table, resolved_probes
from fedjax_async.engine.record import Outcome
from fedjax_async.engine.run import Progress, refuse
from fedjax_async.engine.scores import Scores
from fedjax_async.engine.world import corrupt
from fedjax_async.local import job_key, run_steps
from fedjax_async.server import closed
from fedjax_async.types import (
    Arrival,
    ClientAlgorithm,
    ClientData,
    Facts,
    Key,
    Message,
    Model,
    Params,
    Parts,
    Request,
    Schedule,
    ServerAlgorithm,
    State,
)


def _poisoned(client: ClientAlgorithm, spoiled: Any) -> ClientAlgorithm:
    """The client, whose uploads arrive as NaN where ``spoiled`` holds."""

    def finish(work: State, message: Message, state: State) -> tuple[Params, State]:
        upload, after = client.finish(work, message, state)
        return jax.tree.map(lambda leaf: jnp.where(spoiled, jnp.full_like(leaf, jnp.nan), leaf), upload), after

    return client._replace(finish=finish)


@lru_cache(maxsize=64)
def _job(client: Client) -> Any:
    def job(
        hyper: Any, root: Key, number: Any, version: Any, message: Any, state: Any, data: ClientData, who: Any,
        steps: Any, limit: Any, spoiled: Any, applied: Any,
    ):  # fmt: skip
        one = _poisoned(bound(client, hyper), spoiled)
        message = message._replace(version=version)
        work = run_steps(one, job_key(root, who, number), message, state, data, steps)
        return finished(one, work, message, state, limit, jnp.bool_(False), applied)

    return jax.jit(job)


@lru_cache(maxsize=64)
def _server(server: Server, num_clients: int, every_closes: bool) -> tuple[Any, ...]:
    """The rule's ``(init, receive, close, dispatch, params)``, compiled; ``known``: hyperparameters and facts."""

    def of(use: Callable[..., Any]) -> Any:
        def function(known: tuple[Any, Any], *given: Any) -> Any:
            return use(rule_of(server, known[0], Facts(num_clients, every_closes, *known[1])), *given)

        return jax.jit(function)

    named = {name: of(lambda rule, *given, name=name: getattr(rule, name)(*given)) for name in ServerAlgorithm._fields}
    return named["init"], named["receive"], of(closed), named["dispatch"], named["params"]


@lru_cache(maxsize=64)
def _evaluate(model: Model, total: int, labels: bool, num_clients: int | None) -> Any:
    return jax.jit(make_evaluate(model, total=total, labels=labels, num_clients=num_clients))


@lru_cache(maxsize=64)
def _own(server: Server, client: Client, model: Model, labels: bool, num_clients: int, every_closes: bool) -> Any:
    own = make_own(model, labels)

    def evaluate(known: tuple[Any, Any], state: State, memory: State, kept: State, *given: Any) -> dict[str, Any]:
        rule = rule_of(server, known[0], Facts(num_clients, every_closes, *known[1]))
        return own(rule, bound(client, known[0]), state, rows_at(memory, 0), rows_at(kept, 0), *given)

    return jax.jit(evaluate)


@lru_cache(maxsize=64)
def _probe(name: str, function: Callable[..., Any]) -> Any:
    return jax.jit(checked(name, function))


def _table(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([np.asarray(row[name]) for row in rows]) for name in (rows[0] if rows else {})}


def run_reference(  # noqa: PLR0915 (one loop, read from top to bottom)
    pieces: Pieces,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: Points,
    *,
    per_client: bool = False,
    on_bad: str = "reject",
    norm_limit: float = float("inf"),
    probes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Walk through the schedule, arrival by arrival."""
    server, client, model, data, numbers = pieces
    schedule = check_schedule(schedule)
    resolved = resolved_probes(probes, data, len(schedule.job))
    shapes = columns_of(resolved, pieces, params)
    chosen = {name: numbers_of(probe, len(schedule.job)) for name, probe in resolved.items()}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in resolved}
    facts = facts_of(schedule)
    init, receive, close, dispatch, params_of = _server(server, facts.num_clients, facts.every_closes)
    labels = bool(np.issubdtype(data.test_y.dtype, np.integer))
    score = _evaluate(model, len(data.test_y), labels, len(data.size) if per_client else None)
    pool = jax.device_put((data.x, data.y, data.order))
    tests = jax.device_put((data.test_x, data.test_y, owners(data) if per_client else None))
    real = jnp.result_type(float)
    hyper = {name: jnp.asarray(value, real) for name, value in numbers.items()}
    known = (hyper, (np.int32(facts.updates), np.int32(facts.server_steps)))
    spoiled = corrupt(schedule)

    state, row = init(known, params)
    memory = [row] * len(data.size)
    client_state = [bound(client, hyper).init(params)] * len(data.size)
    messages: dict[int, Any] = {}
    latest: dict[int, int] = {}  # the last job sent to each client
    sent = 0
    records: list[dict[str, Any]] = []
    in_vain = trained_in_vain(schedule)
    noted_in_vain: dict[int, dict[str, Any]] = {}  # job -> what was recorded
    scores = Scores([points], [np.arange(len(schedule.job))])
    validation, test = (jax.device_put(held_out_rows(data, kind)) for kind in ("validation", "test"))

    def own_data(who: Any) -> ClientData:
        return ClientData(pool[0], pool[1], pool[2], data.offset[who], data.size[who])

    def parts_of(who: Any) -> Parts:
        return Parts(
            own_data(who),
            ClientData(pool[0], pool[1], validation[0], validation[1][who], validation[2][who]),
            ClientData(tests[0], tests[1], test[0], test[1][who], test[2][who]),
        )

    def train(job: int, applied: bool, spoiled: bool = False) -> tuple[Any, Message, Any, Any, dict[str, Any]]:
        who, message = schedule.client[job], messages.pop(job)
        own = own_data(who)
        upload, client_state[who], norm, accepted, noted = _job(client)(
            hyper, key, schedule.number[job], np.int32(schedule.version[job]), message, client_state[who], own, who,
            schedule.local_steps[job], jnp.asarray(norm_limit, real), spoiled, applied,
        )  # fmt: skip
        return upload, message, norm, accepted, noted

    def send(position: int) -> None:
        nonlocal sent
        while sent < len(schedule.client) and schedule.dispatched_after[sent] == position:
            who = schedule.client[sent]
            before = latest.get(who, -1)
            keeps = before >= 0 and bool(jax.tree.leaves(client_state[who]))
            if keeps and in_vain[before]:
                noted_in_vain[before] = train(before, applied=False)[-1]  # what the client keeps goes on from there
            request = Request(
                who, jnp.asarray(schedule.dispatch_time[sent], real), np.int32(schedule.version[sent]),
                schedule.local_steps[sent], jnp.asarray(data.size[who], real),
            )  # fmt: skip
            messages[sent], memory[who] = dispatch(known, state, memory[who], request)
            latest[who] = sent
            sent += 1

    own = jax.device_put(own_tests(data, schedule)) if per_client and differs(pieces, params) else None
    score_own = _own(server, client, model, labels, facts.num_clients, facts.every_closes)

    def evaluate(run: int, position: int) -> Any:
        del run
        scored = score(params_of(known, state), *tests)
        if own is None:
            return scored
        now = now_of(points, schedule, position, real)
        rows = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *table) for table in (memory, client_state))
        return scored | score_own(known, state, *rows, now, *tests[:2], own)

    send(0)
    scores.take(0, evaluate)
    for e, j in enumerate(schedule.job):
        who = schedule.client[j]
        upload, message, norm, accepted, noted = train(int(j), applied=True, spoiled=bool(spoiled[e]))
        arrival = Arrival(
            upload=upload,
            start=message.params,
            staleness=jnp.int32(schedule.staleness[e]),
            weight=jnp.asarray(data.size[who] if accepted else 0, real),
            client=who,
            time=jnp.asarray(schedule.time[e], real),
            closes=schedule.closes[e],
            local_steps=schedule.local_steps[j],
            extra=message.extra,
        )
        for name, probe in resolved.items():
            if e in chosen[name]:
                given = (state, memory[who], arrival, parts_of(who))
                seen[name].append(jax.device_get(_probe(name, probe.function)(*given)))
        state, memory[who], info = receive(known, state, memory[who], arrival)
        if schedule.closes[e]:
            state, memory[who] = close(known, state, memory[who])
        records.append(
            {"weight": info.weight} | dict(info.columns) | noted | {"upload_norm": norm, "accepted": accepted}
        )
        refuse(int(not accepted), on_bad)
        send(e + 1)
        scores.take(e + 1, evaluate)
        if progress is not None:
            now, staleness = float(schedule.time[e]), float(schedule.staleness[e])
            progress(e + 1, len(schedule.job), time=now, staleness=staleness, accuracy=scores.latest())
    return Outcome(
        params=jax.device_get(params_of(known, state)),
        scores=scores.columns(0),
        records=_table(records),
        in_vain=np.array(list(noted_in_vain), np.int64),
        in_vain_records=_table(list(noted_in_vain.values())),
        counters={"waves": len(records), "mean_width": 1.0},
        probes={
            name: probe_table(
                schedule,
                chosen[name],
                chosen[name],
                {c: np.array([row[c] for row in seen[name]], shape.dtype) for c, shape in shapes[name].items()},
            )
            for name in resolved
        },
    )
