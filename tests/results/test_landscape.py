"""Levels of contours for all kinds of losses."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.results.landscape import LEVELS, levels_of


@pytest.mark.parametrize(
    "loss",
    [
        np.geomspace(0.1, 1e6, 12).reshape(3, 4),
        np.linspace(-1.0, 2.0, 12).reshape(3, 4),
        np.zeros((2, 2)),
        np.full((2, 2), 0.7),
        np.array([[np.nan, 1.0], [np.inf, 2.0]]),
    ],
)
def test_levels_increase_from_the_lowest_loss_and_reach_all_models(loss):
    finite = loss[np.isfinite(loss)]
    models = np.array([finite.max(), np.nan])
    levels = levels_of(loss, models)
    assert levels.shape == (LEVELS,) and (np.diff(levels) > 0).all()
    assert levels[0] == pytest.approx(finite.min()) and levels[-1] >= finite.max() * (1 - 1e-12)


def test_a_landscape_without_a_finite_loss_is_refused():
    with pytest.raises(ValueError, match="finite somewhere on the grid"):
        levels_of(np.full((2, 2), np.nan), np.array([1.0]))
