"""What clients do in a run: local training and compression of uploads, by the settings and the method.

:func:`training_of` gives local training as a spec, :func:`compressing` adds compression, and :func:`traffic_of` counts
the bytes of a message.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, factories, registry, tree
from fedjax_async.base.method import THROUGH, Method, factory_of, ignored_by
from fedjax_async.base.spec import Spec
from fedjax_async.compress import COMPRESSORS, Compressor, most_bits, on_tree, values_bits
from fedjax_async.compress.payload import Payload
from fedjax_async.config import concerns, own
from fedjax_async.config.methods import (
    client_spec,
    compressor_of,
    filled,
    local_options,
    registered_client,
    with_factory,
)
from fedjax_async.config.own import Chosen
from fedjax_async.config.protection import per_example_of
from fedjax_async.config.settings import DEFAULTS, Settings, given_in
from fedjax_async.engine.record import Traffic
from fedjax_async.local import DECAYS, FEEDBACKS, OPTIMIZERS, WithinJob
from fedjax_async.local.ditto import with_personal_model
from fedjax_async.local.dp_sgd import DPSGDOptions
from fedjax_async.local.feedback import grouping
from fedjax_async.server import fedavg
from fedjax_async.types import Array, ClientAlgorithm, Model, Number, Params, Path, Structure, Traced

Private = Callable[[Path], bool] | None

# --- local training ---------------------------------------------------------------------------------


def client_of(model: Model, s: Settings, batch_size: int, chosen: Method) -> ClientAlgorithm | Spec:
    """Local training by the object or factory of the settings, or else the method's."""
    given = own.thing_of("client", s.client)
    if isinstance(given, ClientAlgorithm):
        _check_ignored(s, chosen._replace(plain_sgd=False), takes=())
        left = ignored_by(())  # have the method's values if they are not given: checked in the line above
        per_example_of(s, ())
        concerns.refuse("own_client", {name: value for name, value in given_in(s).items() if name not in left})
        allowed = "float32 or float64: the client algorithm (client) computes as it was made"  # the params' dtypes
        check.require(s.compute != "bfloat16", "compute", s.compute, allowed)
        return own.lasting(given)
    used = _with_its_clients(s, chosen)
    _check_ignored(s, used, takes=factories.options_of(factory_of(used.client)))
    return training_of(model, s, batch_size, used)


def _with_its_clients(s: Settings, chosen: Method) -> Method:
    """The method with the factory of local training that the settings give, if they do."""
    given = own.thing_of("client", s.client)
    if given is not None:
        return with_factory(chosen, given)
    return chosen if s.client is None else chosen._replace(client=registered_client(str(s.client)), plain_sgd=False)


def leaves_out(s: Settings, chosen: Method) -> bool:
    """Whether local training leaves out the last partial batch of an epoch, as ``shuffle=false`` does."""
    if isinstance(own.thing_of("client", s.client), ClientAlgorithm):
        return False
    options = client_spec(_with_its_clients(s, chosen)).options
    shuffle = options.get("shuffle")
    return shuffle is False or (shuffle is None and options.get("reference") == "released")


def client_factory(s: Settings, usual: Method) -> Callable[..., ClientAlgorithm] | None:
    """The factory of local training: the settings' or the method's. ``None`` if the client is an algorithm."""
    given = own.thing_of("client", s.client)
    if given is not None:
        return None if isinstance(given, ClientAlgorithm) else factory_of(given)
    if s.client is None:
        return factory_of(usual.client)
    return factory_of(registered_client(str(s.client)))


_BRINGS = "the client algorithm (client) does not take it"


def _check_ignored(s: Settings, chosen: Method, takes: Collection[str]) -> None:
    """``ValueError`` for settings that local training with the options ``takes`` would ignore."""
    usual = {"optimizer": chosen.optimizer, "lr": chosen.lr, "decay": DEFAULTS["decay"]}
    for name in ignored_by(takes, plain_sgd=chosen.plain_sgd):
        through = " or ".join(sorted(THROUGH[name]))
        allowed = f"left out: {_BRINGS} (it has no option {through})"
        check.require(getattr(s, name) in (None, usual[name]), name, getattr(s, name), allowed)
    proximal = "proximal" in takes or not chosen.proximal
    check.require(proximal, "proximal", chosen.proximal, f"0 (it is an option of the method): {_BRINGS}")
    if s.client is not None and (options := local_options(s.method)):
        raise ValueError(f"method = {str(s.method)!r}: must leave out the option {options[0]}: {_BRINGS}")


def training_of(model: Model, s: Settings, batch_size: int, chosen: Method) -> Spec:
    """Local training that settings and method ask for."""
    known = usual_optimizer(s, chosen)
    spec, lr = str(known["optimizer"]), float(known["lr"] or 0.0)
    optimizer = _optimizer_of(known["optimizer"], s, chosen)
    allowed = "a factory of an optax transformation, f(lr, *, ...)"
    what = f"optimizer {spec}: what its factory returned"
    check.kind(what, optimizer.make(lr), optax.GradientTransformation, allowed)  # checks the ranges
    takes = factories.options_of(factory_of(chosen.client))
    per_example = None if s.privacy is None else per_example_of(s, takes)
    plain = optimizer.name == "sgd" and not optimizer.traced and optimizer.options.get("weight_decay", 0.0) == 0
    check.require(
        plain or not chosen.plain_sgd, "optimizer", spec, "sgd without options: the method is made for plain SGD"
    )
    decay = registry.spec("decay", DECAYS, s.decay).but(scope="decay")
    scale = decay.make()
    allowed = "a function of the version, a WithinJob, or None"
    fits = scale is None or callable(scale) or isinstance(scale, WithinJob)
    check.require(fits, f"decay {s.decay}: what its factory returned", scale, allowed)
    return Spec(
        _trained,
        model,
        client_spec(chosen),
        optimizer.later(),
        lr=lr,
        proximal=float(chosen.proximal),
        batch_size=batch_size,
        scale=decay,
        per_example=None
        if per_example is None
        else Spec(_per_example).but(scope="dp_sgd").with_numbers(**per_example._asdict()),
    )


def _optimizer_of(given: Chosen | None, s: Settings, chosen: Method) -> Spec:
    """The factory ``f(lr)`` of an optimiser, which a text names or which is the user's own."""
    thing = own.thing_of("optimizer", given)
    if thing is None:
        return registry.spec("optimizer", OPTIMIZERS, str(given)).but(scope="optimizer")
    if isinstance(thing, optax.GradientTransformation):
        allowed = "left out: an optax transformation has its own rate (give a factory, such as optax.adam, to set it)"
        check.require(s.lr is None, "lr", s.lr, allowed)
        takes = factories.options_of(factory_of(chosen.client))
        allowed = "a name, or a factory f(lr) such as optax.adam: the clients of the method need the rate itself"
        check.require("lr" not in takes, "optimizer", str(given), allowed)
        return Spec(_with_its_own_rate, own.lasting(thing))
    if isinstance(thing, Spec):
        return thing.but(scope="optimizer")
    return Spec(_made, own.lasting(thing))


def _with_its_own_rate(transformation: optax.GradientTransformation, lr: Traced) -> optax.GradientTransformation:
    del lr
    return transformation


def _made(factory: Callable[..., optax.GradientTransformation], lr: Traced) -> optax.GradientTransformation:
    return factory(lr)


def _trained(
    model: Model,
    client: functools.partial[ClientAlgorithm],
    optimizer: Callable[[Traced], optax.GradientTransformation],
    *,
    lr: Traced,
    proximal: Traced = 0.0,
    batch_size: int,
    scale: object,
    per_example: DPSGDOptions | None = None,
) -> ClientAlgorithm:
    """Local training by the factory ``client``, with what it takes of the run's options."""
    takes = factories.options_of(client.func)
    given = {"optimizer": optimizer(lr), "lr": lr, "proximal": proximal}
    given |= {"batch_size": batch_size, "scale": scale, "per_example": per_example}
    return client(model, **{name: value for name, value in given.items() if name in takes})


def _per_example(**numbers: Number) -> DPSGDOptions:
    return DPSGDOptions(**numbers)


def plain_training(model: Model, s: Settings, batch_size: int) -> Spec:
    """Local training of all leaves, also private ones, with the optimiser and rate of the settings."""
    usual = filled(Method(fedavg))
    alone = dataclasses.replace(s, privacy=None)  # nothing is sent
    return training_of(_without_private(model), alone, batch_size, usual)


@lru_cache(maxsize=64)
def _without_private(model: Model) -> Model:
    """The model to train as a whole: the start already has the private leaves, and the result keeps them."""
    return model._replace(private=None)


def with_ditto(client: ClientAlgorithm | Spec, model: Model, s: Settings, batch_size: int) -> ClientAlgorithm | Spec:
    """``client`` with a personal model (Ditto)."""
    personal = plain_training(model, s, batch_size).later("proximal")
    return Spec(_ditto, client, personal, ditto=float(s.ditto or 0.0))


def _ditto(client: ClientAlgorithm, personal: Callable[..., ClientAlgorithm], *, ditto: Traced) -> ClientAlgorithm:
    return with_personal_model(client, personal(proximal=ditto))


# --- compression of uploads ---------------------------------------------------------------------------


def usual_optimizer(settings: Settings, usual: Method) -> dict[str, Any]:
    """The settings ``optimizer`` and ``lr``, the method's where they are left open.

    An optax transformation has a rate of its own.
    """
    fixed = isinstance(own.thing_of("optimizer", settings.optimizer), optax.GradientTransformation)
    return {
        "optimizer": usual.optimizer if settings.optimizer is None else settings.optimizer,
        "lr": settings.lr if settings.lr is not None or fixed else usual.lr,
    }


def usual_compression(settings: Settings, usual: Method) -> dict[str, Any]:
    """The settings of compression, the method's where they are left open.

    Raises ``ValueError`` for options of compression in a run without compression.
    """
    compress = settings.compress or usual.compress
    if compress is None:
        for name in ("feedback", "compress_per"):
            given = getattr(settings, name)
            check.require(given is None, name, given, "left out without compress")
        return {}
    keeps = compressor_of(compress).feedback  # checks names and ranges
    how = settings.feedback or usual.feedback or ("ef" if keeps else "off")
    return {"compress": compress, "feedback": how, "compress_per": settings.compress_per or "whole"}


def compressing(
    client: ClientAlgorithm | Spec, s: Settings, private: Private, upload: object
) -> ClientAlgorithm | Spec:
    """``client`` with compressed uploads; ``upload``: their shapes before; ``s``: resolved settings."""
    given = own.thing_of("compress", s.compress)
    if given is None:
        given = registry.spec("compress", COMPRESSORS, str(s.compress)).but(scope="compress").later()
    else:
        given = own.lasting(given)
    how = {"how": str(s.feedback), "per": str(s.compress_per)}
    return Spec(_compressed, client, given, **how, private=private, like=tree.frozen(upload))


def _compressed(
    client: ClientAlgorithm,
    compressor: Compressor | functools.partial[Compressor],
    *,
    how: str,
    per: str,
    private: Private,
    like: tuple[Structure, tree.Kinds],
) -> ClientAlgorithm:
    if isinstance(compressor, functools.partial):
        # numbers are floats, but factories check on the host that options such as k are whole numbers
        given = compressor.keywords.items()
        whole = {name: int(v) for name, v in given if isinstance(v, float) and v.is_integer()}
        compressor = compressor(**whole)
    return FEEDBACKS[how](client, compressor, per=per, private=private, like=tree.thawed(like))


def traffic_of(message: tuple[Params, object], upload: object, s: Settings) -> Traffic:
    """Bytes of one message in each direction, from the shapes that are sent, without private leaves.

    ``message``: its params and its extra. A compressed upload counts with the largest size that the compressor can
    give for these shapes. Raises ``ValueError`` above 256 MiB.
    """
    if s.compress is None:
        return Traffic(tree.num_bytes(message), tree.num_bytes(upload))
    most, values = _message_bytes(s.compress, str(s.compress_per), tree.frozen(message[0])[0], *tree.frozen(upload))
    return Traffic(tree.num_bytes(message), most, values)


def vector_sizes(s: Settings, params: Params, upload: object) -> list[int]:
    """The length of each vector that is compressed of an upload, from the shapes that are sent."""
    group, sizes = grouping(str(s.compress_per), upload, params), Counter[Hashable]()
    for path, leaf in jax.tree_util.tree_flatten_with_path(upload)[0]:
        sizes[group(path)] += math.prod(leaf.shape)
    return list(sizes.values())


@registry.cached_by_name(maxsize=64)
def _message_bytes(
    spec: Chosen, per: str, params: Structure, structure: Structure, shapes: tree.Kinds
) -> tuple[int, int]:
    """Bytes of the longest message and of its values alone, from shapes; ``params``: the structure of the params."""
    compressor = compressor_of(spec)
    like = tree.thawed((structure, shapes))
    group = grouping(per, like, jax.tree.unflatten(params, [0] * params.num_leaves))
    wire = on_tree(compressor, like, group=group)

    def payload_of(upload: Params) -> Payload:
        payload = wire.compress(jax.random.key(0), upload)
        wire.bits(payload)  # refuses what is too long to count
        return payload

    def numbers_of() -> list[Array]:
        """The whole numbers in the payload of zeros: the size of some payloads depends on them."""
        zeros = [jnp.zeros(*leaf) for leaf in shapes]
        return _whole_scalars(payload_of(jax.tree.unflatten(structure, zeros)))

    numbers = jax.jit(numbers_of)()
    parts, inside = jax.tree.flatten(jax.eval_shape(payload_of, like))
    payload = jax.tree.unflatten(inside, [numbers.pop(0) if _is_whole_scalar(leaf) else leaf for leaf in parts])
    return most_bits(payload) // 8, -(-int(values_bits(payload)) // 8)


def longest_message(compress: Chosen, like: Params) -> int:
    """Bytes of the longest message that a compressor can make of a tree of these shapes."""
    structure, shapes = tree.frozen(like)
    return _message_bytes(compress, "whole", structure, structure, shapes)[0]


def _is_whole_scalar(leaf: Array) -> bool:
    return leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)


def _whole_scalars(payload: Payload) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(payload) if _is_whole_scalar(leaf)]
