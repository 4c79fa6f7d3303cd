"""How plans end: before their budget, if no client or node can train any more; cut short; not at all, if too long."""

import numpy as np
import pytest

from fedjax_async.clock import Limits, Outcome, Until, at_or_before, budget, check_schedule, cut, fault_counts, plan
from fedjax_async.clock.planning import NothingArrives
from fedjax_async.peers import EXCHANGES, exchange_parts, plan_peers
from tests.clock.textbook import TIMING_SPECS, same

N = 6
BUDGETS = [  # one that is not spent once all have left, and one that is spent
    (Until(updates=500), Until(updates=60)),
    (Until(steps=400), Until(steps=20)),
    (Until(time=900.0), Until(time=200.0)),
]
GONE = [
    {"availability": "leaves:share=1,by=50"}, {"availability": "leaves:share=1,by=50,leaving=finish"},
    {"availability": "leaves:share=1,by=50,leaving=pause"},
    {"availability": "leaves:share=0.5,at=30+leaves:share=1,by=90", "faults": "drop"},
    {"availability": "TRACE"},  # a recording that ends
]  # fmt: skip
CRASHED = [{"faults": "crash:probability=0.3,restart=1e6"}, {"faults": "crash:rate=0.02,restart=1e6+late:extra=5"}]
STAY = [
    {}, {"availability": "leaves:share=0.3,by=50"}, {"availability": "periodic:on=30,off=20"},
    {"availability": "joins:share=1,by=40", "faults": "crash:restart=5"},
    {"availability": "sessions:on=30,off=30,leaving=lose", "faults": "drop+groups:count=2,up=50,down=9"},
]  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "online.csv"
    file.write_text("client,start,end\n" + "".join(f"{i},{5 * i},{60 + i}\n" for i in range(N)))
    return file


def world(until, options, trace=None):
    options = {name: value.replace("TRACE", f"csv:path={trace}") for name, value in options.items()}
    return {"num_clients": N, "local_steps": 1, "until": until, "seed": 2, **options}


def planned(timing, until, options, trace=None):
    for short, long in (("=0.7", "=7"), ("=0.3", "=3"), ("deadline=2", "deadline=40")):
        timing = timing.replace(short, long)
    return plan(timing, "lognormal:mean=10", **world(until, options, trace))


@pytest.mark.parametrize(("gone", "spent"), BUDGETS)
@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_a_plan_is_exhausted_without_clients_left_and_not_if_it_spends_its_budget(timing, gone, spent, trace):
    for options in GONE + (CRASHED if gone.time else []):  # without an end, a crashed client comes back
        s = planned(timing, gone, options, trace)
        assert s.exhausted, options
        assert len(s.job) < 500 and s.closes.sum() < 400 and not np.any(s.dispatch_time > 600)
        assert not cut(s, len(s.job) - 1, s.time[-2]).exhausted  # it was stopped before
    assert not any(planned(timing, spent, options).exhausted for options in STAY)


def test_the_last_client_may_spend_the_budget_before_it_leaves():
    gone = planned("every", Until(updates=500), GONE[0])
    for until in (Until(updates=len(gone.job)), Until(steps=len(gone.job)), Until(time=float(gone.time[-1]) - 1e-3)):
        assert not planned("every", until, GONE[0]).exhausted


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_plan_without_nodes_left_is_exhausted(exchange, trace):
    def peers(until, options):
        network = {"network": "link:up=1e3", "message_bytes": 100}
        return plan_peers(exchange, "lognormal:mean=10", topology="ring", **network, **world(until, options, trace))

    for gone, spent in (BUDGETS[0], BUDGETS[2]):
        for options in GONE + (CRASHED if gone.time else []):
            assert peers(gone, options).exhausted, options
        assert not any(peers(spent, options).exhausted for options in STAY)


def test_nobody_online_for_long_enough_is_the_reason_that_nothing_arrives():
    with pytest.raises(NothingArrives, match="nothing is ever uploaded: no client is online for long enough"):
        planned("every", Until(updates=5), {"availability": "leaves:share=1,at=0.5"})


# --- cut schedules ------------------------------------------------------------------------------

TROUBLE = {"faults": "drop:probability=0.2+duplicate:probability=0.2", "limits": Limits(4, 2.5, "drop")}
KNOWN = ("client", "number", "local_steps", "dispatch_time", "dispatched_after", "version", "corrupt", "outcome")
ARRIVALS = ("job", "time", "closes", "step")


def of_length(timing, until, **conditions):
    return plan(timing, "exponential:mean=1", num_clients=N, local_steps=1, until=until, **conditions)


@pytest.mark.parametrize("conditions", [{}, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("timing", ["every", "buffer:size=3", "cohort:size=3", "window:length=1.5"])
def test_a_cut_schedule_is_the_plan_of_that_length(timing, conditions):
    long = of_length(timing, Until(time=40.0), **conditions)
    same(cut(long, len(long.job), 40.0), long)
    for moment in (0.0, 4.5, 12.0, 25.5):
        arrivals = int(at_or_before(long.time, moment))
        have = check_schedule(cut(long, arrivals, moment))
        if arrivals == 0:
            assert len(have.job) == 0 and not np.isin(have.outcome, (Outcome.APPLIED, Outcome.LATE)).any()
            continue
        want = of_length(timing, Until(time=moment), **conditions)
        same(have, want, KNOWN + ARRIVALS)
        more = fault_counts(have)["duplicates"] - fault_counts(want)["duplicates"]
        assert more >= 0  # copies that come later count with their uploads
        assert fault_counts(have) == fault_counts(want) | {"duplicates": fault_counts(want)["duplicates"] + more}


# --- how long a schedule will be: refused if it cannot fit, else its progress is told ---------------

BOUNDED = ["every", "every:concurrency=9", "buffer:size=3", "window:length=30", "cohort:size=5", "participation"]
LIMITS = [Limits(), Limits(max_staleness=30), Limits(timeout=1e6)]


def bounded(timing="every", limits=LIMITS[0], clients=60, delay="lognormal:mean=60,sigma=0.5", **options):
    until = Until(**{name: options.pop(name) for name in ("time", "updates", "steps") if name in options})
    return plan(timing, delay, num_clients=clients, local_steps=2, until=until, limits=limits, **options)


def look_every(jobs, monkeypatch):
    for module in ("budget", "record", "fast_paths"):
        monkeypatch.setattr(f"fedjax_async.clock.{module}.EVERY", jobs)


@pytest.mark.parametrize("timing", BOUNDED)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    "until", [{"time": 1e300}, {"updates": 10**13}, {"steps": 10**13}, {"time": 1e9, "steps": 10**15}]
)
def test_budgets_that_fill_the_memory_are_refused(timing, limits, until, monkeypatch):
    monkeypatch.setattr(budget, "host_memory", lambda: 2**28)  # a million jobs
    look_every(64, monkeypatch)
    name = {"steps": "server_steps"}.get(next(iter(until)), next(iter(until)))
    with pytest.raises(ValueError, match=f"^{name} = 1e.*: must end within 1e\\+06 jobs.*and not (about|endless)"):
        bounded(timing, limits, **until)


@pytest.mark.parametrize("delay", ["constant", "lognormal:mean=60,sigma=0.5", "pareto", "exponential:heterogeneity=1"])
@pytest.mark.parametrize("timing", ["every", "every:concurrency=300", "window:length=30"])
@pytest.mark.parametrize("limits", LIMITS[::2], ids=str)
def test_many_first_jobs_are_no_sign_of_many_more(timing, delay, limits, monkeypatch):
    """The memory holds just what is planned, although most jobs are sent at time 0 and the first uploads come late."""
    look_every(16, monkeypatch)
    monkeypatch.setattr(budget, "host_memory", lambda: 5000 * budget.BYTES_PER_JOB)
    for clients in (1500, 1517):
        assert len(bounded(timing, limits, clients, delay, updates=1600).job) == 1600


@pytest.mark.parametrize("timing", BOUNDED)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("unit", ["time", "updates"])
def test_progress_is_a_share_that_grows_and_changes_nothing(timing, limits, unit, monkeypatch):
    look_every(64, monkeypatch)
    monkeypatch.setattr("fedjax_async.clock.fast_paths._CHUNK", 2**9)
    until = {unit: 3000 if unit == "updates" else 300.0 if timing == "participation" else 3000.0}
    shares: list[float] = []
    told = bounded(timing, limits, **until, progress=shares.append)
    plain = bounded(timing, limits, **until)
    same(told, plain)
    assert shares and shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1


def test_more_messages_than_memory_are_refused_by_the_budgets_name(monkeypatch):
    monkeypatch.setattr(exchange_parts, "host_memory", lambda: 10 * exchange_parts._BYTES_PER_PUSH)
    world = {"num_clients": 4, "local_steps": 1, "topology": "ring", "message_bytes": 4}
    fits = r"^updates = 30: must end within 10 messages, .* and not (30|60); shorten the"
    with pytest.raises(ValueError, match=fits):
        plan_peers("push_sum", "constant", until=Until(updates=30), **world)
    with pytest.raises(ValueError, match=r"^time = 1e-09: no compute event ends in time"):
        plan_peers("push_sum", "constant", until=Until(time=1e-9), **world)
