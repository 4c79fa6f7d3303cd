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

histograms = st.lists(st.integers(0, 50), min_size=2, max_size=14).map(lambda h: np.array([0, *h]))


def cost(histogram, widths, overhead, compiling):
    total = compiling * len(widths)
    for active, ticks in enumerate(histogram):
        if active and ticks:
            total += ticks * (overhead + min(w for w in widths if w >= active))
    return total


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


def test_each_device_has_as_many_rows_as_the_others():
    schedule = plan("every", "lognormal", num_clients=16, local_steps=2, until=Until(updates=60))
    made = make_layout([schedule], Cutting(max_width=8, lanes=2, devices=8, batching="loop"))
    assert made.capacity % 8 == 0


# What an accelerator's batches cost, in steps of one job: of a model whose steps only cost launches, and of a large one
LIGHT = {"overhead": 300.0, "call": 600.0, "compiling": 1e6}
HEAVY = {"overhead": 1.0, "call": 0.1, "compiling": 100.0}


def test_on_an_accelerator_a_light_model_has_one_width_and_a_heavy_one_short_batches():
    schedule = plan("every", "lognormal:sigma=0.5", num_clients=100, local_steps=10, until=Until(updates=2000))
    usual, light, heavy = (
        make_layout([schedule], Cutting(max_width=1024, costs=costs)) for costs in ({}, LIGHT, HEAVY)
    )
    longest = int(np.diff(light.waves).max())
    assert light.widths == (min(w for w in ladder(1024) if w >= longest),) and len(light.dealt.turns) == len(
        usual.dealt.turns
    )
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
    schedule = plan(
        timing, "exponential", num_clients=len(steps), local_steps=np.array(steps), until=Until(updates=40), seed=seed
    )
    made = make_layout([schedule], Cutting(max_width=max_width, lanes=lanes, batching=batching, costs=costs))
    ready = schedule.dispatched_after[schedule.job]
    done, received = np.zeros(len(schedule.job), int), 0
    in_rows: dict[tuple[int, int], int] = {}  # (lane, row) -> position, from its training until it is received
    for g, turn in enumerate(made.dealt.turns):
        assert len({batch.lane for batch in turn}) == len(turn) <= lanes and made.dealt.bounds[g] == received
        for lane, first, jobs, segments in turn:
            order = made.dealt.train_order[first : first + jobs]
            assert 0 < jobs <= max_width + SPARE and len({*order.tolist()}) == jobs
            assert (ready[order] <= received).all(), "a start model is not there yet"
            assert (made.dealt.lane[order] == lane).all() and (made.dealt.row[order] < made.capacity).all()
            for position in order.tolist():
                assert in_rows.setdefault((lane, int(made.dealt.row[position])), position) == position, "a row in use"
            clock = 0
            for width, start, stop in segments:
                assert start == clock and stop > start and width in made.widths and width <= made.capacity
                clock = stop
                for position in order[: min(width, jobs)]:
                    steps_of = schedule.local_steps[schedule.job[position]]
                    done[position] += max(0, min(stop, steps_of) - start)
        received = int(made.dealt.bounds[g + 1])
        assert (done[:received] == schedule.local_steps[schedule.job[:received]]).all(), "received before trained"
        in_rows = {place: position for place, position in in_rows.items() if position >= received}
        waiting = {made.dealt.train_order[batch.first] for batch in made.dealt.unreceived(g + 1, made.capacity)}
        assert waiting == set(in_rows.values())
    assert received == len(done)
    np.testing.assert_array_equal(done, schedule.local_steps[schedule.job])
    for low, high in itertools.pairwise(made.dealt.stretches):
        assert len({*made.dealt.lane[low:high].tolist()}) == 1
    assert made.useful_steps == done.sum() <= made.executed_steps
    if batching == "loop":
        assert (
            made.executed_steps == made.useful_steps
            and len(made.dealt.turns) <= len(made.waves) + len(done) // max_width
        )


def test_lanes_wait_for_each_other_as_little_as_can_be():
    """Equal jobs on two lanes: wherever another job is ready, no lane trains one job more than the other."""
    schedule = plan("every", "exponential", num_clients=10, local_steps=1, until=Until(updates=2000))
    filled, plain = (
        make_layout([schedule], Cutting(max_width=16, lanes=2, batching="loop", fill=f)) for f in (True, False)
    )

    def turns(layout):
        return sum(max(batch.jobs for batch in turn) for turn in layout.dealt.turns)

    assert turns(filled) <= 1.05 * 1000 < 1.1 * 1000 < turns(plain)


@pytest.mark.parametrize("delay", ["constant", "lognormal:sigma=0.5", "exponential", "rpi"])
def test_most_executed_steps_are_useful(delay):
    """At least 0.8, for unequal shards, in a run so long that compilation does not matter."""
    rng = np.random.default_rng(0)
    steps = rng.integers(2, 50, 100)
    schedule = plan("every", delay, num_clients=100, local_steps=steps, until=Until(updates=5000))
    made = make_layout([schedule], Cutting(max_width=8))
    assert made.useful_steps / made.executed_steps > 0.8


def schedule(**until):
    return plan("buffer:size=2", "constant:mean=10", num_clients=3, local_steps=1, until=Until(**until))


def test_points_in_time_see_every_arrival_up_to_then():
    points = evaluation_points(schedule(time=35), Every(time=10), horizon=35)
    np.testing.assert_allclose(points.time, [0, 10, 20, 30, 35])
    np.testing.assert_array_equal(points.position, [0, 3, 6, 9, 9])


def test_points_in_updates_and_steps_include_both_ends():
    updates = evaluation_points(schedule(updates=7), Every(updates=3))
    np.testing.assert_array_equal(updates.position, [0, 3, 6, 7])
    steps = evaluation_points(schedule(updates=7), Every(steps=2))
    np.testing.assert_array_equal(steps.position, [0, 4, 7])
    chosen = evaluation_points(schedule(time=30), Every(at=[12.5, 30.0]), horizon=30)
    np.testing.assert_allclose(chosen.time, [0, 12.5, 30])


def test_default_is_about_fifty_points():
    assert len(evaluation_points(schedule(time=1000), Every(), horizon=1000).time) == 51


@pytest.mark.parametrize(
    "every", [Every(time=1, updates=2), Every(updates=0), Every(time=-1), Every(steps=1.5), Every(at=[-1.0])]
)
def test_impossible_points(every):
    with pytest.raises(ValueError, match=r"^eval_"):
        evaluation_points(schedule(updates=7), every)
