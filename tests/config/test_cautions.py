"""Warnings: modules that start alike for every seed, late evaluations, fragments that go together, infinite models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_async import Method, Settings, models, named, simulate
from fedjax_async.clock import TIMINGS
from fedjax_async.config import prepare
from fedjax_async.config.cautions import caution_model
from fedjax_async.local import going_on_training
from fedjax_async.server import rule, scale_by_staleness
from tests.told import warned

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 6}


class Seeded(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(784, 10, rngs=rngs)

    def __call__(self, x):
        return self.layer(x.reshape(x.shape[0], -1))


def seeds_starts(model, **settings):
    """The first kernel entries of two seeds' starts, and the warnings of the two runs."""
    given = [Settings(**SMALL | {"model": model, "seed": seed} | settings) for seed in (0, 1)]
    runs, said = warned(lambda: [prepare(each) for each in given])
    return [np.asarray(run.params["layer"]["kernel"][0, :3]) for run in runs], said


def test_an_nnx_module_starts_alike_for_every_seed_and_says_what_to_do():
    """The advice of the warning gives another start to each seed, and no warning."""
    fixed = Seeded(nnx.Rngs(0))
    for model in (fixed, named("net", fixed), models.from_nnx(fixed)):
        starts, said = seeds_starts(model)
        np.testing.assert_array_equal(*starts)
        assert len(said) == 2
        assert all(line.startswith("model: an nnx module starts from the weights that it was made") for line in said)
    advice = lambda rngs: Seeded(rngs=rngs)  # noqa: E731 (as the warning has it)
    starts, said = seeds_starts(advice)
    assert np.all(starts[0] != starts[1])
    assert said == []
    _, said = seeds_starts(fixed, initial=prepare(Settings(**SMALL | {"model": advice})).params)
    assert said == []


def test_an_nnx_module_starts_alike_without_a_server_and_with_a_policy_too():
    for settings in ({"method": "dpsgd"}, {"policy": "power_of_choice:d=2", "timing": "every:concurrency=2"}):
        _, said = seeds_starts(Seeded(nnx.Rngs(0)), **settings)
        assert sum("the same for every seed" in line for line in said) >= 2


WORLD = {"model": "logistic", "clients": 3, "steps": 1, "delay": "constant:mean=10"}  # three arrivals every ten seconds
TIME, UPDATES, STEPS = {"time": 40.0}, {"updates": 12}, {"server_steps": 4, "method": "fedbuff@buffer:size=3"}
NODES = {"method": "independent"}


def said(settings):
    """The lines that preparing a run says."""
    return warned(prepare, Settings(**WORLD | settings))[1]


OUTSIDE = {
    "moments": ({"eval_at": "20,50,60"}, "eval_at: no evaluation at 2 of 3 moments, from 50 s on, because"),
    "seconds": ({"eval_time": 41.0}, "eval_time = 41: longer than the run, which ends after 40 s: only its start"),
    "updates": ({"eval_updates": 13}, "eval_updates = 13: longer than the run, which has 12 updates"),
    "many": ({"eval_updates": 1234567}, "eval_updates = 1234567: longer than the run, which has 12 updates"),
}  # fmt: skip
INSIDE = [{"eval_at": "20,40"}, {"eval_time": 40.0}, {"eval_time": 7.0}, {"eval_updates": 12}, {}]


@pytest.mark.parametrize("budget", [TIME, UPDATES, STEPS, TIME | NODES, UPDATES | NODES])
def test_evaluations_after_the_end_are_said_whatever_ends_the_run(budget):
    for asked, line in OUTSIDE.values():
        (found,) = said(budget | asked)
        assert found.startswith(line)
    for asked in INSIDE:
        assert said(budget | asked) == []


def test_server_steps_after_the_end_are_said():
    (line,) = said(STEPS | {"eval_steps": 5})
    assert line.startswith("eval_steps = 5: longer than the run, which has 4 server steps: only its start and its end")
    assert said(STEPS | {"eval_steps": 4}) == []


def test_a_run_with_a_policy_says_it_when_its_end_is_known():
    settings = WORLD | UPDATES | {"policy": "power_of_choice:d=2", "timing": "every:concurrency=2"}
    with pytest.warns(UserWarning, match=r"^eval_at: no evaluation at 1 of 2 moments, from 999 s on, because the run"):
        simulate(**settings, eval_at="20,999", engine="reference")
    lines = warned(simulate, **(settings | {"policy": "uniform"}), eval_at="20,999", engine="reference")[1]
    assert len(lines) == 1  # known before the run: a second line would repeat it


def test_a_shared_link_without_effect_is_said():
    shared = {"network": "link:up=1000,shared=true"}
    (line,) = said(UPDATES | shared)
    assert line.startswith("network = 'link:up=1000,shared=true': shared has no effect in a run with a server")
    assert said(UPDATES | shared | {"method": "swift"}) == said(UPDATES | {"network": "link:up=1000"}) == []


def test_coefficients_that_change_are_said_where_nodes_add_up_what_they_hear():
    ring = WORLD | UPDATES | {"topology": "ring", "delay": "constant:mean=10,heterogeneity=0.5"}
    (line,) = said(ring | {"method": "choco@mean:policy=merge", "updates": 60})
    assert "messages of the plan are mixed with other coefficients than the first one" in line
    assert said(ring | {"method": "choco"}) == []


def divided():
    """A rule that divides by the staleness, which is 0 for a fresh upload."""
    return Method(rule(scale_by_staleness(lambda tau: 1.0 / tau.astype(jnp.float32)), optimizer=optax.sgd(1.0)))


def test_a_rule_that_makes_the_model_infinite_is_named_with_the_update():
    run, (line,) = warned(simulate, **SMALL, method=divided(), engine="reference")
    assert "the model is not finite since update 0, which has the weight inf." in line
    assert not np.isfinite(run.evaluations["loss"][-1])


def test_a_model_of_nodes_that_is_not_finite_is_said_too():
    run = simulate(method="dpsgd", topology="ring", engine="reference", **SMALL)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), run.params)
    losses = np.append(run.evaluations["loss"][:-1], np.nan)
    with pytest.warns(UserWarning, match="not finite since .* s or before. Uploads"):
        caution_model(run._replace(params=broken, evaluations=run.evaluations | {"loss": losses}))


def test_fragments_that_travel_together_are_said_and_change_nothing():
    shared = WORLD | {"clients": 4, "updates": 12, "delay": "lognormal:mean=10", "engine": "reference"}
    with pytest.warns(UserWarning, match=r"^topology: each receiver of a node gets all .* with 2 messages in"):
        cut = simulate(**shared, method="divshare:omega=0.5", topology="ring")
    whole = simulate(**shared, method="async_dfedavg", topology="ring")
    np.testing.assert_allclose(cut.evaluations["loss"], whole.evaluations["loss"], rtol=1e-5)
    apart = {"method": "divshare:omega=0.5", "updates": 12, "clients": 4}
    assert said(apart | {"topology": "gossip:receivers=2"}) == []
    (line,) = said(apart | {"topology": "gossip:receivers=3"})  # all other nodes
    assert line.startswith("topology: each receiver")
    assert said(apart | {"topology": "ring", "faults": "drop:probability=0.3"}) == []


def test_a_decay_within_jobs_that_end_unforeseen_is_said():
    polled = WORLD | UPDATES | {"method": "quafl:size=2", "timing": "polling:length=7,size=2"}
    (line,) = said(polled | {"decay": "linear"})
    assert line.startswith("decay = 'linear': falls over the local steps that a job turns out to have")
    assert said(polled | {"decay": "cosine"}) == said(WORLD | UPDATES | {"decay": "linear"}) == []
    parts = WORLD | UPDATES | {"timing": "midway", "client": going_on_training}
    (line,) = said(parts | {"decay": "linear"})
    assert line.startswith("decay = 'linear': falls over the local steps that each part of a job has with the")
    assert said(parts) == []


def test_a_timing_of_the_users_own_says_that_it_ends_jobs():
    def hurried(scenario):
        return TIMINGS["hurry"](size=2)(scenario)

    assert said(WORLD | UPDATES | {"timing": named("hurried", hurried), "decay": "linear"}) == []
    hurried.ends_jobs = True
    (line,) = said(WORLD | UPDATES | {"timing": named("hurried", hurried), "decay": "linear"})
    assert "which its client cannot know with the timing hurried;" in line


KEPT = {"feedback": "ef"}


@pytest.mark.parametrize(
    ("compress", "settings", "diverges"),
    [
        ("qsgd", KEPT, True), ("qsgd:levels=127", KEPT, False), ("qsgd:scaled=true", {}, False), ("qsgd", {}, False),
        ("qsgd", {"feedback": "off"}, False), ("qsgd", {"feedback": "ef21"}, True), ("sign", KEPT, True),
        ("randk", KEPT, True), ("randk:unbiased=false", {}, False), ("topk", {}, False),
        ("topk_qsgd:scaled=false,levels=1", {}, True), ("qsgd", {"method": "choco"}, True),
        ("qsgd:levels=127", {"method": "choco"}, False),
    ],
)  # fmt: skip
def test_errors_that_add_up_under_feedback_are_told_before_a_run(compress, settings, diverges):
    _, said = warned(lambda: prepare(Settings(**SMALL | {"compress": compress} | settings)))
    assert ["may diverge" in line for line in said] == [True] * diverges


def test_the_warned_feedback_diverges_and_the_advised_one_does_not():
    def last_loss(**settings):
        world = SMALL | {"clients": 3, "lr": 0.05, "updates": 90, "eval_updates": 90, "engine": "reference"}
        return warned(lambda: simulate(**world, **settings))[0].evaluations["loss"][-1]

    assert last_loss(compress="qsgd:levels=1", feedback="ef") > 10
    assert last_loss(compress="qsgd:levels=1") < 2.4
    assert last_loss(compress="topk") < 2.4


@pytest.mark.parametrize(
    ("method", "topology", "stays"),
    [
        ("el_local", "ring", True), ("el_oracle", "random_regular:degree=2", True), ("el_local@mean", "ring", False),
        ("el_local", "gossip:receivers=2", False), ("el_oracle", "random_regular:degree=2,redraw=true", False),
        ("el_local", None, False), ("dpsgd", "ring", False),
    ],
)  # fmt: skip
def test_epidemic_learning_on_a_graph_that_stays_is_told(method, topology, stays):
    _, said = warned(lambda: prepare(Settings(**SMALL | {"method": method, "topology": topology})))
    assert ["no epidemic learning" in line for line in said] == [True] * stays


def test_what_a_timing_does_not_use_is_said():
    rounds = {"model": "logistic", "clients": 3, "steps": 1, "timing": "participation", "updates": 6, "delay": "rpi"}
    (line,) = said(rounds | {"delay": "constant:mean=9", "network": "link:down=9"})
    assert line.startswith("delay = 'constant:mean=9', network = 'link:down=9': without effect with the timing partic")
    assert said(rounds) == []
