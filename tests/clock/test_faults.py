from __future__ import annotations

import math

import numpy as np
import pytest

from fedjax_async.clock import FAULTS, Mishap, mishaps
from fedjax_async.clock.conditions import models_of
from fedjax_async.clock.faults import both

CLIENTS, NUMBERS = 300, 40


def faults_of(spec, num_clients=CLIENTS, seed=0):
    return [model(num_clients, seed, part) for model, part in models_of("faults", FAULTS, spec)]


def drawn(spec, num_clients=CLIENTS, seed=0, numbers=NUMBERS):
    clients, numbers = np.mgrid[:num_clients, :numbers].reshape(2, -1)
    found = mishaps(faults_of(spec, num_clients, seed), clients, numbers)
    return dict(zip(zip(clients.tolist(), numbers.tolist()), found))


def share(table, happens):
    return np.mean([mishap is not None and happens(mishap) for mishap in table.values()])


@pytest.mark.parametrize(
    ("spec", "probability", "happens"),
    [
        ("drop:probability=0.1", 0.1, lambda m: m.lost),
        ("duplicate", 0.05, lambda m: len(m.copies) == 1),
        ("crash", 0.1, lambda m: 0 <= m.crash_share < 1 and m.restart == 60),
        ("late:probability=0.2,extra=3,factor=2", 0.2, lambda m: (m.extra, m.factor) == (3, 2)),
        ("corrupt:probability=0.05", 0.05, lambda m: m.corrupt),
        ("drop:probability=0", 0.0, lambda m: True),
        ("drop:probability=1", 1.0, lambda m: m.lost),
        ("crash:rate=0.01", 1 - math.exp(-2), lambda m: m.crash_after < 200),
    ],
)
def test_mishaps_come_with_their_probability(spec, probability, happens):
    table = drawn(spec)
    sigma = math.sqrt(probability * (1 - probability) / len(table))
    assert abs(share(table, happens) - probability) <= 4 * sigma
    assert share(table, lambda m: not happens(m)) == 0 or "rate" in spec


def test_moments_and_delays_have_their_laws():
    moments = np.array([m.crash_share for m in drawn("crash:probability=1").values()])
    assert np.abs(np.quantile(moments, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.02
    delays = np.array([m.copies[0] for m in drawn("duplicate:probability=1,delay=7").values()])
    assert abs(delays.mean() - 7) < 4 * 7 / math.sqrt(len(delays))
    assert abs(delays.std() - 7) < 0.5


def test_what_befalls_a_job_depends_on_nothing_else():
    alone = drawn("drop:probability=0.3")
    together = drawn("corrupt:probability=0.3+drop:probability=0.3+crash:probability=0.3")
    more_clients = drawn("drop:probability=0.3", num_clients=1000)
    faults = faults_of("drop:probability=0.3")
    for i, n in alone:
        lost = alone[i, n] is not None
        if i % 10 == n % 10 == 0:  # asked alone
            assert lost == (mishaps(faults, i, n)[()] is not None)
        assert lost == (together[i, n] is not None and together[i, n].lost)
        assert alone[i, n] == more_clients[i, n]
    assert alone != drawn("drop:probability=0.3", seed=1)


def test_models_draw_apart_from_each_other_and_from_their_namesakes():
    spec = "drop:probability=0.5+corrupt:probability=0.5+duplicate:probability=0.5+duplicate:probability=0.5"
    table = list(drawn(spec, num_clients=1000).values())
    flags = np.array([(m.lost, m.corrupt, len(m.copies) > 0, len(m.copies) > 1) if m else (0,) * 4 for m in table])
    correlation = np.corrcoef(flags[:, :2].T)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(len(table))
    assert abs(flags[:, 2].mean() - 0.75) < 0.01
    assert abs(flags[:, 3].mean() - 0.25) < 0.01


def test_two_mishaps_of_one_job():
    one = Mishap(lost=True, crash_share=0.7, restart=5, factor=2, copies=(1.0,))
    other = Mishap(corrupt=True, crash_share=0.2, crash_after=9, restart=3, factor=3, extra=4, copies=(2.0,))
    assert both(one, other) == both(one, other)
    assert both(one, other) == Mishap(True, True, 0.2, 9, 5, 6, 4, (1.0, 2.0))
    assert both(one, Mishap()) == both(Mishap(), one) == one


def test_groups_fail_together():
    (faults,) = faults_of("groups:count=4,up=50,down=10", 2000)
    assert faults.absence.leaving == "lose"
    first = [faults.absence.window(i, 100.0) for i in range(2000)]
    kinds = sorted(set(first))
    assert len(kinds) == 4
    sizes = np.array([first.count(kind) for kind in kinds])
    assert np.abs(sizes / 2000 - 0.25).max() < 4 * math.sqrt(0.1875 / 2000)
    up = []
    for seed in range(400):
        (faults,) = faults_of("groups:count=1,up=50,down=10", 1, seed)
        up.append(faults.absence.window(0, 77.0)[0] <= 77)
    assert abs(np.mean(up) - 5 / 6) < 4 * math.sqrt(5 / 36 / 400)
    assert mishaps([faults], 0, 0)[()] is None
