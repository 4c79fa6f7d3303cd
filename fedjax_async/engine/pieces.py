"""What a run is made of, and which of its numbers are traced."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_async import registry
from fedjax_async.types import ClientAlgorithm, FederatedData, Model, ServerAlgorithm

Hyper = dict[str, Any]  # name -> number (host), or a scalar array inside a compiled program
ServerFamily = Callable[[Hyper], ServerAlgorithm]
ClientFamily = Callable[[Hyper], ClientAlgorithm]


class Pieces(NamedTuple):
    """Everything that learns, and the data it learns from.

    ``server`` and ``client`` are algorithms, or functions of ``hyper`` that return one. Runs whose
    pieces differ in ``hyper`` and data only share compiled programs, and may run side by side.
    """

    server: ServerAlgorithm | ServerFamily
    client: ClientAlgorithm | ClientFamily
    model: Model
    data: FederatedData
    hyper: Mapping[str, float] = {}


def bound(algorithm: Any, hyper: Mapping[str, Any]) -> Any:
    """The algorithm itself, or the member of a family with these hyperparameters."""
    return algorithm(hyper) if callable(algorithm) else algorithm


def split_options(
    factory: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[tuple[tuple[str, Any], ...], dict[str, float]]:
    """Options as ``(static ones, traced numbers)``, defaults included.

    Traced is what the factory annotates ``Any`` and what is a number; 0 stays static, since it may
    switch a term off.
    """
    static, traced = [], {}
    for name, parameter in registry.options_of(factory).items():
        value = options.get(name, parameter.default)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if number and value != 0 and parameter.annotation in (Any, "Any"):
            traced[name] = float(value)  # type: ignore[arg-type]
        else:
            static.append((name, value))
    return tuple(static), traced
