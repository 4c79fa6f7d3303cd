"""The engine equals the oracle in worlds drawn from the registries: other ones every day.

A failure has a line that draws its world again. ``python -m tests.worlds`` counts the pairs of values of a week.
"""

from __future__ import annotations

import datetime
import os
from contextlib import suppress

import jax
import numpy as np
import pytest

from fedjax_async import simulate, sweep
from tests.engine.problem import MODEL
from tests.worlds import drawn, refusal, settings_of

DRAWS = 12
DAY = int(os.environ.get("WORLDS") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))


class Ended(Exception):
    """Raised to end a run on its way."""


def resumed(settings, folder):
    """The run, ended by force on its way and continued from its checkpoint."""
    kept = settings | {"out": folder, "checkpoint": 5, "plots": False}

    def end(done, of, **status):
        if done >= 10:
            raise Ended

    with suppress(Ended):
        simulate(**kept, progress=end)
    return simulate(**kept)


def swept(settings):
    """The run as the second of a sweep."""
    return list(sweep(settings, {"lr": [0.05, settings["lr"]]}, progress=False).runs)[1]


def close(have, want, start, line):
    """Assert that two models are equal up to a share of the distance that the model has moved."""
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (have, want, start)]
    apart, moved = (np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(leaves[1], leaves[k]))) for k in (0, 2))
    assert apart <= 1e-8 * moved + 1e-12, line


@pytest.mark.filterwarnings("ignore::fedjax_async.notices.RunWarning", "ignore::fedjax_async.notices.AllRejected")
@pytest.mark.parametrize("number", range(DRAWS))
def test_the_engine_equals_the_oracle(number, tmp_path):
    world = drawn(DAY, number)
    line = f"WORLDS={DAY} python -m pytest 'tests/test_worlds.py::test_the_engine_equals_the_oracle[{number}]' {world}"
    with jax.enable_x64(True):
        why = refusal(world)
        if why is not None:
            assert "\n" not in why and len(why) < 600, line
            return
        settings = settings_of(world)
        want = simulate(**settings, engine="reference")
        engine = settings | {"batching": world["batching"], "max_width": 4}
        if world["run"] == "resumed":
            have = resumed(engine, tmp_path / "run")
        elif world["run"] == "swept":
            have = swept(engine)
        else:
            have = simulate(**engine)
        close(have.params, want.params, MODEL.init(jax.random.key(0)), line)
        for table in ("evaluations", "updates"):
            for name, column in getattr(want, table).items():
                np.testing.assert_allclose(getattr(have, table)[name], column, rtol=1e-6, atol=1e-9, err_msg=line)
