import numpy as np
import pytest

from fedjax_async.clock import Until, client_counts, concurrency, delay_statistics, plan, staleness_histogram

TIMINGS = [
    "every", "every:concurrency=3", "buffer:size=4", "buffer:size=3,concurrency=5,sampling=round_robin",
    "window:length=0.7", "cohort:size=3,over_selection=1", "participation:probability=0.3,spread=0.5",
]  # fmt: skip


def delay_table(schedule):
    """tau[t, i] and held[t, i], by walking through the schedule with one entry per client."""
    held = np.zeros(schedule.num_clients, int)
    rows, job, opens = [], 0, True
    for e in range(len(schedule.job)):
        if opens:
            while job < len(schedule.client) and schedule.dispatched_after[job] <= e:
                held[schedule.client[job]] = schedule.version[job]
                job += 1
            rows.append(held.copy())
        opens = schedule.closes[e]
    held = np.array(rows[: schedule.closes.sum()])
    return np.arange(len(held))[:, None] - held, held


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("delays", ["constant", "lognormal:heterogeneity=1"])
@pytest.mark.parametrize("timing", TIMINGS)
def test_delay_statistics_equal_their_definition(timing, delays, seed):
    s = plan(timing, delays, num_clients=8, local_steps=1, until=Until(updates=122), seed=seed)
    tau, held = delay_table(s)
    got = delay_statistics(s)
    assert got.server_steps == len(tau) == s.closes.sum()
    assert got.tau_max == tau.max()
    np.testing.assert_allclose(got.tau_avg0, tau.mean())
    np.testing.assert_allclose(got.tau_avgm0, tau.max(axis=1).mean())
    np.testing.assert_allclose(got.tau_avg1, tau.mean(axis=1)[held].mean())
    np.testing.assert_allclose(got.tau_avgm1, tau.max(axis=1)[held].mean())
    if "buffer" not in timing:  # a participant's delay is its staleness
        closed = s.step < len(tau)
        np.testing.assert_array_equal(tau[s.step[closed], s.client[s.job][closed]], s.staleness[closed])
    shifted = delay_statistics(s, fresh=1)
    np.testing.assert_allclose(np.array(shifted[1:]) - got[1:], 1)


def test_no_closed_step_no_statistics():
    s = plan("buffer:size=5", "constant", num_clients=5, local_steps=1, until=Until(updates=3))
    with pytest.raises(ValueError, match="no server step"):
        delay_statistics(s)


@pytest.mark.parametrize("timing", TIMINGS)
def test_concurrency_counts_jobs_under_way(timing):
    s = plan(timing, "exponential", num_clients=8, local_steps=1, until=Until(updates=60))
    time, count = concurrency(s)
    assert (np.diff(time) > 0).all()
    assert count.min() >= 0
    first = {"every:concurrency=3": 3, "cohort:size=3,over_selection=1": 4}
    assert count[0] == first.get(timing, 5 if "concurrency=5" in timing else 8)
    last = s.time[-1]
    end = s.upload_time.copy()
    for j in np.flatnonzero(np.isinf(end)):  # called off when its round ended
        end[j] = s.time[s.time > s.dispatch_time[j]].min()
    for t in np.linspace(0, last * 0.999, 50):
        at = count[np.searchsorted(time, t, side="right") - 1]
        assert at == ((s.dispatch_time <= t) & (t < end)).sum()


def test_counts_and_histogram_add_up():
    s = plan("every:concurrency=4", "rpi", num_clients=8, local_steps=1, until=Until(updates=77))
    dispatched, applied = client_counts(s)
    assert len(dispatched) == len(applied) == 8
    assert applied.sum() == 77
    assert dispatched.sum() == 77 + 4  # the first jobs, and one for each arrival
    assert (dispatched >= applied).all()
    histogram = staleness_histogram(s)
    assert histogram.sum() == 77
    assert (histogram * np.arange(len(histogram))).sum() == s.staleness.sum()
