"""The command ``plan``: the numbers of a schedule, each with its meaning, and its Gantt chart, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check, notices
from fedjax_async.cli.flags import RUN_BASE, settings_of
from fedjax_async.cli.runs import drawing_of, unused_text
from fedjax_async.clock import delay_statistics, used_arrivals, wave_statistics
from fedjax_async.config import Experiment, prepare
from fedjax_async.config.budget import ended_early
from fedjax_async.engine.components import waits_for_close
from fedjax_async.peers import peer_statistics, peer_waves
from fedjax_async.results import gantt, peer_gantt, save_figure
from fedjax_async.results.figure import require_picture
from fedjax_async.results.progress import planning_bar
from fedjax_async.results.running import precision
from fedjax_async.results.timeline import absences_of

# Fields of ``DelayStatistics``, ``WaveStatistics`` and ``PeerStatistics`` -> what is printed behind them.
MEANINGS = {
    "server_steps": "server steps that are completed",
    "tau_max": "largest delay of any client, in server steps (delays: AsynFLC, Definition 4)",
    "tau_avg0": "mean delay over clients and steps, also of clients that do not take part",
    "tau_avgm0": "mean over steps of the largest delay",
    "tau_avg1": "as tau_avg0, at the step of the model that a client holds",
    "tau_avgm1": "as tau_avgm0, at the step of the model that a client holds",
    "waves": "batches in which the jobs are trained, one after the other",
    "longest_chain": "fewest batches that are possible: jobs that need each other's results",
    "mean_width": "jobs of a wave, on average",
    "max_width": "jobs of the largest wave",
    "mean_in_flight": "jobs under way at a time, on average",
    "share": "mean_width / mean_in_flight",
}
OF_NODES = MEANINGS | {
    "events": "jobs of local training: mix the inbox, train, send",
    "pushes": "messages that are sent",
    "mixed": "messages that a receiver mixes into its model",
    "waves": "batches in which the events are trained, one after the other",
    "mean_width": "events of a wave, on average",
    "max_width": "events of the largest wave",
    "slots": "messages that are kept at a time, at most",
    "mean_inbox": "messages that an event mixes, on average",
    "mean_age": "seconds from the sending of a message to its mixing, weighted by its coefficient",
    "largest_age": "seconds, the longest",
    "mean_behind": "events that the sender has completed since, weighted likewise: the staleness",
    "smallest_mass": "least push-sum mass of a node after an event (1 without masses)",
    "largest_mass": "greatest push-sum mass of a node after an event",
    "mass_lost": "push-sum mass lost with messages by the end (nan without masses)",
    "window": "seconds within which the messages connect all nodes (inf: never)",
}


def plan(arguments: argparse.Namespace) -> None:
    """Plan a run without training."""
    settings, drawing = settings_of(arguments, RUN_BASE), drawing_of(arguments)
    since, until = 0.0 if arguments.since is None else arguments.since, arguments.until
    for name in ("since", "until", "width", "title"):
        given = getattr(arguments, name)
        check.require(given is None or arguments.gantt, name, given, "left out without --gantt FILE")
    check.non_negative("since", since)
    check.optional(check.positive, "until", until)
    check.require(until is None or until > since, "until", until, f"more than since = {since:g} s")
    if arguments.gantt:
        require_picture("gantt", arguments.gantt)
    with precision(settings), planning_bar() as part:
        experiment = prepare(settings, planning=part(0))
    early = ended_early(experiment.settings, experiment.described, experiment.schedule)
    names = experiment.components.data.client_names
    options: dict[str, Any] = {"since": since, "until": until, "names": names, "drawing": drawing}
    if not experiment.has_server:
        _print_peers(experiment)
    else:
        if (policy := experiment.settings.policy) is not None:
            print(f"the plan without decisions: policy {policy} will decide while the run trains")
        options["used"] = _print_plan(experiment)
    if arguments.gantt:
        options["offline"] = absences_of(experiment.described, experiment.schedule.num_clients).times
        draw = gantt if experiment.has_server else peer_gantt
        save_figure(draw(experiment.schedule, **options), Path(arguments.gantt))
        print(f"drawn in {arguments.gantt}")
    notices.warn_about({"": {} if early is None else {notices.ENDED_EARLY: early}})


def _print_peers(experiment: Experiment) -> None:
    schedule = experiment.schedule
    print(f"{len(schedule.client)} events, {len(schedule.receiver)} messages of {schedule.message_bytes} bytes")
    _print_fields(peer_statistics(schedule, peer_waves(schedule, experiment.points.time)), OF_NODES)


def _print_fields(statistics: NamedTuple, meanings: dict[str, str]) -> None:
    for name, value in statistics._asdict().items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{name:>16} {shown:<9} {meanings[name]}")


def _print_plan(experiment: Experiment) -> np.ndarray:
    """Print the numbers of a plan; returns which arrivals are used, bool[E]."""
    schedule = experiment.schedule
    came = len(schedule.job)
    used = used_arrivals(schedule) if waits_for_close(experiment.components) else came
    steps = int(schedule.closes.sum())
    print(f"{len(schedule.client)} jobs, {used} updates, {steps} server steps{unused_text(came - used)}")
    for statistics in (delay_statistics(schedule), wave_statistics(schedule)):
        _print_fields(statistics, MEANINGS)
    return np.asarray(np.arange(came) < used)
