"""Execute runs in waves: the fast engine, for one run or for many side by side, with a server or without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh

from fedjax_async.base import check
from fedjax_async.clock import check_schedule
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.components import Components
from fedjax_async.engine.defaults import default_lanes
from fedjax_async.engine.devices import TooLarge, make_mesh
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.loop import SideBySide, advance, restored
from fedjax_async.engine.measures import NOTHING, Measures
from fedjax_async.engine.members import Member
from fedjax_async.engine.record import EngineResult, Progress
from fedjax_async.engine.stack import Stack
from fedjax_async.engine.stacking import layout_of, make_member, make_stack, shape_of
from fedjax_async.engine.tables import StackShape
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Observer, Watcher
from fedjax_async.types import Key, Params, Schedule

Fitted = TypeVar("Fitted")


def run_stack(
    stack: SideBySide,
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
    layout, programs, scores = stack.layout, stack.programs, stack.scores()
    carry = programs.start(stack.tables, stack.params)
    watcher = Watcher([m.points for m in stack.members], observers or [None] * len(stack.members))
    if keeper is not None:
        for name, value in stack.identity().items():
            keeper.identify(name, value)
    feed = None if stack.feed is None else stack.feed.batch
    with closing(Trainers(layout.dealt.lanes, programs, stack.tables, feed)) as trainers:
        evaluate = stack.evaluator(watcher, trainers)
        turns = 0
        if keeper is not None:
            carry, turns = restored(keeper, carry, scores, watcher, stack.params, stack.sharding)
        if not scores.at:
            scores.evaluate(0, partial(evaluate, carry))
        if turns:
            trainers.train_again(layout.dealt.unreceived(turns, layout.capacity), carry)
        given = (stack, evaluate, carry, trainers, scores, watcher)
        carry = advance(*given, turns=turns, on_bad=on_bad, progress=progress, keeper=keeper)
    return [stack.result(carry, scores, watcher, run) for run in range(len(stack.members))]


def fitted(
    make: Callable[[int | None, int], Fitted],
    *,
    max_width: int | None,
    lanes: int,
    devices: int,
    memory_limit: int | None,
) -> Fitted:
    """``make(max_width, lanes)``, with fewer jobs at a time as long as it raises ``TooLarge``.

    First the batches become shorter, down to one job a device, then there is one lane. Raises ``ValueError`` if the run
    needs more than ``memory_limit`` bytes even so.
    """
    while True:
        try:
            return make(max_width, lanes)
        except TooLarge as error:
            needed, before = error.needed, error.capacity
        wide = before > devices
        check.require(wide or lanes > 1, "memory_limit", memory_limit, f"at least {needed} bytes for this run")
        max_width, lanes = max(devices, before // 2), lanes if wide else 1


def run_alone(make: Callable[..., SideBySide], how: Execution) -> EngineResult:
    """The result of a run that is a stack of its own: ``make(mesh, max_width=, lanes=, devices=)``, so that it fits."""
    mesh = make_mesh(how.devices)
    devices = 1 if mesh is None else mesh.size
    stack = fitted(
        lambda width, lanes: make(mesh, max_width=width, lanes=lanes, devices=devices),
        max_width=how.max_width,
        lanes=(default_lanes() if mesh is None else 1) if how.lanes is None else how.lanes,
        devices=devices,
        memory_limit=how.memory_limit,
    )
    found = run_stack(stack, on_bad=how.on_bad, progress=how.progress, keeper=how.keeper, observers=[how.observer])
    return found[0]


def run_waves(
    components: Components,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: EvaluationPoints,
    *,
    norm_limit: float = float("inf"),
    probes: Mapping[str, object] | None = None,
    measures: Measures = NOTHING,
    **options: Any,
) -> EngineResult:
    """Train every job of one schedule, batched in waves; the same result as one event at a time.

    ``points``: when the model is evaluated. ``norm_limit``: uploads with a larger norm are rejected. ``probes`` by
    name, and ``measures``: what else is recorded. ``options``: see :func:`run_member`. Raises ``ValueError`` for
    invalid arguments, and if the run needs more than ``memory_limit``.
    """
    known = (norm_limit, probes, measures)
    return run_member(make_member(components, check_schedule(schedule), params, key, points, *known), **options)


def run_member(member: Member, *, per_client: bool = False, **execution: Any) -> EngineResult:
    """Train every job of one run, batched in waves.

    ``per_client``: also evaluate on each client's own tests. ``execution``: the options of
    :class:`~fedjax_async.engine.execution.Execution`.
    """
    how, members = Execution(**execution), [member]

    def make(mesh: Mesh | None, **options: Any) -> Stack:
        layout = layout_of(members, batching=how.batching, **options, fill=how.memory_limit is None)
        models = how.observer is not None and how.observer.models
        shape, limit = shape_of(layout), how.memory_limit
        return make_stack(members, layout, shape, per_client=per_client, mesh=mesh, memory_limit=limit, models=models)

    return run_alone(make, how)


class Ready(NamedTuple):
    """A stack that is laid out, and not yet on the device."""

    positions: int  # jobs that it trains
    shape: StackShape  # sizes of the tables that it needs
    # (shape, models) -> ``run(on_bad=, progress=, keeper=, observers=)``, which returns the result of each member;
    # planned stacks are compiled by then, see make_stack
    make: Callable[[StackShape, bool], Callable[..., list[EngineResult]]]


def common_shape(ready: Sequence[Ready]) -> StackShape:
    """The sizes of tables that are long enough for each of the stacks, so that they share programs."""
    return StackShape(*(max(sizes) for sizes in zip(*(one.shape for one in ready))))


def run_stacks(
    ready: Sequence[Ready],
    keepers: Sequence[Keeper | None],
    *,
    at_a_time: int,
    on_bad: str = "reject",
    progress: Progress | None = None,
    observers: Sequence[Sequence[Observer | None]],
    shape: StackShape | None = None,
) -> Iterator[tuple[int, list[EngineResult]]]:
    """Run stacks, which share compiled programs, ``at_a_time`` of them at the same time, each in a thread.

    ``observers``: per stack, those of its members. ``shape``: of their tables, by default their :func:`common_shape`.
    Yields ``(k, results of stack k)``, in the order in which the stacks end.
    """
    shape = common_shape(ready) if shape is None else shape
    report = _Total(progress, sum(one.positions for one in ready))

    def prepared(k: int) -> Callable[[], list[EngineResult]]:
        run = ready[k].make(shape, any(observer is not None and observer.models for observer in observers[k]))
        return partial(run, on_bad=on_bad, progress=report.part(k), keeper=keepers[k], observers=observers[k])

    yield from _at_a_time(prepared, len(ready), at_a_time)


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
