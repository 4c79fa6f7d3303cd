"""The oracle's part of the measures: training loss, metrics and fine-tuning, one client and one mean at a time.

Like ``reference.py``, it calls the algorithms, the model and the metrics themselves, and computes its own means, in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from fedjax_async.engine.components import Client, Components, Hyper, bound
from fedjax_async.engine.measures import FINE_TUNING, Measures, training_rows
from fedjax_async.engine.reference_scores import in_chunks
from fedjax_async.local import job_key, run_steps
from fedjax_async.models import hits
from fedjax_async.models.metrics import Metric
from fedjax_async.types import Array, ClientData, Key, Message, Model, Params

Examples = tuple[np.ndarray, np.ndarray]  # x and y
Pool = tuple[Array, Array, Array]  # x, y and order, on the device


@lru_cache(maxsize=64)
def _outputs(model: Model) -> Wrapped:
    return jax.jit(model.apply)


@lru_cache(maxsize=64)
def _loss(model: Model) -> Wrapped:
    return jax.jit(model.loss)


@lru_cache(maxsize=64)
def _values(metric: Metric) -> Wrapped:
    return jax.jit(metric.values)


@lru_cache(maxsize=64)
def _finish(finish: Callable[[Any], Array]) -> Wrapped:
    return jax.jit(finish)


@lru_cache(maxsize=64)
def _tuned(tuner: Client, steps: int) -> Wrapped:
    """Compiled: the params after ``steps`` local steps from ``start``."""

    def tuned(hyper: Hyper, root: Key, who: Array, version: Array, start: Params, data: ClientData) -> Params:
        one = bound(tuner, hyper)
        key = job_key(jax.random.fold_in(root, jnp.uint32(FINE_TUNING)), who, jnp.int32(0))
        return run_steps(one, key, Message(start, (), version), (), data, steps).params

    return jax.jit(tuned)


class MeasuresByHand:
    """Scores of one run besides loss and accuracy."""

    def __init__(self, components: Components, measures: Measures, hyper: Hyper, key: Key) -> None:
        self.components, self.measures, self.hyper, self.key = components, measures, hyper, key
        self.real = np.dtype(jnp.result_type(float))
        data = components.data
        self.tests = (np.asarray(data.test_x), np.asarray(data.test_y))
        rows = None if measures.training is None else training_rows(data, measures.training)
        self.sample = None if rows is None else (np.asarray(data.x[rows]), np.asarray(data.y[rows]))

    def outputs(self, params: Params, x: np.ndarray) -> np.ndarray:
        """The model's outputs."""
        model, rows = _outputs(self.components.model), np.arange(len(x))
        found: np.ndarray = in_chunks(lambda part: model(params, x[part]), rows, len(self.tests[1]))
        return found

    def losses(self, params: Params, examples: Examples) -> np.ndarray:
        """The loss of each example."""
        return np.asarray(_loss(self.components.model)(self.outputs(params, examples[0]), examples[1]), np.float64)

    def metric(self, metric: Metric, params: Params, examples: Examples) -> np.ndarray:
        """A metric of some examples; NaN without examples."""
        if not len(examples[1]):
            return np.asarray(np.nan, self.real)
        values = _values(metric)(self.outputs(params, examples[0]), examples[1])

        def mean(leaf: Array) -> Array:
            return jnp.asarray(np.mean(np.asarray(leaf), axis=0, dtype=np.float64), self.real)

        means = jax.tree.map(mean, values)
        return np.asarray(means if metric.finish is None else _finish(metric.finish)(means), self.real)

    def named(self, prefix: str, params: Params, examples: Examples) -> dict[str, np.ndarray]:
        """Every metric of some examples."""
        return {f"{prefix}{name}": self.metric(one, params, examples) for name, one in self.measures.metrics}

    def tuned(self, who: int, start: Params, version: int, pool: Pool, test: Examples) -> dict[str, np.ndarray]:
        """Scores of a client's model after its fine-tuning, on its own test rows."""
        data = self.components.data
        part = ClientData(*pool, data.offset[who], data.size[who])
        train = _tuned(self.measures.tuner, self.measures.fine_tune)
        params = train(self.hyper, self.key, np.int32(who), np.int32(version), start, part)
        scores: dict[str, float | np.floating] = {"loss": np.nan, "accuracy": np.nan}
        if len(test[1]):
            labels = np.issubdtype(test[1].dtype, np.integer)
            right = hits(*map(jnp.asarray, (self.outputs(params, test[0]), test[1]))) if labels else np.nan
            scores = {
                "loss": np.mean(self.losses(params, test)),
                "accuracy": np.mean(np.asarray(right), dtype=np.float64),
            }
        named = {f"client_tuned_{name}": np.asarray(value, self.real) for name, value in scores.items()}
        return named | self.named("client_tuned_", params, test)

    def all(
        self, params: Params, version: int, per_client: bool, pool: Pool, tests: Sequence[np.ndarray],
        start_of: Callable[[int], Params], own: Callable[[int], Params] | None,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """All scores at one evaluation: ``tests`` are each client's test rows, ``own`` gives its own model."""
        found = self.named("", params, self.tests)
        if self.sample is not None:
            found["train_loss"] = np.asarray(np.mean(self.losses(params, self.sample)), self.real)
        x, y = self.tests
        clients: list[dict[str, np.ndarray]] = [{} for _ in tests]
        for who, rows in enumerate(tests):
            if per_client:
                clients[who] |= self.named("client_", params, (x[rows], y[rows]))
            if own is not None:
                clients[who] |= self.named("client_own_", own(who), (x[rows], y[rows]))
            if self.measures.fine_tune:
                clients[who] |= self.tuned(who, start_of(who), version, pool, (x[rows], y[rows]))
        return found | {name: np.stack([each[name] for each in clients]) for name in clients[0]}
