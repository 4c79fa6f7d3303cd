"""Methods without a server: which leaves stay with a node, its exchange, and what the two share."""

from __future__ import annotations

from functools import lru_cache

from fedjax_async.base import check, factories, registry
from fedjax_async.base.method import Method
from fedjax_async.base.spec import Spec
from fedjax_async.config import own
from fedjax_async.config.methods import client_spec, compressors, method_of, rule_spec
from fedjax_async.config.own import Chosen
from fedjax_async.models import STATISTICS
from fedjax_async.peers import EXCHANGES, Exchange
from fedjax_async.peers.exchanges import Alone
from fedjax_async.types import Model, Path, PeerAlgorithm, Stays


@lru_cache(maxsize=64)
def stays_of(model: Model) -> Stays:
    """Which leaves of a model stay with their node: running statistics and private leaves."""
    private = model.private

    def stays(path: Path) -> bool:
        return STATISTICS in path or (private is not None and private(path))

    return stays


def peer_of(chosen: Method, model: Model, compress: Chosen | None) -> Spec | PeerAlgorithm:
    """What the nodes of a run with this model do; ``compress``: the compressor of their messages, by its spec."""
    rule = rule_spec(chosen)
    return rule.but(args=(stays_of(model), *compressors(compress))) if isinstance(rule, Spec) else rule


def sends_nothing(spec: Chosen, setting: object) -> bool:
    """Whether the nodes of a method, with the exchange of the setting or else its own, send no messages."""
    return isinstance(exchange_of(method_of(spec), setting), Alone)


def exchange_of(chosen: Method, setting: object) -> Exchange:
    """The exchange of the setting, or else the method's, with the method's values of options that both take.

    Raises ``ValueError`` if the exchange's spec has another value for one of them.
    """
    given = own.thing_of("exchange", setting)
    if given is not None:
        return given
    spec = registry.spec("exchange", EXCHANGES, str(setting or chosen.exchange))
    rule = rule_spec(chosen)
    both = client_spec(chosen).options | (rule.options if isinstance(rule, Spec) else {})
    for option, value in both.items():
        if option in factories.options_of(spec.factory):
            have = spec.options_given().get(option, value)
            allowed = f"{value}, as in the method, which has the same option"
            check.require(have == value, f"exchange's {option}", have, allowed)
            spec = spec.put(option, value)
    made: Exchange = spec.make()
    return made
