"""Pictures: they show the data, the same figure gives the same file, no global state changes."""

from __future__ import annotations

import re

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.transforms import Bbox

from fedjax_async.clock import Limits, Outcome, Until, check_schedule, cut, offline_times, plan
from fedjax_async.peers import Delivery, plan_peers
from fedjax_async.results import Drawing, accuracy_curve, curves, gantt, peer_gantt, save_figure
from fedjax_async.results import figure as canvas
from fedjax_async.results import staleness_histogram as histogram
from fedjax_async.results.html_figures import schedule as on_page
from fedjax_async.results.plots import MOST_STEP_LINES
from fedjax_async.results.timeline import FAILED, LOST_AFTER, OFFLINE, STATE_COLOURS, WAITING, absences_of, jobs_of
from fedjax_async.types import Run, Schedule
from tests.results.made_up import make_run, make_schedule
from tests.results.page import array
from tests.told import refusal

TWO = {
    "fedavg": [make_run([0.1, 0.3, 0.5]), make_run([0.1, 0.5, 0.7])],
    "fedasync": [make_run([0.1, 0.6, 0.6]), make_run([0.1, 0.6, 0.6])],
}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def note_of(figure):
    return figure.axes[0].get_title(loc="left").splitlines()


def traces_of(shown):
    return {each["name"]: each for each in shown.figure["data"]}


def test_many_curves_of_long_runs():
    """Hours, and equal ends: names stay apart, with a sample of each line; markers from the ninth line on."""
    axes = accuracy_curve({f"method {i}": [make_run([0.1, 0.5], [0.0, 36_000.0])] for i in range(12)}).axes[0]
    lines, others = axes.get_lines()[:12], axes.get_lines()[12:]
    assert axes.get_xlabel() == "virtual time (hours)" and axes.get_ylabel() == "test accuracy (%)"
    assert lines[0].get_xdata()[-1] == 10.0 and texts(axes) == [f"method {i}" for i in range(12)]
    assert np.diff(sorted(text.xy[1] for text in axes.texts)).min() > 0
    looks, samples = (
        [(line.get_color(), str(line.get_linestyle()), line.get_marker()) for line in drawn]
        for drawn in (lines, [line for line in others if len(line.get_xdata()) == 3])
    )
    assert looks == samples and len(set(looks)) == 12
    marks = [mark for _, _, mark in looks]
    assert set(marks[:8]) <= {"", "None"} and len(set(marks[8:])) == 4 and not set(marks[8:]) & {"", "None"}


@pytest.mark.parametrize(
    ("unit", "largest", "axis"),
    [
        ("time", 12, (1, "virtual time (seconds)")),
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
    np.testing.assert_allclose(curves.spread_out(np.full(2, 0.5), gap, 0.0, 1.0), [0.5 - gap / 2, 0.5 + gap / 2])


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


@pytest.mark.parametrize(("width", "long"), [("column", True), ("column", False), ("page", True)])
def test_long_names_stand_below_a_narrow_picture(width, long):
    named = {f"{name}{':server_lr=0.5@buffer:size=20' * long}": runs for name, runs in TWO.items()}
    figure = accuracy_curve(named, drawing=Drawing(width=width))
    assert texts(figure.axes[0]) + legend_of(figure) == list(named)
    assert bool(legend_of(figure)) == (width == "column" and long)


@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg"])
def test_the_same_picture_gives_the_same_bytes_and_no_global_state_is_touched(tmp_path, ending):
    before = dict.copy(matplotlib.rcParams)  # reading the setting "backend" would already change it
    first, second = (save_figure(histogram(make_run()), tmp_path / (name + ending)).read_bytes() for name in "ab")
    assert first == second and len(first) > 1000
    assert dict.copy(matplotlib.rcParams) == before


def test_histogram_bars_are_the_shares_of_updates_and_wide_ones_group_whole_numbers():
    run = make_run()
    bars = histogram(run).axes[0].patches
    counts = np.bincount(run.updates["staleness"])
    np.testing.assert_allclose([bar.get_height() for bar in bars], 100 * counts / counts.sum())
    np.testing.assert_allclose([bar.get_x() + bar.get_width() / 2 for bar in bars], np.arange(counts.size))
    wide = histogram(run._replace(updates=run.updates | {"staleness": np.arange(1001)})).axes[0].patches
    assert len(wide) <= 60
    np.testing.assert_allclose(sum(bar.get_height() for bar in wide), 100)


# --- Gantt charts -------------------------------------------------------------------------------------

WORLD = {"num_clients": 6, "local_steps": 10, "until": Until(time=900)}
PERIODIC, FAULTS = "periodic:on=200,off=60", "crash:probability=0.3"
OFFLINE_TIMES = offline_times(PERIODIC, 6)
FAULTY = plan("cohort:size=4,over_selection=1", "lognormal:mean=60", **WORLD, availability=PERIODIC, faults=FAULTS)
LOSSY = plan(
    "every", "lognormal:mean=60", **WORLD, faults=f"drop:probability=0.3+{FAULTS}", limits=Limits(timeout=200.0)
)
UNKNOWN = make_schedule()._replace(outcome=np.zeros(0, np.int8))
ROUNDS = plan("cohort:size=4", "lognormal:mean=60", **WORLD)
TICK, IDLE, STEPS = "black tick: applied", "thin line: idle", "marks above: server steps"
CROSS = "cross: upload will never come"


def parts_of(figure):
    """Name -> rows, beginnings and ends (in seconds) of these parts of a chart, float64[3, n]."""
    size, found = 60.0 if "minutes" in figure.axes[0].get_xlabel() else 1.0, {}
    for artist, about in canvas.marked(figure):
        if hasattr(artist, "get_sizes"):  # crosses
            boxes = [Bbox([at, at]) for at in artist.get_offsets()]
        elif hasattr(artist, "get_paths"):
            boxes = [path.get_extents() for path in artist.get_paths()]
        else:
            boxes = [bar.get_bbox() for bar in getattr(artist, "patches", ())]
        ends = np.reshape([((box.y0 + box.y1) / 2, size * box.x0, size * box.x1) for box in boxes], (-1, 3))
        found[about["name"]] = ends[about.get("only", slice(None))].T
    return found


@pytest.mark.parametrize(
    ("schedule", "asked", "left_out", "idle"),
    [
        (make_schedule(40, 30), {}, "12 of 40 clients, the first 52 of 1,200 seconds", True),
        (make_schedule(40, 30), {"clients": [2], "until": 100.0}, None, True),
        (make_schedule(), {}, "", True),
        (make_schedule(), {"clients": [2], "until": 9.0}, "1 of 3 clients, the first 9 of 12 seconds", False),
        (make_schedule(), {"clients": [2, 0], "until": 9.0}, "2 of 3 clients, the first 9 of 12 seconds", True),
        (make_schedule(), {"until": 5000.0}, "the schedule ends after 12 seconds", True),
        (make_schedule(), {"since": 4.0, "until": 9.0}, "from 4 to 9 of 12 seconds", True),
        (UNKNOWN, {"used": np.arange(11) < 3, "until": 12.0}, "", True),
        (ROUNDS, {}, None, True),
        (LOSSY, {}, None, False),
        (LOSSY, {"clients": [0], "offline": lambda client, until: np.array([[10.0, 12.0]])}, None, False),
        (FAULTY, {"clients": [4, 2], "offline": OFFLINE_TIMES, "until": 600.0}, None, True),
    ],
)
def test_a_chart_shows_its_part_of_the_jobs(schedule, asked, left_out, idle):
    figure = gantt(schedule, **asked)
    axes, parts = figure.axes[0], parts_of(figure)
    size = 60 if "minutes" in axes.get_xlabel() else 1
    since, until = (size * end for end in axes.get_xlim())
    whole = max(schedule.time.max(), schedule.dispatch_time[-1])
    assert since == asked.get("since", 0) and until == pytest.approx(min(asked.get("until", until), whole))
    rows = asked.get("clients", [*range(min(schedule.num_clients, 12))])
    assert [label.get_text() for label in axes.get_yticklabels()] == [*map(str, rows)]
    assert figure.get_suptitle() == "", "titles only where asked for"
    jobs, used = jobs_of(schedule, asked.get("used")), asked.get("used", np.ones(len(schedule.job), bool))
    shown = np.flatnonzero(np.isin(schedule.client, rows) & (jobs.begin < until) & (jobs.waited >= since))
    row = np.array([rows.index(client) for client in schedule.client[shown]])
    begin, end, waited = (np.minimum(times[shown], until) for times in (jobs.begin, jobs.end, jobs.waited))
    for state in {*(states := jobs.state[shown])}:
        np.testing.assert_allclose(parts[state][:2], np.stack([row, begin])[:, states == state], atol=1e-9)
        np.testing.assert_allclose(parts[state][2], end[states == state], atol=0.0016 * until)
    bars = next(artist for artist, about in canvas.marked(figure) if about["name"] in states)
    named = [place for place, state in enumerate(states) if state in STATE_COLOURS]
    colours = [to_rgb(STATE_COLOURS[state]) for state in states[named]]
    np.testing.assert_allclose(bars.get_facecolors()[named, :3].reshape(-1, 3), np.reshape(colours, (-1, 3)), atol=1e-6)
    came = schedule.time[used & np.isin(schedule.client[schedule.job], rows)]
    came = came[(came >= since) & (came <= until)]
    np.testing.assert_allclose(np.sort(parts["upload applied"][1]), came)
    failed = np.isin(states, FAILED) & (jobs.end[shown] <= until)
    marks = "; ".join([TICK] + [IDLE] * idle + [STEPS] + [CROSS] * int(failed.any()))
    assert note_of(figure)[-1] == marks and left_out in (None, "".join(note_of(figure)[:-1]))
    waits = failed & (end < waited)
    if failed.any():
        np.testing.assert_allclose(parts["upload will never come"], np.stack([row, end, end])[:, failed])
        np.testing.assert_allclose(parts[WAITING], np.stack([row, end, waited])[:, waits])
    away = [asked["offline"](client, until) if "offline" in asked else np.zeros((0, 2)) for client in rows]
    if "offline" in asked:
        bands = [(place, *gap) for place, gaps in enumerate(away) for gap in gaps]
        np.testing.assert_allclose(parts["client offline"].T, bands)
    more = {name for name, there in ((WAITING, waits.any()), ("client offline", "offline" in asked)) if there}
    assert set(legend_of(figure)) == {*states} - {"applied", "late"} | more
    steps = np.unique(schedule.time[schedule.closes])
    steps = steps[(steps >= since) & (steps <= until)]
    np.testing.assert_allclose(parts["server steps"][1], steps)
    (lines,) = (artist for artist, about in canvas.marked(figure) if about["name"] == "server steps")
    assert lines.get_visible() == (len(steps) <= MOST_STEP_LINES)  # else they are marked at the edge only
    np.testing.assert_allclose([size * line[0, 0] for line in axes.collections[-1].get_segments()], steps)
    for place, client in enumerate(rows):  # idle is when it has no job, is not waited for, and is not away
        mine = schedule.client == client
        busy = np.concatenate([np.stack([jobs.begin[mine], jobs.waited[mine]], 1), away[place]])
        assert not any(gap[0] <= at < gap[1] for at in jobs.begin[mine] for gap in away[place]), "jobs begin online"
        gaps = parts["idle"][1:, parts["idle"][0] == place].T
        cuts = np.unique(np.clip([since, until, *busy.ravel(), *gaps.ravel()], since, until))
        moments = (cuts[1:] + cuts[:-1])[np.diff(cuts) > 1e-6 * until, None] / 2
        inside = [((moments > each[:, 0]) & (moments < each[:, 1])).any(axis=1) for each in (busy, gaps)]
        np.testing.assert_array_equal(inside[0], ~inside[1])


def test_where_jobs_end_and_that_their_states_look_different():
    """At a crash, or where a lost upload was due, as those of its siblings that arrive; the server waits longer."""
    jobs, crashed = jobs_of(FAULTY), FAULTY.outcome == Outcome.CRASHED
    stopped = (FAULTY.outcome == Outcome.CALLED_OFF) & np.isfinite(FAULTY.failure_time)  # unnoticed crashes
    assert crashed.any() and stopped.any() and (np.isfinite(FAULTY.failure_time) == crashed | stopped).all()
    np.testing.assert_array_equal(jobs.end[stopped], FAULTY.freed_time[stopped])
    np.testing.assert_array_equal(jobs.end[crashed], FAULTY.failure_time[crashed])
    assert (jobs.end[crashed] < FAULTY.freed_time[crashed]).all()
    assert cut(FAULTY, 3, FAULTY.time[2]).failure_time.size < crashed.size
    known = FAULTY._asdict() | {"failure_time": np.where(crashed, FAULTY.failure_time, 1.0)}
    with pytest.raises(ValueError, match=r"schedule\.failure_time\[\d+\] = 1\.0: must be infinite, or for a LOST"):
        check_schedule(Schedule(**known))
    without = plan("every", "lognormal:mean=60", **WORLD).upload_time[:6]
    jobs, lost = jobs_of(LOSSY), np.flatnonzero(LOSSY.outcome[:6] == Outcome.LOST)
    assert lost.size
    np.testing.assert_array_equal(jobs.end[lost], without[lost])
    failed = np.isin(LOSSY.outcome, (Outcome.LOST, Outcome.CRASHED))
    np.testing.assert_allclose(jobs.waited[failed], np.maximum(LOSSY.dispatch_time + 200.0, jobs.end)[failed])
    assert (jobs.waited[~failed] == jobs.end[~failed]).all()
    unknown = jobs_of(LOSSY._replace(failure_time=np.zeros(0)))  # of lost jobs
    np.testing.assert_array_equal(unknown.end, unknown.waited)
    early = make_schedule(1, 2)._replace(dispatch_time=np.array([0.0, 0.5]))
    np.testing.assert_array_equal(jobs_of(early).end, [0.5, 2.0])  # at the next dispatch at the latest
    words = {outcome.name.lower().replace("_", " ") for outcome in Outcome}
    assert words - set(STATE_COLOURS) == {"applied", "late"}
    off, under_way = (np.array(to_rgb(STATE_COLOURS[state])) for state in ("called off", "under way"))
    assert (FAULTY.outcome == Outcome.CALLED_OFF).any() and np.abs(off - under_way).max() > 0.3


def test_the_page_shows_failures_and_times_offline_where_they_are_known():
    last = {"time": np.array([0.0, 900.0])}
    run = make_run()._replace(schedule=LOSSY, updates={"accepted": np.ones(len(LOSSY.job), bool)}, evaluations=last)
    traces, parts = traces_of(on_page(run, 999)), parts_of(gantt(LOSSY, until=900.0))
    np.testing.assert_allclose(60 * array(traces["upload will never come"]["x"]), parts["upload will never come"][1])
    assert len(array(traces[WAITING]["x"])) == len(parts[WAITING][0])
    run, periodic = make_run(), {"availability": "periodic:on=2,off=1,phase=0", "faults": None, "seed": 0}
    trace = traces_of(on_page(run._replace(settings=periodic), 99))["client offline"]
    colour = trace["marker"]["color"].upper()
    assert colour == OFFLINE and array(trace["base"]).tolist() == [2.0, 5.0, 8.0, 11.0] * 3
    own = periodic | {"own": {"availability": {}}}
    assert absences_of(own, 3).times is None
    note = on_page(run._replace(settings=own), 99).note
    assert note.startswith("times offline are not shown: availability is an object")


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


def test_nodes_that_are_away_are_drawn_and_named():
    """In a run and a plan alike, also between two sessions; what is between events is told apart from idle time."""
    given = {"availability": "sessions:on=20,off=10", "faults": "crash:probability=0.3", "seed": 2}
    world = {"num_clients": 4, "local_steps": 1, "until": Until(time=60), "topology": "ring"}
    nodes = plan_peers("swift", "constant:mean=8", **world, **given)
    run = run_of(nodes)._replace(settings=dict(given), evaluations={"time": np.array([0.0, 60.0])})
    times, bands = offline_times(given.pop("availability"), 4, **given), []
    for figure in (peer_gantt(run, until=50), peer_gantt(nodes, until=50, offline=times)):
        assert "node offline" in legend_of(figure)
        assert note_of(figure)[-1].endswith("black tick: inbox mixed; gap: no event, or one that fails")
        bars = figure.axes[0].containers[0].patches
        bands.append(np.array([(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]))
    np.testing.assert_array_equal(*bands)
    np.testing.assert_allclose(bands[0], np.concatenate([times(node, 50.0) for node in range(4)]))
    assert len(bands[0]) > 4


def test_the_page_and_the_picture_have_every_event_and_message():
    assert (np.bincount(PLAN.outcome, minlength=6)[list(NAMES)] > 0).all(), "the plan must have all kinds"
    assert set(legend_of(peer_gantt(PLAN, until=8))) == set(NAMES.values())
    shown = on_page(run_of(PLAN), 10_000)
    traces = traces_of(shown)
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


def test_withheld_messages_have_no_lines_and_a_later_part_is_said():
    run, quiet = run_of(PLAN), PLAN.client % 2 == 0
    run = run._replace(updates=run.updates | {"withheld": quiet})
    traces = traces_of(on_page(run, 10_000))
    np.testing.assert_array_equal(np.sort(array(traces["withheld"]["base"])), np.sort(PLAN.start[quiet]))
    lines = [array(traces[name]["y"]).reshape(-1, 3)[:, 0] for name in NAMES.values() if name in traces]
    np.testing.assert_array_equal(np.unique(np.concatenate(lines)), np.unique(PLAN.client[~quiet]))
    figure = peer_gantt(run, since=2.0, until=6.0)
    assert {"event withheld", "event rejected"} < set(legend_of(figure))
    assert figure.axes[0].get_xlim() == (2.0, 6.0) and "from 2 to 6 of" in note_of(figure)[0]


def test_a_long_plan_is_cut_and_the_note_says_so():
    shown, least = (on_page(run_of(PLAN), most) for most in (110, 2))  # 2 are fewer than begin at time 0
    bars, few = (
        np.concatenate([array(each["base"]) for each in one.figure["data"] if each["type"] == "bar"])
        for one in (shown, least)
    )
    assert 0 < len(bars) <= 110 / (1 + len(PLAN.receiver) / len(PLAN.client))
    assert re.fullmatch(r"the first [\d.]+ of [\d.]+ seconds", shown.note)
    assert few.tolist() == [0.0] * PLAN.num_clients


@pytest.mark.parametrize("asked", [{"since": -1.0}, {"since": 1e6}, {"since": 2.0, "until": 2.0}, {"until": 0.0}])
def test_a_part_without_time_is_refused(asked):
    for draw, schedule in ((gantt, make_schedule()), (peer_gantt, PLAN)):
        with pytest.raises(ValueError, match=f"^{[*asked][-1]} = "):
            draw(schedule, **asked)
    assert "used = (2,): must be bool" in refusal(gantt, UNKNOWN, used=np.ones(2, bool))
