"""Methods by name, and method objects of the user's own: one ``Method`` each, with or without a server.

``method_checks.py`` checks method objects, ``peer_methods.py`` has what only nodes need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

from fedjax_async.base import check, factories, registry
from fedjax_async.base.method import LOCAL, Method, client_options, factory_of
from fedjax_async.base.spec import Spec
from fedjax_async.compress import COMPRESSORS, Compressor
from fedjax_async.config import misplaced, objects, own, words
from fedjax_async.config.earlier import Earlier
from fedjax_async.config.method_checks import check_factory, checked_method
from fedjax_async.config.names import Names, read, texts_in
from fedjax_async.config.own import Chosen
from fedjax_async.config.registries import METHODS, filled
from fedjax_async.config.settings import Settings
from fedjax_async.local import local_training
from fedjax_async.server import PARTS, Part, with_parts
from fedjax_async.types import ClientAlgorithm, PeerAlgorithm, ServerAlgorithm


def method_options(name: str) -> dict[str, object]:
    """Option -> default of a method: options of its rule (or nodes) and of its local training, and ``proximal``.

    Raises ``ValueError`` for an unknown method.
    """
    usual: Method = registry.find("method", METHODS, name)
    defaults = {key: parameter.default for key, parameter in factories.options_of(factory_of(usual.rule)).items()}
    own = {key: parameter.default for key, parameter in client_options(usual.client).items()}
    own |= {key: value for key, value in client_spec(usual).options.items() if key in own}
    return own | defaults | {"proximal": usual.proximal}


def brings_timing(spec: Chosen) -> bool:
    """Whether a method's spec has a timing (or exchange) of its own: ``fedbuff@buffer:size=5``."""
    return isinstance(spec, str) and "@" in spec


def usual_of(spec: Chosen) -> Method:
    """The entry of ``METHODS`` that a spec names, or the method object itself, checked."""
    if (given := own.thing_of("method", spec)) is not None:
        return checked_method(filled(given if isinstance(given, Method) else Method(given)))
    found: Method = registry.find("method", METHODS, read("method", str(spec)).parts[0].name)
    return found


def with_factory(chosen: Method, client: Spec | Callable[..., ClientAlgorithm]) -> Method:
    """The method with local training by a factory of the user's own, or its spec."""
    check_factory("client", factory_of(client), client.given if isinstance(client, Spec) else ())
    return chosen._replace(client=own.lasting(client), plain_sgd=False)


def registered_client(text: str) -> Spec:
    """Local training by the factory that the user registered under the name in a text, with its options."""
    part = registry.read("client", text, {})
    allowed = "a name registered for local training of your own (the number of clients is 'clients')"
    check.require(bool(registry.entries("client", {})), "client", text, allowed)
    factory: Callable[..., ClientAlgorithm] = registry.find("client", {}, part.name)
    for option in part.texts:
        registry.find(f"option of client {part.name}", client_options(factory), option)
    check_factory(f"client {part.name}", factory, part.texts)
    return Spec(factory, **part.options)


def local_options(spec: Chosen) -> list[str]:
    """The options of local training that a method sets: another client algorithm would ignore them."""
    if own.thing_of("method", spec) is not None:
        client = usual_of(spec).client
        return [*client.given] if isinstance(client, Spec) else []
    of_rule = factories.options_of(factory_of(usual_of(spec).rule))
    return [name for name in read("method", str(spec)).parts[0].texts if name != "proximal" and name not in of_rule]


def owner_of(spec: str, option: str, value: str) -> misplaced.Place | None:
    """What takes an option: the rule of a method's spec, or what else belongs to it; None if nothing does."""
    names = read("method", spec)
    rule = names.parts[0]
    if option in method_options(rule.name):
        return misplaced.Place("the method", "method", [str(names.put(0, rule.put(option, value)))])
    return misplaced.elsewhere(names, usual_of(spec), option, value)


def _require_options(names: Names, usual: Method) -> None:
    """``ValueError`` for options that the rule of a method does not have; it says where an option belongs."""
    rule = names.parts[0]
    known, kind = method_options(rule.name), f"option of {rule.name}"
    for option in [each for each in rule.texts if each not in known]:
        called = words.OPTION.get(option, option)
        check.require(called not in known, kind, option, f"called {called}")
        without = names.put(0, rule.without((option,)))
        if (place := misplaced.elsewhere(without, usual, option, rule.texts[option])) is not None:
            raise ValueError(f"{kind} = {option!r}: must be an option of {place.text(misplaced.in_spec)}")
        setting = option in Settings.__dataclass_fields__
        allowed = f"left out: {option} is a setting of the run"
        check.require(not setting, f"option {option} of {rule.name}", rule.options[option], allowed)
        registry.find(kind, known, option)


@registry.cached_by_name(maxsize=64)
def method(spec: str) -> Method:
    """The method of a spec such as ``"fedasync:mixing=0.8"``, ``"fedbuff@buffer:size=5"`` or ``"pushcen:k=16@mean"``.

    Options are those of the rule (of the server, or of each node) and of local training, and ``proximal``, the weight
    mu of the local term ``(mu/2) ||w - w_0||^2``. A ``+`` joins server parts (``server.PARTS``):
    ``"fedbuff+swa:start=0.5"``. An ``@`` sets the timing, without a server the exchange, in place of the method's
    default. Raises ``ValueError`` for unknown names and values out of range.

    >>> method("fedprox").timing, method("fedprox:proximal=0.1+swa@every").timing
    ('cohort', 'every')
    """
    names = read("method", spec)
    first, *parts = names.parts
    name, options = first.name, first.options
    usual: Method = registry.find("method", METHODS, name)
    proximal = options.pop("proximal", usual.proximal)
    check.non_negative("proximal", proximal)
    colon = texts_in("method", spec)[0][0].endswith(":")
    check.require(not colon, "method", spec, f"without the colon where no options follow: {name}")
    clock = None if names.clock is None else str(names.clock)
    check.require(clock != "", "method", spec, f"METHOD or METHOD@{'TIMING' if usual.has_server else 'EXCHANGE'}")
    if first.texts:
        _require_options(names, usual)
    factory, of_client = factory_of(usual.rule), client_options(usual.client)  # which may share options
    of_rule = factories.options_of(factory)
    for key, value in options.items() if name in registry.ADDED.get("method", {}) else ():
        registry.require_kind(f"method = {spec!r}: {key}", value, (of_client | of_rule)[key])
    rule = Spec(factory, **{key: value for key, value in options.items() if key in of_rule})
    rule = rule.but(scope="server" if usual.has_server else "peer", name=name)
    _check_made(name, rule, usual)  # checks the ranges
    allowed = f"left out: {name} runs without a server"
    check.require(usual.has_server or not parts, "part", "+".join(map(str, parts)), allowed)
    if parts:
        rule = with_server_parts(rule, map(str, parts))
        try:
            rule.make()
        except ValueError as error:
            raise ValueError(f"method = {spec!r}: {error}") from error
    before = usual.client.options_given() if isinstance(usual.client, Spec) else {}
    local = before | {key: value for key, value in options.items() if key in of_client}
    client = Spec(factory_of(usual.client), **local)
    found = usual._replace(rule=rule, client=client, proximal=proximal)
    if clock is None:
        return found
    return found._replace(timing=clock) if usual.has_server else found._replace(exchange=clock)


def require_joint(chosen: Method, timing: Spec) -> None:
    """``ValueError`` if rule and timing have different values of the option that they share (``joint``)."""
    option = chosen.joint
    rules = (chosen.rule, *chosen.rule.args) if isinstance(chosen.rule, Spec) else ()  # with parts, the first argument
    for rule in rules:
        if isinstance(rule, Spec) and option in rule.options and option in timing.options:
            have, want = rule.options[option], timing.options[option]
            allowed = f"{want:g}, as in its timing {timing}: give both the same one"
            check.require(have == want, f"{option} of {rule.name}", have, allowed)


def with_server_parts(rule: Spec, texts: Iterable[str]) -> Spec:
    """The spec of a rule with the server parts that these texts name; ``ValueError`` for wrong names and values."""
    found: dict[str, Spec] = {}
    for text in texts:
        part = registry.spec("part", PARTS, text)
        part.make()  # checks the ranges
        check.require(part.name not in found, "part", part.name, "given once")
        found[part.name] = part.but(scope=f"{rule.scope}.{part.name}")
    return Spec(_with_parts, rule.later(), *found.values(), names=tuple(found))


def _with_parts(rule: functools.partial[ServerAlgorithm], *parts: Part, names: tuple[str, ...]) -> ServerAlgorithm:
    return with_parts(rule.func, dict(zip(names, parts, strict=True)))(**rule.keywords)


def _check_made(name: str, rule: Spec, usual: Method) -> None:
    """``ValueError`` unless the factory of a registered method makes the algorithm that it shall."""
    kind = ServerAlgorithm if usual.has_server else PeerAlgorithm
    given = () if usual.has_server else (_nothing, *compressors(usual.compress))
    own_factory = name in registry.ADDED.get("method", {})
    found = rule.but(kind="method" if own_factory else "", own=own_factory, args=given).make()
    if isinstance(found, kind):
        return
    hint = "timing, client, ... of a Method are arguments of register"
    hint = f"of nodes without a server: def {name}(stays, *, ...)" if isinstance(found, PeerAlgorithm) else hint
    allowed = f"a factory of a {kind.__name__} ({hint})"
    check.require(False, f"method {name}", objects.shown(found), allowed)


def _nothing(path: object) -> bool:
    del path
    return False


def compressor_of(spec: Chosen) -> Compressor:
    """The compressor that a spec names, or the object itself; ``ValueError`` for anything else."""
    given = own.thing_of("compress", spec)
    if given is None:
        given = registry.spec("compress", COMPRESSORS, str(spec)).make()
    check.require(isinstance(given, Compressor), "compress", objects.shown(given), "a name or a Compressor")
    for name in ("compress", "decompress", "bits", "error"):
        function = getattr(given, name)
        known = callable(function) or (name == "error" and function is None)
        check.require(known, f"compress.{name}", function, "a function")
    check.one_of("compress.feedback", given.feedback, [True, False])
    return cast(Compressor, given)


def compressors(setting: Chosen | None) -> list[Spec | Compressor]:
    """The compressor of a node's messages, if there is one; its numbers do not vary within a program."""
    if setting is None:
        return []
    made = compressor_of(setting)
    if own.thing_of("compress", setting) is not None:
        return [own.lasting(made)]
    return [registry.spec("compress", COMPRESSORS, str(setting)).but(traced=())]


def rule_spec(chosen: Method) -> Any:
    """The rule of a method as a ``Spec``, or the algorithm itself: a ``ServerAlgorithm`` or a ``PeerAlgorithm``."""
    rule = chosen.rule
    if isinstance(rule, (ServerAlgorithm, PeerAlgorithm)):
        return rule
    spec = rule if isinstance(rule, Spec) else Spec(rule)
    return spec if spec.scope or spec.args else spec.but(scope="server" if chosen.has_server else "peer")


def client_spec(chosen: Method) -> Spec:
    """The factory of local training with the options that the method gives; a run gives the others (``LOCAL``)."""
    client = chosen.client
    spec = client if isinstance(client, Spec) else Spec(client or local_training)
    return spec.but(scope="client").later(*LOCAL)


def method_of(spec: Chosen) -> Method:
    """The method of a spec, or the object that the setting holds."""
    if isinstance(spec, str):
        return method(spec.meaning if isinstance(spec, Earlier) else spec)
    return own.lasting(usual_of(spec))
