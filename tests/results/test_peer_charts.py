"""Charts of runs without a server show every event, and every message with its outcome."""

from __future__ import annotations

import re

import numpy as np

from fedjax_async.clock import Delivery, Until, plan_peers
from fedjax_async.results import peer_gantt
from fedjax_async.results.html_gantt import peer_gantt as html_chart
from fedjax_async.types import Run
from tests.results.page import array

PLAN = plan_peers(
    "push_sum:policy=discard,capacity=2",
    "lognormal:mean=1,heterogeneity=1",
    num_clients=6,
    local_steps=1,
    until=Until(time=8),
    faults="drop:probability=0.1",
)
NAMES = {
    Delivery.MIXED: "message mixed",
    Delivery.SUPERSEDED: "message superseded by a newer one",
    Delivery.OVERFLOWED: "message dropped from a full buffer",
    Delivery.LOST: "message lost",
    Delivery.WAITING: "message not mixed by the end",
}


def run_of(plan):
    count = len(plan.client)
    updates = {"staleness": np.arange(count) / 2, "accepted": np.arange(count) != 3}
    return Run({}, {}, {"time": np.array([0.0, 8.0])}, updates, {}, {}, plan, {})


def test_a_superseded_message_is_not_called_dropped():
    counts = np.bincount(PLAN.outcome, minlength=6)
    assert (counts[list(NAMES)] > 0).all(), "the plan must have all kinds"
    legend = {text.get_text() for text in peer_gantt(PLAN, until=8).legends[0].get_texts()}
    assert legend == set(NAMES.values())


def test_the_page_has_every_event_and_message():
    shown = html_chart(run_of(PLAN), 10_000)
    traces = {each["name"]: each for each in shown.figure["data"]}
    assert shown.note == "" and set(traces) == {"trained", "rejected", "inbox mixed", *NAMES.values()}
    bars = {name: array(traces[name]["base"]) for name in ("trained", "rejected")}
    np.testing.assert_array_equal(bars["rejected"], PLAN.start[[3]])
    np.testing.assert_array_equal(np.sort(bars["trained"]), np.sort(np.delete(PLAN.start, 3)))
    for kind, name in NAMES.items():
        x, y = (array(traces[name][axis]).reshape(-1, 3) for axis in "xy")
        mine = np.flatnonzero(PLAN.outcome == kind)
        np.testing.assert_array_equal(x[:, 0], PLAN.end[PLAN.push_event[mine]])
        np.testing.assert_array_equal(y[:, :2], np.stack([PLAN.client[PLAN.push_event[mine]], PLAN.receiver[mine]], 1))
        assert np.isnan(x[:, 2]).all()


def test_a_long_plan_is_cut_and_the_note_says_so():
    shown = html_chart(run_of(PLAN), 110)
    bars = sum(len(array(each["base"])) for each in shown.figure["data"] if each["type"] == "bar")
    assert 0 < bars <= 110 / (1 + len(PLAN.receiver) / len(PLAN.client))
    assert re.fullmatch(
        rf"Shows {bars} of {len(PLAN.client)} events: events begun in the first [\d.]+ of 8 s\.", shown.note
    )
