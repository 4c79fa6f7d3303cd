import math

import numpy as np
import pytest

from fedjax_async.clock import FAULTS, JobFaults, Until, chance, faults, job_faults, plan
from fedjax_async.clock.faults import combined, crashes
from fedjax_async.clock.scenario import models_of
from tests.refusals import refusals

CLIENTS, NUMBERS = 300, 40


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


def test_moments_and_delays_have_their_laws():
    moments = drawn("crash:probability=1").crash_share
    assert np.abs(np.quantile(moments, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.02
    (delays,) = drawn("duplicate:probability=1,delay=7").copies
    assert abs(delays.mean() - 7) < 4 * 7 / math.sqrt(len(delays))
    assert abs(delays.std() - 7) < 0.5


def test_delays_are_the_exponential_draws_of_the_clock():
    clients, numbers = np.mgrid[:CLIENTS, :NUMBERS].reshape(2, -1)
    draws = chance.Draws(0, "duplicate", 0, clients, numbers)
    copied = draws.random() < 0.5
    (delays,) = drawn("duplicate:probability=0.5,delay=1").copies
    np.testing.assert_array_equal(delays[copied], draws.standard_exponential(copied))
    draws = chance.Draws(0, "crash", 0, clients, numbers)
    draws.random()
    np.testing.assert_array_equal(drawn("crash:rate=1").crash_after, draws.standard_exponential())


def test_faults_take_no_logarithm_one_at_a_time(monkeypatch):
    """All logarithms are those of NumPy's arrays: ``math.log1p`` may differ in the last bit, see ``chance``."""
    monkeypatch.setattr(faults.math, "log1p", None)
    drawn("duplicate:probability=0.5+crash:rate=1")


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
    assert combined(one, other) == combined(one, other)
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
    alone, both = (
        plan("every", "constant:mean=10", num_clients=1, local_steps=1, until=Until(time=5000), faults=spec)
        for spec in (one, f"{one}+{years}")
    )
    np.testing.assert_array_equal(both.dispatch_time, alone.dispatch_time)
    assert len(alone.client) > 400


test_times_that_faults_make_infinite_are_refused = refusals(
    ("late:probability=0.5,factor=1e308", "^faults: must leave the duration of every job a finite number"),
    ("late:extra=1e308+late:extra=1e308", "^faults: must leave the duration of every job a finite number"),
    ("drift:factor=1e308+drift:factor=1e308", "^delays: the jobs of client . are too long"),
    ("drift:factor=1e308,share=1", "^delays: the jobs of client . are too long"),
    by=lambda faults: plan(
        "every", "constant:mean=10", num_clients=3, local_steps=1, until=Until(time=5000), faults=faults
    ),
)  # fmt: skip


def groups(spec, num_clients, seed=0):
    ((model, part),) = models_of("faults", FAULTS, spec)
    return model(num_clients, seed, part)


def test_groups_fail_together():
    faults = groups("groups:count=4,up=50,down=10", 2000)
    assert faults.draw is faults.draw_copies is None
    assert faults.absence.leaving == "lose"
    first = [faults.absence.interval(i, 100.0) for i in range(2000)]
    kinds = sorted(set(first))
    assert len(kinds) == 4
    sizes = np.array([first.count(kind) for kind in kinds])
    assert np.abs(sizes / 2000 - 0.25).max() < 4 * math.sqrt(0.1875 / 2000)
    up = []
    for seed in range(400):
        faults = groups("groups:count=1,up=50,down=10", 1, seed)
        up.append(faults.absence.interval(0, 77.0)[0] <= 77)
    assert abs(np.mean(up) - 5 / 6) < 4 * math.sqrt(5 / 36 / 400)
