"""Delay models: how many virtual seconds client ``i`` needs for its ``n``-th job.

Every model is the same formula with other ingredients:

    duration = speed_i * draw_in * (c_i * steps/reference_steps + (1 - c_i) * bytes/reference_bytes)
               + bytes_down/bandwidth + bytes_up/bandwidth_up

``speed_i`` is drawn once a client (mean 1), ``draw_in`` once a job. ``c_i`` is the compute share of the
measured time: 1 for the parametric families, ``compute / mean`` for tables that say so. A reference that
is not given means "does not matter": its ratio is 1. So by default ``mean`` is the time of one whole
job, whatever its length; ``reference_steps=1`` makes it the time of one local step, and
``reference_steps=K`` that of K. Without ``bandwidth`` messages take no time of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_async import registry
from fedjax_async.clock import chance, inputs
from fedjax_async.clock.distributions import DISTRIBUTIONS, Distribution

# Durations below this share of the client's mean are raised to it: the clock must advance.
SMALLEST = 1e-6

Sizes = int | float | np.ndarray


class Delays(NamedTuple):
    """A delay model that knows its clients and its seed.

    ``durations(clients, numbers, local_steps, bytes_down, bytes_up) -> float64``, all arguments
    integer arrays or scalars that broadcast: the time of job ``numbers[k]`` (0, 1, ...) of client
    ``clients[k]``. The answer depends on nothing else: not on the order of asking, the timing policy,
    the number of clients or the algorithm.
    """

    num_clients: int
    durations: Callable[..., np.ndarray]


DelayModel = Callable[[int, int], Delays]  # (num_clients, seed) -> Delays


class Profiles(NamedTuple):
    """One row a client: float64[N] each, seconds (``compute_share`` in [0, 1])."""

    mean: np.ndarray
    std: np.ndarray
    compute_share: np.ndarray


class Scaling(NamedTuple):
    """What a job's time depends on besides chance; ``None`` switches a dependence off."""

    reference_steps: float | None = None
    reference_bytes: float | None = None
    bandwidth: float | None = None
    bandwidth_up: float | None = None


class Speeds(NamedTuple):
    """How the speeds of clients differ.

    ``heterogeneity = h`` multiplies mean and std of each client by a factor of mean 1 from the ``family``, of
    coefficient of variation ``sqrt(exp(h^2) - 1)``: for the lognormal, ``h`` is its sigma.
    """

    heterogeneity: float = 0.0
    family: str = "lognormal"


# The options that delay models share; ``registry.takes`` adds them to each model's own.


def speeds_of(*, heterogeneity: float = 0.0, speeds: str = "lognormal") -> Speeds:
    """Differences between clients; see ``Speeds``."""
    return Speeds(heterogeneity, speeds)


def scaling_of(
    *, reference_steps: float | None = None, bandwidth: float | None = None, bandwidth_up: float | None = None
) -> Scaling:
    """Dependence on the local steps of a job and on the size of its messages; see ``Scaling``."""
    return Scaling(reference_steps, None, bandwidth, bandwidth_up)


def measured_scaling_of(
    *,
    reference_steps: float | None = None,
    reference_bytes: float | None = None,
    bandwidth: float | None = None,
    bandwidth_up: float | None = None,
) -> Scaling:
    """The same for measured tables, which know how much of a job was communication."""
    return Scaling(reference_steps, reference_bytes, bandwidth, bandwidth_up)


def from_profiles(
    draw_profiles: Callable[[int, int], Profiles], sample: Distribution, scaling: Scaling, clients: Speeds
) -> DelayModel:
    """The delay model of per-client profiles, ``draw_profiles(count, seed)``, and a family of noise."""
    heterogeneity = clients.heterogeneity
    inputs.non_negative("heterogeneity", heterogeneity)
    for field, value in scaling._asdict().items():
        inputs.optional_positive(field, value)
    speed_family = registry.find("speeds", DISTRIBUTIONS, clients.family)

    def model(num_clients: int, seed: int) -> Delays:
        profiles = draw_profiles(num_clients, seed)
        speed = _speeds(speed_family, heterogeneity, seed)
        return Delays(num_clients, _durations(profiles, speed, sample, scaling, num_clients, seed))

    return model


def _speeds(family: Distribution, heterogeneity: float, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    if heterogeneity == 0:  # also for families that ignore their std, such as the exponential
        return lambda clients: np.ones(1)
    mean, spread = np.ones(1), np.full(1, math.sqrt(math.expm1(heterogeneity**2)))
    return lambda clients: np.maximum(family(chance.Draws(seed, "speeds", clients), mean, spread), SMALLEST)


def _durations(
    profiles: Profiles,
    speed: Callable[[np.ndarray], np.ndarray],
    sample: Distribution,
    scaling: Scaling,
    num_clients: int,
    seed: int,
) -> Callable[..., np.ndarray]:
    def durations(
        clients: Sizes, numbers: Sizes, local_steps: Sizes = 1, bytes_down: Sizes = 0, bytes_up: Sizes = 0
    ) -> np.ndarray:
        who, which = np.asarray(clients, np.int64), np.asarray(numbers, np.int64)
        shape = np.broadcast_shapes(who.shape, which.shape)
        if who.size and which.size and not (np.min(who) >= 0 and np.max(who) < num_clients and np.min(which) >= 0):
            raise ValueError(f"clients, numbers: must be in 0..{num_clients - 1} and >= 0")
        factor = speed(who)
        mean, std = (column[who] * factor for column in (profiles.mean, profiles.std))
        time = np.maximum(sample(chance.Draws(seed, "noise", who, which), mean, std), SMALLEST * mean).reshape(shape)
        if scaling == Scaling():
            return time
        share = profiles.compute_share[who]
        return _scale(time, share, scaling, np.asarray(local_steps), np.asarray(bytes_down), np.asarray(bytes_up))

    return durations


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
