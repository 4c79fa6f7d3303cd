"""When things happen: delay models and timings make a ``Schedule``. NumPy only, no JAX.

Start with :func:`plan` (``planning.py``). Order of reading:

1. ``scenario.py``: the input of a timing; ``timing.py``: the timings (registry ``TIMINGS``).
2. ``event_queue.py``: jobs under way; ``idle_clients.py``: which client is next; ``record.py``: what happened;
   ``forecast.py``: how long the schedule will be.
3. ``delays.py`` (registry ``DELAYS``) and ``network.py``: how long jobs take, with the formula and the cache in
   ``durations.py`` and the random draws in ``chance.py``; ``csv_tables.py`` reads measured values.
4. ``availability.py`` and ``faults.py``: what may go wrong. ``energy.py``: what jobs and messages cost the devices.
   ``fedscale.py``: tables for all these from FedScale's traces.
5. ``fast_paths.py``: the same schedules, planned faster, where nothing goes wrong. Adaptive runs: ``views.py`` (what a
   policy sees and decides), ``policies.py`` (registry ``POLICIES``), ``oort.py``, and ``decisions.py``, which the
   planner asks.
6. Runs without a server, :func:`plan_peers` (``peer_planning.py``): ``topologies.py``; ``exchanges.py`` (registry
   ``EXCHANGES``) and its parts ``swift.py``, ``synchronous.py``, ``peer_timelines.py``, ``receivers.py``,
   ``peer_pushes.py``, ``inboxes.py``, ``exchange_parts.py`` (masses) and ``segments.py``; ``peer_schedule.py``: the
   plan; ``peer_waves.py``: its batches; ``peer_statistics.py`` describes it, ``peer_trace.py`` writes and reads it.
7. ``waves.py`` prepares a schedule for the device, ``statistics.py`` describes it, ``checking.py`` makes one from
   arrays and checks it, ``cutting.py`` ends one early, ``trace.py`` writes and reads it (``archives.py``).
"""

from fedjax_async.clock.availability import AVAILABILITY, Availability, AvailabilityModel
from fedjax_async.clock.chance import FAMILIES, Draws
from fedjax_async.clock.checking import check_schedule, make_schedule
from fedjax_async.clock.cutting import cut
from fedjax_async.clock.decisions import Decisions, Ended, Executor
from fedjax_async.clock.delays import DELAYS
from fedjax_async.clock.delays import bind as bind_delays
from fedjax_async.clock.durations import DelayModel, Delays
from fedjax_async.clock.energy import ENERGY
from fedjax_async.clock.exchanges import EXCHANGES, Exchange
from fedjax_async.clock.faults import FAULTS, FaultModel, Faults, JobFaults, job_faults
from fedjax_async.clock.idle_clients import SUCCESSORS
from fedjax_async.clock.network import NETWORKS, Network, NetworkModel
from fedjax_async.clock.peer_planning import plan_peers
from fedjax_async.clock.peer_schedule import Delivery, PeerScenario, PeerSchedule
from fedjax_async.clock.peer_statistics import (
    Masses,
    PeerStatistics,
    ages,
    connecting_window,
    degrees,
    masses,
    peer_statistics,
)
from fedjax_async.clock.peer_trace import is_peer_schedule, load_peer_schedule, save_peer_schedule
from fedjax_async.clock.peer_waves import peer_runs, peer_slots, peer_waves
from fedjax_async.clock.planning import NothingArrives, plan
from fedjax_async.clock.policies import POLICIES
from fedjax_async.clock.policies import bind as bind_policy
from fedjax_async.clock.record import (
    Extension,
    Outcome,
    Record,
    at_or_before,
    fault_counts,
    trained_in_vain,
    used_arrivals,
    with_derived_columns,
)
from fedjax_async.clock.scenario import Conditions, Limits, Scenario, Until, joined
from fedjax_async.clock.scenario import bind as bind_conditions
from fedjax_async.clock.statistics import (
    DelayStatistics,
    client_counts,
    concurrency,
    delay_statistics,
    staleness_histogram,
)
from fedjax_async.clock.timing import TIMINGS, Timing
from fedjax_async.clock.topologies import TOPOLOGIES, Graph, Topology, TopologyModel
from fedjax_async.clock.trace import load_schedule, load_schedule_csv, save_schedule, save_schedule_csv
from fedjax_async.clock.views import Choice, Finished, Policy, PolicyModel, Prior, View
from fedjax_async.clock.waves import SlotPlan, WaveStatistics, allocate, longest_chain, wave_statistics, waves

__all__ = [
    "AVAILABILITY",
    "DELAYS",
    "ENERGY",
    "EXCHANGES",
    "FAMILIES",
    "FAULTS",
    "NETWORKS",
    "POLICIES",
    "SUCCESSORS",
    "TIMINGS",
    "TOPOLOGIES",
    "Availability",
    "AvailabilityModel",
    "Choice",
    "Conditions",
    "Decisions",
    "DelayModel",
    "DelayStatistics",
    "Delays",
    "Delivery",
    "Draws",
    "Ended",
    "Exchange",
    "Executor",
    "Extension",
    "FaultModel",
    "Faults",
    "Finished",
    "Graph",
    "JobFaults",
    "Limits",
    "Masses",
    "Network",
    "NetworkModel",
    "NothingArrives",
    "Outcome",
    "PeerScenario",
    "PeerSchedule",
    "PeerStatistics",
    "Policy",
    "PolicyModel",
    "Prior",
    "Record",
    "Scenario",
    "SlotPlan",
    "Timing",
    "Topology",
    "TopologyModel",
    "Until",
    "View",
    "WaveStatistics",
    "ages",
    "allocate",
    "at_or_before",
    "bind_conditions",
    "bind_delays",
    "bind_policy",
    "check_schedule",
    "client_counts",
    "concurrency",
    "connecting_window",
    "cut",
    "degrees",
    "delay_statistics",
    "fault_counts",
    "is_peer_schedule",
    "job_faults",
    "joined",
    "load_peer_schedule",
    "load_schedule",
    "load_schedule_csv",
    "longest_chain",
    "make_schedule",
    "masses",
    "peer_runs",
    "peer_slots",
    "peer_statistics",
    "peer_waves",
    "plan",
    "plan_peers",
    "save_peer_schedule",
    "save_schedule",
    "save_schedule_csv",
    "staleness_histogram",
    "trained_in_vain",
    "used_arrivals",
    "wave_statistics",
    "waves",
    "with_derived_columns",
]
