"""Run a prepared experiment on an engine, and the settings that ``simulate`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fedjax_async import check, registry
from fedjax_async.clock import energy
from fedjax_async.config.experiment import Experiment
from fedjax_async.config.own import Named
from fedjax_async.config.peers import PeerExperiment
from fedjax_async.config.problem import check_count
from fedjax_async.config.resolving import with_objects
from fedjax_async.config.settings import OF_CLIENT, SYNONYMS, Settings, fields_of
from fedjax_async.config.watching import Watch
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.components import gradients_of, waits_for_close
from fedjax_async.engine.devices import naming_remedies, parse_size
from fedjax_async.engine.peer_record import record_peers
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import run_peer_waves
from fedjax_async.engine.record import EngineOutcome, Progress, make_run
from fedjax_async.engine.reference import run_reference
from fedjax_async.engine.run import run_waves
from fedjax_async.types import ClientAlgorithm, FederatedData, Run

ENGINES = {"waves": run_waves, "reference": run_reference}
PEER_ENGINES = {"waves": run_peer_waves, "reference": run_peer_reference}


@naming_remedies()
def execute(
    experiment: Experiment | PeerExperiment,
    *,
    progress: Progress | None = None,
    checkpoints: Path | None = None,
    watch: Watch | None = None,
) -> Run:
    """Run a prepared experiment on the engine that its settings name.

    ``checkpoints``: the folder for the wave engine's checkpoints, if the settings ask for them. The run goes on from
    the newest checkpoint in it. ``watch``: who looks at the evaluations, the settings' own rules among them.
    """
    e, s = experiment, experiment.settings
    watch = Watch(e) if watch is None else watch
    options: dict[str, Any] = {"observer": watch.observer, "progress": progress}
    options |= {"on_bad": s.on_bad, "norm_limit": e.norm_limit}
    if s.engine == "waves":
        options |= {"max_width": s.max_width, "lanes": s.lanes, "batching": s.batching, "devices": s.devices}
        options["memory_limit"] = None if s.memory_limit is None else parse_size("memory_limit", s.memory_limit)
        if s.checkpoint is not None:
            options["keeper"] = _keeper(e, checkpoints)
    if isinstance(e, PeerExperiment):
        return _execute_peers(e, watch, options)
    options |= {"per_client": s.per_client, "probes": e.probes, "measures": e.measures}
    outcome = ENGINES[s.engine](e.components, e.schedule, e.params, e.key, e.points, **options)
    return watch.finish(recorded(e, outcome), outcome)


def recorded(e: Experiment, outcome: EngineOutcome) -> Run:
    """The tables of a run from what an engine returned."""
    options: dict[str, Any] = {"waits": waits_for_close(e.components)}
    options["gradients"] = gradients_of(e.components, e.schedule)
    if e.settings.energy is not None:
        options["devices"] = energy.bind(e.settings.energy, e.schedule.num_clients, e.settings.seed)
    return make_run(e.described, e.schedule, e.points, outcome, e.traffic, **options)


def _execute_peers(e: PeerExperiment, watch: Watch, options: dict[str, Any]) -> Run:
    options["global_tests"] = e.global_tests
    if e.settings.engine == "waves":
        options["probes"] = e.probes
    outcome = PEER_ENGINES[e.settings.engine](e.components, e.schedule, e.params, e.key, e.points.time, **options)
    work = gradients_of(e.components, e.schedule)
    run = record_peers(e.described, e.schedule, e.points, outcome, e.planned, e.components.data, work)
    return watch.finish(run, outcome)


def _keeper(e: Experiment | PeerExperiment, folder: Path | None) -> Keeper:
    s = e.settings
    if folder is None or s.checkpoint is None:
        raise ValueError(f"checkpoint = {s.checkpoint}: must be left out without a folder (--out) to keep it in")
    check.require(jax.process_count() == 1, "checkpoint", s.checkpoint, "left out with several processes")
    return Keeper(folder, s.checkpoint, {"settings": e.described})


def settings_from(settings: Settings | None, changes: Mapping[str, Any]) -> Settings:
    """``settings`` changed by keyword: fields by name, and ``data``, which are dealt already."""
    allowed = "Settings; a single setting is a keyword, as in simulate(method='fedavg', updates=100)"
    check.require(settings is None or isinstance(settings, Settings), "settings", settings, allowed)
    for name in changes:
        registry.find("setting", {**Settings.__dataclass_fields__, "data": None}, name, SYNONYMS)
    base = fields_of(settings) if settings is not None else {}
    fields = {name: value for name, value in changes.items() if name != "data"}
    client = changes.get("client")
    if isinstance(client.thing if isinstance(client, Named) else client, ClientAlgorithm):
        for name in OF_CLIENT:
            check.require(name not in fields, name, fields.get(name), "left out: the client algorithm brings its own")
    if isinstance(data := changes.get("data"), str) and not isinstance(data, Named):
        raise ValueError(f"data = {data!r}: must be FederatedData; a data set by its name is dataset={data!r}")
    if data is not None and "dataset" in fields:
        raise ValueError(f"dataset = {check.shown(fields['dataset'])}: must be left out: data are given")
    given = data.thing if isinstance(data, Named) else data
    if isinstance(given, FederatedData) and "clients" in fields:
        check_count(fields["clients"], given)
    return with_objects(Settings(**(base | fields)), data=data)
