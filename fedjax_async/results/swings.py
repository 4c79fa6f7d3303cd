"""The picture of an explained run: accuracy coloured by client, and how each client changed the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_async.results import figure as canvas
from fedjax_async.results.client_names import label
from fedjax_async.results.figure import SCREEN, Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURED = 6  # clients with a colour, those that changed the loss most; all others are grey
HEIGHTS = (3.0, 2.0)


def swings(
    arrivals: Mapping[str, np.ndarray],
    start: tuple[float, float],
    part: str,
    *,
    names: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> Figure:
    """Two plots: the accuracy (the loss without classes), coloured by client, and each client's changes of the loss.

    The upper plot is the accuracy after each arrival; each segment has the colour of the arriving client. The lower
    plot has one curve per client: the sum of the changes of the loss that its arrivals caused so far. If a server step
    has several arrivals, its segments have the colour of the arrival that contributed most to the change.

    Args:
      arrivals: as in :class:`fedjax_async.results.explaining.Explanation`.
      start: loss and accuracy before the first arrival.
      part: the part of the data, for the titles of the axes.
      names: one per client, for the legend; long ones are cut, as in :func:`fedjax_async.results.gantt`.
    """
    from matplotlib.collections import LineCollection  # noqa: PLC0415

    client, change = np.asarray(arrivals["client"]), np.asarray(arrivals["change"], np.float64)
    colours = _colours(client, change)
    labelled = not np.isnan(arrivals["accuracy"]).all()
    column, first = ("accuracy", start[1]) if labelled else ("loss", start[0])
    size, label = canvas.axis("time", float(arrivals["time"][-1]))
    time = np.concatenate([[0.0], np.asarray(arrivals["time"])]) / size
    value = np.concatenate([[first], np.asarray(arrivals[column], np.float64)]) * (100 if labelled else 1)
    figure = canvas.empty(7.2, sum(HEIGHTS), drawing)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=HEIGHTS)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=canvas.INK, labelsize=9, length=3, width=0.8, color=canvas.FAINT)
        axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    pieces = np.stack([np.stack([time[:-1], time[1:]], 1), np.stack([value[:-1], value[1:]], 1)], axis=2)
    owners = _owners(np.asarray(arrivals["step"]), client, change)
    moved = np.array([colours.get(int(owner), canvas.FAINT) for owner in owners])
    grey = moved == canvas.FAINT
    for some, order in ((grey, 1), (~grey, 2)):
        above.add_collection(LineCollection(list(pieces[some]), colors=list(moved[some]), linewidths=1.4, zorder=order))
    above.autoscale_view()
    above.set_xlim(0, float(time[-1]))
    for each in np.unique(client):
        total = np.concatenate([[0.0], np.cumsum(np.where(client == each, change, 0.0))])
        colour, order = (colours[int(each)], 2) if int(each) in colours else (canvas.FAINT, 1)
        below.plot(
            time, total, color=colour, linewidth=1.4 if order == 2 else 0.8, drawstyle="steps-post", zorder=order
        )
    below.axhline(0.0, color=canvas.INK, linewidth=0.6)
    canvas.label(above, "", f"{part} {column}" + (" (%)" if labelled else ""))
    canvas.label(below, label, "change of the loss\ncaused so far")
    _legend(figure, colours, names, drawing, others=len(np.unique(client)) > len(colours))
    return canvas.finish(figure, drawing)


def _colours(client: np.ndarray, change: np.ndarray) -> dict[int, str]:
    """Client -> colour, for the clients that changed the loss most, up or down."""
    weight = np.bincount(client, np.abs(change))
    most = [int(each) for each in np.argsort(-weight, kind="stable")[:COLOURED] if weight[each] > 0]
    return {each: canvas.PALETTE[index] for index, each in enumerate(sorted(most))}


def _owners(step: np.ndarray, client: np.ndarray, change: np.ndarray) -> np.ndarray:
    """The client whose colour each arrival's segment of the line has; int64[E]."""
    owner = np.array(client)
    for number, count in zip(*np.unique(step, return_counts=True)):
        if count > 1:
            of = np.flatnonzero(step == number)
            owner[of] = client[of[np.argmax(change[of] * np.sign(change[of].sum()))]]
    return owner


def _legend(
    figure: Figure, colours: Mapping[int, str], names: Sequence[str] | None, drawing: Drawing, *, others: bool
) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    texts = [f"client {label(names, each)}" for each in colours] + ["others"] * others
    looks = [*colours.values()] + [canvas.FAINT] * others
    lines = [Line2D([], [], color=colour, linewidth=1.6) for colour in looks]
    canvas.legend_below(figure, lines, texts, drawing, columns=COLOURED + 1, labelcolor=canvas.INK)
