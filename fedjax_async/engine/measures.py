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
from fedjax_async.engine.evaluation import Inputs, Metrics, OwnTests, own_tests, pool_part
from fedjax_async.local import job_key, run_steps
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

    def shared(self) -> tuple[object, ...]:
        """What must be equal in two runs that share a program."""
        sample = None if self.training is None else (self.training.examples,)
        return self.metrics, sample, self.fine_tune, self.tuner


NOTHING = Measures()


def training_rows(data: FederatedData, sample: Sample) -> np.ndarray:
    """The rows of ``data.x`` on which the training loss is measured, in order of clients; int64[n].

    They are among the examples that the clients train on. Raises ``ValueError`` if more examples are asked for than
    there are, or if all are asked for and they are too many.
    """
    total = int(data.size.sum(dtype=np.int64))
    if sample.examples is None:
        whole = total <= LARGEST_POOL and not data.streamed
        why = "that are not in memory" if data.streamed else "too many for every evaluation"
        allowed = f"a number of examples: {data.name} has {total}, {why}"
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
            {} if rows is None else {"train_": pool_part(d, rows, longest)},
            ClientData._make(((), (), d.order, d.offset, d.size, None)) if tuned else None,
        )
        for d, schedule, rows in zip(data, schedules, samples)
    ]


class FineTuning(NamedTuple):
    """Fine-tuning of the clients' models before they are scored."""

    metrics: Metrics
    tuner: Any  # Client
    steps: int
    width: int  # clients that are trained at a time

    def scores(
        self,
        tuner: ClientAlgorithm,
        start_of: Callable[[Array], Params],
        key: Key,
        version: Array,
        training: ClientData,
        tests: OwnTests,
        test: tuple[Array, Array],
    ) -> dict[str, Array]:
        """``client_tuned_NAME`` of each client's trained model on its own test rows, [N]; NaN for a client without.

        Client i takes the local steps of ``tuner`` from ``start_of(i)``. The minibatches depend only on the run's
        ``key`` and i: every evaluation uses the same ones. ``test``: inputs and targets of the test set.
        """
        root = jax.random.fold_in(key, jnp.uint32(FINE_TUNING))

        def trained(i: Array) -> Params:
            message = Message(start_of(i), (), version)
            data = training._replace(offset=training.offset[i], size=training.size[i])
            params: Params = run_steps(tuner, job_key(root, i, jnp.int32(0)), message, (), data, self.steps).params
            return params

        parts = tests.of("client_tuned_", *test)
        return self.metrics.each(trained, parts, len(tests.size), tests.rows(), self.width)


def training_loss(model: Model) -> Metrics:
    """The loss on the training examples."""
    return Metrics(model, None, (("loss", Metric(model.loss)),))
