"""Adaptive runs: a policy looks at the run and plans it while it trains.

Before the run a *nominal* plan is made, in which the policy decides nothing. It allows the checks of a planned run
before anything is compiled, and shows how large the run will be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.clock import Decisions, Ended, NothingArrives, Policy, PolicyModel, Prior, Record, concurrency
from fedjax_async.clock import bind_policy as bind
from fedjax_async.clock.network import over
from fedjax_async.clock.record import SLACK
from fedjax_async.config import contracts, objects, own
from fedjax_async.config.cautions import caution_late
from fedjax_async.config.policy_steps import LONGEST, decides, require_choice
from fedjax_async.config.prepared import WITH_SERVER, Evaluations, Experiment, PlannedSteps, Resolved
from fedjax_async.config.resolving import every_of
from fedjax_async.config.settings import Settings
from fedjax_async.engine import trial
from fedjax_async.engine.adaptive import WavesExecutor, alone, side_by_side
from fedjax_async.engine.adaptive_reference import ReferenceExecutor
from fedjax_async.engine.components import Client, Components, Hyper, Server, abstract, bound, row_of
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.outset import OBSERVED, GrowingPoints, Outset
from fedjax_async.engine.record import EngineResult
from fedjax_async.engine.run import Ready
from fedjax_async.engine.tables import StackShape, rows_of
from fedjax_async.engine.watching import Observer
from fedjax_async.local import part_mean, rows_at_a_time
from fedjax_async.types import (
    Array,
    Arrival,
    DataParts,
    Facts,
    Key,
    Model,
    Params,
    Probe,
    Run,
    Schedule,
    State,
    Structure,
)

EXECUTORS: dict[str, Callable[..., WavesExecutor | ReferenceExecutor]] = {
    "waves": alone,
    "reference": ReferenceExecutor,
}
JOBS = 8  # jobs of a client; a policy knows their mean duration beforehand
Replan = Callable[[Decisions], Schedule]


class _GrowingPlan:
    """The plan of an adaptive run as far as it is decided, and at the end its schedule."""

    def __init__(self) -> None:
        self.evaluations: Any = None  # GrowingPoints
        self.schedule: Schedule | None = None


class WithPolicy(NamedTuple):
    """The kind of a run with a policy."""

    policy: PolicyModel
    prior: Prior
    replan: Replan
    facts: Facts
    loss: bool  # whether the policy sees losses
    growing: _GrowingPlan

    def evaluations(self, e: Experiment) -> Evaluations:
        """Those of the nominal plan before the run, not complete."""
        growing = self.growing.evaluations
        if growing is None:
            return WITH_SERVER.evaluations(e)._replace(complete=False)
        points = growing.points
        return Evaluations(points.time, points.position, points.steps, growing.complete)

    def columns(self, e: Experiment, row: int, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The scores as they are."""
        return WITH_SERVER.columns(e, row, scores)

    def shared(self, e: Experiment) -> tuple[object, ...]:
        """As in a planned run, and what the policy records and may change."""
        return *WITH_SERVER.shared(e), self.facts.every_closes, self.loss

    @property
    def lay_out(self) -> Callable[..., Ready]:
        """Their planners wait for each other."""
        return _side_by_side

    def num_bytes(self, e: Experiment, rows: int, **options: Any) -> int:
        """Of the nominal plan, and of the uploads that wait."""
        return WITH_SERVER.num_bytes(e, rows, **options) + 2 * in_flight(e.schedule) * tree.num_bytes(e.params)

    def run(self, e: Experiment, **options: Any) -> EngineResult:
        """Run with the executor of the engine; ``options``: those of the executor."""
        policy = self.policy(self.prior)
        return self.plan(e, policy, EXECUTORS[e.settings.engine](self.outset(e, policy), **options))

    def outset(self, e: Experiment, policy: Policy) -> Outset:
        """What the run knows when it begins."""
        s = e.settings
        self.growing.evaluations, self.growing.schedule = GrowingPoints(every_of(s), s.time), None
        model, data = e.components.model, e.components.data
        rows = rows_at_a_time(int(data.size.sum(dtype=np.int64)), len(data.size))
        probes = dict(e.probes) | ({OBSERVED: Probe(observed_loss(model, rows))} if policy.loss else {})
        return Outset(
            components=e.components,
            nominal=e.schedule,
            facts=self.facts,
            local_steps=self.prior.local_steps,
            params=e.params,
            key=e.key,
            evaluations=self.growing.evaluations,
            in_flight=in_flight(e.schedule),
            asks=policy.sends is not None or policy.sizes,
            all_arrive=all_arrive(s, policy),
            probes=probes,
            measures=e.measures,
            per_client=s.per_client,
            norm_limit=e.norm_limit,
        )

    def plan(self, e: Experiment, policy: Policy, executor: WavesExecutor | ReferenceExecutor) -> EngineResult:
        """Plan the run while ``executor`` executes it."""
        s, evaluations = e.settings, self.growing.evaluations
        decisions = Decisions(policy, executor)
        schedule = self.growing.schedule = self.replan(decisions)
        spent = len(schedule.job) == s.updates or int(schedule.closes.sum()) == s.server_steps or s.time is None
        result = executor.finish(decisions.record, schedule, spent)
        if evaluations.complete and decides(policy):  # the run was not stopped, nor warned of before it began
            end = float(schedule.time[-1]) if spent or s.time is None else s.time
            caution_late(s, every_of(s), end, len(schedule.job), int(schedule.closes.sum()))
        seconds = {"looks": decisions.looks, "look_seconds": executor.seconds + decisions.seconds}
        return result._replace(counters=result.counters | seconds, probes=dict(result.probes) | decisions.tables)

    def recorded(self, e: Experiment, result: EngineResult) -> Run:
        """As in a planned run, with the schedule and the evaluations that were decided."""
        schedule, points = self.growing.schedule, self.growing.evaluations.points
        run = WITH_SERVER.recorded(e._replace(schedule=schedule, points=points), result)
        return run._replace(probes=_until_its_end(run))


def _side_by_side(each: Sequence[Experiment], **options: Any) -> Ready:
    """Runs that share programs; they begin once ``Ready.make`` has said how large the tables are."""
    data, batching, kinds = (
        [e.components.data for e in each],
        each[0].settings.batching,
        list[Any](e.kind for e in each),
    )
    x64 = bool(jnp.result_type(float) == jnp.float64)
    shape = StackShape(len(each), len(data[0].size), 0, 0, 0, rows=rows_of(data))

    def run(shape: StackShape, *, observers: Sequence[Observer | None], **more: Any) -> list[EngineResult]:
        given = [(kind, e, kind.policy(kind.prior)) for kind, e in zip(kinds, each)]
        outsets = [kind.outset(e, policy) for kind, e, policy in given]
        plans = [partial(kind.plan, e, policy) for kind, e, policy in given]
        with jax.enable_x64(x64):  # each thread has its own setting
            return side_by_side(outsets, plans, observers, Execution(batching=batching, **options, **more), shape)

    return Ready(sum(e.total for e in each), shape, lambda shape, models: partial(run, shape))


class Looking(NamedTuple):
    """The policy of a run, before the run starts."""

    model: PolicyModel
    prior: Prior
    policy: Policy  # only for checks before the run; the run makes another one


def looking_of(run: Resolved) -> Looking:
    """The policy of a run; ``ValueError`` for settings that cannot be adaptive, and for a wrong policy."""
    s, data = run.settings, run.components.data
    allowed = "a timing of the package: a timing of your own does not ask the policy"
    check.require(not run.has_own_timing, "timing", str(s.timing or s.method), allowed)
    timing: Any = run.timing
    check.require(timing.name in LONGEST, "timing", timing.name, "another one in a run with a policy")
    check.require(not data.streamed, "dataset", s.dataset, "one that fits into memory, in a run with a policy")
    model = policy_of(s)
    prior = Prior(
        num_clients=len(data.size),
        examples=np.asarray(data.size, np.int64),
        seconds=_seconds(run),
        local_steps=np.asarray(run.local_steps, np.int64),
        seed=s.seed,
    )
    policy = checked_policy(model, prior)
    allowed = "left out, or given with compress: uploads that are not compressed all have the same size"
    check.require(not policy.sizes or s.compress is not None, "policy", str(s.policy), allowed)
    require_choice(s, timing, policy, prior.num_clients)
    return Looking(model, prior, policy)


def adaptive(run: Resolved, looking: Looking, nominal: Experiment, steps: PlannedSteps, replan: Replan) -> Experiment:
    """The adaptive run of a nominal experiment; ``ValueError`` for settings that cannot be adaptive.

    ``replan(decisions)`` plans the run and asks ``decisions``.
    """
    s, components = run.settings, run.components
    for name in (OBSERVED, "chosen", "buffer", "window"):
        check.require(name not in nominal.probes, "probe name", name, "another: a table of the policy has this one")
    _try(replan, looking.policy)
    facts = Facts(looking.prior.num_clients, steps.every_closes, s.updates or 0, s.server_steps or 0)
    only_updates = s.time is None and s.server_steps is None
    only_steps = s.time is None and s.updates is None
    used = _totals_used(components, run.shapes)
    for field, needed, known in zip(("updates", "server_steps"), used, (only_updates, only_steps)):
        allowed = f"one that need not know the {field} of the run beforehand, or a run that ends by {field} alone"
        check.require(not needed or known, "method", str(s.method), allowed)
    return nominal._replace(
        kind=WithPolicy(looking.model, looking.prior, replan, facts, looking.policy.loss, _GrowingPlan())
    )


def checked_policy(model: Any, prior: Prior) -> Policy:
    """The policy that a policy model makes from ``prior``; ``ValueError`` if it is not a policy."""
    contract = objects.KINDS["policy"]
    contracts.fits(callable(model), "policy", model, contract)
    try:
        found = model(prior)
    except Exception as error:
        if isinstance(error, ValueError) and ": must be " in str(error):  # from a check in the policy itself
            raise
        line = " ".join(str(error).split())
        raise ValueError(f"policy: must be {contract}; it raised {type(error).__name__}: {line}") from error
    contracts.fits(isinstance(found, Policy), "policy", found, contract)
    policy: Policy = found
    for name in ("choose", "buffer", "window", "sends"):
        function = getattr(policy, name)
        check.require(function is None or callable(function), f"policy.{name}", objects.shown(function), "a function")
    one, name = policy.buffer is None or policy.window is None, policy.spec or objects.shown(model)
    check.require(one, "policy", name, "one that decides the size of the buffer or the length of the window, not both")
    for name in ("sizes", "loss"):
        check.kind(f"policy.{name}", getattr(policy, name), bool, "True or False")
    check.whole("policy.every", policy.every)
    return policy


def policy_of(s: Settings) -> PolicyModel:
    """The policy model that the settings name, or their object."""
    given = own.thing_of("policy", s.policy)
    return bind(str(s.policy)) if given is None else given


def _until_its_end(run: Run) -> dict[str, dict[str, np.ndarray]]:
    """The tables of a run without the policy's decisions after the end of the run.

    A run that is stopped early has such decisions: it was planned beyond its end.
    """
    rows, tables = {"chosen": len(run.schedule.client)}, dict(run.probes)
    for name in {"buffer", "window"} & tables.keys():
        table, end = tables[name], run.evaluations["time"][-1] * SLACK
        rows[name] = int(np.sum((table["update"] <= len(run.schedule.job)) & (table["time"] <= end)))
    for name in rows.keys() & tables.keys():
        tables[name] = {column: values[: rows[name]] for column, values in tables[name].items()}
    return tables


def in_flight(schedule: Schedule) -> int:
    """The largest number of jobs in flight at a time."""
    return int(concurrency(schedule)[1].max(initial=1))


def all_arrive(s: Settings, policy: Policy) -> bool:
    """Whether every job's upload is applied, sooner or later."""
    conditions = (s.availability, s.faults, s.timeout, s.max_staleness)
    return all(value is None for value in conditions) and policy.sends is None


def _seconds(run: Resolved) -> np.ndarray:
    """What a policy knows of the clients' speed: mean virtual seconds of ``JOBS`` jobs with messages; float64[N]."""
    s, count = run.settings, len(run.components.data.size)
    delays = run.delay(count, s.seed)
    if s.network is not None:
        delays = over(own.object_or_spec("network", s.network), delays, count, s.seed)
    sizes = (np.asarray(run.local_steps, np.int64)[:, None], run.traffic.down, run.traffic.up)
    seconds: np.ndarray = delays.durations(np.arange(count)[:, None], np.arange(JOBS), *sizes).mean(axis=1)
    return seconds


class _Nothing:
    """An executor that ends the run at the first look."""

    def advance(self, record: Record) -> NoReturn:
        raise Ended

    def finished(self, record: Record, job: int) -> NoReturn:
        raise Ended

    def losses(self, clients: np.ndarray) -> NoReturn:
        raise Ended

    def scores(self) -> NoReturn:
        raise Ended


def _try(replan: Replan, policy: Policy) -> None:
    """``ValueError`` if the timing cannot ask this policy."""
    with contextlib.suppress(NothingArrives):  # raised because _Nothing ends the run at once
        replan(Decisions(policy, _Nothing()))


def _totals_used(components: Components, params: Params) -> tuple[bool, bool]:
    """Whether the rule uses the total number of updates, and of server steps, of the run."""
    data, known = components.data, abstract(components.hyper)
    count, pool = jax.ShapeDtypeStruct((), jnp.int32), (row_of(data.x), row_of(data.y))
    given = (count, count, known, params, jax.eval_shape(jax.random.key, 0), pool)
    return _reads_totals(components.rule, components.client, len(data.size), tree.frozen(given))


@lru_cache(maxsize=64)
def _reads_totals(
    server: Server, trainer: Client, clients: int, shapes: tuple[Structure, tree.Kinds]
) -> tuple[bool, bool]:
    """Whether what one update changes depends on its first two arguments, which are the totals."""

    def outputs(
        updates: Array, steps: Array, hyper: Hyper, params: Params, key: Key, pool: tuple[Array, Array]
    ) -> object:
        rule, client, facts = bound(server, hyper), bound(trainer, hyper), Facts(clients, False, updates, steps)
        return trial.arrived(rule, trial.job(rule, client, params, key, pool, facts))

    used = tree.leaves_read(outputs, *tree.thawed(shapes))
    return used[0], used[1]


@lru_cache(maxsize=16)
def observed_loss(model: Model, rows: int) -> Callable[..., dict[str, Array]]:
    """The probe of a client's loss under its start model, on its training part: mean and root mean square.

    ``rows``: how many are read at a time.
    """

    def observed(state: State, memory: State, arrival: Arrival, parts: DataParts) -> dict[str, Array]:
        def measure(x: Array, y: Array) -> tuple[Array, Array]:
            loss = model.loss(model.apply(arrival.start, x), y)
            return loss, jnp.square(loss)

        loss, square = part_mean(measure, parts.train, rows)
        return {"loss": loss, "rms_loss": jnp.sqrt(square)}

    return observed
