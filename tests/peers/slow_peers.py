"""A decentralised run planned one event at a time, with a plain heap, lists and dictionaries: the definition.

It takes from the package the draws (durations, receivers, times of messages, faults) and the outcome of a job under
absences and crashes, which have tests of their own. It computes timelines, buffers, masses and coefficients itself.
"""

from __future__ import annotations

import heapq
import math
from types import SimpleNamespace

import numpy as np

from fedjax_async.clock import Draws, Outcome
from fedjax_async.clock.availability import together
from fedjax_async.clock.job_outcomes import draw_jobs, job_outcomes
from fedjax_async.clock.record import SLACK
from fedjax_async.peers import Delivery
from fedjax_async.peers.receivers import choose_receivers

PUSH, ARRIVE, MIX = 0, 1, 2


def scheduled(events, moment):
    """Sort (client, number, start, end) by ``moment``, simultaneous ones in the order of an event queue.

    An event enters the queue when its node comes online (which goes before all else at that moment, in the order in
    which nodes went offline) or when the node's previous event is taken from it.
    """
    at = {(client, number): (start, end) for client, number, start, end in events}

    def enters(event):
        client, number = event
        start, previous = at[event][0], at.get((client, number - 1), (0.0, -math.inf))[1]
        if previous == start:
            return start, 1, leaves((client, number - 1))
        return start, 0, (previous, leaves((client, number - 1)) if number else client)

    def leaves(event):
        return at[event][1], enters(event)

    key = enters if moment == "start" else leaves
    return sorted(events, key=lambda event: key(event[:2]))


def events_of(scenario, ties, enough=400):
    """Lists of (client, number, start, end) of the events within the budget; each node by itself."""
    window = together([source.interval for source in scenario.conditions.availability])
    outcome_of = job_outcomes(scenario.conditions)
    horizon = math.inf if scenario.until.time is None else scenario.until.time * SLACK
    most = math.inf if scenario.until.updates is None else scenario.until.updates
    events = []
    for node in range(scenario.num_clients):
        time, number, attempt, drawn_ahead = 0.0, 0, 0, []
        while time <= horizon and number < min(most, enough) and attempt < 20 * enough:
            if window is not None and window(node, time)[0] > time:
                time = window(node, time)[0]
                continue
            if attempt == len(drawn_ahead):
                drawn_ahead += draw_jobs(scenario, np.array([node]), attempt + np.arange(64)).tolist()
            drawn = drawn_ahead[attempt]
            attempt += 1
            outcome = outcome_of(node, time, (*drawn[:3], False, False) if isinstance(drawn, tuple) else drawn)
            if outcome.outcome is Outcome.APPLIED:
                events.append((node, number, time, outcome.upload))
                time, number = outcome.upload, number + 1
            else:
                time = max(outcome.client_free, math.nextafter(time, math.inf))
    events = [event for event in events if event[3] <= horizon]
    events = scheduled(events, "end") if ties == "scheduled" else sorted(events, key=lambda event: (event[3], event[0]))
    return events[: int(min(most, len(events)))]


def here_from_the_start(scenario):
    window = together([source.interval for source in scenario.conditions.availability])
    return [window is None or window(node, 0.0)[0] <= 0 for node in range(scenario.num_clients)]


def is_online(scenario):
    window = together([source.interval for source in scenario.conditions.availability])
    if window is None:
        return None
    there = np.vectorize(lambda node, time: time < math.inf and window(int(node), float(time))[0] <= time)
    return lambda nodes, times: there(*np.broadcast_arrays(nodes, times)).astype(bool)


class Pushing:
    """What an event sends, message by message."""

    def __init__(self, world, fragments):
        self.world, self.fragments = world, fragments
        self.link, self.uplink = {}, {}

    def messages(self, event, online, end, deadline=math.inf):
        """(fragment, receiver, arrival, corrupt) of each message."""
        world, node = self.world, event.client
        pairs = []
        for fragment in range(self.fragments):
            place = (np.array([node]), np.array([event.turn]), np.array([event.end]))
            chosen = choose_receivers(world.topology, world.scenario.seed, *place, online, fragment)[1]
            pairs += [(fragment, int(receiver)) for receiver in chosen]
        if self.fragments > 1 and world.network is not None and world.network.shared:
            seed = world.scenario.seed
            pairs.sort(key=lambda pair: Draws(seed, "pairs", node, event.turn, *pair).random()[0])
        out = []
        for position, (fragment, receiver) in enumerate(pairs):
            arrival, corrupt = event.end, False
            if world.network is not None:
                number = np.array([event.number * self.fragments + fragment])
                times = world.network.between(np.array([node]), np.array([receiver]), number, world.message_bytes)
                occupied, travelling = (float(one[0]) for one in times)
                if world.network.shared:
                    begins = max(self.uplink.get(node, 0.0), event.end)
                    if begins >= deadline:
                        continue  # never sent
                    self.uplink[node] = begins + occupied
                    arrival = begins + occupied + travelling
                else:
                    arrival = event.end + occupied + travelling
                arrival = max(arrival, self.link.get((node, receiver), 0.0))
                self.link[node, receiver] = arrival
            if world.message_faults is not None:
                faults = world.message_faults(position, np.array([node]), np.array([event.number]))
                corrupt = bool(np.all(faults.corrupt))
                arrival = math.inf if np.all(faults.lost) else arrival
            if online is not None and arrival <= end and not online(np.array([receiver]), np.array([arrival]))[0]:
                arrival = math.inf
            out.append((fragment, receiver, arrival, corrupt))
        return out


def plan_slowly(world, kind, aggregate_at="start", **options):  # noqa: PLR0915 (one event loop, in one piece)
    """``kind``: push_sum, mean, kept_mean, divshare, swift, alone. The columns of a ``PeerSchedule``, as lists."""
    scenario = world.scenario
    wasteful = options.get("reference") in ("released", "baseline")  # divides the mass for absent receivers too
    ties = "scheduled" if wasteful or kind == "kept_mean" else "client"
    found = events_of(scenario, ties)
    at = 2 if aggregate_at == "start" else 3
    ordered = scheduled(found, aggregate_at) if ties == "scheduled" else sorted(found, key=lambda e: (e[at], e[0]))
    events = [
        SimpleNamespace(client=c, number=n, turn=n, start=a, end=b, mixed_at=a if aggregate_at == "start" else b)
        for c, n, a, b in ordered
    ]
    fragments = int(1 / options["omega"]) if kind == "divshare" else 1
    late = [not early for early in here_from_the_start(scenario)]
    masses = [options.get("late_mass", 1.0) if later else 1.0 for later in late]
    nodes = [SimpleNamespace(mass=mass, buffer=[], aside=[], last={}) for mass in masses]
    online, pushing = is_online(scenario), Pushing(world, fragments)
    heap = []
    for index, event in enumerate(events):
        event.inbox, event.mass, event.degree, event.unsent = [], 1.0, 0, 0.0
        heapq.heappush(heap, (event.mixed_at, MIX, index, index))
        if aggregate_at == "start":
            heapq.heappush(heap, (event.end, PUSH, index, index))
    pushes, unsent = [], [0.0]

    def push(index):
        event = events[index]
        later = [other.end for other in events if (other.client, other.number) == (event.client, event.number + 1)]
        deadline = later[0] if later and kind == "divshare" else math.inf
        sent = [] if kind == "alone" else pushing.messages(event, online, end, deadline)
        event.degree = len(sent)
        parts = len(sent) + 1
        if wasteful:
            graphs, drawn = world.topology.graphs, world.topology.drawn
            graph = graphs[event.turn % len(graphs)] if graphs else drawn(event.turn) if drawn else None
            parts = 1 + (world.topology.random if graph is None else int(graph.degrees[event.client]))
        event.unsent = (parts - 1 - len(sent)) * event.total / parts if kind == "push_sum" else 0.0
        unsent[0] += event.unsent
        event.mass = event.total / parts if kind == "push_sum" else 1.0
        nodes[event.client].mass = event.mass
        for fragment, receiver, arrival, corrupt in sent:
            outcome = Delivery.LOST if arrival == math.inf else Delivery.IN_FLIGHT
            mass = event.mass if kind == "push_sum" else 0.0
            message = SimpleNamespace(
                event=index, fragment=fragment, receiver=receiver, arrival=arrival, corrupt=corrupt, mass=mass,
                sent_mass=mass, outcome=outcome, mixed_by=-1,
            )  # fmt: skip
            pushes.append(message)
            if arrival < math.inf:
                heapq.heappush(heap, (arrival, ARRIVE, len(pushes), message))

    def arrive(message):
        node = nodes[message.receiver]
        message.outcome = Delivery.WAITING
        if kind == "swift":
            node.last[events[message.event].client] = message
            return
        same = [
            old
            for old in node.buffer
            if (events[old.event].client, old.fragment) == (events[message.event].client, message.fragment)
        ]
        policy = options.get("policy", "discard")
        if same and options.get("newest", True) and policy != "merge":
            node.buffer.remove(same[0])
            same[0].outcome = Delivery.SUPERSEDED
            if policy == "carry":
                message.mass += same[0].mass
        node.buffer.append(message)
        if len(node.buffer) > (options.get("capacity") or math.inf):
            oldest = node.buffer.pop(0)
            if policy == "discard":
                oldest.outcome = Delivery.OVERFLOWED
            else:
                node.aside.append(oldest)

    def mix(index):
        event, node = events[index], nodes[events[index].client]
        if kind == "swift":
            if event.number % options.get("every", 1) == 0:
                weights = coefficients_by_hand(world.topology.graphs[0])[event.client]
                event.inbox = [(message, weights[sender]) for sender, message in sorted(node.last.items())]
        elif kind == "kept_mean":
            own = 1.0
            for _ in range(options["times"]):
                own /= len(node.buffer) + 1
            event.inbox = [(message, (1 - own) / len(node.buffer)) for message in node.buffer]
        else:
            inbox = node.aside + node.buffer
            node.aside, node.buffer = [], []
            event.total = node.mass = node.mass + sum(message.mass for message in inbox)
            for message in inbox:
                alike = sum(message.fragment == other.fragment for other in inbox)
                weight = 1 / (1 + alike)
                if kind == "push_sum":
                    weight = message.mass / event.total if event.total else 0.0
                if options.get("reference") == "released" and event.number == 0:
                    weight = 1 / len(inbox)
                event.inbox.append((message, weight))
        for message, _ in event.inbox:
            message.mixed_by = index if message.mixed_by < 0 else message.mixed_by
        if aggregate_at == "end":
            push(index)

    end = max([event.end for event in events], default=0.0)
    if len(events) < (scenario.until.updates or math.inf) and scenario.until.time is not None:
        end = max(end, scenario.until.time)
    invariant = []
    while heap and heap[0][0] <= end:
        where, what, _, subject = heapq.heappop(heap)
        {PUSH: push, ARRIVE: arrive, MIX: mix}[what](subject)
        if kind == "push_sum":
            invariant.append((where, account(nodes, pushes, options.get("policy"), unsent[0])))
    for message in pushes:
        if message.mixed_by >= 0:
            message.outcome = Delivery.MIXED
    if kind == "swift":
        kept = {id(message) for node in nodes for message in node.last.values()}
        for message in pushes:
            if message.outcome == Delivery.WAITING and id(message) not in kept:
                message.outcome = Delivery.SUPERSEDED
    return columns(events, pushes), invariant


def account(nodes, pushes, policy, unsent):
    """Masses of the nodes, on the way, in buffers, and lost."""
    lost = [Delivery.LOST, Delivery.OVERFLOWED] + ([Delivery.SUPERSEDED] if policy == "discard" else [])
    return (
        sum(node.mass for node in nodes),
        sum(message.sent_mass for message in pushes if message.outcome == Delivery.IN_FLIGHT),
        sum(message.mass for node in nodes for message in node.buffer + node.aside),
        unsent + sum(message.sent_mass for message in pushes if message.outcome in lost),
    )


def columns(events, pushes):
    inbox = [(message, weight) for event in events for message, weight in event.inbox]
    of_events = ("client", "number", "start", "end", "mixed_at", "mass")
    of_pushes = ("receiver", "sent_mass", "arrival", "outcome", "mixed_by", "corrupt")
    return {
        **{name: [getattr(event, name) for event in events] for name in of_events},
        **{name: [getattr(message, name) for message in pushes] for name in of_pushes},
        "unsent_mass": [event.unsent for event in events],
        "inbox_bounds": np.cumsum([0] + [len(event.inbox) for event in events]),
        "source": [message.event for message, _ in inbox],
        "fragment": [message.fragment for message, _ in inbox],
        "weight": [weight for _, weight in inbox],
        "push_event": [message.event for message in pushes],
        "push_fragment": [message.fragment for message in pushes],
    }


def coefficients_by_hand(graph):
    """SWIFT's coefficients, ``{node: {neighbour: coefficient}}``, found by nodes that exchange messages.

    Each acts as soon as it has the messages that it waits for.
    """
    nodes = range(len(graph.bounds) - 1)
    neighbours = {i: graph.receivers[graph.bounds[i] : graph.bounds[i + 1]].tolist() for i in nodes}
    degree = {i: len(neighbours[i]) for i in nodes}
    final, proposal = {}, {}  # what a node has sent to neighbours of lower degree, and of equal degree
    weights: dict[int, dict[int, float]] = {}
    while len(weights) < len(neighbours):
        before = len(weights), len(proposal)
        for i in nodes:
            above = [j for j in neighbours[i] if degree[j] > degree[i]]
            equal = [j for j in neighbours[i] if degree[j] == degree[i]]
            if not above:
                proposal[i] = final[i] = 1 / (degree[i] + 1)
            elif all(j in final for j in above):
                taken = sum(final[j] for j in above)
                proposal[i] = (1 - taken) / (degree[i] - len(above) + 1)
                if all(j in proposal for j in equal):
                    final[i] = min(proposal[j] for j in [i, *equal])
            if i in final:
                weights[i] = {j: final[j] if j in above else final[i] for j in neighbours[i]}
        assert before != (len(weights), len(proposal)), "nobody can go on"
    return weights
