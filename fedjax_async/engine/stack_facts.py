"""What the compiled programs of a stack with a server depend on, besides its components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_async.engine.layout import Layout
from fedjax_async.engine.probes import Probes
from fedjax_async.engine.tables import StackShape, group_ends
from fedjax_async.types import Schedule

AT_ONCE = 4  # arrivals in a pass of a loop on an accelerator


class Arriving(Protocol):
    """What is read of the members of a stack."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def applied(self) -> np.ndarray: ...
    @property
    def probes(self) -> Probes: ...


class StackFacts(NamedTuple):
    """What the compiled programs of a stack depend on; equal for all its runs."""

    num_clients: int
    every_closes: bool  # whether every arrival completes its server step
    all_applied: bool  # whether no job is trained in vain
    probes: tuple[tuple[str, Callable[..., Any]], ...] = ()  # names and functions
    # The most messages due after an arrival (of a stack: after the arrivals of a rank), if the programs depend on it.
    # They then send them without a loop of unknown length, which would cost an accelerator more than the messages.
    messages: int | None = None
    # Whether messages must be sent one after the other: some client gets two after the same arrival, and what the
    # server remembers of the client when it sends the second is what the first has left.
    in_turn: bool = False
    # Whether few arrivals close a step or are followed by messages, so that a loop over the arrivals in between pays.
    grouped: bool = False
    # How many arrivals are received in a pass of a loop, of which each costs an accelerator several launches.
    at_once: int = 1


def stack_facts(members: Sequence[Arriving], layout: Layout, shape: StackShape) -> StackFacts:
    """What the compiled programs of a stack depend on."""
    off_the_cpu = jax.default_backend() != "cpu"
    in_turn = (off_the_cpu or _by_ranks(layout, shape)) and sends_twice(layout)
    facts = StackFacts(
        members[0].schedule.num_clients,
        all(bool(np.all(m.schedule.closes[m.applied])) for m in members),
        all(bool(np.all(m.applied)) for m in members),
        tuple((name, probe.function) for name, probe in members[0].probes.items()),
        most_messages(layout, shape) if off_the_cpu and not in_turn else None,
        in_turn,
    )
    if facts.messages is None or shape.runs > 1:
        return facts
    return _in_groups(facts, members, layout)


def _in_groups(facts: StackFacts, members: Sequence[Arriving], layout: Layout) -> StackFacts:
    """In groups if an arrival in two, or fewer, closes a step or is followed by messages."""
    if facts.in_turn:
        return facts
    ends = group_ends(layout, [m.applied for m in members], facts.every_closes)
    grouped = 2 * len(ends) <= len(layout.run)
    several = facts.all_applied and not facts.probes and (grouped or facts.every_closes)
    return facts._replace(grouped=grouped, at_once=AT_ONCE if several else 1)


def expected(facts: StackFacts, nominal: Arriving, layout: Layout) -> StackFacts:
    """The facts of a run whose plan grows, as far as they are expected from its nominal plan; off a CPU.

    ``layout``: that of the nominal plan. :func:`following` corrects them as the plan grows.
    """
    return _in_groups(following(facts._replace(messages=1), layout), [nominal], layout)


def following(facts: StackFacts, layout: Layout) -> StackFacts:
    """The facts with room for the messages that follow the arrivals of an extension of the plan."""
    if facts.messages is None:
        return facts
    if sends_twice(layout):  # as in :func:`stack_facts`, such runs have neither groups nor several arrivals a pass
        return facts._replace(messages=None, in_turn=True, grouped=False, at_once=1)
    return facts._replace(messages=max(facts.messages, power_above(np.diff(layout.slots.write_bounds)[1:])))


def _by_ranks(layout: Layout, shape: StackShape) -> bool:
    """Whether the arrivals of a rank are applied at once."""
    return shape.runs > 1 and layout.batching == "vmap"


def most_messages(layout: Layout, shape: StackShape) -> int:
    """The most messages due after an arrival, in a stack after the arrivals of a rank; rounded up to a power of two."""
    after = layout.slots.ranks if _by_ranks(layout, shape) else np.arange(len(layout.run) + 1)
    due = np.diff(layout.slots.write_bounds[after + 1])
    return power_above(due)


def power_above(due: np.ndarray) -> int:
    """The largest of these numbers, rounded up to a power of two."""
    return 1 << max(int(due.max(initial=1)) - 1, 0).bit_length()


def sends_twice(layout: Layout) -> bool:
    """Whether a client is sent two messages of its own after the same arrival: the job of the first has failed."""
    slots, clients = layout.slots, layout.schedules[0].num_clients
    after = np.repeat(np.arange(len(slots.write_bounds) - 1), np.diff(slots.write_bounds))
    owners = slots.write_run.astype(np.int64) * clients + slots.write_client
    keys = np.sort(after * clients * len(layout.schedules) + owners)
    return bool((keys[1:] == keys[:-1]).any())
