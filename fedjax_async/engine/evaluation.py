"""When the global model is evaluated, and the evaluation itself. Neither touches the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import check
from fedjax_async.clock import at_or_before
from fedjax_async.types import Array, FederatedData, Model, Params, Schedule


class Points(NamedTuple):
    """Where to evaluate: after ``position[i]`` arrivals, reported at virtual time ``time[i]``."""

    position: np.ndarray  # int64[V]
    time: np.ndarray  # float64[V]


class Every(NamedTuple):
    """An evaluation every so many virtual seconds, updates or server steps, or at given times.

    At most one of the fields; none means about 50 evaluations, equally spaced in virtual time.
    The start and the end of the run are always evaluated.
    """

    time: float | None = None
    updates: int | None = None
    steps: int | None = None
    at: Sequence[float] | None = None


def evaluation_points(schedule: Schedule, every: Every, horizon: float | None = None) -> Points:
    """The evaluations that ``every`` asks for, in order.

    A virtual time sees every arrival applied at or before it, up to rounding (``clock.at_or_before``).
    ``horizon``: the end of the run in virtual seconds, if it was bounded by time; else the last arrival is the end.
    """
    if sum(value is not None for value in every) > 1:
        raise ValueError(f"evaluate = {every}: give at most one of time, updates, steps, at")
    total = len(schedule.job)
    end = float(horizon if horizon is not None else (schedule.time[-1] if total else 0.0))
    if every.updates is not None or every.steps is not None:
        gap = every.updates if every.updates is not None else every.steps
        check.whole("evaluate every", gap)
        after = np.arange(1, total + 1) if every.updates is not None else np.flatnonzero(schedule.closes) + 1
        position = after[int(gap or 1) - 1 :: int(gap or 1)]
        position = np.unique(np.concatenate([[0], position, [total]]))
        time = np.concatenate([[0.0], schedule.time])[position]
        return Points(position, time)
    if every.at is not None:
        for moment in every.at:
            check.non_negative("evaluate at", float(moment))
        inner = np.asarray(sorted(every.at), float)
    else:
        if every.time is not None:
            check.positive("evaluate every", every.time)
        interval = every.time if every.time is not None else end / 50
        inner = interval * np.arange(1, int(end / interval) + 2) if end > 0 else np.zeros(0)
    inner = inner[(inner > 0) & (at_or_before(np.array([end]), inner) == 0)]  # the end itself comes last
    time = np.concatenate([[0.0], inner, [end]])
    position = at_or_before(schedule.time, time)
    position[0], position[-1] = 0, total
    return Points(position, time)


def owners(data: FederatedData) -> np.ndarray:
    """Which client each test row belongs to (N for none); int32[T]."""
    if data.test_order is None or data.test_size is None:
        raise ValueError("per_client = True: needs data with a test split per client (see test_fraction)")
    owner = np.full(len(data.test_y), len(data.size), np.int32)
    owner[data.test_order] = np.repeat(np.arange(len(data.size), dtype=np.int32), data.test_size)
    return owner


def make_evaluate(
    model: Model,
    *,
    total: int,
    labels: bool,
    num_clients: int | None = None,
    batch_size: int = 500,
) -> Callable[..., dict[str, Array]]:
    """``evaluate(params, test_x, test_y, owner) -> {loss, accuracy[, client_loss, client_accuracy]}``.

    Means over the ``total`` rows of the test set, computed in batches; accuracy is NaN for targets
    that are not class ``labels``. With ``num_clients`` also the means over each client's own rows,
    [N] (NaN for a client without any); ``owner`` is then int32[total], else ``None``.
    """
    batch_size = min(batch_size, total)
    batches = -(-total // batch_size)
    # the last batch is moved back to fit: its rows are taken for the end of the test set
    place = np.arange(total, dtype=np.int32)
    place[total - batch_size :] = (batches - 1) * batch_size + np.arange(batch_size, dtype=np.int32)
    starts = np.minimum(np.arange(batches) * batch_size, total - batch_size).astype(np.int32)

    def evaluate(params: Params, test_x: Array, test_y: Array, owner: Any) -> dict[str, Array]:
        def one(start: Array) -> tuple[Array, Array]:
            x = jax.lax.dynamic_slice_in_dim(test_x, start, batch_size)
            y = jax.lax.dynamic_slice_in_dim(test_y, start, batch_size)
            outputs = model.apply(params, x)
            loss = model.loss(outputs, y)
            hit = jnp.argmax(outputs, -1).astype(y.dtype) == y if labels else jnp.full(loss.shape, jnp.nan)
            return loss, hit.astype(loss.dtype)

        loss, hit = (values.reshape(-1)[place] for values in jax.lax.map(one, jnp.asarray(starts)))
        out = {"loss": jnp.mean(loss), "accuracy": jnp.mean(hit)}
        if num_clients is not None:
            count = jax.ops.segment_sum(jnp.ones_like(loss), owner, num_clients + 1)[:-1]
            for name, values in (("client_loss", loss), ("client_accuracy", hit)):
                out[name] = jax.ops.segment_sum(values, owner, num_clients + 1)[:-1] / count
        return out

    return evaluate
