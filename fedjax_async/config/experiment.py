"""From settings to an experiment that is ready to run, in three steps: resolve, plan, build; ``execute`` runs it.

:func:`resolve` turns every name into an object. :func:`planned` makes the schedule and chooses the evaluations.
:func:`built` makes what the engine executes. No step compiles a training program or trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax

from fedjax_async.base import check, notices, registry, tree
from fedjax_async.base.spec import Spec, made
from fedjax_async.clock import TIMINGS, Decisions, Limits, NothingArrives, Timing, Until, check_schedule, energy, plan
from fedjax_async.config import contracts, own, plugins
from fedjax_async.config.adaptive import adaptive, looking_of
from fedjax_async.config.budget import refuse_budget
from fedjax_async.config.cautions import (
    caution_decay,
    caution_feedback,
    caution_ignored,
    caution_late,
    caution_own_timing,
    caution_shared,
    caution_twice,
)
from fedjax_async.config.checked_parts import check_going_on, sent_by_own
from fedjax_async.config.clients import client_of, compressing, traffic_of, vector_sizes, with_ditto
from fedjax_async.config.measures import measures_of
from fedjax_async.config.methods import brings_timing, method_of, require_joint, rule_spec
from fedjax_async.config.peer_methods import exchange_of
from fedjax_async.config.peers import prepare_peers
from fedjax_async.config.policy_steps import decides, first_timing, possible_steps
from fedjax_async.config.prepared import WITH_SERVER, Experiment, PlannedSteps, Resolved, planned_steps
from fedjax_async.config.problem import data_of, params_dtype, start_of
from fedjax_async.config.protection import protecting, with_noise
from fedjax_async.config.resolving import (
    checked,
    delay_of,
    every_of,
    length_of_batch,
    model_for,
    steps_of,
    until_of,
    with_objects,
    without_server,
)
from fedjax_async.config.settings import Settings, given_in
from fedjax_async.config.watching import Watch
from fedjax_async.engine import trial
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.components import bound, components_of, facts_of, waits_for_close
from fedjax_async.engine.devices import naming_remedies, parse_size
from fedjax_async.engine.evaluation import EvaluationPoints, Every, evaluation_points, owners, require_few
from fedjax_async.engine.measures import NOTHING
from fedjax_async.engine.probes import NO_PROBES, columns_of, resolved_probes
from fedjax_async.engine.record import Progress
from fedjax_async.engine.storage import RestoringClient, StoringServer, probe_restoring
from fedjax_async.server import begun, check_capacity
from fedjax_async.types import FederatedData, Run, Schedule

OF_CLOCK = ("delay", "availability", "faults", "network")  # settings that shape a schedule, besides its timing
MEASURED = ("metrics", "train_loss", "train_examples", "fine_tune")  # settings that ask for measures


@naming_remedies()
def prepare(
    settings: Settings,
    *,
    method: object = None,
    model: object = None,
    data: FederatedData | None = None,
    client: object = None,
    probes: Mapping[str, object] | None = None,
    planning: Callable[[float], None] | None = None,
) -> Experiment:
    """Resolve every name and plan the whole run; ``ValueError`` for anything out of range.

    Objects given here replace those of the settings: a ``Method`` (server rule, timing, proximal weight), a ``Model``
    of decoded inputs or a flax module, ``FederatedData``, a ``ClientAlgorithm`` or a factory of one. A factory gets a
    model that decodes raw rows, and the settings that its parameters name. A client algorithm trains on raw rows (give
    it ``models.decoded(model, data.decode)``) and has its own optimiser, minibatches and proximal term;
    ``batch_size`` is then used only to count its local steps. Its uploads are compressed if the settings or the method
    ask for it.

    ``probes``: functions by name, to evaluate on arrivals; a :class:`Probe` chooses the arrivals.
    ``planning(share)`` is called from time to time with the share of the budget that is planned.
    """
    check.kind("settings", settings, Settings, "Settings, such as Settings(method='fedavg', updates=100)")
    settings = with_objects(settings, method=method, model=model, data=data, client=client)
    if without_server(settings):
        return prepare_peers(settings, probes, planning)
    run = resolve(settings)
    timing = made(run.timing)
    ends, cuts = (getattr(timing, says, False) for says in ("ends_jobs", "cuts_jobs"))
    if cuts:
        check_going_on(run)
    if run.settings.policy is not None:
        return _prepare_adaptive(run, probes, planning)
    schedule, points = planned(run, planning)
    if run.has_own_timing:
        caution_own_timing(run.settings, schedule)
    elif isinstance(run.timing, Spec) and run.timing.name == "buffer":
        size, jobs = run.timing.options["size"], run.timing.options["concurrency"] or schedule.num_clients
        if notices.SMALL * size < jobs:
            notices.warn_of_small_buffer(str(run.settings.method), size, jobs)
    if ignored := [name for name in getattr(timing, "ignores", ()) if name in given_in(run.settings)]:
        caution_ignored(run.settings, run.timing, ignored)
    if ends or cuts:
        caution_decay(run.settings, run.timing, cuts=cuts)
    return built(run, schedule, points, probes)


def _prepare_adaptive(
    run: Resolved, probes: Mapping[str, object] | None, planning: Callable[[float], None] | None
) -> Experiment:
    looking, timing = looking_of(run), cast(Spec, run.timing)
    run = run._replace(timing=first_timing(run.settings, timing, looking.prior.num_clients))
    schedule, points = planned(run, planning, certain=not decides(looking.policy))
    steps = possible_steps(run.settings, timing, looking.policy, schedule)
    nominal = built(run, schedule, points, probes, steps)
    replan = partial(_plan, run, until_of(run.settings))
    return adaptive(run, looking, nominal, steps, replan)


def resolve(settings: Settings) -> Resolved:
    """Turn every name into an object, and count the bytes of a message in each direction; see :func:`prepare`."""
    s = checked(settings)
    timing, delay = timing_of(s), delay_of(s)
    data = data_of(s)
    chosen = method_of(s.method)
    if chosen.joint is not None and isinstance(timing, Spec):
        require_joint(chosen, timing)
    model, shapes = model_for(s, data)
    batch_size = length_of_batch(s, data)
    trainer, server = client_of(model, s, batch_size, chosen), rule_spec(chosen)
    steps = steps_of(s, data, chosen)
    components = components_of(server, trainer, model, data)
    is_own = own.is_own(s, "method", "client")
    message, upload = sent_by_own(s, components, shapes) if is_own else trial.sent(components, shapes)
    if s.compress is not None:
        trainer = compressing(trainer, s, model.private, upload)
    if s.ditto is not None:
        trainer = with_ditto(trainer, model, s, batch_size)
    down, up = (message.params, message.extra), upload
    if model.private is not None:
        down, up = (tree.shared(one, shapes, model.private) for one in (down, up))
    if s.compress is not None and s.feedback != "off":
        caution_feedback(s, vector_sizes(s, down[0], up))
    if s.privacy is not None or s.attack is not None:
        server = protecting(server, s, upload, model.private)
    components = components_of(server, trainer, model, data)
    measured = any(getattr(s, name) for name in MEASURED)
    measures = measures_of(s, model, shapes, data, batch_size) if measured else NOTHING
    if own.is_own(s, *OF_CLOCK):
        contracts.check_clock(s, delay, len(data.size))
    if s.network is not None:
        caution_shared(s)
        if "network" not in getattr(made(timing), "ignores", ()):
            caution_twice(s)
    if s.energy is not None:
        energy.bind(s.energy, len(data.size), s.seed)
    return Resolved(s, components, shapes, timing, delay, steps, traffic_of(down, up, s), measures)


def check_method(s: Settings) -> None:
    """``ValueError`` for a method, timing or exchange that does not exist."""
    if without_server(s):
        exchange_of(method_of(s.method), s.exchange)
    else:
        timing_of(s)


def timing_of(s: Settings) -> Spec | Timing:
    """The timing: the setting or a method's own ``@timing``, at most one of them; else the method's default.

    A name is a spec; its values have been checked.
    """
    allowed = f"left out: the method brings its own, {str(s.method).partition('@')[2]}"
    check.require(s.timing is None or not brings_timing(s.method), "timing", str(s.timing), allowed)
    if isinstance(s.timing, own.Named):
        return contracts.checked_timing(own.thing_of("timing", s.timing))
    usual = method_of(s.method).timing  # the @timing of the spec, if there is one
    timing = registry.spec("timing", TIMINGS, str(s.timing or usual))
    timing.make()  # checks the ranges
    return timing


def planned(
    run: Resolved, planning: Callable[[float], None] | None = None, *, certain: bool = True
) -> tuple[Schedule, EvaluationPoints]:
    """Plan the schedule of a run, and choose its evaluations; ``planning``: see :func:`prepare`.

    ``certain``: whether the run will follow this plan, so that it ends when this plan does. Raises ``ValueError`` for a
    budget without a server step, too many evaluations, and times outside the run.
    """
    s = run.settings
    every = every_of(s)
    budgets = sum(budget is not None for budget in (s.time, s.updates, s.server_steps))
    if every != Every() and budgets == 1:  # the length is known before planning
        require_few(every, time=s.time, updates=s.updates if every.steps is None else s.server_steps)
    schedule = _within_budget(run, planning)
    if run.has_own_timing or own.is_own(s, *OF_CLOCK):
        schedule = check_schedule(schedule)
    spent = len(schedule.job) == s.updates or int(schedule.closes.sum()) == s.server_steps
    end = s.time if s.time is not None and not spent else float(schedule.time[-1])
    within = every.at is None or not certain or min(every.at) <= end
    check.require(within, "eval_at", s.eval_at, f"times with at least one in the run, which ends after {end:g} s")
    if certain and (every != Every() or s.faults is not None):
        caution_late(s, every, end, len(schedule.job), int(schedule.closes.sum()))
    return schedule, evaluation_points(schedule, every, horizon=None if spent else s.time)


def _within_budget(run: Resolved, planning: Callable[[float], None] | None) -> Schedule:
    """The schedule for the budget of the settings; ``ValueError`` if it completes no server step."""
    s, waits, planned = run.settings, waits_for_close(run.components), partial(_plan, run, planning=planning)
    any_budget = not run.has_own_timing  # one of the user's own may support only the budget of the settings
    try:
        schedule = planned(until_of(s))
    except NothingArrives:
        if waits and any_budget and s.time is not None:
            refuse_budget(s, planned, None, any_budget=any_budget)
        raise
    if waits and not schedule.closes.any():
        refuse_budget(s, planned, schedule, any_budget=any_budget)
    return schedule


def _plan(
    run: Resolved,
    until: Until,
    decisions: Decisions | None = None,
    *,
    planning: Callable[[float], None] | None = None,
) -> Schedule:
    s = run.settings
    return plan(
        made(run.timing),
        run.delay,
        num_clients=len(run.components.data.size),
        local_steps=run.local_steps,
        until=until,
        seed=s.seed,
        bytes_down=run.traffic.down,
        bytes_up=run.traffic.up,
        availability=own.object_or_spec("availability", s.availability),
        faults=own.object_or_spec("faults", s.faults),
        network=own.object_or_spec("network", s.network),
        limits=Limits(s.max_staleness, s.timeout, s.late),
        progress=planning,
        decisions=decisions,
    )


def built(
    run: Resolved,
    schedule: Schedule,
    points: EvaluationPoints,
    probes: Mapping[str, object] | None = None,
    steps: PlannedSteps | None = None,
) -> Experiment:
    """Build what the engine executes: initial parameters, probes, start models in the precision ``slots``.

    ``steps``: by default those of the schedule. ``ValueError`` for a rule that refuses them, and for wrong probes.
    """
    steps = planned_steps(schedule) if steps is None else steps
    s, components = run.settings, run.components
    if s.privacy is not None:
        components = with_noise(s, components, schedule, probes)
    rule = bound(components.rule, components.hyper)
    facts = replace(facts_of(schedule), every_closes=steps.every_closes, longest_step=steps.reached)
    try:
        # this raises if the rule cannot work with a step of so many uploads
        state, _ = jax.eval_shape(lambda params: begun(rule, params, facts), run.shapes)
        check_capacity(state, steps.longest)
    except ValueError as error:
        raise ValueError(f"{error} ({steps.source})" if steps.source else str(error)) from error
    if s.per_client:
        owners(components.data)
    watched = NO_PROBES
    if probes is not None:
        watched = resolved_probes(probes, components.data, len(schedule.job))
        columns_of(watched, components, run.shapes)
    params, key = start_of(s, components.model, components.data)
    if s.slots != "full":
        full = params_dtype(s.compute)
        others = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(run.shapes)} - {full})
        allowed = f"full: the model has parameters in {', '.join(others)}, not {full}"
        check.require(not others, "slots", s.slots, allowed)
        server, client = StoringServer(components.rule, s.slots), RestoringClient(components.client, full)
        components = components._replace(rule=server, client=client)
        watched = {name: probe_restoring(probe, full) for name, probe in watched.items()}
    limit = math.inf if s.norm_limit is None else s.norm_limit
    learned = (params, key, points, limit, watched, run.measures, run.traffic)
    return Experiment(s, s, WITH_SERVER, components, schedule, *learned)


# --- the run itself -----------------------------------------------------------------------------------


@naming_remedies()
def execute(
    experiment: Experiment,
    *,
    progress: Progress | None = None,
    checkpoints: Path | None = None,
    watch: Watch | None = None,
) -> Run:
    """Run a prepared experiment on the engine that its settings name.

    ``checkpoints``: the folder for checkpoints, if the settings ask for them; the run continues from the newest one in
    it. ``watch``: looks at the evaluations, by default for the stopping rules of the settings. Raises ``ValueError``
    for checkpoints without a folder or with several processes.
    """
    e, s = experiment, experiment.settings
    if watch is None and (s.stop_at is not None or s.patience is not None):
        watch = Watch(e)
    options: dict[str, Any] = {"observer": None if watch is None else watch.observer, "progress": progress}
    options["on_bad"] = s.on_bad
    planned = s.policy is None
    if s.engine == "waves":
        options |= {"max_width": s.max_width, "lanes": s.lanes, "batching": s.batching}
        if planned:
            limit = None if s.memory_limit is None else parse_size("memory_limit", s.memory_limit)
            options |= {"devices": s.devices, "memory_limit": limit}
        if s.checkpoint is not None:
            options["keeper"] = _keeper(e, checkpoints)
    result: Any = e.kind.run(e, **options)
    return e.recorded(result) if watch is None else watch.finish(e.recorded(result), result)


def _keeper(e: Experiment, folder: Path | None) -> Keeper:
    s = e.settings
    if folder is None or s.checkpoint is None:
        raise ValueError(f"checkpoint = {s.checkpoint}: must be left out without a folder (--out) to keep it in")
    check.require(jax.process_count() == 1, "checkpoint", s.checkpoint, "left out with several processes")
    return Keeper(folder, s.checkpoint, {"settings": e.described, "plugins": plugins.digests()})
