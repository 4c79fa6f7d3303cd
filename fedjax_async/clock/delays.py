"""The named delay models, registry ``DELAYS``: the keyword-only arguments of a factory are the options of its spec.

``lognormal:mean=60,sigma=0.5``: noisy job times of a minute on average, all clients alike.
``constant:mean=60,heterogeneity=0.5``: clients of different (lognormal) speeds, without noise. The formula that all
models share is in ``durations.py``; ``mean`` is the time of one whole job unless ``reference_steps`` is given.

Measured delays are the table ``rpi`` and tables in CSV files. Their columns, in any order:

* ``client`` (0, 1, ...: the line belongs to that client) or ``device`` (any name: clients draw lines, and draw the same
  device in all tables of delays, availability and energy that list the same names);
* ``mean``, ``std``: mean (> 0) and standard deviation (>= 0) of a whole job, seconds;
* ``compute``, optional: the part of ``mean`` spent on training, seconds; the rest is communication;
* ``group``, optional: any label, for readers.

Recorded seconds of single jobs: ``trace`` (``job_trace.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.base.factories import takes
from fedjax_async.clock import chance, csv_tables
from fedjax_async.clock.chance import FAMILIES, Distribution, pareto_tail
from fedjax_async.clock.durations import (
    DelayModel,
    Delays,
    Profiles,
    Scaling,
    Speeds,
    from_profiles,
    measured_scaling_of,
    scaling_of,
    speeds_of,
)
from fedjax_async.clock.job_trace import trace


class Times(NamedTuple):
    """The job times that all clients have before their speeds differ: seconds, and the family that draws them."""

    mean: float
    std: float
    sample: Distribution


def parametric(times: Callable[..., Times]) -> Callable[..., DelayModel]:
    """The delay model of job times of one family; a decorator. ``times``: a function of the model's own options."""

    @takes(times=times, client_speeds=speeds_of, scaling=scaling_of)
    def model(*, times: Times, client_speeds: Speeds, scaling: Scaling) -> DelayModel:
        check.real_positive("mean", times.mean)
        check.real_non_negative("std", times.std)

        def draw_profiles(count: int, seed: int) -> Profiles:
            return Profiles(*(np.broadcast_to(float(value), count) for value in (times.mean, times.std, 1.0)))

        return from_profiles(draw_profiles, times.sample, scaling, client_speeds)

    model.__name__, model.__doc__ = times.__name__, times.__doc__
    return model


@parametric
def constant(*, mean: float = 1.0) -> Times:
    """Every job of a client takes the same time: `mean` seconds times the client's own speed factor."""
    return Times(mean, 0.0, FAMILIES["constant"])


@parametric
def normal(*, mean: float = 1.0, std: float | None = None) -> Times:
    """Gaussian job times, redrawn while <= 0 (`std`: a quarter of the mean unless given)."""
    return Times(mean, _default_std(mean, std), FAMILIES["normal"])


@parametric
def lognormal(*, mean: float = 1.0, sigma: float = 0.5) -> Times:
    """Lognormal job times: mean `mean`, standard deviation `sigma` of the logarithm."""
    check.real_positive("mean", mean)
    check.real_non_negative("sigma", sigma)
    check.in_range("sigma", sigma, 0, 10)
    return Times(mean, mean * math.sqrt(math.expm1(sigma**2)), FAMILIES["lognormal"])


@parametric
def half_normal(*, mean: float = 1.0, std: float | None = None) -> Times:
    """Half-normal job times, shifted to match `mean` and `std` (without `std`: no shift, std 0.76 mean)."""
    return Times(mean, mean if std is None else std, FAMILIES["half_normal"])


@parametric
def uniform(*, mean: float = 1.0, std: float | None = None) -> Times:
    """Uniform job times that match `mean` and `std` (`std`: a quarter of the mean unless given)."""
    return Times(mean, _default_std(mean, std), FAMILIES["uniform"])


@parametric
def exponential(*, mean: float = 1.0) -> Times:
    """Exponential (memoryless) job times of mean `mean`."""
    return Times(mean, mean, FAMILIES["exponential"])


@parametric
def gamma(*, mean: float = 1.0, std: float | None = None) -> Times:
    """Gamma job times with `mean` and `std` (`std`: a quarter of the mean unless given)."""
    return Times(mean, _default_std(mean, std), FAMILIES["gamma"])


@parametric
def pareto(*, mean: float = 1.0, shape: float = 2.5) -> Times:
    """Pareto (heavy-tailed) job times of mean `mean`: tail index `shape` > 1; infinite variance if it is <= 2."""
    check.real_positive("mean", mean)
    check.real_positive("shape", shape)
    check.require(shape > 1, "shape", shape, "a finite number > 1 (the mean is infinite otherwise)")
    return Times(mean, mean, pareto_tail(shape))


def _default_std(mean: float, std: float | None) -> float:
    check.real_positive("mean", mean)
    return mean / 4 if std is None else std


# --- measured delays ----------------------------------------------------------------------------


class ProfileTable(NamedTuple):
    """Profiles as read: float64[rows] columns; ``client`` is None when clients draw devices."""

    mean: np.ndarray
    std: np.ndarray
    compute: np.ndarray | None
    client: np.ndarray | None = None  # int64[rows]


def read_table(path: str | Path) -> ProfileTable:
    """Read a table of delays; ``ValueError`` naming file, line and column for a bad value."""
    known = ("client", "device", "mean", "std", "compute", "group")
    rows = csv_tables.by_device(csv_tables.read(path, known, required=("mean", "std")))
    columns = rows[0][1]
    for row in rows:
        if "group" in columns:
            csv_tables.label(row, "group")
    return ProfileTable(
        mean=np.array([csv_tables.number(row, "mean", above_zero=True) for row in rows]),
        std=np.array([csv_tables.number(row, "std") for row in rows]),
        compute=np.array([csv_tables.number(row, "compute") for row in rows]) if "compute" in columns else None,
        client=csv_tables.distinct_clients(rows) if "client" in columns else None,
    )


# Seconds of a round of each device: mean, standard deviation, compute part.
RPI = {
    "slow": ((96.2, 135.6, 73.2), (904.1, 222.2, 44.6), (360.2, 103.5, 37.8), (276.6, 187.2, 121.4),
             (150.2, 210.3, 118.2), (161.4, 194.4, 24.3), (177.2, 209.8, 23.9), (106.3, 32.7, 47.7),
             (385.6, 111.9, 50.2)),
    "fast": ((8.9, 1.3, 8.9), (10.7, 4.4, 10.7), (12.3, 3.3, 12.3), (12.7, 4.5, 12.7), (15.4, 7.1, 15.4)),
}  # fmt: skip


def rpi_table(profiles: str = "slow") -> ProfileTable:
    """The packaged table: ``slow`` (9 profiles), ``fast`` (5) or ``all``."""
    check.one_of("profiles", profiles, ("all", *RPI))
    chosen = [row for kind, rows in RPI.items() if profiles in ("all", kind) for row in rows]
    mean, std, compute = np.array(list(zip(*chosen, strict=True)))
    return ProfileTable(mean, std, compute)


def _from_table(
    table: ProfileTable, family: str, scaling: Scaling, client_speeds: Speeds, source: str, replacement: bool = False
) -> DelayModel:
    if scaling.reference_bytes is not None and table.compute is None:
        raise ValueError(f"reference_bytes = {scaling.reference_bytes}: {source} has no column 'compute'")
    sample = registry.find("family", FAMILIES, family)
    # Where a measured compute part exceeds the measured total, there is no communication left.
    share = np.ones(len(table.mean)) if table.compute is None else np.minimum(table.compute / table.mean, 1.0)

    def draw_profiles(count: int, seed: int) -> Profiles:
        if table.client is None:
            draw = chance.dice if replacement else chance.deck
            rows = draw(seed, "devices", len(table.mean), count)
        else:
            rows = csv_tables.rows_of(table.client, count, source)
        return Profiles(table.mean[rows], table.std[rows], share[rows])

    return from_profiles(draw_profiles, sample, scaling, client_speeds)


@takes(client_speeds=speeds_of, scaling=measured_scaling_of)
def rpi(
    *,
    profiles: str = "slow",
    family: str = "normal",
    replacement: bool = False,
    pooled: bool = False,
    client_speeds: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Measured round times of Raspberry Pi clients; `profiles`: slow (9 profiles), fast (5 others) or all.

    Clients draw profiles without replacement, from all again when none is left; with ``replacement`` each draws
    from all of them. Each job draws its seconds from the ``family`` with the profile's mean and std, by default a
    Gaussian, redrawn while <= 0. By default a round takes its measured time, whatever the model and the number of
    local steps; ``reference_steps`` and ``reference_bytes`` (down + up, of one measured round) rescale its compute and
    its communication part. The communication part is total - compute. No split is known for the five fast profiles:
    they count as all compute.

    ``pooled``: all clients have one distribution, with the mean and deviation of the rounds of all profiles
    together; ``family=uniform`` is then uniform from the 5th to the 95th percentile of these rounds, taken
    as Gaussians conditioned on being positive (OrthoFL 2025, appendix B.4).

    Source: the latency table released with OrthoFL. Its code draws as
    ``rpi:family=normal_or_mean,replacement=true`` if there are at least as many clients as profiles.
    """
    check.one_of("replacement", replacement, (False, True))
    check.one_of("pooled", pooled, (False, True))
    table = rpi_table(profiles)
    table = _pooled(table, family) if pooled else table
    return _from_table(table, family, scaling, client_speeds, "rpi", replacement)


def _pooled(table: ProfileTable, family: str) -> ProfileTable:
    """One profile for all: mean and deviation of all rounds; for ``uniform``, those of its range."""
    mean = float(np.mean(table.mean))
    std = math.sqrt(np.mean(np.square(table.std) + np.square(table.mean)) - mean**2)
    if family == "uniform":
        low, high = (_percentile(table, share) for share in (0.05, 0.95))
        mean, std = (low + high) / 2, (high - low) / math.sqrt(12)
    compute = None if table.compute is None else np.array([mean * np.sum(table.compute) / np.sum(table.mean)])
    return ProfileTable(np.array([mean]), np.array([std]), compute)


def _percentile(table: ProfileTable, share: float) -> float:
    """Seconds below which ``share`` of all rounds lie, each profile a Gaussian conditioned on being positive."""

    def below(seconds: float) -> float:
        up_to = [NormalDist(mean, std).cdf for mean, std in zip(table.mean, table.std)]
        return float(np.mean([(cdf(seconds) - cdf(0.0)) / (1 - cdf(0.0)) for cdf in up_to]))

    low, high = 0.0, float(np.max(table.mean + 10 * table.std))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return high


@takes(client_speeds=speeds_of, scaling=measured_scaling_of)
def csv(
    *,
    path: str,
    family: str = "normal",
    client_speeds: Speeds,
    scaling: Scaling,
) -> DelayModel:
    """Means and deviations from a CSV file: columns client or device, mean, std and, if known, compute.

    With a ``client`` column each row belongs to the client of that number, and every client needs a row; with a
    ``device`` column clients draw devices like ``rpi``'s profiles, the same device in each table that lists the same
    names (of availability and energy too). Other options as for ``rpi``.
    """
    return _from_table(read_table(str(path)), family, scaling, client_speeds, str(path))


DELAYS: dict[str, Callable[..., DelayModel]] = {
    "constant": constant,
    "normal": normal,
    "lognormal": lognormal,
    "half_normal": half_normal,
    "uniform": uniform,
    "exponential": exponential,
    "gamma": gamma,
    "pareto": pareto,
    "rpi": rpi,
    "csv": csv,
    "trace": trace,
}


def bind(model: DelayModel | str, num_clients: int, seed: int) -> Delays:
    """Bind a delay model, or the one named by a spec, to ``num_clients`` clients and a seed."""
    check.whole("num_clients", num_clients)
    check.whole("seed", seed, low=0)
    bound: DelayModel = registry.spec("delays", DELAYS, model).make() if isinstance(model, str) else model
    return bound(int(num_clients), int(seed))
