"""Event-triggered sending in whole runs: identities, bytes and counts, and plans in which it makes no sense."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config.methods import compressors
from fedjax_async.peers.choco_sgd import choco
from fedjax_async.types import Event
from tests.refusals import refusals
from tests.worlds import OPTIONS

WORLD = {
    "dataset": "synthetic", "model": "logistic", "clients": 5, "steps": 2, "updates": 40, "lr": 0.1, "topology": "ring",
    "optimizer": "sgd",
}  # fmt: skip


def test_a_trigger_of_zero_withholds_nothing():
    plain, zero = (simulate(method=f"async_dfedavg{trigger}", **WORLD) for trigger in ("", ":trigger=0"))
    for name, column in plain.evaluations.items():
        np.testing.assert_array_equal(column, zero.evaluations[name])
    jax.tree.map(np.testing.assert_array_equal, plain.params, zero.params)
    assert not zero.updates["withheld"].any() and (zero.updates["moved"] > 0).all()
    assert zero.counters["withheld"] == 0 and "withheld" not in plain.counters


def test_withheld_messages_have_no_bytes():
    plain, run = (simulate(method=name, **WORLD) for name in ("async_dfedavg", "async_dfedavg:trigger=0.2"))
    held, size = run.updates["withheld"], run.schedule.message_bytes
    assert 0 < held.sum() < len(held)
    np.testing.assert_array_equal(held, run.updates["moved"] < np.float32(0.2))
    np.testing.assert_array_equal(run.updates["sent"], np.where(held, 0, plain.updates["sent"]))
    sent = [int(run.updates["sent"][run.updates["arrival_time"] <= t].sum()) for t in run.evaluations["time"]]
    np.testing.assert_array_equal(run.evaluations["bytes_up"], np.array(sent) * size)
    late = run.schedule.arrival[~held[run.schedule.push_event]]
    arrived = [int(np.sum(late <= t)) for t in run.evaluations["time"]]
    np.testing.assert_array_equal(run.evaluations["bytes_down"], np.array(arrived) * size)
    assert run.counters["messages"] == sent[-1]
    assert run.counters["messages"] + run.counters["withheld"] == plain.counters["messages"]
    named = ("mixed", "waiting", "in_flight", "superseded", "overflowed", "lost")
    assert sum(run.counters[name] for name in named) == run.counters["messages"]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_nothing_to_send_is_nothing_after_compression(name):
    """Of a message that is withheld, both sides take q = 0, whatever the compressor."""
    options = OPTIONS["compress"].get(name, "")
    compressor = compressors(f"{name}:{options}" if options else name)[0]
    peer = choco(lambda path: False, getattr(compressor, "make", lambda: compressor)(), trigger=1e9)

    @jax.jit
    def passed_on(params):
        row, messages, columns = peer.push(peer.init(params), params, Event(jax.random.key(0), jnp.float32(1)))
        inbox = peer.add(peer.open(row), row, jax.tree.map(lambda leaf: leaf[0], messages), jnp.float32(0.5))
        return columns["withheld"], row.copy["w"], inbox.change["w"]

    withheld, copy, change = passed_on({"w": jnp.linspace(-1, 1, 12).reshape(4, 3)})
    assert withheld
    np.testing.assert_array_equal(copy, 0)
    np.testing.assert_array_equal(change, 0)


test_receivers_that_could_not_know_the_last_message_are_refused = refusals(
    ({"method": "pushcen_full_models:trigger=0.1"}, "without masses"),
    ({"topology": "gossip:receivers=2"}, "the same receivers at every event"),
    ({"faults": "drop:probability=0.3"}, "messages that all arrive"),
    ({"faults": "corrupt:probability=0.3"}, "messages that all arrive"),
    ({"availability": "joins:share=0.5,by=3"}, "there from the start"),
    ({"method": "swift:trigger=-1"}, "trigger = -1: must be a finite number >= 0"),
    ({"method": "dpsgd", "policy": "event_triggered:norm=0.1"}, "option trigger"),
    by=lambda changed: simulate(**{"method": "async_dfedavg:trigger=0.1", **WORLD, **changed}),
)
