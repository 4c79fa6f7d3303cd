"""What an evaluation measures beside loss and accuracy: the training loss, metrics, and scores after fine-tuning.

A separate program computes them, so that loss and accuracy are the same to the last bit whatever else is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.data.memmap import spans
from fedjax_async.engine.components import Client
from fedjax_async.engine.evaluation import Owned, OwnTests, each_row, loss_and_hit, own_tests
from fedjax_async.local import job_key, part_mean, rows_at_a_time, run_steps
from fedjax_async.models.metrics import Metric
from fedjax_async.types import Array, ClientAlgorithm, ClientData, FederatedData, Key, Message, Model, Params, Schedule

FINE_TUNING = 2**32 - 1  # folded into a run's key; jobs fold in their client's number, which is below 2**31
LARGEST_POOL = 2**20  # with more training examples, the training loss needs a sample


class Sample(NamedTuple):
    """The training examples of the training loss: all of them (None), or ``examples`` of them drawn with ``seed``."""

    examples: int | None = None
    seed: int = 0


class Measures(NamedTuple):
    """What is measured; nothing by default."""

    metrics: tuple[tuple[str, Metric], ...] = ()  # (name of the column, metric)
    training: Sample | None = None
    fine_tune: int = 0  # local steps of each client, from the global model; 0: none
    tuner: Client | None = None  # ``local_training``, or a function of hyperparameters that returns it

    def wants_anything(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self.metrics) or self.training is not None or self.fine_tune > 0

    def shared(self) -> tuple[Any, ...]:
        """What must be equal in two runs that share a program."""
        sample = None if self.training is None else (self.training.examples,)
        return self.metrics, sample, self.fine_tune, self.tuner


NOTHING = Measures()


class Inputs(NamedTuple):
    """What the program reads for one run, beside the tables of its stack."""

    tests: Any  # OwnTests, if clients have metrics or are fine-tuned; else None
    sample: ClientData | None  # the examples of the training loss, if it is measured; x and y None: those of the pool
    training: Any  # with fine-tuning: ClientData with order, and offset and size [N] of all clients; else None


def training_rows(data: FederatedData, sample: Sample) -> np.ndarray:
    """The rows of ``data.x`` on which the training loss is measured, in order of clients; int64[n].

    They are among the examples that the clients train on. Raises ``ValueError`` if more examples are asked for than
    there are, or if all are asked for and they are too many.
    """
    total = int(data.size.sum(dtype=np.int64))
    if sample.examples is None:
        whole = total <= LARGEST_POOL and not data.streamed
        allowed = f"a number of examples: {data.name} has {total}, too many for every evaluation"
        check.require(whole, "train_examples", None, allowed)
        position = spans(data.offset, data.size)
    else:
        check.whole("train_examples", sample.examples, high=total)
        rng = np.random.default_rng([sample.seed, FINE_TUNING])  # a stream of its own, not that of the partition
        chosen = np.sort(rng.choice(total, sample.examples, replace=False, shuffle=False))
        ends = np.cumsum(data.size, dtype=np.int64)
        client = np.searchsorted(ends, chosen, side="right")
        position = data.offset[client].astype(np.int64) + chosen - (ends - data.size)[client]
    return np.asarray(data.order[position], np.int64)


def require_measurable(data: FederatedData, measures: Measures) -> None:
    """Raise ``ValueError`` if the data do not allow what is to be measured."""
    if measures.training is not None:
        training_rows(data, measures.training)
    if measures.fine_tune:
        parts = data.test_size is not None and bool(np.any(data.test_size))
        check.require(parts, "fine_tune", measures.fine_tune, "left out without test_fraction or tests of each client")
        allowed = f"left out: {data.name} is too large for the device"
        check.require(not data.streamed, "fine_tune", measures.fine_tune, allowed)


def inputs_of(
    data: Sequence[FederatedData], schedules: Sequence[Schedule], measures: Sequence[Measures], per_client: bool
) -> list[Inputs]:
    """The inputs of each run of a stack, on the host; equally long for all runs, since they share a program."""
    samples = [None if m.training is None else training_rows(d, m.training) for d, m in zip(data, measures)]
    longest = max((len(rows) for rows in samples if rows is not None), default=0)
    tuned = measures[0].fine_tune > 0
    return [
        Inputs(
            own_tests(d, schedule) if tuned or (per_client and measures[0].metrics) else None,
            None if rows is None else _sample(d, rows, longest),
            _on_host((), (), d.order, d.offset, d.size) if tuned else None,
        )
        for d, schedule, rows in zip(data, schedules, samples)
    ]


def _sample(data: FederatedData, rows: np.ndarray, length: int) -> ClientData:
    """Rows of the training pool as ``ClientData``; those of streamed data are copied, as no pool is on the device."""
    order, count, zero = np.zeros(length, np.int32), np.int32(len(rows)), np.int32(0)
    if data.streamed:
        order[: len(rows)] = np.arange(len(rows))
        return _on_host(np.asarray(data.x[rows]), np.asarray(data.y[rows]), order, zero, count)
    order[: len(rows)] = rows
    return _on_host(None, None, order, zero, count)


def _on_host(*fields: object) -> ClientData:
    """``ClientData`` on the host, although its fields are declared as device arrays."""
    return ClientData._make((*fields, None))


def values_of(metrics: Sequence[tuple[str, Metric]], outputs: Array, y: Array) -> dict[str, Any]:
    """``values`` of each metric, in JAX's default float type; {name: pytree of [B, ...]}."""
    real = jnp.result_type(float)
    found = {name: metric.values(outputs, y) for name, metric in metrics}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(real), found)


def finished(metrics: Sequence[tuple[str, Metric]], means: dict[str, Any], count: Array) -> dict[str, Array]:
    """The metrics of ``count`` examples from the means of their values; NaN if there are none."""
    made = {name: means[name] if metric.finish is None else metric.finish(means[name]) for name, metric in metrics}
    return {name: jnp.where(count > 0, value.astype(jnp.result_type(float)), jnp.nan) for name, value in made.items()}


def over_clients(one: Callable[[Array], Any], count: int, width: int) -> Any:
    """``one(i)`` of clients 0 .. ``count - 1``, ``width`` clients at a time; a pytree of [count, ...]."""
    width = min(width, count)
    who = jnp.minimum(jnp.arange(-(-count // width) * width, dtype=jnp.int32), count - 1)
    if width == 1:
        return jax.lax.map(one, who)
    found = jax.lax.map(jax.vmap(one), who.reshape(-1, width))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], found)


def make_training_loss(model: Model) -> Callable[[Params, ClientData], dict[str, Array]]:
    """``training_loss(params, sample) -> {train_loss}``, the mean over the sample's rows."""

    def training_loss(params: Params, sample: ClientData) -> dict[str, Array]:
        return {"train_loss": part_mean(lambda x, y: model.loss(model.apply(params, x), y), sample, 500)}

    return training_loss


def make_metrics(
    model: Model, metrics: Sequence[tuple[str, Metric]], total: int, num_clients: int | None
) -> Callable[..., dict[str, Array]]:
    """``evaluate(params, test_x, test_y, owner) -> {NAME[, client_NAME]}``; see ``evaluation.mean_scores``."""

    def evaluate(params: Params, test_x: Array, test_y: Array, owner: Owned | None) -> dict[str, Array]:
        found = each_row(lambda x, y: values_of(metrics, model.apply(params, x), y), test_x, test_y, total)
        out = finished(metrics, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found), jnp.int32(total))
        if num_clients is None or owner is None:
            return out

        def sums(leaf: Array) -> Array:
            return owner.sums(leaf, num_clients)

        count = sums(jnp.ones(total, jnp.result_type(float)))
        share = jax.tree.map(lambda leaf: sums(leaf) / count.reshape(-1, *(1 for _ in leaf.shape[1:])), found)
        each_client = jax.vmap(lambda means, count: finished(metrics, means, count))(share, count)
        return out | {f"client_{name}": values for name, values in each_client.items()}

    return evaluate


def make_own_metrics(model: Model, metrics: Sequence[tuple[str, Metric]]) -> Callable[..., dict[str, Array]]:
    """``evaluate(params_of, test_x, test_y, tests) -> {client_own_NAME}``: metrics of model ``params_of(i)``, [N]."""

    def evaluate(params_of: Callable[[Array], Params], x: Array, y: Array, tests: OwnTests) -> dict[str, Array]:
        rows = rows_at_a_time(len(tests.order), len(tests.size))

        def one(i: Array) -> dict[str, Array]:
            params = params_of(i)
            part = ClientData(x, y, tests.order, tests.offset[i], tests.size[i])
            means = part_mean(lambda x, y: values_of(metrics, model.apply(params, x), y), part, rows)
            return finished(metrics, means, part.size)

        found = over_clients(one, len(tests.size), 1)
        return {f"client_own_{name}": values for name, values in found.items()}

    return evaluate


def make_tuned(
    model: Model, labels: bool, measures: Measures, num_clients: int, width: int
) -> Callable[..., dict[str, Array]]:
    """``evaluate(tuner, start_of, key, version, training, test_x, test_y, tests) -> {client_tuned_loss, ...}``.

    Client i takes ``fine_tune`` local steps of ``tuner`` from ``start_of(i)``. Its trained model is evaluated on its
    own test rows: loss, accuracy and metrics, float[N], NaN for a client without test rows. The minibatches depend only
    on the run's ``key`` and i: every evaluation uses the same ones. ``width``: how many clients are trained at a time.
    """

    def evaluate(
        tuner: ClientAlgorithm,
        start_of: Callable[[Array], Params],
        key: Key,
        version: Array,
        training: ClientData,
        test_x: Array,
        test_y: Array,
        tests: OwnTests,
    ) -> dict[str, Array]:
        root, rows = jax.random.fold_in(key, jnp.uint32(FINE_TUNING)), rows_at_a_time(len(tests.order), num_clients)

        def one(i: Array) -> dict[str, Array]:
            message = Message(start_of(i), (), version)
            data = training._replace(offset=training.offset[i], size=training.size[i])
            work = run_steps(tuner, job_key(root, i, jnp.int32(0)), message, (), data, measures.fine_tune)

            def measure(x: Array, y: Array) -> tuple[tuple[Array, Array], dict[str, Any]]:
                scores = loss_and_hit(model, labels, work.params, x, y)
                return scores, values_of(measures.metrics, model.apply(work.params, x), y)

            part = ClientData(test_x, test_y, tests.order, tests.offset[i], tests.size[i])
            (loss, accuracy), means = part_mean(measure, part, rows)
            return {"loss": loss, "accuracy": accuracy} | finished(measures.metrics, means, part.size)

        found = over_clients(one, num_clients, width)
        return {f"client_tuned_{name}": values for name, values in found.items()}

    return evaluate
