"""Widths, segments, rows and evaluation points: host-side planning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import Until, plan
from fedjax_async.engine import Cutting, Every, evaluation_points, make_layout
from fedjax_async.engine.batches import SPARE
from fedjax_async.engine.widths import active_histogram, choose_widths, ladder, useful_share
from tests.refusals import refusals

histograms = st.lists(st.integers(0, 50), min_size=2, max_size=14).map(lambda h: np.array([0, *h]))


def cost(histogram, widths, overhead, compiling):
    used = [(active, ticks) for active, ticks in enumerate(histogram) if active and ticks]
    ticks = sum(ticks * (overhead + min(w for w in widths if w >= active)) for active, ticks in used)
    return compiling * len(widths) + ticks


@given(
    histograms,
    st.sampled_from([14, 16, 20]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.35, 10.0]),
    st.sampled_from([0.0, 30.0]),
)
@settings(max_examples=80)
def test_widths_are_the_cheapest_choice(histogram, limit, most, overhead, compiling):
    widths = choose_widths(histogram, limit, most=most, overhead=overhead, compiling=compiling)
    assert 1 <= len(widths) <= most and list(widths) == sorted(set(widths))
    top = int(np.flatnonzero(histogram)[-1]) if histogram.any() else 1
    assert widths[-1] == min(w for w in ladder(limit) if w >= top)
    *lower, last = (w for w in ladder(limit) if w <= widths[-1])
    choices = [(*c, last) for n in range(most) for c in itertools.combinations(lower, n)]
    best = min(cost(histogram, c, overhead, compiling) for c in choices)
    if histogram.any():
        share = sum(a * t for a, t in enumerate(histogram)) / cost(histogram, widths, 0, 0)
        assert useful_share(histogram, widths) == pytest.approx(share)
        assert cost(histogram, widths, overhead, compiling) == pytest.approx(best)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=6))
def test_histogram_counts_active_jobs(waves):
    ordered = [sorted(w, reverse=True) for w in waves]
    bounds = np.cumsum([0] + [len(w) for w in waves])
    want = np.zeros(max(map(len, waves)) + 1, int)
    for wave in waves:
        for tick in range(max(wave)):
            want[sum(s > tick for s in wave)] += 1
    np.testing.assert_array_equal(active_histogram(np.concatenate(ordered), bounds), want)


def made(timing="every", delay="lognormal", clients=100, steps=10, updates=2000, seed=0, **how):
    """``(schedule, layout)`` of a run."""
    until = Until(updates=updates)
    schedule = plan(timing, delay, num_clients=clients, local_steps=steps, until=until, seed=seed)
    return schedule, make_layout([schedule], Cutting(**how))


def test_each_device_has_as_many_rows_as_the_others():
    _, layout = made(clients=16, steps=2, updates=60, max_width=8, lanes=2, devices=8, batching="loop")
    assert layout.capacity % 8 == 0


# What an accelerator's batches cost, in steps of one job: of a model whose steps only cost launches, and of a large one
LIGHT = {"overhead": 300.0, "call": 600.0, "compiling": 1e6}
HEAVY = {"overhead": 1.0, "call": 0.1, "compiling": 100.0}


def test_on_an_accelerator_a_light_model_has_one_width_and_a_heavy_one_short_batches():
    usual, light, heavy = (
        made(delay="lognormal:sigma=0.5", max_width=1024, costs=costs)[1] for costs in ({}, LIGHT, HEAVY)
    )
    longest = int(np.diff(light.waves).max())
    assert light.widths == (min(w for w in ladder(1024) if w >= longest),)
    assert len(light.dealt.turns) == len(usual.dealt.turns)
    assert len(heavy.widths) <= 2 and heavy.capacity <= 16
    assert heavy.useful_steps > 0.8 * heavy.executed_steps


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12),
    st.sampled_from(["every", "buffer:size=2", "cohort:size=2", "window:length=1"]),
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from([("vmap", {}), ("vmap", LIGHT), ("vmap", HEAVY), ("loop", {})]),
    st.integers(1, 3),
)
@settings(max_examples=90)
def test_every_local_step_is_executed_exactly_once(steps, timing, max_width, seed, how, lanes):
    batching, costs = how
    run = timing, "exponential", len(steps), np.array(steps), 40, seed
    schedule, layout = made(*run, max_width=max_width, lanes=lanes, batching=batching, costs=costs)
    dealt = layout.dealt
    ready = schedule.dispatched_after[schedule.job]
    done, received = np.zeros(len(schedule.job), int), 0
    in_rows: dict[tuple[int, int], int] = {}  # (lane, row) -> position, from its training until it is received
    for g, turn in enumerate(dealt.turns):
        assert len({batch.lane for batch in turn}) == len(turn) <= lanes and dealt.bounds[g] == received
        for lane, first, jobs, segments in turn:
            order = dealt.train_order[first : first + jobs]
            assert 0 < jobs <= max_width + SPARE and len({*order.tolist()}) == jobs
            assert (ready[order] <= received).all(), "a start model is not there yet"
            assert (dealt.lane[order] == lane).all() and (dealt.row[order] < layout.capacity).all()
            for position in order.tolist():
                assert in_rows.setdefault((lane, int(dealt.row[position])), position) == position, "a row in use"
            clock = 0
            for width, start, stop in segments:
                assert start == clock and stop > start and width in layout.widths and width <= layout.capacity
                clock = stop
                for position in order[: min(width, jobs)]:
                    steps_of = schedule.local_steps[schedule.job[position]]
                    done[position] += max(0, min(stop, steps_of) - start)
        received = int(dealt.bounds[g + 1])
        assert (done[:received] == schedule.local_steps[schedule.job[:received]]).all(), "received before trained"
        in_rows = {place: position for place, position in in_rows.items() if position >= received}
        waiting = {dealt.train_order[batch.first] for batch in dealt.unreceived(g + 1, layout.capacity)}
        assert waiting == set(in_rows.values())
    assert received == len(done)
    np.testing.assert_array_equal(done, schedule.local_steps[schedule.job])
    for low, high in itertools.pairwise(dealt.stretches):
        assert len({*dealt.lane[low:high].tolist()}) == 1
    assert layout.useful_steps == done.sum() <= layout.executed_steps
    if batching == "loop":
        assert layout.executed_steps == layout.useful_steps
        assert len(dealt.turns) <= len(layout.waves) + len(done) // max_width


def test_lanes_wait_for_each_other_as_little_as_can_be():
    """Equal jobs on two lanes: wherever another job is ready, no lane trains one job more than the other."""
    given = {"delay": "exponential", "clients": 10, "steps": 1, "max_width": 16, "lanes": 2, "batching": "loop"}
    filled, plain = (made(**given, fill=fill)[1] for fill in (True, False))

    def turns(layout):
        return sum(max(batch.jobs for batch in turn) for turn in layout.dealt.turns)

    assert turns(filled) <= 1.05 * 1000 < 1.1 * 1000 < turns(plain)


@pytest.mark.parametrize("delay", ["constant", "lognormal:sigma=0.5", "exponential", "rpi"])
def test_most_executed_steps_are_useful(delay):
    """At least 0.8, for unequal shards, in a run so long that compilation does not matter."""
    steps = np.random.default_rng(0).integers(2, 50, 100)
    _, layout = made(delay=delay, steps=steps, updates=5000, max_width=8)
    assert layout.useful_steps / layout.executed_steps > 0.8


def schedule(**until):
    return plan("buffer:size=2", "constant:mean=10", num_clients=3, local_steps=1, until=Until(**until))


POINTS = [  # (how the run ends, the points asked for, positions, times)
    ({"time": 35}, Every(time=10), [0, 3, 6, 9, 9], [0, 10, 20, 30, 35]),
    ({"updates": 7}, Every(updates=3), [0, 3, 6, 7], None),
    ({"updates": 7}, Every(steps=2), [0, 4, 7], None),
    ({"time": 30}, Every(at=[12.5, 30.0]), [0, 3, 9], [0, 12.5, 30]),
]


@pytest.mark.parametrize(("until", "every", "position", "time"), POINTS)
def test_points_see_every_arrival_up_to_then_and_include_both_ends(until, every, position, time):
    points = evaluation_points(schedule(**until), every, horizon=until.get("time"))
    np.testing.assert_array_equal(points.position, position)
    if time is not None:
        np.testing.assert_allclose(points.time, time)


def test_default_is_about_fifty_points():
    assert len(evaluation_points(schedule(time=1000), Every(), horizon=1000).time) == 51


test_impossible_points_are_refused = refusals(
    *((every, r"^eval_") for every in (
        Every(time=1, updates=2), Every(updates=0), Every(time=-1), Every(steps=1.5), Every(at=[-1.0])
    )),
    by=lambda every: evaluation_points(schedule(updates=7), every),
)  # fmt: skip
