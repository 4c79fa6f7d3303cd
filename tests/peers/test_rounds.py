"""Methods of rounds against their papers or their authors' code, one round of all nodes after another."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async.clock import Until
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.local import job_key
from fedjax_async.local.batches import seed_of
from fedjax_async.peers import plan_peers, topologies
from fedjax_async.peers.full_mixing import full_models
from fedjax_async.peers.receivers import choose_receivers
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
