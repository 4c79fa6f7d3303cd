"""Warnings before a run: an nnx module that starts alike for every seed."""

from __future__ import annotations

import warnings

import numpy as np
from flax import nnx

from fedjax_async import Settings, models, named
from fedjax_async.config import prepare

SMALL = {"clients": 4, "steps": 1, "updates": 6, "eval_updates": 6}


class Seeded(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(784, 10, rngs=rngs)

    def __call__(self, x):
        return self.layer(x.reshape(x.shape[0], -1))


def seeds_starts(model, **settings):
    """The first kernel entries of two seeds' starts, and the warnings of the two runs."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runs = [prepare(Settings(**SMALL | {"model": model, "seed": seed} | settings)) for seed in (0, 1)]
    return [np.asarray(run.params["layer"]["kernel"][0, :3]) for run in runs], [str(one.message) for one in said]


def test_an_nnx_module_starts_alike_for_every_seed_and_says_what_to_do():
    """The advice of the warning gives another start to each seed, and no warning."""
    fixed = Seeded(nnx.Rngs(0))
    for model in (fixed, named("net", fixed), models.from_nnx(fixed)):
        starts, said = seeds_starts(model)
        np.testing.assert_array_equal(*starts)
        assert len(said) == 2
        assert all(line.startswith("model: an nnx module starts from the weights that it was made") for line in said)
    advice = models.from_nnx(Seeded(nnx.Rngs(0)))._replace(
        init=lambda key: models.from_nnx(Seeded(nnx.Rngs(key))).init(key)
    )
    starts, said = seeds_starts(advice)
    assert np.all(starts[0] != starts[1])
    assert said == []
    _, said = seeds_starts(fixed, initial=prepare(Settings(**SMALL | {"model": advice})).params)
    assert said == []


def test_an_nnx_module_starts_alike_without_a_server_and_with_a_policy_too():
    for settings in ({"method": "dpsgd"}, {"policy": "power_of_choice:d=2", "timing": "every:concurrency=2"}):
        _, said = seeds_starts(Seeded(nnx.Rngs(0)), **settings)
        assert sum("the same for every seed" in line for line in said) >= 2
