"""How a run is executed: what the machine is given to do at a time, and who watches."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.record import Progress
from fedjax_async.engine.watching import Observer


class Execution(NamedTuple):
    """The options of the engines. The first five are of the machine and change results by rounding at most.

    ``max_width``: the most jobs of a batch. ``lanes``: how many batches are trained at the same time. ``batching``: one
    of ``BATCHINGS``. The defaults of these three depend on the backend. ``devices``: how many share the jobs of a
    batch, by default one. ``memory_limit``: bytes of device memory; batches are made shorter until the run fits.
    ``on_bad``: ``"reject"``, or ``"raise"`` to end the run after a rejected upload. ``progress``: called with what is
    done and in total. ``keeper``: takes checkpoints; the run continues from the newest one. ``observer``: gets every
    evaluation and may stop the run.
    """

    max_width: int | None = None
    lanes: int | None = None
    batching: str | None = None
    devices: int | None = None
    memory_limit: int | None = None
    on_bad: str = "reject"
    progress: Progress | None = None
    keeper: Keeper | None = None
    observer: Observer | None = None
