"""Metrics, training loss and fine-tuning that settings ask for: from names to ``engine.measures.Measures``."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fedjax_async.base import check, grammar, registry
from fedjax_async.config import objects, own
from fedjax_async.config.clients import plain_training
from fedjax_async.config.contracts import check_metric
from fedjax_async.config.settings import Settings
from fedjax_async.engine.components import Client, parted
from fedjax_async.engine.measures import Measures, Sample, require_measurable
from fedjax_async.models import METRICS, Metric
from fedjax_async.types import Array, FederatedData, Model, Params

# No metric may have a name in TAKEN, a column of the evaluations, or a name that begins as in STARTS.
TAKEN = (
    "time", "update", "step", "loss", "accuracy", "train_loss", "bytes_up", "bytes_down", "values_bytes_up",
    "energy", "carbon", "run", "seed",
)  # fmt: skip
STARTS = ("client_", "own_", "tuned_", "validation_")


def metrics_of(setting: object) -> tuple[tuple[str, Metric], ...]:
    """The metrics of the setting, a list of specs or a dict of names and functions, by the name of their column.

    The column of a spec is its name followed by the values of its options: ``top:k=3`` becomes ``top3``. Raises
    ``ValueError`` for unknown names, and for columns that exist already.
    """
    given = own.thing_of("metrics", setting)
    if given is None:
        specs = [] if setting is None else grammar.listed(str(setting))
        pairs = [(_column(spec), _named(spec)) for spec in specs]
    else:
        pairs = [(name, _metric(name, thing)) for name, thing in given.items()]
    seen: list[str] = []
    for column, _ in pairs:
        require_column(column, seen)
        seen.append(column)
    return tuple(pairs)


def require_column(name: str, others: Collection[str] = ()) -> None:
    """``ValueError`` unless a metric may have the column ``name``; ``others``: columns of other metrics."""
    free = name not in (*TAKEN, *others) and not name.startswith(STARTS)
    check.require(free, "metrics", name, "another name: there is a column with this name or this beginning")


def _column(spec: str) -> str:
    part = registry.read("metrics", spec, METRICS)
    return part.name + "_".join(str(value) for value in part.options.values())


@registry.cached_by_name(maxsize=64)
def _named(spec: str) -> Metric:
    """The metric of a spec; equal specs give the same object, so that runs share programs."""
    found = registry.spec("metrics", METRICS, spec).make()
    return _metric(spec, found)


def _metric(name: str, thing: str | Metric | Callable[[Array, Array], object]) -> Metric:
    if isinstance(thing, str):
        return _named(thing)
    allowed = "f(outputs, y) -> [B], or a Metric"
    check.require(isinstance(thing, Metric) or callable(thing), f"metrics[{name!r}]", objects.shown(thing), allowed)
    made: Metric = own.lasting(thing if isinstance(thing, Metric) else Metric(thing))
    return made


def measures_of(s: Settings, model: Model, params: Params, data: FederatedData, batch_size: int) -> Measures:
    """The measures that the settings ask for, checked; ``params``: their shapes."""
    metrics = metrics_of(s.metrics)
    for name, metric in metrics:
        check_metric(name, metric, model, params, data)
    sampled = s.train_loss or s.train_examples is not None
    found = Measures(metrics, Sample(s.train_examples, s.seed) if sampled else None, s.fine_tune or 0)
    if s.fine_tune is not None:
        found = found._replace(tuner=tuner_of(model, s, batch_size))
    require_measurable(data, found)
    return found


def tuner_of(model: Model, s: Settings, batch_size: int) -> Client:
    """Plain local training with the optimiser and rate of the settings: no proximal term, no correction."""
    tuner, _ = parted(plain_training(model, s, batch_size))
    return tuner
