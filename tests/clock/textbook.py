"""Slow and obvious versions of what the clock does fast; they share no code with it but the delays."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from fedjax_async.clock import Availability, Delays, Faults, JobFaults, Limits, Outcome, Until, check_schedule, plan
from fedjax_async.clock.record import fault_counts
from fedjax_async.types import Schedule

N = 7
TIMING_SPECS = [
    "every", "every:concurrency=3,sampling=same", "every:concurrency=3,sampling=uniform",
    "every:concurrency=3,sampling=round_robin", "buffer:size=4", "buffer:size=2,concurrency=5", "fresh:size=2",
    "fresh:threshold=3,stop=false,concurrency=5", "fresh:threshold=4,sampling=round_robin,concurrency=4",
    "window:length=0.7", "window:length=1,concurrency=4,sampling=round_robin", "cohort:size=4",
    "cohort:size=3,over_selection=2,deadline=2", "participation:length=0.3",
    "participation:probability=0.5,spread=0.8,length=0.4", "pace:bound=3,length=0.1,unknown=2,concurrency=4",
]  # fmt: skip
# Those of which all clients must answer.
CALM_SPECS = ["compass", "hurry:size=2,bound=3", "midway:size=2", "polling:length=0.7,size=3", "turns"]


def make(timing, delays="lognormal", updates=60, time=None, **options):
    """A plan of N clients that take five steps."""
    options = {"num_clients": N, "local_steps": 5, "until": Until(updates=updates, time=time)} | options
    return plan(timing, delays, **options)


def same(one, other, names=None):
    """Assert that two schedules have equal columns of equal types."""
    for name in names or one._fields:
        mine, theirs = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
        assert mine.dtype == theirs.dtype, name


def table_of(*rows):
    """Delays written out: row i holds the durations of client i's jobs."""
    table = np.array(rows, np.float64)

    def durations(clients, numbers, local_steps=1, bytes_down=0, bytes_up=0):
        return table[clients, np.minimum(numbers, table.shape[1] - 1)]

    return lambda num_clients, seed: Delays(num_clients, durations)


def seconds_of(rows, client, number):
    """The duration of a job in such rows."""
    return rows[client][min(number, len(rows[client]) - 1)]


def arrivals_of(schedule, *names):
    """The arrivals as tuples of these columns, for the textbook's own loops."""
    of_jobs = ("client", "number", "local_steps")
    columns = [getattr(schedule, name)[schedule.job if name in of_jobs else ...] for name in names]
    return list(zip(*(column.tolist() for column in columns)))


def check_invariants(s: Schedule) -> None:
    """Check what holds for every schedule of every policy, and leave no room for rounding."""
    assert check_schedule(s) == s  # the same arrays: nothing to fill in, nothing to refuse (``test_checking.py``)
    assert (s.upload_time > s.dispatch_time).all() and (s.freed_time > s.dispatch_time).all()
    assert np.isfinite(s.freed_time).all() and (s.upload_time[s.job] <= s.time).all()
    # never twice in flight: sent again only once the last job has come, or will never come
    done = np.where(np.isfinite(s.upload_time), np.maximum(s.upload_time, s.freed_time), s.freed_time)
    done[s.job] = np.maximum(s.freed_time[s.job], s.time)
    order = np.lexsort((s.number, s.client))
    again = np.diff(s.client[order]) == 0
    assert (done[order][:-1] <= s.dispatch_time[order][1:])[again].all()
    sound = np.bincount(s.step, weights=~s.corrupt[s.job], minlength=s.closes.sum())
    assert (sound[: s.closes.sum()] > 0).all(), "a step without a sound upload"
    check_outcomes(s)


def check_outcomes(s: Schedule) -> None:
    """Check that the outcome of every job agrees with its times."""

    def these(*outcomes):
        return np.isin(s.outcome, outcomes)

    late, finite = s.freed_time < s.upload_time, np.isfinite(s.upload_time)
    assert not finite[these(Outcome.LOST, Outcome.CRASHED, Outcome.INTERRUPTED, Outcome.CALLED_OFF)].any()
    received = these(Outcome.APPLIED, Outcome.LATE, Outcome.DROPPED_LATE, Outcome.DROPPED_STALE)
    assert finite[received].all() and received[s.copies > 0].all()
    assert late[these(Outcome.LATE, Outcome.DROPPED_LATE)].all()
    assert late[these(Outcome.GIVEN_UP)].all()  # infinite: a round ended without it
    assert (s.freed_time == s.upload_time)[these(Outcome.APPLIED)].all()
    counts = fault_counts(s)
    parts = ("applied", "lost", "dropped_late", "dropped_stale", "called_off", "given_up", "under_way", "withheld")
    assert sum(counts[part] for part in parts) == len(s.outcome)
    assert counts["lost"] >= counts["crashed"] + counts["interrupted"]


@st.composite
def traces(draw, max_arrivals: int = 9) -> Schedule:
    """Any consistent schedule, with or without closed steps, with jobs that never arrive."""
    arrivals = draw(st.integers(1, max_arrivals))
    sent = [draw(st.integers(0, e)) for e in range(arrivals)]
    lost = draw(st.lists(st.integers(0, arrivals), max_size=3))
    closes = np.array(draw(st.lists(st.booleans(), min_size=arrivals, max_size=arrivals)))
    rows = sorted([(position, 0, e) for e, position in enumerate(sent)] + [(p, 1, -1) for p in lost])
    dispatched_after = np.array([position for position, _, _ in rows], np.int64)
    place = [e for _, _, e in rows]
    closed = np.concatenate([[0], np.cumsum(closes, dtype=np.int64)])
    jobs = np.arange(len(rows), dtype=np.int32)
    return Schedule(
        num_clients=len(rows),
        client=jobs,
        number=np.zeros_like(jobs),
        local_steps=np.ones_like(jobs),
        dispatch_time=dispatched_after.astype(np.float64),
        upload_time=np.array([e + 1.0 if e >= 0 else np.inf for e in place]),
        dispatched_after=dispatched_after,
        version=closed[dispatched_after],
        job=np.array([place.index(e) for e in range(arrivals)], np.int64),
        time=np.arange(1.0, arrivals + 1),
        closes=closes,
        step=closed[:-1],
        outcome=np.array([Outcome.APPLIED if e >= 0 else Outcome.LOST for e in place], np.int8),
        freed_time=np.array([e + 1.0 if e >= 0 else p + 0.5 for p, _, e in rows]),
        corrupt=np.array(draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), np.bool_),
        copies=np.zeros(len(rows), np.int8),
    )


def fewest_stabbing_points(intervals):
    """Try all sets of positions, smallest sets first."""
    for size in range(1, len(intervals) + 1):
        for points in itertools.combinations(range(len(intervals)), size):
            if all(any(low <= p <= high for p in points) for low, high in intervals):
                return size
    return 0


def replay(schedule, bounds, slots, personal):
    """Run the engine's reads and writes on simulated registers; check that each job reads its message."""
    registers = [None] * slots.count
    begins = set(bounds[:-1].tolist())
    width = dict(zip(bounds[:-1].tolist(), np.diff(bounds).tolist()))
    version = 0
    for p in range(len(schedule.job) + 1):
        if p > 0:
            version += int(schedule.closes[p - 1])
        for m in range(slots.write_bounds[p], slots.write_bounds[p + 1]):
            registers[slots.write_slot[m]] = (version, int(slots.write_client[m]) if personal else None)
        if p in begins:
            for job in schedule.job[p : p + width[p]]:
                expected = (schedule.version[job], schedule.client[job] if personal else None)
                assert registers[slots.start_slot[job]] == expected


def most_live_at_once(schedule, bounds, personal):
    """Count, at every position, the messages written and not yet read for the last time."""
    sent = enumerate(schedule.dispatched_after) if personal else []  # also to jobs that never arrive
    life = {job: (position, position) for job, position in sent}
    for v in range(len(bounds) - 1):
        for job in schedule.job[bounds[v] : bounds[v + 1]]:
            message = job if personal else schedule.version[job]
            low, high = life.get(message, (10**9, -1))
            life[message] = (min(low, schedule.dispatched_after[job]), max(high, bounds[v]))
    return max(sum(low <= p <= high for low, high in life.values()) for p in range(len(schedule.job) + 1))


# --- a scenario with faults, tick by tick and client by client ------------------------------------

TICK = 1 / 32  # all times of a script are multiples of it


class Script(NamedTuple):
    """A small scenario: seconds[i][n], faults_of[i, n], and the online intervals of each source of absence."""

    seconds: list[list[float]]
    faults_of: dict[tuple[int, int], JobFaults]
    absences: list[tuple[str, list[list[tuple[float, float]]]]]  # leaving, online intervals of each client
    limits: Limits

    def duration(self, i, n):
        return self.seconds[i][min(n, len(self.seconds[i]) - 1)]

    def availability(self, k):
        leaving, stretches = self.absences[k]

        def window(client, time):
            return next(((a, b) for a, b in stretches[client] if time < b), (math.inf, math.inf))

        return lambda num_clients, seed, part: Availability(window, leaving)

    def faults(self, num_clients, seed, part):
        def draw(clients, numbers):
            shape = np.broadcast_shapes(np.shape(clients), np.shape(numbers))
            columns = [np.full(shape, value) for value in JobFaults()[:-1]]
            for (i, n), job_faults in self.faults_of.items():
                for column, value in zip(columns, job_faults):
                    column[(clients == i) & (numbers == n)] = value
            return JobFaults(*columns)

        return Faults(draw, draw)

    def there(self, i, time):
        return all(any(a <= time < b for a, b in stretches[i]) for _, stretches in self.absences)

    def outcome(self, i, n, sent):
        """(what, upload, noticed, free) of a job, followed tick by tick."""
        faults = self.faults_of.get((i, n), JobFaults())
        seconds = self.duration(i, n) * faults.factor + faults.extra
        crash = min(faults.crash_share * seconds, faults.crash_after)
        work, now = 0.0, sent
        while work < seconds:
            if work >= crash:
                return "crashed", math.inf, self.without(i, sent, seconds), now + faults.restart
            for leaving, stretches in self.absences:
                if leaving == "lose" and not any(a <= now < b for a, b in stretches[i]):
                    return "interrupted", math.inf, self.without(i, sent, seconds), now
            pausing = [s[i] for leaving, s in self.absences if leaving == "pause"]
            if all(any(a <= now < b for a, b in stretches) for stretches in pausing):
                work += TICK
            elif all(b <= now for stretches in pausing for _, b in stretches):
                return "interrupted", math.inf, sent + seconds, math.inf
            now += TICK
            if now > 60:
                return "interrupted", math.inf, sent + seconds, math.inf
        if faults.lost:
            return "lost", math.inf, now, now
        return "arrives", now, math.inf, now

    def without(self, i, sent, seconds):
        """When the upload would have arrived if only pauses had delayed it."""
        pauses = [absence for absence in self.absences if absence[0] == "pause"]
        bare = Script([[seconds]] * (i + 1), {}, pauses, Limits())
        what, upload, noticed, _ = bare.outcome(i, 0, sent)
        return upload if what == "arrives" else noticed


def play(script: Script, clients: int, updates: int, end: float, size: int = 0, length: float = 0.0):
    """Clients start again as soon as they may; every ``size`` arrivals or every ``length`` seconds are a step.

    Corrupt uploads arrive, and make no step. Returns the jobs, by client and number, and the arrivals (client, number,
    time, staleness, step).
    """
    limits, jobs, arrivals, closed, filled = script.limits, {}, [], 0, 0
    place_free, busy_until, given = [True] * clients, [0.0] * clients, [0] * clients
    uploads, places = [], []  # that the server has not processed yet
    now = 0.0
    while now <= end and len(arrivals) < updates:
        latest = [key for i, n in enumerate(given) for key in ((i, n - 1), (i, n - 2)) if key in jobs]
        uploads += sorted(key for key in latest if jobs[key]["upload"] == now)
        noticed_now = [key for key in latest if jobs[key]["freed"] == now]
        places += noticed_now
        if not length or (now / length).is_integer():
            sound_ones = False
            for key in uploads:
                job = jobs[key]
                busy_until[key[0]] = now
                if len(arrivals) == updates:
                    continue  # the run is over, but the moment ends as any other
                job["outcome"] = judge(limits, job["freed"] < job["upload"], closed - job["version"])
                if job["outcome"] in ("applied", "late"):
                    arrivals.append((*key, now, closed - job["version"], closed))
                    if not script.faults_of.get(key, JobFaults()).corrupt:  # a corrupt upload fills no buffer
                        sound_ones, filled = True, filled + 1
                    if size and filled == size:
                        closed, filled = closed + 1, 0
            closed += bool(length) and sound_ones
            for i, _ in places:
                place_free[i] = True
            uploads, places = [], []
        for key in noticed_now:
            if jobs[key]["upload"] > now:
                jobs[key]["outcome"] = "given_up" if jobs[key]["what"] == "arrives" else jobs[key]["what"]
        for i in range(clients):
            waits = any(i == key[0] for key in uploads)
            if place_free[i] and busy_until[i] <= now and not waits and script.there(i, now):
                what, upload, noticed, free = script.outcome(i, given[i], now)
                timeout = math.inf if limits.timeout is None else now + limits.timeout
                freed = min(upload, timeout) if upload < math.inf or timeout < math.inf else noticed
                jobs[i, given[i]] = {
                    **{"sent": now, "version": closed, "after": len(arrivals), "upload": upload},
                    **{"freed": freed, "what": what, "outcome": "under_way"},
                }
                place_free[i], busy_until[i] = False, free
                given[i] += 1
        now += TICK
    return jobs, arrivals


def judge(limits: Limits, late: bool, stale: int) -> str:
    """What the server does with an upload."""
    if late and limits.late == "drop":
        return "dropped_late"
    if limits.max_staleness is not None and stale > limits.max_staleness:
        return "dropped_stale"
    return "late" if late else "applied"


quarters = st.integers(1, 12).map(lambda n: n / 4)


@st.composite
def job_faults(draw):
    eighths = st.sampled_from([0.125, 0.5, 0.75, math.inf])
    crashes = draw(st.booleans())
    return JobFaults(
        lost=draw(st.booleans()),
        corrupt=draw(st.booleans()),
        crash_share=draw(eighths) if crashes else math.inf,
        crash_after=draw(quarters) if crashes and draw(st.booleans()) else math.inf,
        restart=draw(quarters),
        factor=draw(st.sampled_from([1.0, 1.0, 2.0])),
        extra=draw(st.sampled_from([0.0, 0.0, 1.25])),
    )


@st.composite
def scripts(draw, clients=3):
    seconds = [draw(st.lists(quarters, min_size=2, max_size=4)) for _ in range(clients)]
    longest = max(map(len, seconds))
    seconds = [row + row[-1:] * (longest - len(row)) for row in seconds]
    keys = st.tuples(st.integers(0, clients - 1), st.integers(0, 20))
    absences = []
    for leaving in draw(st.lists(st.sampled_from(["finish", "pause", "lose"]), max_size=2)):
        stretches = []
        for _ in range(clients):
            gaps = draw(st.lists(st.tuples(st.integers(0, 12), quarters), min_size=1, max_size=5))
            time, own = 0.0, []
            for k, (gap, length) in enumerate(gaps):
                start = time + (gap + (k > 0)) / 4
                time = start + length
                own.append((start, time))
            if draw(st.booleans()):
                own[-1] = (own[-1][0], math.inf)
            stretches.append(own)
        absences.append((leaving, stretches))
    limits = Limits(
        max_staleness=draw(st.sampled_from([None, None, 0, 1, 3])),
        timeout=draw(st.none() | quarters),
        late=draw(st.sampled_from(["apply", "drop"])),
    )
    return Script(seconds, draw(st.dictionaries(keys, job_faults(), max_size=15)), absences, limits)
