"""Curve co-training: against float64 NumPy written from Algorithm 2, and its identities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.compress import topk
from fedjax_async.local import DECAYS, FEEDBACKS, OPTIMIZERS, curve_training, keeping, local_training, run_job
from fedjax_async.local.curve import _CONTROL, _after, _alternate, _share
from fedjax_async.local.ditto import with_personal_model
from fedjax_async.server.floco import floco_client
from fedjax_async.server.scaffold import scaffold_client
from fedjax_async.types import Message
from tests.geometry.textbook import bezier, polygon
from tests.local.made_up import MODEL, SIZES, client_data, flat, groups, slope, start_params, start_vector
from tests.local.textbook import Adam
from tests.refusals import refusals

BATCH, LR, CONTROL_LR, MU = 8, 0.05, 0.03, 0.4
KEY = jax.random.key(7)
STEP = np.random.default_rng(4).normal(size=flat(start_params()).shape)  # Theta^tau - Theta^{tau+1}


def unflat(vector):
    _, back = jax.flatten_util.ravel_pytree(start_params())
    return back(jnp.asarray(vector))


@functools.cache
def made(**options):
    options = {"metric": "euclidean", "warm": "off", "proximal": MU, "control_lr": CONTROL_LR} | options
    return curve_training(MODEL, optimizer=optax.adam(LR), batch_size=BATCH, **options)


@functools.partial(jax.jit, static_argnums=0)
def trained(client, state, message, data, steps):
    return run_job(client, KEY, message, state, data, steps)


def job(client, steps, *, extra=(), who=0):
    """``(delta, offset)`` of a job, as vectors."""
    upload, _ = trained(client, (), Message(start_params(), extra, jnp.int32(0)), client_data(who), steps)
    inner = jax.tree.leaves(upload.offset)[0].ndim - jax.tree.leaves(upload.params)[0].ndim
    rows = [jax.tree.map(lambda leaf, j=j: leaf[j], upload.offset) for j in range(len(upload.offset["b"]) * inner)]
    return flat(upload.params), np.stack(list(map(flat, rows))) if inner else flat(upload.offset)


def by_hand(steps, *, order="alternate", epochs=5, gamma=1.0, moments=None, who=0, floor=1.0, curve=bezier, inner=1):
    """Algorithm 2, epoch by epoch; ``moments``: those at the start, ``floor``: of a decay within the job.

    ``curve(points, s)``: another curve than the quadratic one, through ``inner`` points beside its ends.
    """
    batches, control_key = -(-SIZES[who] // BATCH), jax.random.fold_in(KEY, _CONTROL)

    def bent(v, chord):
        square = chord @ chord
        return v - gamma * (v @ chord) / square * chord if square > 0 else v

    start = theta = start_vector()
    dphi = np.zeros((inner, len(start)))
    end = Adam(LR, **(moments or {}))
    control_steps = steps if order == "alternate" else epochs * batches
    ends, controls = groups(KEY, who, BATCH, steps), groups(control_key, who, BATCH, control_steps)

    def train_end(ks):
        nonlocal theta
        for k in ks:
            theta = end.step(theta, slope(theta, ends[k]) + MU * (theta - start), 1 - (1 - floor) * k / steps)

    def train_control(ks):
        nonlocal dphi
        adam, chord = Adam(CONTROL_LR), theta - start
        for k in ks:
            s = float(jax.random.uniform(jax.random.fold_in(control_key, k), dtype=jnp.float64))
            shares = np.arange(1, inner + 1) / (inner + 1)
            phi = [start + share * (theta - start) + bent(v, chord) for share, v in zip(shares, dphi, strict=True)]
            at = curve([start, *phi, theta], s)
            unit = [[float(j == i) for j in range(-1, inner + 1)] for i in range(inner)]  # weights of single points
            turn = np.stack([curve(np.array(e), s) * bent(slope(at, controls[k]), chord) for e in unit])
            dphi = adam.step(dphi, turn, 1 - (1 - floor) * k / control_steps)

    if order == "after":
        train_end(range(steps))
        train_control(range(control_steps))
    else:
        for low in range(0, steps, batches):
            train_end(range(low, min(low + batches, steps)))
            train_control(range(low, min(low + batches, steps)))
    offsets = np.stack([bent(v, theta - start) for v in dphi])
    return theta - start, offsets[0] if inner == 1 else offsets


AFTER, FALLING, CHAIN = (
    {"order": "after", "control_epochs": 1},
    {"scale": DECAYS["linear"](floor=0.25)},
    {"curve": polygon},
)
CASES = {  # steps, options of the client, and what they mean by hand
    "two epochs": (6, {}, {}),
    "an epoch and a part": (4, {"gamma": 0.3} | FALLING, {"gamma": 0.3, "floor": 0.25}),
    "a part of an epoch": (2, {"gamma": 0.0}, {"gamma": 0.0}),
    "one batch an epoch": (3, {}, {"who": 1}),
    "after, fewer": (4, AFTER | FALLING, {"order": "after", "epochs": 1, "floor": 0.25}),
    "after, more": (2, {"order": "after"}, {"order": "after"}),
    "cubic": (6, {"curve": "cubic", "gamma": 0.3}, {"inner": 2, "gamma": 0.3}),
    "chain": (4, {"curve": "chain", "bends": 3}, CHAIN | {"inner": 3}),
    "chain, one bend": (4, {"curve": "chain"} | AFTER, CHAIN | {"order": "after", "epochs": 1}),
}


@pytest.mark.float64
@pytest.mark.parametrize(("steps", "options", "how"), CASES.values(), ids=CASES)
def test_a_job_is_algorithm_2(steps, options, how):
    have = job(made(**options), steps, who=how.get("who", 0))
    for ours, theirs in zip(have, by_hand(steps, **how), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)
        assert np.abs(theirs).max() > 0.02


def test_the_position_on_the_curve_is_no_draw_of_the_model():
    """A model may draw from its key directly. From a start of zero, the first entry at s is s times that of the end."""
    seen = []

    def apply(params, x, key):
        jax.debug.callback(lambda *each: seen.append(each), jax.random.uniform(key), params["w"][0, 0])
        return MODEL.apply(params, x)

    options = {"batch_size": BATCH, "warm": "off", "control_lr": 1e-9}
    client = curve_training(MODEL._replace(apply=apply), optimizer=optax.sgd(LR), **options)
    start = Message(jax.tree.map(jnp.zeros_like, start_params()))
    upload, _ = run_job(client, KEY, start, (), client_data(), 2)
    jax.effects_barrier()
    drawn, at = np.array(seen[2:], float).T
    assert len(drawn) == 2 and not np.isclose(drawn, at / float(upload.params["w"][0, 0]), atol=1e-3).any()


alternate, share, after = map(jax.jit, (_alternate, _share, _after))


def first(count, columns):
    """The first ``count`` entries of each column, broadcast to one length."""
    return [np.broadcast_to(column, (max(map(np.size, columns)),))[:count] for column in columns]


@settings(max_examples=30)
@given(steps=st.integers(1, 40), per_epoch=st.integers(1, 12))
def test_every_step_of_both_is_taken_once_and_the_control_point_follows_the_end(steps, per_epoch):
    end, number, fresh = first(2 * steps, alternate(np.arange(80), np.int32(steps), np.int32(per_epoch))[:3])
    for which in (end, ~end):
        np.testing.assert_array_equal(number[which], np.arange(steps))
    done = np.cumsum(end)[~end]  # the end has finished its epoch and not begun the next one
    np.testing.assert_array_equal(done, np.minimum((number[~end] // per_epoch + 1) * per_epoch, steps))
    np.testing.assert_array_equal(fresh, number % per_epoch == 0)


@settings(max_examples=30)
@given(steps=st.integers(1, 40), extra=st.integers(1, 400))
def test_local_steps_share_the_gradients_of_a_job(steps, extra):
    low, high = first(steps, share(np.arange(40), np.int32(steps), np.int32(extra)))
    assert low[0] == 0 and high[-1] == steps + extra
    np.testing.assert_array_equal(low[1:], high[:-1])
    assert np.ptp(high - low) <= 1
    end, number, fresh = first(steps + extra, after(np.arange(440), np.int32(steps), np.int32(1))[:3])
    np.testing.assert_array_equal(end, np.arange(steps + extra) < steps)
    np.testing.assert_array_equal(number, [*range(steps), *range(extra)])
    assert not fresh.any()


def test_work_is_counted_in_gradients():
    """One a step, one more for the control point (or its own epochs), one more for a sharpness-aware end."""
    steps, examples = np.array([6, 4]), np.array([23, 8])  # 3 batches an epoch and 1
    sam = OPTIMIZERS["sam"](LR)
    for number, (client, want) in enumerate([
        (local_training(MODEL, optimizer=optax.adam(LR)), [6, 4]), (local_training(MODEL, optimizer=sam), [12, 8]),
        (made(), [12, 8]), (made(order="after"), [6 + 5 * 3, 4 + 5 * 1]),
        (made(order="after", control_epochs=2), [6 + 2 * 3, 4 + 2 * 1]),
        (curve_training(MODEL, optimizer=sam, warm="off", batch_size=BATCH), [18, 12]),
        (floco_client(MODEL, optimizer=sam), [12, 8]), (scaffold_client(MODEL, lr=LR), [6, 4]),
        (keeping(made(), lambda path: path == ("b",), part="params"), [12, 8]),
        (FEEDBACKS["ef"](made(), topk(ratio=0.5)), [12, 8]),
        (with_personal_model(made(), local_training(MODEL, optimizer=optax.sgd(LR), proximal=0.1)), [18, 12]),
    ]):  # fmt: skip
        assert client.gradients(steps, examples).tolist() == want, number


def test_a_job_whose_end_does_not_move_has_a_chord_without_a_direction():
    still = curve_training(MODEL, optimizer=optax.sgd(0.0), batch_size=BATCH, warm="off", control_lr=CONTROL_LR)
    delta, offset = job(still, 8)
    assert not delta.any() and np.isfinite(offset).all() and offset.any()


@pytest.mark.slow_cases("printed")
@pytest.mark.float64
@pytest.mark.parametrize("reading", ["corrected", "printed"])
def test_warm_moments_are_the_servers_last_step_over_the_batches_of_an_epoch(reading):
    mean = STEP / 3  # 23 examples in batches of 8
    have, _ = job(made(warm=reading), 4, extra=unflat(STEP))
    want, _ = by_hand(4, moments={"m": mean, "v": mean**2, "corrected": reading == "corrected"})
    cold, _ = job(made(), 4)
    np.testing.assert_allclose(have, want, rtol=1e-9, atol=1e-11)
    assert np.abs(want - cold).max() > 1e-2
    none, _ = job(made(warm=reading), 4, extra=unflat(0.0 * STEP))
    np.testing.assert_array_equal(none, cold)


def test_private_leaves_stay_with_the_client_and_off_the_curve():
    model = MODEL._replace(private=lambda path: path == ("b",))
    for curve in ("quadratic", "cubic"):
        client = curve_training(model, optimizer=optax.adam(LR), batch_size=BATCH, warm="off", curve=curve)
        given = client.init(start_params()), Message(start_params()), client_data(), 6
        upload, (_, kept) = trained(client, *given)
        for each in (upload.params, upload.offset):
            assert not np.any(each["b"]) and np.any(each["w"])
        assert np.abs(kept["b"] - start_params()["b"]).max() > 0.01
        if curve == "quadratic":
            step, bend = upload.params["w"], upload.offset["w"]
            assert abs(np.vdot(step, bend)) < 1e-6 * np.linalg.norm(step) * np.linalg.norm(bend)


test_bad_options_are_refused = refusals(
    ({"control_lr": 0.0}, "^control_lr = 0.0"), ({"gamma": 1.5}, "^gamma = 1.5"),
    ({"order": "both"}, "^order = 'both'"), ({"warm": "hot"}, "^warm = 'hot'"),
    ({"control_epochs": 2}, "^control_epochs = 2: must be left out unless order=after"),
    ({"scale": 2.0}, "^scale = 2.0: must be a function of the message's version, or WithinJob"),
    ({"order": "after", "control_epochs": 0}, "^control_epochs = 0"), ({"curve": "arc"}, "^curve = 'arc': unknown"),
    ({"bends": 2}, "^bends = 2: must be left out unless curve=chain"), ({"curve": "chain", "bends": 0}, "^bends = 0"),
    ({"metric": "taxi"}, "^metric = 'taxi': unknown"), ({"sigma": 2.0}, "^sigma = 2.0: must be left out"),
    ({"metric": "hyperbolic", "sigma": 0.0}, "^sigma = 0.0"), ({"metric": "hyperbolic", "beta": -1.0}, "^beta = -1.0"),
    by=lambda options: made(**options),
)  # fmt: skip
test_other_parts_than_it_needs_are_refused = refusals(
    (lambda: curve_training(3, optimizer=optax.adam(LR)), "^model = 3: must be an? "),
    (lambda: curve_training(MODEL, optimizer=3), "^optimizer = 3: must be an? "),
    (lambda: curve_training(MODEL, optimizer=optax.sgd(LR)), r"^optimizer = .*Adam.*asynccurve:warm=off"),
    (lambda: job(made(warm="corrected"), 1), "^warm = 'corrected': must be off"),
)
