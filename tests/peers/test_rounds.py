"""Methods of rounds against their papers or their authors' code, one round of all nodes after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.clock import Until
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.local import job_key
from fedjax_async.local.batches import seed_of
from fedjax_async.peers import masses, plan_peers, topologies
from fedjax_async.peers.full_mixing import full_models, osgp, sgp
from fedjax_async.peers.receivers import choose_receivers
from fedjax_async.types import Event
from tests.engine.problem import data
from tests.local.textbook import batches, gradient
from tests.peers.test_methods import MODEL, nothing_stays, plain
from tests.peers.textbook import BATCH, LR

pytestmark = pytest.mark.float64

NODES, ROUNDS, STEPS, SEED, ROOT = 5, 12, 3, 3, 2


def found(exchange, topology, peer, client, network=None):
    """The models of all nodes after the rounds, [N, ...] each, and the plan of the run."""
    schedule = plan_peers(
        exchange, "lognormal:heterogeneity=0.7", num_clients=NODES, local_steps=STEPS, seed=SEED,
        until=Until(updates=NODES * ROUNDS), topology=topology, network=network, message_bytes=10,
    )  # fmt: skip
    components, points = Components(peer, client, MODEL, data()), np.array([0.0, schedule.end.max()])
    key = jax.random.key(ROOT)
    run = run_peer_reference(components, schedule, MODEL.init(jax.random.key(1)), key, points, global_tests="never")
    return run.params, schedule


def same(params, models):
    for i, name in enumerate("wb"):
        np.testing.assert_allclose(np.asarray(params[name]), [model[i] for model in models], rtol=1e-10, atol=1e-12)


def start():
    params = MODEL.init(jax.random.key(1))
    return [[np.asarray(params["w"], np.float64), np.asarray(params["b"], np.float64)] for _ in range(NODES)]


def minibatches(node, turn):
    """The examples of the local steps of a node in a round, as the package draws them."""
    d = data()
    rows = d.order[d.offset[node] : d.offset[node] + d.size[node]]
    key = job_key(jax.random.key(ROOT), node, turn)
    for chosen in batches(tuple(int(word) for word in seed_of(key)), len(rows), BATCH, STEPS):
        yield d.x[rows][chosen], d.y[rows][chosen]


def descent(model, node, turn):
    for x, y in minibatches(node, turn):
        model = [now - LR * g for now, g in zip(model, gradient(*model, x, y))]
    return model


# --- Epidemic Learning (de Vos et al. 2023): train, send, average what came with the own model ----------------


def to_drawn_nodes(topology):
    """``receivers(node, round)`` of EL-Local, the package's draws."""
    bound = topologies.bind(topology, NODES, SEED)

    def receivers(node, turn):
        place = np.array([node]), np.array([turn]), np.zeros(1)
        return choose_receivers(bound, SEED, *place, None)[1].tolist()

    return receivers


def along_drawn_graphs(topology):
    """``receivers(node, round)`` of EL-Oracle."""
    bound = topologies.bind(topology, NODES, SEED)

    def receivers(node, turn):
        graph = bound.drawn(turn)
        return graph.receivers[graph.bounds[node] : graph.bounds[node + 1]].tolist()

    return receivers


def epidemic(receivers):
    models = start()
    for turn in range(ROUNDS):
        models = [descent(model, node, turn) for node, model in enumerate(models)]
        if turn == ROUNDS - 1:  # the run ends before these are averaged
            return models
        inbox = [[model] for model in models]
        for node, model in enumerate(models):
            for receiver in receivers(node, turn):
                inbox[receiver].append(model)
        models = [[np.mean(parts, axis=0) for parts in zip(*box)] for box in inbox]
    raise AssertionError


@pytest.mark.parametrize(
    ("topology", "receivers"),
    [("gossip:receivers=2", to_drawn_nodes), ("random_regular:degree=2,redraw=true", along_drawn_graphs)],
    ids=["el_local", "el_oracle"],
)
def test_epidemic_learning(topology, receivers):
    params, schedule = found("epidemic", topology, full_models(nothing_stays), plain())
    same(params, epidemic(receivers(topology)))
    sizes = np.diff(schedule.inbox_bounds)[NODES:]
    assert (np.unique(sizes).tolist() == [2]) == ("regular" in topology), "the draws of EL-Local are uneven"


def test_el_oracle_is_d_psgd_along_the_same_graphs():
    """Metropolis weights of a regular graph are those of the plain mean."""
    given = "random_regular:degree=2,redraw=true", full_models(nothing_stays), plain()
    (one, plan), (other, _) = found("epidemic", *given), found("dpsgd", *given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), one, other)
    np.testing.assert_allclose(plan.weight, 1 / 3)


# --- overlap SGP (Assran et al. 2019): what came, then send, then train at z = x / w -------------------------------


def along_graphs(topology):
    """``receivers(node, round)`` of graphs that take turns."""
    graphs = topologies.bind(topology, NODES, SEED).graphs

    def receivers(node, turn):
        graph = graphs[turn % len(graphs)]
        return graph.receivers[graph.bounds[node] : graph.bounds[node + 1]].tolist()

    return receivers


def overlapping(receivers):
    """The unbiased models and the weights of all nodes."""
    x, weights = start(), [1.0] * NODES
    residuals: list[list] = [[] for _ in range(NODES)]  # that came while the node trained
    for turn in range(ROUNDS):
        sent: list[list] = [[] for _ in range(NODES)]
        for node in range(NODES):
            for numerator, weight in residuals[node]:
                x[node] = [mine + part for mine, part in zip(x[node], numerator)]
                weights[node] += weight
            to = receivers(node, turn)
            share = 1 / (len(to) + 1)
            x[node], weights[node] = [share * mine for mine in x[node]], share * weights[node]
            for receiver in to:
                sent[receiver].append((x[node], weights[node]))
        residuals = sent
        for node in range(NODES):
            z = [mine / weights[node] for mine in x[node]]
            x[node] = [mine + new - old for mine, new, old in zip(x[node], descent(z, node, turn), z)]
    return [[mine / weight for mine in model] for model, weight in zip(x, weights)], weights


@pytest.mark.parametrize(
    ("topology", "receivers"),
    [("exponential:one_peer=true", along_graphs), ("gossip:receivers=2", to_drawn_nodes), ("star", along_graphs)],
)
def test_overlap_sgp(topology, receivers):
    params, schedule = found("overlap", topology, osgp(nothing_stays), plain())
    models, weights = overlapping(receivers(topology))
    same(params, models)
    np.testing.assert_allclose(schedule.mass[-NODES:], weights, rtol=1e-12)
    assert sum(weights) < NODES - 1, "the rest is under way"
    if "gossip" in topology:
        assert np.ptp(weights) > 0.05


def test_messages_are_under_way_while_the_nodes_train():
    """Jobs of 10 s; messages that take 4 s cost no time, those of 15 s 5 s a round."""
    for takes, lasts in ((4, 10), (10, 10), (15, 15)):
        plans = [
            plan_peers(
                exchange, "constant:mean=10", num_clients=NODES, local_steps=1, until=Until(updates=NODES * 6),
                topology="exponential:one_peer=true", network=f"link:latency={takes / 2}",  # at both ends
            )
            for exchange in ("overlap", "sgp")
        ]  # fmt: skip
        early, late = plans
        assert np.unique(early.start).tolist() == [lasts * k for k in range(6)]
        assert np.unique(late.start).tolist() == [(10 + takes) * k for k in range(6)]
        np.testing.assert_array_equal(early.source, late.source)
        np.testing.assert_array_equal(early.weight, late.weight)
        assert (early.arrival >= early.end[early.push_event]).all()
        np.testing.assert_allclose(sum(masses(early, np.linspace(0, 60, 25))), NODES, rtol=1e-12)


@pytest.mark.parametrize("peer", [osgp, sgp, full_models])
def test_only_early_methods_send_nothing_of_their_training(peer):
    node = peer(nothing_stays)
    row = node.init(MODEL.init(jax.random.key(1)))
    event = Event(jax.random.key(0), jnp.float64(1.0), jnp.float64(0.5))
    still, moved = (
        node.push(row, jax.tree.map(lambda leaf, c=change: jnp.full_like(leaf, c), row), event)[1] for change in (0, 1)
    )
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), still, moved)
    assert all(jax.tree.leaves(equal)) == node.early


@pytest.mark.parametrize(
    "topology", ["random_regular:degree=2,redraw=true", "gossip:receivers=2", [nx.cycle_graph(5), nx.star_graph(4)]]
)
def test_differences_that_are_added_up_need_one_graph(topology):
    world = {"dataset": "synthetic", "model": "logistic", "clients": 5, "steps": 1, "updates": 10}
    with pytest.raises(ValueError, match="one graph that stays: nodes of choco keep"):
        simulate(method="choco", topology=topology, **world)


@pytest.mark.parametrize("method", ["sgp", "dpsgd", "choco"])
def test_what_is_trained_cannot_leave_before(method):
    world = {"dataset": "synthetic", "model": "logistic", "clients": 5, "steps": 1, "updates": 10}
    with pytest.raises(ValueError, match="exchange = 'overlap': must be another one, since"):
        simulate(method=method, exchange="overlap", **world)
