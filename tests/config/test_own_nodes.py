"""Nodes of the user's own: registered by name, and checked against the contract; nothing is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import PeerMethod, register, registry
from fedjax_async.config import Settings, prepare
from fedjax_async.config.resolving import with_objects
from fedjax_async.peers import choco, full_models
from fedjax_async.types import Traced

WORLD = {"dataset": "synthetic", "model": "logistic", "clients": 4, "steps": 1, "batch_size": 8, "updates": 6}


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    registry.forget()
    yield
    registry.forget()


def test_a_factory_that_takes_stays_is_a_method_without_a_server():
    @register("method", "mine", exchange="mean", topology="ring", lr=0.1)
    def mine(stays, *, step: Traced = 0.5):
        """Nodes with their inbox scaled by ``step``."""
        plain = full_models(stays)

        def wake(row, inbox, event):
            return plain.wake(row, jax.tree.map(lambda leaf: step * leaf, inbox), event)

        return plain._replace(wake=wake)

    found = prepare(Settings(**WORLD, method="mine:step=0.3"))
    usual = prepare(Settings(**WORLD, method="async_dfedavg", topology="ring"))
    np.testing.assert_array_equal(found.schedule.weight, usual.schedule.weight)
    assert found.schedule.message_bytes == usual.schedule.message_bytes > 0
    assert found.components.hyper["peer.step"] == 0.3
    assert (found.settings.topology, found.settings.lr, found.settings.optimizer) == ("ring", 0.1, "sgd")


def test_a_factory_that_takes_a_compressor_gets_the_one_of_the_run():
    register("method", "mine", exchange="dpsgd", topology="ring", compress="topk:ratio=0.1")(choco)
    one, other = (prepare(Settings(**WORLD, method="mine", compress=c)) for c in (None, "topk:ratio=0.5"))
    assert one.settings.compress == "topk:ratio=0.1"
    assert other.schedule.message_bytes > 2 * one.schedule.message_bytes


@pytest.mark.parametrize(("preset", "factory", "message"), [
    ({"timing": "every"}, lambda stays: 1, "preset.timing = 'every': must be left out of a method without a serv"),
    ({"topology": "ring"}, lambda *, x=1: x, "preset.topology = 'ring': must be left out of a method with a serv"),
    ({"exchange": "mea"}, lambda stays: 1, "exchange = 'mea': unknown; did you mean 'mean'"),
    ({"topology": 3}, lambda stays: 1, "preset.topology = 3: must be a text, a name of clock.TOPOLOGIES"),
    ({"compress": "sign"}, lambda stays: 1, "preset.compress = 'sign': must be left out: it takes none"),
    ({}, lambda stays, compressor: 1, "preset.compress = None: must be a compressor such as"),
    ({}, lambda nodes: 1, r"method mine = \['nodes'\]: must be .*, or without a server def mine\(stays, \*"),
    ({}, lambda stays: 1, r"method mine = '1': must be a factory of a PeerAlgorithm"),
    ({}, lambda stays: {}["inside"], r"method = 'mine': its factory raised KeyError: 'inside'"),
    ({}, lambda *, x=1: full_models(bool), r"must be a factory of a ServerAlgorithm .*: def mine\(stays, \*, ...\)"),
])  # fmt: skip
def test_what_cannot_be_registered_or_used(preset, factory, message):
    with pytest.raises(ValueError, match=message):
        register("method", "mine", **preset)(factory)
        prepare(Settings(**WORLD, method="mine"))


def one_message(row):
    return jax.tree.map(lambda leaf: leaf[None], row)


@pytest.mark.parametrize(("field", "function", "message"), [
    ("init", lambda params: params[0], r"peer.init: must be a function init\(params\) -> row; it raised KeyError"),
    ("wake", lambda row, inbox, event: {"a": 1},
     r"peer.wake returned .*: must return a row of the structure .*peer.init"),
    ("wake", lambda row, inbox: row,
     r"peer.wake: must be a function wake\(row, inbox, event\) -> row; it raised TypeError"),
    ("add", lambda inbox, row, message, weight: weight, "peer.add returned .*: must return an inbox of the struct"),
    ("add", lambda inbox, row, message, weight: message["no"], r"peer.add: must be .* it raised KeyError: 'no'"),
    ("start", lambda row: row, "peer.start returned .*: must return a Message"),
    ("params", lambda row: jnp.zeros(3), "peer.params returned .*: must return params of the structure"),
    ("push", lambda row, upload, event: (row, upload), r"peer.push returned .*: must return \(row, messages, col"),
    ("push", lambda row, upload, event: (row, row, {}), r"peer.push's messages returned .*: .* \[F, ...\], F = 1"),
    ("push", lambda row, upload, event: (row, one_message(row), {"x": "y"}), "peer.push's columns returned"),
])  # fmt: skip
def test_what_nodes_return_is_checked_before_the_run(field, function, message):
    method = PeerMethod(lambda stays: full_models(stays)._replace(**{field: function}), exchange="mean")
    with pytest.raises(ValueError, match=message):
        prepare(with_objects(Settings(**WORLD, method=method), data=None))


def test_an_algorithm_must_be_wrapped():
    with pytest.raises(ValueError, match=r"'a PeerAlgorithm': .* wrap the algorithm: PeerMethod\("):
        prepare(with_objects(Settings(**WORLD, method=full_models(bool)), data=None))
    with pytest.raises(ValueError, match="gamma = 2: must be between 0 and 1"):
        choco(bool, None, gamma=2)
