"""Each client's own model, evaluated on its own test rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import tree
from fedjax_async.engine.components import Components, bound
from fedjax_async.engine.evaluation import Points
from fedjax_async.engine.probes import held_out_rows
from fedjax_async.local import part_mean
from fedjax_async.types import (
    Array,
    ClientAlgorithm,
    ClientData,
    FederatedData,
    Model,
    Params,
    Request,
    Schedule,
    ServerAlgorithm,
    State,
)


class OwnTests(NamedTuple):
    """The test rows of each client, and the request for a message to it."""

    order: Any  # int32[T], rows of the test set
    offset: Any  # int32[N]
    size: Any  # int32[N]
    local_steps: Any  # int32[N], of each client's first job
    weight: Any  # float[N]


def differs(components: Components, params: Params) -> bool:
    """Whether clients may have models of their own: the server has memory of them, or their algorithm has ``own``."""
    memory = jax.eval_shape(lambda p: bound(components.server, components.hyper).init(p)[1], params)
    return bool(jax.tree.leaves(memory)) or bound(components.client, components.hyper).own is not None


def own_tests(data: FederatedData, schedule: Schedule) -> OwnTests:
    """The tables of one run, on the host."""
    order, offset, size = held_out_rows(data, "test")
    rows = np.zeros(max(len(data.test_y), len(order)), np.int32)  # equally long for runs that share a program
    rows[: len(order)] = order
    steps = np.ones(len(data.size), np.int32)
    steps[schedule.client[::-1]] = schedule.local_steps[::-1]
    return OwnTests(rows, offset, size, steps, data.size.astype(np.dtype(jnp.result_type(float))))


def now_of(points: Points, schedule: Schedule, position: int, real: Any) -> tuple[np.ndarray, np.ndarray]:
    """Virtual time, in dtype ``real``, and server steps closed of the evaluation after ``position`` arrivals."""
    time = points.time[np.searchsorted(points.position, position)]
    return np.asarray(time, real), np.asarray(np.count_nonzero(schedule.closes[:position]), np.int32)


def make_own(model: Model, labels: bool, batch_size: int = 256) -> Callable[..., dict[str, Array]]:
    """``evaluate_own(rule, client, state, memory_of, kept_of, now, test_x, test_y, tests) -> {loss, accuracy}``.

    ``memory_of(i)`` and ``kept_of(i)`` are the rows of client i; ``now`` is (virtual time, server steps closed). The
    own model of client i is what its algorithm makes of the message that the server would send it now, by default the
    message's params. Loss and accuracy are float[N], NaN for a client without test rows.
    """

    def evaluate_own(
        rule: ServerAlgorithm,
        client: ClientAlgorithm,
        state: State,
        memory_of: Callable[[Array], State],
        kept_of: Callable[[Array], State],
        now: tuple[Array, Array],
        test_x: Array,
        test_y: Array,
        tests: OwnTests,
    ) -> dict[str, Array]:
        def one(i: Array) -> tuple[Array, Array]:
            request = Request(i, *now, tests.local_steps[i], tests.weight[i])
            message, _ = rule.dispatch(state, memory_of(i), request)
            message = message._replace(version=now[1])
            params = _full(rule, state, message.params) if client.own is None else client.own(message, kept_of(i))

            def measure(x: Array, y: Array) -> tuple[Array, Array]:
                outputs = model.apply(params, x)
                loss = model.loss(outputs, y)
                hit = jnp.argmax(outputs, -1).astype(y.dtype) == y if labels else jnp.full(loss.shape, jnp.nan)
                return loss, hit.astype(loss.dtype)

            part = ClientData(test_x, test_y, tests.order, tests.offset[i], tests.size[i])
            return part_mean(measure, part, batch_size)

        loss, accuracy = jax.lax.map(one, jnp.arange(len(tests.size), dtype=jnp.int32))
        return {"client_own_loss": loss, "client_own_accuracy": accuracy}

    return evaluate_own


def _full(rule: ServerAlgorithm, state: State, params: Params) -> Params:
    """A message's params in the dtype of the server's: start models may be kept at half precision."""
    return jax.tree.map(lambda sent, kept: sent.astype(kept.dtype), params, rule.params(state))


def rows_at(table: State, first: Any) -> Callable[[Array], State]:
    """Rows of a table of clients, from the row ``first`` on."""
    return lambda i: tree.gather(table, first + i)
