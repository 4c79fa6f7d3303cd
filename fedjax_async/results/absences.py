"""When the clients of a finished run were offline, from its settings: nothing else keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_async.base import inputs
from fedjax_async.clock.absences import OfflineTimes, offline_times


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
