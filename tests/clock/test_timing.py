from time import perf_counter

import numpy as np
import pytest

from fedjax_async.clock import Limits, Outcome, Until, bind_delays, client_counts, concurrency, durations, fast_paths
from fedjax_async.clock.record import SLACK
from tests.clock.textbook import TIMING_SPECS, N, make, same, table_of
from tests.refusals import refusals

TROUBLE = {"availability": "sessions:on=6,off=2", "faults": "drop+crash:restart=2"}


@pytest.mark.parametrize(("delays", "conditions"), [("constant", {}), ("lognormal", {}), ("constant", TROUBLE)])
@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_the_last_moment_has_its_replies_whatever_the_budget_counts(timing, delays, conditions):
    long = make(timing, delays, until=Until(updates=80), **conditions)
    for budget in ({"updates": 37}, {"steps": 8}, {"updates": 40}):
        one = make(timing, delays, until=Until(**budget), **conditions)
        sent = int(np.sum(long.dispatch_time <= one.time[-1] * SLACK))
        assert len(one.client) == sent
        if not conditions and "pace" not in timing:  # all may be offline, or others have begun before
            assert sent > int(np.sum(one.dispatch_time < one.time[-1]))
        np.testing.assert_array_equal(one.client, long.client[:sent])
        np.testing.assert_array_equal(one.dispatch_time, long.dispatch_time[:sent])
        came = np.flatnonzero(long.upload_time[:sent] <= one.time[-1])
        if (one.outcome[came] != Outcome.UNDER_WAY).all():  # no simultaneous upload is left out
            same(one, make(timing, delays, until=Until(time=one.time[-1]), **conditions))
    assert len(make(timing, until=Until(time=20, updates=11, steps=10**9)).job) == 11  # the first budget that is spent


@pytest.mark.parametrize(("items", "cells"), [(1 << 17, 1 << 19), (1, 1), (7, 30), (20, 24)])
@pytest.mark.parametrize("conditions", [{}, {"availability": "always"}], ids=["quick", "general"])
def test_durations_are_those_of_the_delay_model_whatever_the_policy(conditions, items, cells, monkeypatch):
    """However many are drawn at once, for a table or for a cache; each client gets its own in turn."""
    monkeypatch.setattr(durations, "_ITEMS", items)
    monkeypatch.setattr(fast_paths, "_CELLS", cells)
    steps = np.arange(1, N + 1)
    spec = "lognormal:reference_steps=3,bandwidth=10"
    model = bind_delays(spec, N, 4)
    for timing in TIMING_SPECS:
        if timing.startswith("participation"):
            continue
        s = make(timing, spec, local_steps=steps, seed=4, bytes_down=2, bytes_up=3, **conditions)
        kept = np.isfinite(s.upload_time)
        expected = model.durations(s.client, s.number, steps[s.client], 2, 3)
        np.testing.assert_allclose((s.upload_time - s.dispatch_time)[kept], expected[kept], rtol=1e-9)
        np.testing.assert_array_equal(s.local_steps, steps[s.client])


@pytest.mark.parametrize(
    "timing", ["every", "window", "cohort", "compass", "hurry:size=2", "polling:size=2", "midway", "pace"]
)
def test_times_that_are_not_finite_are_called_so_and_short_ones_name_their_client(timing):
    def of_client_3(*seconds):
        return table_of(*([1e9, 1e9] if i != 3 else seconds for i in range(N)))

    for bad in (np.inf, np.nan, -1.0, 0.0):
        with pytest.raises(ValueError, match=r"^delays: every duration must be a finite number > 0"):
            make(timing, of_client_3(bad, bad), updates=None, time=1e10)
    with pytest.raises(ValueError, match=r"^delays: a job of client 3 is too short to advance the clock at "):
        make(timing, of_client_3(1e9, 1e-9), updates=None, time=1e10)


# --- who trains next ----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["same", "uniform", "round_robin"])
def test_concurrency_is_kept(sampling):
    s = make(f"every:concurrency=3,sampling={sampling}", num_clients=10)
    time, jobs = concurrency(s)
    assert set(jobs[time < s.time[-1]]) == {3}
    assert (set(s.client) == {0, 1, 2}) == (sampling == "same")
    same(make("every"), make(f"every:concurrency={N},sampling={sampling}"))  # nobody to choose


@pytest.mark.parametrize("delays", ["constant", "exponential"])
def test_round_robin_sends_the_client_that_was_idle_longest(delays):
    s = make("every:concurrency=3,sampling=round_robin", delays, num_clients=10)
    idle_since = {client: client - 10 for client in range(3, 10)}
    for e, job in enumerate(s.job[: len(s.client) - 3]):
        idle_since[int(s.client[job])] = e
        chosen = min(idle_since, key=lambda client: idle_since[client])
        assert s.client[3 + e] == chosen
        del idle_since[chosen]


def test_uniform_sampling_is_uniform_and_of_the_seed():
    s = make("every:concurrency=2", "constant", num_clients=10, updates=20_000)
    dispatched, _ = client_counts(s)
    assert abs(dispatched / 2000 - 1).max() < 0.12
    again = s.client[s.job[: len(s.client) - 2]] == s.client[2:]  # nine are idle, the returning client among them
    assert abs(again.mean() - 1 / 9) < 0.01
    other = make("every:concurrency=2", "constant", num_clients=10, updates=20_000, seed=1)
    assert (s.client != other.client).any()


# --- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", ["window:length=1000", "participation:probability=1"])
def test_windows_with_the_uploads_of_all_are_synchronous(timing):
    s = make(timing, "exponential", updates=5 * N)
    assert (s.staleness == 0).all() and s.closes.sum() == 5
    order = np.diff(s.upload_time[s.job[:N]])  # applied in order of arrival
    assert (order > 0).all() if "window" in timing else (order == 0).all()


# --- cohorts ------------------------------------------------------------------------------------


def test_a_round_has_the_fastest_of_its_clients_and_lasts_as_long_as_they_need():
    delays, start = "lognormal:sigma=1", 0.0
    s = make("cohort:size=3,over_selection=2", delays, until=Until(steps=10), seed=1)
    model = bind_delays(delays, N, 1)
    for k in range(10):
        jobs = np.arange(5 * k, 5 * k + 5)
        finish = start + model.durations(s.client[jobs], s.number[jobs])
        fastest = jobs[np.argsort(finish)[:3]]
        np.testing.assert_array_equal(s.job[3 * k : 3 * k + 3], fastest)
        np.testing.assert_array_equal(np.isinf(s.upload_time[jobs]), ~np.isin(jobs, fastest))
        assert len(set(s.client[jobs])) == 5 and set(s.dispatch_time[jobs]) == {start}
        start = np.sort(finish)[2]
        np.testing.assert_allclose(s.time[3 * k : 3 * k + 3], start, rtol=1e-12)
        start = s.time[3 * k]
    assert (s.staleness == 0).all()


def test_cohorts_are_drawn_uniformly_and_do_not_depend_on_the_delays():
    one = make("cohort:size=3", "constant", until=Until(steps=2500), num_clients=10)
    two = make("cohort:size=3", "rpi", until=Until(steps=200), num_clients=10)
    np.testing.assert_array_equal(one.client[: len(two.client)], two.client)
    dispatched, applied = client_counts(one)
    np.testing.assert_array_equal(dispatched - np.bincount(one.client[-3:], minlength=10), applied)  # the next round
    assert abs(dispatched / 750 - 1).max() < 0.12


# --- participation sets -------------------------------------------------------------------------


def test_an_upload_after_tau_rounds_holds_tau_times_the_steps():
    steps = np.arange(1, N + 1)
    s = make("participation:probability=0.4,length=0.1", "rpi", local_steps=steps, updates=200)
    rounds = np.rint((s.time - s.dispatch_time[s.job]) / 0.1)
    assert rounds.min() == 1
    assert rounds.max() > 3
    np.testing.assert_array_equal(s.local_steps[s.job], rounds * steps[s.client[s.job]])
    np.testing.assert_allclose(s.upload_time[s.job], s.time)
    assert (s.staleness <= rounds - 1).all()  # fewer where a round had no participants


def test_participants_follow_their_probabilities():
    s = make("participation:probability=0.3", until=Until(time=3000), num_clients=20)
    _, applied = client_counts(s)
    assert abs(applied / 3000 - 0.3).max() < 0.03
    per_round = np.bincount(s.time.astype(int), minlength=3001)[1:]
    assert abs(per_round.var() - 20 * 0.3 * 0.7) < 0.5  # independent draws: binomial
    uneven = make("participation:probability=0.3,spread=1", until=Until(time=500), num_clients=200)
    shares = client_counts(uneven)[1] / 500
    assert shares.min() < 0.02 and shares.max() > 0.58 and abs(shares.mean() - 0.3) < 0.04


test_bad_settings_are_one_line_value_errors = refusals(
    ("buffer:size=8", {}, "size = 8: must be at most the 7 clients in flight"),
    ("buffer:size=4,concurrency=3", {}, "size = 4: must be at most the 3 clients in flight"),
    ("buffer:size=0", {}, "size = 0"), ("buffer:size=2.5", {}, "size = 2.5"),
    ("every:concurrency=8", {}, "concurrency = 8"), ("every:concurrency=0", {}, "concurrency = 0"),
    ("every:sampling=random", {}, "sampling = 'random': unknown"),
    ("window:length=0", {}, "length = 0"), ("window:length=-3", {}, "length = -3"),
    ("window:length=long", {}, "length = 'long'"), ("cohort:size=0", {}, "size = 0"),
    ("cohort:size=8", {}, "size + over_selection = 8: must be at most 7"),
    ("cohort:size=6,over_selection=2", {}, "size + over_selection = 8"),
    ("cohort:size=2,over_selection=-1", {}, "over_selection = -1"),
    ("cohort:size=2,deadline=0", {}, "deadline = 0"),
    ("cohort:size=2,deadline=1e-3", {"delays": "constant"}, "deadline = 0.001"),
    ("participation:probability=0", {}, "probability = 0"), ("participation:probability=1.5", {}, "probability = 1.5"),
    ("participation:probability=0.8,spread=0.5", {}, "probability * (1 + spread)"),
    ("participation:length=0", {}, "length = 0"), ("evry", {}, "did you mean 'every'"),
    ("every:sizes=3", {}, "no option 'sizes'"), ("every", {"until": Until()}, "until"),
    ("every", {"until": Until(time=0)}, "until.time = 0"),
    ("every", {"until": Until(updates=0)}, "until.updates = 0"),
    ("every", {"until": Until(steps=1.5)}, "until.steps = 1.5"),
    ("every", {"until": Until(time=1e-9)}, "time = 1e-09: nothing arrives in time; the first upload takes"),
    ("every", {"until": Until(time=1e-9, steps=3)}, "time = 1e-09, server_steps = 3: nothing arrives in time"),
    ("window:length=99", {"delays": "constant", "until": Until(time=50)}, "s, but the server applies it only later"),
    ("every", {"until": Until(time=50), "limits": Limits(timeout=1e-3, late="drop")}, "uploads that came are dropped"),
    ("every", {"num_clients": 0}, "num_clients = 0"), ("every", {"seed": -1}, "seed = -1"),
    ("every", {"local_steps": 0}, "local_steps = 0"), ("every", {"local_steps": np.ones(3, int)}, "local_steps"),
    ("every", {"bytes_up": -1}, "bytes_up = -1"),
    ("participation:probability=1e-9", {"num_clients": 1},
     "^probability = 1e-09: must be larger: a job would train .* steps"),
    ("every", {"local_steps": 2**31}, "^local_steps = 2147483648: must be whole .* <= 2147483647"),
    ("cohort:over_selection=7", {}, "over_selection"),
    ("fresh:threshold=0", {}, "threshold = 0: must be"), ("fresh:size=0", {}, "size = 0: must be"),
    ("fresh:stop=1", {}, "stop"), ("fresh:everyone=2", {}, "everyone"),
    ("fresh:everyone=true,concurrency=2,sampling=same", {}, "other clients never train"),
    ("fresh:sampling=any", {}, "sampling = 'any': unknown"), ("fresh:concurrency=0", {}, "concurrency = 0: must be"),
    ("compass:shortest=0", {}, "shortest = 0: must be"), ("compass:shortest=1.5", {}, "shortest = 1.5: must be"),
    ("compass:slack=0.5", {}, "slack = 0.5: must be at least 1"), ("compass:momentum=2", {}, "momentum = 2: must be"),
    ("hurry:size=0", {}, "size = 0: must be"), ("hurry:size=2,bound=0", {}, "bound = 0: must be"),
    ("midway:at=0", {}, "at = 0: must be in"), ("midway:at=1", {}, "at = 1: must be in"),
    ("midway:at=true", {}, "at = True: must be in"), ("midway:size=0", {}, "size = 0: must be"),
    ("midway:size=8", {}, "size = 8: must be at most the 7 clients"),
    ("midway:sampling=any", {}, "sampling = 'any': unknown"),
    ("pace:bound=0", {}, "bound = 0: must be"), ("pace:length=0", {}, "length = 0: must be"),
    ("pace:unknown=-1", {}, "unknown = -1: must be"), ("pace:concurrency=8", {}, "concurrency = 8: must be"),
    ("pace:sampling=some", {}, "sampling = 'some': unknown"),
    ("polling:length=0,size=2", {}, "length = 0: must be"), ("polling:size=0", {}, "size = 0: must be"),
    ("polling:size=8", {}, "size = 8: must be at most 7, the number of clients"),
    *((timing, given, f"^timing = '{timing}': .* limits: its (groups expect every client to return|clients must)")
      for timing in ("compass", "hurry", "midway", "polling")
      for given in ({"availability": "sessions:on=4,off=2"}, {"faults": "drop:probability=0.1"})),
    by=lambda timing, options: make(timing, **options),
)  # fmt: skip


def test_planning_is_fast_and_its_cost_does_not_grow_with_the_population():
    def seconds(num_clients):
        start = perf_counter()
        make("every:concurrency=100", num_clients=num_clients, updates=20_000)
        return perf_counter() - start

    seconds(100)
    # 20,000 events: 0.05 s on one core; the bound is loose because a busy machine must not fail it
    assert seconds(1000) < 2
    assert seconds(100_000) < 4


def test_a_cohort_without_a_size_is_ten_clients_or_all():
    assert make("cohort", num_clients=4, updates=8).closes.tolist() == [False, False, False, True] * 2
    assert make("cohort", num_clients=30, updates=20).step.tolist() == [0] * 10 + [1] * 10
