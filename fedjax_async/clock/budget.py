"""The budget of a plan: when it ends, how far planning has come, and how long the schedule will be.

A progress bar shows it, and a schedule that does not fit is refused.

Policies tell a :class:`Forecast` now and then how far they are. A schedule that will not fit the machine's memory is
refused after the first few thousand jobs, not when the memory is used up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import NamedTuple

EVERY = 1 << 12  # jobs between two forecasts
BYTES_PER_JOB = 256  # in planning, at the peak: the columns of the schedule, and the lists that they are made from
DOUBT = 8  # the first jobs may come this much faster than the later ones


class Until(NamedTuple):
    """The budget: a schedule ends at the first limit that is reached.

    ``time`` in virtual seconds (inclusive), ``updates`` in applied arrivals, ``steps`` in closed server steps. If the
    budget ends within a server step, the arrivals already applied to it are listed with ``closes`` false. Whichever
    limit ends it, the schedule has all jobs that the server sends up to its last moment, the replies to the last
    uploads.
    """

    time: float | None = None
    updates: int | None = None
    steps: int | None = None


def budget_text(until: Until) -> str:
    """The limits that are set, by the names of a run's settings, for messages.

    >>> budget_text(Until(time=60.0, steps=4))
    'time = 60, server_steps = 4'
    """
    named = {"time": until.time, "updates": until.updates, "server_steps": until.steps}
    return ", ".join(f"{name} = {value:.6g}" for name, value in named.items() if value is not None)


def host_memory() -> int:
    """Bytes of the machine's memory; 8 GiB where the platform does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**33


class Forecast:
    """``note`` what is planned so far; ``report(share)`` is called with the share of the budget that is spent."""

    def __init__(self, until: Until, report: Callable[[float], None] | None = None):
        self.until, self._report = until, report
        self.most = host_memory() // BYTES_PER_JOB
        self._first: tuple[float, float] | None = None  # jobs and share at the first look after the start

    def note(self, jobs: float, *, time: float = 0.0, updates: float = 0, steps: float = 0) -> None:
        """Note the jobs planned so far, and what is reached: virtual time, applied arrivals, closed steps.

        Raises ``ValueError`` naming the budget if the schedule needs more memory than the machine has.
        """
        until = self.until
        budget = ((time, until.time), (updates, until.updates), (steps, until.steps))
        share = max(0.0 if whole is None else spent / whole for spent, whole in budget)
        if share > 0 and self._first is None:  # many jobs are sent at time 0: what counts is the rate from here on
            self._first = jobs, share
        before, since = self._first or (jobs, share)
        rate = (jobs - before) / (share - since) if share > since else 0.0
        self.expect(jobs, jobs + rate * max(0.0, 1 - share), doubt=DOUBT)
        self.tell(share)

    def tell(self, share: float) -> None:
        """Report the share of the budget that is spent."""
        if self._report is not None:
            self._report(min(1.0, share))

    def expect(self, jobs: float, total: float, *, doubt: float = 1.0) -> None:
        """Raise ``ValueError`` if ``jobs``, or ``total / doubt`` jobs in the end, are more than the memory holds."""
        if jobs <= self.most and total <= self.most * doubt:
            return
        total = max(total, jobs)
        count = f"about {total:.2g}" if math.isfinite(total) else "endless"
        raise ValueError(
            f"{budget_text(self.until)}: must end within {self.most:.2g} jobs, which fill this machine's memory, and "
            f"not {count}; shorten the budget"
        )
