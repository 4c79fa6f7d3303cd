"""Privacy and attacks of a run: what two settings change in the server rule, the data and the clients.

:func:`protecting` wraps the server rule, :func:`with_attackers` marks the clients that attack and changes their labels,
:func:`per_example_of` gives DP-SGD to local training. The noise depends on the schedule: :func:`noise_numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import numpy as np

from fedjax_async.base import check, factories, grammar, registry, tree
from fedjax_async.base.spec import Spec, naming
from fedjax_async.clock.record import with_derived_columns
from fedjax_async.config.settings import Settings
from fedjax_async.data.memmap import spans
from fedjax_async.engine.components import Components, Server, bound
from fedjax_async.local.dp_sgd import DPSGDOptions
from fedjax_async.models import STATISTICS
from fedjax_async.server import ATTACKS, PRIVACY, Attack, Privacy, attacked, attackers, differentially_private
from fedjax_async.server.privacy import PARTS_FOR, combined
from fedjax_async.types import FederatedData, Number, Path, Schedule, ServerAlgorithm, Structure

ATTACK_RNG = 2  # with the seed, seeds the generator that draws the attackers


@registry.cached_by_name(maxsize=64)
def privacy_of(spec: str | None) -> Privacy:
    """The privacy of a spec such as ``dp:clip=0.5+secure:size=10``, its parts combined."""
    if spec is None:
        return Privacy()
    parts = []
    for part in grammar.joined(spec):
        made = registry.spec("privacy", PRIVACY, part).make()
        check.kind(f"privacy {part}", made, Privacy, "a factory of a server.Privacy")
        parts.append(made)
    with naming("privacy", spec, PARTS_FOR.values()):
        return combined(parts)


def attack_of(spec: str) -> Attack:
    """The attack that a spec names."""
    made: Attack = registry.spec("attack", ATTACKS, spec).make()
    check.kind(f"attack {spec}", made, Attack, "a factory of a server.Attack")
    return made


def per_example_of(s: Settings, takes: Collection[str]) -> DPSGDOptions | None:
    """Clip and noise of DP-SGD; ``ValueError`` for local training that does not take them."""
    asked = privacy_of(s.privacy).examples
    allowed = f"without dp_sgd: the local training of {s.method} does not take it"
    check.require(asked is None or "per_example" in takes, "privacy", s.privacy, allowed)
    return asked


# --- data -------------------------------------------------------------------------------------------


def with_attackers(data: FederatedData, spec: str, seed: int) -> FederatedData:
    """The data with attackers marked, drawn by the seed, and with the labels that attackers train on."""
    attack = attack_of(spec)
    with naming("attack", spec, factories.options_of(attackers)):
        marked = attack.who.drawn(len(data.size), np.random.default_rng((seed, ATTACK_RNG)))
    data = data._replace(malicious=marked)
    if attack.relabel is None or not marked.any():
        return data
    labels = isinstance(data.y, np.ndarray) and data.y.ndim == 1 and data.num_classes is not None
    check.require(labels and not data.streamed, "attack", spec, "one on uploads: the data have no labels in memory")
    rows, others = (_rows(data, chosen) for chosen in (marked, ~marked))
    alone = not np.isin(rows, others).any()
    check.require(alone, "attack", spec, "one on uploads: attackers share examples with other clients")
    y = np.array(data.y)
    y[rows] = attack.relabel(y[rows], int(data.num_classes or 0))
    return data._replace(y=y)


def _rows(data: FederatedData, chosen: np.ndarray) -> np.ndarray:
    """The training rows of some clients."""
    return np.asarray(np.asarray(data.order)[spans(data.offset[chosen], data.size[chosen])])


# --- the rule ---------------------------------------------------------------------------------------


def protecting(
    server: Spec | ServerAlgorithm, s: Settings, upload: object, stays: Callable[[Path], bool] | None
) -> Spec | ServerAlgorithm:
    """The rule with clipped, noised and forged uploads, as privacy and attack ask for it.

    ``upload``: shapes of an upload. Forged uploads are clipped too.
    """
    asked = privacy_of(s.privacy).uploads
    if asked is not None:
        _require_no_statistics(s, asked.noise, upload, stays)
        numbers = {name.removeprefix("privacy."): value for name, value in noise_numbers(s, 1).items()}
        private = Spec(_private).but(scope="privacy").with_numbers(**numbers).later()
        server = Spec(_protected, server, private, stays=stays)
    if s.attack is not None:
        attack_of(s.attack)  # checks the ranges
        # the data say which clients attack, so runs with other shares of attackers share programs
        attack = registry.spec("attack", ATTACKS, s.attack).but(scope="attack").later(*_ATTACKERS)
        limit = {} if s.norm_limit is None else {"norm_limit": float(s.norm_limit)}
        limited = Spec(_numbers).but(scope="attack").with_numbers(**limit)
        server = Spec(_attacked, server, attack, limited, like=tree.frozen(upload))
    return server


def _require_no_statistics(s: Settings, noise: Number, upload: object, stays: Callable[[Path], bool] | None) -> None:
    """``ValueError`` if noise would be added to running statistics: their variances may become negative."""
    paths = (tree.path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(upload))
    statistics = (path[path.index(STATISTICS) :] for path in paths if STATISTICS in path)
    noised = noise > 0 and any(stays is None or not stays(path) for path in statistics)
    allowed = "without noise: the clients upload running statistics (BatchNorm), whose variances noise makes negative; "
    check.require(not noised, "privacy", s.privacy, f"{allowed}a model with norm=group or norm=local uploads none")


_ATTACKERS = tuple(factories.options_of(attackers))


def _protected(
    server: ServerAlgorithm, private: Callable[..., ServerAlgorithm], *, stays: Callable[[Path], bool] | None
) -> ServerAlgorithm:
    return private(server, stays=stays)


def _private(server: ServerAlgorithm, *, stays: Callable[[Path], bool] | None, **numbers: Number) -> ServerAlgorithm:
    return differentially_private(server, stays=stays, **numbers)


def _numbers(**numbers: Number) -> dict[str, Number]:
    return numbers


def _attacked(
    server: ServerAlgorithm,
    attack: Callable[[], Attack],
    limited: Mapping[str, Number],
    *,
    like: tuple[Structure, tree.Kinds],
) -> ServerAlgorithm:
    return attacked(server, attack(), tree.thawed(like), limited.get("norm_limit"))


def noise_numbers(s: Settings, uploads: int) -> dict[str, float]:
    """Traced numbers of the clip and of each upload's noise; ``uploads``: the fewest uploads of a sum."""
    asked = privacy_of(s.privacy).uploads
    if asked is None:
        return {}
    own = multipliers(asked.noise, asked.quantile, asked.count_noise, uploads)
    numbers = {"privacy.clip": float(asked.clip)}
    if asked.noise > 0:
        numbers["privacy.deviation"] = own.uploads / math.sqrt(uploads)
    if asked.quantile is not None:
        numbers |= {"privacy.quantile": float(asked.quantile), "privacy.rate": float(asked.rate)}
        if asked.noise > 0:
            numbers["privacy.count_deviation"] = own.below / math.sqrt(uploads)
    return numbers


class Multipliers(NamedTuple):
    """How the noise multiplier z is divided between the uploads and the count for the adaptive clip."""

    uploads: float  # z_Delta, for the uploads, as a multiple of the clip
    below: float  # sigma_b, for the number of uploads within the clip; 0 if it is not counted


def multipliers(noise: Number, quantile: Number | None, count_noise: Number | None, uploads: int) -> Multipliers:
    """``z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)`` and ``sigma_b``: Andrew et al. (2021), Theorem 1.

    Computed as ``z (1 - (z / (2 sigma_b))^2)^(-1/2)``, which neither overflows nor divides by zero. A client's term in
    the count is shifted by 1/2, so it is at most 1/2 in size and its noise multiplier is ``2 sigma_b``.
    """
    z = float(noise)
    if quantile is None or z == 0:
        return Multipliers(z, 0.0)
    count = max(z, uploads / 20) if count_noise is None else float(count_noise)
    return Multipliers(z * (1 - (z / (2 * count)) ** 2) ** -0.5, count)


# --- what depends on the schedule -------------------------------------------------------------------


def with_noise(s: Settings, components: Components, schedule: Schedule, probes: Collection[str] | None) -> Components:
    """The components with the noise for this schedule; ``ValueError`` for a run that secure aggregation excludes."""
    fewest = uploads_of_a_sum(components.rule, components.hyper, schedule)
    components = components._replace(hyper={**components.hyper, **noise_numbers(s, fewest)})
    check_secure(s, components.rule, components.hyper, schedule, probes)
    return components


def uploads_of_a_sum(server: Server, hyper: Mapping[str, float], schedule: Schedule) -> int:
    """K, the fewest uploads of a closed server step; 1 for a rule that uses single uploads."""
    counts = uploads_of_steps(schedule)
    sums = bound(server, hyper).sums
    return int(counts.min()) if sums and len(counts) else 1


def uploads_of_steps(schedule: Schedule) -> np.ndarray:
    """The number of sound uploads in each closed server step, without the corrupt ones; int64[steps]."""
    sound = schedule.step[~with_derived_columns(schedule).corrupt[schedule.job]]
    return np.bincount(sound, minlength=len(schedule.closes) + 1)[schedule.step[schedule.closes]]


def check_secure(
    s: Settings, server: Server, hyper: Mapping[str, float], schedule: Schedule, probes: Collection[str] | None
) -> None:
    """``ValueError`` for secure aggregation in a run that needs single uploads, or has steps of too few uploads."""
    asked = privacy_of(s.privacy)
    if asked.least is None:
        return
    why = f"privacy = {s.privacy}: the server sees sums only"
    sums = bound(server, hyper).sums
    uses = "one that uses only the weighted sum of a step's uploads, none of weight 0, as its rule's sums=True says"
    allowed = f"{uses} ({why})"
    check.require(sums, "method", str(s.method), allowed)
    check.require(s.norm_limit is None, "norm_limit", s.norm_limit, f"left out ({why})")
    allowed = f"off or ef, since the server keeps an estimate of each client's upload ({why})"
    check.require(s.feedback != "ef21", "feedback", s.feedback, allowed)
    check.require(not probes, "probes", list(probes or ()), f"left out ({why})")
    fewest = int(uploads_of_steps(schedule).min(initial=asked.least))
    allowed = f"at least {asked.least} ({why} of so many, as in the timing buffer:size={asked.least})"
    check.require(fewest >= asked.least, "uploads of the smallest server step", fewest, allowed)
    if asked.uploads is not None and asked.uploads.quantile is not None:
        stale = int(schedule.staleness.max(initial=0))
        allowed = "0: clients clip by what they were sent, so an adaptive clip needs rounds (timing cohort)"
        check.require(stale == 0, "staleness with secure and an adaptive clip", stale, allowed)
