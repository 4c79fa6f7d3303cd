"""Decisions during a run: the planner asks, the run is executed up to that moment, and the policy answers.

An adaptive run has the same planner as a planned one (``timing.py``). At a decision the planner calls
:class:`Decisions`. It lets the *executor* train and apply all that is planned so far, and gives the observations to
the policy. So the planner's state is that of a Python function that has not returned. A resumed run is planned again
from the start; the observations in its checkpoint replace the training.
"""

from __future__ import annotations

import time as clock_time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import Record
from fedjax_async.clock.views import Choice, Finished, Policy, View, read_only
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

    def scores(self) -> Mapping[str, Any]:
        """The newest evaluation, empty if there is none."""


class GrowingTable:
    """A table that grows: columns of equal length."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}
        self._length = 0

    def append(self, rows: Mapping[str, np.ndarray]) -> None:
        """Add rows; all calls must give the same columns."""
        count = len(next(iter(rows.values())))
        for name, values in rows.items():
            held = self._held.get(name)
            if held is None or self._length + count > len(held):
                longer = np.zeros((max(64, 2 * (self._length + count)), *values.shape[1:]), values.dtype)
                longer[: self._length] = 0 if held is None else held[: self._length]
                held = self._held[name] = longer
            held[self._length : self._length + count] = values
        self._length += count

    def __len__(self) -> int:
        return self._length

    def columns(self) -> dict[str, np.ndarray]:
        """The rows so far, by column."""
        return {name: held[: self._length] for name, held in self._held.items()}


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
        self._view = View(0.0, 0, {}, {}, self._losses)
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
        if self.looks and record.applied - len(self._view.arrivals["client"]) < self.policy.every:
            self._view = self._view._replace(time=time)
            return
        self._advance(record)
        self.looks += 1
        arrivals = {name: read_only(column) for name, column in self._arrivals.columns().items()}
        scores = {name: _frozen(value) for name, value in self._executor.scores().items()}
        self._view = View(time, record.closed, arrivals, scores, self._losses)

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

    def _answer(self, call: str, kind: str, function: Callable[..., Any], *given: object) -> Any:
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


_TYPES: dict[str, Any] = {"client": np.int64, "staleness": np.int64, "accepted": np.bool_}


def _nothing(policy: Policy) -> dict[str, np.ndarray]:
    names = ["client", "time", "seconds", "staleness", "weight", "upload_norm", "accepted"]
    names += ["loss", "rms_loss"] if policy.loss else []
    return {name: np.zeros(0, _TYPES.get(name, np.float64)) for name in names}


def _observed(record: Record, first: int) -> dict[str, np.ndarray]:
    """What the clock knows of the arrivals from ``first`` on."""
    found = record.extension(len(record.client), first)
    client, sent, upload = (np.array([column[job] for job in found.job]) for column in
                            (record.client, record.dispatch_time, record.upload_time))  # fmt: skip
    return {"client": client, "time": found.time, "seconds": upload - sent, "staleness": found.staleness}


def _array(value: Any) -> Any:
    """``value`` as an array, ``None`` if it is ragged."""
    try:
        return np.asarray(value)
    except ValueError:
        return None


def _frozen(value: object) -> object:
    """The score; a read-only copy if it is an array."""
    return read_only(value.copy()) if isinstance(value, np.ndarray) else value


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
    distinct = len(np.unique(clients)) == len(clients) and bool(np.isin(clients, idle).all())
    check.require(distinct, field, clients.tolist(), "different clients among the idle ones")
    least = 1 if alone else 0
    check.require(least <= len(clients) <= count, field, clients.tolist(), f"between {least} and {count} clients")
    return clients.astype(np.int64), scores.astype(np.float64)
