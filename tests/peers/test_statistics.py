"""Statistics of plans without a server, by hand."""

from __future__ import annotations

import math

import numpy as np

from fedjax_async.clock import Until
from fedjax_async.peers import connecting_window, plan_peers
from fedjax_async.peers.schedule import Delivery


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
