"""Budgets and ends: a budget without a server step, uploads of an incomplete one, clients that are all gone."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Method, Stop, simulate
from fedjax_async.base import notices
from fedjax_async.clock import make_schedule
from fedjax_async.config import Settings, prepare
from fedjax_async.config.budget import ended_early
from fedjax_async.results import comparison
from fedjax_async.server import methods, rule, scale_by_staleness
from fedjax_async.types import Facts, ServerAlgorithm
from tests.config.test_own import scaled
from tests.told import is_refused, same, warned

SMALL = {"model": "logistic", "clients": 5, "steps": 1, "batch_size": 8, "eval_examples": 40}
ROOT = Path(__file__).resolve().parents[2]
TAUGHT = (ROOT / "README.md", ROOT / "notebooks" / "02_add_an_algorithm.ipynb")  # where own rules are taught
REFERENCE = {**SMALL, "engine": "reference"}
COHORTS = {**REFERENCE, "method": "fedavg@cohort:size=4"}
DELAYED = SMALL | {"clients": 6, "delay": "lognormal:mean=10,sigma=0.3"}
LEAVES = {"availability": "leaves:share=1,by=90"}


def said_of(**settings):
    """What the plan of these settings says about its early end."""
    e = prepare(Settings(**DELAYED | settings))
    return ended_early(e.settings, e.described, e.schedule)


def refused(match, **settings):
    with pytest.raises(ValueError, match=match) as caught:
        prepare(Settings(**{**DELAYED, **settings}))
    return str(caught.value)


BUDGETS = [{"updates": 3}, {"updates": 3, "time": 1e9}, {"time": 60.0}, {"time": 60.0, "updates": 100}]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_without_a_server_step_is_refused_and_the_number_it_names_is_the_smallest(budget):
    field = "updates" if budget.get("updates") == 3 else "time"
    said = refused(rf"^{field} = .*: must be at least [\d.]+, ", **COHORTS, **budget, delay=Settings.delay)
    named = float(re.search(r"at least ([\d.]+),", said).group(1))
    enough, less = (4, 3) if field == "updates" else (named, named * (1 - 1e-5))
    assert named == enough
    assert prepare(Settings(**COHORTS, **{**budget, field: enough})).schedule.closes.sum() == 1
    refused(field, **COHORTS, **{**budget, field: less}, delay=Settings.delay)


def test_a_policy_of_ones_own_is_not_planned_with_another_budget():
    def endless(scenario):
        assert scenario.until.updates == 3, "asked for another budget"
        planned = prepare(Settings(**SMALL, method="asgd", updates=3)).schedule
        return planned._replace(closes=np.zeros(3, bool), step=np.zeros(3, int), version=np.zeros_like(planned.version))

    says = r"updates = 3: must be enough to complete a server step"
    refused(says, **SMALL, method="fedbuff", timing=endless, updates=3, delay=Settings.delay)


def test_uploads_of_an_incomplete_step_are_counted_apart_and_change_nothing():
    run, said = warned(simulate, **COHORTS, updates=6, eval_updates=2)
    whole, nothing = warned(simulate, **COHORTS, updates=4)
    assert nothing == [] and len(said) == 1 and said[0].startswith("2 uploads came for a server step")
    assert np.flatnonzero(run.schedule.closes).tolist() == [3]
    assert (run.counters["updates"], run.counters["unused"], run.counters["server_steps"]) == (4, 2, 1)
    assert (whole.counters["updates"], whole.counters["unused"]) == (4, 0)
    assert run.updates["used"].tolist() == [True] * 4 + [False] * 2
    assert run.evaluations["update"].tolist() == [0, 2, 4, 4]
    same(run.params, whole.params)
    # a rule that changes the model at every upload uses all of them, whether or not a step is complete
    all_used, nothing = warned(simulate, **REFERENCE, method=Method(scaled(1.0), "buffer:size=4"), updates=3)
    assert nothing == [] and all_used.counters["unused"] == 0 and all_used.counters["updates"] == 3
    assert all_used.counters["server_steps"] == 0
    assert any(map(np.any, jax.tree.leaves(all_used.params)))  # logistic is initialised with zeros


def test_a_rule_that_gives_weight_0_still_closes_steps_and_max_staleness_does_not():
    """As the docstring of ``ServerAlgorithm``, README and the notebook on own rules say."""
    fresh = rule(scale_by_staleness(lambda tau: jnp.where(tau > 0, 0.0, 1.0)), optimizer=optax.sgd(1.0))
    given = {**REFERENCE, "method": Method(fresh, timing="buffer:size=2"), "updates": 10, "delay": "lognormal:mean=9"}
    zero, dropped = simulate(**given), simulate(**given, max_staleness=0)
    stale = zero.updates["staleness"] > 0
    assert stale.any() and (zero.updates["weight"][stale] == 0).all() and not zero.updates["accepted"][stale].any()
    assert zero.counters["server_steps"] == 5  # as if all counted
    assert zero.counters["unchanged_steps"] > 0 and zero.counters["dropped_stale"] == 0
    assert (dropped.updates["staleness"] == 0).all() and dropped.updates["accepted"].all()
    assert dropped.counters["dropped_stale"] > 0 and dropped.counters["unchanged_steps"] == 0
    assert dropped.counters["rejected"] == 0  # no upload is counted under two names
    assert zero.counters["rejected"] == zero.counters["zero_weight"] == (zero.updates["weight"] == 0).sum()
    assert all("max_staleness" in text for text in (ServerAlgorithm.__doc__, *(p.read_text("utf-8") for p in TAUGHT)))


@pytest.mark.parametrize("bad", [0, 2])
def test_krum_takes_steps_of_2f_plus_3_uploads_and_no_fewer(bad):
    least = 2 * bad + 3

    def world(size, rows):
        method = {"method": f"krum:byzantine={bad},size={rows}", "timing": f"buffer:size={size}"}
        return SMALL | {"clients": least, "server_steps": 2} | method

    assert len(prepare(Settings(**world(least, least))).schedule.job) == 2 * least
    refused(rf"^size = {least - 1}: must be at least 2 f \+ 3 = {least} ", **world(least - 1, least - 1))
    refused(rf"server step = {least - 1}: must be at least 2 f \+ 3 = {least} ", **world(least - 1, least))


def test_krums_rule_by_hand_knows_no_run():
    rule = methods.krum(byzantine=2, size=7)
    params = {"w": jnp.zeros(2)}
    assert rule.init(params, Facts(9))[0].params["w"].shape == (2,)
    is_refused("server step = 6", rule.init, params, Facts(9, longest_step=6))
    refused("server step = 1", **SMALL, method=Method(methods.krum()), updates=3)


@pytest.mark.parametrize(("cause", "says"), [
    ({}, "4 not finite (training diverges: lower the learning rate"),
    ({"zero_weight": 4}, "4 of weight 0 (from the method's rule:"),
    ({"too_large": 4}, "4 larger than norm_limit (raise norm_limit"),
    ({"corrupt": 4}, "4 corrupt (the setting faults made them NaN)"),
])  # fmt: skip
def test_the_advice_follows_the_cause(cause, says):
    """Only uploads that are not finite, without a fault that corrupts them, are a matter of the learning rate alone."""
    bad = {"updates": 4, "rejected": 4, "zero_weight": 0, "too_large": 0, "corrupt": 0}
    with pytest.warns(notices.AllRejected) as found:
        notices.warn_about({"": bad | cause})
    text = str(found[0].message)
    assert says in text and ("diverges" in text) == (cause == {}) and ("rate" in text) == ("corrupt" not in cause)


def test_one_warning_names_the_runs():
    bad, good = {"updates": 3, "rejected": 3}, {"updates": 3, "rejected": 1, "unused": 2}
    counts = [(4, 1, 0, 2), (4, 1, 1, 2), (4, 1, 4, 2), (4, 1, 5, 2), (0, 0, 0, 2)]
    names = ("updates", "unused", "rejected", "dropped_stale")
    assert [notices.all_rejected(dict(zip(names, one))) for one in counts] == [False, False, False, True, False]
    with pytest.warns(notices.RunWarning) as found:
        notices.warn_about({"a": bad, "b": good, "c": bad, "d": bad, "e": bad})
    unused, rejected = (str(one.message) for one in found)
    assert unused.startswith("b: 2 uploads") and rejected.startswith("a, c, d and 1 more: EVERY UPLOAD")
    assert [one.category for one in found] == [notices.RunWarning, notices.AllRejected]
    with pytest.warns(notices.NeverSwitched, match="^a: OrthoDyn never switched: all arrivals were corrected as in it"):
        notices.warn_about({"a": good | {"unused": 0, "phase_changes": 0}, "b": {"phase_changes": 1}, "c": {}})
    with pytest.warns(notices.EndedEarly, match="^a: ended; b: ended; c: ended; and 2 more runs ended early$"):
        notices.warn_about({name: {"ended_early": "ended"} for name in "abcde"})


def test_an_upload_that_is_lost_on_its_way_has_been_sent():
    """As between nodes, whose messages count when they are sent, and as in the energy of the clients."""
    given = DELAYED | {"method": "asgd", "engine": "reference", "time": 200.0, "eval_time": 20.0}
    lossy, crashing = (simulate(**given, faults=f"{fault}:probability=0.4") for fault in ("drop", "crash"))
    size = 4 * (784 * 10 + 10)
    for run, sent in (
        (lossy, len(lossy.updates["client"]) + lossy.counters["lost"]),
        (crashing, len(crashing.updates["client"])),
    ):
        assert run.counters["lost"] > 10 and run.evaluations["bytes_up"][-1] == size * sent
        assert (np.diff(run.evaluations["bytes_up"]) >= 0).all()


COUNTED = ("time", "update", "bytes_up", "bytes_down", "energy", "carbon")


@pytest.mark.parametrize(("kind", "in_flight"), [({}, 6), ({"timing": "every:concurrency=4", "policy": "oort"}, 4)])
def test_what_is_counted_at_the_end_does_not_depend_on_the_budget(kind, in_flight):
    energy = "flat:training=2,idle=1,down=1e-3,up=2e-3,carbon=300"
    given = DELAYED | {"method": "asgd", "energy": energy, "eval_updates": 4, "engine": "reference", **kind}
    long, short = (simulate(**given, updates=updates).evaluations for updates in (8, 4))
    assert {name: short[name][1] for name in COUNTED} == {name: long[name][1] for name in COUNTED}
    messages = short["bytes_down"] / (short["bytes_up"][1] / 4)
    assert messages.tolist() == [in_flight, in_flight + 4]  # the reply to the last arrival too


WAYS = [
    {"method": "asgd"}, {"method": "fedbuff@buffer:size=3,concurrency=4"}, {"method": "fedavg@cohort:size=3"},
    {"method": "asynfl@window:length=5"}, {"method": "asynfl@participation:length=5", "delay": "rpi"},
    {"method": "fedbuff@buffer:size=2,concurrency=3", "policy": "oort"},
    {"method": "pushcen", "topology": "ring"}, {"method": "sgp", "topology": "gossip:receivers=2"},
    {"method": "independent"},
]  # fmt: skip


@pytest.mark.parametrize(("way", "field", "budget"), [
    *[(way, "updates", 900) for way in WAYS], *[(way, "time", 4000) for way in (WAYS[0], WAYS[2], WAYS[6])],
    *[(way, "server_steps", 800) for way in (WAYS[0], WAYS[3])], (WAYS[0], "updates", 1234567),
])  # fmt: skip
def test_a_plan_that_runs_out_of_clients_says_how_far_it_came_and_why(way, field, budget):
    server = "topology" not in way and way["method"] != "independent"
    unit = {"updates": "updates", "time": "seconds", "server_steps": "server steps"}[field]
    why = rf"because no {'client' if server else 'node'} could train after the last update, at [\d.]+ s \(availab"
    said = said_of(**way, **LEAVES, **{field: budget})
    assert re.match(rf"ended after [\d.]+ of {budget} {unit} {why}ility = 'leaves:share=1,by=90'\)$", said), said
    assert budget > 9999 or said_of(**way, **{field: budget // 100}) is None


SHARING = {"clients": 4, "batch_size": 32, "eval_examples": None, "eval_updates": 300}  # programs of other tests


@pytest.mark.parametrize("way", [SHARING, WAYS[5] | {"engine": "reference"}, WAYS[8] | {"engine": "reference"}])
def test_a_run_that_runs_out_of_clients_has_a_counter_a_warning_and_a_column(way):
    run, (text,) = warned(simulate, **DELAYED | LEAVES | way, updates=900, kind=notices.EndedEarly)
    assert run.counters["ended_early"] == text
    assert text.startswith(f"ended after {len(run.updates['client'])} of 900 updates because no ")
    other = run._replace(counters={name: value for name, value in run.counters.items() if name != "ended_early"})
    first, second = comparison({"gone": [run, other], "whole": [other, other]})
    assert (first["ended before budget"], second["ended before budget"]) == ("1 of 2", "0 of 2")
    assert "ended before budget" not in comparison({"whole": [other]})[0]


@pytest.mark.parametrize("policy", [None, "uniform"])  # planned, and planned while it trains
def test_a_run_that_was_stopped_did_not_run_out_of_clients(policy):
    stop = [lambda evaluation: Stop("enough") if evaluation.update >= 4 else None]
    given = DELAYED | LEAVES | {"method": "asgd", "policy": policy, "updates": 900, "eval_updates": 4}
    run, said = warned(simulate, **given, engine="reference", callbacks=stop, kind=notices.EndedEarly)
    assert run.stopped is not None and not said and "ended_early" not in run.counters


def test_a_timing_whose_schedule_ends_says_so():
    def recorded(scenario):
        when = {"dispatch_time": [0, 0], "upload_time": [1, 2], "dispatched_after": [0, 0], "time": [1, 2]}
        return make_schedule(num_clients=6, client=[0, 1], local_steps=1, job=[0, 1], **when, closes=True)

    text = said_of(method="fedbuff", timing=recorded, updates=5)
    assert text == "ended after 2 of 5 updates because the schedule of its timing ends there"
    assert said_of(method="fedbuff", timing=recorded, updates=2) is None


NO_STEP = r"^availability = 'leaves.*': must be such that clients comp.*ended after"
NO_NODE = r"^availability = 'leaves:.*: must be such that a node finishes training"
GONE = r"2,000 uploads do not: .* gone \(availability = 'leaves:share=0.5,by=20'\)$"
CORRUPT = r"^faults = 'corrupt.*': must be such .* all that come are corrupt"


@pytest.mark.parametrize(("settings", "says"), [
    ({"method": "fedbuff@buffer:size=6", "availability": "leaves:share=1,at=10", "updates": 50}, NO_STEP),
    *[({"method": "pushcen", "availability": "leaves:share=1,by=1", **budget}, NO_NODE)
      for budget in ({"updates": 20}, {"time": 60.0})],
    (REFERENCE | {"delay": "exponential:mean=10", "availability": "leaves:share=0.5,by=20", "method": "ringleader",
                  "time": 80.0}, GONE),
    *[({"method": method, "faults": "corrupt:probability=1", **budget}, says)
      for method in ("asgd", "fedbuff@buffer:size=3", "fedavg@cohort:size=3", "asynfl")
      for budget, says in (({"updates": 9}, CORRUPT), ({"time": 500.0}, CORRUPT),
                           ({"updates": 9, "faults": "corrupt:probability=1+drop"}, CORRUPT),
                           ({"server_steps": 3}, r"^faults.*corrupt\)"))],
])  # fmt: skip
def test_what_completes_no_step_is_refused_with_the_cause(settings, says, monkeypatch):
    monkeypatch.setattr("fedjax_async.config.budget.MOST", 2000)
    monkeypatch.setattr("fedjax_async.clock.event_queue.FRUITLESS", 500)
    refused(says, **settings)


def test_a_refusal_plans_no_more_than_four_jobs_for_each_upload_that_it_looks_at(monkeypatch):
    monkeypatch.setattr("fedjax_async.config.budget.MOST", 2000)
    says = r"8,000 jobs do not: nearly all .* lost \(faults = 'drop:probability=0.9995'\)$"
    refused(says, method="fedbuff@buffer:size=6", faults="drop:probability=0.9995", updates=1, time=4e5)


@pytest.mark.parametrize("policy", ["oort", "power_of_choice:d=2", "oort+event_triggered:norm=0.1"])
@pytest.mark.parametrize("where", [{"method": "fedbuff@buffer:size=4"}, {"timing": "every"}, {"method": "asynfl"}])
def test_a_policy_with_nobody_to_choose_says_how_to_lower_the_concurrency(policy, where):
    said = refused(r"^policy = .* all 6 clients .* lower the concurrency, as in ", **where, policy=policy, updates=8)
    field, spec = re.search(r"as in (\w+) = '(.*)'$", said).groups()
    assert "concurrency=" in spec and said_of(**(where | {field: spec}), policy=policy, updates=8) is None  # it works
