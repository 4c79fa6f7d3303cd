"""Warnings of prepared runs: equal starts, late evaluations, settings without effect, feedback that diverges."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_async import Method, Settings, models, named, simulate
from fedjax_async.base.notices import RunWarning, SmallBuffer
from fedjax_async.clock import TIMINGS
from fedjax_async.config import prepare
from fedjax_async.config.cautions import caution_model
from fedjax_async.local import going_on_training
from fedjax_async.server import rule, scale_by_staleness
from tests.told import warned

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 6}
WORLD = {"model": "logistic", "clients": 3, "steps": 1, "delay": "constant:mean=10"}  # three arrivals every ten seconds


def said(settings):
    return warned(prepare, Settings(**settings))[1]


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
    for settings in ({"method": "dpsgd"}, {"policy": "power_of_choice:d=2", "timing": "every:concurrency=2"}):
        assert sum("the same for every seed" in line for line in seeds_starts(fixed, **settings)[1]) >= 2


TIME, UPDATES, STEPS = {"time": 40.0}, {"updates": 12}, {"server_steps": 4, "method": "fedbuff@buffer:size=3"}
NODES = {"method": "independent"}
AFTER = [
    ({"eval_at": "20,50,60"}, "eval_at: no evaluation at 2 of 3 moments, from 50 s on, because"),
    ({"faults": "drop:probability=0+drift:at=41,factor=1"}, "faults: no drift at 41 s because the run ends after 40 s"),
    ({"eval_time": 41.0}, "eval_time = 41: longer than the run, which ends after 40 s: only its start"),
    ({"eval_updates": 13}, "eval_updates = 13: longer than the run, which has 12 updates"),
    ({"eval_updates": 1234567}, "eval_updates = 1234567: longer than the run, which has 12 updates"),
]
WITHIN = [{"eval_at": "20,40"}, {"eval_time": 40.0}, {"eval_time": 7.0}, {"eval_updates": 12}, {}]


@pytest.mark.parametrize("budget", [TIME, UPDATES, STEPS, TIME | NODES, UPDATES | NODES])
def test_evaluations_after_the_end_are_said_whatever_ends_the_run(budget):
    steps = "eval_steps = 5: longer than the run, which has 4 server steps: only its start and its end"
    for asked, line in [*AFTER, *([({"eval_steps": 5}, steps)] if budget is STEPS else [])]:
        (found,) = said(WORLD | budget | asked)
        assert found.startswith(line)
    for asked in [*WITHIN, *([{"eval_steps": 4}] if budget is STEPS else [])]:
        assert said(WORLD | budget | asked) == []


def test_a_run_with_a_policy_says_it_when_its_end_is_known():
    settings = WORLD | UPDATES | {"policy": "power_of_choice:d=2", "timing": "every:concurrency=2"}
    with pytest.warns(UserWarning, match=r"^eval_at: no evaluation at 1 of 2 moments, from 999 s on, because the run"):
        simulate(**settings, eval_at="20,999", engine="reference")
    lines = warned(simulate, **(settings | {"policy": "uniform"}), eval_at="20,999", engine="reference")[1]
    assert len(lines) == 1  # known before the run: a second line would repeat it


def hurried(scenario):
    return TIMINGS["hurry"](size=2)(scenario)


def ends_jobs(scenario):
    return hurried(scenario)


ends_jobs.ends_jobs = True
SHARED = WORLD | UPDATES | {"network": "link:up=1000,shared=true"}
RING = WORLD | {"topology": "ring", "delay": "constant:mean=10,heterogeneity=0.5", "updates": 60}
SWIFT = RING | {"method": "swift"}
CUT = WORLD | UPDATES | {"clients": 4, "method": "divshare:omega=0.5"}
POLLED = WORLD | UPDATES | {"method": "quafl:size=2", "timing": "polling:length=7,size=2"}
IN_PARTS = WORLD | UPDATES | {"timing": "midway", "client": going_on_training}
ROUNDS = WORLD | {"timing": "participation", "updates": 6, "delay": "rpi"}
TOGETHER = r"topology: each receiver of a node gets all"
FALLS = r"decay = 'linear': falls over the local steps that "
EPIDEMIC = "no epidemic learning"
DIVERGES = "may diverge"
KEPT = {"feedback": "ef"}
HEAVY = Method(rule(optimizer=optax.sgd(1.0)), timing="every", optimizer="sgd:momentum=0.9")
SAID = [
    (SHARED, "network = 'link:up=1000,shared=true': shared has no effect in a run with a server"),
    (SHARED | {"method": "swift"}, None), (SHARED | {"network": "link:up=1000"}, None),
    # messages that take their time twice
    *((kind | {"delay": "constant:bandwidth_up=900", "network": "link:up=900"}, "messages are counted twice, by bandw")
      for kind in (WORLD | UPDATES, SWIFT)),
    (SWIFT | {"network": "link:up=900"}, None), (SWIFT | {"delay": "constant:bandwidth=900"}, None),
    # coefficients that change where nodes add up what they hear
    (RING | {"method": "choco@mean:policy=merge"}, "of the plan are mixed with other coefficients than the first one"),
    (RING | {"method": "choco"}, None),
    # fragments that travel together
    (CUT | {"topology": "gossip:receivers=2"}, None), (CUT | {"topology": "gossip:receivers=3"}, TOGETHER),
    (CUT | {"topology": "ring", "faults": "drop:probability=0.3"}, None),
    # a decay within jobs that end unforeseen
    (POLLED | {"decay": "linear"}, FALLS + "a job turns out to have"), (POLLED | {"decay": "cosine"}, None),
    (WORLD | UPDATES | {"decay": "linear"}, None), (IN_PARTS, None),
    (IN_PARTS | {"decay": "linear"}, FALLS + "each part of a job has with the"),
    (WORLD | UPDATES | {"timing": named("hurried", hurried), "decay": "linear"}, None),
    (WORLD | UPDATES | {"timing": named("hurried", ends_jobs), "decay": "linear"},
     "which its client cannot know with the timing hurried;"),
    # what a timing does not use
    (ROUNDS | {"delay": "constant:mean=9", "network": "link:down=9"},
     "delay = 'constant:mean=9', network = 'link:down=9': without effect with the timing partic"),
    (ROUNDS, None),
    # errors that add up under feedback
    *((SMALL | {"compress": compress} | settings, DIVERGES) for compress, settings in (
        ("qsgd", KEPT), ("qsgd", {"feedback": "ef21"}), ("sign", KEPT), ("randk", KEPT),
        ("topk_qsgd:scaled=false,levels=1", {}), ("qsgd", {"method": "choco"}))),
    *((SMALL | {"compress": compress} | settings, None) for compress, settings in (
        ("qsgd:levels=127", KEPT), ("qsgd:scaled=true", {}), ("qsgd", {}), ("qsgd", {"feedback": "off"}),
        ("randk:unbiased=false", {}), ("topk", {}), ("qsgd:levels=127", {"method": "choco"}))),
    # a rate of SGD given to Adam
    (SMALL | {"method": "swift", "lr": 0.05}, "lr = 0.05: swift trains with adam, whose rate is 0.001 unless it is"),
    (SMALL | {"method": "asynccurve", "lr": 0.01}, "lr = 0.01: asynccurve trains with adam"),
    (SMALL | {"method": named("heavy", HEAVY), "lr": 0.5}, None),
    *((SMALL | rate, None) for rate in ({"method": "swift", "lr": 0.005}, {"method": "swift"}, {"lr": 5.0},
                                        {"method": "swift", "lr": 0.05, "optimizer": "sgd"},
                                        {"method": "swift", "lr": 0.05, "optimizer": "adam"})),
    # epidemic learning on a graph that stays
    *((SMALL | {"method": method, "topology": topology}, says) for method, topology, says in (
        ("el_local", "ring", EPIDEMIC), ("el_oracle", "random_regular:degree=2", EPIDEMIC),
        ("el_local@mean", "ring", None), ("el_local", "gossip:receivers=2", None), ("el_local", None, None),
        ("el_oracle", "random_regular:degree=2,redraw=true", None), ("dpsgd", "ring", None))),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "says"), SAID, ids=range(len(SAID)))
def test_settings_that_do_not_go_together_are_said_in_a_line_and_others_are_not(settings, says):
    found = said(settings)
    assert found == [] if says is None else len(found) == 1 and says in found[0] and "\n" not in found[0]


@pytest.mark.parametrize(("method", "given", "small"), [
    ("fedbuff@buffer:size=3", {"clients": 31}, True), ("fedavg", {"clients": 31, "timing": "buffer:size=3"}, True),
    ("fedmedian:size=3@buffer:size=3,concurrency=31", {"clients": 40}, True),
    *((method, {}, False) for method in ("fedbuff@buffer:size=3", "fedbuff@buffer:size=1,concurrency=10", "fedasync",
                                         "fedavg", "asynfl@window:length=2")),
    ("fedbuff@buffer:size=3,concurrency=31", {"clients": 40, "policy": "adaptive_buffer:size=3,most=6"}, False),
])  # fmt: skip
def test_a_buffer_under_a_tenth_of_the_jobs_in_flight_is_said_in_one_line(method, given, small):
    settings = Settings(**WORLD | {"method": method, "clients": 30, "updates": 40, "partition": "iid"} | given)
    _, found = warned(prepare, settings, kind=SmallBuffer)
    assert len(found) == small and issubclass(SmallBuffer, RunWarning)
    if small:
        assert found[0].startswith(f"{method}: its buffer of 3 is under a tenth of the 31 jobs in flight: uploads are")
        assert all(part in found[0] for part in ("uploads are about 10", "@buffer:size=4)")) and "\n" not in found[0]


def test_fragments_that_travel_together_change_nothing():
    shared = WORLD | UPDATES | {"clients": 4, "delay": "lognormal:mean=10", "engine": "reference", "topology": "ring"}
    with pytest.warns(UserWarning, match=rf"^{TOGETHER} .* with 2 messages in"):
        cut = simulate(**shared, method="divshare:omega=0.5")
    whole = simulate(**shared, method="async_dfedavg")
    np.testing.assert_allclose(cut.evaluations["loss"], whole.evaluations["loss"], rtol=1e-5)


def test_the_warned_feedback_diverges_and_the_advised_one_does_not():
    def last_loss(**settings):
        world = SMALL | {"clients": 3, "lr": 0.05, "updates": 90, "eval_updates": 90, "engine": "reference"}
        return warned(lambda: simulate(**world, **settings))[0].evaluations["loss"][-1]

    assert last_loss(compress="qsgd:levels=1", feedback="ef") > 10
    assert last_loss(compress="qsgd:levels=1") < 2.4
    assert last_loss(compress="topk") < 2.4


def test_what_makes_a_model_infinite_is_named_with_the_update_and_of_nodes_too():
    """The rule divides by the staleness, which is 0 for a fresh upload."""
    divided = rule(scale_by_staleness(lambda tau: 1.0 / tau.astype(jnp.float32)), optimizer=optax.sgd(1.0))
    run, (line,) = warned(simulate, **SMALL, method=Method(divided), engine="reference")
    assert "the model is not finite since update 0, which has the weight inf." in line
    assert not np.isfinite(run.evaluations["loss"][-1])
    run = simulate(method="dpsgd", topology="ring", engine="reference", **SMALL)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), run.params)
    losses = np.append(run.evaluations["loss"][:-1], np.nan)
    with pytest.warns(UserWarning, match="not finite since .* s or before. Uploads"):
        caution_model(run._replace(params=broken, evaluations=run.evaluations | {"loss": losses}))
