"""The draws of a day: worlds for the test that the engine equals the oracle.

    python -m tests.draws --days 7      # which pairs a week of draws covers; trains nothing, a quarter of an hour

Counted are pairs of kinds (``worlds.kind``) of the values of two axes. All of them are dealt among the seven days of a
week, anew each week, and a day's worlds are chosen to cover its share: each program starts from an uncovered pair and
takes, axis by axis, the value that covers most. What is refused is left out of the world. A pair that is refused even
in a world that has nothing else is dropped; that these are few and right is for tests of refusals to show.
A week covers 88 % of the 9,900 pairs that are allowed, and the next week most of the others. The timing ``midway`` is
hardly ever drawn, since it is refused with faults, absences and limits: ``local/test_going_on.py`` has it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.worlds import ADAPTIVE, ALWAYS, AXES, COMPANIONS, World, is_of_clock, kind, refusal

PROGRAMS, EIGHT = 10, 2  # a day's programs, and those of them on eight devices
CLOCKS, FEW = {"server": 6, "nodes": 9}, 2  # the worlds of each, and of one that compiles anew for each of them
NODES = 4  # every fourth program has no server; which ones changes by day, as the last ones run on eight devices
# Most settings that are not the default, of a program and of a world: more hide each other, and are refused more often.
MOST, MOST_IN_ALL = 7, 11
HOW = {"batching", "run", "dataset", "execution", "devices"}  # axes that say how the engine runs it, and hide nothing
PLAIN: dict[str, World] = {  # the values of the axes without a default, in a world that has nothing else
    "server": {"method": "fedasync", "delay": "constant", "batching": "vmap"},
    "nodes": {"method": "async_dfedavg", "delay": "constant", "batching": "vmap"},
}


class Drawn(NamedTuple):
    """The worlds of a program, and the refusals on the way to them."""

    worlds: list[World]
    refusals: list[str]


class Pairs:
    """The values of runs with or of runs without a server, and which pairs of kinds a day has yet to cover."""

    def __init__(self, name: str, day: int) -> None:
        program, clock = AXES[name]
        self.axes = [*program, *clock]
        self.plain: World = dict.fromkeys(self.axes) | PLAIN[name]
        self.values = [(a, v) for a, values in (program | clock).items() for v in [None] * (a not in ALWAYS) + values]
        self.kinds = list(dict.fromkeys((a, kind(a, v)) for a, v in self.values))
        self.kind = np.array([self.kinds.index((a, kind(a, v))) for a, v in self.values])
        self.axis = np.array([self.axes.index(a) for a, _ in self.values])
        self.of_clock = np.array([is_of_clock(a) for a, _ in self.values])
        self.is_uncounted = np.array([v is None or a in ALWAYS | HOW for a, v in self.values])
        axis = np.array([self.axes.index(a) for a, _ in self.kinds])
        first, second = np.nonzero(axis[:, None] < axis[None, :])
        dealt = np.random.default_rng([day // 7, len(name)]).permutation(len(first))
        share = np.zeros(len(first))
        share[dealt] = np.where(np.arange(len(first)) % 7 == day % 7, 64.0, 1.0)  # this day's share, or another day's
        self.left = np.zeros((len(self.kinds), len(self.kinds)))  # 0: covered
        self.left[first, second] = self.left[second, first] = share
        self.all = [(int(i), int(j)) for i, j in zip(first, second)]
        # pairs of long axes first: those of short ones come with them
        length = np.bincount(axis)[axis]
        today = sorted(dealt[day % 7 :: 7], key=lambda k: -length[first[k]] * length[second[k]])
        self.queue = [self.all[k] for k in today]

    def kinds_of(self, world: World) -> list[int]:
        """The numbers of the kinds of a world's values."""
        return [self.kinds.index((axis, kind(axis, value))) for axis, value in world.items()]

    def members(self, pair: tuple[int, int]) -> list[World]:
        """The pairs of values of a pair of kinds."""
        one, other = ([self.values[i] for i in np.nonzero(self.kind == number)[0]] for number in pair)
        return [dict(both) for both in itertools.product(one, other)]

    def grown(self, fixed: World, free: np.ndarray, rng: np.random.Generator) -> World:
        """A world with these fixed values, and of the ``free`` ones those that cover most."""
        chosen = dict(fixed)
        gain = self.left[:, self.kinds_of(chosen)].sum(axis=1)[self.kind] + rng.random(len(free))
        for _ in range(len(self.axes) - len(chosen)):
            usable = free & ~np.isin(self.axis, [self.axes.index(axis) for axis in chosen])
            given = [axis for axis, value in chosen.items() if value is not None and axis not in ALWAYS | HOW]
            if sum(not is_of_clock(axis) for axis in given) >= MOST:
                usable &= self.is_uncounted | self.of_clock
            if len(given) >= MOST_IN_ALL:
                usable &= self.is_uncounted
            best = int(np.argmax(np.where(usable, gain, -1)))
            axis, value = self.values[best]
            chosen[axis] = value
            gain += self.left[self.kind[best]][self.kind]
        return chosen

    def cover(self, world: World) -> None:
        """Count a world's pairs as covered."""
        numbers = self.kinds_of(world)
        self.left[np.ix_(numbers, numbers)] = 0

    def uncovered(self, devices: str | None, rng: np.random.Generator) -> Iterator[World]:
        """Values of each pair that is left of this day's, not both of the clock, and that these devices can have."""
        for pair in self.queue:
            if self.left[pair] and not all(is_of_clock(self.kinds[number][0]) for number in pair):
                found = [given for given in self.members(pair) if given.get("devices", devices) == devices]
                if found:
                    yield found[rng.integers(len(found))]


def admitted(draft: World, fixed: World) -> tuple[World | None, list[str]]:
    """A world without what is refused, and the refusals; the ``fixed`` values stay, or there is no world.

    A refused world gets a companion of the value that the refusal names, or loses this value. A later companion may
    take the place of an earlier one.
    """
    world, refusals, companions, lent = dict(draft), [], dict(COMPANIONS), set[str]()
    while (why := refusal(world)) is not None:
        refusals.append(why)
        name = why.replace(":", " ").partition(" ")[0]
        companion = companions.pop(name, {"method": "fedasync"})
        if all(axis in world and (world[axis] is None or axis in lent) and axis not in fixed for axis in companion):
            world |= companion
            lent |= companion.keys()
            continue
        given = [a for a, v in world.items() if v is not None and a not in (*ALWAYS, *fixed)]
        named_axes = [a for a in given if name in (a, str(world[a]).partition("=")[0])]
        if not given:
            return None, refusals
        # without a name it is mostly the policy or the part that does not fit
        axis = (named_axes or [a for a in ("policy", "part") if a in given] or given[::-1])[0]
        world[axis] = None
    return world, refusals


def worlds_of(world: World) -> int:
    """How many worlds its program has at most: tables of an adaptive run that is not swept have shapes of their own."""
    if world["run"] != "swept" and (world.get("policy") or world["method"] in ADAPTIVE):
        return FEW
    return CLOCKS["nodes" if "topology" in world else "server"]


def draw(day: int, programs: int = PROGRAMS, eight: int = EIGHT) -> list[Drawn]:
    """The worlds of each program of a day. The last ``eight`` programs run on eight devices."""
    rng = np.random.default_rng(day)
    tables = {name: Pairs(name, day) for name in AXES}
    drawn = []
    with jax.enable_x64(True):
        for number in range(programs):
            name = "nodes" if (day + number) % NODES == 0 else "server"
            drawn.append(_program(tables[name], "8" if number >= programs - eight else None, rng))
    return drawn


def _grown(
    table: Pairs, fixed: World, free: np.ndarray, rng: np.random.Generator, times: int = 1
) -> tuple[World | None, list[str]]:
    """An admitted world, and the refusals. What is refused is no longer free; others get its place in a second time."""
    refusals: list[str] = []
    world: World | None = None
    for _ in range(times):
        draft = table.grown({a: v for a, v in (world or fixed).items() if v is not None or a in fixed}, free, rng)
        found, why = admitted(draft, fixed)
        refusals += why
        if found is None:
            break
        world = found
        lost = {(axis, value) for axis, value in draft.items() - world.items() if value is not None}
        if not lost:
            break
        free &= np.array([value not in lost for value in table.values])
    return world, refusals


def _program(table: Pairs, devices: str | None, rng: np.random.Generator) -> Drawn:
    """The worlds of the next program."""
    refusals: list[str] = []
    free = np.ones(len(table.values), bool)
    on = {"devices": devices}
    for given in table.uncovered(devices, rng):
        first, why = admitted(table.plain | given | on, given | on)
        refusals += why
        if first is not None:
            grown, why = _grown(table, given | on, free, rng, times=2)
            first, refusals = grown or first, refusals + why
            break
    else:
        first, why = _grown(table, on, free, rng, times=2)
        refusals += why
    assert first is not None
    worlds = [first]
    table.cover(first)
    program = {axis: value for axis, value in first.items() if not is_of_clock(axis)}
    free = table.of_clock.copy()
    for _ in range(worlds_of(first) - 1):
        world, why = _grown(table, program, free, rng)
        refusals += why
        if world is not None and world not in worlds:
            worlds.append(world)
            table.cover(world)
    return Drawn(worlds, refusals)


def kept(day: int, folder: Path) -> list[Drawn]:
    """The draws of a day, from a file of this run of the tests, whose processes share them."""
    file = folder / f"worlds_{day}.json"
    if not file.exists():
        (written := folder / f"{file.name}.{id(file)}").write_text(json.dumps(draw(day)))
        written.replace(file)
    return [Drawn(*one) for one in json.loads(file.read_text())]


def pairs(worlds: list[World]) -> set[Any]:
    """The pairs of kinds of these worlds, those of runs without a server apart."""
    return {
        ("topology" in world, *pair)
        for world in worlds
        for pair in itertools.combinations(sorted((axis, kind(axis, value)) for axis, value in world.items()), 2)
    }


def all_pairs() -> int:
    """How many pairs of kinds there are, those that are refused too."""
    return sum(len(Pairs(name, 0).all) for name in AXES)


def missed(covered: set[Any]) -> tuple[list[Any], int]:
    """The pairs that are allowed and not covered, and how many are refused."""
    allowed, refused = [], 0
    for name in AXES:
        table = Pairs(name, 0)
        for pair in table.all:
            key = (name == "nodes", *sorted(table.kinds[number] for number in pair))
            if key not in covered:
                found = any(admitted(table.plain | given, given)[0] is not None for given in table.members(pair))
                allowed += [key] * found
                refused += not found
    return allowed, refused


def main() -> None:
    """Print how many pairs the draws of some days cover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--eight", type=int, default=EIGHT)
    a = parser.parse_args()
    first = datetime.date.today().toordinal() // 7 * 7
    covered: set[Any] = set()
    for day in range(first, first + a.days):
        drawn = draw(day, a.programs, a.eight)
        found = pairs([world for one in drawn for world in one.worlds])
        covered |= found
        worlds, refused = (sum(map(len, lists)) for lists in zip(*drawn))
        line = f"{worlds} worlds, {refused} refused, {len(found)} pairs of {all_pairs()}; in all days {len(covered)}"
        print(f"day {day}: {line}", flush=True)
    allowed, refused = missed(covered)
    print(f"{len(covered)} pairs covered, {refused} refused, {len(allowed)} allowed and not covered:")
    print(Counter(f"{'nodes' if nodes else 'server'}: {one[0]} x {other[0]}" for nodes, one, other in allowed))


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
