"""When things happen: delay models and timings make a ``Schedule``. NumPy only, no JAX.

Start with :func:`plan` (``planning.py``). Order of reading:

1. ``scenario.py``: the input of a timing; ``timing.py``: the timings (registry ``TIMINGS``), with ``buffering.py``,
   those of every K arrivals, and ``cohorts.py``, the plan of synchronous rounds; ``calling_off.py``: jobs that are
   stopped because they would come too late; ``compass.py``: local steps by speed; ``midway.py``: messages in mid-job;
   ``polling.py`` and ``hurry.py``: clients that answer with unfinished work; ``pacing.py``: steps as far apart as the
   slowest client needs.
2. ``event_queue.py``: jobs under way; ``job_outcomes.py``: what will become of each; ``idle_clients.py``: which client
   is next; ``record.py``: what happened; ``budget.py``: how long the schedule will be.
3. ``delays.py`` (registry ``DELAYS``) and ``network.py``: how long jobs take, with the formula and the cache in
   ``durations.py`` and the random draws in ``chance.py``; ``csv_tables.py`` reads measured values.
4. ``availability.py`` and ``faults.py``: what may go wrong; ``absences.py``: when clients are offline. ``energy.py``:
   what jobs and messages cost the devices. ``fedscale.py``: tables for all these from FedScale's traces.
5. ``fast_paths.py``: the same schedules, planned faster, where nothing goes wrong. Adaptive runs: ``views.py`` (what a
   policy sees and decides), ``policies.py`` (registry ``POLICIES``), ``oort.py``, ``pisces.py``, and ``decisions.py``,
   which the planner asks.
6. ``waves.py`` prepares a schedule for the device, ``statistics.py`` describes it, ``checking.py`` makes one from
   arrays and checks it, ``cutting.py`` ends one early, ``trace.py`` writes and reads it (``archives.py``).
"""

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.clock import delays, policies, scenario
from fedjax_async.clock.absences import offline_times as offline_times
from fedjax_async.clock.availability import (AVAILABILITY as AVAILABILITY, Availability as Availability,
    AvailabilityModel as AvailabilityModel)
from fedjax_async.clock.budget import Until as Until
from fedjax_async.clock.chance import FAMILIES as FAMILIES, Draws as Draws
from fedjax_async.clock.checking import check_schedule as check_schedule, make_schedule as make_schedule
from fedjax_async.clock.cutting import cut as cut
from fedjax_async.clock.decisions import Decisions as Decisions, Ended as Ended, Executor as Executor
from fedjax_async.clock.delays import DELAYS as DELAYS
from fedjax_async.clock.durations import DelayModel as DelayModel, Delays as Delays
from fedjax_async.clock.energy import ENERGY as ENERGY
from fedjax_async.clock.faults import (FAULTS as FAULTS, FaultModel as FaultModel, Faults as Faults,
    JobFaults as JobFaults, job_faults as job_faults)
from fedjax_async.clock.idle_clients import SUCCESSORS as SUCCESSORS
from fedjax_async.clock.network import NETWORKS as NETWORKS, Network as Network, NetworkModel as NetworkModel
from fedjax_async.clock.planning import NothingArrives as NothingArrives, plan as plan
from fedjax_async.clock.policies import POLICIES as POLICIES
from fedjax_async.clock.record import (Extension as Extension, Outcome as Outcome, Record as Record,
    at_or_before as at_or_before, fault_counts as fault_counts, next_dispatch as next_dispatch,
    trained_in_vain as trained_in_vain, used_arrivals as used_arrivals, with_derived_columns as with_derived_columns)
from fedjax_async.clock.scenario import (Conditions as Conditions, Limits as Limits, Scenario as Scenario,
    joined as joined)
from fedjax_async.clock.statistics import (DelayStatistics as DelayStatistics, client_counts as client_counts,
    concurrency as concurrency, delay_statistics as delay_statistics, staleness_histogram as staleness_histogram)
from fedjax_async.clock.timing import TIMINGS as TIMINGS, Timing as Timing
from fedjax_async.clock.trace import (load_schedule as load_schedule, load_schedule_csv as load_schedule_csv,
    save_schedule as save_schedule, save_schedule_csv as save_schedule_csv)
from fedjax_async.clock.views import (Choice as Choice, Finished as Finished, Policy as Policy,
    PolicyModel as PolicyModel, Prior as Prior, View as View)
from fedjax_async.clock.waves import (SlotPlan as SlotPlan, WaveStatistics as WaveStatistics, allocate as allocate,
    longest_chain as longest_chain, wave_statistics as wave_statistics, waves as waves)

# assigned: type checkers take `bind as bind_delays` for a private name
bind_conditions = scenario.bind
bind_delays = delays.bind
bind_policy = policies.bind

lazy.set_all(__name__)
