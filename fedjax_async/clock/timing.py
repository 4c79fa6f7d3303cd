"""Timing policies: when the server applies uploads, when that completes a step, and who trains next.

A policy is ``timing(world) -> Schedule``: it drives one ``EventQueue`` until the budget is spent. The
rules common to all: a client receives its model at the moment it is dispatched, right after the arrivals
applied so far; it is dispatched again only after its upload was applied (or its job called off); and
what the budget leaves under way stays in the job arrays, never among the arrivals.

Server steps are made of accepted uploads, as far as the clock knows them. It knows which uploads come too late or
too stale for the server's limits: those are not arrivals. It knows which the faults make corrupt: those are
arrivals that fill no place in a buffer or a cohort, and a step without a sound upload is not closed. It does not
know what training makes of an upload: one that turns out not finite or too large is rejected, but keeps its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedjax_async import check, registry
from fedjax_async.clock import chance, conditions, inputs, steady, unreliable_timing
from fedjax_async.clock.durations import Profiles, Scaling, Speeds, from_profiles
from fedjax_async.clock.event_queue import SLACK, EventQueue
from fedjax_async.clock.successors import SUCCESSORS
from fedjax_async.clock.unreliable_timing import FRUITLESS_ROUNDS
from fedjax_async.clock.world import World
from fedjax_async.types import Schedule

Timing = Callable[[World], Schedule]


def _in_flight(world: World, concurrency: int | None) -> int:
    if concurrency is None:
        return world.num_clients
    check.whole("concurrency", concurrency, low=1, high=world.num_clients)
    return int(concurrency)


def _start(world: World, flying: int, sampling: str) -> tuple[EventQueue, Callable[[int], int]]:
    """A queue with the first clients sent at time 0, and the rule that names who leaves in a returning one's stead."""
    # Where all are under way nobody else is ever idle.
    idle = SUCCESSORS["same" if flying == world.num_clients else sampling](world.num_clients, flying, world.seed)
    queue = EventQueue(world, idle.ahead)
    first = sorted(idle.candidates[:flying])
    queue.prepare(first)
    for client in first:
        queue.dispatch(client, 0.0)
    idle.fill(idle.candidates[flying:])
    return queue, idle.swap


def every(*, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """Every arrival is a server step; a client leaves with the new model at once (C in flight, all by default)."""
    return buffer(size=1, concurrency=concurrency, sampling=sampling)


def buffer(*, size: int = 10, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """Every `size` arrivals are a server step; clients leave with the current model at once (C in flight).

    ``sampling`` says who leaves when a client returns: ``same``, ``uniform`` (over the idle clients) or
    ``round_robin``. Simultaneous uploads are all applied, in the order of clients, before any of the
    clients leaves again: equal delays make rounds, and a buffer of all N clients is then FedAvg. A last
    buffer that the budget leaves unfinished is listed, and closes nothing.
    """
    check.whole("size", size)
    inputs.optional_whole("concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(world: World) -> Schedule:
        flying = _in_flight(world, concurrency)
        allowed = f"at most the {flying} clients in flight (it would never fill)"
        check.require(size <= flying, "size", size, allowed)
        if world.conditions is not None:
            return unreliable_timing.buffer(world, int(size), flying, sampling)
        if flying == world.num_clients or sampling == "same":
            arrivals = steady.merged(world, int(size), flying)
        else:
            arrivals = steady.sampled(world, int(size), flying, SUCCESSORS[sampling])
        return steady.buffered(world, int(size), flying, arrivals)

    return timing


def window(*, length: float = 60.0, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """Every `length` seconds are a server step: what arrived is applied at the window's end, then all leave.

    An upload at the very end still counts, and so does one that comes later by a rounding error only: its
    ``upload_time`` is then the window's end. Uploads are applied in order of arrival, the last one closes
    the step; then their clients (or others, see ``buffer``) start from the new model. A window in which
    nothing arrived is no step.
    """
    inputs.positive("length", length)
    inputs.optional_whole("concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(world: World) -> Schedule:
        flying = _in_flight(world, concurrency)
        if world.conditions is not None:
            return unreliable_timing.window(world, length, flying, sampling)
        queue, successor = _start(world, flying, sampling)
        count = 0
        while queue.next_time() <= queue.horizon:
            count = max(count + 1, math.floor(queue.next_time() / length))
            while count * length * SLACK < queue.next_time():
                count += 1
            end = count * length
            arrived = []
            while (upload := queue.take(end * SLACK)) is not None:
                arrived.append(upload)
                if upload[0] > end:
                    queue.record.no_later(upload[2], end)
            if not queue.record.apply_step((job for _, _, job in arrived), end):
                break
            leaving = [successor(client) for _, client, _ in arrived]
            queue.prepare(leaving)
            for client in leaving:
                queue.dispatch(client, end)
        return queue.record.schedule(world)

    return timing


def cohort(*, size: int | None = None, over_selection: int = 0, deadline: float | None = None) -> Timing:
    """Synchronous rounds: `size` random clients, all from one model; the round lasts as long as the slowest.

    ``size``: 10 by default, or all clients if there are fewer. ``over_selection`` more are dispatched,
    and the slowest so many dropped. With a ``deadline`` the server waits at most that many seconds and
    drops the late; a round in which nobody was in time is no step. All are applied at the round's end,
    in order of arrival; then the next cohort starts. Dropped jobs are called off at that moment: their
    ``upload_time`` is infinite.
    """
    inputs.optional_whole("size", size)
    check.whole("over_selection", over_selection, low=0)
    inputs.optional_positive("deadline", deadline)

    def timing(world: World) -> Schedule:
        wanted = min(10, world.num_clients - int(over_selection)) if size is None else int(size)
        selected = wanted + int(over_selection)
        allowed = f"at most {world.num_clients}, the number of clients"
        check.require(wanted >= 1 and selected <= world.num_clients, "size + over_selection", selected, allowed)
        if world.conditions is not None:
            return unreliable_timing.cohort(world, wanted, selected, deadline)
        rng = chance.generator(world.seed, "rounds")
        queue = EventQueue(world)
        start, fruitless = 0.0, 0
        while start <= queue.horizon:
            chosen = np.sort(rng.choice(world.num_clients, selected, replace=False)).tolist()
            queue.prepare(chosen)
            for client in chosen:
                queue.dispatch(client, start)
            limit = math.inf if deadline is None else start + deadline
            uploads = (queue.take(limit) for _ in range(wanted))
            accepted = [upload for upload in uploads if upload is not None]
            end = accepted[-1][0] if len(accepted) == wanted else limit
            if end > queue.horizon:
                break
            queue.cancel_rest(end)
            if accepted and not queue.record.apply_step((job for _, _, job in accepted), end):
                break
            start = end
            fruitless = 0 if accepted else fruitless + 1
            check.require(fruitless < FRUITLESS_ROUNDS, "deadline", deadline, "long enough for some client")
        return queue.record.schedule(world)

    return timing


def participation(*, probability: float = 0.5, spread: float = 0.0, length: float = 1.0) -> Timing:
    """Rounds of `length` seconds; a random set uploads, the others keep training `local_steps` more a round.

    Client i is in a round's set S_t with probability ``p_i``, independently: ``p_i`` is drawn once,
    uniform in ``probability * (1 -+ spread)``. An upload after tau rounds holds ``tau * local_steps``
    steps (``Schedule.local_steps`` says so); then the client starts from the new model. The delay model
    plays no part. Whether a round has participants is chance; one without them is no server step.

    This is Algorithm 1 of AsynFL (2025) read literally: a window whose "delays" are whole numbers of
    rounds, geometrically distributed.
    """
    inputs.positive("probability", probability)
    check.in_range("probability", probability, 0, 1)
    inputs.non_negative("spread", spread)
    check.require(spread <= 1, "spread", spread, "between 0 and 1")
    highest = probability * (1 + spread)
    check.require(highest <= 1, "probability * (1 + spread)", highest, "at most 1")
    inputs.positive("length", length)

    def timing(world: World) -> Schedule:
        # Counted in rounds, all times are whole numbers and exact; seconds come last.
        time = None if world.until.time is None else world.until.time / length
        delays = _rounds(probability, spread)(world.num_clients, world.seed)
        rounds = world._replace(delays=delays, until=world.until._replace(time=time))
        if world.conditions is not None:
            rounds = rounds._replace(conditions=conditions.in_units(world.conditions, length))
        plan = window(length=1.0)(rounds)
        if world.conditions is None:
            trained = np.rint(plan.upload_time - plan.dispatch_time).astype(np.int64)
        else:  # some uploads never come, or late
            trained = delays.durations(plan.client, plan.number).astype(np.int64)
        return plan._replace(
            local_steps=(plan.local_steps * trained).astype(np.int32),
            dispatch_time=plan.dispatch_time * length,
            upload_time=plan.upload_time * length,
            time=plan.time * length,
            freed_time=plan.freed_time * length,
        )

    return timing


def _rounds(probability: float, spread: float) -> Callable:
    """Delays, in rounds, until a client participates: geometric with its own probability."""

    def profiles(count: int, seed: int) -> Profiles:
        draws = chance.Draws(seed, "participation", np.arange(count))
        chances = probability * (1 + spread * (1 - 2 * draws.random()))
        return Profiles(1 / chances, np.zeros(count), np.ones(count))

    def geometric(draws: chance.Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
        return draws.geometric(1 / mean)

    return from_profiles(profiles, geometric, Scaling(), Speeds())


TIMINGS: dict[str, Callable[..., Timing]] = {
    "every": every,
    "buffer": buffer,
    "window": window,
    "cohort": cohort,
    "participation": participation,
}
