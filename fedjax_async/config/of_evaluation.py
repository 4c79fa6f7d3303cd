"""The settings of the end of a run and of what is measured on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from fedjax_async.base import check
from fedjax_async.config.fields import MOMENTS, known, moments, setting

if TYPE_CHECKING:
    from fedjax_async.config.own import Named
    from fedjax_async.models.metrics import Metric


@dataclasses.dataclass(frozen=True)
class OfBudget:
    """When a run ends, and when it is evaluated."""

    time: float | None = setting(None, "end after X virtual seconds", "world", requires=check.real_positive)
    updates: int | None = setting(
        None, "end after N uploads; uploads of an incomplete server step are not used", "world", requires=check.whole
    )
    server_steps: int | None = setting(None, "end after N server steps", "world", without="nodes", requires=check.whole)
    eval_time: float | None = setting(
        None,
        "evaluate every X virtual seconds [a fiftieth of the run]",
        "world",
        without="explain",
        requires=check.real_positive,
    )
    eval_updates: int | None = setting(
        None, "evaluate every N updates", "world", without="explain", requires=check.whole
    )
    eval_steps: int | None = setting(
        None, "evaluate every N server steps", "world", without="nodes explain", requires=check.whole
    )
    eval_at: str | None = setting(
        None,
        "evaluate at these virtual seconds, e.g. 100,500,2000",
        "world",
        without="explain",
        requires=lambda field, value: moments(value),
        example=MOMENTS,
    )
    eval_examples: int | None = setting(
        None, "evaluate on N test examples, evenly spaced [all]", "world", without="dealt", requires=check.whole
    )
    stop_at: float | None = setting(
        None,
        "stop at the first evaluation that reaches this accuracy, such as 0.9 (without class labels: this loss), on "
        "the validation part if there is one, else on the test set",
        "world",
        without="trajectory",
        requires=check.positive,
        rare=True,
    )
    patience: int | None = setting(
        None,
        "stop after N evaluations in a row without a better accuracy (or loss); those of one model count once",
        "world",
        without="trajectory",
        requires=check.whole,
        rare=True,
    )
    per_client: bool = setting(
        False, "also evaluate on each client's own test part", "world", without="nodes trajectory explain"
    )
    global_tests: str | None = setting(
        None,
        "without a server: when every node's model and the mean model are also scored on the global test set: all "
        "(evaluations), ends (the first and the last) or never [ends]",
        "world",
        without="server trajectory explain",
        requires=known,
        example="a text such as 'ends'",
        rare=True,
    )


@dataclasses.dataclass(frozen=True)
class OfMeasures:
    """What is measured beside loss and accuracy."""

    metrics: str | Named | None = setting(
        None,
        "more metrics beside loss and accuracy, e.g. top:k=5,macro_f1 (`list metrics` shows all)",
        "world",
        without="nodes trajectory explain",
        rare=True,
    )
    train_loss: bool = setting(
        False,
        "also measure the loss on the clients' training examples",
        "world",
        without="nodes trajectory explain",
        rare=True,
    )
    train_examples: int | None = setting(
        None,
        "measure the training loss on N examples, drawn by the seed [all]; implies --train-loss",
        "world",
        without="nodes trajectory explain",
        requires=check.whole,
        rare=True,
    )
    fine_tune: int | None = setting(
        None,
        "at every evaluation, each client trains a copy of the global model for N local steps and scores it on its "
        "own test part",
        "world",
        without="nodes trajectory explain own_client",
        requires=check.whole,
        rare=True,
    )
    energy: str | None = setting(
        None,
        "count what jobs and messages cost the devices (columns energy and carbon), e.g. boards or csv:path=FILE",
        "world",
        without="nodes trajectory explain",
    )


class EvaluationKeywords(TypedDict, total=False):
    """The same as typed keywords."""

    time: float | None
    updates: int | None
    server_steps: int | None
    eval_time: float | None
    eval_updates: int | None
    eval_steps: int | None
    eval_at: str | None
    eval_examples: int | None
    stop_at: float | None
    patience: int | None
    per_client: bool
    global_tests: str | None
    metrics: str | Named | Mapping[str, Callable[..., Any] | Metric] | None
    train_loss: bool
    train_examples: int | None
    fine_tune: int | None
    energy: str | None
