"""A run with a server that is ready to start, and the settings from which it is made with objects in place of names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock import DelayModel, Timing, energy
from fedjax_async.config.budget import ended_early, with_early_end
from fedjax_async.config.settings import Settings
from fedjax_async.engine.components import (
    Components,
    gradients_of,
    waits_for_close,
)
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.measures import NOTHING, Measures
from fedjax_async.engine.probes import NO_PROBES, Probes
from fedjax_async.engine.record import EngineResult, Traffic, make_run
from fedjax_async.engine.reference import run_reference
from fedjax_async.engine.run import run_waves
from fedjax_async.types import (
    Key,
    Params,
    Run,
    Schedule,
)

ENGINES = {"waves": run_waves, "reference": run_reference}


class Experiment(NamedTuple):
    """A run that is ready to start: nothing has been compiled or trained yet.

    ``PeerExperiment`` has the same methods for a run without a server, ``AdaptiveExperiment`` for a run that is planned
    while it trains. Code that executes, watches or saves a run need not tell them apart.
    """

    settings: Settings
    described: dict[str, Any]  # the settings as results keep them, with names in place of objects
    components: Components
    schedule: Schedule
    params: Params
    key: Key
    points: EvaluationPoints
    traffic: Traffic
    norm_limit: float = math.inf
    probes: Probes = NO_PROBES
    measures: Measures = NOTHING

    @property
    def total(self) -> int:
        """The number of arrivals of the run."""
        return len(self.schedule.job)

    @property
    def complete(self) -> bool:
        """Whether all evaluations are decided."""
        return True

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Arrivals applied and server steps closed before each evaluation; int64[V] both."""
        position = self.points.position
        return position, np.concatenate([[0], np.cumsum(self.schedule.closes)])[position]

    def columns(self, row: int, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The scores of evaluation ``row`` as the columns of the results."""
        del row
        return scores

    def run(self, **options: Any) -> EngineResult:
        """Run on the engine that the settings name; ``options``: those of ``run_waves`` or ``run_reference``."""
        engine: Callable[..., EngineResult] = ENGINES[self.settings.engine]
        given = {"per_client": self.settings.per_client, "probes": self.probes, "measures": self.measures, **options}
        return engine(self.components, self.schedule, self.params, self.key, self.points, **given)

    def recorded(self, result: EngineResult) -> Run:
        """The tables of the run from what the engine returned."""
        options: dict[str, Any] = {"waits": waits_for_close(self.components)}
        options["gradients"] = gradients_of(self.components, self.schedule)
        if self.settings.energy is not None:
            options["devices"] = energy.bind(self.settings.energy, self.schedule.num_clients, self.settings.seed)
        marked = self.components.data.malicious
        if self.settings.attack is not None and marked is not None:
            options["attackers"] = int(marked.sum())
        run = make_run(self.described, self.schedule, self.points, result, self.traffic, **options)
        whole = len(run.evaluations["time"]) == len(self.points.time)
        return with_early_end(run, ended_early(self.settings, self.described, self.schedule, whole=whole))

    def shared(self) -> tuple[Any, ...]:
        """What two runs must have in common to share programs, besides what ``sweeping`` compares for all runs."""
        d = self.components.data
        held_back = d.validation_size is not None and bool(np.any(d.validation_size))
        data = (id(d.x), id(d.y), len(d.order), len(d.size), d.test_x.shape, d.test_y.dtype, held_back)
        return self.components.server, data, bool(np.all(self.schedule.closes)), self.measures.shared()


class Resolved(NamedTuple):
    """Settings whose names have become objects."""

    settings: Settings  # with the defaults that depend on method and data
    described: dict[str, Any]
    components: Components
    shapes: Params  # shapes of the parameters
    timing: Timing
    delay: DelayModel
    local_steps: np.ndarray  # int64[N], local steps of a job of each client
    traffic: Traffic
    measures: Measures = NOTHING
