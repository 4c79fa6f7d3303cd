"""Progress bars of planning, and of training with virtual time, staleness and accuracy; lines where nobody watches.

The engine does not import this file; it calls a function ``progress(done, total, *, time, staleness, accuracy)``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from fedjax_async.base import check
from fedjax_async.engine.record import Progress

ProgressShown = bool | Progress | None  # the argument ``progress`` of simulate, compare, sweep, resume and explain
INTERVAL = 60.0  # seconds between two lines where no bar is shown
PATIENCE = 1.0  # seconds before a planning bar appears; most plans are ready by then


class ProgressBar(NamedTuple):
    """``report(done, total, *, time, staleness, accuracy)`` and ``close()``."""

    report: Callable[..., None]
    close: Callable[[], None]


def require_progress(shown: object) -> None:
    """``ValueError`` unless it is None, True or False (a bar or none), or a function that the engine can call."""
    known = shown is None or isinstance(shown, bool)
    allowed = "True, False, None, or a function f(done, total, *, time, staleness, accuracy)"
    check.require(known or _takes_progress(shown), "progress", shown, allowed)


def _takes_progress(report: object) -> bool:
    """Whether it can be called as ``report(done, total, time=, staleness=, accuracy=)``."""
    if not callable(report):
        return False
    try:
        inspect.signature(report).bind(0, 1, time=0.0, staleness=0.0, accuracy=0.0)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def clock_text(seconds: float) -> str:
    """Virtual seconds as readable text.

    >>> clock_text(42.0), clock_text(4000.0), clock_text(200_000.0)
    ('42.0s', '1h06m40s', '2d07h33m')
    """
    if not math.isfinite(seconds) or round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h{minutes:02}m"
    return f"{hours}h{minutes:02}m{whole % 60:02}s" if hours else f"{minutes}m{whole % 60:02}s"


def bar(
    total_updates: int,
    enabled: ProgressShown = None,
    *,
    label: str = "",
    several: bool = False,
    file: TextIO | None = None,
) -> ProgressBar:
    """A bar over ``total_updates`` updates, on standard error or in a notebook's cell.

    ``enabled``: None shows the bar on a terminal and in a notebook, and elsewhere, as in the log file of a job, a line
    a minute; True always shows the bar, False nothing; a function takes the place of the bar and gets what ``report``
    gets. ``label``: text in front of it, such as the method's name. ``several``: the updates are those of several runs,
    so that neither bar nor line shows the time, staleness and accuracy of the one that reported last. ``report`` gets
    the updates done so far, the virtual time in seconds, the mean staleness and the last accuracy (NaN if unknown); it
    may be called at any rate, the bar is drawn a few times a second at most.
    ``close`` leaves the last state on screen.
    """
    check.whole("total_updates", total_updates, low=0)
    require_progress(enabled)
    if callable(enabled):
        return ProgressBar(enabled, lambda: None)
    stream = sys.stderr if file is None else file
    if enabled is None and not _is_watched(stream):
        return _lines(label or "progress", several, stream)
    shown = _shown(enabled, stream, total=total_updates, desc=label or None, unit=" updates")

    def report(done: int, total: int, *, time: float, staleness: float, accuracy: float) -> None:
        if shown.disable:
            return
        shown.total = total
        if not several:
            shown.set_postfix_str(_status(time, staleness, accuracy), refresh=False)
        shown.update(done - shown.n)

    return ProgressBar(report, shown.close)


def _status(time: float, staleness: float, accuracy: float) -> str:
    parts = [f"t={clock_text(time)}"]
    parts += [] if math.isnan(staleness) else [f"staleness {staleness:.1f}"]
    parts += [] if math.isnan(accuracy) else [f"accuracy {100 * accuracy:.1f}%"]
    return ", ".join(parts)


def _lines(label: str, several: bool, stream: TextIO) -> ProgressBar:
    """A line every ``INTERVAL`` seconds, none in a shorter run."""
    began = monotonic()
    last = began
    first: tuple[int, float] | None = None  # updates and time: a run that goes on had updates before

    def report(done: int, total: int, *, time: float, staleness: float, accuracy: float) -> None:
        nonlocal last, first
        now = monotonic()
        first = (done, now) if first is None else first
        if now - last < INTERVAL:
            return
        last, new = now, done - first[0]
        left = f", about {clock_text((now - first[1]) * (total - done) / new)} left" if new > 0 else ""
        status = "" if several else f", {_status(time, staleness, accuracy)}"
        print(
            f"{label}: {done:,} of {total:,} updates{status}; {clock_text(now - began)}{left}",
            file=stream,
            flush=True,
        )

    return ProgressBar(report, lambda: None)


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _is_watched(stream: TextIO) -> bool:
    """Whether a person sees a bar on ``stream`` grow."""
    return _in_notebook() or getattr(stream, "isatty", lambda: False)()


def _shown(enabled: bool | Progress | None, stream: TextIO, **about: Any) -> tqdm:
    """A bar of ipywidgets in a notebook that has them, else of characters.

    Where a bar is usual, ``TQDM_DISABLE`` may disable it.
    """
    if enabled is not None or not _is_watched(stream):
        about["disable"] = enabled is not True
    kind: type[tqdm] = tqdm
    if _in_notebook():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets
            kind = importlib.import_module("tqdm.auto").tqdm  # it looks for IPython
    return kind(file=stream, dynamic_ncols=True, **about)


@contextlib.contextmanager
def planning_bar(
    runs: int = 1, enabled: ProgressShown = None, *, file: TextIO | None = None
) -> Iterator[Callable[[int], Callable[[float], None]]]:
    """A bar over the planning of ``runs`` runs, with an estimate of the time left; it disappears at the end.

    Yields ``part``: ``part(i)`` is a function ``report(share)`` for run i, called with the share of its budget that is
    planned.
    ``enabled`` and ``file`` as in :func:`bar`.
    """
    stream = sys.stderr if file is None else file
    form = "planning {percentage:3.0f}% |{bar}| [{elapsed} so far, {remaining} left]"
    with _shown(enabled, stream, total=runs, bar_format=form, miniters=0, leave=False, delay=PATIENCE) as shown:

        def part(index: int) -> Callable[[float], None]:
            def report(share: float) -> None:
                shown.update(max(0.0, index + share - shown.n))

            report(0.0)
            return report

        yield part
