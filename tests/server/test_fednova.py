"""FedNova against float64 NumPy written from eq. 6 of the paper; when it equals FedAvg, and when it does not."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.server import fedavg, fednova
from tests.server.textbook_drift import STEPS, TIMETABLES, Job, N, fednova_by_hand, plain_client, play

EQUAL = (4,) * N


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("name", TIMETABLES)
def test_params_equal_numpy(name, weighting):
    want = fednova_by_hand(TIMETABLES[name], 0.7, weighting)
    have = play(fednova(server_lr=0.7, weighting=weighting), plain_client(), TIMETABLES[name])
    assert have.params.shape == want.params.shape and np.abs(want.params).max() > 0.05
    np.testing.assert_allclose(have.params, want.params, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["some", "rejected"])
def test_of_equal_steps_it_is_fedavg_and_of_unequal_ones_it_is_not(name):
    """Equal up to the rounding of one product and sum. Some arrivals are rejected; they count in neither mean."""
    timetable = TIMETABLES[name]
    for steps, same in ((EQUAL, True), (STEPS, False)):
        nova, average = (play(rule(), plain_client(), timetable, steps=steps) for rule in (fednova, fedavg))
        if same:
            np.testing.assert_allclose(nova.params, average.params, rtol=0, atol=1e-15)
        else:
            assert np.abs(nova.params - average.params)[-1].max() > 1e-3


def test_one_client_alone_is_fedavg():
    """``tau_eff`` is its own number of steps, here 3."""
    timetable = [[Job(0, t)] for t in range(10)]
    nova, average = (play(rule(), plain_client(), timetable, num_clients=1) for rule in (fednova, fedavg))
    np.testing.assert_allclose(nova.params, average.params, rtol=0, atol=1e-14)


def test_arrivals_alone_are_those_of_fedavg_however_many_steps_they_took():
    """If each arrival closes its step, there is no second client to normalise against."""
    nova, average = (play(rule(), plain_client(), TIMETABLES["one at a time"]) for rule in (fednova, fedavg))
    np.testing.assert_allclose(nova.params, average.params, rtol=0, atol=1e-13)
