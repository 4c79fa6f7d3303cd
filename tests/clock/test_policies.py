"""Decisions of policies without an engine, and what they refuse; ``test_policy_formulas.py`` has their formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedjax_async.clock import Choice, Decisions, Ended, Limits, Outcome, Policy, Prior, Until, bind_policy, cut, plan
from fedjax_async.clock.checking import check_schedule
from fedjax_async.clock.planning import NothingArrives
from tests.clock.textbook import check_outcomes, same, table_of
from tests.refusals import refusals

N = 20
PRIOR = Prior(N, np.arange(1, N + 1), np.linspace(1, 3, N), np.full(N, 5), seed=4)
DELAY = "lognormal:heterogeneity=0.5"
WORLDS = {
    "plain": {},
    "lossy": {"faults": "drop:probability=0.2+crash:probability=0.1,restart=3"},
    "late": {"faults": "late:probability=0.3,extra=3+duplicate:probability=0.2", "limits": Limits(None, 1.5, "drop")},
    "absent": {"availability": "sessions:on=5,off=3"},
    "stale": {"limits": Limits(max_staleness=2)},
    "corrupt": {"faults": "corrupt:probability=0.2"},
}  # fmt: skip
TIMINGS = ["every:concurrency=5", "buffer:size=3,concurrency=8", "window:length=1.5,concurrency=6",
           "cohort:size=5,over_selection=2", "cohort:size=5,deadline=2"]  # fmt: skip
WINDOWS = ["window:length=0.1,sampling=same", "window:length=0.7,concurrency=9,sampling=round_robin"]


class Stand:
    """A substitute for an engine: made-up observations, and a check of what is told when."""

    def __init__(self) -> None:
        self.told = 0

    def advance(self, record):
        job = np.array(record.extension(0, self.told).job)
        self.told = record.applied
        ones = np.ones(len(job))
        losses = {"loss": 1 / (1 + job), "rms_loss": 1 / (1 + job % 7)}
        return {"weight": ones, "upload_norm": ones, "accepted": ones > 0} | losses

    def finished(self, record, job):
        assert record.applied == self.told, "asked before all that was planned is executed"
        return 0.1 * (job % 5), 80

    def losses(self, clients):
        return (clients * 37 % 11).astype(float)

    def scores(self):
        return {}


def planned(timing, policy=None, stand=None, delay=DELAY, **given):
    """A plan with a policy, which may be a spec, and with the decisions that it made."""
    decisions = None
    if policy is not None:
        policy = bind_policy(policy)(PRIOR) if isinstance(policy, str) else policy
        decisions = Decisions(policy, stand or Stand())
    options = {"num_clients": N, "local_steps": 5, "until": Until(updates=60), "seed": 3, "bytes_up": 10} | given
    return plan(timing, delay, decisions=decisions, **options), decisions


@pytest.mark.parametrize(("timing", "world"), list(itertools.product(TIMINGS + WINDOWS, WORLDS)))
def test_a_policy_without_decisions_leaves_the_plan_as_it_is(timing, world):
    want, _ = planned(timing, **WORLDS[world])
    for policy in (Policy(), Policy(every=7), Policy(sends=lambda view, finished: True), Policy(sizes=True)):
        have, decisions = planned(timing, policy, **WORLDS[world])
        assert decisions.looks > 1 or "deadline" in timing
        same(want, have)
    if "window" in timing:  # one of constant length, too
        length = float(timing.partition("=")[2].partition(",")[0])
        have, decisions = planned(
            timing.replace(f"{length}", "60"), Policy(window=lambda view: length), **WORLDS[world]
        )
        same(want, have)
        assert set(decisions.tables["window"]["length"]) == {length}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("timing", "spec"), [
    ("every:concurrency=5", "power_of_choice:d=6"), ("buffer:size=3,concurrency=8", "oort+adaptive_buffer"),
    ("window:length=1.5,concurrency=6", "oort:every=4+event_triggered:norm=0.2"),
    ("cohort:size=5,over_selection=2", "power_of_choice:d=9+event_triggered:norm=0.2+true_bytes"),
    ("window:length=9,concurrency=6", "oort+adaptive_window:length=0.7,most=2,recent=4"),
])  # fmt: skip
def test_plans_of_policies_are_schedules_in_every_world(world, timing, spec):
    schedule, decisions = planned(timing, spec, **WORLDS[world])
    check_outcomes(check_schedule(schedule))
    withheld = np.flatnonzero(schedule.outcome == Outcome.WITHHELD)
    assert (len(withheld) > 0) == ("event" in spec) and not np.isin(withheld, schedule.job).any()
    chosen = decisions.tables["chosen"]
    np.testing.assert_array_equal(chosen["client"], schedule.client)
    np.testing.assert_array_equal(chosen["time"], schedule.dispatch_time)
    again, _ = planned(timing, spec, **WORLDS[world])
    assert all(np.array_equal(a, b) for a, b in zip(schedule, again)), "a policy has its chance from the seed alone"


def test_true_bytes_take_their_time_and_nothing_else_changes():
    network, twice = {"network": "link:up=20,down=1e6"}, Stand()
    quick, _ = planned("every", Policy(sizes=True), **network)  # 10 bytes, as planned
    np.testing.assert_array_equal(quick.time, planned("every", **network)[0].time)
    twice.finished = lambda record, job: (1.0, 160)
    slow, _ = planned("every", Policy(sizes=True), twice, **network)
    first, same = slow.number[slow.job] == 0, quick.number[quick.job] == 0
    longer = np.sort(slow.upload_time[slow.job][first])[:N] - np.sort(quick.upload_time[quick.job][same])[:N]
    np.testing.assert_allclose(longer, 0.5, rtol=1e-12)  # 10 bytes more at 20 a second


def test_joined_policies_look_as_often_as_the_one_that_has_to():
    for spec, every in [
        ("oort:every=5+event_triggered:norm=1+true_bytes", 5), ("true_bytes+uniform:every=3", 3),
        ("oort:every=5+adaptive_buffer", 1), ("event_triggered:norm=1+true_bytes", 1),
    ]:  # fmt: skip
        joined = bind_policy(spec)(PRIOR)
        assert joined.every == every, spec
        assert (bool(joined.loss), bool(joined.choose)) == ("oort" in spec, "oort" in spec)
        assert (bool(joined.sends), bool(joined.sizes)) == ("event" in spec, "true_bytes" in spec)
    _, decisions = planned("every:concurrency=5", "oort:every=10+true_bytes")
    assert 5 <= decisions.looks <= 7


test_timings_refuse_what_they_cannot_ask = refusals(
    ("every", "oort", "concurrency = 20: must be below 20"),
    ("buffer:size=3,concurrency=8,sampling=round_robin", "oort", "sampling = 'round_robin': must be left out"),
    ("window:length=1", "adaptive_buffer", "timing = 'window': must be buffer: policy = 'adaptive_buffer'"),
    ("cohort:size=3", "adaptive_buffer", "timing = 'cohort': must be buffer"),
    ("cohort:size=3", "adaptive_window:length=3", "timing = 'cohort': must be window: policy = 'adaptive_window:"),
    ("every", "adaptive_window", "timing = 'every': must be window: policy = 'adaptive_window' decides how long"),
    ("buffer:size=2", "oort+adaptive_window", r"timing = 'buffer': must be window: policy = 'oort\+adaptive_window'"),
    ("participation", "uniform", "timing = 'participation': must be another"),
    by=planned,
)


def test_a_run_may_end_at_any_look():
    whole, _ = planned("every:concurrency=5")
    for at in (2, 20):
        stand = Stand()
        advance = stand.advance

        def ending(record, advance=advance, at=at):
            if record.applied >= at:
                raise Ended
            return advance(record)

        stand.advance = ending
        schedule, _ = planned("every:concurrency=5", Policy(), stand)
        np.testing.assert_array_equal(schedule.job, whole.job[:at])
    with pytest.raises(NothingArrives):
        planned("every:concurrency=2", Policy(), delay="constant:mean=9", until=Until(time=5.0))


@pytest.mark.parametrize(("delay", "conditions"), [("constant", {}), (DELAY, WORLDS["lossy"])])
def test_a_buffer_is_asked_for_once_per_server_step(delay, conditions):
    policy, until = Policy(buffer=lambda view: 3 - view.step % 2), Until(updates=36)
    schedule, decisions = planned("buffer:size=2,concurrency=4", policy, delay=delay, until=until, **conditions)
    table, ends = decisions.tables["buffer"], np.flatnonzero(schedule.closes) + 1
    begins = [0, *ends[ends < 36]]
    np.testing.assert_array_equal(table["update"], begins)
    np.testing.assert_array_equal(table["size"], 3 - np.arange(len(begins)) % 2)
    np.testing.assert_array_equal(np.diff([0, *ends]), table["size"][: len(ends)])


def test_windows_of_a_policy_begin_at_the_end_of_the_last_one_with_arrivals():
    lengths = [0.5, 2.0, 2.0, 0.25, 1.0]  # binary fractions: no rounding
    seconds = np.random.default_rng(3).integers(1, 40, size=(6, 60)) / 8
    policy, until = Policy(window=lambda view: lengths[view.step % 5]), Until(steps=25)
    s, decisions = planned("window:length=7", policy, delay=table_of(*seconds), num_clients=6, until=until)
    table, ends = decisions.tables["window"], s.time[s.closes]
    np.testing.assert_array_equal(table["length"], np.resize(lengths, 25))
    np.testing.assert_array_equal(table["time"], [0.0, *ends[:-1]])
    np.testing.assert_array_equal(table["update"], [0, *np.flatnonzero(s.closes)[:-1] + 1])
    empty = 0
    for begin, end, length in zip(table["time"], ends, table["length"]):
        under_way = np.flatnonzero((s.dispatch_time <= begin) & (s.upload_time > begin))
        uploads = s.upload_time[under_way]
        windows = np.ceil((uploads.min() - begin) / length)
        assert end == begin + windows * length
        came = under_way[uploads <= end]
        order = np.lexsort((s.client[came], s.upload_time[came]))
        np.testing.assert_array_equal(s.job[s.time == end], came[order])
        empty += windows > 1
    takes = seconds[s.client, s.number]
    np.testing.assert_array_equal(s.upload_time, s.dispatch_time + takes)
    assert (
        set(s.dispatch_time) <= {0.0, *ends} and empty > 0 and not s.closes[np.diff(s.time, append=np.inf) == 0].any()
    )


def test_a_plan_of_clients_that_withhold_is_cut_like_a_shorter_plan():
    def until(time):
        given = {"limits": Limits(timeout=0.8, max_staleness=2), "until": Until(time=time)}
        return planned("every:concurrency=5", "event_triggered:norm=0.2", **given)[0]

    whole = until(12.0)
    withheld, late = whole.outcome == Outcome.WITHHELD, whole.freed_time < whole.upload_time
    moments = [(whole.freed_time[job] + whole.upload_time[job]) / 2 for job in np.flatnonzero(withheld & late)[:5]]
    assert len(moments) == 5
    for moment in (*moments, 3.0, 7.0):
        have = cut(whole, int(np.sum(whole.time <= moment)), moment)
        np.testing.assert_array_equal(have.outcome, until(moment).outcome)


test_options_out_of_range_are_refused = refusals(
    ("power_of_choice:d=0", "d = 0"), ("power_of_choice:d=21", "d = 21: must be at most 20"),
    ("oort:least=1", "least = 1: must be at most exploration"), ("oort:decay=0", "decay = 0"),
    ("oort:pace=200", "pace"), ("oort:window=0", "window = 0"), ("oort:penalty=-1", "penalty = -1"),
    ("oort:clip=2", "clip = 2"), ("linear:temperature=0", "temperature = 0"), ("linear:age=x", "age = 'x'"),
    ("adaptive_buffer:size=3,most=2", "most = 2: must be at least 3"), ("adaptive_buffer:recent=0", "recent = 0"),
    ("adaptive_window:length=3,most=2", "most = 2: must be at least 3"), ("adaptive_window:length=0", "length = 0"),
    ("adaptive_window:recent=0", "recent = 0"), ("adaptive_window:every=0", "every = 0"),
    ("event_triggered:norm=0", "norm = 0"), ("event_triggered", "needs the option norm"),
    ("uniform:every=0", "every = 0"),
    ("power_of_choice+true_bytes:x=1", "no option 'x'"), ("oort+", r"policy = 'oort\+': must be names of policies"),
    ("oort:every=2+power_of_choice:d=21", "^policy = 'power_of_choice:d=21': d = 21: must be at most 20"),
    ("oort+power_of_choice:d=3", "policy = 'power_of_choice:d=3': must be left out: oort decides the same"),
    ("ort", "did you mean 'oort'"), ("oort:speed=1", "no option 'speed'"),
    by=lambda spec: bind_policy(spec)(PRIOR),
)  # fmt: skip


@pytest.mark.parametrize("timing", TIMINGS[::2])
def test_a_policy_that_lets_no_client_upload_is_given_up(timing):
    says = r"policy = 'event_triggered:norm=1000': must let clients upload, .* the last {} jobs .* norm .* was 0.4 "
    for until, jobs in ((Until(updates=60), "1,000"), (Until(time=4.0), r"\d+")):
        with pytest.raises(ValueError, match=says.format(jobs)):
            planned(timing, "event_triggered:norm=1000", until=until)


def test_what_a_policy_is_given_cannot_be_changed():
    given = []

    def choose(view, idle, count):
        given.extend([idle, *view.arrivals.values(), view.scores.get("per_client")])
        return Choice(idle[:count], np.zeros(count))

    stand, examples = Stand(), np.arange(1, N + 1)
    kept = np.zeros(2)
    stand.scores = lambda: {"per_client": kept}
    prior = Prior(N, examples, np.ones(N), np.full(N, 5), seed=4)
    planned("every:concurrency=5", Policy(choose=choose, loss=True), stand)
    for column in (*given, prior.examples, prior.seconds, prior.local_steps):
        with pytest.raises(ValueError, match="read-only"):
            column[:] = 0
    examples[0] = kept[0] = 7
    assert prior.examples[0] == 1 and given[-1][0] == 0


def test_a_view_that_is_read_later_has_the_rows_of_its_look():
    views = []

    def choose(view, idle, count):
        views.append(view)
        if len(views) % 100 == 0:
            assert len(view.arrivals["loss"]) == view.step
        return Choice(idle[:count], np.zeros(count))

    planned("every:concurrency=5", Policy(choose=choose, loss=True), until=Until(updates=600))
    last = dict(views[-1].arrivals)
    assert len(last) == 9 and "bits" not in views[-1].arrivals and views[-1].step == len(last["loss"]) == 600
    for view in (views[3], views[400], views[300], views[-1]):
        np.testing.assert_equal(dict(view.arrivals), {name: column[: view.step] for name, column in last.items()})


def _of(policy):
    return planned("buffer:size=2,concurrency=5", policy)


def _choosing(choice):
    return Policy(choose=lambda view, idle, count: choice)


WRONG = [
    (Policy(choose=lambda view, idle, count: 1 / 0), r"choose\(view, idle, count\): .*ZeroDivisionError: division by"),
    (Policy(choose=lambda view, idle: 0), r"choose\(view, idle, count\): .* returns a Choice.*it raised TypeError"),
    (Policy(buffer=lambda view: view.arrivals["loss"]), r"buffer\(view\): .* a whole number >= 1; it raised KeyError"),
    (_choosing(Choice(np.array([0, 0]), np.zeros(2))), "choose.*different clients"),
    (_choosing(Choice(np.array([0, 99]), np.zeros(2))), "choose.*different clients among the idle"),
    (_choosing(Choice(np.arange(9), np.zeros(9))), "choose.*between 1 and 5 clients"),
    (_choosing(Choice(np.array([1]), np.zeros(3))), "choose.*of equal length"), (_choosing([1, 2]), "choose.*a Choice"),
    (Policy(buffer=lambda view: 0), r"buffer\(view\) = 0"),
    (Policy(buffer=lambda view: np.array([2])), r"buffer\(view\) = array\(\[2\]\): must be a whole number"),
    (Policy(sends=lambda view, done: done.nothing), r"sends\(view, finished\): .*True or False; it raised Attribute"),
    (Policy(sends=lambda view, done: "no"), r"sends\(view, finished\) = 'no': must be True or False"),
    (Policy(sends=lambda view, done: np.array([True, False])), r"sends\(view, finished\) = array.*True or False"),
]  # fmt: skip
test_functions_of_a_policy_that_raise_or_return_something_else_are_named_in_one_line = refusals(
    *((policy, f"^policy.{says}") for policy, says in WRONG), by=_of
)
test_a_window_is_a_number_of_seconds = refusals(
    *((length, rf"^policy.window\(view\) = {says}: must be a finite number > 0") for length, says in
      ((0, "0"), (-1.0, "-1.0"), (np.nan, "nan"), (np.inf, "inf"), ("long", "'long'"), (None, "None"))),
    by=lambda length: planned("window", Policy(window=lambda view: length)),
)  # fmt: skip
CHOICES = [
    ([[1], [2, 3]], [0.0, 1.0], "of equal length"), ([0.5], [0.0], "integers"), ([True, False], [0.0, 0.0], "integers"),
    (["a"], [0.0], "integers"), ([0], ["best"], "real numbers"), ([0], [None], "real numbers"),
    ([0], [1j], "real numbers"), ([0], None, "of equal length"),
]  # fmt: skip
CHOSEN = r"^policy.choose\(view, idle, count\) = Choice.* must be a Choice.*"
test_a_choice_of_other_types_is_refused = refusals(
    *((*choice, CHOSEN + says) for *choice, says in CHOICES), by=lambda *choice: _of(_choosing(Choice(*choice)))
)


def test_losses_are_those_of_clients():
    for asked in ([99], np.array([-1]), np.arange(N) == 3, np.array([1.0]), 3, [[1, 2]], [[1], [2, 3]], None):
        with pytest.raises(ValueError, match=r"it raised ValueError: view.losses\(clients\) = .* from 0 to 19$"):
            _of(Policy(choose=lambda view, idle, count, asked=asked: Choice(idle[:1], view.losses(asked))))
    found = []

    def choose(view, idle, count):
        found.append((view.losses([3, 1]).tolist(), len(view.losses([]))))
        return Choice(idle[:count], np.zeros(count))

    _of(Policy(choose=choose))
    assert found[0] == ([1.0, 4.0], 0)
