"""Several stacks of runs, some of them at the same time, each in a host thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.record import EngineOutcome, Progress
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack import Member, make_stack, shape_of
from fedjax_async.engine.tables import Shape


def run_stacks(
    stacks: Sequence[Sequence[Member]],
    layouts: Sequence[Layout],
    keepers: Sequence[Keeper | None],
    *,
    at_a_time: int,
    per_client: bool = False,
    on_bad: str = "reject",
    progress: Progress | None = None,
) -> Iterator[tuple[int, list[EngineOutcome]]]:
    """Run ``stacks``, which share compiled programs; yields ``(k, outcomes of stack k)`` as they are done."""
    shape = Shape(*(max(sizes) for sizes in zip(*(shape_of(layout) for layout in layouts))))
    report = _Total(progress, sum(len(layout.run) for layout in layouts))

    def prepared(k: int) -> Callable[[], list[EngineOutcome]]:
        made = make_stack(stacks[k], layouts[k], shape, per_client=per_client)
        return lambda: run_stack(made, on_bad=on_bad, progress=report.part(k), keeper=keepers[k])

    yield from _at_a_time(prepared, len(stacks), at_a_time)


def _at_a_time(
    make: Callable[[int], Callable[[], list[EngineOutcome]]], count: int, limit: int
) -> Iterator[tuple[int, list[EngineOutcome]]]:
    """``(k, result of make(k)())`` as they come, ``limit`` at a time; made here, called in threads."""
    running: dict[Future[list[EngineOutcome]], int] = {}
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
        """What stack ``k`` reports to."""
        if self._progress is None:
            return None

        def report(done: int, total: int, **status: float) -> None:
            del total
            with self._lock:
                self._done[k] = done
                if self._progress is not None:
                    self._progress(sum(self._done.values()), self._total, **status)

        return report
