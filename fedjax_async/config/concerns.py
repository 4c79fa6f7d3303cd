"""Where each setting has an effect: one table decides which settings are refused.

A setting that a run would ignore must be refused, or its user believes that it did something. So each field of
``Settings`` has a row in ``TABLE``, with a mark for each use of settings:

- ``server``, ``nodes``: a run with a server, and a run without one;
- ``reference``: ``engine="reference"``, one event at a time;
- ``sweep``: one run of a sweep; settings marked ``-`` are made for all runs of the sweep together;
- ``trajectory``: a run as a differentiable function (``config.trajectory``);
- ``explain``: a saved run that ``results.explain`` trains again, without the settings marked ``-``;
- ``own_client``: local training by a ``ClientAlgorithm`` of the user's own;
- ``dealt``: data that are already divided among clients (``FederatedData``);
- ``adaptive``: a run with a policy, which is planned while it runs.

``x``: the setting has an effect there. ``-``: it has none, and is refused if it is given (``explain`` and comparisons
of runs with and without a server leave it out instead). ``role`` is what a sweep varies the setting for, unless another
role is given (``config/roles.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from fedjax_async import check

Use = Literal["server", "nodes", "reference", "sweep", "trajectory", "explain", "own_client", "dealt", "adaptive"]

TABLE = """
setting              role      server  nodes  reference  sweep  trajectory  explain  own_client  dealt  adaptive

method               compared  x       x      x          x      x           x        x           x      x
timing               compared  x       -      x          x      x           x        x           x      x
policy               compared  x       -      x          x      -           x        x           x      x
topology             compared  -       x      x          x      -           -        x           x      x
exchange             compared  -       x      x          x      -           -        x           x      x
delay                world     x       x      x          x      x           x        x           x      x

availability         world     x       x      x          x      x           x        x           x      x
faults               world     x       x      x          x      x           x        x           x      x
network              world     x       x      x          x      x           x        x           x      x
timeout              tuned     x       -      x          x      x           x        x           x      x
late                 tuned     x       -      x          x      x           x        x           x      x
max_staleness        tuned     x       -      x          x      x           x        x           x      x
norm_limit           tuned     x       x      x          x      x           x        x           x      x

dataset              world     x       x      x          x      x           x        x           x      x
partition            world     x       x      x          x      x           x        x           x      x
clients              world     x       x      x          x      x           x        x           x      x
test_fraction        world     x       x      x          x      x           x        x           -      x
validation_fraction  world     x       x      x          x      x           x        x           x      x
normalise            world     x       x      x          x      x           x        -           x      x
augment              tuned     x       x      x          x      x           x        -           x      x

attack               world     x       -      x          x      x           x        x           x      x
privacy              compared  x       -      x          x      x           x        x           x      -

model                world     x       x      x          x      x           x        x           x      x
initial              compared  x       x      x          x      x           x        x           x      x
initial_rename       compared  x       x      x          x      x           x        x           x      x
client               compared  x       x      x          x      x           x        x           x      x
optimizer            tuned     x       x      x          x      x           x        -           x      x
lr                   tuned     x       x      x          x      x           x        -           x      x
decay                tuned     x       x      x          x      x           x        -           x      x
batch_size           tuned     x       x      x          x      x           x        x           x      x
epochs               tuned     x       x      x          x      x           x        x           x      x
steps                tuned     x       x      x          x      x           x        x           x      x
compute              compared  x       x      x          x      x           x        x           x      x

personal             compared  x       x      x          x      x           x        -           x      x
ditto                tuned     x       -      x          x      -           -        -           x      x

compress             compared  x       x      x          x      x           x        x           x      x
feedback             compared  x       -      x          x      x           x        x           x      x
compress_per         compared  x       -      x          x      x           x        x           x      x

time                 world     x       x      x          x      x           x        x           x      x
updates              world     x       x      x          x      x           x        x           x      x
server_steps         world     x       -      x          x      x           x        x           x      x
eval_time            world     x       x      x          x      x           -        x           x      x
eval_updates         world     x       x      x          x      x           -        x           x      x
eval_steps           world     x       -      x          x      x           -        x           x      x
eval_at              world     x       x      x          x      x           -        x           x      x
eval_examples        world     x       x      x          x      x           x        x           -      x
stop_at              world     x       x      x          x      -           x        x           x      x
patience             world     x       x      x          x      -           x        x           x      x
per_client           world     x       -      x          x      -           -        x           x      x
global_tests         world     -       x      x          x      -           -        x           x      x

metrics              world     x       -      x          x      -           -        x           x      x
train_loss           world     x       -      x          x      -           -        x           x      x
train_examples       world     x       -      x          x      -           -        x           x      x
fine_tune            world     x       -      x          x      -           -        -           x      x
energy               world     x       -      x          x      -           -        x           x      x

seed                 seed      x       x      x          x      x           x        x           x      x
engine               compared  x       x      x          x      -           x        x           x      x
max_width            compared  x       x      -          x      -           x        x           x      x
lanes                compared  x       x      -          -      -           x        x           x      x
batching             compared  x       x      -          x      -           x        x           x      x
devices              compared  x       x      -          -      -           x        x           x      -
memory_limit         compared  x       x      -          -      -           x        x           x      -
slots                compared  x       -      x          x      -           x        x           x      x
remat                compared  x       x      x          x      x           x        -           x      x
checkpoint           compared  x       x      -          -      -           -        x           x      x
on_bad               compared  x       x      x          x      -           x        x           x      x
"""

# What a refusal says after "must be left out". ``{method}``: the run's.
REFUSALS: Mapping[Use, str] = {
    "server": ": {method} runs with a server",
    "nodes": ": {method} runs without a server",
    "reference": " with engine = 'reference', which trains one job at a time",
    "sweep": " of the runs of a sweep: it is decided for the whole sweep",
    "trajectory": ": a trajectory trains one job at a time and returns only losses and accuracies",
    "own_client": ": the client algorithm (client) does not take it",
    "dealt": " with data of your own",
    "adaptive": " with a policy, which plans the run while it trains",
}
# What is added for some settings.
HINTS: Mapping[tuple[str, Use], str] = {
    ("per_client", "nodes"): ": nodes are always evaluated on their own tests",
    ("server_steps", "nodes"): " (updates are events)",
    ("on_bad", "trajectory"): "; it leaves out bad uploads and cannot raise an error for them",
    ("privacy", "adaptive"): ": its guarantees follow from a plan that does not depend on the data",
    ("slots", "trajectory"): "; rounding has no gradient",
    ("fine_tune", "own_client"): ", and fine-tuning needs the optimiser of the settings",
}


class Concern(NamedTuple):
    """A row of the table."""

    role: str
    uses: Mapping[str, bool]  # use -> whether the setting has an effect there


def _read(table: str) -> dict[str, Concern]:
    """The rows by setting; ``ValueError`` for a row without a mark for each use."""
    header, *rows = [line.split() for line in table.splitlines() if line]
    found = {}
    for name, role, *marks in rows:
        check.require(set(marks) <= {"x", "-"}, f"marks of {name}", marks, "x or -")
        found[name] = Concern(role, {use: mark == "x" for use, mark in zip(header[2:], marks, strict=True)})
    check.require(tuple(header[2:]) == get_args(Use), "uses", header[2:], f"{get_args(Use)}")
    return found


CONCERNS = _read(TABLE)


def without_effect(use: Use) -> list[str]:
    """The settings that have no effect in ``use``.

    >>> without_effect("sweep")
    ['lanes', 'devices', 'memory_limit', 'checkpoint']
    """
    return [name for name, concern in CONCERNS.items() if not concern.uses[use]]


def refuse(use: Use, given: Mapping[str, Any], **words: str) -> None:
    """``ValueError`` for the first of the given settings (name -> value) that has no effect in ``use``.

    ``words``: fill the braces of the message.

    >>> refuse("nodes", {"timing": "every"}, method="pushcen")
    Traceback (most recent call last):
    ...
    ValueError: timing = 'every': must be left out: pushcen runs without a server
    """
    for name in without_effect(use):
        allowed = f"left out{REFUSALS[use]}{HINTS.get((name, use), '')}"
        check.require(name not in given, name, given.get(name), allowed.format(**words))
