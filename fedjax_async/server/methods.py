"""Methods by name: one line in ``METHODS`` makes a method known everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

# `as` themselves: they are public names of `server`, which imports all of this file
# fmt: off
from fedjax_async.local import curve_training
from fedjax_async.base.method import Method
from fedjax_async.server.adpsgd import adpsgd as adpsgd
from fedjax_async.server.area import area as area
from fedjax_async.server.asynccurve import asynccurve as asynccurve
from fedjax_async.server.averaging import (asgd as asgd, asynfl as asynfl, fedasync as fedasync, fedavg as fedavg,
    fedbuff as fedbuff, fedcompass as fedcompass, fednova as fednova, pisces as pisces)
from fedjax_async.server.ca2fl import ca2fl as ca2fl, fedstale as fedstale, fedvarp as fedvarp
from fedjax_async.server.delay_adaptive import delay_adaptive_asgd as delay_adaptive_asgd
from fedjax_async.server.delay_correction import (dc_asgd as dc_asgd, dc_asgd_a as dc_asgd_a, orthodyn as orthodyn,
    orthograd as orthograd, orthopos as orthopos, orthostrict as orthostrict)
from fedjax_async.server.feddyn import feddyn as feddyn, feddyn_client as feddyn_client
from fedjax_async.server.fedmrur import fedmrur as fedmrur, fedmrur_client as fedmrur_client
from fedjax_async.server.fedopt import (fadas as fadas, fedadagrad as fedadagrad, fedadam as fedadam,
    fedavgm as fedavgm, fedyogi as fedyogi)
from fedjax_async.server.fedstaleweight import fedstaleweight as fedstaleweight
from fedjax_async.server.floco import floco as floco, floco_client as floco_client
from fedjax_async.server.malenia import malenia as malenia
from fedjax_async.server.mifa import ace as ace, mifa as mifa
from fedjax_async.server.orthofl import (orthofl as orthofl, orthofl_no_average as orthofl_no_average,
    orthofl_pairwise as orthofl_pairwise, orthofl_released as orthofl_released)
from fedjax_async.server.port import port as port
from fedjax_async.server.quafl import quafl as quafl
from fedjax_async.server.ringleader import ringleader as ringleader
from fedjax_async.server.robust import fedmedian as fedmedian, krum as krum, trimmed_mean as trimmed_mean
from fedjax_async.server.scaffold import scaffold as scaffold, scaffold_client as scaffold_client
from fedjax_async.types import ServerAlgorithm
# fmt: on


METHODS: dict[str, Method] = {
    "fedavg": Method(fedavg, "cohort", about="Synchronous rounds, mean of the deltas (McMahan et al. 2017)."),
    "fedprox": Method(
        fedavg, "cohort", proximal=0.01, about="FedAvg with a proximal local objective (Li et al. 2020)."
    ),
    "fedavgm": Method(fedavgm, "cohort", about="FedAvg with server momentum (Hsu et al. 2019)."),
    "fedadagrad": Method(fedadagrad, "cohort", about="FedAvg with Adagrad at the server (Reddi et al. 2021)."),
    "fedadam": Method(fedadam, "cohort", about="FedAvg with Adam at the server (Reddi et al. 2021)."),
    "fedyogi": Method(fedyogi, "cohort", about="FedAvg with Yogi at the server (Reddi et al. 2021)."),
    "fednova": Method(
        fednova, "cohort", plain_sgd=True, about="Mean of the deltas per local step, rescaled (Wang et al. 2020)."
    ),
    "feddyn": Method(
        feddyn, "cohort", client=feddyn_client, about="Clients with dynamic regularisation (Acar et al. 2021)."
    ),
    "scaffold": Method(
        scaffold,
        "cohort",
        client=scaffold_client,
        plain_sgd=True,
        about="Control variates at server and clients (Karimireddy et al. 2020).",
    ),
    "fedasync": Method(fedasync, "every", about="Mix each arriving model in, weighted by staleness (Xie et al. 2019)."),
    "asgd": Method(asgd, "every", about="Each arriving delta is added, however stale."),
    "delay_adaptive_asgd": Method(
        delay_adaptive_asgd, "every", about="ASGD with steps cut by the delay (Koloskova et al. 2022)."
    ),
    "ringmaster": Method(
        asgd, "fresh:threshold=10", about="ASGD whose late jobs are called off (Maranjyan et al. 2025)."
    ),
    "rennala": Method(asgd, "fresh:size=10", about="Mean of K deltas from one model (Tyurin and Richtarik 2023)."),
    "malenia": Method(
        malenia,
        "fresh:everyone=true",
        about="Mean of the clients' own means, all take part (Tyurin and Richtarik 2023).",
    ),
    "ringleader": Method(
        ringleader, "turns", about="Mean of the clients' means, a step for each in turn (Maranjyan and Richtarik 2025)."
    ),
    "fedbuff": Method(fedbuff, "buffer:size=10", about="Mean of K staleness-weighted deltas (Nguyen et al. 2022)."),
    "port": Method(
        port, "hurry", about="Deltas weighted by age and likeness, late clients hurry (Su and Li 2022).", joint="bound"
    ),
    "pisces": Method(
        pisces,
        "pace:bound=20",
        policy="pisces",
        about="Clients of high loss and low staleness, at the pace of the slowest (Jiang et al. 2022).",
    ),
    "fedstaleweight": Method(
        fedstaleweight, "buffer:size=5", about="Deltas weighted by their clients' mean staleness (Ma et al. 2024)."
    ),
    "fedcompass": Method(
        fedcompass, "compass", about="Local steps by speed, so that groups arrive together (Li et al. 2024)."
    ),
    "asynfl": Method(asynfl, "window:length=300", about="Sum of a window's deltas, over all clients (AsynFL 2025)."),
    "asynflc": Method(
        asynfl,
        "window:length=300",
        compress="scaled_sign",
        feedback="off",
        about="AsynFL, compressed uploads, by default scaled signs.",
    ),
    "asynflc_ef": Method(
        asynfl,
        "window:length=300",
        compress="topk:ratio=0.1",
        feedback="ef",
        about="AsynFLC with error feedback, by default top 10 %.",
    ),
    "ca2fl": Method(
        ca2fl, "buffer:size=10", about="FedBuff corrected by cached deltas of all clients (Wang et al. 2024)."
    ),
    "fedvarp": Method(
        fedvarp, "cohort", about="FedAvg corrected by the last deltas of all clients (Jhunjhunwala et al. 2022)."
    ),
    "fedstale": Method(fedstale, "cohort", about="Between FedAvg and FedVARP, by a factor (Rodio and Neglia 2024)."),
    "mifa": Method(mifa, "cohort", about="Mean of every client's last delta, in rounds (Gu et al. 2021)."),
    "ace": Method(ace, "every", about="Mean of every client's last delta, at each arrival (Chang et al. 2025)."),
    "area": Method(
        area, "buffer:size=3", about="Mean of every client's last model, at every K arrivals (Iakovidou and Kim 2024)."
    ),
    "fadas": Method(
        fadas, "buffer:size=5", about="FedBuff with delay-adaptive AMSGrad at the server (Wang et al. 2024)."
    ),
    "quafl": Method(
        quafl, "polling", about="Polled clients average with the server (Zakerinia et al. 2024).", joint="size"
    ),
    "adpsgd": Method(adpsgd, "every", about="Nodes average in pairs and train meanwhile (Lian et al. 2018)."),
    "orthofl": Method(orthofl, "every", about="Clients keep their weights and add orthogonal shifts (OrthoFL 2025)."),
    "orthofl_released": Method(orthofl_released, "every", about="OrthoFL by its authors' released code."),
    "orthofl_no_average": Method(orthofl_no_average, "every", about="OrthoFL without its moving average."),
    "orthofl_pairwise": Method(orthofl_pairwise, "every", about="OrthoFL with changes projected pairwise."),
    "dc_asgd": Method(dc_asgd, "every", about="ASGD with deltas compensated for delay (Zheng et al. 2017)."),
    "dc_asgd_a": Method(dc_asgd_a, "every", about="DC-ASGD with a strength adapted to the deltas (Zheng et al. 2017)."),
    "orthograd": Method(orthograd, "every", about="ASGD that does not undo what others changed (AsyncManifold 2025)."),
    "orthopos": Method(orthopos, "every", about="Towards the client's model, undoing nothing (AsyncManifold 2025)."),
    "orthostrict": Method(orthostrict, "every", about="ASGD orthogonal to what others changed (AsyncManifold 2025)."),
    "orthodyn": Method(orthodyn, "every", about="OrthoGrad first, later OrthoPos (AsyncManifold 2025)."),
    "fedmrur": Method(
        fedmrur,
        "cohort",
        proximal=0.01,
        client=fedmrur_client,
        about="Hyperbolic proximal term, lengthened mean (An et al. 2023).",
    ),
    "floco": Method(
        floco, "cohort", client=floco_client, about="Clients train a simplex of models (Grinwald et al. 2025)."
    ),
    "asynccurve": Method(
        asynccurve,
        "every",
        proximal=0.01,
        client=curve_training,
        optimizer="adam",
        lr=0.001,
        about="Steps along curves that clients learn (AsyncManifold 2025).",
    ),
    "fedmedian": Method(fedmedian, "buffer:size=5", about="Coordinate-wise median of K deltas (Yin et al. 2018)."),
    "trimmed_mean": Method(trimmed_mean, "buffer:size=5", about="Mean of K deltas without extremes (Yin et al. 2018)."),
    "krum": Method(krum, "buffer:size=5", about="The delta with the nearest neighbours (Blanchard et al. 2017)."),
}

# Every server rule by its own name.
_RULES = [cast(Callable[..., ServerAlgorithm], method.rule) for method in METHODS.values()]
SERVERS: dict[str, Callable[..., ServerAlgorithm]] = {rule.__name__: rule for rule in _RULES}
