"""PushCen-ADFL as its authors released it: a node's first aggregation and the warm start after it, by hand.

The layer has K - 1 entries, so chance has nothing to choose: a cold start takes all of them, and an empty cluster gets
the entry before its position among the centroids. The numbers follow from the description of the released code; none
of them is computed with the package.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.clock import Until
from fedjax_async.compress import Clustered, lookup
from fedjax_async.local import anchored_training
from fedjax_async.local.anchored import REFERENCES
from fedjax_async.models.wrap import cross_entropy
from fedjax_async.peers import Event, plan_peers, pushcen
from fedjax_async.types import ClientData, Model

EVENT = Event(jax.random.key(3), jnp.float32(2.5))
NOTHING = {"bias": np.zeros(2, np.float32), "kernel": np.zeros((2, 2), np.float32)}
OWN = {"bias": jnp.array([7.0, 7.0]), "kernel": jnp.full((2, 2), 9.0)}
MODEL = Model(lambda key: OWN, lambda params, x, key=None: x @ params["kernel"] + params["bias"][None], cross_entropy)

# Two messages: tables [5], and as indices the entries [-7, 0, 0, 3] and [3, 0, 4, 5].
TABLES = ([-7.0, 0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 3.0, 4.0, 5.0])
INDICES = ([0, 1, 1, 4], [2, 0, 3, 4])
MEAN = np.array([-2.0, 0.0, 2.0, 4.0])  # the plain mean of the two models; their own mean is 1
DICTIONARY = [-3, -1, 0, 1, 3]  # MEAN - 1, all of it, and the zero; the mean of the tables would be [-3.5, 0.5, 2, ...]


PEER = pushcen(lambda path: False, k=5, reference="released")
init, wake, push = map(jax.jit, (PEER.init, PEER.wake, PEER.push))


def messages():
    def whole(values, bias):
        return {"bias": bias, "kernel": values}

    for table, index, bias in zip(TABLES, INDICES, (0.0, 2.0)):
        indices = jnp.array(index, jnp.uint8).reshape(2, 2)
        yield Clustered(whole(jnp.array(table), None), whole(indices, None), whole(None, jnp.full(2, bias)))


def full_inbox(peer, row, weight):
    inbox = peer.open(row)
    for message in messages():
        inbox = peer.add(inbox, row, message, jnp.float32(weight))
    return inbox


@functools.cache
def first_aggregation():
    """The node that has mixed two messages before it has trained, with the coefficients of the release: 1/2 each."""
    row = init(OWN)
    return wake(row, full_inbox(PEER, row, 0.5), EVENT)


def test_the_first_aggregation_clusters_the_mean_of_the_messages():
    row = first_aggregation()
    np.testing.assert_allclose(row.params["kernel"].ravel(), MEAN, atol=1e-5)
    np.testing.assert_allclose(row.params["bias"], [1, 1], atol=1e-5)
    np.testing.assert_allclose(row.dictionary.tables["kernel"], DICTIONARY, atol=1e-5)
    assert row.dictionary.known and not row.own.known


def test_nodes_of_a_batch_aggregate_as_each_by_itself():
    row, start = first_aggregation(), init(OWN)
    inboxes = jax.tree.map(lambda *leaves: jnp.stack(leaves), full_inbox(PEER, start, 0.5), PEER.open(start))
    both = jax.jit(jax.vmap(PEER.wake, in_axes=(None, 0, None)))(start, inboxes, EVENT)
    assert both.dictionary.known.tolist() == [True, False]
    np.testing.assert_allclose(both.dictionary.tables["kernel"], [DICTIONARY, [0] * 5], atol=1e-5)
    np.testing.assert_allclose(both.params["kernel"], [row.params["kernel"], OWN["kernel"]], atol=1e-5)


def test_a_node_without_messages_has_no_dictionary_before_it_clusters():
    row = init(OWN)
    assert not wake(row, PEER.open(row), EVENT).dictionary.known


def test_later_aggregations_average_tables():
    row = first_aggregation()
    own = jnp.array([-1.0, 0.0, 1.0, 1.0, 2.0])
    row = row._replace(own=row.own._replace(tables={"bias": None, "kernel": own}, known=jnp.bool_(True)))
    later = wake(row, full_inbox(PEER, row, 0.25), EVENT)
    np.testing.assert_allclose(later.dictionary.tables["kernel"], [-2.25, 0.25, 1.5, 2, 3], atol=1e-6)


# The warm start from the dictionary [-4, -1, 0, 2, 3] of the entries x = [-4, -1, 2, 3]:
#   1. All entries are centroids; zero is empty and gets the entry before its position, -1. Slot 0 becomes zero.
#      Slots: 0, -1, -1, 2, 3.
#   2. -4 and -1 go to the lower of the two slots at -1; the other is empty and gets -4; zero has none and stays.
#      Slots: 0, -2.5, -4, 2, 3. The loss was 0 before and is 9 now.
#   3. -4 goes to -4, and -1 to zero; the slot at -2.5 is empty and gets -4. Slots: 0, -4, -4, 2, 3.
# With slot 0 at zero from the start, -4 and -1 would share one centroid, -2.5, throughout.
X = np.array([-4.0, -1.0, 2.0, 3.0])
START = [-4.0, -1.0, 0.0, 2.0, 3.0]
WARM = [-4, -4, 0, 2, 3]
DECODED = [-4, 0, 2, 3]


def warm():
    """A node with the dictionary START and the weights X + 5."""
    row = first_aggregation()
    dictionary = row.dictionary._replace(tables={"bias": None, "kernel": jnp.array(START)})
    return row._replace(params={**OWN, "kernel": jnp.asarray(X + 5).reshape(2, 2)}, dictionary=dictionary)


def test_the_warm_start_after_it_by_hand():
    row = warm()
    after, sent, _ = push(row, NOTHING, EVENT)
    sent = jax.tree.map(lambda leaf: leaf[0], sent)
    np.testing.assert_allclose(sent.tables["kernel"], WARM, atol=1e-5)
    np.testing.assert_allclose(lookup(sent)["kernel"].ravel(), DECODED, atol=1e-5)
    np.testing.assert_array_equal(after.params["kernel"], row.params["kernel"])  # the node keeps its own weights
    np.testing.assert_array_equal(after.dictionary.tables["kernel"], START)  # changed by aggregation only
    np.testing.assert_allclose(after.own.tables["kernel"], WARM, atol=1e-5)


def test_without_messages_the_dictionary_is_that_of_the_first_clustering():
    row = init({**OWN, "kernel": jnp.asarray(X + 5, jnp.float32).reshape(2, 2)})
    after, sent, _ = push(row, NOTHING, EVENT)
    np.testing.assert_allclose(after.dictionary.tables["kernel"], START, atol=1e-5)
    np.testing.assert_allclose(sent.tables["kernel"][0], WARM, atol=1e-5)
    assert after.dictionary.known


def test_training_is_anchored_at_the_dictionary_and_masked_where_the_warm_start_prunes():
    client = anchored_training(MODEL, optimizer=optax.sgd(0.1), batch_size=1, reference="released")
    one, zero = jnp.zeros((1, 2)), jnp.int32(0)
    data = ClientData(one, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), zero, zero + 1)
    message = PEER.start(warm())._replace(version=zero, local_steps=zero + 1)
    work = jax.jit(client.begin)(EVENT.key, message, client.init(OWN), data)
    np.testing.assert_allclose(work.anchor.weights["kernel"].ravel(), DECODED, atol=1e-5)
    np.testing.assert_array_equal(work.anchor.mask["kernel"].ravel(), [True, False, True, True])


def test_the_pull_is_half_the_gradient_of_a_sum_or_a_mean_of_squares():
    gap = jnp.asarray(X, jnp.float32).reshape(2, 2)
    for name, total in (("paper", jnp.sum), ("released", jnp.mean)):
        half = jax.grad(lambda gap, total=total: total(gap**2) / 2)(gap)
        np.testing.assert_allclose(REFERENCES[name](gap), half, rtol=1e-6)


def test_the_plan_drops_the_own_model_once_and_adds_all_masses():
    """Node 2's event of 4 s comes after one each of nodes 0 (2 s) and 1 (3 s): it replaces its model by their mean."""
    plan = plan_peers(
        "push_sum:newest=false,policy=discard,aggregate_at=end,reference=released", "constant:mean=1,reference_steps=1",
        num_clients=3, local_steps=np.array([2, 3, 4]), until=Until(time=4), topology="complete",
    )  # fmt: skip
    assert plan.client.tolist() == [0, 1, 2, 0]  # at 4 s, node 2's event was scheduled first
    inboxes = [plan.weight[low:high].tolist() for low, high in itertools.pairwise(plan.inbox_bounds)]
    # Masses: 1/3 of node 0's 1; node 1 has 1 + 1/3, of which 4/9; node 2 has 1 + 1/3 + 4/9 = 16/9.
    assert inboxes[:3] == [[], [1.0], [0.5, 0.5]]
    np.testing.assert_allclose(plan.mass[:3], [1 / 3, 4 / 9, 16 / 27], rtol=1e-12)
    # Node 0's second event: 1/3 of its own, 4/9 and 16/27 from the others.
    np.testing.assert_allclose(inboxes[3], np.array([4 / 9, 16 / 27]) / (1 / 3 + 4 / 9 + 16 / 27), rtol=1e-12)


def test_the_papers_rule_averages_the_tables_from_the_first_message_on():
    peer = pushcen(lambda path: False, k=5)
    row = peer.init(OWN)
    tables = peer.wake(row, full_inbox(peer, row, 0.5), EVENT).dictionary.tables
    np.testing.assert_array_equal(tables["kernel"], [-3.5, 0.5, 2, 3, 4])
