"""How many uploads a server step can have in a run with a policy. Rules must know it before the run.

The nominal plan does not tell it: if the policy chooses other clients, or another size of the buffer, server steps
have other numbers of uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from fedjax_async.base import check, grammar, registry
from fedjax_async.base.spec import Spec
from fedjax_async.clock import POLICIES, TIMINGS, Policy
from fedjax_async.config import own
from fedjax_async.config.methods import brings_timing, method_of
from fedjax_async.config.prepared import PlannedSteps, planned_steps
from fedjax_async.config.settings import Settings
from fedjax_async.types import Schedule

Decided = TypeVar("Decided")


class BufferSizes(NamedTuple):
    """The sizes that a policy gives the buffer."""

    first: int
    most: int | None  # None: the number of clients in flight


# For each policy that decides the size of the buffer: its sizes, from its options.
SIZES: dict[str, Callable[[Mapping[str, Any]], BufferSizes]] = {
    "adaptive_buffer": lambda options: BufferSizes(options["size"], options["most"]),
}

# For each policy that decides the length of the window: the first one, from its options.
FIRST_LENGTH: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "adaptive_window": lambda options: options["length"],
}

# For each timing: the largest number of uploads in a server step, without corrupt ones. It follows from the timing's
# options, the number of clients and the largest number of jobs in flight.
LONGEST: dict[str, Callable[[Mapping[str, Any], int, int], int]] = {
    "every": lambda options, clients, in_flight: 1,
    "buffer": lambda options, clients, in_flight: options["size"],
    "window": lambda options, clients, in_flight: in_flight,
    "pace": lambda options, clients, in_flight: clients,
    "cohort": lambda options, clients, in_flight: options["size"] or min(10, clients - options["over_selection"]),
}

# Timings that leave clients idle without a concurrency that is given.
IDLE = {"pace"}


def decides(policy: Policy) -> bool:
    """Whether the run may differ from the nominal plan."""
    deciding = (policy.choose, policy.buffer, policy.window, policy.sends)
    return policy.sizes or any(one is not None for one in deciding)


def possible_steps(s: Settings, timing: Spec, policy: Policy, nominal: Schedule) -> PlannedSteps:
    """The server steps of a run with a policy, for any decisions; ``timing``: the run's."""
    if not decides(policy):
        return planned_steps(nominal)
    name, options = timing.name, timing.options
    clients, source = nominal.num_clients, f"policy = {str(s.policy)!r} decides how many uploads a step has"
    in_flight = options.get("concurrency") or clients
    if policy.buffer is None:
        # a late upload may come after the server has given its place to another client
        longest = reached = LONGEST[name](options, clients, in_flight if s.timeout is None else clients)
    elif (sizes := _of_policy(s, SIZES)) is not None:
        longest = reached = min(sizes.most or in_flight, in_flight)
    else:
        longest, reached, source = in_flight, 1, f"{source}, and the buffer sizes are not known before the run"
    return PlannedSteps(int(longest), int(reached), longest == 1 and s.faults is None, source)


def first_timing(s: Settings, timing: Spec, clients: int) -> Spec:
    """The timing with the policy's first buffer or window, for the nominal plan; unchanged if that is not known."""
    name, options = timing.name, timing.options
    sizes, length = _of_policy(s, SIZES), _of_policy(s, FIRST_LENGTH)
    shared = {option: options.get(option) for option in ("concurrency", "sampling")}
    if sizes is not None and name in ("every", "buffer"):
        return Spec(TIMINGS["buffer"], size=min(sizes.first, options["concurrency"] or clients), **shared)
    if length is not None and name == "window":
        return Spec(TIMINGS["window"], length=length, **shared)
    return timing


def require_choice(s: Settings, timing: Spec, policy: Policy, clients: int) -> None:
    """``ValueError`` if the policy chooses clients but all of them are to train at once; says how to change that."""
    options = timing.options
    if policy.choose is None or "concurrency" not in options:
        return
    allowed = f"at least 2, so that policy = {str(s.policy)!r} has clients to choose among (uniform chooses none)"
    check.require(clients > 1, "clients", clients, allowed)
    if timing.name in IDLE or options["concurrency"] is not None:
        return  # the planner checks a concurrency that is given
    spec, brought = str(s.timing or method_of(s.method).timing), brings_timing(s.method)
    lower = min(max(options.get("size", 1), clients // 2), max(clients - 1, 1))
    spec += f"{',' if ':' in spec else ':'}concurrency={lower}"
    example = f"method = '{str(s.method).partition('@')[0]}@{spec}'" if brought else f"timing = '{spec}'"
    raise ValueError(
        f"policy = {str(s.policy)!r}: must have clients to choose among, but all {clients} clients train at once; "
        f"lower the concurrency, as in {example}"
    )


def _of_policy(s: Settings, table: Mapping[str, Callable[[Mapping[str, Any]], Decided]]) -> Decided | None:
    """What ``table`` knows of the policy; ``None`` if no policy of the package that it joins is in the table."""
    if own.thing_of("policy", s.policy) is not None:
        return None
    parts = [registry.spec("policy", POLICIES, part) for part in grammar.joined(str(s.policy))]
    return next((table[part.name](part.options) for part in parts if part.name in table), None)
