"""Plans of decentralised runs in files: exact ``.npz`` archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.archives import Format, check_columns, is_archive, read_archive, single_numbers, write_archive
from fedjax_async.peers.checking import ENTRIES, EVENTS, NODES, PUSHES, check_peer_schedule
from fedjax_async.peers.schedule import PeerSchedule

_FORMAT = Format("fedjax_async peer schedule", 1)

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
        (EVENTS, len(s.client)), (bounds, len(s.client) + 1), (ENTRIES, len(s.source)),
        (PUSHES, len(s.push_event)), (NODES, s.num_clients),
    ):  # fmt: skip
        check_columns(path, s, names, length)
    try:
        check_peer_schedule(s)
    except ValueError as error:
        raise ValueError(f"{path}: the columns contradict each other; the file is damaged ({error})") from None
