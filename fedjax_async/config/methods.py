"""Methods by name: a server rule joined with its usual timing and local objective.

Methods without a server stand in the same registry; ``peer_methods.py`` resolves them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from fedjax_async import check, registry
from fedjax_async.clock import TIMINGS
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import earlier, misplaced, own, words
from fedjax_async.config.compositions import CLIENT, of_numbers, with_server_parts
from fedjax_async.config.settings import Settings
from fedjax_async.engine.components import Peer, ServerFamily
from fedjax_async.local import FEEDBACKS, OPTIMIZERS, local_training
from fedjax_async.peers import METHODS as PEER_METHODS
from fedjax_async.peers import PeerAlgorithm, PeerPreset
from fedjax_async.peers.methods import training
from fedjax_async.server import METHODS as SERVER_METHODS
from fedjax_async.server import Preset
from fedjax_async.spec import Spec
from fedjax_async.types import ClientAlgorithm, Path, ServerAlgorithm

METHODS: dict[str, Preset | PeerPreset] = {**SERVER_METHODS, **PEER_METHODS}
OF_BOTH = ("client", "plain_sgd", "optimizer", "lr")  # fields of presets and methods, with and without a server
Stays = Callable[[Path], bool]  # whether a leaf of the params stays with its node


class Method(NamedTuple):
    """A method as a run needs it; build one to run a rule of your own.

    ``timing`` is a spec such as ``"every"`` or ``"buffer:size=10"``. ``server`` may be a ``Spec`` of the rule's
    factory, ``Spec(fedbuff, server_lr=0.5)``, or a function of ``hyper`` that returns the rule: runs that differ only
    in these numbers share compiled programs. ``proximal`` is the weight mu of
    the local term ``(mu/2) ||w - w_0||^2``. ``compress``, ``feedback``, ``optimizer`` and ``lr`` are the defaults of
    the settings with these names.

    ``client`` is a factory of local training. It takes what it needs of ``model, *, optimizer, lr, batch_size,
    proximal, scale, per_example``, and ``client_options``, pairs of name and value. Its ``model`` decodes raw rows
    (images). What the factory does not take may not be set, here or in the settings: ``ValueError``. ``plain_sgd``
    says that the method only makes sense with plain SGD.
    """

    server: ServerAlgorithm | Spec | ServerFamily
    timing: str = "every"
    proximal: float = 0.0
    hyper: Mapping[str, float] = {}
    compress: str | None = None
    feedback: str | None = None
    client: Callable[..., ClientAlgorithm] = local_training
    client_options: tuple[tuple[str, Any], ...] = ()
    plain_sgd: bool = False
    optimizer: str = "sgd"
    lr: float = 0.01


class PeerMethod(NamedTuple):
    """A method without a server as a run needs it; build one to run peers of your own.

    ``peer``: a ``PeerAlgorithm``, a function of ``hyper`` that returns one, ``f(stays)`` that returns either, or a
    ``Spec`` of a factory ``f(stays, *, ...)``. ``stays(path)`` says whether a leaf of the params stays with its node.
    ``exchange`` and ``topology`` are specs such as ``"push_sum:policy=merge"`` and ``"gossip:receivers=4"``, the
    defaults of the settings with these names; so is ``compress``, for methods that compress their messages. ``shared``:
    options that the exchange takes too, with the values that it must have. The rest is as in :class:`Method`.
    """

    peer: Peer | Spec | Callable[[Stays], Peer]
    exchange: str = "push_sum"
    topology: str = "gossip"
    proximal: float = 0.0
    hyper: Mapping[str, float] = {}
    compress: str | None = None
    client: Callable[..., ClientAlgorithm] = training
    client_options: tuple[tuple[str, Any], ...] = ()
    plain_sgd: bool = False
    optimizer: str = "sgd"
    lr: float = 0.01
    shared: Mapping[str, Any] = {}


Chosen = TypeVar("Chosen", bound=Method | PeerMethod)
# options of local training that every run gives
GIVEN = ("optimizer", "lr", "batch_size", "proximal", "scale", "per_example")
LOCAL = (*GIVEN, "correct")  # options of local training that a method cannot set


def method_options(name: str) -> dict[str, Any]:
    """Option -> default of a method: options of its rule (or nodes) and of its local training, and ``proximal``.

    Raises ``ValueError`` for an unknown method.
    """
    preset: Preset | PeerPreset = registry.find("method", METHODS, name)
    defaults = {key: parameter.default for key, parameter in registry.options_of(rule_factory(preset)).items()}
    own = {key: parameter.default for key, parameter in client_options(preset.client).items()}
    return own | defaults | {"proximal": preset.proximal}


def rule_factory(preset: Preset | PeerPreset) -> Callable[..., Any]:
    """The factory of a method's server rule, or of what its nodes do."""
    return preset.peer if isinstance(preset, PeerPreset) else preset.server


def is_decentralised(usual: Any) -> bool:
    """Whether an entry of ``METHODS``, or a method object, runs without a server."""
    return isinstance(usual, (PeerPreset, PeerMethod))


def client_options(client: Callable[..., ClientAlgorithm]) -> dict[str, inspect.Parameter]:
    """The options of local training that belong to the method; the run's settings give the others."""
    return {key: parameter for key, parameter in registry.options_of(client).items() if key not in LOCAL}


def brings_timing(spec: str) -> bool:
    """Whether a method's spec has a timing (or exchange) of its own: ``fedbuff@buffer:size=5``."""
    return own.thing_of("method", spec) is None and "@" in spec


def preset_of(spec: str) -> Preset | PeerPreset | Method | PeerMethod:
    """The entry of ``METHODS`` that a spec names, or the method object itself."""
    if (given := own.thing_of("method", spec)) is not None:
        return given if isinstance(given, PeerMethod) else checked_method(given)
    name, _ = registry.parse_spec("method", rule_of(spec), METHODS)
    preset: Preset | PeerPreset = registry.find("method", METHODS, name)
    return preset


def rule_of(spec: str) -> str:
    """The rule of a method's spec, with its options, without parts and timing."""
    return own.parts_of("method", spec.partition("@")[0])[0]


# Setting of local training -> the options of a factory that carry it.
THROUGH = {"optimizer": {"optimizer"}, "lr": {"optimizer", "lr"}, "decay": {"scale"}}


def ignored_by(takes: Collection[str], *, plain_sgd: bool = False) -> list[str]:
    """The settings that local training with the options ``takes`` would ignore.

    ``plain_sgd``: then ``training_of`` refuses other optimisers with another message, so they are not listed here.
    """
    refused = {"optimizer"} if plain_sgd else set()
    return [name for name, through in THROUGH.items() if not through & {*takes} and name not in refused]


def check_factory(field: str, factory: Callable[..., Any], options: Iterable[str] = ()) -> None:
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


def with_factory(chosen: Chosen, factory: Callable[..., ClientAlgorithm]) -> Chosen:
    """The method with local training by a factory of the user's own."""
    check_factory("client", factory)
    return _with_local(chosen, own.lasting(factory), {})


def registered_client(spec: str) -> tuple[Callable[..., ClientAlgorithm], dict[str, Any]]:
    """The factory that the user registered under the name of a spec, and the spec's options."""
    name, options = registry.parse_spec("client", spec, {})
    known = registry.entries("client", {})
    allowed = "a name registered for local training of your own (the number of clients is 'clients')"
    check.require(bool(known), "client", spec, allowed)
    return registry.find("client", {}, name), options


def with_client(chosen: Chosen, spec: str) -> Chosen:
    """The method with local training by the registered factory that a spec names."""
    factory, options = registered_client(spec)
    name = spec.partition(":")[0]
    for option in options:
        registry.find(f"option of client {name}", client_options(factory), option)
    check_factory(f"client {name}", factory, options)
    return _with_local(chosen, factory, options)


def _with_local(chosen: Chosen, factory: Callable[..., ClientAlgorithm], options: Mapping[str, Any]) -> Chosen:
    hyper = {name: value for name, value in chosen.hyper.items() if not name.startswith(CLIENT)}
    pairs = tuple(options.items())
    return chosen._replace(client=factory, client_options=pairs, hyper=hyper, plain_sgd=False)  # type: ignore[return-value]


def checked_method(given: Any) -> Method:
    """The method object; ``ValueError`` for a field that is out of range."""
    found: Method = given
    _check_method(found)
    return found


def check_fields(given: Method | Preset, kind: str) -> None:
    """``ValueError`` naming ``KIND.FIELD`` for a field of both ``Method`` and ``Preset`` that is out of range."""
    check.require(isinstance(given.timing, str), f"{kind}.timing", given.timing, "a text such as 'every'")
    registry.bind("timing", TIMINGS, given.timing)()
    check_local_fields(given, kind)
    check.optional(check.one_of, f"{kind}.feedback", given.feedback, allowed=FEEDBACKS)


def check_local_fields(given: Method | Preset | PeerMethod, kind: str) -> None:
    """``ValueError`` naming ``KIND.FIELD`` for a field of local training or compression that is out of range."""
    check.require(_is_finite(given.proximal), f"{kind}.proximal", given.proximal, "a finite number >= 0")
    check.require(float(given.proximal) >= 0, f"{kind}.proximal", given.proximal, "a finite number >= 0")
    check.require(isinstance(given.optimizer, str), f"{kind}.optimizer", given.optimizer, "a text such as 'sgd'")
    check.require(_is_finite(given.lr), f"{kind}.lr", given.lr, "a finite number > 0")
    check.require(float(given.lr) > 0, f"{kind}.lr", given.lr, "a finite number > 0")
    registry.bind("optimizer", OPTIMIZERS, given.optimizer)(float(given.lr))
    compress = given.compress is None or isinstance(given.compress, str)
    check.require(compress, f"{kind}.compress", given.compress, "None or a text such as 'topk:ratio=0.1'")
    if given.compress is not None:
        registry.bind("compress", COMPRESSORS, given.compress)()
    check.require(isinstance(given.plain_sgd, bool), f"{kind}.plain_sgd", given.plain_sgd, "True or False")
    allowed = "a factory of a ClientAlgorithm, f(model, *, ...); an algorithm is given as client= of the run"
    check.require(callable(given.client), f"{kind}.client", own.shown(given.client), allowed)


def _check_method(given: Method) -> None:
    """``ValueError`` for a field of a ``Method`` that is out of range, naming it as ``method.FIELD``."""
    allowed = "a ServerAlgorithm, or a function of hyper (call a factory: Method(f()))"
    check.require(_is_server(given.server), "method.server", own.shown(given.server), allowed)
    check_fields(given, "method")
    check_local_options(given)
    unread = [name for name in given.hyper if not name.startswith("client.")]
    read = callable(given.server) or not unread
    check.require(read, "method.hyper", given.hyper, "left out: method.server is a rule, not a function of hyper")


def check_local_options(given: Method | PeerMethod) -> None:
    """``ValueError`` for options of local training, static or in ``hyper``, that its factory or the run cannot use."""
    numbers = isinstance(given.hyper, Mapping)
    numbers = numbers and all(isinstance(name, str) and _is_finite(value) for name, value in given.hyper.items())
    check.require(numbers, "method.hyper", given.hyper, "a mapping, name -> finite number")
    pairs = isinstance(given.client_options, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in given.client_options
    )
    check.require(pairs, "method.client_options", given.client_options, "a tuple of pairs, (name, value)")
    for name, _ in given.client_options:
        check.require(name not in LOCAL, "method.client_options", name, "left out: settings of the run give it")
        registry.find("option of method.client", client_options(given.client), name)
    traced = [name.removeprefix("client.") for name in given.hyper if name.startswith("client.")]
    for name in traced:
        check.require(name not in LOCAL, "method.hyper", f"client.{name}", "left out: settings of the run give it")
    check_factory("method.client", given.client, [*traced, *(name for name, _ in given.client_options)])
    for name in {"optimizer", "lr"} & {*ignored_by(registry.options_of(given.client))}:
        value, usual = getattr(given, name), type(given)._field_defaults[name]
        check.require(value == usual, f"method.{name}", value, f"left out: {_IGNORES}")


_IGNORES = "the factory method.client does not take it"


def _is_server(thing: Any) -> bool:
    """Whether it is a server rule, a spec of one, or a function that can be called with ``hyper`` alone."""
    if isinstance(thing, (ServerAlgorithm, Spec)) or not callable(thing):
        return isinstance(thing, (ServerAlgorithm, Spec))
    try:
        inspect.signature(thing).bind({})
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _is_finite(value: Any) -> bool:
    """Whether it is a finite number or a scalar array of one."""
    if isinstance(value, bool) or (not isinstance(value, Real) and getattr(value, "shape", None) != ()):
        return False
    return math.isfinite(float(value))


def local_options(spec: str) -> list[str]:
    """The options of local training that a method sets: another client algorithm would ignore them."""
    if own.thing_of("method", spec) is not None:
        chosen: Any = preset_of(spec)
        traced = [name.removeprefix("client.") for name in chosen.hyper if name.startswith("client.")]
        return [*(name for name, _ in chosen.client_options), *traced]
    _, options = registry.parse_spec("method", rule_of(spec), METHODS)
    preset: Any = preset_of(spec)
    of_rule = registry.options_of(rule_factory(preset))
    return [name for name in options if name != "proximal" and name not in of_rule]


def owner_of(spec: str, option: str, value: str) -> misplaced.Place | None:
    """What takes an option: the rule of a method's spec, or what else belongs to it; None if nothing does."""
    rule = rule_of(spec)
    if option in method_options(registry.parse_spec("method", rule)[0]):
        return misplaced.Place("the method", "method", [misplaced.with_text(spec, option, value)])
    return misplaced.elsewhere(spec, preset_of(spec), option, value)


def _refuse_option(spec: str, option: str, known: Collection[str]) -> None:
    """``ValueError`` that says where an option belongs, or what it is called here, if a method's rule has it not."""
    preset, kind = preset_of(spec), f"option of {registry.parse_spec('method', rule_of(spec))[0]}"
    called = words.OPTION.get(option, option)
    check.require(called not in known, kind, option, f"called {called}")
    without, text = misplaced.without(spec, option)
    if (place := misplaced.elsewhere(without, preset, option, text)) is not None:
        raise ValueError(f"{kind} = {option!r}: must be an option of {place.text(misplaced.in_spec)}")


def parsed(spec: str, what: str) -> tuple[str, dict[str, Any], str]:
    """Name, options and own timing or exchange of a method's spec; ``ValueError`` for unknown options.

    ``what``: ``"TIMING"`` or ``"EXCHANGE"``, for the message.
    """
    rule, own_one = rule_of(spec), spec.partition("@")[2]
    name, options = registry.parse_spec("method", rule, METHODS)
    preset = registry.find("method", METHODS, name)
    check.non_negative("proximal", options.get("proximal", preset.proximal))
    check.require(not rule.endswith(":"), "method", spec, f"without the colon where no options follow: {name}")
    check.require("@" not in spec or bool(own_one), "method", spec, f"METHOD or METHOD@{what}")
    known = method_options(name)
    for key in options:
        if key not in known:
            _refuse_option(spec, key, known)
        setting = key in Settings.__dataclass_fields__ and key not in known
        check.require(not setting, f"option {key} of {name}", options[key], f"left out: {key} is a setting of the run")
        registry.find(f"option of {name}", known, key)
    return name, options, own_one


def method(spec: str) -> Method:
    """The method of a spec such as ``"fedasync:mixing=0.8"`` or ``"fedbuff@buffer:size=5"``.

    Options are those of the server rule, and ``proximal``, the weight mu of the local term
    ``(mu/2) ||w - w_0||^2``. A ``+`` joins server parts (``server.PARTS``): ``"fedbuff+swa:start=0.5"``. An ``@`` sets
    the timing in place of the method's default. Raises ``ValueError`` for unknown names and values out of range.

    >>> method("fedprox").timing, method("fedprox:proximal=0.1+swa@every").timing
    ('cohort', 'every')
    """
    name, options, timing = parsed(spec, "TIMING")
    preset = registry.find("method", METHODS, name)
    check.require(not is_decentralised(preset), "method", spec, "a method with a server")
    proximal = options.pop("proximal", preset.proximal)
    of_server = registry.options_of(preset.server)
    rule_options = {key: value for key, value in options.items() if key in of_server}
    rule = registry.made("method", name, lambda: preset.server(**rule_options))  # checks their ranges
    hint = "timing, client, ... of a Method are arguments of register"
    hint = f"of nodes without a server: def {name}(stays, *, ...)" if isinstance(rule, PeerAlgorithm) else hint
    allowed = f"a factory of a ServerAlgorithm ({hint})"
    check.require(isinstance(rule, ServerAlgorithm), f"method {name}", own.shown(rule), allowed)
    server = Spec(preset.server, **rule_options).within("server", name=name)
    if parts := own.parts_of("method", spec.partition("@")[0])[1:]:
        server = with_server_parts(server, parts)
        try:
            server.make()
        except ValueError as error:
            raise ValueError(f"method = {spec!r}: {error}") from error
    of_client = client_options(preset.client)  # which may have options of the rule's names
    local = tuple((key, value) for key, value in options.items() if key in of_client)
    usual = {field: getattr(preset, field) for field in ("compress", "feedback", *OF_BOTH)}
    return Method(server, timing or preset.timing, proximal, client_options=local, **usual)


def server_of(chosen: Method) -> Spec | ServerAlgorithm:
    """The server rule of a method as a spec: also of a function of ``hyper``, with its numbers."""
    if isinstance(chosen.server, (Spec, ServerAlgorithm)):
        return chosen.server
    return of_numbers(chosen.server, chosen.hyper)


def client_of_method(chosen: Method | PeerMethod) -> Spec:
    """The factory of local training with the options that the method gives; a run gives the others (``LOCAL``)."""
    traced = {name.removeprefix(CLIENT): value for name, value in chosen.hyper.items() if name.startswith(CLIENT)}
    return Spec(chosen.client, **dict(chosen.client_options), **traced).within("client").later(*LOCAL)


@registry.cached_by_name(maxsize=64)
def _method_of(spec: str) -> Method:
    return method(spec)


def method_of(spec: str) -> Method:
    """The method of a spec, or the object that the setting holds.

    Equal specs give the same object, so that their runs share compiled programs.
    """
    given = own.thing_of("method", spec)
    return _method_of(earlier.meaning_of(spec)) if given is None else own.lasting(checked_method(given))
