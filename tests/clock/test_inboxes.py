"""Buffers by hand: where masses go under ``carry``; what a slow uplink never sends."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.clock import Delivery, Until, plan_peers
from fedjax_async.clock.inboxes import fill_inboxes
from fedjax_async.clock.peer_pushes import Events, Pushes

M, S = Delivery.MIXED, Delivery.SUPERSEDED


def inbox(senders, capacity):
    """One node mixes at the end what these senders sent it, one message after another; ``Inboxes``."""
    count = len(senders)
    client = np.array([*senders, 0])
    when = np.append(np.arange(count, dtype=float), count)
    events = Events(client, np.zeros(count + 1, int), np.zeros(count + 1, int), when, when + 0.5, when)
    sent = np.arange(count)
    pushes = Pushes(sent, np.zeros(count, np.int32), np.zeros(count, np.int32), sent + 0.5, np.zeros(count, bool), sent)
    return fill_inboxes(4, events, pushes, count + 1.0, capacity=capacity, policy="carry")


@pytest.mark.parametrize(
    ("senders", "capacity", "outcomes", "into"),
    [
        # the first two of node 1 go to its newest
        ([1, 1, 2, 1], 2, [S, S, M, M], [3, 3, 2, 3]),
        # node 2's message sets the second of node 1 aside: it keeps the mass of the first, and is not superseded
        ([1, 1, 2, 1], 1, [S, M, M, M], [1, 1, 2, 3]),
        # the third of node 1 comes after its second was set aside, and its mass moves to the fourth
        ([1, 1, 2, 1, 1], 1, [S, M, M, S, M], [1, 1, 2, 4, 4]),
        # without room for two, whatever comes sets the other aside
        ([1, 2, 3, 1], 2, [M, M, M, M], [0, 1, 2, 3]),
    ],
)
def test_mass_is_carried_to_the_next_message_that_stays(senders, capacity, outcomes, into):
    boxes = inbox(senders, capacity)
    assert boxes.outcome.tolist() == outcomes
    assert boxes.push.tolist() == [push for push, outcome in enumerate(outcomes) if outcome == M]
    carried = dict(zip(boxes.contribution.tolist(), boxes.push[boxes.entry].tolist()))
    assert carried == dict(enumerate(into)), "every message's mass arrives, each with one entry"


def test_what_a_slow_uplink_never_begins_is_no_push():
    def plan(rate):
        link = f"link:up={rate},shared=true"
        options = {"num_clients": 4, "local_steps": 1, "until": Until(updates=40), "topology": "gossip:receivers=2"}
        return plan_peers("divshare:omega=0.5", "constant:mean=1", message_bytes=8, network=link, **options)

    fast, slow = plan(1e6), plan(16.0)  # two messages a second, where an event has four
    assert np.bincount(fast.push_event).tolist() == [4] * 40
    sent = np.bincount(slow.push_event)
    assert (sent[:-4] == 2).all() and (sent[-4:] == 4).all(), "the last of a node have no next event that ends them"
    assert np.isfinite(slow.arrival).all() and (slow.outcome != Delivery.LOST).all()
