"""How runs end: with the replies to the last uploads, which are counted, or early, which is said."""

from __future__ import annotations

import re

import pytest

from fedjax_async import Stop, simulate
from fedjax_async.base import notices
from fedjax_async.clock import make_schedule
from fedjax_async.config import Settings, prepare
from fedjax_async.config.budget import ended_early
from fedjax_async.results import comparison
from tests.told import warned

SMALL = {"model": "logistic", "clients": 6, "steps": 1, "batch_size": 8, "eval_examples": 40}
SMALL |= {"delay": "lognormal:mean=10,sigma=0.3"}
LEAVES = {"availability": "leaves:share=1,by=90"}


def said_of(**settings):
    """What the plan of these settings says about its early end."""
    e = prepare(Settings(**SMALL | settings))
    return ended_early(e.settings, e.described, e.schedule)


def quietly(**settings):
    """The run, and the texts of its warnings that it ended early."""
    return warned(simulate, **SMALL, **settings, kind=notices.EndedEarly)


# --- bytes at the end ---------------------------------------------------------------------------

KINDS = [
    ({"method": "asgd"}, 6),  # settings, and jobs in flight
    ({"method": "asgd", "timing": "every:concurrency=4", "policy": "oort"}, 4),
]
COUNTED = ("time", "update", "bytes_up", "bytes_down", "energy", "carbon")


@pytest.mark.parametrize(("kind", "in_flight"), KINDS)
def test_what_is_counted_at_the_end_does_not_depend_on_the_budget(kind, in_flight):
    given = SMALL | {"energy": "flat:training=2,idle=1,down=1e-3,up=2e-3,carbon=300", "eval_updates": 4, **kind}
    given["engine"] = "reference"
    long, short = (simulate(**given, updates=updates).evaluations for updates in (8, 4))
    for name in COUNTED:
        assert short[name][1] == long[name][1], name
    messages = short["bytes_down"] / (short["bytes_up"][1] / 4)
    assert messages.tolist() == [in_flight, in_flight + 4]  # the reply to the last arrival too


# --- early ends ---------------------------------------------------------------------------------

WAYS = [
    {"method": "asgd"}, {"method": "fedbuff@buffer:size=3,concurrency=4"}, {"method": "fedavg@cohort:size=3"},
    {"method": "asynfl@window:length=5"}, {"method": "asynfl@participation:length=5", "delay": "rpi"},
    {"method": "fedbuff@buffer:size=2,concurrency=3", "policy": "oort"},
    {"method": "pushcen", "topology": "ring"}, {"method": "sgp", "topology": "gossip:receivers=2"},
    {"method": "independent"},
]  # fmt: skip


@pytest.mark.parametrize(("way", "field", "budget"), [
    *[(way, "updates", 900) for way in WAYS], *[(way, "time", 4000) for way in (WAYS[0], WAYS[2], WAYS[6])],
    *[(way, "server_steps", 800) for way in (WAYS[0], WAYS[3])],
])  # fmt: skip
def test_a_plan_that_runs_out_of_clients_says_how_far_it_came_and_why(way, field, budget):
    server = "topology" not in way and way["method"] != "independent"
    unit = {"updates": "updates", "time": "seconds", "server_steps": "server steps"}[field]
    why = rf"because no {'client' if server else 'node'} could train after the last update, at [\d.]+ s \(availab"
    said = said_of(**way, **LEAVES, **{field: budget})
    assert re.match(rf"ended after [\d.]+ of {budget:g} {unit} {why}ility = 'leaves:share=1,by=90'\)$", said), said
    assert said_of(**way, **{field: budget // 100}) is None


@pytest.fixture(scope="module")
def gone():
    """A run that ends because its clients leave, and its warnings."""
    small = {"model": "logistic", "clients": 4, "steps": 1, "delay": SMALL["delay"]}  # shares its programs
    return warned(simulate, **small, **LEAVES, updates=900, eval_updates=300, kind=notices.EndedEarly)


@pytest.mark.parametrize("way", [None, WAYS[5] | {"engine": "reference"}, WAYS[8] | {"engine": "reference"}])
def test_a_run_that_runs_out_of_clients_has_a_counter_and_a_warning(way, gone):
    run, (text,) = quietly(**way, **LEAVES, updates=900) if way else gone
    assert run.counters["ended_early"] == text
    assert text.startswith(f"ended after {len(run.updates['client'])} of 900 updates because no ")


def test_a_large_budget_is_written_in_full():
    assert " of 1234567 updates because" in said_of(**WAYS[0], **LEAVES, updates=1234567)


def test_a_run_that_was_stopped_did_not_run_out_of_clients():
    def stop(evaluation):
        return Stop("enough") if evaluation.update >= 4 else None

    for policy in (None, "uniform"):  # planned, and planned while it trains
        given = {"method": "asgd", "policy": policy, "updates": 900, "eval_updates": 4, "engine": "reference"}
        run, warned = quietly(**given, **LEAVES, callbacks=[stop])
        assert run.stopped is not None and not warned and "ended_early" not in run.counters


def test_a_timing_whose_schedule_ends_says_so():
    def recorded(scenario):
        return make_schedule(
            num_clients=6, client=[0, 1], local_steps=1, dispatch_time=[0, 0], upload_time=[1, 2],
            dispatched_after=[0, 0], job=[0, 1], time=[1, 2], closes=True,
        )  # fmt: skip

    text = said_of(method="fedbuff", timing=recorded, updates=5)
    assert text == "ended after 2 of 5 updates because the schedule of its timing ends there"
    assert said_of(method="fedbuff", timing=recorded, updates=2) is None


def test_a_run_that_runs_out_of_clients_before_its_first_step_is_refused():
    with pytest.raises(ValueError, match=r"^availability = 'leaves.*': must be such that clients comp.*ended after"):
        said_of(method="fedbuff@buffer:size=6", availability="leaves:share=1,at=10", updates=50)


def test_nodes_that_are_all_gone_before_one_has_trained_are_refused():
    given = {"method": "pushcen", "availability": "leaves:share=1,by=1"}
    for budget in ({"updates": 20}, {"time": 60.0}):
        with pytest.raises(ValueError, match=r"^availability = 'leaves:.*: must be such that a node finishes training"):
            prepare(Settings(**SMALL, **given, **budget))


def test_one_warning_names_three_runs_that_ended_early():
    with pytest.warns(notices.EndedEarly, match="^a: ended; b: ended; c: ended; and 2 more runs ended early$"):
        notices.warn_about({name: {"ended_early": "ended"} for name in "abcde"})


def test_tables_count_the_runs_that_ended_early(gone):
    run, _ = gone
    other = run._replace(counters={name: value for name, value in run.counters.items() if name != "ended_early"})
    first, second = comparison({"gone": [run, other], "whole": [other, other]})
    assert (first["ended before budget"], second["ended before budget"]) == ("1 of 2", "0 of 2")
    assert "ended before budget" not in comparison({"whole": [other]})[0]


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["asgd", "fedbuff@buffer:size=3", "fedavg@cohort:size=3", "asynfl"])
def test_that_all_uploads_are_corrupt_is_said(method, monkeypatch):
    monkeypatch.setattr("fedjax_async.clock.event_queue.FRUITLESS", 500)
    for budget in ({"updates": 9}, {"time": 500.0}, {"updates": 9, "faults": "corrupt:probability=1+drop"}):
        with pytest.raises(ValueError, match=r"^faults = 'corrupt.*': must be such .* all that come are corrupt"):
            said_of(method=method, **{"faults": "corrupt:probability=1", **budget})
    with pytest.raises(ValueError, match=r"^faults.*corrupt\)"):
        said_of(method=method, faults="corrupt:probability=1", server_steps=3)


@pytest.mark.parametrize("policy", ["oort", "power_of_choice:d=2", "oort+event_triggered:norm=0.1"])
@pytest.mark.parametrize("where", [{"method": "fedbuff@buffer:size=4"}, {"timing": "every"}, {"method": "asynfl"}])
def test_a_policy_with_nobody_to_choose_says_how_to_lower_the_concurrency(policy, where):
    with pytest.raises(ValueError, match=r"^policy = .* all 6 clients .* lower the concurrency, as in ") as caught:
        said_of(**where, policy=policy, updates=8)
    field, spec = re.search(r"as in (\w+) = '(.*)'$", str(caught.value)).groups()
    assert "concurrency=" in spec and said_of(**(where | {field: spec}), policy=policy, updates=8) is None  # it works
