"""A progress bar on standard error: virtual time, updates per second, staleness, accuracy.

The engine does not import it: it calls ``progress(done, total, *, time, staleness, accuracy)``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple, TextIO

from tqdm import tqdm

from fedjax_async import check


class Progress(NamedTuple):
    """``report(done, total, *, time, staleness, accuracy)`` and ``close()``."""

    report: Callable[..., None]
    close: Callable[[], None]


def clock_text(seconds: float) -> str:
    """Virtual seconds as readable text.

    >>> clock_text(42.0), clock_text(4000.0), clock_text(200_000.0)
    ('42.0s', '1h06m40s', '2d07h33m')
    """
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h{minutes:02}m"
    return f"{hours}h{minutes:02}m{whole % 60:02}s" if hours else f"{minutes}m{whole % 60:02}s"


def bar(total_updates: int, enabled: bool | None = None, *, label: str = "", file: TextIO | None = None) -> Progress:
    """A bar over ``total_updates`` updates, on standard error.

    ``enabled``: None shows the bar on a terminal only, True always, False never. ``label``: text in front of it, such
    as the method's name. ``report`` gets the updates done so far, the virtual time in seconds, the mean staleness and
    the last accuracy (NaN if unknown); it may be called at any rate, the bar is drawn a few times a second at most.
    ``close`` leaves the last state on screen.
    """
    check.whole("total_updates", total_updates, low=0)
    hidden = None if enabled is None else not enabled
    stream = sys.stderr if file is None else file
    shown = tqdm(
        total=total_updates, desc=label or None, unit=" updates", file=stream, disable=hidden, dynamic_ncols=True
    )

    def report(done: int, total: int, *, time: float, staleness: float, accuracy: float) -> None:
        if shown.disable:
            return
        parts = [f"t={clock_text(time)}"]
        parts += [] if math.isnan(staleness) else [f"staleness {staleness:.1f}"]
        parts += [] if math.isnan(accuracy) else [f"accuracy {100 * accuracy:.1f}%"]
        shown.total = total
        shown.set_postfix_str(", ".join(parts), refresh=False)
        shown.update(done - shown.n)

    return Progress(report, shown.close)
