"""Runs with a policy, from settings to results: equal to planned ones, saved, resumed, swept, stopped, refused."""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest

from fedjax_async import Method, Settings, clock, data, resume, simulate
from fedjax_async.clock import Choice, Policy
from fedjax_async.config import execute, execute_group, prepare, trajectory
from fedjax_async.config.adaptive import WithPolicy
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.results import explain, gantt, load
from fedjax_async.results.sweep_table import EXECUTION
from fedjax_async.server import fedbuff
from fedjax_async.types import Stop
from tests.refusals import refusals
from tests.results.folders import Killed
from tests.told import is_refused, refusal, same

RNG = np.random.default_rng(5)
X = RNG.normal(size=(90, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 3))).argmax(axis=1)
PARTS = np.split(np.arange(60), [5, 12, 20, 24, 40])
DATA = data.from_arrays(clients=[(X[part], Y[part]) for part in PARTS], test=(X[60:], Y[60:]))
WORLD = {"model": "logistic", "method": "fedbuff@buffer:size=2,concurrency=3", "updates": 20, "batch_size": 4}
WORLD |= {"seed": 2, "delay": "lognormal:mean=1,heterogeneity=0.5"}


def run(**changes):
    return simulate(**{"data": DATA, **WORLD, **changes})


def settings_of(**changes):
    return Settings(**{"dataset": DATA, **WORLD, **changes})


def prepared(**changes):
    return prepare(settings_of(**changes))


def learned(found):
    return found.params, dict(found.evaluations), dict(found.updates), list(found.schedule), dict(found.per_client)


@pytest.fixture(scope="module")
def oort(tmp_path_factory):
    """A run with the policy Oort, and its folder."""
    folder = tmp_path_factory.mktemp("oort") / "run"
    return run(policy="oort", out=folder, plots=False), folder


@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")
def test_uniform_is_the_planned_run():
    changes = {"updates": None, "time": 12.0, "attack": "sign_flip:share=0.4", "engine": "reference"}
    want, have = run(**changes), run(**changes, policy="uniform")
    same(learned(want), learned(have))
    assert have.counters["looks"] > 5 and want.counters["malicious"] > 0
    counted = {"updates", "server_steps", "lost", "rejected", "useful_steps", "attackers", "malicious"}
    assert {name: want.counters[name] for name in counted & want.counters.keys()}.items() <= have.counters.items()


@pytest.mark.parametrize(("budget", "field", "every"), [
    ({"updates": 120}, "eval_updates", 3), ({"time": 100.0}, "eval_time", 2.0),
    ({"updates": None, "server_steps": 60}, "eval_steps", 2),
])  # fmt: skip
def test_without_evaluations_asked_for_there_are_about_fifty(budget, field, every):
    assert getattr(prepared(policy="uniform", **budget).settings, field) == every


def test_what_was_observed_and_chosen_is_in_the_run_and_its_files(oort, tmp_path):
    found, folder = oort
    assert found.counters["look_seconds"] > 0
    assert {"observed", "chosen"} == set(found.probes)
    chosen, observed = found.probes["chosen"], found.probes["observed"]
    np.testing.assert_array_equal(chosen["client"], found.schedule.client)
    np.testing.assert_array_equal(observed["client"], found.updates["client"])
    texts = [text.get_text().strip() for text in gantt(found.schedule, 6, scores=chosen["score"]).axes[0].texts]
    assert f"{chosen['score'][np.isfinite(chosen['score'])][0]:.3g}" in texts
    assert refusal(gantt, found.schedule, scores=chosen["score"][1:]).startswith("scores = ")
    assert (observed["rms_loss"] >= observed["loss"] * (1 - 1e-6)).all()
    kept = load(folder)
    same(kept.probes["chosen"], chosen)
    assert kept.settings["policy"] == "oort"
    run(policy="oort", out=tmp_path, plots=False)  # equal runs have equal files
    assert (folder / "manifest.json").read_bytes() == (tmp_path / "manifest.json").read_bytes()
    assert "look_seconds" not in kept.counters and {"look_seconds", "waves"} <= EXECUTION
    told = explain(found, say=lambda line: None, dataset=DATA)  # trained again along its own schedule
    np.testing.assert_array_equal(told.arrivals["client"], found.updates["client"])
    assert told.drift < 1e-6


def test_a_sweep_of_them_is_killed_and_goes_on_to_the_runs_alone(oort, tmp_path, monkeypatch):
    """Policies with losses share no programs with those without. ``engine/test_adaptive.py`` has more of them."""
    monkeypatch.setattr("fedjax_async.config.sweeping.CHECKPOINT_UPDATES", 10)
    other = {"policy": "linear:loss=1", "seed": 3, "updates": 12, "lr": 0.05}
    vary = [{}, other, {"delay": "exponential", "stop_at": 0.4}, {"policy": "power_of_choice:d=4"}, {"policy": None}]
    settings = [settings_of(**{"policy": "oort"} | one) for one in vary]
    assert [group.stacks for group in plan_groups(settings, lanes=1)] == [((0, 2, 1),), ((3,),), ((4,),)]
    (group, *_), have, done = plan_groups(settings, lanes=1), {}, []

    def killer(updates, total, **status):
        done.append((updates, total))
        if updates > 20:
            raise Killed

    start = functools.partial(execute_group, settings, group, on_finished=have.__setitem__, folder=tmp_path)
    with pytest.raises(Killed):
        start(progress=killer)
    first = len(done)
    start(progress=lambda now, of, **status: done.append((now, of)))
    assert len(have) == 3 and have[2].stopped is not None and not list(tmp_path.glob("*/*.npz"))
    assert done[first][0] > 10 and 32 < done[-1][0] < done[-1][1] == 52
    for i, want in enumerate((oort[0], *(execute(prepare(one)) for one in settings[1:3]))):
        same((learned(want), want.probes), (learned(have[i]), have[i].probes))
        assert want.counters["looks"] == have[i].counters["looks"]


@pytest.mark.parametrize(("most", "stacks"), [(2, ((0, 1), (2,))), (3, ((0, 1, 2), (3, 4)))])
def test_the_last_stack_may_have_fewer_runs_than_the_programs(most, stacks, monkeypatch):
    """It read start models from the slots of the longer stack."""
    monkeypatch.setattr("fedjax_async.config.sweeping.CPU_STACK", most)
    settings = [settings_of(policy="oort", seed=seed, updates=12) for seed in range(max(stacks[-1]) + 1)]
    (group,), have = plan_groups(settings, lanes=1), {}
    assert group.stacks == stacks
    execute_group(settings, group, on_finished=have.__setitem__)
    for i, one in enumerate(settings):
        same(learned(execute(prepare(one))), learned(have[i]))


def test_callbacks_see_the_evaluations_of_a_growing_plan_and_may_stop_it():
    seen = []
    whole = run(policy="oort", eval_updates=4, callbacks=[seen.append])
    np.testing.assert_array_equal([one.time for one in seen], whole.evaluations["time"])
    np.testing.assert_array_equal([one.update for one in seen], whole.evaluations["update"])
    assert [one.last for one in seen] == [False] * (len(seen) - 1) + [True]
    target = float(whole.evaluations["accuracy"][2])
    first = int(np.argmax(whole.evaluations["accuracy"] >= target))
    short = run(policy="oort", eval_updates=4, stop_at=target, keep_best=True)
    assert short.stopped.evaluation == first and len(short.evaluations["time"]) == first + 1
    np.testing.assert_array_equal(short.updates["client"], whole.updates["client"][: 4 * first])
    np.testing.assert_allclose(short.best.value, whole.evaluations["accuracy"][: first + 1].max(), rtol=1e-6)


def killed_at(monkeypatch, number, **given):
    """Kill a run after so many checkpoints; returns how many it has made."""
    save, places = Keeper.save, []

    def counted_save(keeper, position, snapshot):
        places.append(position)
        save(keeper, position, snapshot)
        if len(places) == number:
            raise Killed

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Keeper, "save", counted_save)
        run(**given, plots=False)
    return len(places)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")
def test_a_run_that_is_killed_where_it_stops_looks_no_further(tmp_path, monkeypatch):
    given = {"policy": "oort", "eval_updates": 3, "patience": 2, "lr": 0.3, "checkpoint": 1, "updates": 60}
    last = killed_at(monkeypatch, None, **given, out=tmp_path / "whole")
    want = load(tmp_path / "whole")
    assert want.stopped is not None and killed_at(monkeypatch, last, **given, out=tmp_path / "killed") == last
    have = resume(tmp_path / "killed", plots=False, dataset=DATA)
    same((learned(want), want.probes), (learned(have), have.probes))
    assert want.counters == {name: value for name, value in have.counters.items() if name in want.counters}


FASTEST = {"policy": "linear:speed=3,temperature=0.01", "seed": 7, "updates": 12}
WINDOW = "@window:length=0.2,concurrency=3"  # every arrival closes its step in the nominal plan, but not with FASTEST


def test_a_step_of_several_arrivals_that_the_nominal_plan_does_not_have_is_aggregated():
    changes = FASTEST | {"method": f"fedbuff{WINDOW}", "eval_updates": 1}
    short, longer = run(**changes), run(**changes | {"updates": 40})
    assert not short.updates["closes"].all()
    np.testing.assert_array_equal(short.evaluations["loss"], longer.evaluations["loss"][:13])


@pytest.mark.parametrize(("changes", "closes"), [
    # every arrival closes its step only if no decision can change that
    (FASTEST | {"method": f"fedbuff{WINDOW}", "policy": "uniform"}, True),
    (FASTEST | {"method": f"fedbuff{WINDOW}"}, False),
    (FASTEST | {"method": "fedasync@every:concurrency=3", "policy": "oort"}, True),
    (FASTEST | {"method": "fedavg@cohort:size=1", "policy": "oort"}, True),
    (FASTEST | {"method": "fedbuff@buffer:size=1", "policy": "adaptive_buffer:size=1"}, False),
    # what only the nominal plan would not allow is not refused
    ({"method": "krum@buffer:size=4", "policy": "adaptive_buffer:size=5,most=6"}, False),
    ({"method": "fedmedian:size=3@buffer:size=4", "policy": "adaptive_buffer:size=2,most=3"}, False),
    ({"method": "fedmedian:size=3@cohort:size=3,over_selection=2", "policy": "oort"}, False),
    ({"method": "fedbuff@buffer:size=5", "updates": 4, "policy": "adaptive_buffer:size=2"}, False),
    ({"method": "fedbuff@every:concurrency=3", "policy": "adaptive_buffer:size=5"}, False),
    ({"method": "krum@window:length=0.5,concurrency=5", "policy": "oort"}, False),
    ({"policy": "linear:speed=-3,temperature=0.01", "eval_at": "9"}, False),
])  # fmt: skip
def test_what_a_rule_may_expect_is_what_no_decision_can_change(changes, closes):
    assert prepared(**changes).kind.facts.every_closes == closes


GROWING = {"method": "asynfl@window:length=9", "policy": "adaptive_window:length=0.4,most=3,recent=6", "updates": None,
           "server_steps": 20, "lr": 0.5}  # fmt: skip


def test_windows_grow_by_the_losses_of_the_run_and_are_in_its_probes(tmp_path, monkeypatch):
    kept = GROWING | {"checkpoint": 10}
    whole = run(**GROWING)
    table, losses = whole.probes["window"], np.asarray(whole.probes["observed"]["loss"], np.float64)
    assert table["length"][0] == 0.4 and len(np.unique(table["length"])) > 3
    for update, length in zip(table["update"], table["length"]):
        root = np.sqrt(losses[:6].mean() / losses[:update][-6:].mean()) if update >= 6 else 1.0
        np.testing.assert_allclose(length, np.clip(0.4 * np.round(root, 2), 0.4, 3.0), rtol=1e-12)
    ends = whole.schedule.time[whole.schedule.closes]
    np.testing.assert_array_equal(table["time"], [0.0, *ends[:-1]])
    windows = (np.diff([0.0, *ends]) / table["length"]).round(9)
    np.testing.assert_array_equal(windows, np.rint(windows))  # windows without an arrival are as long
    assert killed_at(monkeypatch, 1, **kept, out=tmp_path / "killed") == 1
    have = resume(tmp_path / "killed", plots=False, dataset=DATA)
    same((learned(whole), whole.probes), (learned(have), have.probes))


def test_the_nominal_plan_has_the_first_length():
    assert prepared(**GROWING).schedule.time[0] <= 0.8
    method = "asynfl@window:length={},concurrency=4,sampling=round_robin"
    looking = prepared(method=method.format(7), policy="adaptive_window:length=2")
    same(list(prepared(method=method.format(2)).schedule), list(looking.schedule))


def test_a_method_may_bring_its_policy_and_a_setting_replaces_it():
    brought, given, planned = (prepared(**{"method": "pisces"} | one).settings.policy
                               for one in ({}, {"policy": "oort"}, {"policy": "uniform"}))  # fmt: skip
    assert (brought, given, planned) == ("pisces", "oort", "uniform")
    rule = Method(fedbuff, "buffer:size=2,concurrency=3", policy="oort:every=2")
    mine, want = run(method=rule), run(method="fedbuff@buffer:size=2,concurrency=3", policy="oort:every=2")
    same(learned(mine), learned(want))
    assert mine.settings["policy"] == "oort:every=2"
    assert run(method="pisces", time=30.0, updates=None).probes["chosen"]["client"].size > 5


def test_the_seconds_that_a_policy_knows_beforehand_are_those_of_jobs_with_their_messages():
    given = {"policy": "uniform", "delay": "constant:mean=2"}
    alone, sending = (prepared(**given | {"network": network}) for network in (None, "link:up=100,latency=0.5"))
    np.testing.assert_array_equal(alone.kind.prior.seconds, 2.0)
    np.testing.assert_allclose(sending.kind.prior.seconds, 3.0 + sending.traffic.up / 100)


@pytest.mark.parametrize("method", ["pisces", "pisces@pace:concurrency=1", "pisces@every"])
def test_one_client_leaves_a_policy_no_choice(method):
    one = Settings(method=method, dataset="synthetic", model="logistic", clients=1, updates=4, steps=1)
    is_refused(r"^clients = 1: must be at least 2, so that policy = 'pisces' has clients to", prepare, one)
    assert prepare(dataclasses.replace(one, policy="uniform")).schedule.num_clients == 1
    with pytest.raises(ValueError, match=r"^method = 'pisces.*': must be a method without a policy, which plans the"):
        trajectory(dataclasses.replace(one, clients=3))


def test_a_policy_of_your_own():
    def slowest_first(prior):
        def choose(view, idle, count):
            order = np.argsort(-prior.seconds[idle])[:count]
            return Choice(idle[order], prior.seconds[idle][order])

        return Policy(choose=choose)

    found = run(policy=slowest_first)
    assert found.settings["policy"].startswith("(object") and "policy" in found.settings["own"]
    seconds = prepared(policy="uniform").kind.prior.seconds
    assert set(found.schedule.client[:3]) == set(np.argsort(-seconds)[:3])


test_what_cannot_adapt_is_refused_before_anything_compiles = refusals(
    ({"policy": "ort"}, "policy = 'ort': unknown; did you mean 'oort'"),
    ({"policy": "oort", "method": "fedasync@every:concurrency=6"}, "concurrency = 6: must be below 6"),
    ({"policy": "adaptive_buffer", "method": "fedavg@cohort:size=2"}, "timing = 'cohort': must be buffer"),
    ({"policy": "adaptive_window", "method": "asynfl@cohort:size=2"}, "timing = 'cohort': must be window: policy"),
    ({"policy": "adaptive_window+adaptive_buffer"}, r"policy = 'adaptive_window\+adap.*': must be one .* not both"),
    ({"policy": lambda prior: Policy(window=3.0)}, "policy.window = .3.0.: must be a function"),
    ({"policy": "uniform", "method": "fedasync@participation"}, "timing = 'participation'"),
    ({"policy": "power_of_choice:d=3", "method": "fedasync@participation"}, "timing = 'participation'"),
    ({"policy": "true_bytes"}, "policy = 'true_bytes': must be left out, or given with compress"),
    ({"policy": "uniform", "method": "fedbuff+swa@buffer:size=3"}, "method = .*need not know the server_steps"),
    ({"policy": "uniform", "method": "orthodyn:switch=share", "time": 9.0}, "method = .*need not know the updates"),
    ({"policy": "adaptive_buffer", "method": "fedmedian:size=2@buffer:size=2"}, "size of the rule's buffer"),
    ({"policy": "uniform", "timing": clock.TIMINGS["buffer"](size=2), "method": "fedbuff"}, "timing = .*does not ask"),
    (FASTEST | {"method": f"fedmedian:size=2{WINDOW}"}, "rule's buffer = 2: must be at least 3.*policy = 'linear"),
    ({"policy": "adaptive_buffer:size=2,most=4", "method": "krum@buffer:size=5"}, "server step = 4.*policy = 'adapt"),
    ({"policy": lambda prior: Policy(buffer=lambda view: 5), "method": "krum@buffer:size=5"}, "policy = .*not known"),
    ({"policy": "adaptive_buffer:size=5", "method": "fedbuff@buffer:size=2", "updates": 4}, "= 4: .* at least 5"),
    ({"policy": 3}, "policy = 3"),
    ({"policy": "uniform", "topology": "ring"}, "topology"),
    ({"policy": "uniform", "method": "pushcen"}, "policy = 'uniform': must be left out"),
    ({"policy": "power_of_choice:d=7"}, "d = 7: must be at most 6"),
    *(({"policy": lambda prior, wrong=wrong: wrong}, "^policy") for wrong in (3, Policy(choose=1), Policy(every=0))),
    ({"policy": lambda prior: 1 / 0}, "^policy"),
    by=lambda changes: prepared(**changes),
)


@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")
@pytest.mark.parametrize("engine", ["waves", "reference"])
@pytest.mark.parametrize("changes", [{"faults": "corrupt:probability=0.4"}, {"lr": 1e38}], ids=["corrupt", "diverged"])
def test_bad_uploads_come_where_clients_may_withhold(changes, engine):
    """A client does not know that its upload will be corrupt, and one that is not finite is no small one."""
    given = {"policy": "event_triggered:norm=1e-9", "engine": engine, **changes}
    want, have = run(**changes, engine=engine), run(**given)
    same((want.params, dict(want.updates), list(want.schedule)), (have.params, dict(have.updates), list(have.schedule)))
    bad = have.updates["upload_norm"] == 0  # as recorded: of these, the server knows no norm
    assert have.counters["rejected"] == bad.sum() > 3 and have.counters["too_large"] == 0
    assert not have.updates["accepted"][bad].any() and have.counters["rejected"] == want.counters["rejected"]


@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")
def test_probes_and_tables_of_a_policy_end_where_the_run_is_stopped():
    """If uploads differ in size, training continues after the stop, to count their bytes."""
    norms = {"norms": lambda state, memory, arrival, parts: {"bias": arrival.upload["output"]["bias"][0]}}
    stops = [lambda one: Stop("enough") if one.number == 3 else None]
    given = {"policy": "oort+adaptive_buffer:size=1,recent=4", "compress": "topk", "eval_updates": 3}
    one, other = (run(**given, probes=norms, callbacks=stops, engine=engine) for engine in ("waves", "reference"))
    np.testing.assert_allclose(one.probes["norms"]["bias"], other.probes["norms"]["bias"], atol=1e-5)
    for found in (one, other):
        assert len(found.probes["norms"]["bias"]) == len(found.updates["client"]) == 9
        np.testing.assert_array_equal(found.probes["chosen"]["client"], found.schedule.client)
        assert found.probes["buffer"]["update"].max() <= 9 and len(found.probes["observed"]["loss"]) == 9
    says = refusal(run, policy="uniform", probes={"chosen": norms["norms"]})
    assert "probe name = 'chosen': must be another" in says


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"method": "fedbuff+swa:start=0.5@buffer:size=3", "updates": None, "server_steps": 6},
    {"method": "orthodyn:switch=share"},
])  # fmt: skip
def test_rules_that_know_the_length_of_the_run_adapt_where_it_is_known(changes):
    assert isinstance(prepared(**changes, policy="uniform").kind, WithPolicy)
    same(run(**changes).params, run(**changes, policy="uniform").params)
