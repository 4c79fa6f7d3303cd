"""A scenario with faults, simulated tick by tick and client by client; shares no code with the clock."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from fedjax_async.clock import Availability, Delays, Faults, JobFaults, Limits

TICK = 1 / 32  # all times below are multiples of it


class Script(NamedTuple):
    """A small scenario: seconds[i][n], faults_of[i, n], and the online intervals of each source of absence."""

    seconds: list[list[float]]
    faults_of: dict[tuple[int, int], JobFaults]
    absences: list[tuple[str, list[list[tuple[float, float]]]]]  # leaving, online intervals of each client
    limits: Limits

    def delays(self, num_clients, seed):
        table = np.array(self.seconds)

        def durations(clients, numbers, local_steps=1, bytes_down=0, bytes_up=0):
            return table[clients, np.minimum(numbers, table.shape[1] - 1)]

        return Delays(num_clients, durations)

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
