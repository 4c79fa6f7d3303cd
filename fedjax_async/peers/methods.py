"""Decentralised methods by name: one line in ``METHODS`` makes a method known everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedjax_async.base.method import Method
from fedjax_async.local import anchored_training
from fedjax_async.peers.choco_sgd import choco
from fedjax_async.peers.divshare_fragments import divshare
from fedjax_async.peers.divshare_tensors import tensor_fragments
from fedjax_async.peers.full_mixing import full_models, osgp, sgp
from fedjax_async.peers.pushcen_adfl import pushcen

ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.001}

METHODS: dict[str, Method] = {
    "pushcen": Method(
        pushcen,
        exchange="push_sum",
        topology="gossip",
        client=anchored_training,
        about="Push-sum of centroid models (PushCen-ADFL 2026).",
        **ADAM,
    ),
    "pushcen_released": Method(
        partial(pushcen, reference="released"),
        exchange="push_sum:newest=false,policy=discard,aggregate_at=end,reference=released",
        topology="gossip",
        client=partial(anchored_training, reference="released"),
        about="PushCen-ADFL by its authors' released code; its buffer loses mass.",
        **ADAM,
    ),
    "pushcen_no_anchor": Method(
        pushcen,
        exchange="push_sum",
        topology="gossip",
        client=partial(anchored_training, anchor=0.0),
        about="PushCen-ADFL without its regulariser.",
        **ADAM,
    ),
    "pushcen_no_buffer": Method(
        pushcen,
        exchange="push_sum:newest=false,capacity=none",
        topology="gossip",
        client=anchored_training,
        about="PushCen-ADFL with every message kept: neither deduplication nor capacity.",
        **ADAM,
    ),
    "pushcen_no_push_sum": Method(
        pushcen,
        exchange="mean:capacity=16",
        topology="gossip",
        client=anchored_training,
        about="PushCen-ADFL with plain means, without masses.",
        **ADAM,
    ),
    "pushcen_full_models": Method(
        full_models,
        exchange="push_sum",
        topology="gossip",
        about="Push-sum of full models: PushCen-ADFL without compression.",
        **ADAM,
    ),
    "async_dfedavg": Method(
        full_models, exchange="mean", topology="gossip", about="Plain mean of the own and all received models.", **ADAM
    ),
    "swift": Method(
        full_models,
        exchange="swift",
        topology="ring",
        about="Wait-free mixing with coefficients of the degrees (Bornstein et al. 2023).",
        **ADAM,
    ),
    "divshare": Method(
        divshare,
        exchange="divshare",
        topology="gossip",
        about="Fragments of models, each to its own receivers (Biswas et al. 2025).",
        **ADAM,
    ),
    "swift_adflab": Method(
        full_models,
        exchange="kept_mean",
        topology="gossip",
        about="SWIFT as in the code released with PushCen-ADFL: means over messages that stay.",
        **ADAM,
    ),
    "divshare_adflab": Method(
        tensor_fragments,
        exchange="mean:capacity=16,newest=false,aggregate_at=end",
        topology="gossip",
        about="DivShare as in the code released with PushCen-ADFL: whole tensors, drawn by the receiver.",
        **ADAM,
    ),
    "push_sum_adflab": Method(
        full_models,
        exchange="push_sum:newest=false,policy=merge,aggregate_at=end,reference=baseline,late_mass=0",
        topology="gossip",
        about="Push-sum of full models as in the code of PushCen-ADFL 2026: late nodes have mass 0.",
        **ADAM,
    ),
    "independent": Method(
        full_models, exchange="alone", topology="gossip", about="Every node trains alone, without messages.", **ADAM
    ),
    "dpsgd": Method(full_models, exchange="dpsgd", topology="ring", about="Synchronous gossip (Lian et al. 2017)."),
    "el_oracle": Method(
        full_models,
        exchange="epidemic",
        topology="random_regular:redraw=true",
        about="Synchronous gossip along a new regular graph each round (EL-Oracle, de Vos et al. 2023).",
    ),
    "el_local": Method(
        full_models,
        exchange="epidemic",
        topology="gossip",
        about="Synchronous gossip, each node to nodes that it draws (EL-Local, de Vos et al. 2023).",
    ),
    "sgp": Method(
        sgp,
        exchange="sgp",
        topology="exponential:one_peer=true",
        about="Synchronous stochastic gradient push (Assran et al. 2019).",
    ),
    "osgp": Method(
        osgp,
        exchange="overlap",
        topology="exponential:one_peer=true",
        about="SGP that sends its messages while it trains: overlap SGP (Assran et al. 2019).",
    ),
    "choco": Method(
        choco,
        exchange="dpsgd",
        topology="ring",
        compress="topk:ratio=0.1",
        about="Synchronous gossip of compressed differences (Koloskova et al. 2019); with trigger SPARQ-SGD.",
    ),
}
