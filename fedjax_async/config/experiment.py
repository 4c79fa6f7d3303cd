"""From settings to an experiment that is ready to run, in three steps: resolve, plan, build.

:func:`resolve` turns every name into an object. :func:`planned` makes the schedule and chooses the evaluations.
:func:`built` makes what the engine executes. No step compiles a training program or trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_async.base import check, notices, registry, tree
from fedjax_async.clock import TIMINGS, Decisions, Limits, Timing, Until, energy, plan
from fedjax_async.config import contracts, own
from fedjax_async.config.adaptive import adaptive, looking_of
from fedjax_async.config.budget import plan_within, until_of
from fedjax_async.config.cautions import caution_evaluations, caution_own_timing
from fedjax_async.config.checked_parts import sent
from fedjax_async.config.clients import client_of, compressing, traffic_of, with_ditto
from fedjax_async.config.measures import measures_of
from fedjax_async.config.methods import brings_timing, method_of, require_joint, rule_spec
from fedjax_async.config.mid_job import check_going_on
from fedjax_async.config.peer_methods import exchange_of
from fedjax_async.config.peers import prepare_peers
from fedjax_async.config.policy_steps import (
    PlannedSteps,
    decides,
    first_timing,
    naming,
    planned_steps,
    possible_steps,
    timing_options,
)
from fedjax_async.config.prepared import WITH_SERVER, Experiment, Resolved
from fedjax_async.config.problem import data_of, params_dtype, start_of
from fedjax_async.config.protection import check_secure, noise_numbers, protecting, uploads_of_a_sum
from fedjax_async.config.resolving import (
    checked,
    delay_of,
    epochs_of,
    every_of,
    length_of_batch,
    model_for,
    with_objects,
    without_server,
)
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.engine.components import (
    bound,
    components_of,
    facts_of,
    waits_for_close,
)
from fedjax_async.engine.devices import naming_remedies
from fedjax_async.engine.evaluation import EvaluationPoints, evaluation_points, owners, require_few
from fedjax_async.engine.probes import columns_of, resolved_probes
from fedjax_async.engine.storage import RestoringClient, StoringServer, probe_restoring
from fedjax_async.local import local_steps
from fedjax_async.server import begun, check_capacity
from fedjax_async.types import (
    FederatedData,
    Schedule,
)


@naming_remedies()
def prepare(
    settings: Settings,
    *,
    method: Any = None,
    model: Any = None,
    data: FederatedData | None = None,
    client: Any = None,
    probes: Mapping[str, Any] | None = None,
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
    check_going_on(run)
    if run.settings.policy is not None:
        return _prepare_adaptive(run, probes, planning)
    schedule, points = planned(run, planning)
    _check_buffer(run.settings, schedule.num_clients)
    caution_own_timing(run.settings, schedule)
    return built(run, schedule, points, probes)


def _check_buffer(s: Settings, clients: int) -> None:
    """Warn of a buffer that is small beside the jobs in flight."""
    if contracts.has_own_timing(s):
        return
    name, options = timing_options(s)
    if name == "buffer":
        notices.warn_of_small_buffer(str(s.method), options["size"], options["concurrency"] or clients)


def _prepare_adaptive(
    run: Resolved, probes: Mapping[str, Any] | None, planning: Callable[[float], None] | None
) -> Experiment:
    looking = looking_of(run)
    run = run._replace(timing=first_timing(run.settings, run.timing, looking.prior.num_clients))
    schedule, points = planned(run, planning, certain=not decides(looking.policy))
    steps = possible_steps(run.settings, looking.policy, schedule)
    nominal = built(run, schedule, points, probes, steps)
    replan = partial(_plan, run, until_of(run.settings), None)
    return adaptive(run, looking, nominal, steps, replan)


def resolve(settings: Settings) -> Resolved:
    """Turn every name into an object, and count the bytes of a message in each direction; see :func:`prepare`."""
    s = checked(settings)
    timing, delay = timing_of(s), delay_of(s)
    data = data_of(s)
    chosen = method_of(s.method)
    if chosen.joint is not None and own.thing_of("timing", s.timing) is None:
        require_joint(chosen, str(s.timing or chosen.timing))
    model, shapes = model_for(s, data)
    batch_size = length_of_batch(s, data)
    trainer, server = client_of(model, s, batch_size, chosen), rule_spec(chosen)
    steps = local_steps(data.size, batch_size=s.batch_size, epochs=epochs_of(s), steps=s.steps)
    message, upload = sent(s, server, trainer, shapes, data)
    trainer = with_ditto(compressing(trainer, s, model.private, upload), model, s, batch_size)
    down, up = (tree.shared(one, shapes, model.private) for one in ((message.params, message.extra), upload))
    server = protecting(server, s, upload, model.private)
    components = components_of(server, trainer, model, data)
    measures = measures_of(s, model, shapes, data, batch_size)
    contracts.check_clock(s, delay, len(data.size))
    if s.energy is not None:
        energy.bind(s.energy, len(data.size), s.seed)
    return Resolved(s, as_dict(s), components, shapes, timing, delay, steps, traffic_of(down, up, s), measures)


def check_method(s: Settings) -> None:
    """``ValueError`` for a method, timing or exchange that does not exist."""
    if without_server(s):
        exchange_of(method_of(s.method), s.exchange)
    else:
        timing_of(s)


def timing_of(s: Settings) -> Timing:
    """The timing: the setting or a method's own ``@timing``, at most one of them; else the method's default."""
    given = own.thing_of("timing", s.timing)
    allowed = f"left out: the method brings its own, {str(s.method).partition('@')[2]}"
    check.require(s.timing is None or not brings_timing(s.method), "timing", str(s.timing), allowed)
    if given is not None:
        return contracts.checked_timing(given)
    usual = method_of(s.method).timing  # the @timing of the spec, if there is one
    timing: Timing = registry.spec("timing", TIMINGS, str(s.timing or usual)).make()
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
    if (
        sum(budget is not None for budget in (s.time, s.updates, s.server_steps)) == 1
    ):  # the length is known before planning
        require_few(every, time=s.time, updates=s.updates if every.steps is None else s.server_steps)
    # a timing of the user's own may support only the budget of the settings
    known = {"waits": waits_for_close(run.components), "any_budget": not contracts.has_own_timing(s)}
    schedule = plan_within(s, lambda until: _plan(run, until, planning), **known)
    spent = len(schedule.job) == s.updates or int(schedule.closes.sum()) == s.server_steps
    end = s.time if s.time is not None and not spent else float(schedule.time[-1])
    within = every.at is None or not certain or min(every.at) <= end
    check.require(within, "eval_at", s.eval_at, f"times with at least one in the run, which ends after {end:g} s")
    if certain:
        caution_evaluations(every, end, len(schedule.job), int(schedule.closes.sum()))
    return schedule, evaluation_points(schedule, every, horizon=None if spent else s.time)


def _plan(
    run: Resolved,
    until: Until,
    planning: Callable[[float], None] | None,
    decisions: Decisions | None = None,
) -> Schedule:
    s = run.settings
    return plan(
        run.timing,
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
    probes: Mapping[str, Any] | None = None,
    steps: PlannedSteps | None = None,
) -> Experiment:
    """Build what the engine executes: initial parameters, probes, start models in the precision ``slots``.

    ``steps``: by default those of the schedule. ``ValueError`` for a rule that refuses them, and for wrong probes.
    """
    steps = planned_steps(schedule) if steps is None else steps
    s, components = run.settings, run.components
    fewest = uploads_of_a_sum(components.rule, components.hyper, schedule)
    components = components._replace(hyper={**components.hyper, **noise_numbers(s, fewest)})
    check_secure(s, components.rule, components.hyper, schedule, probes)
    rule = bound(components.rule, components.hyper)
    facts = replace(facts_of(schedule), every_closes=steps.every_closes, longest_step=steps.reached)
    with naming(steps):
        # this raises if the rule cannot work with a step of so many uploads
        state, _ = jax.eval_shape(lambda params: begun(rule, params, facts), run.shapes)
        check_capacity(state, schedule._replace(step=np.zeros(steps.longest, np.int64)))
    if s.per_client:
        owners(components.data)
    watched = resolved_probes(probes, components.data, len(schedule.job))
    columns_of(watched, components, run.shapes)
    params, key = start_of(s, components.model, components.data)
    if s.slots != "full":
        full = params_dtype(s.compute)
        server, client = StoringServer(components.rule, s.slots), RestoringClient(components.client, full)
        components = components._replace(rule=server, client=client)
        watched = {name: probe_restoring(probe, full) for name, probe in watched.items()}
    limit = math.inf if s.norm_limit is None else s.norm_limit
    learned = (params, key, points, limit, watched, run.measures, run.traffic)
    return Experiment(s, run.described, WITH_SERVER, components, schedule, *learned)
