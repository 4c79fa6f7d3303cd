"""The timing ``compass`` against FedCompass's scheduler as its authors describe it, in a plain loop."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Delays, Until
from tests.clock.textbook import arrivals_of, check_invariants, make

MOST, LEAST = 20, 4


def per_step(*seconds):
    """Clients that take so many seconds a local step."""
    return lambda num_clients, seed: Delays(
        num_clients,
        lambda clients, numbers, local_steps=1, *sizes: np.array(seconds)[clients] * local_steps + 0 * numbers,
    )


def scheduled(seconds, slack, updates):
    """Li et al. (2024), Algorithm 1, with equal and constant speeds known after the first job; late uploads are steps.

    Yields the applied uploads as (time, client, steps, closes).
    """
    jobs = {client: (MOST * second, MOST) for client, second in enumerate(seconds)}  # end and steps of each job
    member, groups, fresh = dict.fromkeys(jobs, None), {}, itertools.count()
    applied = []

    def send(client, now):
        speed, best = seconds[client], None
        for name, group in groups.items():
            steps = math.floor((group["expected"] - now) / speed)
            if LEAST <= steps <= MOST and (best is None or steps >= best[1]):
                best = name, steps
        if best is None:
            options = [MOST] if not groups else []
            for group in groups.values():
                if now < group["latest"]:
                    fastest = min(seconds[i] for i in group["coming"] | {i for i, *_ in group["here"]})
                    options.append(math.floor((group["latest"] + fastest * MOST - now) / speed))
            options = [steps for steps in options if steps <= MOST]
            steps = max(*options, LEAST) if max(options, default=-1) >= 0 else MOST
            name = next(fresh)
            ends = {"expected": now + steps * speed, "latest": now + steps * speed * slack}
            groups[name], best = ends | {"coming": set(), "here": []}, (name, steps)
        member[client] = best[0]
        groups[best[0]]["coming"].add(client)
        jobs[client] = now + best[1] * speed, best[1]

    def step(name, now):
        group, here = groups[name], groups[name].pop("here")
        group["here"] = []
        applied.extend((now, client, steps, k == len(here)) for k, (client, steps) in enumerate(here, 1))
        group["expected"] = group["latest"] = 0.0
        for client, _ in sorted(here, key=lambda one: seconds[one[0]]):
            send(client, now)
        if not group["coming"]:
            del groups[name]

    while len(applied) < updates:
        ends = [(end, 0, client) for client, (end, _) in jobs.items() if end < math.inf]
        latest = [(group["latest"], 1, name) for name, group in groups.items() if group["here"]]
        now, kind, who = min(ends + latest)
        if kind == 1:
            step(who, now)
            continue
        (_, steps), jobs[who] = jobs[who], (math.inf, 0)
        group = groups.get(member[who])
        if group is not None:
            group["coming"].discard(who)
        if group is not None and now <= group["latest"]:
            group["here"].append((who, steps))
            if not group["coming"]:
                step(member[who], now)
            continue
        if group is not None and not group["coming"] and not group["here"]:
            del groups[member[who]]
        applied.append((now, who, steps, True))
        send(who, now)
    return applied[:updates]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1.0, 1.5]), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_it_is_the_scheduler_of_the_paper(units, slack, updates):
    seconds = [unit / 8 for unit in units]  # sums and quotients are exact
    options = {"num_clients": len(seconds), "local_steps": MOST, "until": Until(updates=updates)}
    s = make(f"compass:shortest={LEAST / MOST},slack={slack},momentum=1", per_step(*seconds), **options)
    check_invariants(s)
    assert arrivals_of(s, "time", "client", "local_steps", "closes") == scheduled(seconds, slack, updates)


@pytest.mark.parametrize("units", [(7, 32), (25, 20, 11, 13, 2, 3), (29, 34, 7, 4, 34)])
def test_rounding_makes_no_client_late_for_its_group(units):
    options = {"num_clients": len(units), "local_steps": MOST, "updates": 60}
    exact, rounded = (make("compass:slack=1", per_step(*np.array(units) / each), **options) for each in (8, 10))
    np.testing.assert_array_equal(exact.closes, rounded.closes)
    np.testing.assert_allclose(exact.time * 8, rounded.time * 10)


def test_clients_of_any_speed_arrive_together_with_steps_by_their_speed():
    s = make("compass:shortest=0.1", per_step(1.0, 2.0, 4.0), num_clients=3, local_steps=40, updates=90)
    steps = [s.local_steps[s.job][s.client[s.job] == client][5:] for client in range(3)]
    assert steps[0].mean() > 1.5 * steps[1].mean() > 2.25 * steps[2].mean()
    sizes = np.bincount(s.step)
    assert sizes[5:-1].mean() > 2 and s.staleness[30:].max() <= 1
    every = make("every", per_step(1.0, 2.0, 4.0), num_clients=3, local_steps=40, updates=90)
    assert every.staleness[30:].max() > 3


def test_a_delay_model_of_whole_jobs_gives_shorter_jobs_in_proportion():
    known = make("compass", "constant:mean=8,reference_steps=20", num_clients=3, local_steps=20)
    whole = make("compass", "constant:mean=8", num_clients=3, local_steps=20)
    np.testing.assert_allclose(known.upload_time, whole.upload_time)
    np.testing.assert_array_equal(known.local_steps, whole.local_steps)
