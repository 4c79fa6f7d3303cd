"""Pictures: they show the data, the same figure gives the same file, no global state changes."""

from __future__ import annotations

import re

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from fedjax_async.clock import Limits, Outcome, Until, check_schedule, cut, offline_times, plan
from fedjax_async.peers import Delivery, plan_peers
from fedjax_async.results import Drawing, accuracy_curve, curves, gantt, peer_gantt, save_figure
from fedjax_async.results import figure as canvas
from fedjax_async.results import staleness_histogram as histogram
from fedjax_async.results.html_figures import schedule as on_page
from fedjax_async.results.timeline import LOST_AFTER, OFFLINE, STATE_COLOURS, absences_of, idle_time, jobs_of
from fedjax_async.types import Run, Schedule
from tests.results.made_up import make_run, make_schedule
from tests.results.page import array

TWO = {
    "fedavg": [make_run([0.1, 0.3, 0.5]), make_run([0.1, 0.5, 0.7])],
    "fedasync": [make_run([0.1, 0.6, 0.6]), make_run([0.1, 0.6, 0.6])],
}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_accuracy_curve_names_axes_and_lines():
    axes = accuracy_curve(TWO).axes[0]
    assert texts(axes) == ["fedavg", "fedasync"]
    assert axes.get_xlabel() == "virtual time (seconds)" and axes.get_ylabel() == "test accuracy (%)"


def test_long_runs_are_drawn_in_hours_and_lines_stay_apart_beyond_the_palette():
    seeds = {f"method {i}": [make_run([0.1, 0.5], [0.0, 36_000.0])] for i in range(9)}
    axes = accuracy_curve(seeds).axes[0]
    assert axes.get_xlabel() == "virtual time (hours)"
    assert axes.get_lines()[0].get_xdata()[-1] == 10.0
    looks = {(line.get_color(), str(line.get_linestyle())) for line in axes.get_lines()[:9]}
    assert len(looks) == 9
    heights = sorted(text.xy[1] for text in axes.texts)
    assert np.diff(heights).min() > 0


@pytest.mark.parametrize(
    ("unit", "largest", "axis"),
    [
        ("time", 700, (60, "virtual time (minutes)")),
        ("bytes", 3e6, (1e6, "sent, both directions (MB)")),
        ("bytes_between", 10, (1e3, "sent between the nodes (kB)")),
        ("bytes_up", 10, (1e3, "sent by the clients (kB)")),
        ("values_bytes_up", 3e9, (1e9, "values sent by the clients (GB)")),
        ("energy", 3e3, (1e3, "energy (kJ)")),
        ("update", 7, (1, "client updates applied")),
    ],
)
def test_axes_say_what_they_count(unit, largest, axis):
    assert canvas.axis(unit, largest) == axis


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.3))
def test_labels_keep_their_distance_and_move_no_more_than_needed(wanted, gap):
    wanted = np.array(wanted)
    placed = curves.spread_out(wanted, gap, 0.0, 1.0)
    room = min(gap, 1.0 / max(len(wanted) - 1, 1))
    order = np.argsort(wanted, kind="stable")
    assert np.all(np.diff(placed[order]) >= room - 1e-9)
    assert placed.min() >= -1e-9 and placed.max() <= 1 + 1e-9
    if len(wanted) == 1 or np.diff(np.sort(wanted)).min() >= room:
        np.testing.assert_allclose(placed, wanted, atol=1e-9)


def test_few_curves_that_end_together_are_all_seen_and_lines_lead_to_their_names():
    """The second curve equals the first one, so it has gaps; the third ends a little higher."""
    runs = {name: [make_run([0.1, 0.5 + more])] for name, more in (("first", 0), ("second", 0), ("third", 0.001))}
    axes = accuracy_curve(runs).axes[0]
    first, second, third, *others = axes.get_lines()
    assert [line.is_dashed() for line in (first, second, third)] == [False, True, False]
    for curve, name in zip((first, second, third), axes.texts, strict=True):
        leaders = [line for line in others if tuple(line.get_xydata()[-1]) == tuple(name.xy)]
        assert [tuple(line.get_xydata()[0]) for line in leaders] == [tuple(curve.get_xydata()[-1])]
    assert len({name.xy[1] for name in axes.texts}) == 3


def test_two_equal_labels_move_apart_evenly():
    np.testing.assert_allclose(curves.spread_out(np.array([0.5, 0.5]), 0.2, 0.0, 1.0), [0.4, 0.6])


def test_histogram_bars_are_the_shares_of_updates():
    run = make_run()
    bars = histogram(run).axes[0].patches
    counts = np.bincount(run.updates["staleness"])
    np.testing.assert_allclose([bar.get_height() for bar in bars], 100 * counts / counts.sum())
    np.testing.assert_allclose([bar.get_x() + bar.get_width() / 2 for bar in bars], np.arange(counts.size))


def test_wide_histograms_group_whole_numbers_and_lose_nothing():
    run = make_run()
    wide = run._replace(updates=run.updates | {"staleness": np.arange(1001)})
    bars = histogram(wide).axes[0].patches
    assert len(bars) <= 60
    np.testing.assert_allclose(sum(bar.get_height() for bar in bars), 100)


def test_gantt_bars_lie_where_the_jobs_are():
    schedule = make_schedule()
    axes = gantt(schedule, clients=[2, 0], until=9.0).axes[0]
    bars, ticks = axes.collections[0], axes.collections[1]
    jobs = np.flatnonzero(np.isin(schedule.client, [2, 0]) & (schedule.dispatch_time < 9.0))
    corners = [path.get_extents() for path in bars.get_paths()]
    np.testing.assert_allclose([box.x0 for box in corners], schedule.dispatch_time[jobs])
    np.testing.assert_allclose([box.x1 for box in corners], np.minimum(schedule.upload_time[jobs], 9.0), atol=0.02)
    np.testing.assert_allclose(
        [(box.y0 + box.y1) / 2 for box in corners], np.where(schedule.client[jobs] == 2, 0, 1), atol=1e-12
    )
    shown = sorted(segment[0][0] for segment in ticks.get_segments())
    of_both = np.isin(schedule.client[schedule.job], [2, 0])
    np.testing.assert_allclose(shown, schedule.time[of_both & (schedule.time <= 9.0)])
    lost = np.setdiff1d(np.arange(schedule.client.size), schedule.job)
    (grey,) = np.flatnonzero(np.isin(jobs, lost))
    (state,) = jobs_of(schedule).state[lost]
    np.testing.assert_allclose(bars.get_facecolors()[grey][:3], to_rgb(STATE_COLOURS[state]), atol=1e-6)
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == [state]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "0"]


def test_gantt_shows_a_readable_window_unless_told():
    schedule = make_schedule(num_clients=40, jobs=30)
    axes = gantt(schedule).axes[0]
    assert len(axes.get_yticks()) == 12
    assert len(axes.collections[0].get_paths()) < 12 * 30
    notes = axes.get_title(loc="left").splitlines()
    legend = "black tick: applied; thin line: idle; marks above: server steps"
    assert notes == ["12 of 40 clients, the first 52 of 1,200 seconds", legend]
    assert gantt(make_schedule()).axes[0].get_title(loc="left") == legend
    busy = gantt(make_schedule(), clients=[2], until=9.0).axes[0].get_title(loc="left").splitlines()
    assert busy == ["1 of 3 clients, the first 9 of 12 seconds", "black tick: applied; marks above: server steps"]


def test_gantt_marks_idle_time_and_server_steps():
    """Two clients in rounds: client 1 needs a third of client 0's time, and waits for the end of each round."""
    drawn = make_schedule(num_clients=2, jobs=2)
    schedule = drawn._replace(
        client=np.array([0, 1, 0, 1], np.int32),
        dispatch_time=np.array([0.0, 0.0, 3.0, 4.0]),
        upload_time=np.array([3.0, 1.0, 6.0, np.inf]),
        dispatched_after=np.array([0, 0, 2, 2]),
        version=np.array([0, 0, 1, 1]),
        job=np.array([1, 0, 2]),
        time=np.array([3.0, 3.0, 6.0]),
        closes=np.array([False, True, True]),
        step=np.array([0, 0, 1]),
        freed_time=np.zeros(0),
    )
    ends = jobs_of(schedule).end
    for client, until, gap in ((1, 6.0, [1.0, 4.0]), (1, 2.0, [1.0, 2.0]), (0, 7.0, [6.0, 7.0])):
        mine = schedule.client == client
        np.testing.assert_array_equal(idle_time(schedule.dispatch_time[mine], ends[mine], until), [gap])
    axes = gantt(schedule, until=6.0).axes[0]
    bars, _, idle, lines, marks = axes.collections
    assert len(bars.get_paths()) == 4
    assert [segment.tolist() for segment in idle.get_segments()] == [[[1.0, 1.0], [4.0, 1.0]]]
    for steps in (lines, marks):
        assert [segment[0][0] for segment in steps.get_segments()] == [3.0, 6.0]
    late = jobs_of(schedule._replace(dispatch_time=np.array([0.0, 0.0, 2.0, 4.0]))).end
    np.testing.assert_array_equal(late, [2.0, 1.0, 6.0, np.inf])  # a job ends at the next dispatch at the latest


FAULTY = plan(
    "cohort:size=4,over_selection=1",
    "lognormal:mean=60",
    num_clients=6,
    local_steps=10,
    until=Until(time=900),
    availability="periodic:on=200,off=60",
    faults="crash:probability=0.3",
)


def test_a_crashed_job_ends_at_its_crash_and_jobs_called_off_look_different_from_those_under_way():
    jobs, crashed = jobs_of(FAULTY), FAULTY.outcome == Outcome.CRASHED
    assert crashed.any() and (np.isfinite(FAULTY.failure_time) == crashed).all()
    np.testing.assert_array_equal(jobs.end[crashed], FAULTY.failure_time[crashed])
    assert (jobs.end[crashed] < FAULTY.freed_time[crashed]).all()
    assert cut(FAULTY, 3, FAULTY.time[2]).failure_time.size < crashed.size
    known = FAULTY._asdict() | {"failure_time": np.where(crashed, FAULTY.failure_time, 1.0)}
    with pytest.raises(ValueError, match=r"schedule\.failure_time\[\d+\] = 1\.0: must be infinite, or for a LOST"):
        check_schedule(Schedule(**known))
    off, under_way = (np.array(to_rgb(STATE_COLOURS[state])) for state in ("called off", "under way"))
    assert (FAULTY.outcome == Outcome.CALLED_OFF).any() and np.abs(off - under_way).max() > 0.3


def bands(axes):
    """The bars of times offline, without those of a server that waits in vain."""
    return [box for box in axes.patches if to_rgb(box.get_facecolor()) == to_rgb(OFFLINE)]


LOSSY = plan(
    "every",
    "lognormal:mean=60",
    num_clients=6,
    local_steps=10,
    until=Until(time=900),
    faults="drop:probability=0.3+crash:probability=0.3",
    limits=Limits(timeout=200.0),
)


def test_a_failed_job_has_a_cross_at_its_end_and_an_empty_bar_up_to_the_timeout():
    """A lost job worked as long as its siblings that arrive; the server waits 200 s for it as for a crashed one."""
    without = plan("every", "lognormal:mean=60", num_clients=6, local_steps=10, until=Until(time=900)).upload_time[:6]
    jobs, lost = jobs_of(LOSSY), np.flatnonzero(LOSSY.outcome[:6] == Outcome.LOST)
    assert lost.size
    np.testing.assert_array_equal(jobs.end[lost], without[lost])
    failed = np.isin(LOSSY.outcome, (Outcome.LOST, Outcome.CRASHED))
    timeout = LOSSY.dispatch_time + 200.0
    np.testing.assert_allclose(jobs.waited[failed], np.maximum(timeout, jobs.end)[failed])
    assert (jobs.waited[~failed] == jobs.end[~failed]).all()
    axes = gantt(LOSSY, until=900.0).axes[0]
    crosses = axes.collections[2].get_offsets()  # after the bars and the ticks
    np.testing.assert_allclose(crosses, np.stack([jobs.end / 60, LOSSY.client], 1)[failed & (jobs.end <= 900)])
    empty = [60 * np.array([box.get_x(), box.get_x() + box.get_width()]) for box in axes.patches]
    waits = np.flatnonzero(failed & (jobs.end < np.minimum(timeout, 900)))
    np.testing.assert_allclose(empty, np.stack([jobs.end, np.minimum(timeout, 900)], 1)[waits])
    named = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert {"lost", "crashed", "server waits in vain"} <= set(named)
    assert axes.get_title(loc="left").endswith("cross: upload will never come")
    last = {"time": np.array([0.0, 900.0])}
    run = make_run()._replace(schedule=LOSSY, updates={"accepted": np.ones(len(LOSSY.job), bool)}, evaluations=last)
    traces = {each["name"]: each for each in on_page(run, 999).figure["data"]}
    np.testing.assert_allclose(array(traces["upload will never come"]["x"]), crosses[:, 0])
    assert len(array(traces["server waits in vain"]["x"])) == len(empty)


def test_where_the_end_of_a_lost_job_is_unknown_its_bar_ends_with_the_waiting():
    unknown = jobs_of(LOSSY._replace(failure_time=np.zeros(0)))
    np.testing.assert_array_equal(unknown.end, unknown.waited)


def test_times_offline_are_drawn_and_are_not_idle_time():
    times = offline_times("periodic:on=200,off=60", 6)
    axes = gantt(FAULTY, clients=[4, 2], offline=times, until=600.0).axes[0]
    drawn = [(box.get_y() + box.get_height() / 2, box.get_x(), box.get_x() + box.get_width()) for box in bands(axes)]
    want = [(row, *(gap / 60)) for row, client in enumerate([4, 2]) for gap in times(client, 600.0)]
    np.testing.assert_allclose(drawn, want)
    assert axes.figure.legends[0].get_texts()[-1].get_text() == "client offline"
    begin, end = np.array([0.0, 5.0]), np.array([2.0, 6.0])
    gaps = idle_time(begin, end, 10.0, np.array([[1.0, 3.0], [8.0, 10.0]]))
    assert gaps.tolist() == [[3.0, 5.0], [6.0, 8.0]]
    for job in np.flatnonzero(np.isin(FAULTY.client, [4, 2])):  # a job begins online
        assert not any(a <= FAULTY.dispatch_time[job] < b for a, b in times(int(FAULTY.client[job]), 900.0))


def test_both_charts_of_a_run_show_its_times_offline_where_they_are_known():
    run = make_run()
    periodic = {"availability": "periodic:on=2,off=1,phase=0", "faults": None, "seed": 0}
    trace = next(t for t in on_page(run._replace(settings=periodic), 99).figure["data"] if "offline" in t["name"])
    colour = trace["marker"]["color"].upper()
    assert colour == OFFLINE and array(trace["base"]).tolist() == [2.0, 5.0, 8.0, 11.0] * 3
    own = periodic | {"own": {"availability": {}}}
    assert absences_of(own, 3).times is None
    note = on_page(run._replace(settings=own), 99).note
    assert note.startswith("times offline are not shown: availability is an object")


def test_a_chart_ends_with_its_schedule():
    axes = gantt(make_schedule(), until=5000.0).axes[0]
    assert axes.get_xlim() == (0.0, 12.0)
    assert axes.get_title(loc="left").splitlines()[0] == "the schedule ends after 12 seconds"


def test_many_server_steps_are_marked_at_the_edge_only():
    schedule = make_schedule(num_clients=40, jobs=30)
    axes = gantt(schedule, clients=3, until=100.0).axes[0]
    _bars, _ticks, _idle, marks = (each for each in axes.collections if each.get_visible())
    assert [segment[0][0] * 1.0 for segment in marks.get_segments()] == sorted(set(schedule.time[schedule.time <= 100]))


NINE = {f"method {i}": [make_run([0.1, 0.2 + 0.05 * i])] for i in range(12)}


def test_lines_have_markers_from_the_ninth_on():
    lines = accuracy_curve(NINE).axes[0].get_lines()[:12]
    marks = [line.get_marker() for line in lines]
    assert set(marks[:8]) <= {"", "None"} and len(set(marks[8:])) == 4 and not set(marks[8:]) & {"", "None"}


@pytest.mark.parametrize("count", [2, 12])
def test_deviations_end_at_100_percent_and_stay_within_the_axes(count):
    """Accuracies of 100 and 2 %: mean 51, deviation 69."""
    seeds = {f"method {i}": [make_run([0.1, 1.0]), make_run([0.1, 0.02])] for i in range(count)}
    axes = accuracy_curve(seeds).axes[0]
    assert axes.get_ylim() == (-1.0, 101.0)
    bars = [each.get_segments()[0] for each in axes.collections if hasattr(each, "get_segments")]
    assert [bar[:, 1].tolist() for bar in bars] == [[0.0, 100.0]] * count
    bands = [path.vertices[:, 1] for each in axes.collections[: 2 * (count == 2)] for path in each.get_paths()]
    assert all(band.min() == 0.0 and band.max() == 100.0 for band in bands)
    assert len(axes.collections) == count + len(bands)  # with many methods there are no bands
    assert len({bar[0, 0] for bar in bars}) == (12 if count == 12 else 1)  # but there are bars side by side


def test_names_of_many_lines_have_a_piece_of_their_line():
    lines = accuracy_curve(NINE).axes[0].get_lines()
    pieces = [line for line in lines[12:] if len(line.get_xdata()) == 3]
    look = [(line.get_color(), str(line.get_linestyle()), line.get_marker()) for line in pieces]
    assert look == [(line.get_color(), str(line.get_linestyle()), line.get_marker()) for line in lines[:12]]


LONG_NAME = ":server_lr=0.5@buffer:size=20"


@pytest.mark.parametrize(
    ("width", "inches", "long"), [("column", 3.5, LONG_NAME), ("column", 3.5, ""), ("page", 7.16, LONG_NAME)]
)
def test_pictures_for_a_paper(width, inches, long):
    drawing = Drawing(("svg",), width, "A title")
    named = {f"{name}{long}": runs for name, runs in TWO.items()}
    compared = accuracy_curve(named, drawing=drawing)
    nameless = (gantt(make_schedule(), drawing=drawing), histogram(make_run(), drawing)) if long else ()
    for figure in (compared, *nameless):
        figure.draw_without_rendering()
        assert figure.get_figwidth() == inches and figure.get_suptitle() == "A title"
        found = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
        assert max(text.get_fontsize() for text in found) <= 8
    legend = [text.get_text() for each in compared.legends for text in each.get_texts()]
    assert texts(compared.axes[0]) + legend == list(named)
    assert bool(legend) == (width == "column" and bool(long))


@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg"])
def test_the_same_picture_gives_the_same_bytes(tmp_path, ending):
    first, second = (save_figure(accuracy_curve(TWO), tmp_path / (name + ending)).read_bytes() for name in "ab")
    assert first == second and len(first) > 1000


def test_no_global_state_is_touched(tmp_path):
    before = dict.copy(matplotlib.rcParams)  # reading the setting "backend" would already change it
    save_figure(gantt(make_schedule()), tmp_path / "a.png")
    assert dict.copy(matplotlib.rcParams) == before


def test_uploads_that_are_not_used_have_a_colour_of_their_own_in_a_gantt_chart():
    schedule = make_schedule()._replace(outcome=np.zeros(0, np.int8))
    used = np.arange(schedule.job.size) < 3
    axes = gantt(schedule, used=used, until=12.0).axes[0]
    assert axes.figure.get_suptitle() == "", "titles only where asked for"
    bars, ticks = axes.collections[0], axes.collections[1]
    states = jobs_of(schedule, used).state
    jobs = np.flatnonzero(schedule.dispatch_time < 12.0)
    named = [to_rgb(STATE_COLOURS[state]) for state in states[jobs] if state in STATE_COLOURS]
    np.testing.assert_allclose(bars.get_facecolors()[~np.isin(jobs, schedule.job[:3]), :3], named, atol=1e-6)
    assert {text.get_text() for text in axes.figure.legends[0].get_texts()} == {*states} - {"applied"}
    np.testing.assert_allclose(sorted(segment[0][0] for segment in ticks.get_segments()), schedule.time[:3])
    with pytest.raises(ValueError, match=r"used = \(2,\): must be bool"):
        gantt(schedule, used=np.ones(2, bool))


def test_every_outcome_of_a_job_has_a_colour():
    words = {outcome.name.lower().replace("_", " ") for outcome in Outcome}
    assert words - set(STATE_COLOURS) == {"applied", "late"}


# --- charts of runs without a server ------------------------------------------------------------------

PLAN = plan_peers(
    "push_sum:policy=discard,capacity=2",
    "lognormal:mean=1,heterogeneity=1",
    num_clients=6,
    local_steps=1,
    until=Until(time=8),
    faults="drop:probability=0.1",
)
NAMES = {
    Delivery.MIXED: "message mixed",
    Delivery.SUPERSEDED: "message superseded by a newer one",
    Delivery.OVERFLOWED: "message dropped from a full buffer",
    Delivery.LOST: "message lost",
    Delivery.WAITING: "message not mixed by the end",
}


def run_of(plan):
    count = len(plan.client)
    updates = {"staleness": np.arange(count) / 2, "accepted": np.arange(count) != 3}
    return Run({}, {}, {"time": np.array([0.0, 8.0])}, updates, {}, {}, plan, {})


def test_a_superseded_message_is_not_called_dropped():
    counts = np.bincount(PLAN.outcome, minlength=6)
    assert (counts[list(NAMES)] > 0).all(), "the plan must have all kinds"
    legend = {text.get_text() for text in peer_gantt(PLAN, until=8).legends[0].get_texts()}
    assert legend == set(NAMES.values())


def test_nodes_that_are_away_are_drawn_and_named():
    """In a run and a plan alike, also between two sessions; what is between events is told apart from idle time."""
    given = {"availability": "sessions:on=20,off=10", "faults": "crash:probability=0.3", "seed": 2}
    nodes = plan_peers(
        "swift", "constant:mean=8", num_clients=4, local_steps=1, until=Until(time=60), topology="ring", **given
    )
    run, times = run_of(nodes), offline_times(given.pop("availability"), 4, **given)
    run = run._replace(settings={"availability": "sessions:on=20,off=10", **given})
    run = run._replace(evaluations={"time": np.array([0.0, 60.0])})
    figures = [peer_gantt(run, until=50), peer_gantt(nodes, until=50, offline=times)]
    bands = []
    for figure in figures:
        assert "node offline" in {text.get_text() for text in figure.legends[0].get_texts()}
        assert (
            figure.axes[0].get_title(loc="left").endswith("black tick: inbox mixed; gap: no event, or one that fails")
        )
        bars = figure.axes[0].containers[0].patches
        bands.append(np.array([(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]))
    np.testing.assert_array_equal(*bands)
    np.testing.assert_allclose(bands[0], np.concatenate([times(node, 50.0) for node in range(4)]))
    assert len(bands[0]) > 4


def test_the_page_has_every_event_and_message():
    shown = on_page(run_of(PLAN), 10_000)
    traces = {each["name"]: each for each in shown.figure["data"]}
    assert shown.note == "" and set(traces) == {"trained", "rejected", "inbox mixed", "staleness", *NAMES.values()}
    bars = {name: array(traces[name]["base"]) for name in ("trained", "rejected")}
    np.testing.assert_array_equal(bars["rejected"], PLAN.start[[3]])
    np.testing.assert_array_equal(np.sort(bars["trained"]), np.sort(np.delete(PLAN.start, 3)))
    assert len(set(traces["trained"]["marker"]["color"])) > 10  # of each staleness
    for kind, name in NAMES.items():
        x, y = (array(traces[name][axis]).reshape(-1, 3) for axis in "xy")
        mine = np.flatnonzero(PLAN.outcome == kind)
        np.testing.assert_array_equal(x[:, 0], PLAN.end[PLAN.push_event[mine]])
        sender = PLAN.client[PLAN.push_event[mine]]
        share = LOST_AFTER if kind == Delivery.LOST else 1  # of the way to the receiver
        np.testing.assert_allclose(y[:, :2], np.stack([sender, sender + share * (PLAN.receiver[mine] - sender)], 1))
        assert np.isnan(x[:, 2]).all()


def test_withheld_messages_have_no_lines():
    run, quiet = run_of(PLAN), PLAN.client % 2 == 0
    run = run._replace(updates=run.updates | {"withheld": quiet})
    shown = on_page(run, 10_000)
    traces = {each["name"]: each for each in shown.figure["data"]}
    np.testing.assert_array_equal(np.sort(array(traces["withheld"]["base"])), np.sort(PLAN.start[quiet]))
    legend = peer_gantt(run, until=8).legends[0].get_texts()
    assert {"event withheld", "event rejected"} < {text.get_text() for text in legend}
    lines = [array(traces[name]["y"]).reshape(-1, 3)[:, 0] for name in NAMES.values() if name in traces]
    np.testing.assert_array_equal(np.unique(np.concatenate(lines)), np.unique(PLAN.client[~quiet]))


def test_a_long_plan_is_cut_and_the_note_says_so():
    shown = on_page(run_of(PLAN), 110)
    bars = sum(len(array(each["base"])) for each in shown.figure["data"] if each["type"] == "bar")
    assert 0 < bars <= 110 / (1 + len(PLAN.receiver) / len(PLAN.client))
    assert re.fullmatch(r"the first [\d.]+ of [\d.]+ seconds", shown.note)
    least = on_page(run_of(PLAN), 2)  # fewer than begin at time 0
    bars = [array(each["base"]) for each in least.figure["data"] if each["type"] == "bar"]
    assert np.concatenate(bars).tolist() == [0.0] * PLAN.num_clients


def ends_of(figure):
    return sorted(path.get_extents().x1 for path in figure.axes[0].collections[0].get_paths())


def test_a_chart_of_a_later_part_has_the_jobs_of_this_part_and_says_so():
    later, whole = gantt(make_schedule(), since=4.0, until=9.0), gantt(make_schedule(), until=9.0)
    assert later.axes[0].get_xlim() == (4.0, 9.0)
    assert later.axes[0].get_title(loc="left").splitlines()[0] == "from 4 to 9 of 12 seconds"
    assert len(ends_of(whole)) > len(ends_of(later)) == len([end for end in ends_of(whole) if end > 3.98]) > 3
    nodes = peer_gantt(PLAN, since=2.0, until=6.0).axes[0]
    assert nodes.get_xlim() == (2.0, 6.0) and "from 2 to 6 of" in nodes.get_title(loc="left")


@pytest.mark.parametrize("draw, plan", [(gantt, make_schedule()), (peer_gantt, PLAN)])
@pytest.mark.parametrize("asked", [{"since": -1.0}, {"since": 1e6}, {"since": 2.0, "until": 2.0}, {"until": 0.0}])
def test_a_part_without_time_is_refused(draw, plan, asked):
    with pytest.raises(ValueError, match=f"^{[*asked][-1]} = "):
        draw(plan, **asked)
