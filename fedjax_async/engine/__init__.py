"""The engine: executes schedules. It knows no methods by name; ``config`` gives it objects.

Start with ``run.py``: :func:`run_waves` executes one schedule, ``run_stacks`` many runs side by side, with a server or
without one.

Order of reading: ``components.py`` (what is trained), ``members.py`` (a run), ``layout.py``, ``batches.py`` and
``widths.py`` (which jobs are trained together, planned on the host), ``tables.py`` (what the device reads),
``kernels.py`` (how a job reads, trains and leaves its results; all kinds of runs train by it), ``sending.py`` and
``serving.py`` (the server), ``programs.py`` and ``compiling.py`` (the compiled programs), ``stack_facts.py`` (what
these depend on), ``defaults.py`` (how much is trained at a time), ``stacking.py`` and ``stack.py`` (runs laid out and
compiled, and what the loop calls of them), ``trainers.py``, ``loop.py``, ``execution.py`` and ``run.py`` (the loop).
``evaluation.py``, ``scores.py``, ``measures.py``, ``scoring.py`` (their programs), ``probes.py`` and ``probing.py``
observe a run. ``watching.py`` hands its evaluations over while it runs. ``unsent.py``, ``storage.py``,
``streaming.py``, ``devices.py``, ``surroundings.py`` and ``checkpoint.py`` are one feature each. ``record.py`` and
``client_scores.py`` make the tables of a run. ``trajectory.py``, ``trajectory_job.py`` and ``trajectory_scores.py``
write a run as one function that JAX differentiates. ``attribution.py`` is the probe that divides the change of the loss
among the arrivals. ``reference.py`` is the oracle: one event at a time; ``reference_measures.py`` and
``reference_scores.py`` are its evaluations.

The plan of an adaptive run grows while the run executes. Such runs begin with :class:`WavesExecutor` (``adaptive.py``),
which the planner calls: ``outset.py`` (what is known at the start), ``growing_runs.py`` (runs side by side),
``extension.py`` (what is new in the plan of a run, dealt to slots, lanes and rows), ``growing_layout.py`` (what is new
in the plans of all runs), ``growing_tables.py`` (what the device reads), ``growing_stack.py`` (the part on the device)
and ``told.py`` (what a planner is told, also from a checkpoint). An extension is executed as a planned stack is.
``adaptive_reference.py`` is their oracle.

Decentralised runs begin with :func:`run_peer_waves` (``peer_run.py``). An event of a node is a job like that of a
client: tables of jobs, training, buffers, lanes, the loop, checkpoints and devices are the same. ``layout.py``
(inboxes), ``tables.py`` and ``scoring.py`` have a part for them. What else differs has a file of its own:
``peer_kernels.py`` (mix, push, write), ``peer_probes.py``, ``peer_programs.py`` and ``peer_record.py``.
``peer_points.py`` says when nodes are evaluated, ``peer_reference.py`` is the oracle.

Terms of the engine: a *stack* is a set of runs that advance side by side; each run is a *member*. All their arrivals
are in one order. A *position* is an index into this order, and a *rank* is a range of positions in which no run occurs
twice. A *wave* is a set of jobs that may be trained together. A wave is cut into *batches*. A *turn* is the batches
that are trained at the same time, at most one in each *lane*. A lane is a host thread with its own *buffers*; each
*row* of them holds one job. A *segment* is the local steps of a batch that one compiled call executes at one width. A
*stretch* is a range of positions that one call of ``receive`` takes from one lane. A *slot* holds a start model, and a
*write* puts a message into a slot. In an adaptive run, a *look* is a moment at which the policy sees the results so
far, and an *extension* is what the plan has gained since the last look.
"""

from typing import TYPE_CHECKING

from fedjax_async.base import lazy

if TYPE_CHECKING:
    # fmt: off
    from fedjax_async.engine.components import Components as Components
    from fedjax_async.engine.defaults import (default_batching as default_batching, default_lanes as default_lanes,
        default_width as default_width)
    from fedjax_async.engine.evaluation import (EvaluationPoints as EvaluationPoints, Every as Every,
        evaluation_points as evaluation_points)
    from fedjax_async.engine.batches import Cutting as Cutting
    from fedjax_async.engine.layout import Layout as Layout, make_layout as make_layout
    from fedjax_async.engine.peer_probes import NodesProbe as NodesProbe
    from fedjax_async.engine.peer_reference import run_peer_reference as run_peer_reference
    from fedjax_async.engine.peer_run import run_peer_waves as run_peer_waves
    from fedjax_async.engine.reference import run_reference as run_reference
    from fedjax_async.engine.run import run_waves as run_waves

__getattr__, __dir__ = lazy.attach(__name__)
