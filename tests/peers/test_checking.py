"""Plans that an exchange of the user's own has made are checked as those of timings are."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async import Settings, named
from fedjax_async.clock import Until
from fedjax_async.config import prepare
from fedjax_async.peers import plan_peers
from fedjax_async.peers.checking import check_peer_schedule
from fedjax_async.peers.exchanges import EXCHANGES, mean

WORLD = {"dataset": "synthetic", "model": "logistic", "clients": 4, "steps": 1, "delay": "constant", "updates": 20}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_plans_of_the_package_have_no_contradictions(exchange):
    conditions = {"availability": "sessions:on=4,off=1", "faults": "drop", "network": "link:latency=0.2,jitter=1"}
    plan = plan_peers(
        exchange, "exponential", num_clients=5, local_steps=2, until=Until(time=9), topology="ring", **conditions
    )
    assert check_peer_schedule(plan) is plan


@pytest.mark.parametrize(
    ("column", "changed", "says"),
    [
        ("weight", lambda weight: 5 * weight, r"weight\[0\] = 1.66.*: must be at most 1 in sum"),
        ("weight", lambda weight: -weight, r"weight\[0\] = -0.3.*: must be a finite number >= 0"),
        ("weight", list, "weight = 'list': must be an array float64"),
        ("source", lambda source: source + 15, r"source\[0\] = .*: must be an event before the one that reads it"),
        ("source", lambda source: 0 * source, r"source\[0\] = 0: must be an event whose message has come to the node"),
        ("receiver", lambda receiver: receiver + 7, r"receiver\[0\] = 8: must be from 0 to 3"),
        ("number", np.zeros_like, r"number\[4\] = 0: must be the count of the node's events before"),
        ("local_steps", np.zeros_like, r"local_steps\[0\] = 0: must be at least 1"),
        ("end", np.zeros_like, r"end\[0\] = 0.0: must be finite, and after the start"),
        ("inbox_bounds", lambda bounds: 2 * bounds, r"inbox_bounds\[.*: must be ascending, from 0 to"),
    ],
)
def test_a_plan_with_contradictions_is_refused(column, changed, says):
    def own(setup):
        plan = mean()(setup)
        return plan._replace(**{column: changed(getattr(plan, column))})

    settings = Settings(**WORLD, method="async_dfedavg", topology="ring", exchange=named("own", own))
    with pytest.raises(ValueError, match=f"^exchange: must lead to a plan without contradictions: schedule.{says}"):
        prepare(settings)


def test_an_exchange_that_returns_no_plan_is_refused():
    with pytest.raises(ValueError, match=r"^exchange = None: must be an exchange, exchange\(setup\) -> peers.PeerS"):
        plan_peers(lambda setup: None, "constant", num_clients=3, local_steps=1, until=Until(updates=3))
