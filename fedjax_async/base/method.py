"""A method: a rule of the server, or of each node, joined with its usual timing and local training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from fedjax_async.base.factories import options_of
from fedjax_async.base.spec import Spec
from fedjax_async.types import ClientAlgorithm, PeerAlgorithm, ServerAlgorithm


class Method(NamedTuple):
    """A method as a run needs it; build one to run a rule of your own: ``Method(Spec(fair, limit=2))``.

    ``rule``: a ``ServerAlgorithm``; without a server a ``PeerAlgorithm``, what each node does; or a factory of one, or
    the ``Spec`` of a factory, whose options sweeps vary (``method.limit``). A factory has keyword-only options; one of
    nodes is ``f(stays, *, ...)``, with a compressor too if it compresses its messages, and ``stays(path)`` says whether
    a leaf of the params stays with its node.

    ``timing`` (default ``"every"``), or without a server ``exchange`` (``"push_sum"``) and ``topology``
    (``"gossip"``): specs such as ``"buffer:size=10"``, the defaults of the settings with these names; so are
    ``policy`` (with a server: what decides during the run), ``compress``, ``feedback``, ``optimizer`` and ``lr``.
    ``proximal`` is the weight mu of the local term
    ``(mu/2) ||w - w_0||^2``.

    ``client`` is a factory of local training, or its ``Spec`` (default: ``local.local_training``; nodes keep the
    state of their optimiser). It takes what it needs of ``model, *, optimizer, lr, batch_size, proximal, scale,
    per_example``, and its options. Its ``model`` decodes raw rows (images). What the factory does not take may not be
    set, here or in the settings: ``ValueError``. ``plain_sgd`` says that the method only makes sense with plain SGD.
    Rule and client have their options by themselves; of a registered method, an option that both take (and without a
    server the exchange) has one value for all.
    """

    rule: Spec | ServerAlgorithm | PeerAlgorithm | Callable[..., object]
    timing: str | None = None
    proximal: float = 0.0
    compress: str | None = None
    feedback: str | None = None
    client: Spec | Callable[..., ClientAlgorithm] | None = None
    plain_sgd: bool = False
    optimizer: str = "sgd"
    lr: float = 0.01
    exchange: str | None = None
    topology: str | None = None
    policy: str | None = None
    about: str = ""  # one line for lists of methods
    joint: str | None = None  # an option of the rule that its timing has too: both must have one value

    @property
    def has_server(self) -> bool:
        """Whether the rule is a server's, and not a node's."""
        return not isinstance(self.rule, PeerAlgorithm) and "stays" not in positional(factory_of(self.rule))


def factory_of(part: object) -> Any:
    """The factory of a spec; anything else is returned as it is."""
    return part.factory if isinstance(part, Spec) else part


def positional(factory: object) -> list[str]:
    """The names of the parameters of a factory that are not keyword-only; of anything else, none."""
    if isinstance(factory, (ServerAlgorithm, PeerAlgorithm)) or not callable(factory):
        return []
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # it has no signature
        return []
    return [p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]


# --- options of local training -------------------------------------------------------------------------

# those that every run gives
GIVEN = ("optimizer", "lr", "batch_size", "proximal", "scale", "per_example")
LOCAL = (*GIVEN, "correct")  # those that a method cannot set


def client_options(client: object) -> dict[str, inspect.Parameter]:
    """The options of local training that belong to the method; the run's settings give the others."""
    return {key: p for key, p in options_of(factory_of(client)).items() if key not in LOCAL}


# Setting of local training -> the options of a factory that carry it.
THROUGH = {"optimizer": {"optimizer"}, "lr": {"optimizer", "lr"}, "decay": {"scale"}}


def ignored_by(takes: Collection[str], *, plain_sgd: bool = False) -> list[str]:
    """The settings that local training with the options ``takes`` would ignore.

    ``plain_sgd``: then ``training_of`` refuses other optimisers with another message, so they are not listed here.
    """
    refused = {"optimizer"} if plain_sgd else set()
    return [name for name, through in THROUGH.items() if not through & {*takes} and name not in refused]
