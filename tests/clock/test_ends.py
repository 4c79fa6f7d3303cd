"""A plan that ends before its budget, as no client or node can train any more, says so; a cut one is a shorter plan."""

import numpy as np
import pytest

from fedjax_async.clock import (
    Limits,
    NothingArrives,
    Outcome,
    Until,
    at_or_before,
    check_schedule,
    cut,
    fault_counts,
    load_schedule,
    plan,
    save_schedule,
)
from fedjax_async.peers import EXCHANGES, load_peer_schedule, plan_peers, save_peer_schedule
from tests.clock.textbook import TIMING_SPECS, same

N = 6
BUDGETS = [Until(updates=500), Until(steps=400), Until(time=900.0)]
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


@pytest.mark.parametrize("until", BUDGETS)
@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_a_plan_without_clients_left_is_exhausted(timing, until, trace):
    for options in GONE + (CRASHED if until.time else []):  # without an end, a crashed client comes back
        s = planned(timing, until, options, trace)
        assert s.exhausted, options
        assert len(s.job) < 500 and s.closes.sum() < 400 and not np.any(s.dispatch_time > 600)
        assert not cut(s, len(s.job) - 1, s.time[-2]).exhausted  # it was stopped before


@pytest.mark.parametrize("until", [Until(updates=60), Until(steps=20), Until(time=200.0)])
@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_a_plan_that_spends_its_budget_is_not(timing, until):
    assert not any(planned(timing, until, options).exhausted for options in STAY)


def test_the_last_client_may_spend_the_budget_before_it_leaves():
    gone = planned("every", Until(updates=500), GONE[0])
    for until in (Until(updates=len(gone.job)), Until(steps=len(gone.job)), Until(time=float(gone.time[-1]) - 1e-3)):
        assert not planned("every", until, GONE[0]).exhausted


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_plan_without_nodes_left_is_exhausted(exchange, trace):
    def peers(until, options):
        network = {"network": "link:up=1e3", "message_bytes": 100}
        return plan_peers(exchange, "lognormal:mean=10", topology="ring", **network, **world(until, options, trace))

    for until in (BUDGETS[0], BUDGETS[2]):
        for options in GONE + (CRASHED if until.time else []):
            assert peers(until, options).exhausted, options
    for until in (Until(updates=60), Until(time=200.0)):
        assert not any(peers(until, options).exhausted for options in STAY)


def test_files_keep_it_and_older_ones_have_no_such_column(tmp_path):
    until, one = Until(updates=500), tmp_path / "plan.npz"
    for plan_it, save, load in (
        (lambda o: planned("every", until, o), save_schedule, load_schedule),
        (lambda o: plan_peers("mean", "constant:mean=9", **world(until, o)), save_peer_schedule, load_peer_schedule),
    ):
        for options, expected in ((GONE[0], True), (STAY[0], False)):
            save(one, plan_it(options))
            assert load(one).exhausted is expected
        with np.load(one) as archive:
            columns = {name: archive[name] for name in archive.files if name not in ("exhausted", "unsent_mass")}
        np.savez(one, **columns)
        assert load(one).exhausted is False


def test_nobody_online_for_long_enough_is_the_reason_that_nothing_arrives():
    with pytest.raises(NothingArrives, match="nothing is ever uploaded: no client is online for long enough"):
        planned("every", Until(updates=5), {"availability": "leaves:share=1,at=0.5"})


# --- cut schedules ------------------------------------------------------------------------------

TROUBLE = {
    "faults": "drop:probability=0.2+duplicate:probability=0.2",
    "limits": Limits(max_staleness=4, timeout=2.5, late="drop"),
}
KNOWN = ("client", "number", "local_steps", "dispatch_time", "dispatched_after", "version", "corrupt", "outcome")
ARRIVALS = ("job", "time", "closes", "step")


def of_length(timing, until, **conditions):
    return plan(timing, "exponential:mean=1", num_clients=N, local_steps=1, until=until, **conditions)


@pytest.mark.parametrize("conditions", [{}, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("timing", ["every", "buffer:size=3", "cohort:size=3", "window:length=1.5"])
def test_a_cut_schedule_is_the_plan_of_that_length(timing, conditions):
    long = of_length(timing, Until(time=40.0), **conditions)
    for moment in (0.0, 4.5, 12.0, 25.5, 40.0):
        arrivals = int(at_or_before(long.time, moment))
        have = check_schedule(cut(long, arrivals, moment))
        if arrivals == 0:
            assert len(have.job) == 0 and not np.isin(have.outcome, (Outcome.APPLIED, Outcome.LATE)).any()
            continue
        want = of_length(timing, Until(time=moment), **conditions)
        same(have, want, KNOWN + ARRIVALS)
        counts, wanted = fault_counts(have), fault_counts(want)
        assert {n: c for n, c in counts.items() if n != "duplicates"} == {
            n: c for n, c in wanted.items() if n != "duplicates"
        }
        assert counts["duplicates"] >= wanted["duplicates"]  # copies that come later count with their uploads


def test_the_whole_schedule_stays_as_it_is():
    whole = of_length("buffer:size=3", Until(time=20.0), **TROUBLE)
    same(cut(whole, len(whole.job), 20.0), whole)
