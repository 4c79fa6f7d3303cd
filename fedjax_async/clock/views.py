"""The contract of policies: what they know before a run, what they see during it, and what they may decide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fedjax_async.types import Schedule

Value = TypeVar("Value")


class _Prior(NamedTuple):
    num_clients: int
    examples: np.ndarray  # int64[N]
    seconds: np.ndarray  # float64[N], how long a job takes: the mean of eight jobs by delay and network
    local_steps: np.ndarray  # int64[N], of a job
    seed: int


class Prior(_Prior):
    """What a server knows of its clients before the run; its columns are copies that cannot be written to."""

    __slots__ = ()

    def __new__(
        cls, num_clients: int, examples: np.ndarray, seconds: np.ndarray, local_steps: np.ndarray, seed: int
    ) -> Prior:
        """Copy the columns."""
        examples, seconds, local_steps = (read_only(np.array(column)) for column in (examples, seconds, local_steps))
        return super().__new__(cls, num_clients, examples, seconds, local_steps, seed)


def read_only(column: np.ndarray) -> np.ndarray:
    """A read-only view of ``column``."""
    column = column.view()
    column.setflags(write=False)
    return column


class WhenRead(Mapping[str, Value]):
    """Values by name, each made when it is read, ``read(name)``: most policies read few of them."""

    def __init__(self, names: Collection[str], read: Callable[[str], Value]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Value:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class View(NamedTuple):
    """What the server has seen at a look; its arrays cannot be written to.

    ``arrivals``, columns of equal length, a row per applied upload in order: client, time, seconds (from the dispatch
    to the upload), staleness, weight, upload_norm, accepted; with compressed uploads bits; for policies with ``loss``
    also loss and rms_loss, ``mean(l)`` and ``sqrt(mean(l^2))`` of the losses ``l`` of the client's examples under the
    model from which its job started. ``scores``: the newest evaluation, empty before the first. ``losses(clients)``:
    the mean loss of the server's current model on the examples of each of these clients, float64. The current model is
    the model at the last look, or at the last decision about an upload if that was later. All arrivals before that
    moment are applied to it.
    """

    time: float
    step: int  # server steps closed
    arrivals: Mapping[str, np.ndarray]
    scores: Mapping[str, np.floating | np.ndarray]
    losses: Callable[[np.ndarray], np.ndarray]


class Finished(NamedTuple):
    """What a client knows of its job once it is trained, before it uploads anything."""

    client: int
    number: int  # earlier jobs of this client
    norm: float  # of the upload, before anything happens to it on its way; NaN if it is not finite
    bits: int  # of the upload as a message, 0 if uploads are not compressed


class Choice(NamedTuple):
    """Clients that train next, and the score of each, which is only recorded."""

    clients: np.ndarray
    scores: np.ndarray


class Policy(NamedTuple):
    """The decisions of a policy; ``None`` leaves a decision to the timing.

    ``choose(view, idle, count)``: which of the ``idle`` clients (ascending) train next, at most ``count`` of them and
    at least one if none is under way. ``buffer(view)``: how many uploads make the next server step, with a buffered
    timing. ``window(view)``: how many seconds the next window takes, with the timing ``window``.
    ``sends(view, finished)``: whether a client uploads what it has trained. ``sizes``: uploads take the time of their
    true bytes. ``loss``: the policy reads the columns loss and rms_loss. ``every``: the fewest arrivals between two
    looks; a decision between looks gets the older view, in which only ``time`` and ``losses`` may be newer. ``spec``:
    the name and options of the policy, for error messages.
    """

    choose: Callable[[View, np.ndarray, int], Choice] | None = None
    buffer: Callable[[View], int] | None = None
    window: Callable[[View], float] | None = None
    sends: Callable[[View, Finished], bool] | None = None
    sizes: bool = False
    loss: bool = False
    every: int = 1
    spec: str = ""


PolicyModel = Callable[[Prior], Policy]


class Decider(Protocol):
    """What the planner of an adaptive run asks: ``decisions.Decisions`` says more."""

    policy: Policy
    record: Any  # the planner's ``Record``
    uploads: int
    withheld: int

    @property
    def asks(self) -> bool: ...

    def look(self, record: Any, time: float) -> None: ...

    def choose(self, idle: np.ndarray, count: int, *, alone: bool) -> list[int]: ...

    def size(self, most: int) -> int: ...

    def length(self) -> float: ...

    def upload(self, record: Any, job: int, number: int, time: float) -> int | None: ...

    def nothing_uploaded(self) -> ValueError: ...

    def schedule(self) -> Schedule: ...
