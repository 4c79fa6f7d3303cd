"""The settings as keyword parameters of ``simulate``, ``compare`` and ``sweep``: editors and type checkers see them.

Type checkers read the classes, which stand beside the fields of ``Settings`` in ``of_*.py``; a test holds them against
the fields. ``signed`` gives the same parameters to ``inspect.signature``, which notebooks complete from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from fedjax_async.config.of_data import DataKeywords
from fedjax_async.config.of_evaluation import EvaluationKeywords
from fedjax_async.config.of_execution import AloneKeywords, ExecutionKeywords
from fedjax_async.config.of_method import MethodKeywords, RuleKeyword
from fedjax_async.config.of_training import TrainingKeywords
from fedjax_async.config.settings import DEFAULTS
from fedjax_async.types import FederatedData

Called = TypeVar("Called", bound=Callable[..., object])


class OfAnyRun(MethodKeywords, DataKeywords, TrainingKeywords, EvaluationKeywords, ExecutionKeywords, total=False):
    """The settings that ``simulate``, ``compare`` and ``sweep`` take; ``Settings`` says what each means."""


class OfSweeps(RuleKeyword, OfAnyRun, total=False):
    """The settings that ``sweep`` takes as keywords."""


class OfComparisons(AloneKeywords, OfAnyRun, total=False):
    """The settings that ``compare`` takes as keywords."""

    data: FederatedData | None


class OfRuns(RuleKeyword, OfComparisons, total=False):
    """The settings that ``simulate`` takes as keywords."""


def signed(keywords: type) -> Callable[[Called], Called]:
    """Show the settings in ``keywords`` as keyword parameters of a function in place of its ``**settings``."""

    def decorate(function: Called) -> Called:
        own = inspect.signature(function)
        types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in keywords.__annotations__.items()}
        found = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        order = sorted(types, key=[*DEFAULTS, "data"].index)
        found += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=types[name])
            for name in order
        ]
        function.__signature__ = own.replace(parameters=found)  # type: ignore[attr-defined]
        return function

    return decorate
