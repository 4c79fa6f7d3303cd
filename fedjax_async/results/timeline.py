"""What charts of a schedule share (``plots.py``, ``peer_gantt.py``): jobs, messages, colours, rows, the time shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_async.base import check, inputs
from fedjax_async.clock import Outcome, next_dispatch, with_derived_columns
from fedjax_async.clock.absences import OfflineTimes, offline_times
from fedjax_async.peers import Delivery, PeerSchedule
from fedjax_async.results import figure as canvas
from fedjax_async.results.client_names import labels
from fedjax_async.results.figure import FAINT, PALETTE
from fedjax_async.types import Run, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

REJECTED = "rejected"  # arrived in time, but the server rule gave it no weight
UNUSED = "unused"  # arrived for a server step that was not complete at the end
BY_STALENESS = ("applied", "late")  # states with a staleness, which gives their colour
OFFLINE = "#F3E3C3"  # behind the bars, where a client is offline, or a node has not joined yet or has left
UNAPPLIED = "#D9D9D9"  # where one colour stands for all states without a staleness
LOST = PALETTE[1]
FAILED = ("lost", "crashed", "interrupted")  # states of jobs whose upload will never come; a cross marks their end
WAITING = "server waits in vain"  # after a failure, up to the timeout; the colour is that of the state
# Colour of a job that the server does not apply, by its state.
STATE_COLOURS = {
    REJECTED: PALETTE[6],
    "under way": UNAPPLIED,
    "called off": "#5F5F5F",
    "lost": LOST,
    "crashed": "#8B1A1A",
    "interrupted": PALETTE[3],
    "dropped late": PALETTE[4],
    "dropped stale": "#B8860B",
    "given up": "#9C8AA5",
    "withheld": PALETTE[5],
    UNUSED: "#A6CEE3",
}
# Name of a message's end -> the outcomes that it stands for, colour of the lines, whether they are dotted.
MESSAGES: dict[str, tuple[tuple[Delivery, ...], str, bool]] = {
    "mixed": ((Delivery.MIXED,), PALETTE[0], False),
    "superseded by a newer one": ((Delivery.SUPERSEDED,), PALETTE[4], False),
    "dropped from a full buffer": ((Delivery.OVERFLOWED,), PALETTE[3], False),
    "lost": ((Delivery.LOST,), LOST, True),
    "not mixed by the end": ((Delivery.WAITING, Delivery.IN_FLIGHT), FAINT, True),
}
LOST_AFTER = 0.35  # the line of a lost message ends after this share of the way
MOST_BARS = 60  # of a histogram
BEYOND = 1.02  # a chart that should be longer than its schedule by this factor says that it ends earlier


class Jobs(NamedTuple):
    """The bars of a chart, one entry per job in order of dispatch; [J]."""

    begin: np.ndarray  # float64, virtual seconds
    end: np.ndarray  # float64, of the work; inf if it does not end
    waited: np.ndarray  # float64, until when the server waits for an upload that will never come; else ``end``
    staleness: np.ndarray  # int64, -1 if it is never applied
    applied: np.ndarray  # float64, when the server applies its upload; NaN if never
    state: np.ndarray  # str: its ``clock.Outcome`` in words, ``rejected`` or ``unused``


def jobs_of(schedule: Schedule, used: np.ndarray | None = None, accepted: np.ndarray | None = None) -> Jobs:
    """The jobs of a schedule; ``used`` and ``accepted``: which arrivals the server uses and accepts, bool[E] [all].

    A job ends with its upload, where its client crashed or went offline, or where its upload, which was lost, was due.
    The server may wait longer, up to the timeout or the time at which the upload of a crashed job was due. A job of
    which none of this is known ends when the server stops waiting for it. Both end at the latest at the client's next
    dispatch.
    """
    schedule = with_derived_columns(schedule)
    used, accepted = (
        np.ones(len(schedule.job), bool) if of is None else np.asarray(of, bool) for of in (used, accepted)
    )
    names = np.array([outcome.name.lower().replace("_", " ") for outcome in Outcome], dtype=object)
    state = names[schedule.outcome]
    state[schedule.job[~accepted]] = REJECTED
    state[schedule.job[~used]] = UNUSED
    staleness = np.full(schedule.client.size, -1)
    applied = np.full(schedule.client.size, np.nan)
    # In a schedule that was not checked, a job may arrive twice: its first application counts.
    arrived = np.flatnonzero(used)[::-1]
    job = schedule.job[arrived]
    staleness[job], applied[job] = schedule.staleness[arrived], schedule.time[arrived]
    waited = end = np.where(np.isfinite(schedule.upload_time), schedule.upload_time, schedule.freed_time)
    if len(schedule.failure_time):
        unnoticed = np.isin(schedule.outcome, (Outcome.UNDER_WAY, Outcome.CALLED_OFF))
        known = np.isfinite(schedule.failure_time) & ~unnoticed
        end = np.where(known, schedule.failure_time, end)
    following = next_dispatch(schedule)
    end, waited = np.minimum(end, following), np.minimum(np.maximum(end, waited), following)
    return Jobs(schedule.dispatch_time, end, waited, staleness, applied, state)


def idle_time(begin: np.ndarray, end: np.ndarray, until: float, offline: np.ndarray | None = None) -> np.ndarray:
    """The intervals up to ``until`` in which a client with these jobs has none; float64[gaps, 2], in order.

    ``offline``: float64[M, 2], intervals that do not count as idle time.
    """
    if offline is not None:
        begin, end = np.append(begin, offline[:, 0]), np.append(end, offline[:, 1])
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    gaps = np.stack([np.append(0.0, end), np.minimum(np.append(begin, until), until)], axis=1)
    return gaps[gaps[:, 1] - gaps[:, 0] > 1e-9 * until]  # less is rounding


def away(plan: PeerSchedule, node: int, until: float) -> np.ndarray:
    """The intervals up to ``until`` in which a node has not joined yet or has left; float64[M, 2]."""
    found = np.array([(0.0, min(plan.joined[node], until)), (plan.left[node], until)])
    return found[found[:, 0] < found[:, 1]]


class Lines(NamedTuple):
    """Lines of messages with the same end: from the sender's row when they are sent to the receiver's on arrival."""

    colour: str
    dotted: bool
    time: np.ndarray  # float64[M, 2], virtual seconds
    row: np.ndarray  # float64[M, 2]


def lines_of(plan: PeerSchedule, row_of: np.ndarray, sent: np.ndarray) -> dict[str, Lines]:
    """End -> its lines, for the messages bool[M] in ``sent`` between nodes with a row; ``row_of``: int[N], or -1.

    The line of a lost message ends on the way.
    """
    ends = np.stack([row_of[plan.client[plan.push_event]], row_of[plan.receiver]], 1).astype(float)
    begin = plan.end[plan.push_event]
    time = np.stack([begin, np.where(np.isfinite(plan.arrival), plan.arrival, begin)], 1)
    there = sent & (ends >= 0).all(axis=1)
    found = {}
    for name, (outcomes, colour, dotted) in MESSAGES.items():
        mine = there & np.isin(plan.outcome, outcomes)
        row = ends[mine]
        if name == "lost":
            row[:, 1] = row[:, 0] + LOST_AFTER * (row[:, 1] - row[:, 0])
        if mine.any():
            found[name] = Lines(colour, dotted, time[mine], row)
    return found


def shares(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """A histogram of whole numbers: the middle of each bar, its share in percent, and how many numbers it covers.

    >>> shares(np.array([0, 0, 1, 3]))
    (array([0., 1., 2., 3.]), array([50., 25.,  0., 25.]), 1)
    """
    width = math.ceil((int(values.max()) + 1) / MOST_BARS)
    share = 100 * np.bincount(values // width) / values.size
    return np.arange(len(share)) * width + (width - 1) / 2, share, width


# --- times offline ------------------------------------------------------------------------------------


class Absences(NamedTuple):
    """``times(client, until) -> float64[M, 2]``; None if all are always online or, as the ``note`` says, unknown."""

    times: OfflineTimes | None
    note: str = ""


NONE = Absences(None)


def absences_of(settings: Mapping[str, Any], num_clients: int) -> Absences:
    """The absences of a run with these settings, as results keep them.

    They are unknown for a model of the user's own, because a folder keeps no code, and for recorded intervals if the
    file is missing or has changed.
    """
    specs = {name: settings.get(name) for name in ("availability", "faults")}
    if specs["availability"] is None and "groups" not in str(specs["faults"]):
        return NONE
    own = settings.get("own") or {}
    for name, spec in specs.items():
        if name in own:
            return Absences(None, f"times offline are not shown: {name} is an object, {spec}")
    recorded = (settings.get("files") or {}).get("availability", {}).get("sha256", [])
    try:
        for path, digest in recorded:
            if inputs.digest(path) != digest:
                return Absences(None, f"times offline are not shown: {path} has changed since the run")
        times = offline_times(
            specs["availability"], num_clients, faults=specs["faults"], seed=int(settings.get("seed", 0))
        )
    except (ValueError, OSError) as error:
        return Absences(None, f"times offline are not shown: {error}")
    return Absences(times)


# --- charts with a row per client or node -------------------------------------------------------------


def rows_of(clients: int | Sequence[int], count: int) -> list[int]:
    """The clients of a chart, one in each row: the first ones or the listed ones; ``ValueError`` for others."""
    rows = list(range(min(clients, count))) if isinstance(clients, int) else list(clients)
    good = len(rows) > 0 and all(0 <= row < count for row in rows)
    check.require(good, "clients", clients, f"a number >= 1 or client numbers below {count}")
    return rows


def label_rows(
    axes: Axes, rows: Sequence[int], names: Sequence[str] | None, since: float, until: float, name: str
) -> None:
    """Name the rows, one ``name`` (client) each, by ``names`` or numbers, and the axis of time from ``since`` on."""
    size, label = canvas.axis("time", until)
    axes.set_xlim(since / size, until / size)
    canvas.label(axes, label, name)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), canvas.verbatim(labels(names, rows)))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def draw_absences(axes: Axes, of_rows: Sequence[np.ndarray], until: float, name: str) -> bool:
    """A pale band for each interval, float64[M, 2], of each row, a ``name``; returns whether there is any."""
    begin, end = np.concatenate(of_rows).T / canvas.axis("time", until)[0]
    rows = np.repeat(np.arange(len(of_rows)), [*map(len, of_rows)])
    bands = axes.barh(rows, end - begin, left=begin, height=0.86, color=OFFLINE, linewidth=0, zorder=0.45)
    if len(bands):
        canvas.mark(axes, bands, name=f"{name} offline", hoverinfo="skip")
    return len(bands) > 0


def window(since: float, until: float | None, usual: float, end: float) -> float:
    """The virtual time up to which a chart was asked for, by default ``usual`` seconds; ``ValueError`` for others."""
    check.non_negative("since", since)
    check.require(since < end, "since", since, f"below {end:.6g} s, the end of the schedule")
    if until is None:
        return min(end, since + usual)
    check.positive("until", until)
    check.require(until > since, "until", until, f"more than since = {since:g} s")
    return until


def left_out(rows: Sequence[int], count: int, name: str, since: float, until: float, end: float) -> str:
    """What a chart from ``since`` to ``until`` leaves out of a schedule with this ``end``; empty if it is nothing."""
    parts = [f"{len(rows)} of {count} {name}s"] if len(rows) < count else []
    size, label = canvas.axis("time", min(until, end))
    unit = label.partition("(")[2].removesuffix(")")
    first, shown, whole = (
        f"{at / size:,.0f}" if at >= 10 * size else f"{at / size:.3g}" for at in (since, min(until, end), end)
    )
    if since > 0:
        parts.append(f"from {first} to {shown} of {whole} {unit}")
    elif until < end:
        parts.append(f"the first {shown} of {whole} {unit}")
    if until > BEYOND * end:
        parts.append(f"the schedule ends after {whole} {unit}")
    return ", ".join(parts)


def staleness_colours(
    figure: Figure, axes: Axes, staleness: np.ndarray, unit: str, white: float = 0.0
) -> ScalarMappable:
    """The colour of each staleness, counted in ``unit``, with its scale beside the axes; ``white``: its share."""
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.colors import ListedColormap, Normalize  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    shades = ListedColormap(white + (1 - white) * colormaps["viridis_r"](np.linspace(0, 1, 256)))
    colours = ScalarMappable(Normalize(0, max(1, staleness.max(initial=0))), shades)
    ticks = MaxNLocator(nbins=6, integer=True)
    scale = figure.colorbar(colours, ax=axes, ticks=ticks, pad=0.015, aspect=18, shrink=0.9)
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=9, colors=canvas.INK, length=0)
    scale.set_label(f"staleness ({unit})", fontsize=9, color=canvas.INK)
    canvas.mark(axes, scale, name="staleness")
    return colours


def staleness_of(run: Run) -> np.ndarray:
    """The staleness of each update that was applied.

    Rejected uploads were not, nor those of a server step that the run's end left open.
    """
    staleness, used = np.asarray(run.updates["staleness"]), run.updates.get("used")
    if used is None:
        return staleness
    accepted = run.updates.get("accepted", used)
    return staleness[np.asarray(used, np.bool_) & np.asarray(accepted, np.bool_)]
