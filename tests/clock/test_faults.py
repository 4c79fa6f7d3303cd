import math

import numpy as np
import pytest

from fedjax_async.clock import FAULTS, Availability, Faults, JobFaults, Until, chance, faults, job_faults
from fedjax_async.clock.faults import combined, crashes, paces_together
from fedjax_async.clock.job_outcomes import job_outcomes
from fedjax_async.clock.scenario import NO_LIMITS, bind, models_of
from tests.clock.textbook import make, same, table_of
from tests.refusals import refusals

CLIENTS, NUMBERS = 300, 40


def of_spec(spec, num_clients, seed=0):
    ((model, part),) = models_of("faults", FAULTS, spec)
    return model(num_clients, seed, part)


def draws_of(spec, num_clients=CLIENTS, seed=0):
    models = models_of("faults", FAULTS, spec)
    return [draw for model, part in models for draw in model(num_clients, seed, part)[:2]]


def drawn(spec, num_clients=CLIENTS, seed=0, numbers=NUMBERS):
    """The faults of all jobs, every column spread out over them: bool and float64[clients * numbers]."""
    clients, numbers = np.mgrid[:num_clients, :numbers].reshape(2, -1)
    *columns, copies = job_faults(draws_of(spec, num_clients, seed), clients, numbers)
    return JobFaults(*(np.broadcast_to(column, clients.shape) for column in columns), copies)


def number_of_copies(m):
    return sum(np.isfinite(delays).astype(int) for delays in m.copies)


def untouched(m):
    """Jobs without faults."""
    copied = np.broadcast_to(number_of_copies(m) > 0, m.lost.shape)
    return np.all([~copied] + [column == value for column, value in zip(m, JobFaults()[:-1])], axis=0)


@pytest.mark.parametrize(("spec", "probability", "happens"), [
    ("drop:probability=0.1", 0.1, lambda m: m.lost), ("duplicate", 0.05, lambda m: number_of_copies(m) == 1),
    ("crash", 0.1, lambda m: (m.crash_share >= 0) & (m.crash_share < 1) & (m.restart == 60)),
    ("late:probability=0.2,extra=3,factor=2", 0.2, lambda m: (m.extra == 3) & (m.factor == 2)),
    ("corrupt:probability=0.05", 0.05, lambda m: m.corrupt), ("drop:probability=0", 0.0, lambda m: m.lost),
    ("drop:probability=1", 1.0, lambda m: m.lost),
    ("crash:rate=0.01", 1 - math.exp(-2), lambda m: m.crash_after < 200),
])  # fmt: skip
def test_faults_come_with_their_probability(spec, probability, happens):
    found = drawn(spec)
    befallen = happens(found)
    sigma = math.sqrt(probability * (1 - probability) / len(befallen))
    assert abs(befallen.mean() - probability) <= 4 * sigma
    assert (befallen | untouched(found)).all() or "rate" in spec


def test_delays_are_the_exponential_draws_of_the_clock_and_shares_are_uniform(monkeypatch):
    monkeypatch.setattr(faults.math, "log1p", None)  # for single numbers, it may differ in the last bit, see ``chance``
    clients, numbers = np.mgrid[:CLIENTS, :NUMBERS].reshape(2, -1)
    draws = chance.Draws(0, "duplicate", 0, clients, numbers)
    copied = draws.random() < 0.5
    (delays,) = drawn("duplicate:probability=0.5,delay=7").copies
    np.testing.assert_array_equal(delays[copied], 7 * draws.standard_exponential(copied))
    draws = chance.Draws(0, "crash", 0, clients, numbers)
    draws.random()
    np.testing.assert_array_equal(drawn("crash:rate=1").crash_after, draws.standard_exponential())
    quartiles = np.quantile(drawn("crash:probability=1").crash_share, [0.25, 0.5, 0.75])
    assert np.abs(quartiles - [0.25, 0.5, 0.75]).max() < 0.02


def test_what_befalls_a_job_depends_on_nothing_else():
    alone = drawn("drop:probability=0.3").lost
    together = drawn("corrupt:probability=0.3+drop:probability=0.3+crash:probability=0.3").lost
    more_clients = drawn("drop:probability=0.3", num_clients=1000).lost
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(more_clients[: len(alone)], alone)
    assert (drawn("drop:probability=0.3", seed=1).lost != alone).any()
    draws = draws_of("drop:probability=0.3")
    for i, n in np.ndindex(30, 4):
        assert job_faults(draws, i, n).lost == alone.reshape(CLIENTS, NUMBERS)[i, n]


def test_models_draw_apart_from_each_other_and_from_their_namesakes():
    spec = "drop:probability=0.5+corrupt:probability=0.5+duplicate:probability=0.5+duplicate:probability=0.5"
    found = drawn(spec, num_clients=1000)
    correlation = np.corrcoef(found.lost, found.corrupt)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(len(found.lost))
    assert abs((number_of_copies(found) > 0).mean() - 0.75) < 0.01
    assert abs((number_of_copies(found) > 1).mean() - 0.25) < 0.01


def test_two_faults_of_one_job():
    one = JobFaults(lost=True, crash_share=0.7, restart=5, factor=2, copies=(1.0,))
    other = JobFaults(corrupt=True, crash_share=0.2, crash_after=9, restart=3, factor=3, extra=4, copies=(2.0,))
    assert combined(one, other) == JobFaults(True, True, 0.2, 9, 5, 6, 4, (1.0, 2.0))
    assert combined(one, JobFaults()) == combined(JobFaults(), one) == one


def test_only_crashes_that_come_before_the_end_of_the_job_count():
    """Jobs of 10 s: the crash of the first source, that of the second, both, and none."""
    share, after = np.array([0.5, np.inf, 0.5, np.inf]), np.array([20.0, 6.0, 6.0, 20.0])
    sources = [JobFaults(crash_share=share, restart=1.0), JobFaults(crash_after=after, restart=1000.0)]
    until, restart = crashes(sources, np.full(4, 10.0))
    np.testing.assert_array_equal(until, [5, 6, 5, 20])
    np.testing.assert_array_equal(restart[:3], [1, 1000, 1000])


def test_a_crash_that_never_comes_delays_no_restart():
    """A rate of one crash in 30,000 years, beside crashes from which clients restart at once."""
    one, years = "crash:probability=0.5,restart=1", "crash:rate=1e-12,restart=1000"
    until = Until(time=5000)
    alone, both = (
        make("every", "constant:mean=10", num_clients=1, until=until, faults=spec) for spec in (one, f"{one}+{years}")
    )
    np.testing.assert_array_equal(both.dispatch_time, alone.dispatch_time)
    assert len(alone.client) > 400


test_times_that_faults_make_infinite_are_refused = refusals(
    ("late:probability=0.5,factor=1e308", "^faults: must leave the duration of every job a finite number"),
    ("late:extra=1e308+late:extra=1e308", "^faults: must leave the duration of every job a finite number"),
    ("drift:factor=1e308+drift:factor=1e308", "^delays: the jobs of client . are too long"),
    ("drift:factor=1e308,share=1", "^delays: the jobs of client . are too long"),
    by=lambda faults: make("every", "constant:mean=10", num_clients=3, until=Until(time=5000), faults=faults),
)  # fmt: skip


def test_groups_fail_together():
    faults = of_spec("groups:count=4,up=50,down=10", 2000)
    assert faults.draw is faults.draw_copies is None
    assert faults.absence.leaving == "lose"
    first = [faults.absence.interval(i, 100.0) for i in range(2000)]
    kinds = sorted(set(first))
    assert len(kinds) == 4
    sizes = np.array([first.count(kind) for kind in kinds])
    assert np.abs(sizes / 2000 - 0.25).max() < 4 * math.sqrt(0.1875 / 2000)
    up = []
    for seed in range(400):
        faults = of_spec("groups:count=1,up=50,down=10", 1, seed)
        up.append(faults.absence.interval(0, 77.0)[0] <= 77)
    assert abs(np.mean(up) - 5 / 6) < 4 * math.sqrt(5 / 36 / 400)


# --- speeds that change -------------------------------------------------------------------------


def test_rounds_of_participation_sets_count_in_rounds():
    """They plan in units of their length; speeds change at the same moment."""
    seconds = []
    for length in (1, 7):
        delays, faults = table_of([2 * length], [2 * length]), f"drift:at={3 * length},share=1"
        s = make(f"participation:length={length},probability=1", delays, num_clients=2, updates=8, faults=faults)
        seconds.append(s.time / length)
    np.testing.assert_allclose(*seconds)


def test_about_the_share_of_the_clients_slows_down_and_the_others_speed_up():
    pace = of_spec("drift:at=100,share=0.3,factor=4", 2000).pace
    before, after = ([pace(client, time) for client in range(2000)] for time in (99.0, 100.0))
    assert {(rate, until) for rate, until in before} == {(1.0, 100.0), (0.25, 100.0)}
    assert {until for _, until in after} == {math.inf}
    assert all({one[0], other[0]} == {1.0, 0.25} for one, other in zip(before, after, strict=True))
    assert abs(np.mean([rate == 0.25 for rate, _ in after]) - 0.3) < 4 * math.sqrt(0.21 / 2000)
    few = of_spec("drift:at=100,share=0.3", 50).pace
    assert [pace(client, 0.0) for client in range(50)] == [few(client, 0.0) for client in range(50)]


def slowly(client, time, seconds, pace, interval, step=1 / 512):
    """When the work is done, in small steps of time."""
    while seconds > 1e-9:
        seconds -= step * pace(client, time)[0] * (interval(client, time)[0] <= time)
        time += step
    return time


def test_work_at_two_paces_and_with_pauses_is_that_of_small_steps():
    conditions = bind("periodic:on=3,off=2,phase=1,leaving=pause", "drift:at=8,share=1+drift:at=13,factor=2,share=0",
                      NO_LIMITS, 3, 0)  # fmt: skip
    outcome_of = job_outcomes(conditions)
    pace, interval = paces_together(conditions.faults), conditions.availability[0].interval
    for client, time, seconds in ((0, 0.5, 0.25), (0, 0.5, 4.0), (1, 5.0, 3.5), (2, 10.5, 2.0), (2, 20.0, 1.5)):
        begins = max(time, interval(client, time)[0])
        found = outcome_of(client, begins, seconds)
        assert found.upload == pytest.approx(slowly(client, begins, seconds, pace, interval), abs=0.02)


def test_a_crash_comes_after_its_share_of_the_work():
    outcome_of = job_outcomes(bind(None, "drift:at=10,factor=4,share=1", NO_LIMITS, 1, 0))
    found = outcome_of(0, 5.0, (10.0, 7.5, 3.0, False, False))
    # 5 s of work by 10, then 2.5 s at a quarter of the speed
    assert (found.crash, found.client_free) == (20.0, 23.0)


def test_a_steady_pace_changes_nothing():
    steady = Faults(draw=lambda clients, numbers: JobFaults(), pace=lambda client, time: (1.0, math.inf))
    same(make("buffer:size=2", faults=lambda *_: steady), make("buffer:size=2"), ("time", "client"))


@pytest.mark.parametrize("found", [(0.0, math.inf), (math.nan, math.inf), (1.0, 0.5), None])
def test_a_wrong_pace_of_ones_own_is_refused(found):
    with pytest.raises(ValueError, match=r"^faults: pace\(0, .*must be \(share, until\), a finite share > 0"):
        make("every", "constant", num_clients=1, updates=9, faults=lambda *_: Faults(pace=lambda *_: found))


def test_times_are_in_double_precision_whatever_models_of_ones_own_return():
    one, late = np.float32(1), np.float32(2**20)
    slow = {"faults": lambda *_: Faults(pace=lambda client, time: (one / 2, math.inf))}
    absent = {"availability": lambda *_: Availability(lambda client, time: (late, math.inf))}
    s = make("every", "constant:mean=0.01", num_clients=1, updates=5, **slow, **absent)
    np.testing.assert_allclose(s.time - late, 0.02 * np.arange(1, 6), atol=1e-8)
