"""Weight clustering with pruning: compared with a plain k-means in NumPy; identities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import compress
from fedjax_async.base import tree
from fedjax_async.compress import Centroids, Dense, from_payloads, payloads, values_bits, wcp
from fedjax_async.compress.clustering import REFERENCES, cluster, nearest, per_cluster, random_entries
from fedjax_async.models import make
from tests.compress import textbook
from tests.refusals import refusals

KEY = jax.random.key(7)
lookup, random_tables = jax.jit(compress.lookup), jax.jit(compress.random_tables, static_argnums=1)
TREE = {
    "conv": {"kernel": jnp.zeros((3, 3, 2, 4)), "bias": jnp.ones(4)},
    "dense": {"kernel": jnp.zeros((5, 7)), "bias": jnp.arange(7.0)},
    "norm": {"scale": jnp.ones(4)},
}  # fmt: skip


def model(kind="gaussian", seed=0):
    shapes = {"conv": (3, 3, 2, 4), "dense": (5, 7)}
    drawn = {
        name: jnp.asarray(np.reshape(textbook.vector(kind, int(np.prod(shape)), seed + i), shape))
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {name: leaves | ({"kernel": drawn[name]} if name in drawn else {}) for name, leaves in TREE.items()}


@functools.cache
def encoded(k, reference="paper"):
    """``(params, init, key, max_iter, tolerance) -> Clustered``, compiled."""

    def run(params, init, key, max_iter, tolerance):
        return wcp(params, k, init=init, key=key, max_iter=max_iter, tolerance=tolerance, reference=reference)

    compiled = jax.jit(run)
    return lambda params, init, key, max_iter=3, tolerance=0.05: compiled(params, init, key, max_iter, tolerance)


def test_leaves_are_clustered_by_the_stated_rule():
    params = model()
    clustered = encoded(40)(params, None, KEY)
    for layer in ("conv", "dense"):
        kernel, index = params[layer]["kernel"], clustered.indices[layer]["kernel"]
        assert clustered.tables[layer]["kernel"].shape == (40,)
        assert index.dtype == jnp.uint8 and index.shape == kernel.shape
        assert clustered.rest[layer]["kernel"] is None and clustered.tables[layer]["bias"] is None
    decoded, kept = lookup(clustered), compress.mask(clustered)
    assert jax.tree.map(jnp.shape, decoded) == jax.tree.map(jnp.shape, params)
    np.testing.assert_array_equal(decoded["dense"]["bias"], params["dense"]["bias"])
    np.testing.assert_array_equal(decoded["norm"]["scale"], params["norm"]["scale"])
    np.testing.assert_array_equal(kept["conv"]["kernel"], np.asarray(decoded["conv"]["kernel"]) != 0)
    assert kept["norm"]["scale"].all() and jax.tree.structure(kept) == jax.tree.structure(params)
    assert compress.is_weight(("a",), jnp.ones((2, 2))) and not compress.is_weight(("a",), jnp.ones((2, 2), jnp.int32))


@settings(max_examples=30)
@given(kind=st.sampled_from(list(textbook.MAKERS)), seed=st.integers(0, 999), k=st.sampled_from([1, 40]))
def test_identities(kind, seed, k):
    params = model(kind, seed)
    clustered = encoded(k)(params, None, jax.random.key(seed))
    once = lookup(clustered)
    again = encoded(k)(once, clustered.tables, KEY, tolerance=0.0)
    for layer in ("conv", "dense"):
        table, x = np.asarray(clustered.tables[layer]["kernel"]), np.asarray(params[layer]["kernel"])
        assert table[0] == 0 and (np.diff(table[1:]) >= 0).all()
        x_hat = np.asarray(once[layer]["kernel"])
        np.testing.assert_array_equal(x_hat, lookup(again)[layer]["kernel"])
        distance = np.abs(x[..., None] - table).min(axis=-1)
        np.testing.assert_allclose(np.abs(x - x_hat), distance, atol=1e-6)


# The released code subtracts the mean: numbers that are equal would differ by rounding.
CASES = [("paper", kind) for kind in textbook.MAKERS] + 3 * [("released", "gaussian"), ("released", "heavy tails")]


@pytest.mark.float64
@settings(max_examples=80)
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 999),
    k=st.sampled_from([2, 9]),
    max_iter=st.sampled_from([1, 3, 20]),
    tolerance=st.sampled_from([0.0, 0.05, 0.4]),
    start=st.sampled_from(["zero in slot 0", "a sorted table", "equal centroids"]),
)
def test_against_a_plain_kmeans(case, seed, k, max_iter, tolerance, start):
    """Slot 0 of a table to start from has no effect, but in the released code."""
    (reference, kind), rng = case, np.random.default_rng(seed)
    x, table, key = np.float64(textbook.vector(kind, 60, seed)), np.sort(rng.normal(size=k)), jax.random.key(seed)
    if start == "zero in slot 0":
        table[0] = 0.0
    if start == "equal centroids":
        table[1 : 1 + k // 2] = table[1]
    params = {"kernel": jnp.asarray(x.reshape(12, 5))}
    found = encoded(k, reference)(params, {"kernel": jnp.asarray(table)}, key, max_iter, tolerance)
    layer, options = jax.random.fold_in(key, 2**31), {"max_iter": max_iter, "tolerance": tolerance}

    def drawn(t):
        return np.asarray(random_entries(jax.random.fold_in(layer, t), jnp.asarray(x - x.mean()), k))

    if reference == "paper":
        x_hat, want = textbook.weight_clusters(x, table[1:], **options)
    else:
        want, index = textbook.released_clusters(x, table, drawn=drawn, **options)
        x_hat = want[index]
    np.testing.assert_allclose(found.tables["kernel"], want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lookup(found)["kernel"].ravel(), x_hat, rtol=1e-12, atol=1e-14)


def test_nodes_that_cluster_only_where_they_have_heard_something_can_be_vmapped():
    """JAX's AssertionError ended runs of pushcen_released with batching="vmap" on a CPU."""
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 12)))
    start, keys = jnp.asarray([-1.0, 0.0, 5.0, 6.0]), jax.random.split(KEY, 3)  # empty clusters, which are refilled

    def one(heard, x, key):
        options = {"max_iter": 3, "tolerance": 0.0, "reference": REFERENCES["released"]}
        return jax.lax.cond(heard, lambda: cluster(x, start, key=key, **options)[0], lambda: start)

    heard = jnp.array([True, False, True])
    alone = [one(*given) for given in zip(heard, x, keys)]
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(heard, x, keys), np.stack(alone), rtol=1e-6)


def test_a_warm_start_of_the_released_code_by_hand():
    """Slot 0 is -1 in the first assignment, and zero from the first update on."""
    params, start = {"w": jnp.array([[-1.1, -0.9, -0.3], [0.1, 1.0, 1.2]])}, {"w": jnp.array([-1.0, 0.0, 1.0])}
    # All three centroids take part; their means are -1, -0.1 and 1.1. Then slot 0 becomes zero, and slot 1 has the
    # three lowest entries, of mean -2.3 / 3. Then -0.3 is nearer to zero, and the other two remain.
    for max_iter, table in (1, [-0.1, 0, 1.1]), (2, [-2.3 / 3, 0, 1.1]), (3, [-1, 0, 1.1]):
        np.testing.assert_allclose(encoded(3, "released")(params, start, KEY, max_iter).tables["w"], table, atol=1e-6)


def test_equal_centroids_send_all_entries_to_the_lower_one():
    kernel = jnp.array([[-2.0, -1.0], [1.0, 2.0]])
    found = encoded(3)({"kernel": kernel}, {"kernel": jnp.array([0.0, 1.0, 1.0])}, None, 1)
    np.testing.assert_array_equal(found.tables["kernel"], [0, 1, 1.5])  # the higher one is empty and keeps its value
    refilled = encoded(3, "released")({"kernel": kernel}, {"kernel": jnp.array([-1.0, 1.0, 1.0])}, KEY, 1)
    (drawn,) = set(refilled.tables["kernel"].tolist()) - {0.0, 1.5}
    assert drawn in {-2, -1, 1, 2}  # an empty one gets a random entry
    index, value = nearest(jnp.array([-3.0, -0.1, 0.0, 0.1, 0.6, 9.0]), jnp.array([-1.0, 0, 0, 0, 1, 1]))
    np.testing.assert_array_equal(index, [0, 1, 1, 1, 4, 4])
    np.testing.assert_array_equal(value, [-1, 0, 0, 0, 1, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_layer_that_is_not_finite_decodes_to_no_finite_number(bad):
    for k in (1, 40):
        params = model()
        params["conv"]["kernel"] = params["conv"]["kernel"].at[0, 1, 1, 2].set(bad)
        clustered = encoded(k)(params, None, KEY)
        assert all(np.isnan(part["conv"]["kernel"]).all() for part in (clustered.tables, lookup(clustered)))
        assert np.isfinite(lookup(clustered)["dense"]["kernel"]).all()
    arrived = from_payloads(payloads(clustered), params).tables  # without slot 0, which is then not zero
    assert np.isnan(arrived["conv"]["kernel"]).all() and arrived["dense"]["kernel"][0] == 0
    with pytest.raises(ValueError, match="must be finite"):
        compress.encode(payloads(clustered))
    init = encoded(40)(model(), None, KEY).tables
    init["dense"]["kernel"] = init["dense"]["kernel"].at[2].set(bad)
    assert np.isnan(encoded(40)(model(), init, KEY).tables["dense"]["kernel"]).all()


def test_magnitudes_do_not_matter():
    params = model()
    for scale in np.float32([1e-30, 1e30]):
        far = jax.tree.map(lambda leaf, scale=scale: leaf * scale, params)
        one, other = (encoded(40)(p, None, KEY, 20, 0.0).tables["conv"]["kernel"] for p in (params, far))
        np.testing.assert_allclose(other, one * scale, rtol=1e-5)


def test_bfloat16():
    params = {"kernel": model()["conv"]["kernel"].astype("bfloat16")}
    clustered = encoded(4)(params, None, KEY)
    once = lookup(clustered)
    assert once["kernel"].dtype == jnp.bfloat16
    x, x_hat, table = (np.float32(part["kernel"]) for part in (params, once, clustered.tables))
    np.testing.assert_allclose(np.abs(x - x_hat), np.abs(x[..., None] - table).min(axis=-1), atol=0.02)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_batches_of_nodes(backend, monkeypatch):
    """Nodes times tolerances, with one start: on a CPU a loop over the nodes, on an accelerator one batched loop."""
    rows = [model(seed=10 * i) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    start, tolerances = random_tables(rows[0], 4, KEY), jnp.array([0.0, 0.1, 0.9])
    alone = [[encoded(4)(row, start, None, 9, tolerance) for row in rows] for tolerance in tolerances]

    def run(params, tolerance):
        return wcp(params, 4, init=start, max_iter=9, tolerance=tolerance)

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    traced = jax.jit(jax.vmap(jax.vmap(run, in_axes=(0, None)), in_axes=(None, 0))).trace(stacked, tolerances)
    assert ("scan" in str(traced.jaxpr)) == (backend == "cpu")
    batched = traced.lower().compile()(stacked, tolerances)
    rounding = {"rtol": 0} if backend == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
    for j, i in np.ndindex(3, 3):
        have, want = one_of(one_of(batched, j), i), alone[j][i]
        jax.tree.map(np.testing.assert_array_equal, have.indices, want.indices)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **rounding), have, want)
    nodes = one_of(batched, 1)
    jax.tree.map(np.testing.assert_array_equal, one_of(jax.vmap(lookup)(nodes), 2), lookup(one_of(nodes, 2)))


def one_of(stacked, i):
    return jax.tree.map(lambda leaf: leaf[i], stacked)


# --- messages ---------------------------------------------------------------------------------


def message_of(params, k, **options):
    return jax.eval_shape(lambda params: payloads(wcp(params, k, key=KEY, **options)), params)


def test_sizes_are_those_of_the_paper():
    """Eq. 13; with ten neighbours Table 2 has 10.27 MB for whole models and 1.62 MB for K = 32."""
    params = jax.eval_shape(make("lenet5_cifar").init, KEY)
    leaves = jax.tree.leaves(params)
    scalars, weights = (sum(leaf.size for leaf in leaves if leaf.ndim >= axes) for axes in (1, 2))
    assert (scalars, weights, 4 * scalars) == (256_830, 256_520, 1_027_320)
    for k, width, kilobytes in [(32, 5, 162.2), (16, 4, 129.8), (33, 6, 194.3)]:
        message = message_of(params, k)
        bits = 32 * (k - 1) * 5 + width * weights + 32 * (scalars - weights)
        assert int(values_bits(message)) == bits and round(bits / 8000, 1) == kilobytes
        assert bits <= 8 * int(compress.wire_bytes(message)) <= bits + 8 * 64


@pytest.mark.slow_cases("200-76.65")
@pytest.mark.parametrize(("classes", "megabytes"), [(100, 76.33), (200, 76.65)])
def test_resnets_have_the_sizes_of_table_2(classes, megabytes):
    """Convolutions of shortcuts are sent unclustered; BatchNorm's scales and biases count, its statistics do not."""
    model = make("resnet18:variant=full,norm=local", num_classes=classes, input_shape=(64, 64, 3))
    shared = tree.split(jax.eval_shape(model.init, KEY), model.private)[0]
    size = 10 * int(values_bits(message_of(shared, 32, chosen=compress.is_weight_released))) / 8e6
    assert round(size, 2) == megabytes


def test_messages_arrive():
    params = model()
    for reference in ("paper", "released"):
        clustered = encoded(40 if reference == "paper" else 5, reference)(params, None, KEY)
        message = payloads(clustered)
        data = compress.encode(message)
        assert len(data) == int(compress.wire_bytes(message))
        arrived = from_payloads(compress.decode(data, size=[leaf.size for leaf in jax.tree.leaves(params)]), params)
        jax.tree.map(np.testing.assert_array_equal, lookup(arrived), lookup(clustered))
        if reference == "paper":
            jax.tree.map(np.testing.assert_array_equal, arrived, clustered)
    other = params | {"norm": {"scale": jnp.ones(5)}}
    with pytest.raises(ValueError, match=r"message = 4: must be of shape \(5,\)"):
        from_payloads(message, other)
    with pytest.raises(ValueError, match="message = '4 payloads': must be 5"):
        from_payloads(message[1:], params)
    with pytest.raises(ValueError, match="message = 'a Dense': must be Centroids"):
        from_payloads((message[0], Dense(np.zeros(72, np.float32)), *message[2:]), params)


def test_leaves_that_stay_at_home():
    params = model()
    clustered = encoded(4)(tree.split(params, lambda path: path[0] == "norm")[0], None, KEY)
    assert lookup(clustered)["norm"]["scale"] is None
    mine = params | {"norm": {"scale": jnp.full(4, 3.0)}}
    np.testing.assert_array_equal(lookup(clustered, mine)["norm"]["scale"], mine["norm"]["scale"])


# --- a compressor of uploads --------------------------------------------------------------------


@settings(max_examples=40)
@given(kind=st.sampled_from(list(textbook.MAKERS)), seed=st.integers(0, 999), size=st.sampled_from([33, 400]))
def test_no_entry_changes_by_more_than_its_magnitude(kind, seed, size):
    x = textbook.vector(kind, size, seed)
    x_hat = np.asarray(compressed(size)(jax.random.key(seed), x))
    assert (np.abs(x - x_hat) <= np.abs(x) * (1 + 1e-6)).all()


@functools.cache
def compressed(size, **options):
    compressor = compress.nearest_centroids(k=8, **options)
    return jax.jit(lambda key, x: compressor.decompress(compressor.compress(key, x)))


@pytest.mark.parametrize(("k", "longest"), [(32, 36), (28, 32)])  # 27 numbers and 5 * 32 bits are just 32 numbers
def test_short_vectors_are_sent_as_they_are(k, longest):
    wire, sizes = compress.nearest_centroids(k=k), (longest, longest + 1)
    kinds = [type(jax.eval_shape(wire.compress, KEY, jax.ShapeDtypeStruct((d,), jnp.float32))) for d in sizes]
    assert kinds == [Dense, Centroids]


def test_a_random_start_has_a_zero_and_other_entries_in_each_layer_even_in_equal_ones():
    params = model()
    tables = random_tables(params, 40, KEY)
    table, x = np.asarray(tables["conv"]["kernel"]), np.asarray(params["conv"]["kernel"])
    assert table[0] == 0 and (np.diff(table[1:]) > 0).all() and np.isin(table[1:], x).all()
    jax.tree.map(np.testing.assert_array_equal, encoded(40)(params, tables, KEY), encoded(40)(params, None, KEY))
    layer = params["dense"]["kernel"]
    equal = random_tables({"first": layer, "second": layer}, 8, KEY)
    assert not np.array_equal(equal["first"], equal["second"])


test_bad_options_are_refused = refusals(
    (0, {"key": KEY}, "k = 0: must be a whole number from 1 to 256"),
    (257, {"key": KEY}, "k = 257"), (4, {}, "key = None: must be a random key"),
    (4, {"key": KEY, "tolerance": -1}, "tolerance = -1"),
    (4, {"key": KEY, "max_iter": 0}, "max_iter = 0: must be a whole number from 1"),
    (4, {"key": KEY, "reference": "printed"}, "reference = 'printed': unknown"),
    by=lambda k, options: wcp(model(), k, **options),
)  # fmt: skip


def test_off_a_cpu_clusters_are_summed_without_a_scatter_whose_order_a_gpu_would_not_fix(monkeypatch):
    rank, x = jnp.asarray([0, 2, 2, 0, 1, 2], jnp.int32), jnp.asarray([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    usual = per_cluster(rank, x, 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for found in (usual, per_cluster(rank, x, 4)):
        assert [leaf.tolist() for leaf in found] == [[9.0, 16.0, 38.0, 0.0], [2.0, 1.0, 3.0, 0.0]]
    assert "scatter" not in str(jax.make_jaxpr(lambda rank, x: per_cluster(rank, x, 4))(rank, x))
