"""FedStaleWeight: what its weights are for, and where they are zero."""

import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.base.notices import AllRejected

WORLD = {"dataset": "quadratic", "model": "linear", "partition": "natural", "steps": 1}


def run_of(method, timing="buffer:size=3,sampling=same", updates=1998):
    return simulate(method=f"{method}@{timing}", delay="lognormal:heterogeneity=1", updates=updates, **WORLD)


def influence(method):
    """The sum of each client's shares in the server steps, as a part of the mean of all."""
    table = run_of(method).updates
    total = np.bincount(table["step"], table["weight"])[table["step"]]
    shares = np.divide(table["weight"], total, out=np.zeros(len(total)), where=total > 0)
    of_client = np.bincount(table["client"], shares)
    return of_client / of_client.mean()


def test_slow_clients_count_more_nearly_as_fast_ones_do():
    fair, usual = influence("fedstaleweight"), influence("fedbuff:staleness=constant")
    assert usual.max() > 10 * usual.min() and fair.max() < 5 * fair.min()
    slow = np.argsort(usual)[: len(usual) // 2]
    assert (fair[slow] > usual[slow]).all()


def test_in_rounds_nothing_is_stale_and_nothing_moves():
    with pytest.warns(AllRejected, match="30 of weight 0"):
        run = run_of("fedstaleweight", "cohort:size=3", updates=30)
    assert run.counters["unchanged_steps"] == run.counters["server_steps"] == 10
