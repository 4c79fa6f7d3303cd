"""Statistics of plans without a server, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedjax_async.clock import Until
from fedjax_async.peers import connecting_window, plan_peers
from fedjax_async.peers.schedule import Delivery
from fedjax_async.peers.statistics import mass_after_mixing


def planned(faults):
    return plan_peers(
        "mean", "constant:mean=10", num_clients=3, local_steps=1, until=Until(updates=36), topology="ring",
        faults=faults, seed=1,
    )  # fmt: skip


def test_corrupt_messages_do_not_connect_nodes():
    assert connecting_window(planned(None)) == 10  # all nodes push to both neighbours every 10 s
    assert connecting_window(planned("corrupt:probability=1")) == math.inf
    often = planned("corrupt:probability=0.7")
    lost = often._replace(outcome=np.where(often.corrupt, Delivery.LOST, often.outcome))
    assert 10 < connecting_window(often) == connecting_window(lost) < math.inf


@pytest.mark.parametrize("reference", ["paper", "baseline"])
def test_the_mass_after_mixing_counts_the_parts_of_receivers_that_are_offline(reference):
    """SGP divides its steps by this mass. The authors' code divides it by all four neighbours and the node."""
    given = {"topology": "complete", "availability": "sessions:on=2,off=1", "seed": 1}
    s = plan_peers(
        f"push_sum:reference={reference}",
        "exponential:mean=1",
        num_clients=5,
        local_steps=1,
        until=Until(updates=30),
        **given,
    )
    receivers = np.bincount(s.push_event, minlength=30)
    parts = 5 if reference == "baseline" else receivers + 1
    np.testing.assert_allclose(mass_after_mixing(s), s.mass * parts, rtol=1e-12)
    assert receivers.min() < 4
