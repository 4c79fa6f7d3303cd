"""Execute schedules in waves: the fast engine, for one run or for a stack of runs side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_async import check
from fedjax_async.clock.record import SLACK
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.components import Components, facts_of, rule_of
from fedjax_async.engine.devices import make_mesh
from fedjax_async.engine.evaluation import EvaluationPoints, Scores
from fedjax_async.engine.evaluator import Evaluator
from fedjax_async.engine.flat import Flat
from fedjax_async.engine.kernels import Carry
from fedjax_async.engine.layout import Layout, digest
from fedjax_async.engine.loop import Calls, advance, restored
from fedjax_async.engine.measures import NOTHING, Measures
from fedjax_async.engine.probes import described, numbers_of, probe_table
from fedjax_async.engine.record import EngineResult, Progress
from fedjax_async.engine.stack import (
    Member,
    Stack,
    TooLarge,
    default_lanes,
    layout_of,
    make_member,
    make_stack,
    shape_of,
)
from fedjax_async.engine.tables import StackShape, pooled
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Observer, Watcher
from fedjax_async.types import Key, Params, Schedule, ServerAlgorithm, State

# Besides one training program per width: start, buffers, receive, evaluate.
OTHER_PROGRAMS = 4


def run_stack(
    stack: Stack,
    *,
    on_bad: str = "reject",
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    observers: Sequence[Observer | None] | None = None,
) -> list[EngineResult]:
    """Train every job of the stack; returns one result per member.

    Continues from the newest checkpoint of ``keeper``. Traces nothing, so it may run in any thread.

    ``observers``: one per member. A member that its observer stops may still be trained while other members are;
    its results end at the evaluation that stopped it.
    """
    layout, tables, programs = stack.layout, stack.tables, stack.programs
    carry = programs.start(tables, stack.params)
    ranks = layout.ranks if programs.by_ranks else None
    scores = Scores([m.points for m in stack.members], layout.positions, ranks)
    watcher = Watcher([m.points for m in stack.members], observers or [None] * len(stack.members))
    evaluate = Evaluator(stack, watcher)

    def apply(carry: Carry, buffers: Any, low: int, high: int) -> tuple[Carry, Any]:
        span = np.array([low, high] if ranks is None else np.searchsorted(ranks, [low, high]), np.int32)
        applied: tuple[Carry, Any] = programs.receive(tables, carry, buffers, span)
        return applied

    def train(width: int, tables: Any, carry: Carry, buffers: Any, span: np.ndarray) -> Any:
        return programs.train[width](tables, carry.slots, carry.clients, buffers, span)

    if keeper is not None:
        keeper.identify("batches (cores, lanes, max_width)", digest(layout))
        keeper.identify("probes", described(stack.members[0].probes))
        if isinstance(carry.server, Flat):
            keeper.identify("arrays", "flat states")
    carry, turns = restored(keeper, carry, scores, watcher, stack.params, stack.sharding)
    if not scores.at:
        scores.evaluate(0, partial(evaluate, carry))
    calls = Calls(
        apply=apply,
        evaluate=evaluate,
        rejected=lambda carry, high: _rejected(stack, carry, watcher, high),
        enough=lambda carry: _enough(stack, carry, watcher),
        status=_status_of(layout),
    )
    with Trainers(layout.dealt, tables, train, lambda: programs.buffers(tables, carry), stack.feed) as trainers:
        if turns:
            trainers.train_again(layout.dealt.unreceived(turns, layout.capacity), carry)
        options: dict[str, Any] = {"turns": turns, "on_bad": on_bad, "progress": progress, "keeper": keeper}
        carry = advance(calls, layout.dealt, carry, trainers, scores, watcher, **options)
    return [_result(stack, carry, scores, watcher, run) for run in range(len(stack.members))]


def run_waves(
    components: Components,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: EvaluationPoints,
    *,
    max_width: int | None = None,
    lanes: int | None = None,
    batching: str | None = None,
    per_client: bool = False,
    on_bad: str = "reject",
    norm_limit: float = float("inf"),
    probes: Mapping[str, Any] | None = None,
    measures: Measures = NOTHING,
    devices: int | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    observer: Observer | None = None,
) -> EngineResult:
    """Train every job of one schedule, batched in waves; the same result as one event at a time.

    ``points``: when the model is evaluated; ``per_client``: also on each client's own tests. ``max_width``: the most
    jobs of a batch. ``lanes``: how many batches are trained at the same time. ``batching``: one of ``BATCHINGS``. The
    defaults of these three depend on the backend. ``devices``: how many share the jobs of a batch, by default one.
    ``memory_limit``: bytes of device memory; batches are made shorter until the run fits. ``norm_limit``: uploads with
    a larger norm are rejected. ``on_bad``: ``"reject"``, or ``"raise"`` to end the run after a rejected upload.
    ``probes`` by name, and ``measures``: what else is recorded. ``keeper``: takes checkpoints; the run continues from
    the newest one. ``observer``: gets every evaluation and may stop the run.

    Raises ``ValueError`` for invalid arguments, and if the run needs more than ``memory_limit``.
    """
    members = [make_member(components, schedule, params, key, points, norm_limit, probes, measures)]
    mesh = make_mesh(devices)
    if lanes is None:
        lanes = default_lanes() if mesh is None else 1
    shared = 1 if mesh is None else mesh.size

    width = max_width
    while True:
        layout = layout_of(
            members,
            max_width=width,
            lanes=lanes,
            batching=batching,
            devices=shared,
            fill=memory_limit is None,
        )
        try:
            options: dict[str, Any] = {"mesh": mesh, "memory_limit": memory_limit}
            options["models"] = observer is not None and observer.models
            stack = make_stack(members, layout, shape_of(layout), per_client=per_client, **options)
            break
        except TooLarge as error:  # fewer jobs at a time: first shorter batches, then one lane
            needed, before = error.needed, layout.capacity if width is None else width
        check.require(
            before > shared or lanes > 1, "memory_limit", memory_limit, f"at least {needed} bytes for this run"
        )
        lanes = lanes if before > shared else 1
        width = max(shared, before // 2)
    return run_stack(stack, on_bad=on_bad, progress=progress, keeper=keeper, observers=[observer])[0]


def _status_of(layout: Layout) -> Callable[[int, int], dict[str, float]]:
    """``status(low, high)`` of the positions ``low .. high-1``, for the progress bar.

    The run of the last position: its virtual time, and the mean staleness of its arrivals. O(log E) per call.
    """
    staleness = [schedule.staleness for schedule in layout.schedules]  # a property that computes it for all arrivals

    def status(low: int, high: int) -> dict[str, float]:
        run = int(layout.run[high - 1])
        first, last = np.searchsorted(layout.positions[run], [low, high])
        time = layout.schedules[run].time[last - 1]
        return {"time": float(time), "staleness": float(np.mean(staleness[run][first:last]))}

    return status


def _until(stack: Stack, carry: Carry, watcher: Watcher, run: int) -> tuple[int, int]:
    """How many arrivals belong to the result of a run, and how many must be received before the result is complete.

    The second number is larger for a stopped run whose uploads differ in size. Then all uploads that reached the server
    before the stop must be trained, as only training tells their sizes.
    """
    member = stack.members[run]
    if run not in watcher.ends:
        return (len(member.schedule.job),) * 2
    row = watcher.ends[run][0]
    arrivals = int(member.points.position[row])
    if "bits" not in carry.records:
        return arrivals, arrivals
    came = np.flatnonzero(member.schedule.upload_time[member.schedule.job] <= member.points.time[row] * SLACK)
    return arrivals, max(arrivals, int(came.max(initial=-1)) + 1)


def _enough(stack: Stack, carry: Carry, watcher: Watcher) -> int:
    """How many positions must be received until the results of all stopped runs are complete."""
    until = {run: _until(stack, carry, watcher, run)[1] for run in watcher.ends}
    return max((int(stack.layout.positions[run][count - 1]) + 1 for run, count in until.items() if count), default=0)


def _rejected(stack: Stack, carry: Carry, watcher: Watcher, received: int) -> int:
    """Rejected uploads among the first ``received`` positions, without those after a stop; waits for the device."""
    watcher.hand_over(wait=True)
    if not watcher.ends:
        return int(carry.rejected)
    accepted, total = np.asarray(jax.device_get(carry.records["accepted"])), 0
    for run, member in enumerate(stack.members):
        arrivals = _until(stack, carry, watcher, run)[0]
        position = stack.layout.positions[run][:arrivals][member.applied[:arrivals]]
        total += int(np.sum(~accepted[position[position < received]]))
    return total


def _model(rule: ServerAlgorithm, state: State, real: Any) -> Params:
    """The model of a server state, on the host; each thread has its own setting of 64 bits."""
    with jax.enable_x64(real == np.float64):
        params: Params = jax.device_get(rule.params(state))
    return params


def _result(stack: Stack, carry: Carry, scores: Scores, watcher: Watcher, run: int) -> EngineResult:
    member, layout = stack.members[run], stack.layout
    state = (
        carry.server if stack.shape.runs == 1 else jax.tree.map(lambda leaf: leaf[run], jax.device_get(carry.server))
    )
    rule = rule_of(member.components.server, member.components.hyper, facts_of(member.schedule))
    until, known = _until(stack, carry, watcher, run)
    rows = watcher.ends[run][0] + 1 if run in watcher.ends else len(member.points.time)
    position, sent = layout.positions[run][:known], member.applied[:known]
    own = np.unique(np.searchsorted(layout.waves, position[:until], side="right"))
    columns = {name: np.asarray(column)[position] for name, column in jax.device_get(carry.records).items()}
    applied, seen = np.flatnonzero(member.applied), {}
    for name, probe in member.probes.items():
        numbers = numbers_of(probe, len(applied))
        numbers = numbers[applied[numbers] < until]
        values = {c: np.asarray(v)[position][applied[numbers]] for c, v in jax.device_get(carry.probes[name]).items()}
        seen[name] = probe_table(member.schedule, applied[numbers], numbers, values)
    return EngineResult(
        params=watcher.ends[run][1] if run in watcher.ends else _model(rule, state, stack.tables.time.dtype),
        scores=scores.columns(run, rows),
        records={name: column[sent] for name, column in columns.items()},
        in_vain=member.schedule.job[:known][~sent],
        in_vain_records={name: column[~sent] for name, column in columns.items()},
        counters={
            "waves": len(own),
            "mean_width": until / len(own) if len(own) else 0.0,
            "batches": sum(map(len, layout.turns)),
            "widths": list(layout.widths),
            "slots": layout.slots.count,
            "useful_steps": layout.useful_steps,
            "executed_steps": layout.executed_steps,
            "programs": len(stack.programs.train) + OTHER_PROGRAMS + (stack.programs.measure is not None),
        },
        probes=seen,
        rows=rows,
        kept=watcher.kept.get(run),
    )


def common_shape(stacks: Sequence[Sequence[Member]], layouts: Sequence[Layout]) -> StackShape:
    """The sizes of tables that are long enough for each of the stacks, so that they share programs."""
    shape = StackShape(*(max(sizes) for sizes in zip(*(shape_of(layout) for layout in layouts))))
    if stacks[0][0].components.data.streamed:
        return shape
    return shape._replace(rows=max(len(pooled([m.components.data.order for m in each])[0]) for each in stacks))


def run_stacks(
    stacks: Sequence[Sequence[Member]],
    layouts: Sequence[Layout],
    keepers: Sequence[Keeper | None],
    *,
    at_a_time: int,
    per_client: bool = False,
    on_bad: str = "reject",
    progress: Progress | None = None,
    observers: Sequence[Sequence[Observer | None]] | None = None,
    shape: StackShape | None = None,
) -> Iterator[tuple[int, list[EngineResult]]]:
    """Run ``stacks``, which share compiled programs, ``at_a_time`` of them at the same time, each in a thread.

    ``shape``: by default their :func:`common_shape`.
    Yields ``(k, results of stack k)``, in the order in which the stacks end.
    """
    shape = common_shape(stacks, layouts) if shape is None else shape
    report = _Total(progress, sum(len(layout.run) for layout in layouts))

    def prepared(k: int) -> Callable[[], list[EngineResult]]:
        watching = [None] * len(stacks[k]) if observers is None else observers[k]
        models = any(observer is not None and observer.models for observer in watching)
        made = make_stack(stacks[k], layouts[k], shape, per_client=per_client, models=models)
        options: dict[str, Any] = {"progress": report.part(k), "keeper": keepers[k], "observers": watching}
        return lambda: run_stack(made, on_bad=on_bad, **options)

    yield from _at_a_time(prepared, len(stacks), at_a_time)


def _at_a_time(
    make: Callable[[int], Callable[[], list[EngineResult]]], count: int, limit: int
) -> Iterator[tuple[int, list[EngineResult]]]:
    """Yields ``(k, make(k)())`` in the order in which they end: ``make(k)`` runs here, its result in a thread."""
    running: dict[Future[list[EngineResult]], int] = {}
    pending = iter(range(count))
    with ThreadPoolExecutor(limit) as pool:
        while True:
            while len(running) < limit and (k := next(pending, None)) is not None:
                running[pool.submit(make(k))] = k
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


class _Total:
    """The progress of several stacks as one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done: dict[int, int] = {}
        self._lock = threading.Lock()

    def part(self, k: int) -> Progress | None:
        """The progress callback of stack ``k``."""
        if self._progress is None:
            return None

        def report(done: int, total: int, **status: float) -> None:
            del total
            with self._lock:
                self._done[k] = done
                if self._progress is not None:
                    self._progress(sum(self._done.values()), self._total, **status)

        return report
