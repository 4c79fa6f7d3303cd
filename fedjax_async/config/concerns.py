"""Where each setting has an effect: its field says so, and decides where it is refused.

A setting that a run would ignore must be refused, or its user believes that it did something. So each field lists the
uses of settings ``without`` effect:

- ``server``, ``nodes``: a run with a server, and a run without one;
- ``reference``: ``engine="reference"``, one event at a time;
- ``sweep``: one run of a sweep; the others are made for all runs of the sweep together;
- ``trajectory``: a run as a differentiable function (``config.trajectory``);
- ``explain``: a saved run that ``results.explain`` trains again, without these settings;
- ``own_client``: local training by a ``ClientAlgorithm`` of the user's own;
- ``dealt``: data that are already divided among clients (``FederatedData``);
- ``adaptive``: a run with a policy, which is planned while it runs.

There it is refused if it is given (``explain`` and comparisons of runs with and without a server leave it out
instead). ``role`` is what a sweep varies the setting for, unless another role is given (``config/roles.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from fedjax_async.base import check
from fedjax_async.config.of_data import OfData, OfSecurity
from fedjax_async.config.of_evaluation import OfBudget, OfMeasures
from fedjax_async.config.of_execution import OfExecution
from fedjax_async.config.of_method import OfConditions, OfMethod
from fedjax_async.config.of_training import OfCompression, OfPersonalisation, OfTraining

Use = Literal["server", "nodes", "reference", "sweep", "trajectory", "explain", "own_client", "dealt", "adaptive"]

GROUPS = {  # title in the help of the command line -> settings
    "method": OfMethod,
    "conditions": OfConditions,
    "data": OfData,
    "security": OfSecurity,
    "training": OfTraining,
    "personalisation": OfPersonalisation,
    "compression": OfCompression,
    "budget": OfBudget,
    "measures": OfMeasures,
    "execution": OfExecution,
}

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
    ("policy", "nodes"): "; a node withholds messages by the option trigger of dpsgd, swift, async_dfedavg and choco",
    ("on_bad", "trajectory"): "; it leaves out bad uploads and cannot raise an error for them",
    ("privacy", "adaptive"): ": its guarantees follow from a plan that does not depend on the data",
    ("slots", "trajectory"): "; rounding has no gradient",
    ("fine_tune", "own_client"): ", and fine-tuning needs the optimiser of the settings",
}


class Concern(NamedTuple):
    """What a sweep varies a setting for, and where it has an effect."""

    role: str
    uses: Mapping[str, bool]  # use -> whether the setting has an effect there


def _read() -> dict[str, Concern]:
    """Where each setting has an effect; ``ValueError`` for a use that does not exist."""
    found = {}
    for field in (field for group in GROUPS.values() for field in dataclasses.fields(group)):
        without, uses = field.metadata["without"], get_args(Use)
        check.require(set(without) <= set(uses), f"without of {field.name}", without, f"of {uses}")
        found[field.name] = Concern(field.metadata["role"], {use: use not in without for use in uses})
    return found


CONCERNS = _read()


def without_effect(use: Use) -> list[str]:
    """The settings that have no effect in ``use``.

    >>> without_effect("sweep")
    ['lanes', 'devices', 'memory_limit', 'checkpoint']
    """
    return [name for name, concern in CONCERNS.items() if not concern.uses[use]]


def refuse(use: Use, given: Mapping[str, object], **words: str) -> None:
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
