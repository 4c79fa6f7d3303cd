"""Differential privacy of a finished run: epsilon from its real participations, by the library dp-accounting.

:func:`guarantees` reads from the run's own tables which clients took part when, and with which weight. A bound that
relies on random sampling is given only if the clients of each round were drawn uniformly. Where no bound is known, the
result says why.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check, home, lazy, registry
from fedjax_async.clock.record import SLACK
from fedjax_async.config.clients import leaves_out
from fedjax_async.config.experiment import resolve
from fedjax_async.config.methods import method_of
from fedjax_async.config.prepared import Resolved
from fedjax_async.config.protection import attack_of, multipliers, privacy_of, uploads_of_a_sum
from fedjax_async.config.resolving import length_of_batch
from fedjax_async.config.settings import Settings, from_dict
from fedjax_async.data.memmap import spans
from fedjax_async.engine.components import bound
from fedjax_async.local.dp_sgd import uses_of_an_example
from fedjax_async.results.running import precision
from fedjax_async.results.store import load
from fedjax_async.server.privacy import Uploads
from fedjax_async.types import Run, Schedule


class Guarantee(NamedTuple):
    """A bound on what a run reveals, or why no bound is known."""

    unit: str  # what is protected: a client (all its data), or an example
    epsilon: float | None  # None: no bound is known
    delta: float
    neighbours: str  # the runs that are compared
    client: int | None  # the client with the largest epsilon; None if it is the same for all
    participations: int | None  # of this client: uploads, or gradients of one example
    how: str  # the bound that was used, or why there is none
    delta_of: str  # where delta comes from: "given", or "the default, 50 clients^-1.1"


def guarantees(run: Run | str | Path, *, delta: float | None = None, **objects: object) -> list[Guarantee]:
    """The (epsilon, delta) guarantees of a run with the setting ``privacy``, one entry per bound.

    The schedule is given. The participations of client c compose to a Gaussian mechanism with the multiplier
    ``(sum_s (W_cs C / sigma_s)^2)^(-1/2)``, where C is the clip, ``W_cs`` the sum of the client's weights in server
    step s, and ``sigma_s^2 = sigma_u^2 sum_i w_i^2`` the noise of the step. The largest epsilon of any client is given.
    If a rule uses single uploads, each of them is noised and is a Gaussian mechanism by itself.

    In the neighbouring run the uploads of one client (the gradients of one example) are zero. Numbers of examples,
    delays and the schedule are public. The bound covers neither evaluations nor the rejection of non-finite uploads.
    The columns ``upload_norm`` and ``clipped`` of a run's table are measured before the noise, so no bound covers them:
    do not publish them.

    Args:
      run: as ``simulate`` returns it, or the folder of a saved one.
      delta: by default ``n^-1.1``, with n the number of clients (of examples).
      objects: the run's own objects by setting, as in ``explain``; load plugins before.

    Raises: ``ValueError`` for a run without ``privacy``, or if dp-accounting is missing.

    Source: McMahan et al. (2018); Andrew et al. (2021); composition: Dong, Roth, Su (2022), corollary 3.3.
    """
    fits = delta is None or (check.is_real(delta) and 0 < delta < 1)
    check.require(fits, "delta", delta, "above 0 and below 1")
    if not isinstance(run, Run):
        run = load(check.path("run", run))
    settings = from_dict(run.settings, objects)
    asked = privacy_of(settings.privacy)
    check.require(asked.uploads is not None or asked.examples is not None, "privacy", settings.privacy, MADE_WITH)
    require_library()
    home.require_datasets([str(settings.dataset)])
    with precision(settings):
        resolved = resolve(settings)
    found = []
    if asked.uploads is not None:
        found += _of_clients(run, resolved, asked.uploads, delta)
    if asked.examples is not None:
        found.append(_of_examples(run, resolved, float(asked.examples.noise), delta))
    return found


def require_library() -> ModuleType:
    """The module ``dp_accounting``; ``ValueError`` if it is missing."""
    return lazy.optional("dp_accounting", "epsilon", "dp-accounting")


MADE_WITH = "dp or dp_sgd, but the run was made without (--privacy dp:clip=1,noise=0.5)"
_ZEROED = "one client's uploads are zero"


def _delta(given: float | None, count: int, of: str) -> tuple[float, str]:
    """Delta, and where it comes from."""
    check.require(given is not None or count > 1, "delta", given, f"given: its default needs more than {count} {of}")
    return (float(count) ** -1.1, f"the default, {count} {of}^-1.1") if given is None else (given, "given")


def _of_clients(run: Run, resolved: Resolved, asked: Uploads, delta: float | None) -> list[Guarantee]:
    """The bounds of client-level noise: by participation, and by sampling if rounds are drawn uniformly."""
    schedule, updates, clients = run.schedule, run.updates, run.schedule.num_clients
    delta, delta_of = _delta(delta, clients, "clients")
    components = resolved.components
    sums = bound(components.rule, components.hyper).sums
    fewest = uploads_of_a_sum(components.rule, components.hyper, schedule)
    own = multipliers(float(asked.noise), asked.quantile, asked.count_noise, fewest)
    counts = np.asarray(updates["accepted"], np.bool_) & np.asarray(updates["used"], np.bool_)
    why = _unknown(run, resolved.settings, float(asked.noise), np.asarray(updates["used"], np.bool_) & ~counts)
    if why:
        return [Guarantee("client", None, delta, _ZEROED, None, None, why, delta_of)]
    client, step = (np.asarray(updates[name])[counts] for name in ("client", "step"))
    weight = np.asarray(updates["weight"], np.float64)[counts]
    if sums:
        spent = of_sums(client, step, weight, own.uploads, own.below, fewest)
        how = f"the sum of each server step is noised, with the noise that {fewest} uploads (the smallest step's) add"
    else:
        once = own.uploads**-2 + (0.0 if own.below == 0 else (2 * own.below) ** -2)  # 1 / z^2 of a participation
        spent = {who: int(n) * once for who, n in zip(*np.unique(client, return_counts=True))}
        how = f"each upload by itself: {resolved.settings.method} uses single uploads"
    if not spent:
        why = "no upload was accepted and used"
        return [Guarantee("client", None, delta, _ZEROED, None, 0, why, delta_of)]
    worst = max(spent, key=lambda who: spent[who])
    times = int(np.sum(client == worst))
    epsilon = gaussian(1 / math.sqrt(spent[worst]), delta)
    found = [Guarantee("client", epsilon, delta, _ZEROED, int(worst), times, how, delta_of)]
    size = _uniform_rounds(resolved.settings, schedule)
    if sums and size is not None and np.ptp(weight) == 0:
        steps = len(np.unique(step))
        epsilon = sampled(float(asked.noise), size, clients, steps, delta)
        how = f"{steps} rounds of {size} of {clients} clients, drawn uniformly and kept secret; Renyi accountant"
        neighbours = "one client's data are replaced"
        found.append(Guarantee("client", epsilon, delta, neighbours, None, None, how, delta_of))
    return found


def _unknown(run: Run, s: Settings, noise: float, rejected: np.ndarray) -> str:
    """Why no bound is known for client-level noise; empty if there is one."""
    if noise == 0:
        return "no bound: noise = 0"
    if rejected.any():
        return f"no bound is known: {int(rejected.sum())} uploads were rejected, which depends on them, without noise"
    if s.norm_limit is not None:
        return "no bound is known: the server rejects uploads by their norm (norm_limit)"
    if s.attack is not None and attack_of(s.attack).watches:
        return "no bound is known: attackers forge their uploads from those of other clients, without noise"
    return _stops(run, s)


def _stops(run: Run, s: Settings) -> str:
    """Why no bound is known for a run whose length depends on its evaluations; empty for others."""
    if s.stop_at is not None or s.patience is not None:
        return "no bound is known: the run stopped by what it measured (stop_at, patience)"
    if run.stopped is not None:
        return f"no bound is known: the run was stopped by {run.stopped.by}, which saw evaluations"
    return ""


def of_sums(
    client: np.ndarray, step: np.ndarray, weight: np.ndarray, uploads: float, below: float, fewest: int
) -> dict[int, float]:
    """Client -> ``sum_s 1 / z_cs^2`` over the server steps s, from the arrivals [E].

    The sum of a step has noise with the variance ``(z C)^2 sum_i w_i^2 / K``, z = ``uploads``, K = ``fewest``. Client c
    changes this sum by ``W_cs C`` at most, and the count of uploads within the clip by half the number of its uploads.
    """
    found: dict[int, float] = {}
    for number in np.unique(step):
        here = step == number
        power, arrivals = float(np.sum(weight[here] ** 2)), int(here.sum())
        for who in np.unique(client[here]):
            mine = weight[here][client[here] == who]
            spent = float(mine.sum()) ** 2 * fewest / (uploads**2 * power)
            if below:
                spent += (len(mine) / (2 * below)) ** 2 * fewest / arrivals
            found[int(who)] = found.get(int(who), 0.0) + spent
    return found


def _uniform_rounds(s: Settings, schedule: Schedule) -> int | None:
    """The number of clients of each round, if they are drawn uniformly from all and each of them uploads; else None."""
    timing = registry.read("timing", str(s.timing or method_of(s.method).timing))
    options = timing.options
    plain = timing.name == "cohort" and not options.get("over_selection") and options.get("deadline") is None
    undisturbed = all(value is None for value in (s.availability, s.faults, s.timeout, s.max_staleness))
    sizes = np.unique(np.bincount(schedule.step)[schedule.step[schedule.closes]])
    return int(sizes[0]) if plain and undisturbed and len(sizes) == 1 else None


def _of_examples(run: Run, resolved: Resolved, noise: float, delta: float | None) -> Guarantee:
    """The bound of DP-SGD: every job counts that begins before the end, even if its upload never arrived."""
    data, schedule, s = resolved.components.data, run.schedule, resolved.settings
    size = np.asarray(data.size, np.int64)
    delta, delta_of = _delta(delta, min(int(size.sum()), len(data.y)), "examples")
    neighbours = "one example's gradients are zero"
    why = "no bound: noise = 0" if noise == 0 else _stops(run, s)
    if why:
        return Guarantee("example", None, delta, neighbours, None, None, why, delta_of)
    batch = length_of_batch(s, data)
    began = schedule.dispatch_time * SLACK < run.evaluations["time"][-1]
    whole = leaves_out(s, method_of(s.method))
    uses = uses_of_an_example(schedule.local_steps, size[schedule.client], batch, whole) * began
    total = np.bincount(schedule.client, weights=uses, minlength=len(size))
    part = np.flatnonzero(total)
    rows, owner = np.asarray(data.order[spans(data.offset[part], size[part])]), np.repeat(part, size[part])
    if len(np.unique(np.stack([owner, rows]), axis=1).T) < len(rows):
        why = "no bound is known: a client has an example twice, whose gradients may be in one minibatch"
        return Guarantee("example", None, delta, neighbours, None, None, why, delta_of)
    distinct, place = np.unique(rows, return_inverse=True)
    of_row = np.bincount(place, weights=total[owner], minlength=len(distinct))[place]  # clients may share examples
    worst, most = int(owner[np.argmax(of_row)]), float(of_row.max())
    how = "an example counts once an epoch of its client: minibatches are shuffled, not sampled"
    epsilon = gaussian(noise / math.sqrt(most), delta)
    return Guarantee("example", epsilon, delta, neighbours, worst, int(most), how, delta_of)


def gaussian(multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism with this noise multiplier, exactly; see ``dp_accounting``."""
    return float(require_library().get_epsilon_gaussian(multiplier, delta))


def sampled(multiplier: float, size: int, clients: int, rounds: int, delta: float) -> float:
    """Epsilon of ``rounds`` Gaussian mechanisms on ``size`` of ``clients``, drawn without replacement.

    Replacing a client changes a sum by twice the clip at most. Source: Wang, Balle, Kasiviswanathan (2019), in
    ``dp_accounting``.
    """
    library = require_library()
    if size == clients:
        return gaussian(multiplier / 2 / math.sqrt(rounds), delta)
    from dp_accounting import rdp  # noqa: PLC0415 (an extra)

    accountant = rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    one = library.SampledWithoutReplacementDpEvent(clients, size, library.GaussianDpEvent(multiplier / 2))
    return float(accountant.compose(one, rounds).get_epsilon(delta))
