"""Columns of the evaluations from the scores of single clients: mean, standard deviation, mean of the worst tenth.

They are computed once, when a run's tables are made; tables and plots read the columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedjax_async.types import Tree

_ACCURACY = re.compile(r"(client_|validation_|global_|average_)?(own_|tuned_)?accuracy(_std|_worst)?")


def is_accuracy(name: str) -> bool:
    """Whether a column is an accuracy, which is NaN throughout if targets are not class labels.

    >>> is_accuracy("client_own_accuracy_worst"), is_accuracy("my_accuracy")
    (True, False)
    """
    return _ACCURACY.fullmatch(name) is not None


def without_accuracies(scores: Mapping[str, Tree]) -> dict[str, Tree]:
    """The scores of a run whose targets are not class labels."""
    return {name: value for name, value in scores.items() if not is_accuracy(name)}


def smaller_is_better(name: str) -> bool:
    """Whether a score is a loss or an error, judged by its name.

    >>> smaller_is_better("own_loss"), smaller_is_better("tuned_accuracy")
    (True, False)
    """
    return name.endswith(("loss", "error"))


@np.errstate(over="ignore", invalid="ignore")  # a client's loss is infinite where the model diverged
def client_columns(per_client: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Three columns, float64[rows], for each score ``NAME`` [rows, N]; clients without test rows are left out.

    - ``client_NAME``: the mean over the clients, with equal weights;
    - ``client_NAME_std``: the standard deviation over the clients (divisor n, since all clients are counted);
    - ``client_NAME_worst``: the mean over the worst tenth of the clients (rounded up): those with the lowest scores, or
      with the highest losses and errors. The worst clients may differ between evaluations. Li et al., "Fair resource
      allocation in federated learning", 2020, table 1.

    A client without test rows has NaN for every score of every evaluation. A NaN of any other client, such as the loss
    of a model that diverged, makes the columns of that evaluation NaN.
    """
    if not per_client:
        return {}
    tables = {name: np.asarray(values, np.float64) for name, values in per_client.items()}
    tested = np.any([~np.isnan(values).all(axis=0) for values in tables.values()], axis=0)
    columns: dict[str, np.ndarray] = {}
    for name, values in tables.items():
        of_tested = np.ascontiguousarray(values[:, tested])
        rows, count = of_tested.shape
        if not count:
            continue
        ordered = np.sort(-of_tested if smaller_is_better(name) else of_tested, axis=1)
        worst = np.mean(ordered[:, : -(-count // 10)], axis=1) + np.zeros(rows)
        worst[np.isnan(of_tested).any(axis=1)] = np.nan  # NaN is sorted last, but a diverged model is the worst
        columns |= {
            f"client_{name}": np.mean(of_tested, axis=1),
            f"client_{name}_std": np.std(of_tested, axis=1),
            f"client_{name}_worst": -worst if smaller_is_better(name) else worst,
        }
    return columns
