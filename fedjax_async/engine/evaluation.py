"""When the global model is evaluated, and the evaluation itself. An evaluation never changes the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.clock import at_or_before
from fedjax_async.data.memmap import spans
from fedjax_async.engine.components import Components, bound, first_states
from fedjax_async.engine.flat import opened
from fedjax_async.engine.probes import held_out_rows
from fedjax_async.local import part_mean, rows_at_a_time
from fedjax_async.models import hits
from fedjax_async.types import (
    Array,
    ClientAlgorithm,
    ClientData,
    Facts,
    FederatedData,
    Model,
    Params,
    Request,
    Schedule,
    ServerAlgorithm,
    State,
    Tree,
)


class EvaluationPoints(NamedTuple):
    """When to evaluate: after ``position[i]`` arrivals, reported at virtual time ``time[i]``."""

    position: np.ndarray  # int64[V]
    time: np.ndarray  # float64[V]
    # int64[V], server steps closed by then, which follow from the schedule; empty if not known, or without a server
    steps: np.ndarray = np.zeros(0, np.int64)


class Every(NamedTuple):
    """When to evaluate: every ``time`` virtual seconds, ``updates`` updates or ``steps`` server steps, or ``at`` times.

    At most one field may be given; without any, there are about 50 evaluations, equally spaced in virtual time.
    The start and the end of the run are always evaluated.
    """

    time: float | None = None
    updates: int | None = None
    steps: int | None = None
    at: Sequence[float] | None = None  # virtual seconds


MOST_POINTS = 1_000_000  # more is taken for a mistake, since each evaluation reads the whole test set


def require_few(every: Every, *, time: float | None = None, updates: int | None = None) -> None:
    """Raise ``ValueError`` if ``every`` asks for more than ``MOST_POINTS`` evaluations of a run of this length.

    ``time``: the length in virtual seconds. ``updates``: in applied arrivals, or in server steps if ``every.steps`` is
    given. The error names the setting.
    """
    gap: float | None
    length: float | None
    gap, field = (every.updates, "eval_updates") if every.steps is None else (every.steps, "eval_steps")
    gap, field, length = (gap, field, updates) if every.time is None else (every.time, "eval_time", time)
    if gap is not None and length is not None and (count := length / gap) > MOST_POINTS:
        least = length / MOST_POINTS
        text = f"{least:.3g}" if float(f"{least:.3g}") >= least else f"{1.01 * least:.3g}"
        remedy = text if every.time is not None else f"{math.ceil(least)}"
        allowed = (
            f"{remedy} or more in a run of {length:.6g}, for at most {MOST_POINTS:,} evaluations instead of {count:.3g}"
        )
        check.require(False, field, gap, allowed)
    count = 0 if every.at is None else len(every.at)
    check.require(count <= MOST_POINTS, "eval_at", f"{count} moments", f"at most {MOST_POINTS:,}")


def evaluation_points(schedule: Schedule, every: Every, horizon: float | None = None) -> EvaluationPoints:
    """The evaluations that ``every`` asks for, in order; see :func:`points_among`."""
    return points_among(schedule.time, schedule.closes, every, horizon)


def points_among(
    arrived: np.ndarray, closes: np.ndarray, every: Every, horizon: float | None = None
) -> EvaluationPoints:
    """The evaluations that ``every`` asks for, in order.

    ``arrived``: when each arrival is applied, ascending, float64[E]; ``closes``: whether it closes its server step,
    bool[E]. An evaluation at a virtual time follows all arrivals at or before that time, up to rounding
    (``clock.at_or_before``). ``horizon``: the end of the run in virtual seconds, if its budget is a time; else the run
    ends with the last arrival. Raises ``ValueError`` for invalid fields of ``every``.
    """
    if sum(value is not None for value in every) > 1:
        given = ", ".join(f"eval_{name} = {value}" for name, value in every._asdict().items() if value is not None)
        raise ValueError(f"{given}: give at most one of them")
    total, closed = len(arrived), np.concatenate([[0], np.cumsum(closes)])
    end = float(horizon if horizon is not None else (arrived[-1] if total else 0.0))
    if every.updates is not None or every.steps is not None:
        gap = every.updates if every.updates is not None else every.steps
        check.whole("eval_updates" if every.updates is not None else "eval_steps", gap)
        require_few(every, updates=total if every.updates is not None else int(closes.sum()))
        after = np.arange(1, total + 1) if every.updates is not None else np.flatnonzero(closes) + 1
        position = after[int(gap or 1) - 1 :: int(gap or 1)]
        position = np.unique(np.concatenate([[0], position, [total]]))
        time = np.concatenate([[0.0], arrived])[position]
        return EvaluationPoints(position, time, closed[position])
    if every.at is not None:
        for moment in every.at:
            check.real_non_negative("eval_at", moment)
        require_few(every)
        inner = np.asarray(sorted(every.at), float)
    else:
        if every.time is not None:
            check.real_positive("eval_time", every.time)
            require_few(every, time=end)
        interval = every.time if every.time is not None else end / 50
        inner = interval * np.arange(1, int(end / interval) + 2) if end > 0 else np.zeros(0)
    inner = inner[(inner > 0) & (at_or_before(np.array([end]), inner) == 0)]  # the end itself comes last
    time = np.concatenate([[0.0], inner, [end]])
    position = at_or_before(arrived, time)
    position[0], position[-1] = 0, total
    return EvaluationPoints(position, time, closed[position])


class Owned(NamedTuple):
    """The test rows of the clients, in order of the rows: an entry for each row of each client, who may share rows."""

    row: Any  # int32[E], E >= T
    client: Any  # int32[E]; N: an entry of no client, which fills up to T

    def sums(self, values: Array, num_clients: int) -> Array:
        """The sum of ``values`` [T, ...] over each client's rows, [N, ...]."""
        return jax.ops.segment_sum(values[self.row], self.client, num_clients + 1)[:-1]


def owners(data: FederatedData) -> Owned:
    """Which test rows belong to each client, on the host. ``ValueError`` without test rows of clients."""
    if data.test_order is None or data.test_size is None or data.test_offset is None:
        raise ValueError("per_client = True: needs data with a test split per client (see test_fraction)")
    check.require(bool(np.any(data.test_size)), "per_client", True, "left out: no client has a test row")
    rows = np.asarray(data.test_order)[spans(data.test_offset, data.test_size)]
    order, length = np.argsort(rows, kind="stable"), max(len(data.test_y), len(rows))
    row, client = np.zeros(length, np.int32), np.full(length, len(data.size), np.int32)
    row[: len(rows)] = rows[order]
    client[: len(rows)] = np.repeat(np.arange(len(data.size), dtype=np.int32), data.test_size)[order]
    return Owned(row, client)


BATCH = 500  # test rows that are read at a time
TOGETHER = 2**31  # bytes of the activations of the runs that are evaluated side by side


def each_row(measure: Callable[[Array, Array], Tree], x: Array, y: Array, total: int, batch_size: int = BATCH) -> Tree:
    """``measure(x, y)`` of all ``total`` rows, computed in batches; a pytree of [total, ...]."""
    batch_size = min(batch_size, total)
    batches = -(-total // batch_size)
    # the last batch overlaps the one before; only its new rows are used
    row = np.arange(total, dtype=np.int32)
    row[total - batch_size :] = (batches - 1) * batch_size + np.arange(batch_size, dtype=np.int32)
    starts = np.minimum(np.arange(batches) * batch_size, total - batch_size).astype(np.int32)

    def one(start: Array) -> Tree:
        part = (jax.lax.dynamic_slice_in_dim(rows, start, batch_size) for rows in (x, y))
        return measure(*part)

    found = jax.lax.map(one, jnp.asarray(starts))
    return jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:])[row], found)


def loss_and_hit(model: Model, labels: bool, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """``(loss, hit)`` of each example, [B] each; ``hit``: whether its predicted class is right, 0 or 1.

    For a sequence of labels, ``hit`` is the share of right ones. Without ``labels`` (targets are no classes) it is NaN.
    Both have at least float32's digits: sums of ones in bfloat16 end at 256.
    """
    outputs = model.apply(params, x)
    loss = model.loss(outputs, y)
    loss = loss if loss.dtype.itemsize >= 4 else loss.astype(jnp.float32)
    hit = hits(outputs, y) if labels else jnp.full(loss.shape, jnp.nan)
    return loss, hit.astype(loss.dtype)


def mean_scores(
    model: Model,
    params: Params,
    test_x: Array,
    test_y: Array,
    owner: Owned | None = None,
    *,
    total: int,
    labels: bool,
    num_clients: int | None = None,
) -> dict[str, Array]:
    """``{loss, accuracy[, client_loss, client_accuracy]}``: means over the ``total`` rows of the test set.

    Without ``labels`` (targets are not classes), accuracy is NaN. With ``num_clients`` also the means over each
    client's own rows, [N], NaN for a client without test rows; ``owner`` then says which rows these are.
    """
    loss, hit = each_row(lambda x, y: loss_and_hit(model, labels, params, x, y), test_x, test_y, total)
    out = {"loss": jnp.mean(loss), "accuracy": jnp.mean(hit)}
    if num_clients is not None and owner is not None:
        count = owner.sums(jnp.ones_like(loss), num_clients)
        for name, values in (("client_loss", loss), ("client_accuracy", hit)):
            out[name] = owner.sums(values, num_clients) / count
    return out


def validation_part(data: FederatedData, length: int | None = None) -> ClientData | None:
    """The validation rows of all clients together; None if no client holds out any.

    ``order`` is padded with zeros to ``length``. ``x`` and ``y`` are None, since the rows are those of the training
    pool. Streamed data have no pool on the device; ``x`` and ``y`` are then copies of the validation rows.
    """
    if data.validation_order is None or data.validation_size is None or data.validation_offset is None:
        return None
    rows = np.asarray(data.validation_order, np.int32)[spans(data.validation_offset, data.validation_size)]
    if len(rows) == 0:
        return None
    order = np.zeros(max(len(rows), length or 0), np.int32)
    order[: len(rows)] = np.arange(len(rows)) if data.streamed else rows
    pool = (np.asarray(data.x[rows]), np.asarray(data.y[rows])) if data.streamed else (None, None)
    return ClientData._make((*pool, order, np.int32(0), np.int32(len(rows)), None))


def validation_scores(model: Model, labels: bool, params: Params, part: ClientData) -> dict[str, Array]:
    """``{validation_loss, validation_accuracy}``: means over the rows of ``part``; see :func:`mean_scores`."""
    loss, hit = part_mean(lambda x, y: loss_and_hit(model, labels, params, x, y), part, BATCH)
    return {"validation_loss": loss, "validation_accuracy": hit}


def most_at_once(model: Model, params: Params, x: Array, runs: int) -> int:
    """How many of ``runs`` are evaluated side by side: as many as ``TOGETHER`` bytes hold, and a divisor of ``runs``.

    ``params`` and ``x``: arrays or their shapes, of one run and of the test set. A run's bytes are what a gradient
    would keep of a batch: its activations. The number depends neither on the device nor on its free memory, so that it
    does not change bits.
    """
    rows = jax.ShapeDtypeStruct((min(BATCH, len(x)), *x.shape[1:]), x.dtype)
    kept = jax.eval_shape(lambda params, x: jax.vjp(lambda params: model.apply(params, x), params), params, rows)
    fit = max(1, TOGETHER // max(tree.num_bytes(kept), 1))
    return max(k for k in range(1, runs + 1) if runs % k == 0 and k <= fit)


class OwnTests(NamedTuple):
    """The test rows of each client, and what a request for a message to it says."""

    order: Array  # int32[T], rows of the test set
    offset: Array  # int32[N]
    size: Array  # int32[N]
    local_steps: Array  # int32[N], K of each client's first job; 1 if it has none
    weight: Array  # float[N], example counts


# test inputs, targets, the test examples of each client, own tests, validation part
RunTests = tuple[Array, Array, Owned | None, OwnTests | None, ClientData | None]


def differs(components: Components, params: Params) -> bool:
    """Whether clients may have models of their own: the server keeps memory, or the client algorithm has ``own``."""
    _, memory, _ = first_states(components, params, Facts(len(components.data.size)))
    return bool(jax.tree.leaves(memory)) or bound(components.client, components.hyper).own is not None


def own_tests(data: FederatedData, schedule: Schedule) -> OwnTests:
    """The :class:`OwnTests` of one run, on the host."""
    order, offset, size = held_out_rows(data, "test")
    rows = np.zeros(max(len(data.test_y), len(order)), np.int32)  # equally long for runs that share a program
    rows[: len(order)] = order
    steps = np.ones(len(data.size), np.int32)
    steps[schedule.client[::-1]] = schedule.local_steps[::-1]
    return OwnTests._make((rows, offset, size, steps, data.size.astype(np.dtype(jnp.result_type(float)))))


def client_scores(
    model: Model, labels: bool, params_of: Callable[[Array], Params], test_x: Array, test_y: Array, tests: OwnTests
) -> dict[str, Array]:
    """``{client_own_loss, client_own_accuracy}`` of model ``params_of(i)`` on the test rows of client i.

    float[N], NaN for a client without test rows.
    """
    rows = rows_at_a_time(len(tests.order), len(tests.size))

    def one(i: Array) -> tuple[Array, Array]:
        params = params_of(i)
        part = ClientData(test_x, test_y, tests.order, tests.offset[i], tests.size[i])
        return part_mean(lambda x, y: loss_and_hit(model, labels, params, x, y), part, rows)

    loss, accuracy = jax.lax.map(one, jnp.arange(len(tests.size), dtype=jnp.int32))
    return {"client_own_loss": loss, "client_own_accuracy": accuracy}


def own_models(
    rule: ServerAlgorithm,
    client: ClientAlgorithm,
    state: State,
    memory_of: Callable[[Array], State],
    kept_of: Callable[[Array], State],
    now: tuple[Array, Array],
    tests: OwnTests,
) -> Callable[[Array], Params]:
    """``params_of(i)``: the model that client i itself would use if the server sent it a message now.

    That is ``client.own`` of the message, by default the message's params. ``memory_of(i)`` and ``kept_of(i)`` are the
    server's and the client's rows of client i; ``now`` is (virtual time, server steps closed).
    """

    def params_of(i: Array) -> Params:
        request = Request(i, *now, tests.local_steps[i], tests.weight[i])
        message, _ = rule.dispatch(state, memory_of(i), request)
        message = message._replace(version=now[1])
        return _full(rule, state, opened(message.params)) if client.own is None else client.own(message, kept_of(i))

    return params_of


def _full(rule: ServerAlgorithm, state: State, params: Params) -> Params:
    """The message's params in the dtypes of the server's params: start models may be stored at half precision."""
    return jax.tree.map(lambda sent, kept: sent.astype(kept.dtype), params, rule.params(state))


def rows_at(table: State, first: Array) -> Callable[[Array], State]:
    """``row(i)``: row ``first + i`` of a table of clients."""
    return lambda i: tree.gather(table, first + i)
