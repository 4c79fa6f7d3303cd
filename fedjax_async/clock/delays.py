"""The named delay models: factories whose keyword-only arguments are the options of a spec.

``lognormal:mean=60,sigma=0.5`` is a minute a job on average, noisy, all clients alike;
``constant:mean=60,heterogeneity=0.5`` is clients of lognormal speeds without noise. The formula that all
models share is in ``durations.py``; ``mean`` is the time of one whole job unless ``reference_steps`` is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedjax_async import check, registry
from fedjax_async.clock import inputs, tables
from fedjax_async.clock.distributions import DISTRIBUTIONS, pareto_tail
from fedjax_async.clock.durations import (
    DelayModel,
    Delays,
    Profiles,
    Scaling,
    Speeds,
    from_profiles,
    scaling_of,
    speeds_of,
)
from fedjax_async.registry import takes


def _alike(mean: float, std: float) -> Callable[[int, int], Profiles]:
    inputs.positive("mean", mean)
    inputs.non_negative("std", std)

    def draw_profiles(count: int, seed: int) -> Profiles:
        return Profiles(*(np.broadcast_to(float(value), count) for value in (mean, std, 1.0)))

    return draw_profiles


def _quarter(mean: float, std: float | None) -> float:
    inputs.positive("mean", mean)
    return mean / 4 if std is None else std


@takes(clients=speeds_of, scaling=scaling_of)
def constant(
    *,
    mean: float = 1.0,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Every job of a client takes the same time: `mean` seconds times the client's own speed factor."""
    return from_profiles(_alike(mean, 0.0), DISTRIBUTIONS["constant"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def normal(
    *,
    mean: float = 1.0,
    std: float | None = None,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Gaussian job times, redrawn while <= 0 (`std`: a quarter of the mean unless given)."""
    profiles = _alike(mean, _quarter(mean, std))
    return from_profiles(profiles, DISTRIBUTIONS["normal"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def lognormal(
    *,
    mean: float = 1.0,
    sigma: float = 0.5,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Lognormal job times: mean `mean`, standard deviation `sigma` of the logarithm."""
    inputs.positive("mean", mean)
    inputs.non_negative("sigma", sigma)
    check.in_range("sigma", sigma, 0, 10)
    profiles = _alike(mean, mean * math.sqrt(math.expm1(sigma**2)))
    return from_profiles(profiles, DISTRIBUTIONS["lognormal"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def half_normal(
    *,
    mean: float = 1.0,
    std: float | None = None,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Half-normal job times, shifted to match `mean` and `std` (no shift, std 0.76 mean, unless given)."""
    inputs.positive("mean", mean)
    profiles = _alike(mean, mean if std is None else std)
    return from_profiles(profiles, DISTRIBUTIONS["half_normal"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def uniform(
    *,
    mean: float = 1.0,
    std: float | None = None,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Uniform job times that match `mean` and `std` (`std`: a quarter of the mean unless given)."""
    profiles = _alike(mean, _quarter(mean, std))
    return from_profiles(profiles, DISTRIBUTIONS["uniform"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def exponential(
    *,
    mean: float = 1.0,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Exponential job times of mean `mean`: the memoryless case."""
    return from_profiles(_alike(mean, mean), DISTRIBUTIONS["exponential"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def gamma(
    *,
    mean: float = 1.0,
    std: float | None = None,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Gamma job times with `mean` and `std` (`std`: a quarter of the mean unless given)."""
    profiles = _alike(mean, _quarter(mean, std))
    return from_profiles(profiles, DISTRIBUTIONS["gamma"], scaling, clients)


@takes(clients=speeds_of, scaling=scaling_of)
def pareto(
    *,
    mean: float = 1.0,
    shape: float = 2.5,
    clients: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Pareto job times, the heavy tail: tail index `shape` > 1 (infinite variance from 2 down)."""
    inputs.positive("mean", mean)
    inputs.positive("shape", shape)
    check.require(shape > 1, "shape", shape, "a finite number > 1 (the mean is infinite otherwise)")
    return from_profiles(_alike(mean, mean), pareto_tail(shape), scaling, clients)


DELAYS: dict[str, Callable[..., DelayModel]] = {
    "constant": constant,
    "normal": normal,
    "lognormal": lognormal,
    "half_normal": half_normal,
    "uniform": uniform,
    "exponential": exponential,
    "gamma": gamma,
    "pareto": pareto,
    "rpi": tables.rpi,
    "csv": tables.csv,
}


def bind(model: DelayModel | str, num_clients: int, seed: int) -> Delays:
    """The delays of ``num_clients`` clients in the world of ``seed``; a spec string is looked up first."""
    check.whole("num_clients", num_clients)
    check.whole("seed", seed, low=0)
    bound: DelayModel = registry.bind("delays", DELAYS, model)() if isinstance(model, str) else model
    return bound(int(num_clients), int(seed))
