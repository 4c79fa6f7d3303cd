"""Plans of decentralised runs in files: exact ``.npz`` archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.archives import Format, check_columns, is_archive, read_archive, single_numbers, write_archive
from fedjax_async.peers.schedule import Delivery, PeerSchedule

_FORMAT = Format("fedjax_async peer schedule", 1)

_EVENTS = {
    "client": np.int32, "number": np.int32, "local_steps": np.int32, "start": np.float64, "end": np.float64,
    "mixed_at": np.float64, "mass": np.float64, "unsent_mass": np.float64,
}  # fmt: skip
_ENTRIES = {"source": np.int64, "fragment": np.int32, "weight": np.float64}
_PUSHES = {
    "push_event": np.int64, "push_fragment": np.int32, "receiver": np.int32, "sent_mass": np.float64,
    "arrival": np.float64, "outcome": np.int8, "mixed_by": np.int64, "corrupt": np.bool_,
}  # fmt: skip
_NODES = {"joined": np.float64, "left": np.float64}
_NUMBERS = {
    "num_clients": int, "fragments": int, "message_bytes": int, "carries": bool, "late_mass": int, "exhausted": bool,
}  # fmt: skip
# what older files lack
_NEWER = {"exhausted": np.array(False), "late_mass": np.array(1), "unsent_mass": np.zeros(0)}


def save_peer_schedule(path: str | Path, schedule: PeerSchedule) -> None:
    """Write a plan as ``.npz``; a reader sees the whole old or the whole new file, never a part."""
    check.kind("schedule", schedule, PeerSchedule, "a PeerSchedule; that of a run is run.schedule")
    write_archive(path, _FORMAT, schedule._asdict())


def is_peer_schedule(path: str | Path) -> bool:
    """Whether a file holds a plan of a run without a server; false for one that cannot be read."""
    return is_archive(path, _FORMAT)


def load_peer_schedule(path: str | Path) -> PeerSchedule:
    """Read what ``save_peer_schedule`` wrote; ``ValueError`` if the file is truncated, foreign or inconsistent."""
    columns = read_archive(path, _FORMAT, PeerSchedule._fields, _NEWER)
    if not len(columns["unsent_mass"]):
        columns["unsent_mass"] = np.zeros(np.shape(columns["client"]))
    schedule = PeerSchedule(**(columns | single_numbers(path, columns, _NUMBERS)))
    _check(path, schedule)
    return schedule


def _check(path: str | Path, s: PeerSchedule) -> None:
    """Shapes, types and the references between the columns; any error means a damaged file."""
    bounds = {"inbox_bounds": np.int64}
    for names, length in (
        (_EVENTS, len(s.client)), (bounds, len(s.client) + 1), (_ENTRIES, len(s.source)),
        (_PUSHES, len(s.push_event)), (_NODES, s.num_clients),
    ):  # fmt: skip
        check_columns(path, s, names, length)
    events = len(s.client)
    reader = np.repeat(np.arange(events), np.maximum(np.diff(s.inbox_bounds), 0))
    ranges = (
        (s.client, s.num_clients), (s.receiver, s.num_clients), (s.source, events), (s.push_event, events),
        (s.fragment, s.fragments), (s.push_fragment, s.fragments), (s.mixed_by + 1, events + 1),
        (s.outcome, len(Delivery)),
    )  # fmt: skip
    good = all(bool(((values >= 0) & (values < high)).all()) for values, high in ranges)
    good = good and s.inbox_bounds[0] == 0 and s.inbox_bounds[-1] == len(s.source) == len(reader)
    if not (good and bool((s.source < reader).all()) and bool((s.end > s.start).all())):
        raise ValueError(f"{path}: the columns contradict each other; the file is damaged")
