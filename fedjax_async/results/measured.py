"""Columns of the evaluations besides loss and accuracy: which runs have them, and their readable names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedjax_async.types import Run

# What the package evaluates or counts in every run.
USUAL = (
    "time", "update", "step", "loss", "accuracy", "validation_loss", "validation_accuracy", "bytes_up", "bytes_down",
    "values_bytes_up", "energy", "carbon",
    "global_loss", "average_loss", "online", "smallest_mass", "largest_mass", "total_mass",
)  # fmt: skip
# Title of a cost in tables of runs -> column of the evaluations (its last value is the cost), factor.
COSTS = {"energy (kJ)": ("energy", 1e-3), "carbon (g CO2e)": ("carbon", 1.0)}
CLIENT = "client_"  # prefix of columns over the clients, see engine/client_scores.py
MODELS = {"own_": "own models", "tuned_": "fine-tuned models", "": "global model"}  # prefix of a client's score
STATISTICS = {"_std": "deviation between clients", "_worst": "worst tenth of clients", "": "mean over clients"}


def shared_columns(runs: Iterable[Run]) -> list[str]:
    """The columns that all runs have, without the ``USUAL`` ones, in the order of the first run."""
    first, *others = (run.evaluations for run in runs)
    return [name for name in first if name not in USUAL and all(name in other for other in others)]


def measured(runs: Iterable[Run]) -> list[str]:
    """The training loss and the metrics that all runs have."""
    return [name for name in shared_columns(runs) if not name.startswith(CLIENT)]


def validation(runs: Sequence[Run], metric: str) -> list[str]:
    """The column of ``metric`` on the validation part, if all runs have it, as a list."""
    column = f"validation_{metric}"
    return [column] if all(column in run.evaluations for run in runs) else []


def client_scores(runs: Iterable[Run]) -> list[str]:
    """The scores of single clients whose columns all runs have, such as ``accuracy`` and ``own_accuracy``."""
    return [
        name.removeprefix(CLIENT).removesuffix("_worst")
        for name in shared_columns(runs)
        if name.startswith(CLIENT) and name.endswith("_worst")
    ]


def of_model(score: str) -> tuple[str, str]:
    """The model that a client's score belongs to, and the score itself.

    >>> of_model("own_accuracy"), of_model("loss")
    (('own models', 'accuracy'), ('global model', 'loss'))
    """
    prefix = next(prefix for prefix in MODELS if score.startswith(prefix))
    return MODELS[prefix], score.removeprefix(prefix)


def column_title(column: str) -> str:
    """The readable name of a column.

    >>> column_title("train_loss"), column_title("client_tuned_accuracy_worst")
    ('training loss', 'fine-tuned models, accuracy, worst tenth of clients')
    """
    if not column.startswith(CLIENT):
        return {"train_loss": "training loss"}.get(column, column.replace("_", " "))
    ending = next(ending for ending in STATISTICS if column.endswith(ending))
    model, score = of_model(column.removeprefix(CLIENT).removesuffix(ending))
    parts = [] if model == MODELS[""] else [model]
    return ", ".join([*parts, column_title(score), STATISTICS[ending]])


def curve_columns(runs: Mapping[str, Sequence[Run]], metric: str) -> dict[str, list[str]]:
    """Column -> the groups of runs that have it, for each column that is drawn besides ``metric``.

    These are ``metric`` on the validation part, the training loss, the metrics, and the worst tenth of the clients by
    ``metric``, for every model. Columns that are constant or known only at the first and last evaluation are left out.
    """
    found: dict[str, list[str]] = {}
    for name, seeds in runs.items():
        worst = [f"{CLIENT}{score}_worst" for score in of_metric(client_scores(seeds), metric)]
        for column in [*validation(seeds, metric), *measured(seeds), *worst]:
            found.setdefault(column, []).append(name)
    return {column: names for column, names in found.items() if any(_has_curve(runs[name], column) for name in names)}


def _has_curve(seeds: Iterable[Run], column: str) -> bool:
    for run in seeds:
        values = np.asarray(run.evaluations[column], np.float64)
        known = values[np.isfinite(values)]
        if len(known) > min(2, len(values) - 1) and known.min() < known.max():
            return True
    return False


def of_metric(scores: Sequence[str], metric: str) -> list[str]:
    """The scores that are a client's ``metric``, ``accuracy`` or ``loss``, for any model."""
    return [score for score in scores if of_model(score)[1] == metric]
