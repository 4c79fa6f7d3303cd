"""What is tuned of a method, and the points that are tried: the same number for every method.

The options that may be tuned are named here with their ranges, as factors of their defaults. A method has those that
its factory and its timing take; nothing is listed method by method. The first point is always the default. The others
are a Halton sequence over the first ``knobs`` options: the first option takes the middle of its range, then the
quarters; so methods with one option and with four get equally many runs. A point that a method refuses, such as a
buffer that is too small for it, is replaced by the next one of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_async.base import registry
from fedjax_async.base.factories import is_traced, options_of
from fedjax_async.base.method import Method, factory_of
from fedjax_async.base.registry import entries
from fedjax_async.server import METHODS

PRIMES = (2, 3, 5, 7, 11, 13)
Range = tuple[float, float]  # factors of the default; between them the logarithm is uniform

# The server's rate: where every arrival is a step it has to fall with the number of jobs in flight.
RATES = ("server_lr", "mixing")
RATE_OF_ARRIVALS: Range = (0.01, 1.0)
RATE_OF_SUMS: Range = (0.1, 3.0)  # buffers, windows, groups
RATE_OF_ROUNDS: Range = (0.5, 3.0)
MIXING: Range = (0.05, 1.5)
LOCAL_RATE: Range = (0.4, 4.0)
OF_TIMING: dict[str, Range] = {"size": (0.3, 3.0), "length": (0.03, 1.0), "threshold": (0.3, 10.0), "bound": (0.3, 3.0)}
COHORT = 10  # the size of cohorts where a method leaves it open
COHORT_SIZES: Range = (0.5, 5.0)
OF_RULE: dict[str, Range] = {"alpha": (0.1, 10.0), "beta": (0.2, 1.8), "momentum": (0.3, 1.1), "proximal": (0.1, 100.0)}
OF_RULE |= {"strength": (0.1, 10.0), "exponent": (0.2, 4.0)}


class Knob(NamedTuple):
    """An option that is tuned: its place in a spec, its default, and its range as factors."""

    name: str  # "server_lr", "@size", or "lr"
    default: float
    factors: Range
    whole: bool = False
    most: float = math.inf

    def value(self, share: float) -> float:
        """The value at a share of the range, in [0, 1], with three digits."""
        low, high = self.factors
        value = min(self.default * low * (high / low) ** share, self.most)
        return max(1, round(value)) if self.whole else float(f"{value:.3g}")


def methods() -> dict[str, Method]:
    """All methods with a server: those of the package, and those that the user registered."""
    return {name: one for name, one in entries("method", METHODS).items() if one.has_server}


def timing_of(method: Method) -> registry.Name:
    """The name and the given options of a method's timing."""
    return registry.read("timing", str(method.timing or "every"))


def _rate(name: str, timing: registry.Name) -> Range:
    if name == "mixing":
        return MIXING
    if timing.name in ("cohort", "participation"):
        return RATE_OF_ROUNDS
    arrivals = timing.name == "every" or (timing.name == "fresh" and not {"size", "everyone"} & timing.options.keys())
    return RATE_OF_ARRIVALS if arrivals else RATE_OF_SUMS


def numbers_of(method: Method) -> dict[str, float]:
    """The options of a method's rule whose default is a number above 0, which ranges are factors of."""
    return {
        name: float(one.default)
        for name, one in options_of(factory_of(method.rule)).items()
        if isinstance(one.default, int | float) and not isinstance(one.default, bool) and one.default > 0
    }


def knobs(method: Method, lr: float, clients: int, search: Mapping[str, Range] | None = None) -> list[Knob]:
    """What may be tuned of a method, in order: the server's rate, its timing, the local rate, other options.

    ``search``: option -> factors, of a method of the user's own; these come first.
    """
    timing, options, numbers = timing_of(method), options_of(factory_of(method.rule)), numbers_of(method)
    found = [Knob(name, numbers[name], factors) for name, factors in (search or {}).items() if name in numbers]
    found += [Knob(name, numbers[name], _rate(name, timing)) for name in RATES if name in numbers]
    for name, value in _timing_numbers(timing).items():
        factors = COHORT_SIZES if timing.name == "cohort" else OF_TIMING[name]
        found.append(Knob(f"@{name}", value, factors, name != "length", clients if name == "size" else math.inf))
    found.append(Knob("lr", lr, LOCAL_RATE))
    found += [Knob(n, numbers[n], OF_RULE[n]) for n in numbers if n in OF_RULE and is_traced(options[n])]
    if method.proximal:
        found.append(Knob("proximal", method.proximal, OF_RULE["proximal"]))
    unique = {knob.name: knob for knob in reversed(found)}
    return [knob for knob in found if unique[knob.name] is knob]


def _timing_numbers(timing: registry.Name) -> dict[str, float]:
    """Option of the timing -> its number, of those that may be tuned."""
    given = ({"size": COHORT} if timing.name == "cohort" else {}) | timing.options
    return {name: float(value) for name, value in given.items() if name in OF_TIMING}


def radical_inverse(number: int, base: int) -> float:
    """The digits of ``number`` in ``base`` behind the point, in reverse (van der Corput).

    >>> [radical_inverse(k, 2) for k in (1, 2, 3)]
    [0.5, 0.25, 0.75]
    """
    value, place = 0.0, 1.0
    while number:
        place /= base
        number, digit = divmod(number, base)
        value += digit * place
    return value


class Point(NamedTuple):
    """A point of a method's space: its spec, and the local learning rate."""

    spec: str
    lr: float


TRIES = 8  # times as many points of the sequence are looked at as are wanted


def points(
    name: str,
    lr: float,
    clients: int,
    *,
    count: int,
    most_knobs: int,
    search: Mapping[str, Range] | None = None,
    fits: Callable[[Point], bool] = lambda point: True,
) -> list[Point]:
    """The points of a method: its default and the first ``count - 1`` of the Halton sequence for which ``fits`` holds.

    Fewer if ``TRIES * count`` of the sequence have not enough of them.
    """
    method = methods()[name]
    usual = lr if method.optimizer == "sgd" else method.lr
    found = [Point(name, usual)]
    tuned = knobs(method, usual, clients, search)[: min(most_knobs, len(PRIMES))]
    for number in range(1, TRIES * count):
        if len(found) == count:
            break
        values = {knob.name: knob.value(radical_inverse(number, base)) for knob, base in zip(tuned, PRIMES)}
        point = Point(spec(name, timing_of(method), values), values.get("lr", usual))
        found += [point] if fits(point) else []
    return found


def spec(name: str, timing: registry.Name, values: Mapping[str, Any]) -> str:
    """The method with these values; those of its timing begin with ``@``.

    >>> spec("fedbuff", registry.read("timing", "buffer:size=10"), {"server_lr": 0.38, "@size": 6, "lr": 0.05})
    'fedbuff:server_lr=0.38@buffer:size=6'
    """
    own = ",".join(f"{key}={value:g}" for key, value in values.items() if key[0] != "@" and key != "lr")
    moved = {key[1:]: f"{value:g}" for key, value in values.items() if key[0] == "@"}
    text = name + (f":{own}" if own else "")
    if not moved:
        return text
    return f"{text}@{timing.name}:" + ",".join(f"{key}={value}" for key, value in (timing.texts | moved).items())
