"""Engine and oracle agree for the real methods on real plans: topologies, buffers, late nodes, lost messages."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from fedjax_async.clock import Until, plan_peers
from fedjax_async.compress import topk
from fedjax_async.engine.components import PeerComponents
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import run_peer_waves
from fedjax_async.local import local_steps
from fedjax_async.local.anchored import anchored_training
from fedjax_async.peers import choco, divshare, full_models, pushcen, sgp
from tests.engine.peer_problem import SIZES, nothing_stays
from tests.engine.problem import MODEL, client, data
from tests.engine.test_peer_waves import same

ANCHORED = anchored_training(MODEL, optimizer=optax.adam(0.05), batch_size=4)
PUSHCEN, FULL, SGP = pushcen(nothing_stays, k=4), full_models(nothing_stays), sgp(nothing_stays)
RELEASED = (
    pushcen(nothing_stays, k=4, reference="released"),
    anchored_training(MODEL, optimizer=optax.adam(0.05), batch_size=4, reference="released", mask=False),
)
DIVSHARE, CHOCO = divshare(nothing_stays, omega=0.4), choco(nothing_stays, topk(ratio=0.3))
POLICIES = ("carry", "merge", "discard")
GRAPHS = ("gossip:receivers=2", "ring:directed=true", "exponential", "star", "random_regular:degree=3")
CONDITIONS = ({}, {"availability": "joins:share=0.4,by=4", "faults": "drop:probability=0.2+corrupt:probability=0.1"})

# method -> (peer, client, exchanges, topologies)
METHODS = {
    "pushcen": (PUSHCEN, ANCHORED, [f"push_sum:capacity=2,policy={policy}" for policy in POLICIES], GRAPHS),
    "pushcen as released": (
        *RELEASED,
        [f"push_sum:policy={policy},aggregate_at=end,reference=released" for policy in ("discard", "merge")],
        GRAPHS[:1],
    ),
    "full push-sum": (FULL, client(), [f"push_sum:capacity=2,policy={policy}" for policy in POLICIES], GRAPHS),
    "async_dfedavg": (FULL, client(), ["mean", "mean:policy=merge,aggregate_at=end"], GRAPHS),
    "swift": (FULL, client(), ["swift", "swift:every=2"], ("ring", "star", "random_regular:degree=3")),
    "divshare": (DIVSHARE, client(), ["divshare:omega=0.4"], ("gossip:receivers=2", "exponential")),
    "independent": (FULL, client(), ["alone"], GRAPHS[:1]),
    "dpsgd": (FULL, client(), ["dpsgd"], ("ring", "random_regular:degree=3")),
    "sgp": (SGP, client(), ["sgp"], ("exponential:one_peer=true", "ring:directed=true")),
    "choco": (CHOCO, client(), ["dpsgd"], ("ring",)),
}
FEW = [
    ("pushcen", "push_sum:capacity=2,policy=carry", "gossip:receivers=2", 1),
    ("divshare", "divshare:omega=0.4", "gossip:receivers=2", 1),
    ("swift", "swift", "random_regular:degree=3", 1),
    ("sgp", "sgp", "exponential:one_peer=true", 0),
]
ALL = [
    (method, exchange, graph, condition)
    for method, (_, _, exchanges, graphs) in METHODS.items()
    for exchange, graph, condition in itertools.product(exchanges, graphs, range(len(CONDITIONS)))
    # a round without a server waits for all nodes, and compressed differences must all arrive
    if condition == 0 or method not in ("dpsgd", "sgp", "choco")
]


@functools.cache
def given(method, exchange, graph, condition):
    peer, trainer, _, _ = METHODS[method]
    plan = plan_peers(
        exchange, "lognormal:heterogeneity=0.5", num_clients=len(SIZES), until=Until(time=9), seed=5, topology=graph,
        local_steps=local_steps(data(SIZES).size, batch_size=4, epochs=1), **CONDITIONS[condition],
    )  # fmt: skip
    components = PeerComponents(peer, trainer, MODEL, data(SIZES))
    params, key = MODEL.init(jax.random.key(1)), jax.random.key(2)
    return components, plan, params, key, np.linspace(0, 9, 4)


def check_equal(case):
    with jax.enable_x64(True):
        arguments = given(*case)
        want = run_peer_reference(*arguments, global_tests="never")
        have = run_peer_waves(*arguments, batching="loop", max_width=4, lanes=2, global_tests="never")
    same(have, want, 1e-8)
    if arguments[1].corrupt.any() and len(arguments[1].source):
        assert want.records["refused_messages"].sum() > 0
    assert np.ptp(np.asarray(want.params["output"]["kernel"]), axis=0).max() > 1e-3, "the nodes must differ"


@pytest.mark.parametrize("case", FEW, ids=str)
def test_some(case):
    assert case in ALL
    check_equal(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all(case):
    check_equal(case)
