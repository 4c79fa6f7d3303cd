"""Decentralised methods by name: one line in ``METHODS`` makes a method known everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fedjax_async.local import anchored_training, local_training
from fedjax_async.peers.choco import choco
from fedjax_async.peers.contract import PeerAlgorithm
from fedjax_async.peers.divshare import divshare
from fedjax_async.peers.full_models import full_models, sgp
from fedjax_async.peers.pushcen import pushcen
from fedjax_async.types import ClientAlgorithm

# The optimiser's state stays with its node: a node trains on, whatever it mixes in.
training = partial(local_training, keep_optimizer=True)


class PeerPreset(NamedTuple):
    """A method without a server by name: what a node does, with its usual exchange, topology and local training.

    An option that several of node, exchange and local training take (``reference``, ``omega``) has one value for all.
    """

    peer: Callable[..., PeerAlgorithm]  # ``peer(stays, *, ...)``; ``peer(stays, compressor, *, ...)`` if it compresses
    exchange: str  # a spec of ``clock.EXCHANGES``
    topology: str  # a spec of ``clock.TOPOLOGIES``
    about: str  # one line for lists of methods
    client: Callable[..., ClientAlgorithm] = training  # called as ``client(model, batch_size=..., ...)``
    compress: str | None = None  # of its messages, a spec of ``compress.COMPRESSORS``, where it takes a compressor
    optimizer: str = "adam"  # its usual local optimiser, a spec of ``local.OPTIMIZERS``
    lr: float = 0.001  # its usual local learning rate
    proximal: float = 0.0  # mu of ``local_training``
    plain_sgd: bool = False  # whether its nodes must take plain SGD steps


METHODS: dict[str, PeerPreset] = {
    "pushcen": PeerPreset(
        pushcen, "push_sum", "gossip", "Push-sum of centroid models (PushCen-ADFL 2026).", anchored_training
    ),
    "pushcen_released": PeerPreset(
        partial(pushcen, reference="released"),
        "push_sum:newest=false,policy=discard,aggregate_at=end,reference=released",
        "gossip",
        "PushCen-ADFL by its authors' released code; its buffer loses mass.",
        partial(anchored_training, reference="released"),
    ),
    "pushcen_no_anchor": PeerPreset(
        pushcen, "push_sum", "gossip", "PushCen-ADFL without its regulariser.", partial(anchored_training, anchor=0.0)
    ),
    "pushcen_no_buffer": PeerPreset(
        pushcen,
        "push_sum:newest=false,capacity=none",
        "gossip",
        "PushCen-ADFL with every message kept: neither deduplication nor capacity.",
        anchored_training,
    ),
    "pushcen_no_push_sum": PeerPreset(
        pushcen, "mean:capacity=16", "gossip", "PushCen-ADFL with plain means, without masses.", anchored_training
    ),
    "pushcen_full_models": PeerPreset(
        full_models, "push_sum", "gossip", "Push-sum of full models: PushCen-ADFL without compression."
    ),
    "async_dfedavg": PeerPreset(full_models, "mean", "gossip", "Plain mean of the own and all received models."),
    "swift": PeerPreset(
        full_models, "swift", "ring", "Wait-free mixing with coefficients of the degrees (Bornstein et al. 2023)."
    ),
    "divshare": PeerPreset(
        divshare, "divshare", "gossip", "Fragments of models, each to its own receivers (Biswas et al. 2025)."
    ),
    "independent": PeerPreset(full_models, "alone", "gossip", "Every node trains alone, without messages."),
    "dpsgd": PeerPreset(
        full_models, "dpsgd", "ring", "Synchronous gossip (Lian et al. 2017).", optimizer="sgd", lr=0.01
    ),
    "sgp": PeerPreset(
        sgp,
        "sgp",
        "exponential:one_peer=true",
        "Synchronous stochastic gradient push (Assran et al. 2019).",
        optimizer="sgd",
        lr=0.01,
    ),
    "choco": PeerPreset(
        choco,
        "dpsgd",
        "ring",
        "Synchronous gossip of compressed differences (Koloskova et al. 2019).",
        compress="topk:ratio=0.1",
        optimizer="sgd",
        lr=0.01,
    ),
}
