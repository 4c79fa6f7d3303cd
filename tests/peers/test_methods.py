"""Every decentralised method against float64 NumPy over 200 events."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.clock import Until
from fedjax_async.compress import Clustered, sign, topk
from fedjax_async.config import Settings, prepare
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.local import local_training
from fedjax_async.local.anchored import anchored_training
from fedjax_async.models.wrap import cross_entropy
from fedjax_async.peers import plan_peers
from fedjax_async.peers.choco_sgd import choco
from fedjax_async.peers.divshare_fragments import cut, divshare
from fedjax_async.peers.divshare_tensors import fragment_numbers, tensor_fragments
from fedjax_async.peers.full_mixing import full_models, sgp
from fedjax_async.peers.pushcen_adfl import pushcen
from fedjax_async.types import Event, Model
from tests.engine.problem import CLASSES, FEATURES, data
from tests.peers import textbook

KEY = jax.random.key(0)
MODEL = Model(
    lambda key: {"w": 0.5 * jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)},
    lambda params, x, key=None: x.astype(params["w"].dtype) @ params["w"] + params["b"][None],
    cross_entropy,
)


def nothing_stays(path):
    return False


@functools.cache
def plain():
    return local_training(MODEL, optimizer=optax.sgd(textbook.LR), batch_size=textbook.BATCH)


def anchored(reference, mask=True):
    options = {"optimizer": optax.adam(textbook.LR), "batch_size": textbook.BATCH, "anchor": textbook.LAMBDA}
    return anchored_training(MODEL, reference=reference, mask=mask, **options)


def planned(exchange, events=200, steps=2, topology="gossip:receivers=2", seed=3, **conditions):
    """The clock's plan of a run; ``push_sum`` weighs messages by the masses that it draws from the delays."""
    return plan_peers(
        exchange, "lognormal:heterogeneity=0.7", num_clients=5, local_steps=steps, until=Until(updates=events),
        topology=topology, seed=seed, **conditions,
    )  # fmt: skip


def run(peer, client, schedule, seed=2):
    """The package's result: all nodes' models [N, ...] and the records."""
    start = MODEL.init(jax.random.key(1))
    points = np.array([0.0, schedule.end.max()])
    components = Components(peer, client, MODEL, data())
    found = run_peer_reference(components, schedule, start, jax.random.key(seed), points, global_tests="never")
    return found, np.asarray(start["w"]), np.asarray(start["b"])


def compare(found, nodes, schedule, **options):
    """Assert that the models of the textbook's nodes, once they have played the schedule, are those found."""
    textbook.run(schedule, nodes, data(), jax.random.key(2), **options)
    for name in ("w", "b"):
        want = np.stack([getattr(node, name) for node in nodes])
        np.testing.assert_allclose(np.asarray(found.params[name]), want, rtol=1e-8, atol=1e-9)


@pytest.mark.slow_cases("sgp-True")
@pytest.mark.float64
@pytest.mark.parametrize(("peer", "masses"), [(full_models, False), (sgp, True)])
def test_full_models(peer, masses):
    schedule = planned("push_sum")
    found, w, b = run(peer(nothing_stays), plain(), schedule)
    compare(found, [textbook.Full(w, b, masses) for _ in range(5)], schedule)
    assert np.abs(np.asarray(found.params["w"]) - w).max() > 0.1


@pytest.mark.parametrize(
    "peer",
    [full_models(nothing_stays), divshare(nothing_stays, omega=1.0), tensor_fragments(nothing_stays, fragments=1)],
)
def test_a_long_inbox_is_mixed_as_far_in_half_precision_as_in_full(peer):
    """599 messages of 1, of the weight 1/600 each; added in bfloat16, they would end at 0.5."""
    event = Event(KEY, jnp.float32(1.0))

    def mixed(dtype):
        row, sent = (peer.init({"w": jnp.full(3, value, dtype)}) for value in (0.0, 1.0))
        message = jax.tree.map(lambda leaf: leaf[0], peer.push(sent, {"w": jnp.zeros(3, dtype)}, event)[1])
        inbox = jax.lax.fori_loop(0, 599, lambda _, b: peer.add(b, row, message, jnp.float32(1 / 600)), peer.open(row))
        return peer.params(peer.wake(row, inbox, event))["w"]

    half, full = mixed(jnp.bfloat16), mixed(jnp.float32)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), full, rtol=0.01)
    np.testing.assert_allclose(full, 599 / 600, rtol=1e-4)


# the released clustering puts centroids on entries: equal entries, such as pruned ones, are ties, decided by rounding
@pytest.mark.slow_cases("released-200-0")
@pytest.mark.float64
@pytest.mark.parametrize(
    ("reference", "events", "mask"), [("paper", 200, 1), ("released", 200, 0), ("released", 40, 1)]
)
def test_pushcen(reference, events, mask):
    released = reference == "released"
    rest = ":newest=false,policy=discard,reference=released" if released else ""
    schedule = planned(f"push_sum{rest}", events, steps=5)
    client = anchored(reference, bool(mask))
    found, w, b = run(pushcen(nothing_stays, k=textbook.K, reference=reference), client, schedule)
    compare(found, [textbook.PushCen(w, b, released, bool(mask)) for _ in range(5)], schedule)
    assert (found.records["quantisation_error"] > 0).all()


def test_nodes_of_a_batch_begin_with_the_clustered_mean_of_their_messages_as_the_released_code_does():
    """A layer of K - 1 entries, of which a cold start takes all; one node hears two messages, the other none."""
    peer, event = pushcen(nothing_stays, k=5, reference="released"), Event(KEY, jnp.float32(2.5))
    row = peer.init({"w": jnp.full((2, 2), 9.0), "b": jnp.full(2, 7.0)})
    inbox = peer.open(row)
    for table, index, bias in (([-7.0, 0, 1, 2, 3], [0, 1, 1, 4], 0.0), ([0.0, 1, 3, 4, 5], [2, 0, 3, 4], 2.0)):
        indices, biases = jnp.array(index, jnp.uint8).reshape(2, 2), jnp.full(2, bias)
        parts = {"w": jnp.array(table), "b": None}, {"w": indices, "b": None}, {"w": None, "b": biases}
        inbox = peer.add(inbox, row, Clustered(*parts), jnp.float32(0.5))
    inboxes = jax.tree.map(lambda *leaves: jnp.stack(leaves), inbox, peer.open(row))
    both = jax.jit(jax.vmap(peer.wake, in_axes=(None, 0, None)))(row, inboxes, event)
    assert both.dictionary.known.tolist() == [True, False]
    np.testing.assert_allclose(both.params["w"].reshape(2, 4), [[-2, 0, 2, 4], [9] * 4], atol=1e-5)
    np.testing.assert_allclose(both.params["b"], [[1, 1], [7, 7]], atol=1e-5)
    # the mean of the models minus its own mean, and the zero; the mean of the tables would be [-3.5, 0.5, 2, 3, 4]
    np.testing.assert_allclose(both.dictionary.tables["w"], [[-3, -1, 0, 1, 3], [0] * 5], atol=1e-5)


@pytest.mark.float64
def test_the_clustering_of_the_mean_has_random_entries_of_its_own():
    """Not those of the clustering with which the client begins after it."""
    rng = np.random.default_rng(5)
    w, b, table, index = (
        rng.normal(size=(12, 10)),
        np.zeros(2),
        rng.normal(size=textbook.K),
        np.arange(120) % textbook.K,
    )
    peer, event = pushcen(nothing_stays, k=textbook.K, reference="released"), Event(KEY, jnp.float64(2.5))
    row = peer.init({"w": jnp.asarray(w), "b": jnp.asarray(b)})
    sent = {"w": jnp.asarray(table), "b": None}, {"w": jnp.asarray(index, jnp.uint8).reshape(12, 10), "b": None}
    inbox = peer.add(peer.open(row), row, Clustered(*sent, {"w": None, "b": jnp.zeros(2)}), jnp.float64(0.4))
    book = textbook.PushCen(w, b, released=True)
    book.mix([((table, index, b), 0.4)], KEY)
    found = jax.jit(peer.wake)(row, inbox, event).dictionary.tables["w"]
    np.testing.assert_allclose(np.sort(found), np.sort(book.g), atol=1e-9)
    begun, _ = textbook.PushCen(book.w, b, released=True).cluster(book.w, KEY)
    assert np.abs(np.sort(found) - np.sort(begun)).max() > 1e-3


@pytest.mark.slow_cases("0.5")
@pytest.mark.float64
@pytest.mark.parametrize("omega", [0.5, 0.2])
def test_divshare(omega):
    schedule = planned(f"divshare:omega={omega}", topology="gossip")
    fragments = schedule.fragments
    found, w, b = run(divshare(nothing_stays, omega=omega), plain(), schedule)
    rng = np.random.default_rng(0)
    tables = {"b": cut(b.size, fragments, rng), "w": cut(w.size, fragments, rng)}
    pieces = [
        tuple(t[f][t[f] < s] for t, s in ((tables["w"], w.size), (tables["b"], b.size))) for f in range(fragments)
    ]
    assert sorted(np.concatenate([p[0] for p in pieces])) == list(range(w.size)), "each entry is in one fragment"
    compare(found, [textbook.DivShare(w, b, pieces) for _ in range(5)], schedule)


@pytest.mark.float64
@pytest.mark.parametrize("fragments", [1, 2])
def test_tensor_fragments(fragments):
    """With one fragment the mean of whole models; with two, of one tensor of each message."""
    schedule = planned("mean:capacity=3,newest=false,aggregate_at=end", events=60)
    found, w, b = run(tensor_fragments(nothing_stays, fragments=fragments), plain(), schedule)
    compare(found, [textbook.TensorFragments(w, b, fragments) for _ in range(5)], schedule)
    if fragments == 1:
        compare(found, [textbook.Full(w, b) for _ in range(5)], schedule)


def test_parts_of_tensors_are_as_equal_as_they_can_be():
    """11 tensors in 4 parts: three of three and one of two, in an order of chance."""
    drawn = np.stack([fragment_numbers(jnp.uint32(n), 11, 4) for n in range(200)])
    for row in drawn:
        np.testing.assert_array_equal(np.bincount(row), [3, 3, 3, 2])
    share = np.mean(drawn == 3, axis=0)
    assert np.all(np.abs(share - 2 / 11) < 0.12) and len(np.unique(drawn, axis=0)) > 190


def compare_withheld(found, nodes, schedule):
    """Assert that the textbook's nodes withheld their messages at the same events, some but not all."""
    each = [iter(node.withheld) for node in nodes]
    np.testing.assert_array_equal(found.records["withheld"], [next(each[who]) for who in schedule.client])
    assert 20 < found.records["withheld"].sum() < 180


@functools.cache
def triggered():
    return full_models(nothing_stays, trigger=0.08)


@pytest.mark.float64
@pytest.mark.parametrize(("exchange", "topology"), [("dpsgd", "ring"), ("mean", "complete"), ("swift", "ring")])
def test_a_node_that_has_moved_little_sends_nothing(exchange, topology):
    """Its receivers then mix the last model that it sent."""
    schedule = planned(exchange, topology=topology)
    found, w, b = run(triggered(), plain(), schedule)
    nodes = [textbook.Sender(w, b, 0.08) for _ in range(5)]
    compare(found, nodes, schedule)
    compare_withheld(found, nodes, schedule)


@pytest.mark.float64
@pytest.mark.parametrize("trigger", [None, 0.4])
def test_choco(trigger):
    """With a trigger it is SPARQ-SGD."""
    schedule, keep = planned("dpsgd", topology="complete"), 4
    peer = choco(nothing_stays, topk(ratio=keep / 18), gamma=0.3, trigger=trigger)
    found, w, b = run(peer, plain(), schedule)
    nodes = [textbook.Choco(w, b, keep, 0.3, trigger or 0.0) for _ in range(5)]
    compare(found, nodes, schedule, who_sends=True)
    if trigger is not None:
        compare_withheld(found, nodes, schedule)


def test_choco_compresses_with_random_numbers_that_no_local_step_draws():
    seen = []

    def kept(key, x):
        seen.append(jax.random.key_data(key).tolist())
        return exact.compress(key, x)

    exact = sign()
    peer, key = choco(nothing_stays, exact._replace(compress=kept)), jax.random.key(4)
    row = peer.init(MODEL.init(jax.random.key(1)))
    peer.push(row, row.params, Event(key, jnp.int32(0)))
    training = [key, *(jax.random.fold_in(key, k) for k in range(50))]
    assert len(seen) == 1 and seen[0] not in [jax.random.key_data(one).tolist() for one in training]


def test_a_copy_from_which_nothing_comes_stays_and_still_counts_with_its_weight():
    """Node i mixes a full inbox of weight 1/2, and then an empty one, as its neighbour has crashed."""
    peer, two, event = (
        choco(nothing_stays, topk(ratio=1.0), gamma=0.4),
        {"w": jnp.ones((1, 2))},
        Event(KEY, jnp.ones(())),
    )
    row, sent, _ = peer.push(peer.init(two), two, event)  # its copy is now 2
    q = jax.tree.map(lambda leaf: 3 * leaf[0] if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0], sent)  # 6
    for inbox in (lambda row: peer.add(peer.open(row), row, q, jnp.asarray(0.5)), peer.open):
        before = row.params["w"]
        row = peer.wake(row, inbox(row), event)
        np.testing.assert_allclose(row.params["w"], before + 0.4 * 0.5 * (6 - 2), rtol=1e-6)


def told(**given):
    """``(texts of the warnings, experiment)`` of settings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experiment = prepare(Settings(model="logistic", steps=1, **given))
    return [str(one.message) for one in caught], experiment


@pytest.mark.parametrize("disturbed", [{}, {"faults": "drop:probability=0.3"}])
def test_choco_warns_of_plans_in_which_copies_differ(disturbed):
    said, _ = told(method="choco", clients=4, updates=40, delay="exponential", topology="ring", **disturbed)
    assert bool(said) == bool(disturbed) and all("nodes keep different copies" in text for text in said)


def test_a_node_without_mass_trains_with_plain_steps():
    """As a late one that starts with mass 0, before it has heard of anyone."""
    peer, step = sgp(nothing_stays), {"w": jnp.full((1, 2), 0.5)}
    row = peer.init({"w": jnp.ones((1, 2))})
    for mass, want in ((0.0, 1.5), (0.25, 3.0)):
        np.testing.assert_allclose(peer.push(row, step, Event(KEY, jnp.asarray(mass)))[0]["w"], want)


@pytest.mark.parametrize(
    ("method", "spread", "warns"),
    [("sgp", 1, False), ("sgp@push_sum", 0.1, False), ("sgp@push_sum", 1, True), ("osgp@push_sum", 1, True),
     ("async_dfedavg@push_sum", 1, False)],
)  # fmt: skip
def test_steps_divided_by_hardly_any_mass_are_warned_of(method, spread, warns):
    """Of nodes much faster than others, which give their mass away; what nobody divides by may be small."""
    given = {"topology": "gossip:receivers=3", "delay": f"lognormal:heterogeneity={spread}"}
    said, experiment = told(method=method, dataset="synthetic", clients=8, updates=400, **given)
    assert any("divided by its push-sum mass" in text for text in said) == warns
    assert (experiment.schedule.mass.min() < 1e-3) == ("push_sum" in method and spread == 1)
