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

from fedjax_async.engine import programs
from fedjax_async.engine.evaluation import Points, owners
from fedjax_async.engine.kernels import finished
from fedjax_async.engine.record import Outcome
from fedjax_async.engine.run import Pieces, Progress, Scores, refuse
from fedjax_async.local import job_key, run_steps
from fedjax_async.types import Arrival, ClientAlgorithm, ClientData, Key, Params, Schedule, ServerAlgorithm


@lru_cache(maxsize=64)
def _job(client: ClientAlgorithm) -> Any:
    def job(root: Key, number: Any, version: Any, message: Any, state: Any, data: ClientData, who: Any, steps: Any):
        message = message._replace(version=version)
        work = run_steps(client, job_key(root, who, number), message, state, data, steps)
        return finished(client, work, message, state)

    return jax.jit(job)


@lru_cache(maxsize=64)
def _server(server: ServerAlgorithm) -> tuple[Any, Any, Any]:
    return jax.jit(server.init), jax.jit(server.receive), jax.jit(server.dispatch)


def run_reference(
    pieces: Pieces,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: Points,
    *,
    per_client: bool = False,
    on_bad: str = "reject",
    progress: Progress | None = None,
) -> Outcome:
    """Walk through the schedule, arrival by arrival."""
    server, client, model, data = pieces
    init, receive, dispatch = _server(server)
    job_of = _job(client)
    labels = bool(np.issubdtype(data.test_y.dtype, np.integer))
    evaluate = programs.evaluate(model, server, len(data.test_y), labels, len(data.size) if per_client else None)
    x, y, order = jax.device_put((data.x, data.y, data.order))
    tests = jax.device_put((data.test_x, data.test_y, owners(data) if per_client else None))
    real = jnp.result_type(float)

    state, row = init(params)
    memory = [row] * len(data.size)
    client_state = [client.init(params)] * len(data.size)
    messages: dict[int, Any] = {}
    sent = 0
    records: list[dict[str, Any]] = []
    scores = Scores(points)

    def send(position: int) -> None:
        nonlocal sent
        while sent < len(schedule.client) and schedule.dispatched_after[sent] == position:
            who = schedule.client[sent]
            messages[sent], memory[who] = dispatch(state, memory[who])
            sent += 1

    send(0)
    scores.take(0, lambda: evaluate(state, *tests))
    for e, j in enumerate(schedule.job):
        who, message = schedule.client[j], messages.pop(int(j))
        own = ClientData(x, y, order, data.offset[who], data.size[who])
        upload, client_state[who], norm, accepted = job_of(
            key, schedule.number[j], np.int32(schedule.version[j]), message, client_state[who], own, who,
            schedule.local_steps[j],
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
        state, after, info = receive(state, memory[who], arrival)
        memory[who] = after if accepted else memory[who]
        records.append(info | {"upload_norm": norm, "accepted": accepted})
        refuse(int(not accepted), on_bad)
        send(e + 1)
        scores.take(e + 1, lambda: evaluate(state, *tests))  # noqa: B023 (called at once)
        if progress is not None:
            status = {"time": float(schedule.time[e]), "staleness": float(schedule.staleness[e])}
            progress(e + 1, len(schedule.job), **status, accuracy=scores.latest())
    names = records[0] if records else {}
    return Outcome(
        params=jax.device_get(server.params(state)),
        scores=scores.columns(),
        records={name: np.array([np.asarray(record[name]) for record in records]) for name in names},
        counters={"waves": len(records), "mean_width": 1.0},
    )
