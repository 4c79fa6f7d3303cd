"""When things happen: delay models and timing policies make a ``Schedule``. NumPy only, no JAX.

Start with :func:`plan` (``planning.py``). Order of reading: ``timing.py`` (the policies, registry ``TIMINGS``),
``event_queue.py`` (who is under way, and the record of what happened), ``delays.py`` with ``durations.py`` and
``distributions.py`` (registry ``DELAYS``); then what may go wrong: ``availability.py``, ``faults.py``,
``network.py``, joined in ``conditions.py`` and executed by ``unreliable.py``. ``steady.py`` plans worlds where
nothing goes wrong with whole arrays. ``waves.py`` and ``slots.py`` prepare a schedule for the device; ``checking.py``
and ``tables.py`` make, check, write and read schedules.
"""

from fedjax_async.clock.availability import AVAILABILITY, Availability, AvailabilityModel
from fedjax_async.clock.checking import check_schedule, make_schedule
from fedjax_async.clock.conditions import Conditions, Limits, joined
from fedjax_async.clock.conditions import bind as bind_conditions
from fedjax_async.clock.delays import DELAYS
from fedjax_async.clock.delays import bind as bind_delays
from fedjax_async.clock.distributions import DISTRIBUTIONS
from fedjax_async.clock.durations import DelayModel, Delays
from fedjax_async.clock.event_queue import at_or_before
from fedjax_async.clock.faults import FAULTS, FaultModel, Faults, Mishap, mishaps
from fedjax_async.clock.network import NETWORKS, Network, NetworkModel
from fedjax_async.clock.outcomes import Outcome, fault_counts, trained_in_vain, with_derived_columns
from fedjax_async.clock.planning import plan
from fedjax_async.clock.slots import Slots, allocate
from fedjax_async.clock.statistics import (
    DelayStatistics,
    client_counts,
    concurrency,
    delay_statistics,
    staleness_histogram,
)
from fedjax_async.clock.successors import SUCCESSORS
from fedjax_async.clock.timing import TIMINGS, Timing
from fedjax_async.clock.trace import load_schedule, load_schedule_csv, save_schedule, save_schedule_csv
from fedjax_async.clock.waves import WaveStatistics, longest_chain, wave_statistics, waves
from fedjax_async.clock.world import Until, World

__all__ = [
    "AVAILABILITY",
    "DELAYS",
    "DISTRIBUTIONS",
    "FAULTS",
    "NETWORKS",
    "SUCCESSORS",
    "TIMINGS",
    "Availability",
    "AvailabilityModel",
    "Conditions",
    "DelayModel",
    "DelayStatistics",
    "Delays",
    "FaultModel",
    "Faults",
    "Limits",
    "Mishap",
    "Network",
    "NetworkModel",
    "Outcome",
    "Slots",
    "Timing",
    "Until",
    "WaveStatistics",
    "World",
    "allocate",
    "at_or_before",
    "bind_conditions",
    "bind_delays",
    "check_schedule",
    "client_counts",
    "concurrency",
    "delay_statistics",
    "fault_counts",
    "joined",
    "load_schedule",
    "load_schedule_csv",
    "longest_chain",
    "make_schedule",
    "mishaps",
    "plan",
    "save_schedule",
    "save_schedule_csv",
    "staleness_histogram",
    "trained_in_vain",
    "wave_statistics",
    "waves",
    "with_derived_columns",
]
