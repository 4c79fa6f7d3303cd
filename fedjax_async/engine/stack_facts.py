"""What the compiled programs of a stack with a server depend on, besides its components."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_async.engine.layout import Layout
from fedjax_async.engine.members import Member
from fedjax_async.engine.tables import StackShape, closing, group_end
from fedjax_async.types import Array

AT_ONCE = 4  # arrivals in a pass of a loop on an accelerator


class StackFacts(NamedTuple):
    """What the compiled programs of a stack depend on; equal for all its runs."""

    num_clients: int
    every_closes: bool  # whether every arrival completes its server step
    all_applied: bool  # whether no job is trained in vain
    probes: tuple[tuple[str, Callable[..., Mapping[str, Array]]], ...] = ()  # names and functions
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


def first_facts(members: Sequence[Member], all_applied: bool) -> StackFacts:
    """What programs depend on before anything is planned."""
    return StackFacts(
        members[0].facts.num_clients,
        all(m.facts.every_closes for m in members),
        all_applied,
        tuple((name, probe.function) for name, probe in members[0].probes.items()),
        None if jax.default_backend() == "cpu" else 1,
    )


def stack_facts(
    members: Sequence[Member], layout: Layout, shape: StackShape, all_applied: bool | None = None
) -> StackFacts:
    """What the compiled programs of a stack depend on; ``all_applied``: by default as in the members' schedules.

    Of runs whose plans grow, the layout of their nominal plans gives what is expected; :func:`following` corrects it.
    """
    facts = first_facts(members, all(m.applied.all() for m in members) if all_applied is None else all_applied)
    facts = following(facts, layout, shape)
    if facts.messages is None or shape.runs > 1:
        return facts
    # in groups if an arrival in two, or fewer, closes a step or is followed by messages
    grouped = 2 * len(np.unique(group_end(layout, closing(layout, members)))) <= len(layout.run)
    several = facts.all_applied and not facts.probes and (grouped or facts.every_closes)
    return facts._replace(grouped=grouped, at_once=AT_ONCE if several else 1)


def following(facts: StackFacts, layout: Layout, shape: StackShape) -> StackFacts:
    """The facts with room for the messages of a layout: the first one of the runs, or what their plans have gained.

    Messages that must be sent one after the other allow neither groups nor several arrivals a pass.
    """
    counted = facts.messages is not None or (_by_ranks(layout, shape) and not facts.in_turn)
    if counted and sends_twice(layout):
        return facts._replace(messages=None, in_turn=True, grouped=False, at_once=1)
    if facts.messages is None:
        return facts
    return facts._replace(messages=max(facts.messages, most_messages(layout, shape)))


def _by_ranks(layout: Layout, shape: StackShape) -> bool:
    """Whether the arrivals of a rank are applied at once."""
    return shape.runs > 1 and layout.batching == "vmap"


def most_messages(layout: Layout, shape: StackShape) -> int:
    """The most messages due after an arrival, in a stack after the arrivals of a rank; rounded up to a power of two."""
    after = layout.slots.ranks if _by_ranks(layout, shape) else np.arange(len(layout.dealt.lane) + 1)
    due = np.diff(layout.slots.write_bounds[after + 1])
    return power_above(due)


def power_above(due: np.ndarray) -> int:
    """The largest of these numbers, rounded up to a power of two."""
    return 1 << max(int(due.max(initial=1)) - 1, 0).bit_length()


def sends_twice(layout: Layout) -> bool:
    """Whether a client is sent two messages of its own after the same arrival: the job of the first has failed."""
    slots, clients = layout.slots, 1 + int(layout.slots.write_client.max(initial=0))
    after = np.repeat(np.arange(len(slots.write_bounds) - 1), np.diff(slots.write_bounds))
    owners = slots.write_run.astype(np.int64) * clients + slots.write_client
    keys = np.sort(after * clients * (1 + int(slots.write_run.max(initial=0))) + owners)
    return bool((keys[1:] == keys[:-1]).any())
