"""Runs without a server from settings: folders, checkpoints, sweeps, nodes of one's own, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Method, Spec, Stop, named, register, simulate
from fedjax_async.config import Settings, execute, execute_group, plan_groups, prepare, sweeping
from fedjax_async.config.resolving import settings_in_comparison, with_objects
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.peers import Delivery, PeerSchedule, choco, full_models
from fedjax_async.results import sweep
from fedjax_async.types import Traced
from tests.refusals import refusals
from tests.results.folders import Killed

WORLD = {"dataset": "synthetic", "model": "logistic", "clients": 4, "steps": 2, "batch_size": 8, "updates": 10}
RING = WORLD | {"topology": "ring"}
ONLY_OWN = {"global_tests": "never"}  # fewer programs


test_what_does_not_fit_is_refused = refusals(
    ({"topology": "moebius"}, "topology = 'moebius': unknown"),
    ({"timing": "every"}, "timing = 'every': must be left out: pushcen runs without a server"),
    ({"method": "fedavg"}, "topology = 'ring': must be left out: fedavg runs with a server"),
    ({"method": "pushcen@nothing"}, "exchange = 'nothing': unknown"),
    ({"method": "pushcen:k=0"}, "k = 0: must be"),
    ({"method": "pushcen:max_iter=0"}, "max_iter = 0: must be a whole number >= 1"),
    ({"method": "choco:gamma=2"}, "gamma = 2: must be between 0 and 1"),
    ({"topology": "gossip:receivers=4"}, "receivers = 4: must be at most the 3 others"),
    *((change, "topology = 'ring': must be left out: the nodes of .* send nothing")
      for change in ({"method": "independent"}, {"method": "swift", "exchange": "alone"}, {"method": "swift@alone"})),
    by=lambda change: prepare(Settings(**RING | {"method": "pushcen"} | change)),
)  # fmt: skip


def test_private_leaves_stay_with_their_node_and_are_trained_there():
    whole = prepare(Settings(method="swift", **RING)).components.model
    private = named("private_bias", whole._replace(private=lambda path: path[-1] == "bias"))
    run = simulate(method="pushcen:k=4", engine="reference", **RING | {"model": private})
    assert run.counters["messages"] > 0
    np.testing.assert_allclose(run.evaluations["total_mass"] + run.evaluations["lost_mass"], 4, rtol=1e-12)
    bias = next(np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(run.params) if "bias" in str(path[-1]))
    assert bias.shape[0] == 4 and (np.abs(bias).max(axis=1) > 0).all(), "trained by every node from zero"
    assert len(np.unique(bias[:, 0])) == 4, "and mixed with no other's"


def test_a_killed_sweep_over_topologies_goes_on_and_gives_the_runs_of_simulate(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "CHECKPOINT_UPDATES", 4)
    base = WORLD | {"method": "swift", **ONLY_OWN, "eval_updates": 1}
    begun, held = [], []

    def watching(evaluation):
        begun.append((evaluation.run, evaluation.update))
        if len(begun) == 20:  # each run has 11 evaluations
            raise Killed

    def restore(keeper, restore=Keeper.restore):
        found = restore(keeper)
        held.append(found is not None)
        return found

    def start():
        return sweep(base, {"topology": ["ring", "complete"]}, out=tmp_path, callbacks=[watching], progress=False)

    with pytest.raises(Killed):
        start()
    monkeypatch.setattr(Keeper, "restore", restore)
    runs = list(start().runs)
    assert held and all(held), "what is not finished goes on from its checkpoint"
    assert not (tmp_path / "checkpoints").exists()
    assert len(runs) == 2 and all(isinstance(run.schedule, PeerSchedule) for run in runs), "read from their folders"
    assert all("global_loss" not in run.evaluations and "average_loss" not in run.evaluations for run in runs)
    alone = simulate(**base, topology="complete")
    found = [run for run in runs if run.settings["topology"] == "complete"]
    np.testing.assert_array_equal(found[0].evaluations["loss"], alone.evaluations["loss"])


def test_nodes_that_send_nothing_have_no_topology_and_spend_no_time_on_messages_and_one_is_enough():
    alone = prepare(Settings(**WORLD | {"clients": 1}, method="independent"))
    assert alone.settings.topology is None and len(alone.schedule.receiver) == 0 and alone.total == 10
    common, methods = Settings(**RING), ("swift", "independent", "fedavg")
    found = [settings_in_comparison(common, method, methods).topology for method in methods]
    assert found == ["ring", None, None]
    assert settings_in_comparison(common, "independent", ("independent",)).topology == "ring"  # which is then refused
    slow = WORLD | {"delay": "constant:mean=1,bandwidth=1e3"}
    alone, sending = (prepare(Settings(**slow, method=method)).schedule for method in ("independent", "swift"))
    np.testing.assert_array_equal(alone.end, 1.0 + alone.number)
    np.testing.assert_allclose(sending.end, (1.0 + sending.message_bytes / 1e3) * (1 + sending.number))


def test_the_messages_of_a_stopped_run_are_those_of_one_that_ends_there():
    """They were those of the whole plan: messages that are mixed after the stop counted as mixed."""
    settings = RING | {"method": "async_dfedavg", "exchange": "mean:policy=merge", "network": "link:latency=0.7"}
    settings |= {"delay": "lognormal:mean=1", "faults": "drop", "updates": None, "eval_time": 1.0, **ONLY_OWN}
    stopping = [lambda evaluation: Stop("enough") if evaluation.time >= 5 else None]
    stopped = simulate(**settings, time=10.0, callbacks=stopping, engine="reference").counters
    short = simulate(**settings, time=5.0, engine="reference").counters
    counts = ["messages", *(kind.name.lower() for kind in Delivery), "updates"]
    assert {name: stopped[name] for name in counts} == {name: short[name] for name in counts}
    assert short["waiting"] > 0 and short["in_flight"] > 0


def test_lanes_and_memory_of_a_sweep_hold_for_runs_without_a_server():
    settings = [Settings(method="swift", **RING, **ONLY_OWN, lr=lr) for lr in (0.1, 0.2)]
    with pytest.raises(ValueError, match=r"memory_limit = 10: must be at least .* bytes for one run per lane"):
        plan_groups(settings, memory_limit=10)
    (group,) = plan_groups(settings, lanes=3)
    assert (group.stacks, group.lanes, group.batches) == (((0, 1),), 1, 3)
    runs = {}
    execute_group(settings, group, on_finished=runs.__setitem__)
    for i, one in enumerate(settings):
        alone = execute(prepare(one))
        np.testing.assert_array_equal(runs[i].evaluations["loss"], alone.evaluations["loss"])
        assert runs[i].settings["lanes"] is None


TINY = WORLD | {"steps": 1, "updates": 6}


def test_a_factory_that_takes_stays_is_a_method_without_a_server(nothing_stays_registered):
    @register("method", "mine", exchange="mean", topology="ring", lr=0.1)
    def mine(stays, *, step: Traced = 0.5):
        """Nodes with their inbox scaled by ``step``."""
        plain = full_models(stays)

        def wake(row, inbox, event):
            return plain.wake(row, jax.tree.map(lambda leaf: step * leaf, inbox), event)

        return plain._replace(wake=wake)

    found = prepare(Settings(**TINY, method="mine:step=0.3"))
    usual = prepare(Settings(**TINY, method="async_dfedavg", topology="ring"))
    np.testing.assert_array_equal(found.schedule.weight, usual.schedule.weight)
    assert found.schedule.message_bytes == usual.schedule.message_bytes > 0
    assert found.components.hyper["peer.step"] == 0.3
    assert (found.settings.topology, found.settings.lr, found.settings.optimizer) == ("ring", 0.1, "sgd")


def test_a_factory_that_takes_a_compressor_gets_the_one_of_the_run(nothing_stays_registered):
    register("method", "mine", exchange="dpsgd", topology="ring", compress="topk:ratio=0.1")(choco)
    one, other = (prepare(Settings(**TINY, method="mine", compress=c)) for c in (None, "topk:ratio=0.5"))
    assert one.settings.compress == "topk:ratio=0.1"
    assert other.schedule.message_bytes > 2 * one.schedule.message_bytes


@pytest.mark.parametrize(("preset", "factory", "message"), [
    ({"timing": "every"}, lambda stays: 1, "preset.timing = 'every': must be left out of a method without a serv"),
    ({"policy": "oort"}, lambda stays: 1, "preset.policy = 'oort': must be left out of a method without a server"),
    ({"topology": "ring"}, lambda *, x=1: x, "preset.topology = 'ring': must be left out of a method with a serv"),
    ({"exchange": "mea"}, lambda stays: 1, "exchange = 'mea': unknown; did you mean 'mean'"),
    ({"topology": 3}, lambda stays: 1, "preset.topology = 3: must be a text, a name of peers.TOPOLOGIES"),
    ({"compress": "sign"}, lambda stays: 1, "preset.compress = 'sign': must be left out: it takes none"),
    ({}, lambda stays, compressor: 1, "preset.compress = None: must be a compressor such as"),
    ({}, lambda nodes: 1, r"method mine = \['nodes'\]: must be .*, or without a server def mine\(stays, \*"),
    ({}, lambda stays: 1, r"method mine = '1': must be a factory of a PeerAlgorithm"),
    ({}, lambda stays: {}["inside"], r"method = 'mine': its factory raised KeyError: 'inside'"),
    ({}, lambda *, x=1: full_models(bool), r"must be a factory of a ServerAlgorithm .*: def mine\(stays, \*, ...\)"),
])  # fmt: skip
def test_nodes_that_cannot_be_registered_or_used(nothing_stays_registered, preset, factory, message):
    with pytest.raises(ValueError, match=message):
        register("method", "mine", **preset)(factory)
        prepare(Settings(**TINY, method="mine"))


def one_message(row):
    return jax.tree.map(lambda leaf: leaf[None], row)


def with_nodes(field, function):
    method = Method(lambda stays: full_models(stays)._replace(**{field: function}), exchange="mean")
    prepare(with_objects(Settings(**TINY, method=function if field is None else method), data=None))


test_what_nodes_return_is_checked_before_the_run = refusals(
    (None, Spec(lambda: full_models(bool)), r"must return a ServerAlgorithm \(of nodes"),
    (None, full_models(bool), r"'a PeerAlgorithm': .* wrap the algorithm: Method\("),
    ("init", lambda params: params[0], r"peer.init: must be a function init\(params\) -> row; it raised KeyError"),
    ("wake", lambda row, inbox, event: {"a": 1}, "peer.wake returned .*: must return a row of the struct.*peer.init"),
    ("wake", lambda row, inbox: row, r"peer.wake: must be a function wake\(row, inbox, event\) -> row; it raised Ty"),
    ("add", lambda inbox, row, message, weight: weight, "peer.add returned .*: must return an inbox of the struct"),
    ("add", lambda inbox, row, message, weight: message["no"], "peer.add: must be .* it raised KeyError: 'no'"),
    ("start", lambda row: row, "peer.start returned .*: must return a Message"),
    ("params", lambda row: jnp.zeros(3), "peer.params returned .*: must return params of the structure"),
    ("push", lambda row, upload, event: (row, upload), r"peer.push returned .*: must return \(row, messages, col"),
    ("push", lambda row, upload, event: (row, row, {}), r"peer.push's messages returned .*: .* \[F, ...\], F = 1"),
    ("push", lambda row, upload, event: (row, one_message(row), {"x": "y"}), "peer.push's columns returned"),
    by=with_nodes,
)
