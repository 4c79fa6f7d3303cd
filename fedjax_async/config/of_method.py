"""The settings of a method and of the world that it meets: its clock, delays, faults and networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from fedjax_async.base import check
from fedjax_async.config.fields import one_of, setting, whole

if TYPE_CHECKING:
    import networkx as nx

    from fedjax_async.base.method import Method
    from fedjax_async.base.spec import Spec
    from fedjax_async.clock import DelayModel, PolicyModel, Timing
    from fedjax_async.clock.availability import AvailabilityModel
    from fedjax_async.clock.faults import FaultModel
    from fedjax_async.clock.network import NetworkModel
    from fedjax_async.config.own import Named
    from fedjax_async.peers import Exchange, TopologyModel


@dataclasses.dataclass(frozen=True)
class OfMethod:
    """The algorithm, when it acts, and how long jobs take."""

    method: str | Named = setting(
        "fedasync",
        "algorithm, e.g. fedasync:mixing=0.6 or fedbuff+swa:start=0.5 (`list methods` shows all)",
        "compared",
    )
    timing: str | Named | None = setting(
        None,
        "when the server takes a step, e.g. buffer:size=5 [the method's; left out with METHOD@TIMING]",
        "compared",
        without="nodes",
    )
    policy: str | Named | None = setting(
        None,
        "decides during the run which clients train next, how large the buffer is or which updates are uploaded, e.g."
        " power_of_choice:d=20 or oort+true_bytes (`list policies` shows all) [the method's, mostly none]",
        "compared",
        without="nodes trajectory",
        rare=True,
    )
    topology: str | Named | None = setting(
        None,
        "without a server: where nodes send messages, e.g. gossip:receivers=10 or ring [the method's]",
        "compared",
        without="server trajectory explain",
        rare=True,
    )
    exchange: str | Named | None = setting(
        None,
        "without a server: how nodes send and mix messages, e.g. push_sum:policy=merge [the method's; left out with "
        "METHOD@EXCHANGE]",
        "compared",
        without="server trajectory explain",
        rare=True,
    )
    delay: str | Named = setting("rpi", "how long the jobs of clients take, e.g. lognormal:sigma=0.5", "world")


@dataclasses.dataclass(frozen=True)
class OfConditions:
    """What goes wrong, and what the server does then."""

    availability: str | Named | None = setting(None, "when clients are online, e.g. sessions:on=600,off=300", "world")
    faults: str | Named | None = setting(
        None, "faults to simulate, e.g. drop:probability=0.1+duplicate:probability=0.05", "world"
    )
    network: str | Named | None = setting(
        None, "transfer times, added to the delays, e.g. link:down=1e6,up=2e5 (bytes per second)", "world"
    )
    timeout: float | None = setting(
        None,
        "the server gives up a job after X virtual seconds",
        "tuned",
        without="nodes",
        requires=check.real_positive,
    )
    late: str = setting(
        "apply",
        "what happens to an upload that arrives after the timeout: apply or drop",
        "tuned",
        without="nodes",
        requires=one_of("apply", "drop"),
    )
    max_staleness: int | None = setting(
        None,
        "the server drops uploads staler than N server steps",
        "tuned",
        without="nodes",
        requires=whole(low=0),
    )
    norm_limit: float | None = setting(
        None, "uploads of a larger Euclidean norm are rejected", "tuned", requires=check.real_positive
    )


class MethodKeywords(TypedDict, total=False):
    """The same as typed keywords."""

    timing: str | Named | Timing | None
    policy: str | Named | PolicyModel | None
    topology: str | Named | TopologyModel | nx.Graph | Sequence[nx.Graph] | None
    exchange: str | Named | Exchange | None
    delay: str | Named | DelayModel
    availability: str | Named | AvailabilityModel | None
    faults: str | Named | FaultModel | None
    network: str | Named | NetworkModel | None
    timeout: float | None
    late: str
    max_staleness: int | None
    norm_limit: float | None


class RuleKeyword(TypedDict, total=False):
    """Not of ``compare``, which takes methods."""

    method: str | Named | Method | Spec
