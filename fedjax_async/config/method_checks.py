"""Checks of method objects: each field of a ``Method``, and the factory of its local training."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from fedjax_async.base import check, factories, registry
from fedjax_async.base.method import GIVEN, LOCAL, Method, factory_of, ignored_by, positional
from fedjax_async.base.spec import Spec
from fedjax_async.clock import POLICIES, TIMINGS
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import objects
from fedjax_async.local import FEEDBACKS, OPTIMIZERS
from fedjax_async.peers import EXCHANGES, TOPOLOGIES
from fedjax_async.types import PeerAlgorithm, ServerAlgorithm

NODES = ("stays", "compressor")  # the positional parameters of factories of a ``PeerAlgorithm``


def check_factory(field: str, factory: Callable[..., object], options: Iterable[str] = ()) -> None:
    """``ValueError`` unless ``factory`` can be called as ``factory(model, *, ...)``; ``options``: besides ``GIVEN``."""
    found = list(inspect.signature(factory).parameters.values())
    named = [p for p in found if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    first = [p for p in found if p not in named]
    takes = f"f(model, *, ...) with keyword-only options: {', '.join(GIVEN)} come from the run"
    plain = inspect.Signature([p.replace(annotation=p.empty) for p in found])
    shown = f"{getattr(factory, '__name__', 'f')}{plain}"
    check.require(len(first) == 1, field, shown, takes)
    for p in named:
        lacks = p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in {*GIVEN, *options}
        check.require(not lacks, field, shown, f"{takes}; the option {p.name} needs a default")


def checked_method(given: Method) -> Method:
    """The method object; ``ValueError`` naming ``method.FIELD`` for a field that is out of range."""
    check.require(_is_rule(given.rule), "method.rule", objects.shown(factory_of(given.rule)), _RULE)
    for field in ("rule", "client"):
        _check_spec(f"method.{field}", getattr(given, field))
    check_fields(given, "method")
    _check_client(given)
    return given


_RULE = (
    "a ServerAlgorithm, a PeerAlgorithm, or a factory f(*, ...) of one, without a server f(stays, *, ...), or its Spec"
)


def _check_spec(field: str, spec: object) -> None:
    """``ValueError`` for a spec with positional arguments, which the run gives, or with an array as a number."""
    if not isinstance(spec, Spec):
        return
    check.require(not spec.args, f"arguments of {field}", spec.args, "left out: a spec of a method has options only")
    for option in spec.traced:
        value = spec.options[option]
        check.require(getattr(value, "shape", ()) == (), f"{field}: option {option}", value, "a single number")


def _is_rule(rule: object) -> bool:
    """Whether it is an algorithm, or a factory that a run can call."""
    if isinstance(rule, (ServerAlgorithm, PeerAlgorithm)):
        return True
    factory = factory_of(rule)
    return callable(factory) and tuple(positional(factory)) in ((), NODES[:1], NODES)


_CLOCKS: tuple[tuple[str, Mapping[str, Callable[..., object]], str], ...] = (
    ("timing", TIMINGS, "clock.TIMINGS"),
    ("exchange", EXCHANGES, "peers.EXCHANGES"),
    ("topology", TOPOLOGIES, "peers.TOPOLOGIES"),
)


def check_fields(given: Method, kind: str) -> None:
    """``ValueError`` naming ``KIND.FIELD`` for a field other than the rule that is out of range."""
    nodes = "the rule is of nodes without a server"
    for field, known, name in _CLOCKS:
        spec = getattr(given, field)
        if given.has_server is not (field == "timing"):
            allowed = f"left out: {nodes if field == 'timing' else 'the rule is of a server'}"
            check.require(spec is None, f"{kind}.{field}", spec, allowed)
            continue
        allowed = f"a text, a name of {name}; only a run takes an object"
        check.require(isinstance(spec, str), f"{kind}.{field}", spec, allowed)
        registry.spec(field, known, spec).make()  # checks the ranges
    check.require(given.has_server or given.policy is None, f"{kind}.policy", given.policy, f"left out: {nodes}")
    if given.policy is not None:
        check.require(isinstance(given.policy, str), f"{kind}.policy", given.policy, "a text, a name of clock.POLICIES")
        registry.spec("policy", POLICIES, given.policy).make()
    check.require(given.has_server or given.feedback is None, f"{kind}.feedback", given.feedback, f"left out: {nodes}")
    check.optional(check.one_of, f"{kind}.feedback", given.feedback, allowed=FEEDBACKS)
    check.require(_is_finite(given.proximal), f"{kind}.proximal", given.proximal, "a finite number >= 0")
    check.require(float(given.proximal) >= 0, f"{kind}.proximal", given.proximal, "a finite number >= 0")
    check.require(isinstance(given.optimizer, str), f"{kind}.optimizer", given.optimizer, "a text such as 'sgd'")
    check.require(_is_finite(given.lr), f"{kind}.lr", given.lr, "a finite number > 0")
    check.require(float(given.lr) > 0, f"{kind}.lr", given.lr, "a finite number > 0")
    registry.spec("optimizer", OPTIMIZERS, given.optimizer).make(float(given.lr))
    compress = given.compress is None or isinstance(given.compress, str)
    check.require(compress, f"{kind}.compress", given.compress, "None or a text such as 'topk:ratio=0.1'")
    if given.compress is not None:
        registry.spec("compress", COMPRESSORS, given.compress).make()
    check.require(isinstance(given.plain_sgd, bool), f"{kind}.plain_sgd", given.plain_sgd, "True or False")
    allowed = "a factory of a ClientAlgorithm, f(model, *, ...); an algorithm is given as client= of the run"
    check.require(callable(factory_of(given.client)), f"{kind}.client", objects.shown(given.client), allowed)


def _check_client(given: Method) -> None:
    """``ValueError`` for options of local training that its factory or the run cannot use."""
    client = given.client
    options = client.given if isinstance(client, Spec) else ()
    for name in options:
        check.require(name not in LOCAL, "method.client", name, "left out: settings of the run give it")
    check_factory("method.client", factory_of(client), options)
    for name in {"optimizer", "lr"} & {*ignored_by(factories.options_of(factory_of(client)))}:
        value, usual = getattr(given, name), Method._field_defaults[name]
        check.require(value == usual, f"method.{name}", value, f"left out: {_IGNORES}")


_IGNORES = "the factory method.client does not take it"


def _is_finite(value: Any) -> bool:
    """Whether it is a finite number or a scalar array of one."""
    if isinstance(value, bool) or (not isinstance(value, Real) and getattr(value, "shape", None) != ()):
        return False
    return math.isfinite(float(value))
