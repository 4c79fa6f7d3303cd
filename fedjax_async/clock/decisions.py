"""Decisions during a run: the planner asks, the run is executed up to that moment, and the policy answers.

An adaptive run has the same planner as a planned one (``timing.py``). At a decision the planner calls
:class:`Decisions`. It lets the *executor* train and apply all that is planned so far, and gives the observations to
the policy. So the planner's state is that of a Python function that has not returned. A resumed run is planned again
from the start; the observations in its checkpoint replace the training.
"""

from __future__ import annotations

import time as clock_time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import Record
from fedjax_async.clock.views import Choice, Finished, Policy, View, WhenRead, read_only
from fedjax_async.types import Schedule

# No upload is expected any more after 1000 withheld jobs in a row, or 20 times the number of clients if that is more.
# The run then stops with an error, because the withheld jobs are trained, which takes longer than planning.
_PATIENCE, _LEAST_PATIENCE = 20, 1000


class Ended(Exception):
    """The run is stopped before its budget is spent."""


class Executor(Protocol):
    """What executes a plan: an engine, or a substitute for it."""

    def advance(self, record: Record) -> Mapping[str, np.ndarray]:
        """Train and apply all arrivals of ``record``; returns the observed columns of the new ones."""

    def finished(self, record: Record, job: int) -> tuple[float, int]:
        """Train a job that is under way; returns the norm (NaN: not finite) and the bits of the client's upload."""

    def losses(self, clients: np.ndarray) -> np.ndarray:
        """The mean loss of the current model on the examples of each of these clients; float64."""

    def scores(self) -> Mapping[str, object]:
        """The newest evaluation, empty if there is none."""


Answer = TypeVar("Answer")
CHUNKS = 256  # that a growing table holds before it puts its columns together


class GrowingTable:
    """A table that grows: columns of equal length. A column is put together when it is read."""

    def __init__(self) -> None:
        # how many rows came before, and rows
        self._chunks: list[tuple[int, Mapping[str, Sequence[float] | np.ndarray]]] = []
        self._held: dict[str, np.ndarray] = {}  # with spare room
        self._filled: dict[str, int] = {}  # by column: how many rows of it are put together
        self._length = 0

    def append(self, rows: Mapping[str, Sequence[float] | np.ndarray]) -> None:
        """Add rows, which must not change any more; all calls must give the same columns."""
        count = len(next(iter(rows.values())))
        if len(rows) > len(self._held):
            for name in (name for name in rows if name not in self._held):
                self._held[name], self._filled[name] = np.asarray(rows[name])[:0], self._length
        if len(self._chunks) == CHUNKS:
            self.columns()
            self._chunks.clear()
        if count:
            self._chunks.append((self._length, rows))
        self._length += count

    def __len__(self) -> int:
        return self._length

    @property
    def names(self) -> Collection[str]:
        """The names of the columns."""
        return self._held.keys()

    def column(self, name: str) -> np.ndarray:
        """The rows so far of a column."""
        held, filled = self._held[name], self._filled[name]
        if self._length > len(held):
            longer = np.zeros((max(64, 2 * self._length), *held.shape[1:]), held.dtype)
            longer[:filled] = held[:filled]
            held = self._held[name] = longer
        for first, rows in reversed(self._chunks):
            if first < filled:
                break
            held[first : first + len(rows[name])] = rows[name]
        self._filled[name] = self._length
        return held[: self._length]

    def columns(self) -> dict[str, np.ndarray]:
        """The rows so far, by column."""
        return {name: self.column(name) for name in self.names}


class Decisions:
    """Asks a policy, in order of virtual time, and records its decisions.

    ``seconds``: wall-clock time of the policy, including the losses that it asked clients for. ``tables``: ``chosen``,
    with update, client, time and score of each client that it chose, ``buffer``, with update, time and size of each
    buffer, and ``window``, with update, time and length (seconds) of each window. If the policy decides about uploads,
    ``uploads`` counts the uploads that it let through, and ``withheld`` counts the jobs withheld since the last upload.
    """

    def __init__(self, policy: Policy, executor: Executor) -> None:
        self.policy, self._executor = policy, executor
        self._asked: Any = policy  # without its type: a method asks only if the policy decides this
        self.record: Any = None  # the planner's, as soon as there is one
        self.looks, self.seconds = 0, 0.0
        self._arrivals, self._chosen = GrowingTable(), GrowingTable()
        self._buffers, self._windows = GrowingTable(), GrowingTable()
        self._view, self._known = View(0.0, 0, {}, {}, self._losses), 0  # arrivals in the view
        self.uploads, self.withheld = 0, 0
        self._largest = 0.0  # the largest norm of an upload withheld since the last one let through
        self._arrivals.append(_nothing(policy))

    @property
    def asks(self) -> bool:
        """Whether the policy decides about uploads, once their jobs are trained."""
        return self.policy.sends is not None or self.policy.sizes

    @property
    def tables(self) -> dict[str, dict[str, np.ndarray]]:
        """The decisions, one table per kind; only of kinds that the policy decides."""
        policy = self.policy
        found = {
            "chosen": (policy.choose, self._chosen),
            "buffer": (policy.buffer, self._buffers),
            "window": (policy.window, self._windows),
        }
        return {name: table.columns() for name, (decided, table) in found.items() if decided is not None}

    def look(self, record: Record, time: float) -> None:
        """Execute the plan so far and renew the view, unless the last look was fewer than ``every`` arrivals ago.

        Raises ``Ended`` if the run is stopped.
        """
        if self.looks and record.applied - self._known < self.policy.every:
            self._view = self._view._replace(time=time)
            return
        self._advance(record)
        self.looks += 1
        table, known, found = self._arrivals, len(self._arrivals), self._executor.scores()
        arrivals = WhenRead(table.names, lambda name: read_only(table.column(name)[:known]))
        scores = WhenRead(found.keys(), lambda name: _frozen(found[name]))
        self._view, self._known = View(time, record.closed, arrivals, scores, self._losses), known

    def _advance(self, record: Record) -> None:
        self.record, known = record, len(self._arrivals)
        rows = dict(self._executor.advance(record))
        if record.applied > known:
            self._arrivals.append(_observed(record, known) | rows)

    def _losses(self, clients: object) -> np.ndarray:
        """The losses that a policy asks for; ``ValueError`` unless ``clients`` are client numbers."""
        asked, count = _array(clients), self.record.num_clients
        whole = asked is not None and asked.ndim == 1 and (asked.dtype.kind in "iu" or not len(asked))
        good = whole and bool(((asked >= 0) & (asked < count)).all())
        check.require(good, "view.losses(clients)", clients, f"a list or an array of clients, from 0 to {count - 1}")
        return self._executor.losses(np.asarray(asked, np.int64)) if len(asked) else np.zeros(0)

    def _answer(self, call: str, kind: str, function: Callable[..., Answer], *given: object) -> Answer:
        """What a policy's function returns. Its errors except ``Ended`` become a ``ValueError`` that names ``call``."""
        begin = clock_time.perf_counter()
        try:
            return function(*given)
        except Ended:
            raise
        except Exception as error:
            line = " ".join(str(error).split())
            raise ValueError(
                f"{call}: must be a function that returns {kind}; it raised {type(error).__name__}: {line}"
            ) from error
        finally:
            self.seconds += clock_time.perf_counter() - begin

    def choose(self, idle: np.ndarray, count: int, *, alone: bool) -> list[int]:
        """The clients that train next, ascending, at most ``count``.

        ``alone``: no job is under way, so that at least one client must be chosen. Raises ``ValueError`` for an invalid
        choice.
        """
        choice = self._answer(_CHOOSE, _CHOICE, self._asked.choose, self._view, read_only(idle), count)
        clients, scores = _checked(choice, idle, count, alone)
        order = np.argsort(clients)
        clients, scores = clients[order], scores[order]
        update = np.full(len(clients), self.record.applied, np.int64)
        moment = np.full(len(clients), self._view.time)
        self._chosen.append({"update": update, "client": clients, "time": moment, "score": scores})
        return list(map(int, clients))

    def size(self, most: int) -> int:
        """How many uploads make the next server step, at most ``most``; ``ValueError`` unless a whole number >= 1."""
        size = self._answer("policy.buffer(view)", "a whole number >= 1", self._asked.buffer, self._view)
        check.whole("policy.buffer(view)", size)
        size = min(int(size), most)
        self._buffers.append(self._now() | {"size": np.array([size])})
        return size

    def length(self) -> float:
        """How many seconds the next window takes; ``ValueError`` unless a finite number > 0."""
        length = self._answer("policy.window(view)", "a number of seconds > 0", self._asked.window, self._view)
        check.real_positive("policy.window(view)", length)
        self._windows.append(self._now() | {"length": np.array([length], np.float64)})
        return float(length)

    def _now(self) -> dict[str, np.ndarray]:
        return {"update": np.array([self.record.applied]), "time": np.array([self._view.time])}

    def upload(self, record: Record, job: int, number: int, time: float) -> int | None:
        """The true bytes of a job's upload (0 if uploads are not compressed), ``None`` if it is withheld.

        Raises ``ValueError`` if no client uploads any more.
        """
        self.look(record, time)
        if record.applied > len(self._arrivals):  # the view may stay older, the model must be current
            self._advance(record)
        norm, bits = self._executor.finished(record, job)
        if self.policy.sends is None or self._sends(Finished(record.client[job], number, norm, bits)):
            self.uploads, self.withheld, self._largest = self.uploads + 1, 0, 0.0
            return -(-bits // 8)
        self.withheld, self._largest = self.withheld + 1, max(self._largest, norm)
        if self.withheld >= max(_LEAST_PATIENCE, _PATIENCE * record.num_clients):
            raise self.nothing_uploaded()
        return None

    def _sends(self, finished: Finished) -> bool:
        call = "policy.sends(view, finished)"
        sends = self._answer(call, "True or False", self._asked.sends, self._view, finished)
        value = _array(sends)
        check.require(value is not None and value.shape == () and value.dtype == np.bool_, call, sends, "True or False")
        return bool(sends)

    def nothing_uploaded(self) -> ValueError:
        """The error for a policy that lets no client upload."""
        field = f"policy = {self.policy.spec!r}" if self.policy.spec else "policy"
        return ValueError(
            f"{field}: must let clients upload, but no client uploads: the last {self.withheld:,} jobs were all "
            f"withheld, and the largest norm among them was {self._largest:.4g} (if the policy has a "
            "threshold for the norm, choose a smaller one)"
        )

    def schedule(self) -> Schedule:
        """What is planned so far."""
        return self.record.schedule()


_TYPES: dict[str, type] = {"client": np.int64, "staleness": np.int64, "accepted": np.bool_}


def _nothing(policy: Policy) -> dict[str, np.ndarray]:
    names = ["client", "time", "seconds", "staleness", "weight", "upload_norm", "accepted"]
    names += ["loss", "rms_loss"] if policy.loss else []
    return {name: np.zeros(0, _TYPES.get(name, np.float64)) for name in names}


def _observed(record: Record, first: int) -> dict[str, np.ndarray]:
    """What the clock knows of the arrivals from ``first`` on."""
    found = record.extension(len(record.client), first)
    sent, upload = record.dispatch_time, record.upload_time
    return {
        "client": np.array([record.client[job] for job in found.job]),
        "time": np.array(found.time),
        "seconds": np.array([upload[job] - sent[job] for job in found.job]),
        "staleness": np.array(found.staleness),
    }


def _array(value: object) -> Any:
    """``value`` as an array, ``None`` if it is ragged."""
    try:
        return np.asarray(value)
    except ValueError:
        return None


def _frozen(value: object) -> np.floating | np.ndarray:
    """The score on the host; a read-only copy if it is an array."""
    found = np.array(value)
    return read_only(found) if found.ndim else found[()]


_CHOOSE, _CHOICE = "policy.choose(view, idle, count)", "a Choice(clients, scores)"


def _checked(choice: Choice, idle: np.ndarray, count: int, alone: bool) -> tuple[np.ndarray, np.ndarray]:
    field = _CHOOSE
    check.kind(field, choice, Choice, _CHOICE)
    clients, scores = _array(choice.clients), _array(choice.scores)
    columns = clients is not None and scores is not None and clients.ndim == 1 and scores.shape == clients.shape
    check.require(columns, field, choice, f"{_CHOICE} of equal length")
    whole = clients.dtype.kind in "iu" or not len(clients)
    check.require(whole, field, choice, f"{_CHOICE} in which clients are integers")
    real = scores.dtype.kind in "biuf" or not len(scores)
    check.require(real, field, choice, f"{_CHOICE} with scores that are real numbers or NaN")
    found = idle[np.minimum(np.searchsorted(idle, clients), len(idle) - 1)]
    distinct = len(set(clients.tolist())) == len(clients) and bool((found == clients).all())
    check.require(distinct, field, clients.tolist(), "different clients among the idle ones")
    least = 1 if alone else 0
    check.require(least <= len(clients) <= count, field, clients.tolist(), f"between {least} and {count} clients")
    return clients.astype(np.int64), scores.astype(np.float64)
