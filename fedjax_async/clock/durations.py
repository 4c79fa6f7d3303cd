"""How many virtual seconds client ``i`` needs for its ``n``-th job: the formula of all delay models, and the cache.

All models share one formula:

    duration = speed_i * draw_in * (c_i * steps/reference_steps + (1 - c_i) * bytes/reference_bytes)
               + bytes_down/bandwidth + bytes_up/bandwidth_up

``speed_i`` is drawn once per client (mean 1), ``draw_in`` once per job. ``c_i`` is the compute share of the
measured time: 1 for the parametric families, ``compute / mean`` for tables with a column ``compute``. Without a
reference its ratio is 1: the time does not depend on the steps, or on the bytes. So by default ``mean`` is the time
of one whole job, whatever its length; ``reference_steps=1`` makes it the time of one local step, and
``reference_steps=K`` that of K. Without ``bandwidth`` messages take no extra time.

``DurationCache``: the event loop needs one duration at a time, NumPy is fast only in bulk. So durations are drawn
for many jobs at once and kept until their clients need them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import chance
from fedjax_async.clock.chance import FAMILIES, UNSPREAD, Distribution

# The shortest duration, as a share of the client's mean: the clock must advance.
SMALLEST = 1e-6

Amounts = int | float | np.ndarray


class Delays(NamedTuple):
    """A delay model bound to its clients and its seed.

    ``durations(clients, numbers, local_steps, bytes_down, bytes_up) -> float64``: the seconds of job
    ``numbers[k]`` (0, 1, ...) of client ``clients[k]``. All arguments are integer arrays or scalars that
    broadcast, and so does the result: ``[N, 1]`` and ``[1, k]`` give ``[N, k]``. It depends on nothing else: not on
    the order of calls, the timing, the number of clients or the algorithm. ``clock.Draws`` gives such draws:

    >>> def model(num_clients, seed):
    ...     def durations(clients, numbers, local_steps=1, bytes_down=0, bytes_up=0):
    ...         return 60 + 10 * chance.Draws(seed, "mine", clients, numbers).standard_exponential()
    ...
    ...     return Delays(num_clients, durations)
    >>> model(3, seed=0).durations(np.arange(3)[:, None], np.arange(2)).shape
    (3, 2)
    """

    num_clients: int
    durations: Callable[..., np.ndarray]


DelayModel = Callable[[int, int], Delays]  # (num_clients, seed) -> Delays


class Profiles(NamedTuple):
    """One entry per client, float64[N]: seconds, and ``compute_share`` in [0, 1]."""

    mean: np.ndarray
    std: np.ndarray
    compute_share: np.ndarray


class Scaling(NamedTuple):
    """What a job's time depends on besides chance; ``None`` switches a dependence off.

    The references are the local steps and the bytes (down + up) of a measured job; bandwidths are bytes a second.
    ``bandwidth_up`` is ``bandwidth`` unless it is given.
    """

    reference_steps: float | None = None
    reference_bytes: float | None = None
    bandwidth: float | None = None
    bandwidth_up: float | None = None


class Speeds(NamedTuple):
    """How the speeds of clients differ.

    ``heterogeneity = h`` multiplies mean and std of each client by a factor from the ``family``. The factor has
    mean 1 and coefficient of variation ``sqrt(exp(h^2) - 1)``, as far as the family can have them (``chance.py``): for
    the lognormal, ``h`` is its sigma; the exponential has a coefficient of 1 for each h > 0.
    """

    heterogeneity: float = 0.0
    family: str = "lognormal"


# The options that delay models share; ``base.factories.takes`` adds them to each model's own.


def speeds_of(*, heterogeneity: float = 0.0, speeds: str = "lognormal") -> Speeds:
    """Differences between clients: each has a factor of mean 1 on its job times, drawn once from ``speeds``.

    ``heterogeneity``, sigma of the lognormal, says how far clients differ; at 0 all are equally fast.
    """
    return Speeds(heterogeneity, speeds)


def scaling_of(
    *, reference_steps: float | None = None, bandwidth: float | None = None, bandwidth_up: float | None = None
) -> Scaling:
    """Dependence on the local steps of a job and on the size of its messages.

    ``reference_steps``: the times are those of jobs of so many steps; None: of any job. ``bandwidth`` and
    ``bandwidth_up``: bytes a second, which add the time of the messages.
    """
    return Scaling(reference_steps, None, bandwidth, bandwidth_up)


def measured_scaling_of(
    *,
    reference_steps: float | None = None,
    reference_bytes: float | None = None,
    bandwidth: float | None = None,
    bandwidth_up: float | None = None,
) -> Scaling:
    """As ``scaling_of``, and ``reference_bytes``: measured tables know how much of a job was communication."""
    return Scaling(reference_steps, reference_bytes, bandwidth, bandwidth_up)


def from_profiles(
    draw_profiles: Callable[[int, int], Profiles], sample: Distribution, scaling: Scaling, client_speeds: Speeds
) -> DelayModel:
    """The delay model of per-client profiles, ``draw_profiles(count, seed)``, and a family of noise."""
    heterogeneity = client_speeds.heterogeneity
    check.real_non_negative("heterogeneity", heterogeneity)
    check.in_range("heterogeneity", heterogeneity, 0, 10)
    for field, value in scaling._asdict().items():
        check.optional(check.real_positive, field, value)
    speed_family = registry.find("speeds", FAMILIES, client_speeds.family)
    if heterogeneity == 0 and client_speeds.family != Speeds().family:
        text = f"delay: speeds = {client_speeds.family!r} has no effect without heterogeneity: all clients are as fast"
        warnings.warn(text, RunWarning, stacklevel=2)
    if heterogeneity > 0 and (why := UNSPREAD.get(client_speeds.family)) is not None:
        of = f"heterogeneity = {heterogeneity} has no effect with speeds = {client_speeds.family!r}"
        text = f"delay: the size of {of}, {why}"
        warnings.warn(text, RunWarning, stacklevel=2)

    def model(num_clients: int, seed: int) -> Delays:
        known = (draw_profiles(num_clients, seed), speed_family, heterogeneity, sample, scaling, num_clients, seed)
        return Delays(num_clients, partial(_durations, *known))

    return model


def _speeds(family: Distribution, heterogeneity: float, seed: int, clients: np.ndarray) -> np.ndarray:
    mean, spread = np.ones(1), np.full(1, math.sqrt(math.expm1(heterogeneity**2)))
    return np.maximum(family(chance.Draws(seed, "speeds", clients), mean, spread), SMALLEST)


def _durations(
    profiles: Profiles,
    speed_family: Distribution,
    heterogeneity: float,
    sample: Distribution,
    scaling: Scaling,
    num_clients: int,
    seed: int,
    clients: Amounts,
    numbers: Amounts,
    local_steps: Amounts = 1,
    bytes_down: Amounts = 0,
    bytes_up: Amounts = 0,
) -> np.ndarray:
    """The seconds of these jobs; see ``Delays``."""
    clients, numbers = np.asarray(clients, np.int64), np.asarray(numbers, np.int64)
    shape = np.broadcast_shapes(clients.shape, numbers.shape)
    inside = not (clients.size and numbers.size) or (
        np.min(clients) >= 0 and np.max(clients) < num_clients and np.min(numbers) >= 0
    )
    if not inside:
        raise ValueError(f"clients, numbers: must be in 0..{num_clients - 1} and >= 0")
    # 0: also for families that ignore their std, such as the exponential
    factor = _speeds(speed_family, heterogeneity, seed, clients) if heterogeneity else np.ones(1)
    mean, std = (column[clients] * factor for column in (profiles.mean, profiles.std))
    drawn = sample(chance.Draws(seed, "noise", clients, numbers), mean, std)
    time = np.maximum(drawn, SMALLEST * mean).reshape(shape)
    if scaling == Scaling():
        return time
    share = profiles.compute_share[clients]
    return _scale(time, share, scaling, np.asarray(local_steps), np.asarray(bytes_down), np.asarray(bytes_up))


def _scale(
    time: np.ndarray, share: np.ndarray, scaling: Scaling, steps: np.ndarray, down: np.ndarray, up: np.ndarray
) -> np.ndarray:
    if scaling.reference_steps is not None or scaling.reference_bytes is not None:
        compute = 1.0 if scaling.reference_steps is None else steps / scaling.reference_steps
        communicate = 1.0 if scaling.reference_bytes is None else (down + up) / scaling.reference_bytes
        time = time * (share * compute + (1 - share) * communicate)
    if scaling.bandwidth is not None:
        time = time + down / scaling.bandwidth
    upward = scaling.bandwidth if scaling.bandwidth_up is None else scaling.bandwidth_up
    if upward is not None:
        time = time + up / upward
    return time


# --- the cache ----------------------------------------------------------------------------------

_ITEMS, _DEEPEST = 1 << 16, 64  # the most that is drawn at once, in all and for one client
_DEEP = 4  # with at least so many jobs per client, every refill is for all clients

PREDICTED = 1024  # clients predicted at once

DrawDurations = Callable[[np.ndarray, np.ndarray], np.ndarray]
Predict = Callable[[int], Iterable[int]]


def nobody(client: int) -> Iterable[int]:
    """Predict nothing."""
    return ()


class DurationCache:
    """Hands out the durations of each client's jobs one by one: of its job 0, its job 1, and so on.

    ``draw(clients, numbers)``, of arrays that broadcast, gives what is cached of these jobs: a number, or any object.
    ``predict(client)`` are the clients that will probably need a duration soon after ``client``. A refill draws for
    these too. With few clients it draws several jobs of each, with very few it draws for all of them.
    A wrong prediction costs time and changes no result: a duration depends on client and number alone.
    """

    def __init__(self, draw: DrawDurations, num_clients: int, predict: Predict = nobody):
        depth = max(1, min(_DEEPEST, _ITEMS // num_clients))
        self._draw, self._predict = draw, predict
        self._everyone = range(num_clients) if depth >= _DEEP else None
        self._numbers = np.arange(depth)[::-1]
        self._drawn = np.zeros(num_clients, np.int32)  # jobs drawn of each client
        # What is drawn and not yet handed out, by client: a list with the next job last. At depth 1 it is the
        # item itself, because making so many lists would cost more than drawing their content.
        self._ready: dict[int, Any] = {}
        self._single = depth == 1

    def pop(self, client: int) -> Any:
        """What is drawn for the client's next job."""
        if client not in self._ready:
            self.prepare(self._everyone or (client, *self._predict(client)))
        if self._single:
            return self._ready.pop(client)
        items = self._ready[client]
        item = items.pop()
        if not items:
            del self._ready[client]
        return item

    def pop_each(self, clients: np.ndarray) -> np.ndarray:
        """What ``pop`` would give each of these clients, all different, as an array; empties the cache."""
        self._forget()
        drawn = self._draw(clients[:, None], self._drawn[clients][:, None]).reshape(-1)
        self._drawn[clients] += 1
        return drawn

    def _forget(self) -> None:
        if self._single:
            self._drawn[np.fromiter(self._ready, np.int64, len(self._ready))] -= 1
        else:
            for client, items in self._ready.items():
                self._drawn[client] -= len(items)
        self._ready.clear()

    def prepare(self, clients: Collection[int]) -> None:
        """If one of these clients has nothing cached, draw for all of them that have little."""
        ready, depth = self._ready, len(self._numbers)
        if all(client in ready for client in clients):
            return
        if len(ready) > 2 * _ITEMS:
            self._forget()
        if self._single:
            lacking = list(set(clients).difference(ready))
        else:
            lacking = [client for client in self._everyone or set(clients) if len(ready.get(client, ())) <= depth // 2]
        column = np.array(lacking)
        drawn = self._draw(column[:, None], self._drawn[column][:, None] + self._numbers)
        self._drawn[column] += depth
        if self._single:
            ready.update(zip(lacking, drawn.reshape(-1).tolist()))
        else:
            ready.update((client, items + ready.get(client, [])) for client, items in zip(lacking, drawn.tolist()))
