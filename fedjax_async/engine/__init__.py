"""The engine: executes schedules. It knows no names; ``config`` gives it objects.

Start with :func:`run_waves` (``run.py``): one schedule, or a stack of them, from the first message to the outcome.

Order of reading: ``components.py`` (what is trained), ``layout.py`` and ``batches.py`` (which jobs are trained
together, planned on the host), ``tables.py`` (what the device reads), ``kernels.py`` (local training) and
``serving.py`` (the server), ``several.py`` (both for several waves), ``programs.py`` (all compiled), ``stack.py`` (all
of these for some runs), ``trainers.py``, ``loop.py`` and ``run.py`` (the loop that calls the programs).
``evaluation.py``, ``probes.py`` and ``probing.py`` observe a run; ``watching.py`` hands its evaluations over while it
runs. ``unsent.py``, ``storage.py``, ``streaming.py``, ``devices.py`` and ``checkpoint.py`` are one feature each.
``record.py`` makes the tables of a run.
``trajectory.py``, ``trajectory_job.py`` and ``trajectory_scores.py`` are a run as one function that JAX differentiates,
``attribution.py`` is the probe that explains a run. ``reference.py`` is the oracle: one event at a time.

Adaptive runs, whose plan is made while they go on, begin with :class:`WavesExecutor` (``adaptive.py``), which the
planner calls: ``outset.py`` (what is known at the start), ``extension.py`` (what a look adds to the plan, dealt to
slots, lanes and rows), ``growing_stack.py`` (the device's part) and ``told.py`` (what the planner is told, also by a
checkpoint). ``adaptive_reference.py`` is their oracle.

Decentralised runs begin with :func:`run_peer_waves` (``peer_run.py``): ``peer_layout.py``, ``peer_tables.py``,
``peer_kernels.py`` (mix, train, push, write), ``peer_evaluation.py``, ``peer_probes.py`` and ``peer_programs.py`` do
for them what the files without ``peer_`` do for runs with a server. Both share batches, lanes, the loop (``loop.py``),
checkpoints and devices. ``peer_outcome.py`` is the result, ``peer_reference.py`` the oracle.

Words of this room: a *stack* is runs that advance side by side, each of them a *member*. All their arrivals stand in
one order; a *position* is a place in it, a *rank* a stretch of it in which no run occurs twice. A *wave* is jobs that
may be trained together. A *group* is trained at the same time, one *batch* a *lane*; a lane is a host thread with
*buffers* of its own, a *row* in them holds one job. A *segment* is the local steps of a batch that one compiled call
executes at one width, a *stretch* the positions that one call of ``receive`` takes from one lane. A *slot* holds a
start model, and a *write* puts a message into a slot.
"""

from typing import TYPE_CHECKING

from fedjax_async import lazy

if TYPE_CHECKING:
    from fedjax_async.engine.components import Components, PeerComponents
    from fedjax_async.engine.evaluation import Every, Points, evaluation_points
    from fedjax_async.engine.layout import Layout, make_layout
    from fedjax_async.engine.peer_outcome import PeerOutcome
    from fedjax_async.engine.peer_probes import NodesProbe
    from fedjax_async.engine.peer_reference import run_peer_reference
    from fedjax_async.engine.peer_run import run_peer_waves
    from fedjax_async.engine.reference import run_reference
    from fedjax_async.engine.run import run_waves
    from fedjax_async.engine.stack import default_batching, default_lanes, default_width

__all__ = [
    "Components",
    "Every",
    "Layout",
    "NodesProbe",
    "PeerComponents",
    "PeerOutcome",
    "Points",
    "default_batching",
    "default_lanes",
    "default_width",
    "evaluation_points",
    "make_layout",
    "run_peer_reference",
    "run_peer_waves",
    "run_reference",
    "run_waves",
]

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "Every": "evaluation",
        "Components": "components",
        "Layout": "layout",
        "NodesProbe": "peer_probes",
        "PeerComponents": "components",
        "PeerOutcome": "peer_outcome",
        "Points": "evaluation",
        "default_batching": "stack",
        "default_lanes": "stack",
        "default_width": "stack",
        "evaluation_points": "evaluation",
        "make_layout": "layout",
        "run_peer_reference": "peer_reference",
        "run_peer_waves": "peer_run",
        "run_reference": "reference",
        "run_waves": "run",
    },
)
