"""Budgets that end before or within a server step: they are refused, or the uploads of that step are counted."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Method, simulate
from fedjax_async.base import notices
from fedjax_async.config import Settings, prepare
from fedjax_async.server import methods, rule, scale_by_staleness
from fedjax_async.types import Facts, ServerAlgorithm
from tests.config.test_own import scaled
from tests.told import warned

SMALL = {"model": "logistic", "clients": 5, "steps": 1, "batch_size": 8, "eval_examples": 40, "engine": "reference"}
ROOT = Path(__file__).resolve().parents[2]
TAUGHT = (ROOT / "README.md", ROOT / "notebooks" / "02_add_an_algorithm.ipynb")  # where own rules are taught
COHORTS = {**SMALL, "method": "fedavg@cohort:size=4"}


BUDGETS = [
    ({"updates": 3}, "updates"), ({"updates": 3, "time": 1e9}, "updates"), ({"time": 60.0}, "time"),
    ({"time": 60.0, "updates": 100}, "time"),
]  # fmt: skip


@pytest.mark.parametrize(("budget", "field"), BUDGETS)
def test_a_budget_without_a_server_step_is_refused_and_the_number_it_names_is_the_smallest(budget, field):
    with pytest.raises(ValueError, match=rf"^{field} = .*: must be at least [\d.]+, ") as caught:
        prepare(Settings(**COHORTS, **budget))
    named = float(re.search(r"at least ([\d.]+),", str(caught.value)).group(1))
    enough, less = (4, 3) if field == "updates" else (named, named * (1 - 1e-5))
    assert named == enough and named > less
    assert prepare(Settings(**COHORTS, **{**budget, field: enough})).schedule.closes.sum() == 1
    with pytest.raises(ValueError, match=field):
        prepare(Settings(**COHORTS, **{**budget, field: less}))


def test_a_policy_of_ones_own_is_not_planned_with_another_budget():
    def endless(scenario):
        assert scenario.until.updates == 3, "asked for another budget"
        planned = prepare(Settings(**SMALL, method="asgd", updates=3)).schedule
        return planned._replace(closes=np.zeros(3, bool), step=np.zeros(3, int), version=np.zeros_like(planned.version))

    with pytest.raises(ValueError, match=r"updates = 3: must be enough to complete a server step"):
        prepare(Settings(**SMALL, method="fedbuff", timing=endless, updates=3))


def test_a_step_that_waits_for_clients_that_are_gone_is_refused_at_once_with_the_cause(monkeypatch):
    monkeypatch.setattr("fedjax_async.config.budget.MOST", 2000)
    gone = {"availability": "leaves:share=0.5,by=20", "delay": "exponential:mean=10"}
    with pytest.raises(ValueError, match=r"2,000 uploads do not: .* gone \(availability = 'leaves:share=0.5,by=20'\)$"):
        prepare(Settings(**SMALL | gone, method="ringleader", time=80.0))


def test_uploads_of_an_incomplete_step_are_counted_apart_and_change_nothing():
    run, said = warned(simulate, **COHORTS, updates=6, eval_updates=2)
    whole, nothing = warned(simulate, **COHORTS, updates=4)
    assert nothing == [] and len(said) == 1 and said[0].startswith("2 uploads came for a server step")
    closes = np.asarray(run.schedule.closes)
    assert closes.tolist() == [False, False, False, True, False, False]
    assert (run.counters["updates"], run.counters["unused"], run.counters["server_steps"]) == (4, 2, 1)
    assert (whole.counters["updates"], whole.counters["unused"]) == (4, 0)
    assert run.updates["used"].tolist() == [True] * 4 + [False] * 2
    assert run.evaluations["update"].tolist() == [0, 2, 4, 4]
    jax.tree.map(np.testing.assert_array_equal, run.params, whole.params)
    # a rule that changes the model at every upload uses all of them, whether or not a step is complete
    all_used, nothing = warned(simulate, **SMALL, method=Method(scaled(1.0), "buffer:size=4"), updates=3)
    assert nothing == [] and all_used.counters["unused"] == 0 and all_used.counters["updates"] == 3
    assert all_used.counters["server_steps"] == 0
    assert any(map(np.any, jax.tree.leaves(all_used.params)))  # logistic is initialised with zeros


def test_a_rule_that_gives_weight_0_still_closes_steps_and_max_staleness_does_not():
    """As the docstring of ``ServerAlgorithm``, README and the notebook on own rules say."""
    fresh = rule(scale_by_staleness(lambda tau: jnp.where(tau > 0, 0.0, 1.0)), optimizer=optax.sgd(1.0))
    given = {**SMALL, "method": Method(fresh, timing="buffer:size=2"), "updates": 10, "delay": "lognormal:mean=9"}
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


@pytest.mark.parametrize("rejected", [0, 1, 4, 5])
def test_all_rejected_counts_only_what_came(rejected):
    counters = {"updates": 4, "unused": 1, "rejected": rejected, "dropped_stale": 2}
    assert notices.all_rejected(counters) == (rejected == 5)
    assert not notices.all_rejected({"updates": 0, "unused": 0, "rejected": 0, "dropped_stale": 2})


def test_the_advice_follows_the_cause():
    """Only uploads that are not finite, without a fault that corrupts them, are a matter of the learning rate alone."""
    bad = {"updates": 4, "rejected": 4, "zero_weight": 0, "too_large": 0, "corrupt": 0}
    said = {}
    for name in (None, "zero_weight", "too_large", "corrupt"):
        with pytest.warns(notices.AllRejected) as found:
            notices.warn_about({"": bad | ({} if name is None else {name: 4})})
        said[name] = str(found[0].message)
    assert "4 not finite (training diverges: lower the learning rate" in said[None]
    assert "4 of weight 0 (from the method's rule:" in said["zero_weight"] and "diverges" not in said["zero_weight"]
    assert "4 larger than norm_limit (raise norm_limit" in said["too_large"]
    assert "4 corrupt (the setting faults made them NaN)" in said["corrupt"] and "rate" not in said["corrupt"]


def test_one_warning_names_the_runs():
    bad, good = {"updates": 3, "rejected": 3}, {"updates": 3, "rejected": 1, "unused": 2}
    with pytest.warns(notices.RunWarning) as found:
        notices.warn_about({"a": bad, "b": good, "c": bad, "d": bad, "e": bad})
    unused, rejected = (str(one.message) for one in found)
    assert unused.startswith("b: 2 uploads") and rejected.startswith("a, c, d and 1 more: EVERY UPLOAD")
    assert [one.category for one in found] == [notices.RunWarning, notices.AllRejected]
    with pytest.warns(notices.NeverSwitched, match="^a: OrthoDyn never switched: all arrivals were corrected as in it"):
        notices.warn_about({"a": good | {"unused": 0, "phase_changes": 0}, "b": {"phase_changes": 1}, "c": {}})


# --- Krum, which needs 2 f + 3 uploads --------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 2, 4])
def test_krum_takes_steps_of_2f_plus_3_uploads_and_no_fewer(bad):
    least = 2 * bad + 3
    world = {**SMALL, "clients": least, "server_steps": 2}

    def planned(size, rows):
        return prepare(Settings(**world, method=f"krum:byzantine={bad},size={rows}", timing=f"buffer:size={size}"))

    assert len(planned(least, least).schedule.job) == 2 * least
    with pytest.raises(ValueError, match=rf"^size = {least - 1}: must be at least 2 f \+ 3 = {least} "):
        planned(least - 1, least - 1)
    with pytest.raises(ValueError, match=rf"server step = {least - 1}: must be at least 2 f \+ 3 = {least} "):
        planned(least - 1, least)


def test_krums_rule_by_hand_knows_no_run():
    rule = methods.krum(byzantine=2, size=7)
    params = {"w": jnp.zeros(2)}
    assert rule.init(params, Facts(9))[0].params["w"].shape == (2,)
    with pytest.raises(ValueError, match="server step = 6"):
        rule.init(params, Facts(9, longest_step=6))
    with pytest.raises(ValueError, match="server step = 1"):
        prepare(Settings(**SMALL, method=Method(methods.krum()), updates=3))
