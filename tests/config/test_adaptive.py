"""Runs with a policy, from settings to results: equal to planned ones, saved, resumed, swept, stopped, refused."""

from __future__ import annotations

import dataclasses

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
from tests.results.folders import Killed
from tests.told import same

RNG = np.random.default_rng(5)
X = RNG.normal(size=(90, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 3))).argmax(axis=1)
PARTS = np.split(np.arange(60), [5, 12, 20, 24, 40])
DATA = data.from_arrays(clients=[(X[part], Y[part]) for part in PARTS], test=(X[60:], Y[60:]))
COMMON = {"data": DATA, "model": "logistic", "method": "fedbuff@buffer:size=2,concurrency=3", "updates": 20,
          "delay": "lognormal:mean=1,heterogeneity=0.5", "batch_size": 4, "seed": 2}  # fmt: skip


def run(**changes):
    return simulate(**(COMMON | changes))


def learned(found):
    return found.params, dict(found.evaluations), dict(found.updates), list(found.schedule), dict(found.per_client)


@pytest.fixture(scope="module")
def oort(tmp_path_factory):
    """A run with the policy Oort, and its folder."""
    folder = tmp_path_factory.mktemp("oort") / "run"
    return run(policy="oort", out=folder, plots=False), folder


@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")
@pytest.mark.parametrize("changes", [
    {"updates": None, "time": 12.0, "attack": "sign_flip:share=0.4", "engine": "reference"},
    pytest.param({"eval_time": 1.5, "compress": "topk:ratio=0.5", "faults": "drop:probability=0.3"},
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_uniform_is_the_planned_run(changes):
    want, have = run(**changes), run(**changes, policy="uniform")
    same(learned(want), learned(have))
    assert have.counters["looks"] > 5
    counted = {"updates", "server_steps", "lost", "rejected", "useful_steps", "attackers", "malicious"}
    assert {name: want.counters[name] for name in counted & want.counters.keys()}.items() <= have.counters.items()
    assert want.counters.get("malicious", 0) > 0 or "attack" not in changes


def test_without_evaluations_asked_for_there_are_about_fifty():
    settings = Settings(policy="uniform", updates=120, model="logistic")
    assert prepare(settings).settings.eval_updates == 3
    by_time = dataclasses.replace(settings, time=100.0)
    assert prepare(by_time).settings.eval_time == 2.0
    assert prepare(dataclasses.replace(settings, updates=None, server_steps=60)).settings.eval_steps == 2


def test_what_was_observed_and_chosen_is_in_the_run(oort):
    found, folder = oort
    assert found.counters["look_seconds"] > 0
    assert {"observed", "chosen"} == set(found.probes)
    chosen, observed = found.probes["chosen"], found.probes["observed"]
    np.testing.assert_array_equal(chosen["client"], found.schedule.client)
    np.testing.assert_array_equal(observed["client"], found.updates["client"])
    texts = [text.get_text().strip() for text in gantt(found.schedule, 6, scores=chosen["score"]).axes[0].texts]
    assert f"{chosen['score'][np.isfinite(chosen['score'])][0]:.3g}" in texts
    with pytest.raises(ValueError, match="scores = "):
        gantt(found.schedule, scores=chosen["score"][1:])
    assert (observed["rms_loss"] >= observed["loss"] * (1 - 1e-6)).all()
    kept = load(folder)
    same(kept.probes["chosen"], chosen)
    assert kept.settings["policy"] == "oort"


def settings_of(**changes):
    common = {name: value for name, value in COMMON.items() if name != "data"} | {"dataset": DATA}
    return Settings(**(common | changes))


def swept(settings, groups, **options):
    found = {}
    for group in groups:
        execute_group(settings, group, on_finished=found.__setitem__, **options)
    return [found[i] for i in range(len(settings))]


def test_a_sweep_trains_them_side_by_side_bit_for_bit_as_alone():
    """Policies with losses share no programs with those without; stopping rules end each run by itself."""
    vary = [{"seed": 2}, {"seed": 3, "updates": 12}, {"lr": 0.05}, {"delay": "exponential", "stop_at": 0.4}]
    settings = [settings_of(policy="oort", **one) for one in vary]
    settings += [settings_of(policy="power_of_choice:d=4"), settings_of(policy="linear:loss=1"), settings_of()]
    groups = plan_groups(settings, lanes=1)
    assert [group.stacks for group in groups] == [((0, 2, 3, 5, 1),), ((4,),), ((6,),)]
    have = {}
    execute_group(settings, groups[0], on_finished=have.__setitem__)
    for i, found in have.items():
        want = execute(prepare(settings[i]))
        same((learned(want), want.probes), (learned(found), found.probes))
        assert want.counters["looks"] == found.counters["looks"]
    assert len(have) == 5 and have[3].stopped is not None


def test_a_sweep_of_them_goes_on_from_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_async.config.sweeping.CHECKPOINT_UPDATES", 10)
    settings = [settings_of(policy="oort", seed=seed) for seed in range(2, 7)]
    groups = plan_groups(settings, lanes=1)
    want, done = swept(settings, groups), []

    def killer(updates, total, **status):
        done.append((updates, total))
        if updates > 40:
            raise Killed

    with pytest.raises(Killed):
        swept(settings, groups, progress=killer, folder=tmp_path)
    first = len(done)
    have = swept(settings, groups, progress=lambda now, of, **status: done.append((now, of)), folder=tmp_path)
    assert done[first][0] > 30 and done[-1] == (100, 100) and not list(tmp_path.glob("*/*.npz"))
    for one, other in zip(want, have, strict=True):
        same((learned(one), one.probes), (learned(other), other.probes))


def test_callbacks_see_the_evaluations_of_a_growing_plan_and_may_stop_it():
    seen = []
    whole = run(policy="oort", eval_updates=4, callbacks=[seen.append])
    np.testing.assert_array_equal([one.time for one in seen], whole.evaluations["time"])
    np.testing.assert_array_equal([one.update for one in seen], whole.evaluations["update"])
    assert [one.last for one in seen] == [False] * (len(seen) - 1) + [True]
    target = float(whole.evaluations["accuracy"][2])
    first = int(np.argmax(whole.evaluations["accuracy"] >= target))
    for engine in ("waves", "reference"):
        short = run(policy="oort", eval_updates=4, stop_at=target, keep_best=True, engine=engine)
        assert short.stopped.evaluation == first and len(short.evaluations["time"]) == first + 1
        np.testing.assert_array_equal(short.updates["client"], whole.updates["client"][: 4 * first])
        np.testing.assert_allclose(short.best.value, whole.evaluations["accuracy"][: first + 1].max(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")
def test_a_run_that_is_killed_where_it_stops_looks_no_further(tmp_path, monkeypatch):
    common = {"policy": "oort", "eval_updates": 3, "patience": 2, "lr": 0.3, "checkpoint": 1, "plots": False}
    common |= {"dataset": "synthetic:clients=6", "clients": 6, "updates": 60}
    common = {name: value for name, value in COMMON.items() if name != "data"} | common
    save, places = Keeper.save, []

    def counted_save(keeper, position, snapshot):
        places.append(position)
        save(keeper, position, snapshot)
        if len(places) == 2 * last:
            raise Killed

    last = 100
    monkeypatch.setattr(Keeper, "save", counted_save)
    want = simulate(**common, out=tmp_path / "whole")
    assert want.stopped is not None
    last = len(places)
    with pytest.raises(Killed):
        simulate(**common, out=tmp_path / "killed")
    have = resume(tmp_path / "killed", plots=False)
    same((learned(want), want.probes), (learned(have), have.probes))
    assert {**want.counters, "look_seconds": 0} == {**have.counters, "look_seconds": 0}


def test_equal_runs_have_equal_files(tmp_path):
    for name in ("one", "other"):
        run(policy="oort", out=tmp_path / name, plots=False)
    one, other = ((tmp_path / name / "manifest.json").read_bytes() for name in ("one", "other"))
    assert one == other and "look_seconds" not in load(tmp_path / "one").counters
    assert {"look_seconds", "waves"} <= EXECUTION


FASTEST = {"policy": "linear:speed=3,temperature=0.01", "seed": 7, "updates": 12}
WINDOW = "@window:length=0.2,concurrency=3"  # every arrival closes its step in the nominal plan, but not with FASTEST


def test_a_step_of_several_arrivals_that_the_nominal_plan_does_not_have_is_aggregated():
    changes = FASTEST | {"method": f"fedbuff{WINDOW}", "eval_updates": 1}
    short, longer = run(**changes), run(**changes | {"updates": 40})
    assert not short.updates["closes"].all()
    np.testing.assert_array_equal(short.evaluations["loss"], longer.evaluations["loss"][:13])


@pytest.mark.parametrize(("method", "policy", "closes"), [
    (f"fedbuff{WINDOW}", "uniform", True), (f"fedbuff{WINDOW}", FASTEST["policy"], False),
    ("fedasync@every:concurrency=3", "oort", True), ("fedavg@cohort:size=1", "oort", True),
    ("fedbuff@buffer:size=1", "adaptive_buffer:size=1", False),
])  # fmt: skip
def test_every_arrival_closes_its_step_only_if_no_decision_can_change_that(method, policy, closes):
    assert prepare_of(FASTEST | {"method": method, "policy": policy}).kind.facts.every_closes == closes


LATEST = {"policy": "linear:speed=-3,temperature=0.01", "eval_at": "9"}


@pytest.mark.parametrize("changes", [
    {"method": "krum@buffer:size=4", "policy": "adaptive_buffer:size=5,most=6"},
    {"method": "fedmedian:size=3@buffer:size=4", "policy": "adaptive_buffer:size=2,most=3"},
    {"method": "fedmedian:size=3@cohort:size=3,over_selection=2", "policy": "oort"},
    {"method": "fedbuff@buffer:size=5", "updates": 4, "policy": "adaptive_buffer:size=2"},
    {"method": "fedbuff@every:concurrency=3", "policy": "adaptive_buffer:size=5"},
    {"method": "krum@window:length=0.5,concurrency=5", "policy": "oort"},
    LATEST,
])  # fmt: skip
def test_what_only_the_nominal_plan_would_not_allow_is_not_refused(changes):
    prepare_of(changes)


GROWING = {"method": "asynfl@window:length=9", "policy": "adaptive_window:length=0.4,most=3,recent=6", "updates": None,
           "server_steps": 20, "lr": 0.5}  # fmt: skip


def test_windows_grow_by_the_losses_of_the_run_and_are_in_its_probes(tmp_path, monkeypatch):
    kept = GROWING | {"checkpoint": 10, "plots": False}
    whole = run(**kept, out=tmp_path / "whole")
    table, losses = whole.probes["window"], np.asarray(whole.probes["observed"]["loss"], np.float64)
    assert table["length"][0] == 0.4 and len(np.unique(table["length"])) > 3
    for update, length in zip(table["update"], table["length"]):
        root = np.sqrt(losses[:6].mean() / losses[:update][-6:].mean()) if update >= 6 else 1.0
        np.testing.assert_allclose(length, np.clip(0.4 * np.round(root, 2), 0.4, 3.0), rtol=1e-12)
    ends = whole.schedule.time[whole.schedule.closes]
    np.testing.assert_array_equal(table["time"], [0.0, *ends[:-1]])
    windows = (np.diff([0.0, *ends]) / table["length"]).round(9)
    np.testing.assert_array_equal(windows, np.rint(windows))  # windows without an arrival are as long
    save = Keeper.save

    def killed(keeper, position, snapshot):
        save(keeper, position, snapshot)
        raise Killed

    monkeypatch.setattr(Keeper, "save", killed)
    with pytest.raises(Killed):
        run(**kept, out=tmp_path / "killed")
    monkeypatch.setattr(Keeper, "save", save)
    have = resume(tmp_path / "killed", plots=False, dataset=DATA)
    same((learned(whole), whole.probes), (learned(have), have.probes))


def test_the_nominal_plan_has_the_first_length():
    assert prepare_of(GROWING).schedule.time[0] <= 0.8
    method = "asynfl@window:length=2,concurrency=4,sampling=round_robin"
    planned, looking = (
        prepare_of({"method": method.replace("2", length, 1)} | policy).schedule
        for length, policy in (("2", {}), ("7", {"policy": "adaptive_window:length=2"}))
    )
    same(list(planned), list(looking))


def test_an_explained_run_is_trained_again_along_its_own_schedule(oort):
    told = explain(oort[0], say=lambda line: None, dataset=DATA)
    np.testing.assert_array_equal(told.arrivals["client"], oort[0].updates["client"])
    assert told.drift < 1e-6


def test_a_method_may_bring_its_policy_and_a_setting_replaces_it():
    brought, given, planned = (prepare_of({"method": "pisces"} | one).settings.policy
                               for one in ({}, {"policy": "oort"}, {"policy": "uniform"}))  # fmt: skip
    assert (brought, given, planned) == ("pisces", "oort", "uniform")
    rule = Method(fedbuff, "buffer:size=2,concurrency=3", policy="oort:every=2")
    mine, want = run(method=rule), run(method="fedbuff@buffer:size=2,concurrency=3", policy="oort:every=2")
    same(learned(mine), learned(want))
    assert mine.settings["policy"] == "oort:every=2"
    assert run(method="pisces", time=30.0, updates=None).probes["chosen"]["client"].size > 5


def test_the_seconds_that_a_policy_knows_beforehand_are_those_of_jobs_with_their_messages():
    given = {"policy": "uniform", "delay": "constant:mean=2"}
    alone, sending = (prepare_of(given | {"network": network}) for network in (None, "link:up=100,latency=0.5"))
    np.testing.assert_array_equal(alone.kind.prior.seconds, 2.0)
    np.testing.assert_allclose(sending.kind.prior.seconds, 3.0 + sending.traffic.up / 100)


@pytest.mark.parametrize("method", ["pisces", "pisces@pace:concurrency=1", "pisces@every"])
def test_one_client_leaves_a_policy_no_choice(method):
    one = Settings(method=method, dataset="synthetic", model="logistic", clients=1, updates=4, steps=1)
    with pytest.raises(ValueError, match=r"^clients = 1: must be at least 2, so that policy = 'pisces' has clients to"):
        prepare(one)
    assert prepare(dataclasses.replace(one, policy="uniform")).schedule.num_clients == 1


def test_a_method_that_brings_a_policy_has_no_trajectory():
    with pytest.raises(ValueError, match=r"^method = 'pisces': must be a method without a policy, which plans the run"):
        trajectory(Settings(method="pisces", model="logistic", clients=3, updates=4, steps=1))


def test_a_policy_of_your_own():
    def slowest_first(prior):
        def choose(view, idle, count):
            order = np.argsort(-prior.seconds[idle])[:count]
            return Choice(idle[order], prior.seconds[idle][order])

        return Policy(choose=choose)

    found = run(policy=slowest_first)
    assert found.settings["policy"].startswith("(object") and "policy" in found.settings["own"]
    seconds = prepare_of({"policy": "uniform"}).kind.prior.seconds
    assert set(found.schedule.client[:3]) == set(np.argsort(-seconds)[:3])
    for wrong in (lambda prior: 3, lambda prior: Policy(choose=1), lambda prior: Policy(every=0), lambda prior: 1 / 0):
        with pytest.raises(ValueError, match=r"^policy"):
            run(policy=wrong)


@pytest.mark.parametrize(("changes", "says"), [
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
    ({"policy": 3}, "policy = 3"), ({"policy": "uniform", "topology": "ring"}, "topology"),
    ({"policy": "uniform", "method": "pushcen"}, "policy = 'uniform': must be left out"),
    ({"policy": "power_of_choice:d=7"}, "d = 7: must be at most 6"),
])  # fmt: skip
def test_what_cannot_adapt_is_refused_before_anything_compiles(changes, says):
    with pytest.raises(ValueError, match=says):
        prepare_of(changes)


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
    with pytest.raises(ValueError, match="probe name = 'chosen': must be another"):
        run(policy="uniform", probes={"chosen": norms["norms"]})


def prepare_of(changes):
    return prepare(settings_of(**changes))


@pytest.mark.slow
def test_rules_that_know_the_length_of_the_run_adapt_where_it_is_known():
    for changes in (
        {"method": "fedbuff+swa:start=0.5@buffer:size=3", "updates": None, "server_steps": 6},
        {"method": "orthodyn:switch=share"},
    ):
        assert isinstance(prepare_of({"policy": "uniform", **changes}).kind, WithPolicy)
        planned, looking = run(**changes), run(**changes, policy="uniform")
        same(planned.params, looking.params)
