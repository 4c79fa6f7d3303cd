"""The oracle: a plain Python event loop, one client at a time, with the same kernels.

Slow on purpose and simple on purpose: no waves, slots, rows or padding. Every other engine must
agree with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.engine.evaluation import Points, make_evaluate, owners
from fedjax_async.engine.kernels import finished
from fedjax_async.engine.pieces import Pieces, bound
from fedjax_async.engine.programs import Client, Server
from fedjax_async.engine.record import Outcome
from fedjax_async.engine.run import Progress, refuse
from fedjax_async.engine.scores import Scores
from fedjax_async.engine.world import corrupt
from fedjax_async.local import job_key, run_steps
from fedjax_async.types import Arrival, ClientAlgorithm, ClientData, Key, Message, Model, Params, Schedule, State


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
        steps: Any, limit: Any, spoiled: Any,
    ):  # fmt: skip
        one = _poisoned(bound(client, hyper), spoiled)
        message = message._replace(version=version)
        work = run_steps(one, job_key(root, who, number), message, state, data, steps)
        return finished(one, work, message, state, limit, jnp.bool_(False))

    return jax.jit(job)


@lru_cache(maxsize=64)
def _server(server: Server) -> tuple[Any, Any, Any, Any]:
    init = jax.jit(lambda hyper, params: bound(server, hyper).init(params))
    receive = jax.jit(lambda hyper, *given: bound(server, hyper).receive(*given))
    dispatch = jax.jit(lambda hyper, *given: bound(server, hyper).dispatch(*given))
    return init, receive, dispatch, jax.jit(lambda hyper, state: bound(server, hyper).params(state))


@lru_cache(maxsize=64)
def _evaluate(model: Model, total: int, labels: bool, num_clients: int | None) -> Any:
    return jax.jit(make_evaluate(model, total=total, labels=labels, num_clients=num_clients))


def run_reference(
    pieces: Pieces,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: Points,
    *,
    per_client: bool = False,
    on_bad: str = "reject",
    norm_limit: float = float("inf"),
    progress: Progress | None = None,
) -> Outcome:
    """Walk through the schedule, arrival by arrival."""
    server, client, model, data, numbers = pieces
    init, receive, dispatch, params_of = _server(server)
    job_of = _job(client)
    labels = bool(np.issubdtype(data.test_y.dtype, np.integer))
    score = _evaluate(model, len(data.test_y), labels, len(data.size) if per_client else None)
    x, y, order = jax.device_put((data.x, data.y, data.order))
    tests = jax.device_put((data.test_x, data.test_y, owners(data) if per_client else None))
    real = jnp.result_type(float)
    hyper = {name: jnp.asarray(value, real) for name, value in numbers.items()}
    spoiled = corrupt(schedule)

    state, row = init(hyper, params)
    memory = [row] * len(data.size)
    client_state = [bound(client, hyper).init(params)] * len(data.size)
    messages: dict[int, Any] = {}
    sent = 0
    records: list[dict[str, Any]] = []
    scores = Scores([points], [np.arange(len(schedule.job))])

    def send(position: int) -> None:
        nonlocal sent
        while sent < len(schedule.client) and schedule.dispatched_after[sent] == position:
            who = schedule.client[sent]
            messages[sent], memory[who] = dispatch(hyper, state, memory[who])
            sent += 1

    def evaluate(run: int) -> Any:
        del run
        return score(params_of(hyper, state), *tests)

    send(0)
    scores.take(0, evaluate)
    for e, j in enumerate(schedule.job):
        who, message = schedule.client[j], messages.pop(int(j))
        own = ClientData(x, y, order, data.offset[who], data.size[who])
        upload, client_state[who], norm, accepted, noted = job_of(
            hyper, key, schedule.number[j], np.int32(schedule.version[j]), message, client_state[who], own, who,
            schedule.local_steps[j], jnp.asarray(norm_limit, real), spoiled[e],
        )  # fmt: skip
        arrival = Arrival(
            upload=upload,
            start=message.params,
            staleness=jnp.int32(schedule.staleness[e]),
            weight=jnp.asarray(data.size[who] if accepted else 0, real),
            client=who,
            time=jnp.asarray(schedule.time[e], real),
            closes=schedule.closes[e],
        )
        state, after, info = receive(hyper, state, memory[who], arrival)
        memory[who] = after if accepted else memory[who]
        records.append(info | noted | {"upload_norm": norm, "accepted": accepted})
        refuse(int(not accepted), on_bad)
        send(e + 1)
        scores.take(e + 1, evaluate)
        if progress is not None:
            status = {"time": float(schedule.time[e]), "staleness": float(schedule.staleness[e])}
            progress(e + 1, len(schedule.job), **status, accuracy=scores.latest())
    names = records[0] if records else {}
    return Outcome(
        params=jax.device_get(params_of(hyper, state)),
        scores=scores.columns(0),
        records={name: np.array([np.asarray(record[name]) for record in records]) for name in names},
        counters={"waves": len(records), "mean_width": 1.0},
    )
