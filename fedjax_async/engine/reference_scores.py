"""The oracle's scores of the model on examples, and its probes, one arrival at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from fedjax_async.engine.components import Components
from fedjax_async.engine.probes import (
    checked,
    columns_of,
    held_out_rows,
    numbers_of,
    probe_table,
    resolved_probes,
    sees,
)
from fedjax_async.models import hits
from fedjax_async.types import Array, Arrival, ClientData, DataParts, Model, Params, Schedule, State, Tree

CHUNK = 500  # test examples that are evaluated at a time


@lru_cache(maxsize=64)
def scores_of_examples(model: Model, labels: bool) -> Wrapped:
    """Compiled ``(params, x, y) -> (loss, hit)``, one entry per example; ``hit``: 1 if the class is right, else 0."""

    def scores(params: Params, x: Array, y: Array) -> tuple[Array, Array]:
        outputs = model.apply(params, x)
        loss = model.loss(outputs, y)
        loss = loss if loss.dtype.itemsize >= 4 else loss.astype(jnp.float32)
        hit = hits(outputs, y) if labels else jnp.full(loss.shape, jnp.nan)
        return loss, hit.astype(loss.dtype)

    return jax.jit(scores)


def in_chunks(function: Callable[[np.ndarray], Tree], rows: np.ndarray, total: int) -> Tree:
    """``function(rows)``, of few rows at a time; the last chunk is filled with row 0: one shape, so one program."""
    chunk = min(CHUNK, max(total, 1))
    padded = np.append(rows, np.zeros(-len(rows) % chunk, np.int64))
    found = jax.device_get([function(part) for part in padded.reshape(-1, chunk)])
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(rows)], *found)


class Tests:
    """The test set or the validation part, and the means of loss and accuracy over parts of it."""

    def __init__(self, model: Model, x: np.ndarray, y: np.ndarray) -> None:
        labels = bool(np.issubdtype(y.dtype, np.integer))
        self._scores, self._x, self._y = scores_of_examples(model, labels), np.asarray(x), np.asarray(y)
        self._real = np.dtype(jnp.result_type(float))

    def each(self, params: Params, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Loss and hit of every test example in ``rows``."""
        if not len(rows):
            return np.zeros(0, self._real), np.zeros(0, self._real)
        loss, hit = in_chunks(lambda part: self._scores(params, self._x[part], self._y[part]), rows, len(self._y))
        return loss, hit

    def whole(self, params: Params, parts: Sequence[np.ndarray] | None) -> dict[str, np.ndarray]:
        """Means over the test set and, if ``parts`` give the rows of each client, over each client's part."""
        scores = self.each(params, np.arange(len(self._y)))
        found = {name: mean_of(values) for name, values in zip(("loss", "accuracy"), scores)}
        if parts is None:
            return found
        clients = {n: np.stack([mean_of(v[own]) for own in parts]) for n, v in zip(("loss", "accuracy"), scores)}
        return found | {f"client_{name}": values for name, values in clients.items()}


def mean_of(values: np.ndarray) -> np.ndarray:
    """The mean, computed in float64 and rounded to the dtype of ``values``; NaN without values."""
    mean = np.mean(values, dtype=np.float64) if len(values) else np.nan
    return np.asarray(mean, values.dtype)


def table_of(rows: Sequence[Mapping[str, object]]) -> dict[str, np.ndarray]:
    """One column for each name of the rows."""
    return {name: np.array([np.asarray(row[name]) for row in rows]) for name in (rows[0] if rows else {})}


@lru_cache(maxsize=64)
def _probe(name: str, function: Callable[..., Mapping[str, Array]]) -> Wrapped:
    return jax.jit(checked(name, function))


class InTurn(Protocol):
    """A run that goes arrival by arrival, as probes see it."""

    state: State  # of the server
    memory: list[State]  # of the server about each client
    pool: tuple[Array, Array, Array]  # x, y and order

    def part(self, who: int) -> ClientData: ...


class ReferenceProbes:
    """The probes of a run and the rows that they have seen."""

    def __init__(self, components: Components, schedule: Schedule, params: Params, probes: Mapping[str, object] | None):
        data = components.data
        self.probes = resolved_probes(probes, data, len(schedule.job))
        self.shapes = columns_of(self.probes, components, params)
        self.seen: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in self.probes}
        self.held_out = {kind: jax.device_put(held_out_rows(data, kind)) for kind in ("validation", "test")}
        self.tests = jax.device_put((data.test_x, data.test_y))

    def parts(self, run: InTurn, who: int) -> DataParts:
        """The training, validation and test part of a client."""

        def part(x: Array, y: Array, kind: str) -> ClientData:
            order, offset, size = self.held_out[kind]
            return ClientData(x, y, order, offset[who], size[who])

        return DataParts(
            run.part(who), part(run.pool[0], run.pool[1], "validation"), part(self.tests[0], self.tests[1], "test")
        )

    def probe(self, run: InTurn, position: int, arrival: Arrival) -> None:
        """Call the probes that are due, before the server receives the arrival."""
        who = int(arrival.client)
        for name, probe in self.probes.items():
            if sees(probe, position):
                given = (run.state, run.memory[who], arrival, self.parts(run, who))
                self.seen[name].append(jax.device_get(_probe(name, probe.function)(*given)))

    def tables(self, schedule: Schedule, until: int) -> dict[str, dict[str, np.ndarray]]:
        """The table of each probe, for the first ``until`` arrivals."""
        found = {}
        for name, shapes in self.shapes.items():
            numbers = numbers_of(self.probes[name], until)
            numbers = numbers[numbers < until]
            seen = self.seen[name][: len(numbers)]
            columns = {c: np.array([row[c] for row in seen], shape.dtype) for c, shape in shapes.items()}
            found[name] = probe_table(schedule, numbers, numbers, columns)
        return found
