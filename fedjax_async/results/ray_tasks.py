"""Calls as tasks of Ray (extra ``ray``): on this machine, or on the Ray cluster that it belongs to.

If the worker of a task is lost (killed, out of memory, its machine gone), Ray runs the task again on any machine that
is left. Tasks end with the process that started them, so that process must wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedjax_async.base import lazy

RETRIES = 3  # times that a task runs again after its worker was lost
LONGEST = 300  # characters of an error message


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


def start(work: Callable[..., object], calls: Sequence[tuple[str, ...]], options: Mapping[str, Any]) -> list[Any]:
    """Start ``work(*call)`` for each call; returns the references to the results.

    ``options``: ``cpus`` of a task (default 1), ``gpus`` (0), ``memory`` in GB, and ``retries`` (3), how often a task
    runs again after its worker was lost.
    """
    wanted: dict[str, Any] = {
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
