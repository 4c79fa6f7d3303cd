"""Warnings about settings that are valid and do something that their words do not say.

Each warning has the same text for all runs of a kind, so that a comparison or a sweep says it once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from fedjax_async.base import registry
from fedjax_async.base.method import Method
from fedjax_async.base.notices import RunWarning
from fedjax_async.base.spec import Spec
from fedjax_async.clock import DELAYS, FAULTS, NETWORKS, Limits, Timing
from fedjax_async.clock.availability import together
from fedjax_async.clock.record import SLACK, Outcome
from fedjax_async.clock.scenario import bind as bind_conditions
from fedjax_async.config import names, own
from fedjax_async.config.methods import compressor_of
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.engine.evaluation import Every
from fedjax_async.local import DECAYS, WithinJob
from fedjax_async.models import starts_alike
from fedjax_async.peers import PeerSchedule
from fedjax_async.peers.statistics import mass_after_mixing, not_mixed_once, other_coefficients
from fedjax_async.types import ClientAlgorithm, FederatedData, Model, Run, Schedule

MUCH = 10.0  # a rate that is so many times the usual one of the optimiser was hardly meant for it


def caution(s: Settings, model: Model, data: FederatedData) -> None:
    """Warn of start weights that no seed changes, and of batches that leave running statistics as they are."""
    if s.initial is None and (start := starts_alike(model)) is not None:
        warnings.warn(
            f"model: {start.kind} starts from the weights that it was made with, the same for every seed; for start "
            f"weights by the seed, give a factory, {start.factory}",
            RunWarning,
            stacklevel=2,
        )
    trains_by_itself = isinstance(own.thing_of("client", s.client), ClientAlgorithm)
    alone = s.batch_size == 1 or bool(np.any(np.asarray(data.size) == 1))
    if model.train is not None and alone and not trains_by_itself:
        whose = "batch_size = 1" if s.batch_size == 1 else "clients with a single training example"
        advice = "a larger batch_size" if s.batch_size == 1 else "a partition with min_size=2 or more"
        warnings.warn(
            f"{whose}: a batch of fewer than two examples has no variance, so it leaves the running statistics of the "
            f"model (BatchNorm) as they are; {advice}, or a model without such statistics, avoids it",
            RunWarning,
            stacklevel=2,
        )


def caution_rate(s: Settings, usual: Method) -> None:
    """Warn of a rate that looks like one of SGD, given without an optimiser to a method that trains with Adam."""
    if s.lr is not None and s.lr >= MUCH * usual.lr:
        warnings.warn(
            f"lr = {s.lr:g}: {s.method} trains with {usual.optimizer}, whose rate is {usual.lr:g} unless it is given; "
            "with optimizer = 'sgd' the rate is one of SGD, as in most methods",
            RunWarning,
            stacklevel=2,
        )


def caution_decay(s: Settings, timing: Spec | Timing, cuts: bool) -> None:
    """Warn of a learning rate that falls within each job, with a timing that ends jobs, or that ``cuts`` them."""
    if isinstance(registry.spec("decay", DECAYS, s.decay).make(), WithinJob):
        which = "each part of a job has" if cuts else "a job turns out to have, which its client cannot know"
        warnings.warn(
            f"decay = {s.decay!r}: falls over the local steps that {which} with the timing {_name(timing, s)}; "
            "a decay over the server's steps, such as cosine, avoids it",
            RunWarning,
            stacklevel=2,
        )


def caution_feedback(s: Settings, sizes: Sequence[int]) -> None:
    """Warn of errors that are kept and sent later by a compressor that makes them larger than what it is given.

    ``sizes``: the lengths of the vectors that are compressed.
    """
    error = compressor_of(s.compress).error if s.compress is not None else None
    if error is None or not (size := max(sizes, key=error, default=0)) or error(size) < 1:
        return
    keeper = f"feedback = {s.feedback!r}" if s.feedback else f"method = {s.method!r}"
    much = f"about {error(size):.3g} times as large as" if math.isfinite(error(size)) else "far larger than"
    instead = "feedback = off, or " if s.feedback else ""
    warnings.warn(
        f"{keeper}: compress = {s.compress!r} makes a squared error {much} the vector that it is given, of {size:,} "
        f"numbers here. Kept for the next message, such errors add up, and the loss may diverge; {instead}a compressor "
        "of a smaller error (more levels, scaled=true of qsgd, unbiased=false of randk, topk) avoids it",
        RunWarning,
        stacklevel=2,
    )


def caution_ignored(s: Settings, timing: Spec | Timing, names: Iterable[str]) -> None:
    """Warn of settings that the timing does not use."""
    each = ", ".join(f"{name} = {as_dict(s)[name]!r}" for name in names)
    text = f"{each}: without effect with the timing {_name(timing, s)}, which says itself how long jobs take"
    warnings.warn(text, RunWarning, stacklevel=2)


def caution_shared(s: Settings) -> None:
    """Warn of a network whose links are shared, in a run with a server: there a client sends one message at a time."""
    if isinstance(s.network, str) and registry.spec("network", NETWORKS, s.network).options.get("shared"):
        text = (
            f"network = {s.network!r}: shared has no effect in a run with a server, where each client has a link alone"
        )
        warnings.warn(text, RunWarning, stacklevel=2)


def caution_twice(s: Settings) -> None:
    """Warn of a delay and a network that both count the seconds of messages."""
    if s.network is None or not isinstance(s.delay, str):
        return
    options = registry.spec("delay", DELAYS, s.delay).options
    counted = [name for name in ("bandwidth", "bandwidth_up", "reference_bytes") if options.get(name) is not None]
    if counted:
        text = (
            f"delay = {s.delay!r}, network = {as_dict(s)['network']!r}: the seconds of messages are counted twice, by "
            f"{' and '.join(counted)} of the delay and by the links of the network"
        )
        warnings.warn(text, RunWarning, stacklevel=2)


def _name(timing: Spec | Timing, s: Settings) -> str:
    return timing.name if isinstance(timing, Spec) else str(s.timing)


def caution_late(s: Settings, every: Every, end: float, updates: int, steps: int) -> None:
    """Warn of what the settings put after the end of the run: evaluations, except its start and end; a drift of speeds.

    ``end``: of the run, in virtual seconds; ``updates``, ``steps``: how many arrivals and server steps it has.
    """
    for one in [] if s.faults is None or own.is_own(s, "faults") else names.texts_in("faults", str(s.faults))[0]:
        fault = registry.spec("faults", FAULTS, one)
        if fault.name == "drift" and fault.options["at"] >= end:
            text = f"faults: no drift at {fault.options['at']:g} s because the run ends after {end:g} s"
            warnings.warn(text, RunWarning, stacklevel=2)
    if every.at is not None:
        late = [moment for moment in every.at if moment > end * SLACK]
        if late:
            which = f"{len(late)} of {len(every.at)} moments, from {min(late):g} s on,"
            text = f"eval_at: no evaluation at {which} because the run ends after {end:g} s"
            warnings.warn(text, RunWarning, stacklevel=2)
        return
    lengths = {
        "eval_time": (every.time, end, f"which ends after {end:g} s"),
        "eval_updates": (every.updates, updates, f"which has {updates} updates"),
        "eval_steps": (every.steps, steps, f"which has {steps} server steps"),
    }
    for field, (gap, length, known) in lengths.items():
        if gap is not None and gap > length * SLACK:
            text = f"{field} = {gap:.15g}: longer than the run, {known}: only its start and its end are evaluated"
            warnings.warn(text, RunWarning, stacklevel=2)


def caution_model(run: Run) -> None:
    """Warn of a final model that is not finite. The rule has made it so: uploads that are not finite are rejected."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run.params)]
    if all(np.isfinite(leaf).all() for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)):
        return
    weight, loss = np.asarray(run.updates.get("weight", ())), np.asarray(run.evaluations["loss"])
    wrong, seen = np.flatnonzero(~np.isfinite(weight)), np.flatnonzero(~np.isfinite(loss))
    since = "at its end"
    if len(wrong):
        since = f"since update {wrong[0]}, which has the weight {weight[wrong[0]]:g}"
    elif len(seen):
        since = f"since {run.evaluations['time'][seen[0]]:.6g} s or before"
    text = (
        f"method = {run.settings.get('method')!r}: the model is not finite {since}. Uploads that are not finite are "
        "rejected, so the rule makes it so: a weight that divides by zero, or a rate that is too large"
    )
    warnings.warn(text, RunWarning, stacklevel=2)


def caution_sums(run: Run, least: int) -> None:
    """Warn of sums of fewer uploads than secure aggregation promises: of server steps with rejected uploads."""
    counted = np.asarray(run.updates["accepted"] & run.updates["used"], np.bool_)
    uploads = np.bincount(np.asarray(run.updates["step"])[counted])
    few = uploads[(uploads > 0) & (uploads < least)]
    if len(few):
        warnings.warn(
            f"privacy = {run.settings.get('privacy')!r}: uploads were rejected (not finite, or of weight 0), so that "
            f"the server saw {len(few)} sums of fewer than {least} uploads, the smallest of {few.min()}",
            RunWarning,
            stacklevel=2,
        )


def caution_own_timing(s: Settings, schedule: Schedule) -> None:
    """Warn of conditions and limits that the run's timing, which is the user's own, seems not to apply."""
    nothing_failed = not (np.any(schedule.outcome > Outcome.UNDER_WAY) or np.any(schedule.corrupt))
    ignored = [name for name in ("faults", "timeout") if nothing_failed and getattr(s, name) is not None]
    if s.max_staleness is not None and int(schedule.staleness.max(initial=0)) > s.max_staleness:
        ignored.append("max_staleness")
    if s.availability is not None and _trains_offline(s, schedule):
        ignored.append("availability")
    if ignored:
        warnings.warn(
            f"{', '.join(ignored)}: without effect on this plan; a timing of your own must apply scenario.conditions "
            "and limits itself, or call one of clock.TIMINGS, which does",
            RunWarning,
            stacklevel=2,
        )


def _trains_offline(s: Settings, schedule: Schedule) -> bool:
    """Whether a client gets a job while it is offline."""
    given = own.object_or_spec("availability", s.availability)
    sources = bind_conditions(given, None, Limits(), schedule.num_clients, s.seed).availability
    online = together([source.interval for source in sources])
    jobs = zip(schedule.client.tolist(), schedule.dispatch_time.tolist())
    return online is not None and any(online(client, time)[0] > time * SLACK for client, time in jobs)


def caution_copies(method: str, schedule: PeerSchedule) -> None:
    """Warn of a plan in which nodes that add up what others send (``PeerAlgorithm.cumulative``) miss messages."""
    missed = not_mixed_once(schedule)
    if missed:
        warnings.warn(
            f"method = {method!r}: {missed} messages of the plan do not reach their receivers exactly once (lost, "
            "corrupt, late, or a node was away), so nodes keep different copies of each other's models for the rest of "
            "the run, and need not agree; it is for synchronous rounds on a fixed graph in which nothing fails",
            RunWarning,
            stacklevel=2,
        )
    others = other_coefficients(schedule)
    if others:
        warnings.warn(
            f"method = {method!r}: {others} messages of the plan are mixed with other coefficients than the first one "
            "of the same sender, but what a node adds up of a neighbour needs one coefficient that stays, as in the "
            "exchange dpsgd",
            RunWarning,
            stacklevel=2,
        )


def caution_epidemic() -> None:
    """Warn of epidemic learning on one graph for all rounds."""
    warnings.warn(
        "exchange = 'epidemic': its topology is the same graph in each round, which is no epidemic learning but "
        "synchronous gossip, as dpsgd; with gossip:receivers=K (EL-Local) or random_regular:degree=K,redraw=true "
        "(EL-Oracle) each round has other receivers",
        RunWarning,
        stacklevel=2,
    )


LEAST_MASS = 1e-3  # of a node whose steps are divided by it: they are then a thousand times as long


def caution_masses(method: str, schedule: PeerSchedule, early: bool) -> None:
    """Warn of a plan in which nodes that divide their steps by their mass (``PeerAlgorithm.debiased``) have hardly any.

    ``early``: they divide by what they keep after the split of their mass.
    """
    mass = schedule.mass if early else mass_after_mixing(schedule)
    if np.any((mass > 0) & (mass < LEAST_MASS)):
        warnings.warn(
            f"method = {method!r}: steps of a node are divided by its push-sum mass, and nodes of the plan have less "
            f"than {LEAST_MASS:g}: such steps can make the loss diverge. Nodes that train much more often than they "
            "hear from others give their mass away; in rounds, the method's usual exchange, they do not",
            RunWarning,
            stacklevel=2,
        )


def caution_fragments(schedule: PeerSchedule) -> None:
    """Warn of fragments (DivShare) that all travel together, as on a fixed graph: they change nothing."""
    count = int(schedule.push_fragment.max(initial=0)) + 1
    if count == 1 or len(schedule.push_fragment) % count:
        return
    order = np.lexsort((schedule.push_fragment, schedule.receiver, schedule.push_event))
    columns = (schedule.push_event, schedule.receiver, schedule.arrival, schedule.outcome)
    each = [column[order].reshape(-1, count) for column in columns]
    complete = (schedule.push_fragment[order].reshape(-1, count) == np.arange(count)).all()
    if complete and all((column == column[:, :1]).all() for column in each):
        warnings.warn(
            "topology: each receiver of a node gets all fragments of its model at the same time, so they change "
            f"nothing: the results are those of async_dfedavg, with {count} messages in place of one; with "
            "topology=gossip:receivers=K, K below the number of other nodes, each fragment has receivers of its own",
            RunWarning,
            stacklevel=2,
        )
