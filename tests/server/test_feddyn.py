"""FedDyn, server and clients: against float64 NumPy written from Algorithm 1 of the paper, and identities."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import simulate
from fedjax_async.server import feddyn, feddyn_client
from fedjax_async.types import Message
from tests.server.textbook_drift import (
    LR,
    MODEL,
    SIZES,
    START,
    TIMETABLES,
    D,
    check_a_rejected_upload,
    descend,
    feddyn_by_hand,
    flat,
    gradient,
    job_of,
    play,
    unflat,
)

ALPHA = 0.3
UNREJECTED = ["everyone", "some", "one at a time"]


@cache
def client(alpha=ALPHA):
    return feddyn_client(MODEL, optimizer=optax.sgd(LR), batch_size=max(SIZES), alpha=alpha)


@cache
def played(name, alpha=ALPHA):
    return play(feddyn(alpha=alpha), client(alpha), TIMETABLES[name], server=lambda state: state.shift)


@pytest.mark.parametrize(("name", "alpha"), [*((name, ALPHA) for name in TIMETABLES), ("one at a time", 0.05)])
def test_params_and_every_shift_equal_numpy(name, alpha):
    want, have = feddyn_by_hand(TIMETABLES[name], alpha), played(name, alpha)
    for ours, theirs in zip(have, want, strict=True):
        assert ours.shape == theirs.shape and np.abs(theirs).max() > 0.005
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_alpha_makes_a_difference():
    one, other = (played("one at a time", alpha) for alpha in (ALPHA, 0.05))
    assert np.abs(one.params - other.params)[-1].max() > 1e-2


@pytest.mark.parametrize("name", UNREJECTED)
def test_the_servers_h_is_the_mean_of_the_clients(name):
    """Each Delta adds -alpha Delta to its h_i and -alpha Delta / N to h: same sign, for any set of clients."""
    run = played(name)
    np.testing.assert_allclose(run.server, run.own.mean(axis=1), rtol=0, atol=1e-12)
    assert np.abs(run.server).max() > 1e-2


def test_a_client_keeps_what_the_server_rejected():
    run = played("rejected")
    assert np.abs(run.server - run.own.mean(axis=1))[-1].max() > 1e-2


@pytest.mark.float64
@pytest.mark.parametrize("every_closes", [True, False])
def test_a_rejected_upload_leaves_the_server_as_it_was(every_closes):
    check_a_rejected_upload(feddyn(alpha=ALPHA), client(), lambda state: state.shift, every_closes)


def test_a_job_minimises_the_shifted_objective():
    """Its first step follows the gradient minus h_i, because w = x; alpha matters from the second step on."""
    own = np.random.default_rng(12).normal(size=D)
    ends = []
    for alpha in (ALPHA, 0.05):
        with jax.enable_x64(True):
            message, state = Message(unflat(START)), ((), unflat(own))
            for steps in (1, 4):
                delta, (_, new) = job_of(client(alpha))(message, state, jnp.int32(2), jnp.int32(steps))
                want = descend(START, 2, steps, lambda w, a=alpha: a * (w - START) - own) - START
                np.testing.assert_allclose(flat(delta), want, rtol=0, atol=1e-12)
                np.testing.assert_allclose(flat(new), own - alpha * want, rtol=0, atol=1e-12)
                ends.append(flat(delta))
    np.testing.assert_allclose(ends[0], -LR * (gradient(START, 2) - own), rtol=0, atol=1e-12)
    np.testing.assert_allclose(ends[0], ends[2], rtol=0, atol=1e-15)
    assert np.abs(ends[1] - ends[3]).max() > 1e-3


def test_alpha_of_the_method_reaches_the_clients():
    """Alpha cancels at the server, so the difference comes from local training."""
    given = {"model": "logistic", "clients": 6, "steps": 8, "updates": 12, "lr": 0.2}
    one, other = (simulate(**given, method=f"feddyn:alpha={alpha}").params for alpha in (0.1, 0.01))
    assert np.abs(one["output"]["kernel"] - other["output"]["kernel"]).max() > 1e-2
