"""Warnings about runs: an early end, unused or rejected uploads, small buffers, no switch of a correction, a cut graph.

They are Python warnings; the command line prints one line for each. This file imports neither NumPy nor JAX, because
the command line imports it when it starts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Counters = Mapping[str, Any]  # ``Run.counters`` of a run
MOST_NAMES = 3  # runs that a warning names
SMALL = 10  # jobs in flight per upload of a buffer, from which on the buffer is small


class RunWarning(UserWarning):
    """A run ended in a way that its numbers alone do not show."""


class NeverSwitched(RunWarning):
    """OrthoDyn never left its first phase: the run used that phase's correction only."""


class NotConnected(RunWarning):
    """The graph of a run without a server is not strongly connected: its nodes may never agree."""


class SmallBuffer(RunWarning):
    """A server step takes few of the jobs in flight: uploads are many steps stale, and the accuracy may swing."""


class AllRejected(RunWarning):
    """Every upload of a run was rejected: its model is still the initial one."""


class EndedEarly(RunWarning):
    """A run ended before its budget: no client could train any more, or its own timing's schedule ended."""


ENDED_EARLY = "ended_early"  # the counter that says so, and why; other runs do not have it


def all_rejected(counters: Counters) -> bool:
    """Whether uploads arrived and none of them was accepted.

    >>> all_rejected({"updates": 4, "unused": 1, "rejected": 5, "dropped_stale": 2})
    True
    """
    came = counters.get("updates", 0) + counters.get("unused", 0)
    return bool(came > 0 and counters.get("rejected", 0) == came)


# Why uploads were rejected -> what to do about it.
ADVICE = {
    "not finite": "training diverges: lower the learning rate, first lr, then the server's",
    "corrupt": "the setting faults made them NaN",
    "larger than norm_limit": "raise norm_limit, or lower the learning rate",
    "of weight 0": "from the method's rule: change its options that weigh uploads, not the learning rate",
}


def why_rejected(counters: Counters) -> dict[str, int]:
    """Cause, a key of ``ADVICE``, -> how many uploads were rejected for it; empty if the counters do not say.

    >>> why_rejected({"rejected": 9, "zero_weight": 4, "too_large": 2, "corrupt": 3})
    {'corrupt': 3, 'larger than norm_limit': 2, 'of weight 0': 4}
    >>> why_rejected({"rejected": 5, "too_large": 5, "corrupt": 3, "messages": 20})  # without a server
    {'larger than norm_limit': 5}
    """
    if "too_large" not in counters:  # of a folder of an earlier version
        return {}
    corrupt, large, zero = (counters.get(name, 0) for name in ("corrupt", "too_large", "zero_weight"))
    corrupt = 0 if "messages" in counters else corrupt  # of messages between nodes, which are no uploads
    counts = (counters.get("rejected", 0) - corrupt - large - zero, corrupt, large, zero)
    return {cause: count for cause, count in zip(ADVICE, counts) if count > 0}


def _advice(runs: Iterable[Counters]) -> str:
    """Why these runs rejected uploads, and what to do."""
    causes = [why_rejected(counters) for counters in runs]
    found = {cause: sum(each.get(cause, 0) for each in causes) for cause in ADVICE}
    if not all(causes):
        return "not finite, larger than norm_limit, or of weight 0; this older folder does not say which"
    return "; ".join(f"{count} {cause} ({ADVICE[cause]})" for cause, count in found.items() if count)


def unknown_files(paths: Sequence[str]) -> str:
    """What to say of an older folder without digests of its input files."""
    more = f" and {len(paths) - MOST_NAMES} more" if len(paths) > MOST_NAMES else ""
    return (
        f"saved by a version that kept no digests of input files, so whether {', '.join(paths[:MOST_NAMES])}{more} "
        "changed since is not known"
    )


def warn_about(runs: Mapping[str, Counters]) -> None:
    """Warn of runs that ended before their budget, that have unused uploads or no accepted upload, and of OrthoDyn
    runs that never switched.

    One warning for all runs of a kind. ``runs``: name -> counters; a single run may have an empty name.
    """
    early = {name: counters[ENDED_EARLY] for name, counters in runs.items() if counters.get(ENDED_EARLY)}
    if early:
        each = [f"{name}: {text}" if name else str(text) for name, text in early.items()]
        more = f"; and {len(each) - MOST_NAMES} more runs ended early" if len(each) > MOST_NAMES else ""
        warnings.warn("; ".join(each[:MOST_NAMES]) + more, EndedEarly, stacklevel=3)
    unused = {name: counters["unused"] for name, counters in runs.items() if counters.get("unused")}
    if unused:
        count = sum(unused.values())
        came = "upload came" if count == 1 else "uploads came" if len(unused) == 1 else "uploads in all came"
        warnings.warn(
            f"{_named(unused)}{count} {came} for a server step that was not complete at the end: trained "
            "but not used, counted as 'unused' and not as updates (a budget of server steps, "
            "server_steps or --server-steps, ends with a complete one)",
            RunWarning,
            stacklevel=3,
        )
    rejected = [name for name, counters in runs.items() if all_rejected(counters)]
    if rejected:
        warnings.warn(
            f"{_named(rejected)}EVERY UPLOAD WAS REJECTED, and the model is still the initial one: "
            f"{_advice(runs[name] for name in rejected)}",
            AllRejected,
            stacklevel=3,
        )

    still = [name for name, counters in runs.items() if counters.get("phase_changes") == 0 and name not in rejected]
    if still:
        warnings.warn(
            f"{_named(still)}OrthoDyn never switched: all arrivals were corrected as in its first phase (column "
            "correction_phase); switch=share lets it switch after a share of the run, and a larger fraction or a "
            "smaller decay lets it switch earlier",
            NeverSwitched,
            stacklevel=3,
        )


def warn_of_small_buffer(method: str, size: int, jobs: int) -> None:
    """Warn that a server step of ``size`` uploads takes fewer than a tenth of the ``jobs`` in flight."""
    rule = method.partition("@")[0]
    warnings.warn(
        f"{method}: its buffer of {size} is under a tenth of the {jobs} jobs in flight: uploads are about "
        f"{jobs / size:.0f} server steps stale, and the accuracy may swing; a larger buffer "
        f"({rule}@buffer:size={-(-jobs // SMALL)}), a smaller server_lr or a lower concurrency helps",
        SmallBuffer,
        stacklevel=3,
    )


def _named(names: Iterable[str]) -> str:
    """The names of the runs that a warning is about: ``"a, b, c and 4 more: "``; empty for a run without a name."""
    names = [name for name in names if name]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}: " if names else ""
