"""The stacks of a sweep as independent jobs of a cluster's scheduler, through ``submitit`` (extra ``cluster``).

Each job trains some runs of the sweep that the folder defines, and writes them there. If a job fails or runs out of
time, start the sweep again: it submits what is missing and skips what is finished.

The running jobs of a sweep share the lock of its folder, so that no other command trains into it meanwhile. Each job
also locks the folder of its first run. Two submissions cut a sweep into the same stacks, so no two jobs train the same
stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async import check, compiled, registry
from fedjax_async.config.own import Named
from fedjax_async.config.settings import fields_of
from fedjax_async.results import callbacks as looking
from fedjax_async.results import sweep_folder
from fedjax_async.results.claim import claimed
from fedjax_async.results.runs import load_plugins
from fedjax_async.results.sweeps import Work, begin_streams, plan_sweep, train_into

SCHEDULERS = ("slurm", "local")
LOGS = "jobs"  # submitit's own files, inside the sweep's folder
# option of --submit -> submitit's parameter
OPTIONS = {
    "time": "timeout_min",
    "memory": "mem_gb",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "slurm_qos",
    "constraint": "slurm_constraint",
    "at_once": "slurm_array_parallelism",
}
DEFAULTS: dict[str, Any] = {"time": 60}
TEXTS = frozenset(("partition", "account", "qos", "constraint"))


class Job(NamedTuple):
    """One submitted job."""

    id: str
    runs: tuple[str, ...]  # the names of the runs left to train
    handle: Any  # submitit's object


def parse_target(spec: str) -> tuple[str, dict[str, Any]]:
    """``"slurm:partition=gpu,time=120"`` -> the scheduler's name and its options, checked.

    Options: ``time`` in minutes (default 60), ``memory`` in GB, ``cpus`` and ``gpus`` per job, ``partition``,
    ``account``, ``qos``, ``constraint``, and ``at_once``, the largest number of jobs that run at the same time.
    ``local`` starts one process per job on this machine and hides all GPUs that were not asked for. SLURM tells a job
    to stop 90 to 150 seconds before its ``time`` is over, so ask for a few minutes more.

    >>> parse_target("slurm:partition=gpu,gpus=1")
    ('slurm', {'time': 60, 'partition': 'gpu', 'gpus': 1})
    """
    name, given = registry.parse_spec("submit", spec)
    registry.find("submit", dict.fromkeys(SCHEDULERS), name)
    for option, value in given.items():
        registry.find(f"option of {name}", OPTIONS, option)
        if option in TEXTS:
            given[option] = str(value)
        elif option == "memory":
            check.positive(option, value)
        else:
            check.whole(option, value)
    return name, DEFAULTS | given


def _executor(scheduler: str, options: Mapping[str, Any], folder: Path) -> Any:
    try:
        import submitit  # noqa: PLC0415
    except ImportError as error:
        raise ValueError("submitting jobs needs submitit: pip install 'fedjax-async[cluster]'") from error
    try:
        executor = submitit.AutoExecutor(folder / LOGS / "%j", cluster=scheduler)
    except RuntimeError as error:  # no srun on this machine
        raise ValueError(f"submit = {scheduler!r}: must be a scheduler of this machine; {error}") from error
    parameters = {OPTIONS[option]: value for option, value in options.items()}
    executor.update_parameters(name="fedjax-async-sweep", **parameters)
    return executor


def submit(
    work: Work,
    folder: str | Path,
    target: str,
    *,
    memory_limit: int | None = None,
    lanes: int | None = None,
) -> list[Job]:
    """Submit each stack that is not finished as a job of its own; returns at once.

    ``target`` is a spec for :func:`parse_target`; with ``slurm`` the jobs form one array. ``folder`` must be on a disk
    that the nodes share. ``memory_limit`` should be that of the nodes, if it differs from this machine's. Wait for the
    jobs before you start the sweep again: until then their runs look unfinished.

    Raises: ``ValueError`` with the scheduler's message if it refuses the jobs (an unknown partition), and for a folder
    that cannot be written or is in use, also by jobs.
    """
    scheduler, options = parse_target(target)
    check.require(not work.probes, "probes", list(work.probes or ()), "left out of a sweep that is submitted")
    for point in work.points:
        objects = [name for name, value in fields_of(point.settings).items() if isinstance(value, Named)]
        allowed = "left out of a sweep that is submitted: jobs know registered names (register, --plugin), not objects"
        check.require(not objects, "points", objects, allowed)
    folder = Path(folder).resolve()
    executor = _executor(scheduler, options, folder)
    with claimed(folder):  # released before the first job starts
        begin_streams(folder, work)
        sweep_folder.begin(folder, work.points, roles=work.roles)
    # whole stacks, with their finished runs, so that the job of an interrupted stack finds the stack's checkpoint
    stacks = [stack for g in work.groups for stack in g.stacks if not work.finished.issuperset(stack)]
    if not stacks:
        return []
    limits = [_text(memory_limit), _text(lanes)]
    members = [",".join(map(str, stack)) for stack in stacks]
    count = len(stacks)
    check.require(not work.callbacks.functions, "callbacks", work.callbacks.names["functions"], "left out: see points")
    watching = [",".join(work.callbacks.streams), "best" if work.callbacks.keep_best else ""]
    columns = ([str(folder)] * count, members, *([text] * count for text in (*limits, *watching)))
    with _refusals(target):
        handles = executor.map_array(train_members, *columns)
    left = ([member for member in stack if member not in work.finished] for stack in stacks)
    names = [tuple(work.points[member].name for member in members) for members in left]
    return [Job(handle.job_id, runs, handle) for handle, runs in zip(handles, names, strict=True)]


@contextmanager
def _refusals(target: str) -> Iterator[None]:
    """Turn the scheduler's refusal of the jobs into a ``ValueError`` of one line."""
    from submitit.core.utils import FailedJobError  # noqa: PLC0415

    try:
        yield
    except FailedJobError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"submit = {target!r}: must be accepted by the scheduler; {message}") from error


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def train_members(
    folder: str, members: str, memory_limit: str, lanes: str, stream: str = "", keep_best: str = ""
) -> str:
    """The work of one job: train the runs with the indices ``members`` ("0,3,5") of the sweep in ``folder``.

    ``stream``: names joined by commas; ``keep_best``: "best" or nothing. Arguments and result are plain texts, because
    submitit pickles them. An empty limit means the machine's default.
    """
    compiled.keep_compiled()
    root = Path(folder)
    limits = {name: int(text) if text else None for name, text in (("memory_limit", memory_limit), ("lanes", lanes))}
    with claimed(root, shared=True):
        load_plugins(root)
        points = sweep_folder.read_definition(root)
        chosen = [points[int(index)] for index in members.split(",")]
        with claimed(sweep_folder.run_folder(root, chosen[0])):
            callbacks = looking.chosen(None, stream or None, bool(keep_best), root)
            sizes: dict[str, Any] = {"memory_limit": limits["memory_limit"], "lanes": limits["lanes"]}
            work = plan_sweep(chosen, folder=root, callbacks=callbacks, **sizes)
            train_into(root, work, progress=False)
    return f"{len(chosen) - len(work.finished)} runs"
