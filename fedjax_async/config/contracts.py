"""Check the user's own parts against their contracts before a run, by abstract evaluation: nothing is compiled.

Every error is a ``ValueError`` that names the part, what it returned and what it must return (``types.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_async.base import check
from fedjax_async.base.factories import Made
from fedjax_async.clock import Availability, Delays, Faults, Network, Scenario, Timing, check_schedule
from fedjax_async.config import objects, own
from fedjax_async.config.settings import Settings
from fedjax_async.data.checking import layout
from fedjax_async.data.partition import Partitioner
from fedjax_async.engine.components import row_of
from fedjax_async.engine.record import RESERVED
from fedjax_async.models import cross_entropy
from fedjax_async.models.metrics import Metric
from fedjax_async.types import Array, FederatedData, Key, Model, Params, Schedule

ROWS = 3  # examples of the trial batch; an unusual number, so that a missing batch axis is noticed


def returned(part: str, contract: str, function: Callable[..., Made], *given: object, note: str = "") -> Made:
    """What a part returns; if it raises, the error names the part. ``note``: what it was given, for the error."""
    try:
        return function(*given)
    except Exception as error:
        condition = isinstance(error, jax.errors.TracerBoolConversionError)
        line = "a Python condition on a traced value; use jnp.where" if condition else " ".join(str(error).split())
        kind = contract if contract.startswith(("a ", "an ")) else f"a function {contract}"
        note = f" ({note})" if note else ""
        raise ValueError(f"{part}: must be {kind}; it raised {type(error).__name__}: {line}{note}") from error


def fits(good: bool, part: str, found: object, contract: str) -> None:
    """``ValueError`` that shows what ``part`` returned, unless ``good``."""
    if not good:
        raise ValueError(f"{part} returned {shown(found)}: must return {contract}")


def shown(found: object) -> str:
    """A result in a few words: shapes of arrays, types of all else."""
    if found is None or isinstance(found, (bool, int, float, str)):
        return repr(found)
    if is_array(found):
        return f"{found.dtype}{list(found.shape)}"
    if isinstance(found, dict):
        return "{" + ", ".join(f"{key!r}: {shown(value)}" for key, value in list(found.items())[:4]) + "}"
    if isinstance(found, (tuple, list)):
        text = ", ".join(map(shown, found[:4])) + (", ..." if len(found) > 4 else "")
        return f"{type(found).__name__}({text})" if type(found) is not tuple else f"({text})"
    return objects.shown(found)


def is_array(leaf: object) -> TypeGuard[Array]:
    """Whether it has a shape and a dtype."""
    return isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype")


def pair(part: str, found: Any, contract: str) -> Any:
    """``found``; ``ValueError`` unless it is a tuple of two."""
    fits(type(found) is tuple and len(found) == 2, part, found, contract)  # a NamedTuple is one value, not a pair
    return found


def alike(part: str, found: object, like: object, contract: str, note: str = "") -> None:
    """``ValueError`` unless ``found`` has structure, shapes and dtypes of ``like``; ``note``: where that is from."""
    same = str(jax.tree.structure(found)) == str(jax.tree.structure(like))
    note = f" ({note})" if note else ""
    fits(same, part, found, f"{contract} of the structure {shown(like)}{note}")
    for (path, have), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(like)):
        good = is_array(have) and have.shape == want.shape and have.dtype == want.dtype
        fits(good, f"{part}{jax.tree_util.keystr(path)}", have, f"{contract}: here {shown(want)}{note}")


# --- learning ---------------------------------------------------------------------------------------


def check_own_model(model: Model, data: FederatedData) -> None:
    """Check a model of the user's own: params of float arrays, one row of outputs and one loss per example."""

    def tried(key: Key, x: Array, y: Array) -> Array:
        params = returned("model.init", "init(key) -> params", model.init, key)
        leaves = jax.tree.leaves(params)
        floats = all(is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
        fits(bool(leaves) and floats, "model.init", params, "a pytree of float arrays")
        note = f"x is {shown(inputs := jax.eval_shape(data.decode, x))}{layout(inputs.shape[1:])}"
        outputs = returned("model.apply", "apply(params, x[, key]) -> outputs", model.apply, params, x, note=note)
        good = is_array(outputs) and outputs.ndim > 0 and outputs.shape[0] == ROWS
        fits(good, "model.apply", outputs, f"an array of one row per example, [{ROWS}, ...] for {ROWS} of them")
        if model.loss is cross_entropy:
            _check_labels(outputs, y, note)
        note = f"outputs are {shown(outputs)}, y is {shown(y)}"
        loss = returned("model.loss", "loss(outputs, y) -> [B]", model.loss, outputs, y, note=note)
        good = is_array(loss) and loss.shape == (ROWS,) and jnp.issubdtype(loss.dtype, jnp.floating)
        fits(good, "model.loss", loss, f"a number per example, float[{ROWS}] for {ROWS} of them, and not their mean")
        if model.train is None:  # a local step calls it with a key
            again = returned("model.apply", "apply(params, x, key) -> outputs", model.apply, params, x, key)
            alike("model.apply with a key", again, outputs, "outputs")
        else:
            mask = jnp.ones(ROWS, loss.dtype)
            kind = "(outputs, params), the outputs as apply's"
            found = returned("model.train", f"returning {kind}", model.train, params, x, key, mask)
            after = pair("model.train", found, kind)
            alike("model.train's outputs", after[0], outputs, "outputs")
            alike("model.train's params", after[1], params, "params")
        return outputs

    x, y = (_rows(rows) for rows in (data.x, data.y))
    outputs = jax.eval_shape(tried, jax.eval_shape(jax.random.key, 0), x, y)
    if jnp.issubdtype(y.dtype, jnp.floating) and outputs.shape != y.shape:
        _check_alone(model, outputs, y)


def _check_alone(model: Model, outputs: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
    """``ValueError`` if the loss of an example depends on others: [B, 1] and [B] broadcast to [B, B]."""

    def made(first: float, like: jax.ShapeDtypeStruct) -> Array:
        return jnp.asarray(np.linspace(first, 1, like.size).reshape(like.shape).astype(like.dtype))

    ours, wanted = made(0.1, outputs), made(0.5, y)
    together, alone = model.loss(ours, wanted)[0], model.loss(ours[:1], wanted[:1])[0]
    good = np.allclose(together, alone, rtol=1e-3, equal_nan=True)
    allowed = "of each example by itself: arrays [B, 1] and [B] broadcast to [B, B]; take outputs[:, 0]"
    check.require(good, "model.loss", f"mixes examples (outputs are {shown(outputs)}, y is {shown(y)})", allowed)


def _check_labels(outputs: Array, y: Array, note: str) -> None:
    """Check what the cross entropy needs: a row of logits for each label, and integer labels."""
    labels = f"integer labels [{ROWS}] (y.argmax(axis=-1) of one-hot rows), or a model that has another loss"
    sequences = y.ndim == 2 and outputs.shape[:-1] == y.shape
    good = (y.ndim == 1 or sequences) and jnp.issubdtype(y.dtype, jnp.integer)
    check.require(good, "data.y", shown(y), f"{labels}: models.from_flax(net, input_shape=..., loss=...)")
    if sequences:
        return
    flat = f"[{ROWS}, classes] for {ROWS} examples; {note}: flatten it first, x.reshape(len(x), -1)"
    fits(outputs.ndim == 2, "model.apply", outputs, flat)


def _rows(rows: np.ndarray) -> jax.ShapeDtypeStruct:
    row = row_of(rows)
    return jax.ShapeDtypeStruct((ROWS, *row.shape[1:]), row.dtype)


def is_scalar(value: object) -> bool:
    """Whether it is a number or a scalar array of numbers."""
    plain = isinstance(value, (bool, int, float))
    return plain or (is_array(value) and value.shape == () and _is_number(value))


def check_columns(part: str, columns: Mapping[str, object]) -> None:
    """Check the columns that a part adds to a table: ``{name: number}``, with names that are not taken."""
    fits(isinstance(columns, Mapping), part, columns, "{name: number}")
    for name, value in columns.items():
        named, field = isinstance(name, str) and name != "", f"name of a column of {part}"
        check.require(named and name not in RESERVED, field, name, f"a text other than {', '.join(RESERVED)}")
        fits(is_scalar(value), f"{part}[{name!r}]", value, "a number")


def check_metric(name: str, metric: Metric, model: Model, params: Params, data: FederatedData) -> None:
    """Check a metric on the model's outputs for a few test rows; ``params``: their shapes."""
    part, finish = f"metrics[{name!r}]", metric.finish

    def tried(params: Params, x: Array, y: Array) -> None:
        kind = "(outputs, y) -> [B], a number per example"
        values = returned(part, kind, metric.values, model.apply(params, x), y)
        many = f"arrays of one row per example, [{ROWS}, ...] for {ROWS} of them"
        good = bool(jax.tree.leaves(values)) and all(
            is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == ROWS and _is_number(leaf)
            for leaf in jax.tree.leaves(values)
        )
        if finish is None:
            one = (
                f"a number per example, float[{ROWS}] for {ROWS} of them, and not their mean (or a Metric with finish)"
            )
            fits(good and is_array(values) and values.ndim == 1, part, values, one)
            return
        fits(good, f"{part}.values", values, many)
        real = jnp.result_type(float)
        means = jax.tree.map(lambda leaf: jnp.mean(leaf.astype(real), axis=0), values)
        found = returned(f"{part}.finish", "(means of the values) -> number", finish, means)
        fits(is_array(found) and found.shape == () and _is_number(found), f"{part}.finish", found, "a number, float[]")

    jax.eval_shape(tried, params, _rows(data.test_x), _rows(data.test_y))


def _is_number(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_)


# --- the clock and the data -------------------------------------------------------------------------


def check_clock(s: Settings, delay: Any, num_clients: int) -> None:
    """Check the user's own delay, availability, fault and network models: their types, and what they give two jobs."""
    clients, numbers = np.array([0, num_clients - 1]), np.array([0, 1])

    def made(field: str, kind: type, *given: object) -> Any:
        model = own.thing_of(field, getattr(s, field))
        if model is None and field != "delay":
            return None  # the clock makes registered ones
        model = delay if field == "delay" else model
        contract = objects.KINDS[field]
        fits(callable(model), field, model, contract)
        found = returned(field, contract, model, *given)
        fits(isinstance(found, kind), field, found, contract)
        return found

    if own.is_own(s, "delay"):
        delays = made("delay", Delays, num_clients, s.seed)
        _check_durations(delays.durations, clients, numbers)
    if own.is_own(s, "network") and (network := made("network", Network, num_clients, s.seed)) is not None:
        call = "seconds(clients, numbers, bytes_down, bytes_up)"
        _seconds("network's seconds", call, network.seconds, clients, numbers, 0, 0)
    if own.is_own(s, "faults"):
        made("faults", Faults, num_clients, s.seed, 0)
    there = made("availability", Availability, num_clients, s.seed, 0) if own.is_own(s, "availability") else None
    if there is not None:
        contract = "(start, end) of an interval in virtual seconds, start < end or both infinite"
        interval = returned("availability's interval", f"interval(client, time) -> {contract}", there.interval, 0, 0.0)
        good = isinstance(interval, tuple) and len(interval) == 2 and all(isinstance(t, (int, float)) for t in interval)
        fits(
            good and (interval[0] < interval[1] or interval[0] == np.inf), "availability's interval", interval, contract
        )


def _check_durations(durations: Callable[..., np.ndarray], clients: np.ndarray, numbers: np.ndarray) -> None:
    """Check durations: jobs asked for together, and one by one in another order, take the same seconds."""
    part, call = "delay's durations", "durations(clients, numbers, local_steps, bytes_down, bytes_up)"
    _seconds(part, call, durations, clients, numbers, np.ones_like(clients), 0, 0)
    clients = np.unique(clients)[:, None]
    whole = _seconds(part, call, durations, clients, numbers[None], np.ones_like(clients), 0, 0)
    for (i, j), seconds in reversed(list(np.ndenumerate(whole))):
        (alone,) = np.ravel(_seconds(part, call, durations, clients[i], numbers[j : j + 1], 1, 0, 0))
        if not np.isclose(alone, seconds, rtol=1e-9, equal_nan=True):
            raise ValueError(
                f"{part}: must be the same at every call, but job {numbers[j]} of client {clients[i, 0]} "
                f"took {seconds:.6g} s and then {alone:.6g} s; draw by client and number, not by the order of calls: "
                'clock.Draws(seed, "NAME", clients, numbers).random()'
            )


def _seconds(part: str, call: str, function: Callable[..., np.ndarray], *given: ArrayLike) -> np.ndarray:
    contract = "an array of virtual seconds, one per job"
    found = returned(part, f"{call} of integers and arrays that broadcast, which returns {contract}", function, *given)
    shape = np.broadcast_shapes(*map(np.shape, given))
    is_array = isinstance(found, np.ndarray)
    whole = is_array and found.dtype.kind in "iu"
    hint = " (whole numbers: add .astype(float))" if whole else f", from {call} of arrays that broadcast"
    good = is_array and found.shape == shape and found.dtype.kind == "f"
    fits(good, part, found, f"{contract}: here float64{list(shape)}{hint}")
    return np.asarray(found)


def checked_timing(timing: Timing) -> Timing:
    """A timing of the user's own, with a check that it returns a consistent ``Schedule``."""

    def planned(scenario: Scenario) -> Schedule:
        found = returned("timing", objects.KINDS["timing"], timing, scenario)
        fits(isinstance(found, Schedule), "timing", found, "a Schedule (clock.make_schedule makes one)")
        count, have = scenario.num_clients, found.num_clients
        check.require(have == count, "num_clients of timing's schedule", have, f"{count}, as in the scenario")
        return check_schedule(found)

    for says in ("cuts_jobs", "ends_jobs", "ignores"):
        setattr(planned, says, getattr(timing, says, ()))
    return planned


def checked_partition(partition: Partitioner) -> Partitioner:
    """A partitioner of the user's own, with a check that it returns one index array per client."""

    def dealt(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        contract = "a list of arrays of row numbers, one per client"
        found = returned("partition", objects.KINDS["partition"], partition, labels, num_clients, rng)
        fits(isinstance(found, (list, tuple)) and len(found) == num_clients, "partition", found, contract)
        for rows in found:
            good = isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu"
            fits(good, "partition", rows, contract)
        return list(found)

    return dealt
