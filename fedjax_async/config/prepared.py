"""A run that is ready to start, the kind of a run with a server, and its settings with objects in place of names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_async.base import tree
from fedjax_async.base.spec import Spec
from fedjax_async.clock import DelayModel, Timing, energy
from fedjax_async.config.budget import ended_early, with_early_end
from fedjax_async.config.cautions import caution_model, caution_sums
from fedjax_async.config.protection import privacy_of
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.engine.components import (
    Components,
    facts_of,
    first_states,
    gradients_of,
    waits_for_close,
)
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.measures import NOTHING, Measures
from fedjax_async.engine.members import Member
from fedjax_async.engine.probes import NO_PROBES
from fedjax_async.engine.record import EngineResult, Traffic, make_run
from fedjax_async.engine.reference import run_reference
from fedjax_async.engine.run import Ready, run_member, run_stack
from fedjax_async.engine.stacking import layout_of, make_member, make_stack, shape_of
from fedjax_async.engine.tables import rows_of
from fedjax_async.types import FederatedData, Key, Params, Probe, Run, Schedule


class Evaluations(NamedTuple):
    """When the model of a run is evaluated, as far as that is decided."""

    time: np.ndarray  # float64[V], virtual seconds
    updates: np.ndarray  # int64[V], arrivals applied before; without a server: events
    steps: np.ndarray  # int64[V], server steps closed before; without a server: events
    complete: bool = True  # a run with a policy decides its evaluations while it trains


class Kind(Protocol):
    """What differs between runs with a server, without one (``peers.py``) and with a policy (``adaptive.py``)."""

    def evaluations(self, e: Experiment) -> Evaluations:
        """The evaluations decided so far; before the run, the planned ones."""

    def columns(self, e: Experiment, row: int, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The scores of evaluation ``row`` as the columns of the results."""

    def run(self, e: Experiment, **options: Any) -> EngineResult:
        """Run on the engine that the settings name; ``options``: those of the engine. Returns its result."""

    def recorded(self, e: Experiment, result: EngineResult) -> Run:
        """The tables of the run from what the engine returned."""

    def shared(self, e: Experiment) -> tuple[object, ...]:
        """What two runs must have in common to share programs, besides what ``sweeping`` compares for all runs."""

    @property
    def lay_out(self) -> Callable[..., Ready]:
        """``lay_out(experiments, max_width=, lanes=)``: runs that share programs, side by side."""

    def num_bytes(self, e: Experiment, rows: int, **options: object) -> int:
        """Device memory of one run besides its examples, roughly; ``rows``: jobs that are trained at a time."""


class Experiment(NamedTuple):
    """A run that is ready to start: nothing has been compiled or trained yet.

    Code that executes, watches or saves a run need not know its kind. With a policy, schedule and points are those of
    the nominal plan, in which the policy decides nothing.
    """

    settings: Settings
    named: Settings  # those that results keep: of a run of a sweep, its own
    kind: Kind
    components: Components
    schedule: Any  # Schedule; without a server PeerSchedule
    params: Params
    key: Key
    points: EvaluationPoints  # position: arrivals by then; without a server, events that have ended by then
    norm_limit: float = math.inf
    probes: Mapping[str, Probe] = NO_PROBES
    measures: Measures = NOTHING
    traffic: Any = None  # Traffic; None without a server

    @property
    def described(self) -> dict[str, object]:
        """The settings as results keep them, with names in place of objects."""
        return as_dict(self.named)

    @property
    def has_server(self) -> bool:
        """Whether the run has a server."""
        return self.traffic is not None

    @property
    def total(self) -> int:
        """The number of arrivals of the run; without a server, of compute events."""
        return len(self.schedule.job if self.has_server else self.schedule.client)

    def recorded(self, result: EngineResult) -> Run:
        """The tables of the run from what the engine returned; warns of a model that is not finite."""
        names = self.components.data.client_names
        run = self.kind.recorded(self, result)._replace(client_names=None if names is None else (*names,))  # as in load
        caution_model(run)
        return run


class WithServer(NamedTuple):
    """The kind of a planned run with a server."""

    def evaluations(self, e: Experiment) -> Evaluations:
        """Evaluations count arrivals and the server steps that they close."""
        return Evaluations(e.points.time, e.points.position, e.points.steps)

    def columns(self, e: Experiment, row: int, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The scores as they are."""
        del e, row
        return scores

    def run(self, e: Experiment, **options: object) -> EngineResult:
        """Run in waves, or with ``run_reference``."""
        each = e.settings.per_client
        if e.settings.engine == "waves":
            return run_member(_member(e), per_client=each, **options)
        given = {"per_client": each, "norm_limit": e.norm_limit, "probes": e.probes, "measures": e.measures, **options}
        return run_reference(e.components, e.schedule, e.params, e.key, e.points, **given)

    def recorded(self, e: Experiment, result: EngineResult) -> Run:
        """Tables with energy and attackers, if the settings ask for them."""
        options: dict[str, Any] = {"waits": waits_for_close(e.components)}
        options["gradients"] = gradients_of(e.components, e.schedule)
        if e.settings.energy is not None:
            options["devices"] = energy.bind(e.settings.energy, e.schedule.num_clients, e.settings.seed)
        marked = e.components.data.malicious
        if e.settings.attack is not None and marked is not None:
            options["attackers"] = int(marked.sum())
        described = e.described
        run = make_run(described, e.schedule, e.points, result, e.traffic, **options)
        whole = len(run.evaluations["time"]) == len(e.points.time)
        if (least := privacy_of(e.settings.privacy).least) is not None:
            caution_sums(run, least)
        return with_early_end(run, ended_early(e.settings, described, e.schedule, whole=whole))

    def shared(self, e: Experiment) -> tuple[object, ...]:
        """Server rule, data, whether every arrival closes a step, and what is measured."""
        data = shared_data(e.components.data)
        return e.components.rule, data, bool(np.all(e.schedule.closes)), e.measures.shared()

    @property
    def lay_out(self) -> Callable[..., Ready]:
        """As a stack of ``engine.stack``."""
        return _stack

    def num_bytes(self, e: Experiment, rows: int, **options: object) -> int:
        """Slots, rows, tables, states, and four models to train with."""
        model = tree.num_bytes(e.params)
        schedule, data = e.schedule, e.components.data
        state, row, own = first_states(e.components, e.params, facts_of(schedule))
        remembered = tree.num_bytes(state) + schedule.num_clients * tree.num_bytes((row, own))
        slots = layout_of([_member(e)], batching=e.settings.batching, **options).slots.count
        rows = min(schedule.num_clients, rows)
        tables = 80 * (len(schedule.job) + len(schedule.client)) + 4 * len(data.order)
        return model * (slots + 2 * rows + 4) + 2 * rows * tree.num_bytes(own) + tables + remembered


def _stack(each: Sequence[Experiment], **options: object) -> Ready:
    s, members = each[0].settings, [_member(e) for e in each]
    layout = layout_of(members, batching=s.batching, **options)
    shape = shape_of(layout)._replace(rows=rows_of([e.components.data for e in each]))
    make = partial(make_stack, members, layout, per_client=s.per_client)
    return Ready(len(layout.run), shape, lambda shape, models: partial(run_stack, make(shape, models=models)))


def _member(e: Experiment) -> Member:
    return make_member(e.components, e.schedule, e.params, e.key, e.points, e.norm_limit, e.probes, e.measures)


def shared_data(d: FederatedData) -> tuple[object, ...]:
    """What the data of two runs must have in common for the runs to share programs: the examples, and sizes."""
    held_back = d.validation_size is not None and bool(np.any(d.validation_size))
    return id(d.x), id(d.y), len(d.order), len(d.size), d.test_x.shape, d.test_y.dtype, held_back


WITH_SERVER = WithServer()


class PlannedSteps(NamedTuple):
    """What is known of the server steps of a run before it starts."""

    longest: int  # the most uploads that a step can have; corrupt ones, always rejected, may come in addition
    reached: int  # the most uploads that a step is known to be able to have
    every_closes: bool  # whether every arrival completes its server step
    source: str = ""  # for error messages: what decides these numbers


def planned_steps(schedule: Schedule) -> PlannedSteps:
    """The server steps of a run that follows ``schedule``."""
    longest = int(np.max(np.bincount(schedule.step), initial=0))
    return PlannedSteps(longest, longest, bool(np.all(schedule.closes)))


class Resolved(NamedTuple):
    """Settings whose names have become objects."""

    settings: Settings  # with the defaults that depend on method and data
    components: Components
    shapes: Params  # shapes of the parameters
    timing: Spec | Timing
    delay: DelayModel
    local_steps: np.ndarray  # int64[N], local steps of a job of each client
    traffic: Traffic
    measures: Measures = NOTHING

    @property
    def has_own_timing(self) -> bool:
        """Whether the timing is an object, or one that the user registered."""
        return not isinstance(self.timing, Spec) or self.timing.own
