"""When the global model is evaluated, and the evaluation itself. An evaluation never changes the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.clock import at_or_before
from fedjax_async.data.memmap import spans
from fedjax_async.engine.components import Components, bound, first_states
from fedjax_async.engine.defaults import kept_by_a_gradient
from fedjax_async.engine.flat import opened
from fedjax_async.engine.probes import held_out_rows
from fedjax_async.local import part_mean, rows_at_a_time
from fedjax_async.models import hits
from fedjax_async.models.metrics import Metric
from fedjax_async.types import (
    AnyArray,
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

    row: AnyArray  # int32[E], E >= T
    client: AnyArray  # int32[E]; N: an entry of no client, which fills up to T

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


class Metrics(NamedTuple):
    """What is computed of models on examples: loss and accuracy, further metrics, or both.

    ``labels``: whether targets are classes; accuracy is NaN otherwise. None: neither loss nor accuracy.
    """

    model: Model
    labels: bool | None
    others: tuple[tuple[str, Metric], ...] = ()  # (name of the column, metric)

    def values(self, params: Params, x: Array, y: Array) -> dict[str, Any]:
        """By name, what is averaged over examples: of each, a pytree of [B, ...].

        For a sequence of labels, accuracy is the share of right ones. It and the loss have at least float32's digits:
        sums of ones in bfloat16 end at 256. The others are in JAX's default float type.
        """
        outputs, real, found = self.model.apply(params, x), jnp.result_type(float), dict[str, Any]()
        if self.labels is not None:
            loss = self.model.loss(outputs, y)
            loss = loss if loss.dtype.itemsize >= 4 else loss.astype(jnp.float32)
            hit = hits(outputs, y) if self.labels else jnp.full(loss.shape, jnp.nan)
            found |= {"loss": loss, "accuracy": hit.astype(loss.dtype)}
        for name, metric in self.others:
            found[name] = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(real), metric.values(outputs, y))
        return found

    def finished(self, means: dict[str, Any], count: Array) -> dict[str, Array]:
        """The scores of ``count`` examples from the means of their values; NaN if there are none."""
        made = {} if self.labels is None else {name: means[name] for name in ("loss", "accuracy")}
        for name, metric in self.others:
            value = means[name] if metric.finish is None else metric.finish(means[name])
            made[name] = jnp.where(count > 0, value.astype(jnp.result_type(float)), jnp.nan)
        return made

    def whole(
        self, params: Params, x: Array, y: Array, total: int, owner: Owned | None = None, num_clients: int = 0
    ) -> dict[str, Array]:
        """The scores of a model on the ``total`` rows of a test set.

        With ``owner`` also ``client_NAME`` on each client's own rows, [N], NaN for a client without test rows.
        """
        found = each_row(partial(self.values, params), x, y, total)
        scores = self.finished(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found), jnp.int32(total))
        if owner is None:
            return scores
        count = owner.sums(jnp.ones(total, jax.tree.leaves(found)[0].dtype), num_clients)

        def mean(leaf: Array) -> Array:
            return owner.sums(leaf, num_clients) / count.reshape(-1, *(1 for _ in leaf.shape[1:]))

        each = jax.vmap(self.finished)(jax.tree.map(mean, found), count)
        return scores | {f"client_{name}": values for name, values in each.items()}

    def parts(self, params: Params, parts: Mapping[str, ClientData], rows: int) -> dict[str, Array]:
        """The scores of a model on each of some parts, whose names are prefixes; ``rows`` are read at a time."""
        found = dict[str, Array]()
        for prefix, part in parts.items():
            means = part_mean(partial(self.values, params), part, rows)
            found |= {prefix + name: value for name, value in self.finished(means, part.size).items()}
        return found

    def each(
        self,
        params_of: Callable[[Array], Params],
        parts_of: Callable[[Array], Mapping[str, ClientData]],
        count: int,
        rows: int,
        width: int = 1,
    ) -> dict[str, Array]:
        """The scores of models ``params_of(i)`` on ``parts_of(i)``, [count]; ``width`` models at a time."""
        return over(lambda i: self.parts(params_of(i), parts_of(i), rows), count, width)


def over(one: Callable[[Array], Tree], count: int, width: int) -> Tree:
    """``one(i)`` of models 0 .. ``count - 1``, ``width`` of them at a time; a pytree of [count, ...]."""
    width = min(width, count)
    which = jnp.minimum(jnp.arange(-(-count // width) * width, dtype=jnp.int32), count - 1)
    if width == 1:
        return jax.lax.map(one, which)
    found = jax.lax.map(jax.vmap(one), which.reshape(-1, width))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], found)


def pool_part(data: FederatedData, rows: np.ndarray, length: int) -> ClientData:
    """These rows of the training pool, on the host; ``order`` is padded with zeros to ``length``.

    ``x`` and ``y`` are None, for those of the pool. Streamed data have no pool on the device; ``x`` and ``y`` are then
    copies of the rows.
    """
    order = np.zeros(max(len(rows), length), np.int32)
    order[: len(rows)] = np.arange(len(rows)) if data.streamed else rows
    pool = (np.asarray(data.x[rows]), np.asarray(data.y[rows])) if data.streamed else (None, None)
    return ClientData._make((*pool, order, np.int32(0), np.int32(len(rows)), None))


def validation_part(data: FederatedData, length: int = 0) -> ClientData | None:
    """The validation rows of all clients together, see :func:`pool_part`; None if no client holds out any."""
    if data.validation_order is None or data.validation_size is None or data.validation_offset is None:
        return None
    rows = np.asarray(data.validation_order, np.int32)[spans(data.validation_offset, data.validation_size)]
    return pool_part(data, rows, length) if len(rows) else None


def most_at_once(model: Model, params: Params, x: Array, runs: int) -> int:
    """How many of ``runs`` are evaluated side by side: as many as ``TOGETHER`` bytes hold, and a divisor of ``runs``.

    ``params`` and ``x``: arrays or their shapes, of one run and of the test set. A run's bytes are what a gradient
    would keep of a batch: its activations. The number depends neither on the device nor on its free memory, so that it
    does not change bits.
    """
    kept = kept_by_a_gradient(model, params, (min(BATCH, len(x)), *x.shape[1:]), x.dtype)
    fit = max(1, TOGETHER // kept)
    return max(k for k in range(1, runs + 1) if runs % k == 0 and k <= fit)


class OwnTests(NamedTuple):
    """The test rows of each client, and what a request for a message to it says."""

    order: Array  # int32[T], rows of the test set
    offset: Array  # int32[N]
    size: Array  # int32[N]
    local_steps: Array  # int32[N], K of each client's first job; 1 if it has none
    weight: Array  # float[N], example counts

    def of(self, prefix: str, x: Array, y: Array) -> Callable[[Array], dict[str, ClientData]]:
        """``parts_of(i)``: the test rows of client i, under the name ``prefix``; ``x``, ``y``: the test set."""
        return lambda i: {prefix: ClientData(x, y, self.order, self.offset[i], self.size[i])}

    def rows(self) -> int:
        """How many rows of a client are read at a time."""
        return rows_at_a_time(len(self.order), len(self.size))


class Inputs(NamedTuple):
    """What a program that scores reads for one run, beside the tables of its stack and the test set."""

    tests: Any  # OwnTests, if models of clients are scored; else None
    parts: Mapping[str, ClientData]  # by the prefix of their scores; x and y None: those of the training pool
    training: Any = None  # with fine-tuning: ClientData with order, and offset and size [N] of all clients; else None


# test inputs, targets, the test examples of each client, and what else the scores of every evaluation read
RunTests = tuple[Array, Array, Owned | None, Inputs]


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
