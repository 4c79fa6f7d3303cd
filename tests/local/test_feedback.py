"""Compressed uploads: residuals are kept, do not change while a client is away, and telescope."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.compress import COMPRESSORS, encode, identity, on_tree, scaled_sign, sign, topk, topk_qsgd
from fedjax_async.local import keeping, local_training, run_job
from fedjax_async.local.feedback import ef21, feedback, grouping, sent
from fedjax_async.local.private import wrapping
from fedjax_async.types import ClientAlgorithm, ClientData, Message
from tests.compress import textbook
from tests.local.made_up import MODEL, client_data, message, start_params
from tests.refusals import refusals

N, D, ROUNDS = 6, 30, 200
NO_DATA = ClientData(*(jnp.zeros(()) for _ in range(5)))


def drawing(drift=0.0) -> ClientAlgorithm:
    """A client that uploads random numbers around ``drift`` and counts its jobs."""

    def finish(work, message, state):
        key, params = work
        noise = jax.random.normal(key, (D,), params["x"].dtype)
        return {"x": drift + noise, "y": jnp.ones(2, params["x"].dtype)}, state + 1

    return ClientAlgorithm(
        lambda params: jnp.int32(0),
        lambda key, message, state, data: (key, message.params),
        lambda work, k, message, data: work,
        finish,
    )


def compiled(algorithm, params):
    """``job(key, state) -> (upload, state)`` of no local steps."""

    @jax.jit
    def job(key, state):
        return run_job(algorithm, key, Message(params), state, NO_DATA, 0)

    return job


def zeros(dtype=jnp.float32):
    return {"x": jnp.zeros(D, dtype), "y": jnp.zeros(2, dtype)}


def whole(tree):
    return np.concatenate([tree["x"], tree["y"]])


def test_a_part_of_an_upload_is_compressed_whole_and_by_itself():
    params = {"layer": zeros(), "output": zeros()}
    group = grouping("whole", {"delta": params, "control": params}, params)
    found = {(path[0].key, group(path)) for path, _ in jax.tree.leaves_with_path({"delta": params, "control": params})}
    assert len(found) == len({name for name, _ in found}) == len({part for _, part in found}) == 2


@pytest.mark.float64
@pytest.mark.slow_cases("whole", "tensor")
@pytest.mark.parametrize(
    ("compressor", "per"),
    [(scaled_sign(), "layer"), (topk(ratio=0.1), "whole"), (topk_qsgd(ratio=0.2, levels=1), "tensor")],
    ids=["layer", "whole", "tensor"],
)
def test_sums_telescope_over_two_hundred_asynchronous_rounds(compressor, per):
    """Decoded + residual = true for each client, whoever takes part in a round; exact up to rounding."""
    params = zeros(jnp.float64)
    plain, wrapped = drawing(0.3), feedback(drawing(0.3), compressor, per=per)
    true_job, job = compiled(plain, params), compiled(wrapped, params)
    rng, states = np.random.default_rng(0), [wrapped.init(params) for _ in range(N)]
    total, decoded = np.zeros((N, D + 2)), np.zeros((N, D + 2))
    likely, largest = rng.uniform(0.05, 0.9, N), 0.0
    for t in range(ROUNDS):
        for i in np.flatnonzero(rng.random(N) < likely):
            key = jax.random.fold_in(jax.random.key(i), t)
            upload, states[i] = job(key, states[i])
            decoded[i] += whole(upload)
            total[i] += whole(true_job(key, jnp.int32(0))[0])
            left = whole(states[i].kept)
            np.testing.assert_allclose(decoded[i] + left, total[i], rtol=0, atol=1e-11)
            largest = max(largest, np.abs(left).max())
    assert 1 < largest < 200  # compression errors occurred, and were made up later
    assert [int(state.inner) for state in states] == [int(n) for n in np.round(total[:, -1])]


def test_uploads_and_what_is_kept_are_their_recursions():
    """Two jobs of the same delta; without feedback nothing is kept."""
    params, key = zeros(), jax.random.key(0)
    delta = np.append(jax.random.normal(key, (D,)), [1, 1]).astype(np.float32)
    first = textbook.topk(delta, 4).astype(np.float32)
    second = textbook.topk(2 * delta - first, 4).astype(np.float32)
    moved = first + textbook.topk(delta - first, 4).astype(np.float32)
    for wrap, uploads, left in (
        (feedback, (first, second), 2 * delta - first - second),
        (partial(feedback, error_feedback=False), (first, first), None),
        (ef21, (first, moved), moved),
    ):
        wrapped = wrap(drawing(), topk(ratio=0.1))
        job, state = compiled(wrapped, params), wrapped.init(params)
        for want in uploads:
            upload, state = job(key, state)
            np.testing.assert_allclose(whole(upload), want, rtol=1e-6)
        assert int(state.inner) == 2 and (left is not None or state.kept == ())
        if left is not None:
            np.testing.assert_allclose(whole(state.kept), left, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["identity", "sign", "scaled_sign", "topk"])
def test_the_bits_of_an_upload_are_its_bytes(name):
    """Compressing the upload again changes nothing."""
    params = zeros()
    wrapped = feedback(drawing(), COMPRESSORS[name](), per="tensor")
    upload, state = compiled(wrapped, params)(jax.random.key(2), wrapped.init(params))
    bits, values = (int(sent(state)[name]) for name in ("bits", "values_bits"))
    wire = on_tree(COMPRESSORS[name](), params, group=lambda path: path)
    payload = jax.jit(wire.compress)(jax.random.key(0), upload)
    assert bits == 8 * len(encode(payload)) and 0 < values < bits <= 8 * 150


def test_random_rounding_has_other_random_numbers_than_training():
    params, key, compressor = zeros(), jax.random.key(3), COMPRESSORS["qsgd"](levels=2)
    delta, _ = compiled(drawing(), params)(key, jnp.int32(0))
    wrapped = feedback(drawing(), compressor)
    upload, _ = compiled(wrapped, params)(key, wrapped.init(params))
    wire = on_tree(compressor, params, group=grouping("whole", params, params))
    of_training = jax.jit(lambda: wire.decompress(wire.compress(key, delta)))()
    assert all(np.abs(whole(upload) - whole(other)).max() > 0.1 for other in (of_training, delta))


def test_uploads_that_are_not_finite_can_be_refused():
    """Signs of NaN are finite, but the decoded upload is not, so the engine keeps the previous state."""
    params = zeros()
    for wrap in (feedback, ef21):
        wrapped = wrap(drawing(np.nan), sign())
        upload, _ = compiled(wrapped, params)(jax.random.key(2), wrapped.init(params))
        assert not np.isfinite(whole(upload)).any()


def test_running_statistics_have_no_feedback():
    """Where a variance of 1 shall become 0.5, what was not sent of it is not added to what is sent later."""
    plain, params = drawing(), {"params": zeros(), "batch_stats": {"var": jnp.ones(2)}}

    def finish(work, message, state):
        upload, state = plain.finish((work[0], work[1]["params"]), message, state)
        return {"params": upload, "batch_stats": {"var": jnp.full(2, -0.5)}}, state

    for wrap in (feedback, ef21):
        wrapped = wrap(plain._replace(finish=finish), topk(ratio=0.05))
        job, state = compiled(wrapped, params), wrapped.init(params)
        for n in range(8):
            upload, state = job(jax.random.key(n), state)
            assert {*np.unique(upload["batch_stats"]["var"])} <= {0.0, -0.5}
            np.testing.assert_array_equal(state.kept["batch_stats"]["var"], 0.0)
        assert np.abs(whole(state.kept["params"])).max() > 1


# --- around real training ---------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [feedback, ef21])
def test_with_the_identity_nothing_changes_and_nothing_is_left(wrap):
    own = local_training(MODEL, optimizer=optax.sgd(0.1))
    who, key = wrap(own, identity()), jax.random.key(0)
    given, state = jax.jit(lambda: run_job(who, key, message(), who.init(start_params()), client_data(), 3))()
    plain, _ = jax.jit(lambda: run_job(own, key, message(), (), client_data(), 3))()
    jax.tree.map(np.testing.assert_array_equal, given, plain)
    kept = given if wrap is ef21 else jax.tree.map(jnp.zeros_like, given)
    jax.tree.map(np.testing.assert_array_equal, state.kept, kept)


test_bad_options_are_refused = refusals(
    (lambda: feedback(drawing(), topk(), per="layers"), "per = 'layers': unknown; did you mean 'layer'"),
    (lambda: ef21(drawing(), topk(), per="layers"), "per = 'layers': unknown; did you mean 'layer'"),
    (lambda: feedback(drawing(), topk(), error_feedback=1.5), "error_feedback = 1.5: must be one of True, False"),
)


def test_what_is_private_passes_by():
    """Private leaves are neither counted nor compressed, and leave no residual."""
    is_y = ("y",).__eq__
    for wrap in (feedback, ef21):
        wrapped = wrap(keeping(drawing(), is_y), sign(), private=is_y)
        upload, state = compiled(wrapped, zeros())(jax.random.key(1), wrapped.init(zeros()))
        np.testing.assert_array_equal(upload["y"], [0, 0])
        assert [np.shape(leaf) for leaf in jax.tree.leaves(state.kept)] == [np.shape(upload["x"])]
        assert state.kept["y"] is None and set(np.abs(upload["x"])) == {1}
        assert {name: int(value) for name, value in wrapped.info(state).items()}["values_bits"] == D
        assert wrapping(wrapped).info((state, ())).keys() == wrapped.info(state).keys()
