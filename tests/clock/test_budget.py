"""How long a schedule will be: it is refused after the first jobs if it cannot fit, else progress is reported."""

from __future__ import annotations

import pytest

from fedjax_async.clock import Limits, Until, budget, plan
from fedjax_async.peers import exchange_parts, plan_peers
from tests.clock.textbook import same

TIMINGS = ["every", "every:concurrency=9", "buffer:size=3", "window:length=30", "cohort:size=5", "participation"]
LIMITS = [Limits(), Limits(max_staleness=30), Limits(timeout=1e6)]


def planned(timing="every", limits=LIMITS[0], clients=60, delay="lognormal:mean=60,sigma=0.5", **options):
    until = Until(**{name: options.pop(name) for name in ("time", "updates", "steps") if name in options})
    return plan(timing, delay, num_clients=clients, local_steps=2, until=until, limits=limits, **options)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    "until", [{"time": 1e300}, {"updates": 10**13}, {"steps": 10**13}, {"time": 1e9, "steps": 10**15}]
)
def test_budgets_that_fill_the_memory_are_refused(timing, limits, until, monkeypatch):
    monkeypatch.setattr(budget, "host_memory", lambda: 2**28)  # a million jobs
    monkeypatch.setattr(budget, "EVERY", 64)
    monkeypatch.setattr("fedjax_async.clock.record.EVERY", 64)
    monkeypatch.setattr("fedjax_async.clock.fast_paths.EVERY", 64)
    name = {"steps": "server_steps"}.get(next(iter(until)), next(iter(until)))
    with pytest.raises(ValueError, match=f"^{name} = 1e.*: must end within 1e\\+06 jobs.*and not (about|endless)"):
        planned(timing, limits, **until)


@pytest.mark.parametrize("delay", ["constant", "lognormal:mean=60,sigma=0.5", "pareto", "exponential:heterogeneity=1"])
@pytest.mark.parametrize("timing", ["every", "every:concurrency=300", "window:length=30"])
@pytest.mark.parametrize("limits", LIMITS[::2], ids=str)
def test_many_first_jobs_are_no_sign_of_many_more(timing, delay, limits, monkeypatch):
    """The memory holds just what is planned, although most jobs are sent at time 0 and the first uploads come late."""
    monkeypatch.setattr("fedjax_async.clock.record.EVERY", 16)
    monkeypatch.setattr("fedjax_async.clock.fast_paths.EVERY", 16)
    monkeypatch.setattr(budget, "host_memory", lambda: 5000 * budget.BYTES_PER_JOB)
    for clients in (1500, 1503, 1517):
        assert len(planned(timing, limits, clients, delay, updates=1600).job) == 1600


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("unit", ["time", "updates"])
def test_progress_is_a_share_that_grows_and_changes_nothing(timing, limits, unit, monkeypatch):
    monkeypatch.setattr("fedjax_async.clock.record.EVERY", 64)
    monkeypatch.setattr("fedjax_async.clock.fast_paths.EVERY", 64)
    monkeypatch.setattr("fedjax_async.clock.fast_paths._CHUNK", 2**9)
    until = {unit: 3000 if unit == "updates" else 300.0 if timing == "participation" else 3000.0}
    shares: list[float] = []
    told = planned(timing, limits, **until, progress=shares.append)
    plain = planned(timing, limits, **until)
    same(told, plain)
    assert shares and shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1


def test_more_messages_than_memory_are_refused_by_the_budgets_name(monkeypatch):
    monkeypatch.setattr(exchange_parts, "host_memory", lambda: 10 * exchange_parts._BYTES_PER_PUSH)
    world = {"num_clients": 4, "local_steps": 1, "topology": "ring", "message_bytes": 4}
    with pytest.raises(
        ValueError, match=r"^updates = 30: must end within 10 messages, .* and not (30|60); shorten the"
    ):
        plan_peers("push_sum", "constant", until=Until(updates=30), **world)
    with pytest.raises(ValueError, match=r"^time = 1e-09: no compute event ends in time"):
        plan_peers("push_sum", "constant", until=Until(time=1e-9), **world)
