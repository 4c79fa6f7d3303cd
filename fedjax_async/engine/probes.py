"""Probes on the host: which arrivals they see, what they return, and the tables that they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_async.base import check
from fedjax_async.engine.components import Components, bound, row_of
from fedjax_async.engine.trial import job, one_row
from fedjax_async.types import Array, DataParts, Facts, FederatedData, Key, Params, Probe, Schedule, State

Probes = Mapping[str, Probe]
NO_PROBES: Probes = {}
COLUMNS = ("update", "client", "time")  # the first columns of every probe's table


def resolved_probes(probes: Mapping[str, object] | None, data: FederatedData, arrivals: int) -> dict[str, Probe]:
    """Every probe as a :class:`Probe`, for a run of ``arrivals``; ``ValueError`` for probes that do not fit the run."""
    allowed = "a dict of names and probes"
    check.require(probes is None or isinstance(probes, Mapping), "probes", probes, allowed)
    if not probes:
        return {}
    check.require(not data.streamed, "probes", list(probes), f"left out: {data.name} is too large for the device")
    resolved = {name: _resolved(name, probe, arrivals) for name, probe in probes.items()}
    for name, probe in resolved.items():
        for part in getattr(probe.function, "needs", ()):
            missing = part != "train" and not np.any(held_out_rows(data, part)[2])
            allowed = f"left out, given with {part}_fraction > 0, or made for another part: no client has a {part} part"
            check.require(not missing, f"probes[{name!r}]", f"of {part} parts", allowed)
    return resolved


def _resolved(name: object, given: Any, arrivals: int) -> Probe:
    _check_name("probe name", name)
    probe = given if isinstance(given, Probe) else Probe(given)
    field = f"probes[{name!r}]"
    check.require(callable(probe.function), field, given, "a function or a Probe of one")
    check.whole(f"{field}.every", probe.every)
    if probe.at is None:
        return probe
    check.require(probe.every == 1, f"{field}.every", probe.every, "left out where at is given")
    listed = isinstance(probe.at, (list, tuple, range, np.ndarray))
    check.require(listed, f"{field}.at", probe.at, "a list of numbers of arrivals")
    for number in probe.at:
        check.whole(f"{field}.at", number, low=0, high=arrivals - 1)
    return probe._replace(at=tuple(sorted({int(number) for number in probe.at})))


def _check_name(field: str, name: object) -> None:
    good = isinstance(name, str) and name and not set(name) & set("/:")
    check.require(bool(good), field, name, "a text without '/' and ':'")


def numbers_of(probe: Probe, arrivals: int) -> np.ndarray:
    """The numbers of the arrivals that a resolved probe sees, in order; int64."""
    return np.arange(0, arrivals, probe.every) if probe.at is None else np.asarray(probe.at, np.int64)


def sees(probe: Probe, number: int) -> bool:
    """Whether a resolved probe sees the arrival with this number."""
    return number % probe.every == 0 if probe.at is None else number in probe.at


def described(probes: Probes) -> dict[str, object] | None:
    """Names and chosen arrivals of probes, which identify a checkpoint; ``None`` without probes."""
    chosen: dict[str, object] = {
        name: {"every": p.every} if p.at is None else {"at": list(p.at)} for name, p in probes.items()
    }
    return chosen or None


def checked(
    name: str, function: Callable[..., Mapping[str, Array]], given: str = "state, memory, arrival, parts"
) -> Callable[..., dict[str, Array]]:
    """``function``, with its result as a dict of scalar arrays; ``ValueError`` if it raises or returns anything else.

    ``given``: the names of its arguments, for the message.
    """

    def call(*values: State) -> dict[str, Array]:
        field = f"probes[{name!r}]"
        try:
            found = function(*values)
        except Exception as error:
            kind, line = f"a function f({given}) -> {{name: scalar}}", " ".join(str(error).split())
            raise ValueError(f"{field}: must be {kind}; it raised {type(error).__name__}: {line}") from error
        check.require(
            isinstance(found, Mapping) and bool(found), field, found, "a function that returns {name: scalar}"
        )
        return {column: _scalar(field, column, value) for column, value in found.items()}

    return call


def _scalar(field: str, column: object, value: ArrayLike) -> Array:
    _check_name(f"column of {field}", column)
    check.require(column not in COLUMNS, f"column of {field}", column, f"named other than {', '.join(COLUMNS)}")
    try:
        array = jnp.asarray(value)
        numeric = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_
    except (TypeError, ValueError):
        numeric = False
    name_of = f"{field}[{column!r}]"
    check.require(numeric, name_of, value, "a number")
    check.require(array.shape == (), f"{name_of}.shape", array.shape, "(), that of a scalar")
    return array.astype(array.dtype)  # a Python number has no dtype of its own


def columns_of(probes: Probes, components: Components, params: Params) -> dict[str, dict[str, Array]]:
    """Shapes of the columns of each probe; nothing is computed. ``ValueError`` unless it returns a dict of scalars."""
    if not probes:
        return {}
    data, hyper = components.data, components.hyper
    row = row_of(data.x), row_of(data.y)
    held_out = row_of(data.test_x), row_of(data.test_y)

    def outputs(
        params: Params, key: Key, pool: tuple[Array, Array], tests: tuple[Array, Array]
    ) -> dict[str, dict[str, Array]]:
        rule, client = bound(components.rule, hyper), bound(components.client, hyper)
        found = job(rule, client, params, key, pool, Facts(len(data.size)))
        own, test = (one_row(x, y, jnp.int32(0)) for x, y in (pool, tests))
        given = (found.state, found.memory, found.arrival, DataParts(own, own, test))
        return {name: checked(name, probe.function)(*given) for name, probe in probes.items()}

    found: dict[str, dict[str, Array]] = jax.eval_shape(
        outputs, params, jax.eval_shape(jax.random.key, 0), row, held_out
    )
    return found


def held_out_rows(data: FederatedData, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(order, offset, size)`` of the clients' ``"validation"`` or ``"test"`` parts, empty where there are none."""
    order, offset, size = (getattr(data, f"{kind}_{name}") for name in ("order", "offset", "size"))
    if order is None or len(order) == 0:
        nothing = np.zeros(len(data.size), np.int32)
        return np.zeros(1, np.int32), nothing, nothing
    return np.asarray(order, np.int32), np.asarray(offset, np.int32), np.asarray(size, np.int32)


def probe_table(
    schedule: Schedule, position: np.ndarray, numbers: np.ndarray, columns: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The table of a probe: its arrivals are those at ``position`` in the schedule and have these ``numbers``."""
    client = schedule.client[schedule.job[position]]
    return {"update": numbers, "client": client, "time": schedule.time[position], **columns}
