"""A run without a server, from settings to what the engine executes: resolve, plan, build, as in ``experiment.py``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import DelayModel, NothingArrives, Until, at_or_before
from fedjax_async.config import contracts, own
from fedjax_async.config.budget import ended_early, rounded_up, with_early_end
from fedjax_async.config.cautions import (
    caution_copies,
    caution_epidemic,
    caution_feedback,
    caution_fragments,
    caution_late,
    caution_masses,
    caution_twice,
)
from fedjax_async.config.checked_parts import sent_by_nodes
from fedjax_async.config.clients import client_of, longest_message
from fedjax_async.config.methods import method_of
from fedjax_async.config.peer_methods import exchange_of, peer_of, stays_of
from fedjax_async.config.prepared import Evaluations, Experiment, shared_data
from fedjax_async.config.problem import data_of, start_of
from fedjax_async.config.resolving import checked, delay_of, every_of, length_of_batch, model_for, steps_of, until_of
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.engine.components import Components, bound, components_of, gradients_of
from fedjax_async.engine.defaults import default_lanes
from fedjax_async.engine.evaluation import EvaluationPoints, Every, points_among, require_few
from fedjax_async.engine.peer_points import online
from fedjax_async.engine.peer_probes import split_probes
from fedjax_async.engine.peer_record import planned_columns, record_peers, scores_of_nodes
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import make_peer_member, make_peer_stack, peer_layout_of, run_peer_waves
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.run import Ready, run_stack
from fedjax_async.engine.stacking import shape_of
from fedjax_async.engine.tables import rows_of
from fedjax_async.peers import Delivery, Exchange, PeerSchedule, plan_peers, topologies
from fedjax_async.peers.checking import check_peer_schedule
from fedjax_async.peers.synchronous import Overlapping
from fedjax_async.peers.triggering import WITHHELD
from fedjax_async.types import FederatedData, Model, Params, Run

PEER_ENGINES: dict[str, Callable[..., EngineResult]] = {"waves": run_peer_waves, "reference": run_peer_reference}
# Settings that shape a plan; the first ones most of all.
_PLANS = ("exchange", "method", "topology", "network", "availability", "faults", "delay")


class WithoutServer(NamedTuple):
    """The kind of a run without a server."""

    from_plan: dict[str, np.ndarray]  # the columns of the evaluations that follow from the plan
    global_tests: str

    def evaluations(self, e: Experiment) -> Evaluations:
        """Each event is one update and one step."""
        return Evaluations(e.points.time, e.points.position, e.points.position)

    def columns(self, e: Experiment, row: int, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Means over the nodes that are online, and the planned columns."""
        there = online(e.schedule, e.points.time[row : row + 1])[0]
        found = scores_of_nodes(scores, there, e.components.data)
        return found | {name: column[row] for name, column in self.from_plan.items() if not name.startswith("bytes_")}

    def run(self, e: Experiment, **options: Any) -> EngineResult:
        """Run with ``run_peer_waves`` or ``run_peer_reference``."""
        name, given = e.settings.engine, {"global_tests": self.global_tests, "norm_limit": e.norm_limit, **options}
        if name == "waves":
            given["probes"] = e.probes
        return PEER_ENGINES[name](e.components, e.schedule, e.params, e.key, e.points.time, **given)

    def recorded(self, e: Experiment, result: EngineResult) -> Run:
        """Tables of events and messages."""
        work, data = gradients_of(e.components, e.schedule), e.components.data
        described = e.described
        run = record_peers(described, e.schedule, e.points, result, self.from_plan, data, work)
        whole = len(run.evaluations["time"]) == len(e.points.time)
        return with_early_end(run, ended_early(e.settings, described, e.schedule, whole=whole))

    def shared(self, e: Experiment) -> tuple[object, ...]:
        """Rule, fragments, tests and data."""
        return e.components.rule, e.schedule.fragments, self.global_tests, shared_data(e.components.data)

    @property
    def lay_out(self) -> Callable[..., Ready]:
        """As a stack of ``engine.peer_run``."""
        return partial(_stack, self.global_tests)

    def num_bytes(self, e: Experiment, rows: int, **options: Any) -> int:
        """What nodes keep, a message a node, and models to train with."""
        p, nodes = e.components, e.schedule.num_clients
        peer, client = bound(p.rule, p.hyper), bound(p.client, p.hyper)
        kept = jax.eval_shape(lambda params: (peer.init(params), client.init(params)), e.params)
        each = tree.num_bytes(kept) + e.schedule.fragments * e.schedule.message_bytes
        return nodes * each + 4 * tree.num_bytes(e.params) * default_lanes()


def _stack(global_tests: str, each: Sequence[Experiment], **options: Any) -> Ready:
    members = [
        make_peer_member(
            e.components, e.schedule, e.params, e.key, e.points.time, norm_limit=e.norm_limit,
            global_tests=global_tests, probes=e.probes,
        )
        for e in each
    ]  # fmt: skip
    layout = peer_layout_of(members, batching=each[0].settings.batching, **options)
    shape = shape_of(layout)._replace(rows=rows_of([e.components.data for e in each]))
    make = partial(make_peer_stack, members, layout)
    return Ready(len(layout.source), shape, lambda shape, models: partial(run_stack, make(shape)))


class PeerResolved(NamedTuple):
    """Settings whose names have become objects."""

    settings: Settings  # with the defaults that depend on method and data
    components: Components
    exchange: Exchange
    delay: DelayModel
    local_steps: np.ndarray  # int64[N], local steps of an event of each node
    message_bytes: int
    withholds: bool  # whether nodes may withhold messages
    global_tests: str


def prepare_peers(
    settings: Settings,
    probes: Mapping[str, object] | None = None,
    planning: Callable[[float], None] | None = None,
) -> Experiment:
    """Resolve every name and plan the whole run; ``ValueError`` for anything out of range. See ``prepare``."""
    run = resolve_peers(settings)
    schedule, points = planned_peers(run, planning)
    return built_peers(run, schedule, points, probes)


def resolve_peers(settings: Settings) -> PeerResolved:
    """Turn every name into an object, and count the bytes of a message."""
    s = checked(settings)
    delay, data = delay_of(s), data_of(s)
    chosen = method_of(s.method)
    exchange = exchange_of(chosen, s.exchange)
    allowed = "at least 2: a single node has no receiver (method = 'independent' trains without messages)"
    check.require(s.topology is None or len(data.size) > 1, "clients", len(data.size), allowed)
    model, shapes = model_for(s, data)
    trainer = client_of(_without_private(model), s, length_of_batch(s, data), chosen)
    steps = steps_of(s, data, chosen)
    components = components_of(peer_of(chosen, model, s.compress), trainer, model, data)
    _require_early(exchange, components, s)
    message, columns = sent_by_nodes(components, shapes)
    if bound(components.rule, components.hyper).cumulative and s.topology is not None:
        _require_one_graph(s, len(data.size))
    if str(s.exchange or chosen.exchange) == "epidemic" and _graphs(s, len(data.size)) == 1:
        caution_epidemic()
    size, withholds = _message_bytes(s, components, shapes, message), WITHHELD in columns
    if s.compress is not None:
        sent = jax.tree.leaves(tree.split(shapes, stays_of(components.model))[0])
        caution_feedback(s, [sum(math.prod(leaf.shape) for leaf in sent)])
    contracts.check_clock(s, delay, len(data.size))
    caution_twice(s)
    return PeerResolved(s, components, exchange, delay, steps, size, withholds, _global_tests(s, data))


@lru_cache(maxsize=64)
def _without_private(model: Model) -> Model:
    """The model for local training: the node's row keeps the leaves that stay with it, so its client need not."""
    return model if model.private is None else model._replace(private=None)


def _global_tests(s: Settings, data: FederatedData) -> str:
    """When all models are scored on the global test set: always where the nodes have no tests of their own."""
    if data.test_order is not None:
        return s.global_tests or "ends"
    allowed = "all: the nodes have no tests of their own"
    check.require(s.global_tests in (None, "all"), "global_tests", s.global_tests, allowed)
    return "all"


def _message_bytes(s: Settings, components: Components, params: Params, message: object) -> int:
    """Bytes of one message on the network, from shapes; a compressed one counts with its largest possible size."""
    if s.compress is not None:
        return longest_message(s.compress, tree.split(params, stays_of(components.model))[0])
    wire = bound(components.rule, components.hyper).wire
    return tree.num_bytes(message) if wire is None else int(wire(message))


def planned_peers(
    run: PeerResolved, planning: Callable[[float], None] | None = None
) -> tuple[PeerSchedule, EvaluationPoints]:
    """Plan when nodes train, push and mix, and choose the evaluations; ``planning``: see ``prepare``.

    Raises ``ValueError`` for a budget without an event, too many evaluations, and times outside the run.
    """
    s, every = run.settings, every_of(run.settings)
    if (s.time is None) != (s.updates is None):  # the length is known before planning
        require_few(every, time=s.time, updates=s.updates)
    try:
        schedule = _plan(run, until_of(s), planning)
    except NothingArrives:
        try:
            first = float(_plan(run, Until(updates=1), None).end[0])
        except NothingArrives:
            field = "faults" if s.availability is None else "availability"
            allowed = "such that a node finishes training before all are gone"
            raise ValueError(f"{field} = {as_dict(s)[field]!r}: must be {allowed}") from None
        allowed = f"at least {rounded_up(first)}, when the first node has trained"
        raise ValueError(f"time = {s.time}: must be {allowed}") from None
    _check_plan(s, schedule)
    if run.withholds:
        _require_kept(s, schedule)
    spent = len(schedule.client) == s.updates
    end = s.time if s.time is not None and not spent else float(schedule.end.max())
    within = every.at is None or min(every.at) <= end
    check.require(within, "eval_at", s.eval_at, f"times with at least one in the run, which ends after {end:g} s")
    caution_late(s, every, end, len(schedule.client), len(schedule.client))
    caution_fragments(schedule)
    node = bound(run.components.rule, run.components.hyper)
    if node.cumulative:
        caution_copies(str(s.method), schedule)
    if node.debiased:
        caution_masses(str(s.method), schedule, node.early)
    return schedule, peer_points(schedule, every, None if spent else s.time)


def _check_plan(s: Settings, schedule: PeerSchedule) -> None:
    """``ValueError`` for a plan with contradictions, if a part of the user's own has made it."""
    parts = [field for field in _PLANS if own.is_own(s, field)]
    if parts:
        try:
            check_peer_schedule(schedule)
        except ValueError as error:
            raise ValueError(f"{parts[0]}: must lead to a plan without contradictions: {error}") from None


def _require_one_graph(s: Settings, nodes: int) -> None:
    """``ValueError`` for graphs that change: a receiver adds up all differences that a sender has sent."""
    allowed = f"one graph that stays: nodes of {s.method} keep what their neighbours have sent since the start"
    check.require(_graphs(s, nodes) == 1, "topology", as_dict(s)["topology"], allowed)


def _graphs(s: Settings, nodes: int) -> int:
    """How many graphs take turns; 0 if receivers are drawn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)  # planning says it
        return len(topologies.bind(own.object_or_spec("topology", s.topology), nodes, s.seed).graphs)


def _require_early(exchange: Exchange, components: Components, s: Settings) -> None:
    """``ValueError`` if messages leave before the training that they hold."""
    allowed = f"another one, since {s.method} sends what it has trained; one that sends before it trains is osgp"
    early = bound(components.rule, components.hyper).early or not isinstance(exchange, Overlapping)
    check.require(early, "exchange", "overlap", allowed)


def _require_kept(s: Settings, schedule: PeerSchedule) -> None:
    """``ValueError`` unless every receiver of a node has had all its messages, so that the last one can stand for more.

    Nodes that withhold messages rely on it.
    """
    missing = np.isin(schedule.outcome, (Delivery.LOST, Delivery.OVERFLOWED)) | schedule.corrupt
    sender = schedule.client[schedule.push_event]
    pairs, counts = np.unique(np.stack([sender, schedule.receiver]), axis=1, return_counts=True)
    pushing = np.bincount(schedule.client[np.unique(schedule.push_event)], minlength=schedule.num_clients)
    plans = {
        "an exchange without masses, which would move without the messages": not schedule.sent_mass.any(),
        "a topology in which each node has the same receivers at every event": bool(
            np.all(counts == pushing[pairs[0]])
        ),
        "messages that all arrive and are read": not missing.any(),
        "nodes that are all there from the start": not schedule.joined.any(),
    }
    for plan, holds in plans.items():
        check.require(
            holds, "method", str(s.method), f"one whose nodes withhold no messages (trigger), or used with {plan}"
        )


def peer_points(schedule: PeerSchedule, every: Every, horizon: float | None = None) -> EvaluationPoints:
    """The evaluations that ``every`` asks for; each sees all events that end by then."""
    ends = np.sort(schedule.end)
    times = np.unique(points_among(ends, np.ones(len(ends), np.bool_), every, horizon).time)
    return EvaluationPoints(at_or_before(ends, times), times)


def _plan(run: PeerResolved, until: Until, planning: Callable[[float], None] | None) -> PeerSchedule:
    s = run.settings
    return plan_peers(
        run.exchange,
        run.delay,
        num_clients=len(run.components.data.size),
        local_steps=run.local_steps,
        until=until,
        seed=s.seed,
        topology=own.object_or_spec(
            "topology", s.topology or "gossip"
        ),  # not used if it is None: then nodes send no messages
        message_bytes=0 if s.topology is None else run.message_bytes,
        availability=own.object_or_spec("availability", s.availability),
        faults=own.object_or_spec("faults", s.faults),
        network=own.object_or_spec("network", s.network),
        progress=planning,
    )


def built_peers(
    run: PeerResolved, schedule: PeerSchedule, points: EvaluationPoints, probes: Mapping[str, Any] | None = None
) -> Experiment:
    """Build what the engine executes: initial parameters, checked probes, planned columns of the evaluations."""
    s, components = run.settings, run.components
    nodes = len(components.data.size)
    check.require(
        schedule.num_clients == nodes, "exchange", f"{schedule.num_clients} nodes", f"{nodes}, as in the data"
    )
    cut = bound(components.rule, components.hyper).fragments
    allowed = f"one that sends {cut} fragments, as {s.method} cuts its messages"
    check.require(schedule.fragments == cut, "exchange", f"{schedule.fragments} fragments", allowed)
    split_probes(probes, components.data, len(schedule.client))
    check.require(not probes or s.engine == "waves", "probes", list(probes or ()), "left out with engine = 'reference'")
    params, key = start_of(s, components.model, components.data)
    limit = math.inf if s.norm_limit is None else s.norm_limit
    kind = WithoutServer(planned_columns(schedule, points), run.global_tests)
    learned = (params, key, points, limit, dict(probes or {}))
    return Experiment(s, s, kind, components, schedule, *learned)
