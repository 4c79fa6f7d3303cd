"""The table of methods at their defaults: its grids begin with the defaults, and its choice never sees the test set."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.clock import TIMINGS
from fedjax_async.config.methods import METHODS, is_decentralised, method_of
from fedjax_async.registry import options_of, parse_spec
from tests.experiment import module


@pytest.fixture(scope="module")
def defaults():
    return module("methods", "defaults")


def meaning(spec):
    """Rule, options of local training, and the timing with its defaults (a cohort of None is ten)."""
    chosen = method_of(spec)
    name, options = parse_spec("timing", chosen.timing)
    full = {key: p.default for key, p in options_of(TIMINGS[name]).items()} | options
    if name == "cohort" and full["size"] is None:
        full["size"] = 10
    return chosen._replace(timing=(name, full))


def test_every_method_with_a_server_has_a_grid_whose_first_values_are_its_default(defaults):
    assert list(defaults.GRIDS) == [name for name, usual in METHODS.items() if not is_decentralised(usual)]
    for scale, grids in (("laptop", defaults.GRIDS), ("smoke", defaults.SMALLEST)):
        for method, grid in grids.items():
            first = defaults.spec(method, {name: values[0] for name, values in grid.items()})
            assert meaning(first) == meaning(method), first
            others = defaults.points(method, scale)[1:]
            assert len(others) == np.prod([len(values) for values in grid.values()]) - 1 > 0
            for other in others:
                assert meaning(other) != meaning(method), other


def test_the_validation_part_chooses_and_a_tie_keeps_the_default(defaults):
    assert all(setting["validation_fraction"] > 0 for setting in defaults.SETTINGS.values())

    def found(*points):
        names = ("validation", "test", "swing", "updates")
        return {name: dict(zip(names, ([each, each + 1.0] for each in values))) for name, *values in points}

    row = defaults.row(
        "asgd", found(("asgd", 70, 60, 1, 5), ("asgd:server_lr=0.1", 71, 50, 2, 5), ("asgd:a=1", 3, 99, 0, 5))
    )
    assert row["tuned"] == "server_lr=0.1@every" and row["gained (points)"].mean == -10
    assert defaults.row("asgd", found(("asgd", 70, 60, 1, 5), ("asgd:a=1", 70, 99, 0, 5)))["tuned"] == "the default"
    diverged = defaults.row("asgd", found(("asgd", np.nan, 10, 1, 5), ("asgd:a=1", 20, 30, 0, 5)))
    assert diverged["tuned"] == "a=1@every"
