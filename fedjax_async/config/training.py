"""Local training that settings and a method name: optimiser, learning rate and its decay, minibatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fedjax_async import check, registry
from fedjax_async.config.methods import Method
from fedjax_async.config.settings import Settings
from fedjax_async.engine.components import ClientFamily, Hyper, split_options
from fedjax_async.local import DECAYS, OPTIMIZERS
from fedjax_async.types import ClientAlgorithm, Model


def training_of(model: Model, s: Settings, batch_size: int, chosen: Method) -> tuple[ClientFamily, dict[str, float]]:
    """A family of client algorithms, and the hyperparameters of the one that settings and method ask for."""
    registry.bind("optimizer", OPTIMIZERS, s.optimizer)(s.lr)  # checks names and ranges
    name, options = registry.parse_spec("optimizer", s.optimizer)
    static, traced = split_options(OPTIMIZERS[name], options)
    plain = name == "sgd" and not traced and dict(static).get("weight_decay", 0.0) == 0
    check.require(
        plain or not chosen.plain_sgd, "optimizer", s.optimizer, "sgd without options: the method is made for plain SGD"
    )
    family = _family(model, chosen.client, chosen.client_options, name, static, s.decay, batch_size)
    proximal = float(chosen.proximal)
    hyper = {f"optimizer.{option}": value for option, value in traced.items()} | {"lr": float(s.lr)}
    return family, hyper | ({"proximal": proximal} if proximal else {})


@lru_cache(maxsize=64)
def _family(
    model: Model,
    client: Callable[..., ClientAlgorithm],
    options: tuple[tuple[str, Any], ...],
    optimizer: str,
    static: tuple[tuple[str, Any], ...],
    decay: str,
    batch_size: int,
) -> ClientFamily:
    """Local training by the factory ``client``, as a function of its traced hyperparameters."""
    scale = registry.bind("decay", DECAYS, decay)()
    takes = registry.options_of(client)

    def numbers(hyper: Hyper, prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): v for name, v in hyper.items() if name.startswith(prefix)}

    def family(hyper: Hyper) -> ClientAlgorithm:
        given = {
            "optimizer": OPTIMIZERS[optimizer](hyper["lr"], **dict(static), **numbers(hyper, "optimizer.")),
            "lr": hyper["lr"],
            "batch_size": batch_size,
            "proximal": hyper.get("proximal", 0.0),
            "scale": scale,
        }
        own = dict(options) | numbers(hyper, "client.")
        return client(model, **{name: value for name, value in given.items() if name in takes}, **own)

    return family
