"""Methods without a server: what a node does, joined with its usual exchange, topology and local training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fedjax_async import check, registry
from fedjax_async.clock import EXCHANGES, TOPOLOGIES, Exchange
from fedjax_async.clock.exchanges import Alone
from fedjax_async.compress import Compressor
from fedjax_async.config import own
from fedjax_async.config.compositions import of_numbers
from fedjax_async.config.methods import (
    LOCAL,
    METHODS,
    OF_BOTH,
    PeerMethod,
    Stays,
    check_local_fields,
    check_local_options,
    client_options,
    parsed,
)
from fedjax_async.models import STATISTICS
from fedjax_async.peers import PeerAlgorithm, PeerPreset
from fedjax_async.spec import Spec
from fedjax_async.types import Model, Path

# --- the method of a spec -----------------------------------------------------------------------------


@registry.cached_by_name(maxsize=64)
def _peer_method(spec: str, compress: str | None) -> PeerMethod:
    name, options, exchange = parsed(spec, "EXCHANGE")
    parts = own.parts_of("method", spec.partition("@")[0])[1:]
    check.require(not parts, "part", "+".join(parts), f"left out: {name} runs without a server")
    preset: PeerPreset = registry.find("method", METHODS, name)
    proximal = float(options.pop("proximal", preset.proximal))
    of_peer = registry.options_of(preset.peer)
    made = {key: value for key, value in options.items() if key in of_peer}
    peer = Spec(preset.peer, **made).within("peer", name=name)
    of_client = client_options(preset.client)
    local = tuple((key, value) for key, value in options.items() if key in of_client)
    shared = {**Spec(preset.client, **dict(local)).later(*LOCAL).options, **peer.options}
    usual = {field: getattr(preset, field) for field in ("topology", "compress", *OF_BOTH)}
    of_method: dict[str, Any] = {"proximal": proximal, "client_options": local, "shared": shared}
    chosen = PeerMethod(peer, exchange or preset.exchange, **of_method, **usual)
    one = registry.made(
        "method", name, lambda: preset.peer(_nothing, *_compressors(compress or preset.compress), **made)
    )
    allowed = "a factory of a PeerAlgorithm (exchange, topology, client, ... are arguments of register)"
    check.require(isinstance(one, PeerAlgorithm), f"method {name}", own.shown(one), allowed)
    return chosen


def _nothing(path: Path) -> bool:
    del path
    return False


def _compressors(spec: str | None) -> list[Compressor]:
    """The compressor of the messages, if there is one."""
    return [] if spec is None else [_compressor(spec)]


@registry.cached_by_name(maxsize=64)
def _compressor(spec: str) -> Compressor:
    from fedjax_async.config.clients import compressor_of  # noqa: PLC0415 (needed only with compression)

    return own.lasting(compressor_of(spec))  # type: ignore[no-any-return]


def peer_method_of(spec: str, compress: str | None = None) -> PeerMethod:
    """The decentralised method of a spec, or the object that the setting holds; ``compress``: the compressor's spec.

    ``pushcen:k=16@push_sum:policy=merge``: options of nodes and local training, and after an ``@`` the exchange. Equal
    specs give the same object, so that their runs share compiled programs.
    """
    given = own.thing_of("method", spec)
    if given is None:
        return _peer_method(spec, compress)
    _check_peer_method(given)
    return own.lasting(given)  # type: ignore[no-any-return]


def _check_peer_method(given: PeerMethod) -> None:
    """``ValueError`` for a field of a ``PeerMethod`` that is out of range, naming it as ``method.FIELD``."""
    allowed = "a PeerAlgorithm, a function of hyper, or f(stays) that returns either"
    good = isinstance(given.peer, PeerAlgorithm) or callable(given.peer)
    check.require(good, "method.peer", own.shown(given.peer), allowed)
    check_exchange("method", given.exchange, given.topology)
    check_local_fields(given, "method")
    check_local_options(given)


def check_exchange(kind: str, exchange: Any, topology: Any) -> None:
    """``ValueError`` unless both are usable specs, naming them as ``KIND.exchange`` and ``KIND.topology``."""
    usual = (("exchange", exchange, "EXCHANGES", EXCHANGES), ("topology", topology, "TOPOLOGIES", TOPOLOGIES))
    for field, spec, name, known in usual:
        allowed = f"a text, a name of clock.{name}; only a run takes an object"
        check.require(isinstance(spec, str), f"{kind}.{field}", spec, allowed)
        registry.bind(field, known, spec)()  # checks the ranges


# --- the objects of a run ---------------------------------------------------------------------------


@lru_cache(maxsize=64)
def stays_of(model: Model) -> Stays:
    """Which leaves of a model stay with their node: running statistics and private leaves."""
    private = model.private

    def stays(path: Path) -> bool:
        return STATISTICS in path or (private is not None and private(path))

    return stays


def peer_of(chosen: PeerMethod, model: Model, compress: str | None) -> Spec | PeerAlgorithm:
    """What the nodes of a run with this model do; ``compress``: the compressor of their messages, by its spec."""
    found: Any = chosen.peer
    stays = stays_of(model)
    if isinstance(found, Spec):
        return found.on(stays, *_compressors(compress))
    found = _with_stays(found, stays) if callable(found) and _takes_stays(found) else found
    if isinstance(found, PeerAlgorithm):
        return found
    return of_numbers(found, chosen.hyper)


@lru_cache(maxsize=64)
def _with_stays(function: Callable[[Stays], Any], stays: Stays) -> Any:
    return function(stays)


def _takes_stays(function: Callable[..., Any]) -> bool:
    """Whether its first argument is ``stays``; a function of hyperparameters takes ``hyper``."""
    return next(iter(inspect.signature(function).parameters), None) == "stays"


def sends_nothing(spec: str, setting: Any) -> bool:
    """Whether the nodes of a method, with the exchange of the setting or else its own, send no messages."""
    return isinstance(exchange_of(peer_method_of(spec), setting), Alone)


def exchange_of(chosen: PeerMethod, setting: Any) -> Exchange:
    """The exchange of the setting, or else the method's, with the method's values of options that both take.

    Raises ``ValueError`` if the exchange's spec has another value for one of them.
    """
    given = own.thing_of("exchange", setting)
    if given is not None:
        return given  # type: ignore[no-any-return]
    spec = setting or chosen.exchange
    name, options = registry.parse_spec("exchange", spec, EXCHANGES)
    known = registry.options_of(registry.find("exchange", EXCHANGES, name))
    shared = {option: value for option, value in chosen.shared.items() if option in known}
    for option, value in shared.items():
        have = options.get(option, value)
        check.require(
            have == value, f"exchange's {option}", have, f"{value}, as in the method, which has the same option"
        )
    made: Exchange = registry.bind("exchange", EXCHANGES, spec, **shared)()
    return made
