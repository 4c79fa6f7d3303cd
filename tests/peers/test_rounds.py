"""Methods of rounds against their papers or their authors' code, and an identity of push-sum along a run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

from fedjax_async import simulate
from fedjax_async.clock import Until
from fedjax_async.compress import centroids
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_reference import _Nodes
from fedjax_async.local import job_key
from fedjax_async.local.anchored import anchored_training
from fedjax_async.local.batches import seed_of
from fedjax_async.peers import Delivery, masses, plan_peers, topologies
from fedjax_async.peers.full_mixing import full_models, osgp, sgp
from fedjax_async.peers.pushcen_adfl import pushcen
from fedjax_async.peers.receivers import choose_receivers
from fedjax_async.types import Event
from tests.engine.problem import data
from tests.local.textbook import batches, gradient
from tests.peers.test_methods import MODEL, nothing_stays, plain, planned, run
from tests.peers.textbook import BATCH, LR
from tests.refusals import refusals

pytestmark = pytest.mark.float64

NODES, ROUNDS, STEPS, SEED = 5, 12, 3, 3


def found(exchange, topology, peer):
    """The models of all nodes after the rounds, [N, ...] each, and the plan of the run."""
    schedule = planned(exchange, NODES * ROUNDS, STEPS, topology)
    return run(peer, plain(), schedule)[0].params, schedule


def same(params, models):
    for i, name in enumerate("wb"):
        np.testing.assert_allclose(np.asarray(params[name]), [model[i] for model in models], rtol=1e-10, atol=1e-12)


def start():
    params = MODEL.init(jax.random.key(1))
    return [[np.asarray(params["w"], np.float64), np.asarray(params["b"], np.float64)] for _ in range(NODES)]


def descent(model, node, turn):
    """Local steps in a round, on the minibatches that the package draws."""
    d = data()
    rows = d.order[d.offset[node] : d.offset[node] + d.size[node]]
    key = job_key(jax.random.key(2), node, turn)
    for chosen in batches(tuple(int(word) for word in seed_of(key)), len(rows), BATCH, STEPS):
        slopes = gradient(*model, d.x[rows][chosen], d.y[rows][chosen])
        model = [now - LR * g for now, g in zip(model, slopes)]
    return model


def receivers_of(topology):
    """``receivers(node, round)``, the package's draws."""
    bound = topologies.bind(topology, NODES, SEED)

    def receivers(node, turn):
        if not bound.graphs and bound.drawn is None:
            return choose_receivers(bound, SEED, np.array([node]), np.array([turn]), np.zeros(1), None)[1].tolist()
        graph = bound.graphs[turn % len(bound.graphs)] if bound.graphs else bound.drawn(turn)
        return graph.receivers[graph.bounds[node] : graph.bounds[node + 1]].tolist()

    return receivers


# --- Epidemic Learning (de Vos et al. 2023): train, send, average what came with the own model ----------------


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


@pytest.mark.parametrize("topology", ["gossip:receivers=2", "random_regular:degree=2,redraw=true"])
def test_epidemic_learning(topology):
    """EL-Local and EL-Oracle; the second is D-PSGD along the same graphs: Metropolis weights are those of the mean."""
    params, schedule = found("epidemic", topology, full_models(nothing_stays))
    same(params, epidemic(receivers_of(topology)))
    regular = "regular" in topology
    sizes = np.diff(schedule.inbox_bounds)[NODES:]
    assert (np.unique(sizes).tolist() == [2]) == regular, "the draws of EL-Local are uneven"
    if regular:
        other = planned("dpsgd", NODES * ROUNDS, STEPS, topology)
        np.testing.assert_allclose(schedule.weight, 1 / 3)
        for name in ("source", "weight"):
            np.testing.assert_allclose(getattr(other, name), getattr(schedule, name))


# --- overlap SGP (Assran et al. 2019): what came, then send, then train at z = x / w -------------------------------


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


@pytest.mark.parametrize("topology", ["exponential:one_peer=true", "gossip:receivers=2", "star"])
def test_overlap_sgp(topology):
    params, schedule = found("overlap", topology, osgp(nothing_stays))
    models, weights = overlapping(receivers_of(topology))
    same(params, models)
    np.testing.assert_allclose(schedule.mass[-NODES:], weights, rtol=1e-12)
    assert sum(weights) < NODES - 1, "the rest is under way"
    assert "gossip" not in topology or np.ptp(weights) > 0.05


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


WORLD = {"dataset": "synthetic", "model": "logistic", "clients": 5, "steps": 1, "updates": 10}
ONE_GRAPH, LATER = "one graph that stays: nodes of choco keep", "exchange = 'overlap': must be another one, since"
test_differences_that_are_added_up_need_one_graph_and_what_is_trained_cannot_leave_before = refusals(
    ({"method": "choco", "topology": "random_regular:degree=2,redraw=true"}, ONE_GRAPH),
    ({"method": "choco", "topology": "gossip:receivers=2"}, ONE_GRAPH),
    ({"method": "choco", "topology": [nx.cycle_graph(5), nx.star_graph(4)]}, ONE_GRAPH),
    *(({"method": method, "exchange": "overlap"}, LATER) for method in ("sgp", "dpsgd", "choco")),
    by=lambda given: simulate(**WORLD, **given),
)


# --- what moves the mass-weighted mean of all models: PushCen-ADFL (2026), eqs. 57, 102 and 103 ------------------

SIZES = (9, 4, 13, 6, 7)
CLUSTERED = pushcen(nothing_stays, k=4)
ANCHORED = anchored_training(MODEL, optimizer=optax.sgd(LR), batch_size=4, anchor=0.3)


def flat(params):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])


class Followed:
    """The oracle's nodes, and beside them all models and messages with their masses."""

    def __init__(self, schedule):
        components, start = Components(CLUSTERED, ANCHORED, MODEL, data(SIZES)), MODEL.init(jax.random.key(1))
        self.schedule = schedule
        self.nodes = _Nodes(components, schedule, start, jax.random.key(2), np.inf)
        # one more reader than there are events: every message is kept
        self.nodes.readers = {(e, 0): len(schedule.client) + 1 for e in range(len(schedule.client))}
        self.models = [flat(start)] * 5
        self.mass, self.outside, self.sent = np.ones(5), {}, {}

    def total(self):
        """X_tot and Y_tot: of the nodes, and of the messages that no event has mixed yet."""
        x = sum(mass * model for mass, model in zip(self.mass, self.models))
        x = x + sum(mass * self.sent[source] for source, mass in self.outside.values())
        return x, self.mass.sum() + sum(mass for _, mass in self.outside.values())

    def event(self, e):
        """Play event e; returns S, the node's move, the sent mass, the quantisation error and the move by ``carry``."""
        s, who = self.schedule, int(self.schedule.client[e])
        entries = range(s.inbox_bounds[e], s.inbox_bounds[e + 1])
        mixed = self.models[who] + sum(s.weight[d] * (self.sent[s.source[d]] - self.models[who]) for d in entries)
        whole, carried = self.mass[who], 0.0
        inside = {int(s.source[d]) for d in entries}
        for push, (source, mass) in list(self.outside.items()):
            sender, old = s.client[source], s.outcome[push] == Delivery.SUPERSEDED
            into = [new for new in inside if old and new > source and s.client[new] == sender]
            if s.receiver[push] == who and (source in inside or into):
                whole += mass
                if into:  # its mass moves to the next message of its sender that stays
                    carried = carried + mass * (self.sent[min(into)] - self.sent[source])
                del self.outside[push]
        record = self.nodes.event(e)
        after = flat(self.nodes.model(who))
        self.sent[e] = flat(centroids.lookup(self.nodes.messages[e, 0]))
        self.models[who], self.mass[who] = after, s.mass[e]
        pushes = np.flatnonzero(s.push_event == e)
        self.outside |= {int(push): (e, float(s.sent_mass[push])) for push in pushes}
        error = self.sent[e] - after
        np.testing.assert_allclose(np.linalg.norm(error), record["quantisation_error"], rtol=1e-9)
        return whole, after - mixed, float(s.sent_mass[pushes].sum()), error, carried


@pytest.mark.parametrize("policy", ["merge", "carry"])
def test_what_moves_the_weighted_mean(policy):
    """With ``carry`` also the move ``sum sigma_old (w_new - w_old)`` of the total, which the paper's buffer lacks."""
    schedule = planned(f"push_sum:policy={policy},capacity=2", 60, steps=3, seed=4)
    run = Followed(schedule)
    moved = 0.0
    for e in range(60):
        (x, y), (whole, step, given, error, carried) = run.total(), run.event(e)
        later, mass = run.total()
        np.testing.assert_allclose((y, mass), 5, rtol=1e-12)
        # eq. 102 times Y_tot, its perturbation as eq. 57 has it, and what the buffer moved
        np.testing.assert_allclose(later - x, whole * step + given * error + carried, rtol=1e-9, atol=1e-11)
        degree = np.count_nonzero(run.schedule.push_event == e)
        assert given == pytest.approx(degree / (degree + 1) * whole), "c_t of eq. 103"
        moved += np.abs(carried).sum()
    assert (moved > 0) == (policy == "carry")
