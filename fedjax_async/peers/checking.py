"""Plans of decentralised runs made by parts of the user's own, or read from files: contradictions are refused."""

from __future__ import annotations

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import SLACK, job_numbers
from fedjax_async.peers.schedule import Delivery, PeerSchedule
from fedjax_async.peers.statistics import readers
from fedjax_async.peers.waves import previous_events

EVENTS: dict[str, type] = {
    "client": np.int32, "number": np.int32, "local_steps": np.int32, "start": np.float64, "end": np.float64,
    "mixed_at": np.float64, "mass": np.float64, "unsent_mass": np.float64,
}  # fmt: skip
ENTRIES: dict[str, type] = {"source": np.int64, "fragment": np.int32, "weight": np.float64}
PUSHES: dict[str, type] = {
    "push_event": np.int64, "push_fragment": np.int32, "receiver": np.int32, "sent_mass": np.float64,
    "arrival": np.float64, "outcome": np.int8, "mixed_by": np.int64, "corrupt": np.bool_,
}  # fmt: skip
NODES: dict[str, type] = {"joined": np.float64, "left": np.float64}
_ROUNDING = 1e-9  # of a sum of mixing coefficients


def check_peer_schedule(schedule: PeerSchedule) -> PeerSchedule:
    """The plan; ``ValueError`` naming a column and a value if its columns contradict each other (``PeerSchedule``)."""
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule")
    for name, low in (("num_clients", 1), ("fragments", 1), ("message_bytes", 0), ("late_mass", 0)):
        check.whole(f"schedule.{name}", getattr(schedule, name), low=low)
    _check_lengths(schedule)
    _check_events(schedule)
    _check_pushes(schedule)
    _check_inboxes(schedule)
    return schedule


def _check_lengths(s: PeerSchedule) -> None:
    groups: tuple[tuple[dict[str, type], int], ...] = (
        (EVENTS, len(np.atleast_1d(s.client))),
        ({"inbox_bounds": np.int64}, len(np.atleast_1d(s.client)) + 1),
        (ENTRIES, len(np.atleast_1d(s.source))),
        (PUSHES, len(np.atleast_1d(s.push_event))),
        (NODES, s.num_clients),
    )
    for kinds, length in groups:
        for name, kind in kinds.items():
            column = getattr(s, name)
            found = f"{column.dtype}{list(column.shape)}" if isinstance(column, np.ndarray) else type(column).__name__
            good = isinstance(column, np.ndarray) and column.shape == (length,) and column.dtype == kind
            check.require(good, f"schedule.{name}", found, f"an array {np.dtype(kind)}[{length}]")


def _require(name: str, values: np.ndarray, sound: np.ndarray, allowed: str) -> None:
    """Raise ``ValueError`` for the first value that is not ``sound``."""
    if not sound.all():
        index = int(np.argmin(sound))
        raise ValueError(f"schedule.{name}[{index}] = {values[index].item()}: must be {allowed}")


def _within(name: str, values: np.ndarray, low: int, high: int) -> None:
    _require(name, values, (values >= low) & (values < high), f"from {low} to {high - 1}")


def _check_events(s: PeerSchedule) -> None:
    _within("client", s.client, 0, s.num_clients)
    _require("number", s.number, s.number == job_numbers(s.client), "the count of the node's events before")
    _require("local_steps", s.local_steps, s.local_steps >= 1, "at least 1")
    _require("start", s.start, (s.start >= 0) & np.isfinite(s.start), "a finite number >= 0")
    _require("end", s.end, (s.end > s.start) & np.isfinite(s.end), "finite, and after the start of the event")
    during = (s.mixed_at >= s.start) & (s.mixed_at <= s.end)
    _require("mixed_at", s.mixed_at, during, "from the start to the end of the event")
    _require("mixed_at", s.mixed_at, np.diff(s.mixed_at, prepend=0.0) >= 0, "at least that of the event before")
    before = previous_events(s.client)
    free = np.where(before >= 0, s.end[before], 0.0)
    _require("start", s.start, s.start * SLACK >= free, "at or after the end of the node's event before")
    for name in ("mass", "unsent_mass"):
        values = getattr(s, name)
        _require(name, values, (values >= 0) & np.isfinite(values), "a finite number >= 0")


def _check_pushes(s: PeerSchedule) -> None:
    events = len(s.client)
    _within("push_event", s.push_event, 0, events)
    _within("push_fragment", s.push_fragment, 0, s.fragments)
    _within("receiver", s.receiver, 0, s.num_clients)
    _require("sent_mass", s.sent_mass, (s.sent_mass >= 0) & np.isfinite(s.sent_mass), "a finite number >= 0")
    sent = s.arrival * SLACK >= s.end[s.push_event]
    _require("arrival", s.arrival, sent, "at or after the end of the event that sends, or infinite")
    _within("outcome", s.outcome, 0, len(Delivery))
    _within("mixed_by", s.mixed_by, -1, events)
    _require("joined", s.joined, s.joined >= 0, "at least 0")
    _require("left", s.left, s.left >= 0, "at least 0")


def _check_inboxes(s: PeerSchedule) -> None:
    bounds, entries = s.inbox_bounds, len(s.source)
    ascending = np.diff(bounds, prepend=0) >= 0
    _require("inbox_bounds", bounds, ascending & (bounds <= entries), f"ascending, from 0 to {entries}")
    ends = bounds[0] == 0 and bounds[-1] == entries
    check.require(bool(ends), "schedule.inbox_bounds", bounds[[0, -1]].tolist(), f"from 0 to {entries}")
    reader = readers(s)
    _require("source", s.source, (s.source >= 0) & (s.source < reader), "an event before the one that reads it")
    _within("fragment", s.fragment, 0, s.fragments)
    _require("weight", s.weight, (s.weight >= 0) & np.isfinite(s.weight), "a finite number >= 0")
    total = np.bincount(reader * s.fragments + s.fragment, s.weight)
    cell = reader * s.fragments + s.fragment
    _require(
        "weight", s.weight, total[cell] <= 1 + _ROUNDING, "at most 1 in sum over an event's messages of a fragment"
    )
    came = np.full(entries, np.inf)
    shape = (len(s.client), s.fragments, s.num_clients)
    pushed = np.ravel_multi_index((s.push_event, s.push_fragment, s.receiver), shape)
    read = np.ravel_multi_index((s.source, s.fragment, s.client[reader]), shape)
    if len(pushed):
        order = np.lexsort((s.arrival, pushed))
        at = np.minimum(np.searchsorted(pushed[order], read), len(pushed) - 1)
        came = np.where(pushed[order][at] == read, s.arrival[order][at], np.inf)
    _require(
        "source", s.source, came <= s.mixed_at[reader] * SLACK, "an event whose message has come to the node by then"
    )
