"""Many runs in few compiled programs: which runs share one, how many fit side by side, and running them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fedjax_async.base import check, identity, tree
from fedjax_async.config import concerns, plugins
from fedjax_async.config.experiment import execute, prepare
from fedjax_async.config.names import names_in
from fedjax_async.config.prepared import Experiment
from fedjax_async.config.settings import Settings, given_in
from fedjax_async.config.watching import Watch
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.defaults import default_lanes
from fedjax_async.engine.devices import device_memory, naming_remedies
from fedjax_async.engine.record import Progress
from fedjax_async.engine.run import Ready, common_shape, run_stacks
from fedjax_async.types import Run

# Runs side by side on a CPU: enough to fill a batch, few enough for their models to stay in the caches.
CPU_STACK = 8
# Jobs per batch of a stack on a CPU: runs side by side fill larger batches than one run does.
CPU_WIDTH = 32
# Without a limit, a group uses this much of an accelerator's memory, or of 8 GiB on a CPU.
MEMORY_SHARE = 0.5
# Updates between checkpoints of a stack, if a folder for them is given.
CHECKPOINT_UPDATES = 2000
CHECKPOINT_SECONDS = 300.0  # also between checkpoints: 2,000 updates of long jobs may take hours


class SweepGroup(NamedTuple):
    """Runs that share one compilation, and how they are stacked."""

    members: tuple[int, ...]  # indices into the list of settings
    stacks: tuple[tuple[int, ...], ...]  # members trained side by side
    lanes: int  # each trains one stack at a time
    batches: int  # batches of a stack trained at the same time, if there are fewer stacks than lanes; 0: see ``alone``
    num_bytes: int  # estimated device memory in use at a time; 0: not estimated
    sizes: tuple[int, ...]  # updates of each member
    about: str  # what the runs share
    done: tuple[tuple[int, ...], ...] = ()  # stacks that are finished; tables of the others are as long as with them

    @property
    def updates(self) -> int:
        """The updates of all members together."""
        return sum(self.sizes)

    @property
    def alone(self) -> bool:
        """Whether its one run is trained as its settings say, with their lanes, memory limit and checkpoints."""
        return self.batches == 0

    def left(self, finished: Collection[int]) -> SweepGroup:
        """The group without the stacks in which every run is finished."""
        stacks = tuple(stack for stack in self.stacks if not set(finished).issuperset(stack))
        done = tuple(stack for stack in self.stacks if stack not in stacks)
        sizes = dict(zip(self.members, self.sizes, strict=True))
        left = {member: sizes[member] for member in self.members if any(member in stack for stack in stacks)}
        return self._replace(members=tuple(left), stacks=stacks, sizes=tuple(left.values()), done=done)


def _shared(e: Experiment) -> tuple[object, ...]:
    """What two runs must have in common to share programs."""
    p, s = e.components, e.settings
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(e.params))
    names = tuple(sorted(p.hyper))
    options = (
        s.policy is None,
        s.per_client,
        s.on_bad,
        s.batching,
        s.max_width,
        s.compute,
        s.engine,
    )
    return e.kind.shared(e), p.client, p.model, names, shapes, options


def plan_groups(
    settings: Sequence[Settings],
    *,
    memory_limit: int | None = None,
    lanes: int | None = None,
    probes: Mapping[str, object] | None = None,
    planning: Callable[[int], Callable[[float], None]] | None = None,
) -> list[SweepGroup]:
    """Sort runs into groups that share one compilation, and each group into stacks that fit the memory.

    ``memory_limit``: bytes of device memory for everything that runs at the same time. ``lanes``: stacks at the same
    time, by default one per CPU core, or as many as fit; a group with fewer stacks trains several batches of each.
    Without both, runs that need more than half of the memory each are trained one after the other.
    ``planning(i)(share)`` is called with the share of run i that is planned. Nothing is compiled. Raises ``ValueError``
    if one run needs more than ``memory_limit``, or one run per lane if ``lanes`` is given.
    """
    if lanes is not None:
        check.whole("lanes", lanes)
    for one in settings:
        concerns.refuse("sweep", given_in(one))
    experiments = [
        prepare(s, probes=probes, planning=None if planning is None else planning(i)) for i, s in enumerate(settings)
    ]
    found: dict[object, list[int]] = {}
    for i, experiment in enumerate(experiments):
        apart = (i,) if experiment.settings.engine == "reference" else ()
        found.setdefault((*_shared(experiment), *apart), []).append(i)
    return [_stacked({i: experiments[i] for i in members}, memory_limit, lanes) for members in found.values()]


def alone(i: int, e: Experiment) -> SweepGroup:
    """The group of run ``i`` alone, trained as its settings say."""
    return SweepGroup((i,), ((i,),), 1, 0, 0, (e.total,), _about(e.settings))


def _in_turn(members: Mapping[int, Experiment], lanes: int, needed: int) -> SweepGroup:
    stacks, sizes = tuple((i,) for i in members), tuple(e.total for e in members.values())
    first = next(iter(members.values())).settings
    return SweepGroup(tuple(members), stacks, 1, lanes, needed, sizes, _about(first))


def _about(s: Settings) -> str:
    method = "".join(names_in("method", str(s.method)))
    return f"{method}, {s.model}, {s.dataset}, {s.clients} clients"


def default_limit() -> int:
    """Bytes a group may use: half of the device's memory."""
    return int(MEMORY_SHARE * device_memory())


def _stacked(members: Mapping[int, Experiment], memory_limit: int | None, lanes: int | None) -> SweepGroup:
    first, limit = next(iter(members.values())), memory_limit or default_limit()
    data = _bytes_of_examples(first)
    largest = max(map(_num_bytes, members.values()))
    if memory_limit is None and lanes is None and data + largest > limit:
        return _in_turn(members, default_lanes(), data + largest)
    if lanes is None:
        lanes = max(1, min(default_lanes(), (limit - data) // largest))
    room = (limit - data) // lanes
    check.require(
        largest <= room, "memory_limit", limit, f"at least {data + lanes * largest} bytes for one run per lane"
    )
    most = max(1, room // largest)
    if jax.default_backend() == "cpu":
        most = min(most, CPU_STACK)
    # as many stacks as lanes or a multiple of it, all of nearly the same length
    turns = -(-len(members) // (most * lanes))
    count = min(len(members), turns * lanes)
    if len(members) <= most and (len(members) % count or lanes % count):
        count = 1  # some lanes would be idle at the end: one stack, which trains as many batches as there are lanes
    length = -(-len(members) // count)
    longest_first = sorted(members, key=lambda i: -members[i].total)
    stacks = tuple(tuple(longest_first[a : a + length]) for a in range(0, len(members), length))
    together = min(lanes, len(stacks))
    sizes = tuple(e.total for e in members.values())
    num_bytes = data + lanes * length * largest
    return SweepGroup(tuple(members), stacks, together, lanes // together, num_bytes, sizes, _about(first.settings))


def _bytes_of_examples(e: Experiment) -> int:
    """Bytes of the training examples on the device, which runs of a group share."""
    data = e.components.data
    pool = () if data.streamed else (data.x, data.y)
    return sum(array.nbytes for array in pool if isinstance(array, np.ndarray))


def _num_bytes(e: Experiment) -> int:
    """Device memory of one run besides its examples, roughly."""
    return e.kind.num_bytes(e, _max_width(e) or CPU_WIDTH, max_width=_max_width(e))


@naming_remedies()
def execute_group(
    experiments: Sequence[Settings | Experiment],
    group: SweepGroup,
    *,
    on_finished: Callable[[int, Run], None],
    progress: Progress | None = None,
    folder: Path | None = None,
    often: bool = False,
    probes: Mapping[str, object] | None = None,
    watch: Callable[[int, Experiment], Watch] | None = None,
) -> None:
    """Run the members of a group, stack by stack, ``group.lanes`` stacks at a time.

    ``experiments``: the runs of all groups; settings of this group's members are prepared. ``on_finished(i, run)`` is
    called in this thread, as soon as the stack of member ``i`` is done. ``folder``: where checkpoints of unfinished
    stacks are kept; the same call continues from them. ``often``: if the process is killed, no more updates are lost
    than one run has. ``probes``: those of every run, as the group was planned. ``watch(i, experiment)``: the
    :class:`Watch` of member ``i``.

    Each run of a stack stops on its own. The device keeps training it until the whole stack has ended, and its results
    leave out what comes after its stop.
    """

    def made(i: int) -> Experiment:
        e = experiments[i]
        return prepare(e, probes=probes) if isinstance(e, Settings) else e

    prepared = {i: made(i) for i in group.members}
    watches = {i: Watch(e) if watch is None else watch(i, e) for i, e in prepared.items()}
    some = prepared[group.members[0]]
    if group.alone or some.settings.engine == "reference":  # the oracle has neither lanes nor checkpoints
        ((i, e),) = prepared.items()
        kept = folder if group.alone else None
        on_finished(i, execute(e, progress=progress, checkpoints=kept, watch=watches[i]))
        return
    stacks = [[prepared[i] for i in stack] for stack in group.stacks]

    def ready(stack: Sequence[Experiment]) -> Ready:
        return some.kind.lay_out(stack, max_width=_max_width(stack[0]), lanes=group.batches)

    laid_out = [ready(stack) for stack in stacks]
    done = [ready([made(i) for i in stack]) for stack in group.done]
    every = min(CHECKPOINT_UPDATES, max(1, min(group.sizes) // group.lanes)) if often else CHECKPOINT_UPDATES
    keepers = [None if folder is None else _keeper(folder, stack, group.batches, every) for stack in stacks]
    finished = run_stacks(
        laid_out,
        keepers,
        shape=common_shape([*laid_out, *done]),
        at_a_time=group.lanes,
        on_bad=some.settings.on_bad,
        progress=progress,
        observers=[[watches[i].observer for i in stack] for stack in group.stacks],
    )
    for k, outcomes in finished:
        for i, outcome in zip(group.stacks[k], outcomes, strict=True):
            e = prepared[i]
            on_finished(i, watches[i].finish(e.recorded(outcome), outcome))
        if (keeper := keepers[k]) is not None:
            keeper.clear()


def _max_width(e: Experiment) -> int | None:
    """Jobs of a batch in a stack; ``None`` leaves it to the engine."""
    if e.settings.max_width is None and jax.default_backend() == "cpu":
        return max(1, min(CPU_WIDTH, 2**27 // tree.num_bytes(e.params)))
    return e.settings.max_width


def _keeper(folder: Path, members: Sequence[Experiment], lanes: int, every: int) -> Keeper:
    about = {"settings": [e.described for e in members], "plugins": plugins.digests()}
    seconds = CHECKPOINT_SECONDS if jax.process_count() == 1 else math.inf
    return Keeper(_checkpoints(folder, members, lanes), every, about, seconds)


def _checkpoints(folder: Path, members: Sequence[Experiment], lanes: int) -> Path:
    """The folder, in ``folder``, for checkpoints of runs trained side by side.

    A stack that is trained alone, as a job of a cluster, may be cut into other batches: then its folder is another. So
    it is where an input file has another content.
    """
    of_content = [identity.content(e.described) for e in members]
    older = [{name: value for name, value in e.described.items() if name != identity.FILES} for e in members]
    new, old = (
        folder / hashlib.sha256(repr(({"settings": settings}, lanes)).encode()).hexdigest()[:16]
        for settings in (of_content, older)
    )
    return old if old.is_dir() and not new.is_dir() else new  # the older name knew no digests of input files
