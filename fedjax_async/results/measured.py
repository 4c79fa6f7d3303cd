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
UNJUDGED = ("consensus", "lost_mass")  # measured of nodes, and neither better if it is larger nor if it is smaller
# Title of a cost in tables of runs -> column of the evaluations (its last value is the cost), factor.
COSTS = {"energy (kJ)": ("energy", 1e-3), "carbon (g CO2e)": ("carbon", 1.0)}
CLIENT = "client_"  # prefix of columns over the clients, see engine/client_scores.py
MODELS = {"own_": "own models", "tuned_": "fine-tuned models", "": "global model"}  # prefix of a client's score
# What the titles of models and of nodes' scores mean, a sentence each.
MEANINGS = {
    "global model": "the server's model on each client's own test part",
    "own models": "each client's own model on its own test part",
    "fine-tuned models": "copies of the global model after local steps of each client, on its own test part",
    "global accuracy": "mean over the nodes of their models' accuracy on the global test set",
    "average accuracy": "accuracy of one model, the mean of all nodes' models, on the global test set",
}
OF_NODES = {"global": "nodes' models", "average": "mean model"}  # start of a column -> the models that it scores
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
    >>> column_title("average_accuracy")
    'average accuracy (mean model)'
    """
    if not column.startswith(CLIENT):
        models = OF_NODES.get(column.partition("_")[0])
        name = {"train_loss": "training loss"}.get(column, column.replace("_", " "))
        return name if models is None else f"{name} ({models})"
    ending = next(ending for ending in STATISTICS if column.endswith(ending))
    model, score = of_model(column.removeprefix(CLIENT).removesuffix(ending))
    parts = [] if model == MODELS[""] else [model]
    return ", ".join([*parts, column_title(score), STATISTICS[ending]])


def meanings(columns: Iterable[str]) -> str:
    """What the models and nodes' scores among these columns of evaluations mean, in one line; empty without any.

    >>> meanings(["loss", "average_accuracy"])
    "average accuracy: accuracy of one model, the mean of all nodes' models, on the global test set."
    """
    columns = list(columns)
    found = [name for name in ("global accuracy", "average accuracy") if name.replace(" ", "_") in columns]
    scored = [name for name in columns if name.startswith(CLIENT)]
    found += [of_model(name.removeprefix(CLIENT))[0] for name in scored]
    return "; ".join(f"{name}: {MEANINGS[name]}" for name in dict.fromkeys(found)) + "." * bool(found)


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


def shown_unit(unit: str, runs: Iterable[Run]) -> str:
    """The unit that names an axis: ``bytes_between`` and ``event`` for bytes and steps of runs without a server only.

    A run without a schedule, such as one whose curves alone are kept, counts as one with a server.
    """
    of_nodes = {"bytes": "bytes_between", "step": "event"}.get(unit, unit)
    return of_nodes if all(hasattr(run.schedule, "source") for run in runs) else unit
