"""The stacks of a sweep as independent jobs: on SLURM or this machine (``submitit``), in Ray, or in a job array.

Each job trains some runs of the sweep that the folder defines, and writes them there. If a job fails or runs out of
time, start the sweep again: it submits what is missing and skips what is finished.

If the worker of a job in Ray is lost (killed, out of memory, its machine gone), Ray runs the job again on any machine
that is left. These jobs end with the process that submitted them, so that process must wait for them. An array is for
any scheduler that starts a command many times, such as a cloud's batch service: index k makes call k of ``jobs.json``,
on any machine that sees the sweep's folder or a copy of it. The same indices may be started again.

The running jobs of a sweep share the lock of its folder, so no other command trains into it meanwhile. Each job also
locks the folder of its first run. Two submissions cut a sweep into the same stacks, so no two jobs train the same
stack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async.base import check, compiled, disk, lazy, registry
from fedjax_async.config.own import Named
from fedjax_async.config.settings import fields_of
from fedjax_async.results import files, sweep_folder
from fedjax_async.results.begun import load_plugins
from fedjax_async.results.callbacks import as_callbacks
from fedjax_async.results.claim import claimed
from fedjax_async.results.sweeps import SweepWork, begin_streams, plan_sweep, train

LOGS = "jobs"  # submitit's own files, inside the sweep's folder
LISTED, LIST_FORMAT = "jobs.json", "fedjax_async jobs 1"  # the calls of an array, in the sweep's folder
RETRIES = 3  # times that a task of Ray runs again after its worker was lost
LONGEST = 300  # characters of an error message
Call = tuple[str, ...]  # the arguments of one job
# option of --submit -> submitit's parameter
SUBMITIT = {
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
# scheduler -> its options
SCHEDULERS: dict[str, Sequence[str]] = {
    "slurm": tuple(SUBMITIT),
    "local": tuple(SUBMITIT),
    "ray": ("cpus", "gpus", "memory", "retries"),
    "array": (),
}
WAITED = ("ray",)  # their jobs end with the process that submitted them
DEFAULTS: dict[str, dict[str, object]] = {"slurm": {"time": 60}, "local": {"time": 60}, "ray": {"cpus": 1}}
TEXTS = frozenset(("partition", "account", "qos", "constraint"))
LEAST = {"gpus": 0, "retries": 0}


class Job(NamedTuple):
    """One submitted job."""

    id: str
    runs: tuple[str, ...]  # the names of the runs left to train
    handle: object  # submitit's object, or Ray's reference; None in an array


def parse_target(spec: str) -> tuple[str, dict[str, object]]:
    """``"slurm:partition=gpu,time=120"`` -> the scheduler's name and its options, checked.

    ``slurm`` and ``local``: ``time`` in minutes (default 60), ``memory`` in GB, ``cpus`` and ``gpus`` per job,
    ``partition``, ``account``, ``qos``, ``constraint``, and ``at_once``, the largest number of jobs that run at the
    same time. ``local`` starts one process per job on this machine and hides all GPUs beyond ``gpus``. SLURM
    tells a job to stop 90 to 150 seconds before its ``time`` is over, so ask for a few minutes more.

    ``ray``: ``cpus`` (default 1), ``gpus`` and ``memory`` per job, and ``retries`` (default 3), how often a job runs
    again after its worker was lost. ``array`` has no options. ``ValueError`` for unknown names and values out of range.

    >>> parse_target("slurm:partition=gpu,gpus=1")
    ('slurm', {'time': 60, 'partition': 'gpu', 'gpus': 1})
    """
    part = registry.read("submit", spec)
    name, given = part.name, part.options
    options = registry.find("submit", SCHEDULERS, name)
    for option, value in given.items():
        registry.find(f"option of {name}", dict.fromkeys(options), option)
        if option in TEXTS:
            given[option] = str(value)
        elif option == "memory":
            check.positive(option, value)
        else:
            check.whole(option, value, LEAST.get(option, 1))
    return name, DEFAULTS.get(name, {}) | given


# train_members(*call) for each call -> (id, handle) of each
Start = Callable[[Sequence[Call]], list[tuple[str, object]]]


def _submitit(folder: Path, target: str) -> Start:
    scheduler, options = parse_target(target)
    submitit = lazy.optional("submitit", f"submit = {scheduler!r}")
    try:
        executor = submitit.AutoExecutor(folder / LOGS / "%j", cluster=scheduler)
    except RuntimeError as error:  # no srun on this machine
        raise ValueError(f"submit = {scheduler!r}: must be a scheduler of this machine; {error}") from error
    parameters = {SUBMITIT[option]: value for option, value in options.items()}
    executor.update_parameters(name="fedjax-async-sweep", **parameters)

    def start(calls: Sequence[Call]) -> list[tuple[str, object]]:
        with _refusals(target):
            handles = executor.map_array(train_members, *zip(*calls))
        return [(handle.job_id, handle) for handle in handles]

    return start


def _ray(folder: Path, target: str) -> Start:
    options = parse_target(target)[1]
    connected()

    def start(calls: Sequence[Call]) -> list[tuple[str, object]]:
        in_lanes = [(*call[:3], call[3] or str(options["cpus"]), *call[4:]) for call in calls]
        return [(str(k), handle) for k, handle in enumerate(start_tasks(train_members, in_lanes, options))]

    return start


def _array(folder: Path, target: str) -> Start:
    def start(calls: Sequence[Call]) -> list[tuple[str, object]]:
        # jobs may see the folder, or a copy of it, under another path
        return [(str(index), None) for index in _listed(folder, [call[1:] for call in calls])]

    return start


STARTS: dict[str, Callable[[Path, str], Start]] = {
    "slurm": _submitit,
    "local": _submitit,
    "ray": _ray,
    "array": _array,
}


def submit(
    work: SweepWork,
    folder: str | Path,
    target: str,
    *,
    memory_limit: int | None = None,
    lanes: int | None = None,
) -> list[Job]:
    """Submit each unfinished stack as one job; returns the jobs, without waiting for them.

    ``target`` is a spec for :func:`parse_target`; with ``slurm`` the jobs form one array. ``folder`` must be on a disk
    that the nodes share. ``memory_limit`` should be that of the nodes, if it differs from this machine's. Wait for the
    jobs before you start the sweep again: until then their runs look unfinished. With ``ray``, wait in this process
    (:func:`finished`); a job has as many ``lanes`` as ``cpus``, unless ``lanes`` is
    given. With ``array`` nothing is started: each job is a call of :func:`train_job`.

    Raises: ``ValueError`` with the scheduler's message if it refuses the jobs (an unknown partition), for a folder that
    cannot be written or is in use, also by jobs, and for a sweep with probes, callbacks or objects of your own.
    """
    scheduler, _ = parse_target(target)
    check.require(not work.probes, "probes", list(work.probes or ()), "left out of a sweep that is submitted")
    for point in work.points:
        objects = [name for name, value in fields_of(point.settings).items() if isinstance(value, Named)]
        allowed = "left out of a sweep that is submitted: jobs know registered names (register, --plugin), not objects"
        check.require(not objects, "points", objects, allowed)
    check.require(not work.callbacks.functions, "callbacks", work.callbacks.names["functions"], "left out, as objects")
    folder = check.path("folder", folder).resolve()
    start = STARTS[scheduler](folder, target)
    # whole stacks, with their finished runs, so that the job of an interrupted stack finds the stack's checkpoint
    stacks = [stack for g in work.groups for stack in g.stacks if not work.finished.issuperset(stack)]
    watching = (",".join(work.callbacks.streams), "best" if work.callbacks.keep_best else "")
    rest = (_text(memory_limit), _text(lanes), *watching)
    calls = [(str(folder), ",".join(map(str, stack)), *rest) for stack in stacks]
    with claimed(folder):  # released before the first job starts
        begin_streams(folder, work)
        sweep_folder.begin(folder, work.points, roles=work.roles)
    if not calls:
        return []
    left = ([member for member in stack if member not in work.finished] for stack in stacks)
    names = [tuple(work.points[member].name for member in members) for members in left]
    return [Job(name, runs, handle) for (name, handle), runs in zip(start(calls), names, strict=True)]


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

    ``stream``: names joined by commas; ``keep_best``: "best" or nothing; an empty ``memory_limit`` or ``lanes``: the
    machine's default. Returns how many runs it trained, ``"3 runs"``. Arguments and result are plain strings, because
    submitit pickles them.
    """
    compiled.keep_compiled()
    root = check.path("folder", folder)
    limits = {name: int(text) if text else None for name, text in (("memory_limit", memory_limit), ("lanes", lanes))}
    with claimed(root, shared=True):
        load_plugins(root)
        points = sweep_folder.read_definition(root)
        chosen = [points[int(index)] for index in members.split(",")]
        with claimed(sweep_folder.run_folder(root, chosen[0])):
            callbacks = as_callbacks(None, stream or None, bool(keep_best), root)
            work = plan_sweep(
                chosen,
                folder=root,
                callbacks=callbacks,
                memory_limit=limits["memory_limit"],
                lanes=limits["lanes"],
            )
            train(work, root, progress=False)
    return f"{len(chosen) - len(work.finished)} runs"


def train_job(folder: str | Path, index: int) -> str:
    """The work of job ``index`` of a sweep that was submitted as an array; finished runs are skipped.

    Raises: ``ValueError`` for a folder without such jobs, for an index beyond the last, and for a folder in use.
    """
    root = check.path("folder", folder).resolve()
    return train_members(str(root), *_call_of(root, index))


# --- tasks of Ray -------------------------------------------------------------------------------------


def connected() -> Any:
    """Ray's module, connected to the cluster of ``RAY_ADDRESS``, else to this machine's, else to one started here.

    Raises: ``ValueError`` without the extra, and where the cluster cannot be reached.
    """
    ray = lazy.optional("ray", "submit = 'ray'")
    if not ray.is_initialized():
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"submit = 'ray': must reach a cluster; {_line(error)}") from error
    return ray


def start_tasks(
    work: Callable[..., object], calls: Sequence[tuple[str, ...]], options: Mapping[str, Any]
) -> list[object]:
    """Start ``work(*call)`` for each call; returns the references to the results.

    ``options``: ``cpus`` of a task (default 1), ``gpus`` (0), ``memory`` in GB, and ``retries`` (3), how often a task
    runs again after its worker was lost.
    """
    wanted: dict[str, object] = {
        "num_cpus": options.get("cpus", 1),
        "num_gpus": options.get("gpus", 0),
        "max_retries": options.get("retries", RETRIES),
    }
    if "memory" in options:
        wanted["memory"] = int(options["memory"] * 10**9)
    task = connected().remote(work).options(**wanted)
    return [task.remote(*call) for call in calls]


def finished(references: Sequence[object]) -> Iterator[tuple[int, str | None]]:
    """Wait for the calls; yields the index of each as it ends, and why it failed, or ``None``."""
    ray = connected()
    index = {reference: k for k, reference in enumerate(references)}
    left = list(references)
    while left:
        (first,), left = ray.wait(left, num_returns=1)
        try:
            ray.get(first)
        except ray.exceptions.RayError as error:
            yield index[first], _line(getattr(error, "cause", None) or error)
        else:
            yield index[first], None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:LONGEST] or type(error).__name__


# --- an array: ``jobs.json`` lists the calls; index k makes call k ---------------------------------------


def _fingerprint(folder: Path) -> str:
    """A hash of the sweep's definition in the folder."""
    return hashlib.sha256((folder / sweep_folder.DEFINITION).read_bytes()).hexdigest()


def _listed(folder: Path, calls: Sequence[Call]) -> list[int]:
    """Write the calls; returns the index of each. If all are listed for the same sweep already, the list stays."""
    known = _read(folder) or []
    if not set(calls) <= set(known):
        known = list(calls)
        content = {"format": LIST_FORMAT, "sweep": _fingerprint(folder), "calls": known}
        disk.write(folder / LISTED, files.json_bytes(content))
    return [known.index(call) for call in calls]


def _read(folder: Path) -> list[Call] | None:
    """The calls that are listed for the folder's sweep; ``None`` without a list of this sweep."""
    try:
        content = json.loads((folder / LISTED).read_bytes())
        if content["format"] == LIST_FORMAT and content["sweep"] == _fingerprint(folder):
            return [tuple(map(str, call)) for call in content["calls"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _call_of(folder: str | Path, index: int) -> Call:
    """The arguments of call ``index``; ``ValueError`` for a folder without such calls and for an index out of range."""
    calls = _read(Path(folder))
    if calls is None:
        how = "hold a sweep that was submitted with --submit array"
        raise ValueError(f"folder = {str(folder)!r}: must {how}, but it has no {LISTED} of its sweep")
    check.whole("index", index, 0, len(calls) - 1)
    return calls[index]
