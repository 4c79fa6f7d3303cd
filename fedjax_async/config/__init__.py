"""Configuration: from names and numbers to objects that the engine can execute.

Start with :func:`prepare` (``experiment.py``). It takes ``Settings`` (``settings.py``: every field of a run, checked),
resolves the names, plans the schedule and builds what the engine executes; ``execute`` runs that.
``peers.py`` does the same for methods without a server, ``adaptive.py`` for runs with a policy (with
``policy_steps.py``: how many uploads their server steps can have); all use ``resolving.py``. ``prepared.py`` has the
``Experiment`` that they make, and its kinds.

Order of reading: the settings in groups (``of_method.py`` and the other ``of_*.py``, made of ``fields.py``),
``settings.py``, ``concerns.py`` (where each setting has an effect) and ``keywords.py`` (the settings as typed
keywords), ``prepared.py``, ``experiment.py``, ``budget.py``, ``cautions.py`` (warnings).
``names.py`` reads the text of a setting: names with options, which ``registries.py`` knows. ``methods.py`` (with
``method_checks.py``) and ``peer_methods.py``, ``problem.py`` (data and model), ``clients.py`` (local training and
compression), ``protection.py`` (privacy, attacks) and ``measures.py`` turn them into objects and specs
(``fedjax_async/base/spec.py``). ``paths.py`` (one setting by its path, such as ``method.mixing``), ``grid.py`` (the
runs of a sweep) and ``roles.py`` (whether a sweep tunes or compares a setting) serve sweeps, ``sweeping.py`` (which
runs share programs, and training them) all runs. ``own.py`` with ``objects.py`` (objects in place of names),
``labelling.py`` (names that users give to values), ``plugins.py`` (names for factories of the user's own),
``kinds.py``, ``contracts.py`` and ``checked_parts.py`` (checks of such parts, and of what they return) let users
replace any part of the package by their own. ``words.py`` and ``misplaced.py`` are for messages: what other programs
call a setting, and where an option belongs. ``earlier.py``: what settings mean that an earlier version wrote.
``inputs.py`` finds the files that settings name; their contents are part of the run. ``watching.py`` is early stopping,
the best model and callbacks. ``differentiable.py`` makes a run a function that JAX differentiates, ``descent.py`` tunes
its numbers along the gradient.
"""

from typing import TYPE_CHECKING

from fedjax_async.base import lazy

if TYPE_CHECKING:
    # fmt: off
    from fedjax_async.config.descent import Tuned as Tuned, tune as tune
    from fedjax_async.config.differentiable import (PerClient as PerClient, PerExample as PerExample,
        PerStaleness as PerStaleness, Trajectory as Trajectory, trajectory as trajectory)
    from fedjax_async.config.experiment import execute as execute, prepare as prepare
    from fedjax_async.config.grid import GridPoint as GridPoint, expand as expand
    from fedjax_async.config.methods import method as method, method_options as method_options
    from fedjax_async.config.own import named as named
    from fedjax_async.config.plugins import register as register
    from fedjax_async.config.registries import METHODS as METHODS
    from fedjax_async.config.prepared import Experiment as Experiment
    from fedjax_async.config.settings import Settings as Settings
    from fedjax_async.base.method import Method as Method
    from fedjax_async.config.sweeping import (SweepGroup as SweepGroup, execute_group as execute_group,
        plan_groups as plan_groups)

__getattr__, __dir__ = lazy.attach(__name__)
