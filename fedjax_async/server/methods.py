"""Methods by name: one line in ``METHODS`` makes a method known everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# `as` themselves: they are public names of `server`, which imports all of this file
# fmt: off
from fedjax_async.local import curve_training, local_training
from fedjax_async.server.asynccurve import asynccurve as asynccurve
from fedjax_async.server.averaging import (asgd as asgd, asynfl as asynfl, fedasync as fedasync, fedavg as fedavg,
    fedbuff as fedbuff, fednova as fednova)
from fedjax_async.server.ca2fl import ca2fl as ca2fl
from fedjax_async.server.delay_correction import (dc_asgd as dc_asgd, dc_asgd_a as dc_asgd_a, orthodyn as orthodyn,
    orthograd as orthograd, orthopos as orthopos, orthostrict as orthostrict)
from fedjax_async.server.feddyn import feddyn as feddyn, feddyn_client as feddyn_client
from fedjax_async.server.fedmrur import fedmrur as fedmrur, fedmrur_client as fedmrur_client
from fedjax_async.server.fedopt import (fadas as fadas, fedadagrad as fedadagrad, fedadam as fedadam,
    fedavgm as fedavgm, fedyogi as fedyogi)
from fedjax_async.server.floco import floco as floco, floco_client as floco_client
from fedjax_async.server.orthofl import (orthofl as orthofl, orthofl_no_average as orthofl_no_average,
    orthofl_pairwise as orthofl_pairwise, orthofl_released as orthofl_released)
from fedjax_async.server.robust import fedmedian as fedmedian, krum as krum, trimmed_mean as trimmed_mean
from fedjax_async.server.scaffold import scaffold as scaffold, scaffold_client as scaffold_client
from fedjax_async.types import ClientAlgorithm, ServerAlgorithm
# fmt: on


class Preset(NamedTuple):
    """A method by name: a server rule with its usual timing, local training, proximal weight and compression.

    ``METHODS`` holds them, and ``register("method", ...)`` makes one of your factory. ``config.methods.method`` binds
    the options and returns a ``Method``, which is also what you give for a rule of your own without a name.
    """

    server: Callable[..., ServerAlgorithm]  # a factory with keyword-only options
    timing: str  # a spec of ``clock.TIMINGS``
    about: str  # one line for lists of methods
    proximal: float = 0.0  # mu of ``local_training``
    compress: str | None = None  # a spec of ``compress.COMPRESSORS``
    feedback: str | None = None  # a name of ``local.FEEDBACKS``
    client: Callable[..., ClientAlgorithm] = local_training  # called as ``client(model, batch_size=..., ...)``
    plain_sgd: bool = False  # whether its clients must take plain SGD steps
    optimizer: str = "sgd"  # its usual local optimiser, a spec of ``local.OPTIMIZERS``
    lr: float = 0.01  # its usual local learning rate


METHODS: dict[str, Preset] = {
    "fedavg": Preset(fedavg, "cohort", "Synchronous rounds, mean of the deltas (McMahan et al. 2017)."),
    "fedprox": Preset(fedavg, "cohort", "FedAvg with a proximal local objective (Li et al. 2020).", 0.01),
    "fedavgm": Preset(fedavgm, "cohort", "FedAvg with server momentum (Hsu et al. 2019)."),
    "fedadagrad": Preset(fedadagrad, "cohort", "FedAvg with Adagrad at the server (Reddi et al. 2021)."),
    "fedadam": Preset(fedadam, "cohort", "FedAvg with Adam at the server (Reddi et al. 2021)."),
    "fedyogi": Preset(fedyogi, "cohort", "FedAvg with Yogi at the server (Reddi et al. 2021)."),
    "fednova": Preset(
        fednova, "cohort", "Mean of the deltas per local step, rescaled (Wang et al. 2020).", plain_sgd=True
    ),
    "feddyn": Preset(feddyn, "cohort", "Clients with dynamic regularisation (Acar et al. 2021).", client=feddyn_client),
    "scaffold": Preset(
        scaffold,
        "cohort",
        "Control variates at server and clients (Karimireddy et al. 2020).",
        client=scaffold_client,
        plain_sgd=True,
    ),
    "fedasync": Preset(fedasync, "every", "Mix each arriving model in, weighted by staleness (Xie et al. 2019)."),
    "asgd": Preset(asgd, "every", "Each arriving delta is added, however stale."),
    "fedbuff": Preset(fedbuff, "buffer:size=10", "Mean of K staleness-weighted deltas (Nguyen et al. 2022)."),
    "asynfl": Preset(asynfl, "window:length=300", "Sum of a window's deltas, over all clients (AsynFL 2025)."),
    "asynflc": Preset(
        asynfl, "window:length=300", "AsynFL, compressed uploads, by default scaled signs.", 0.0, "scaled_sign", "off"
    ),
    "asynflc_ef": Preset(
        asynfl, "window:length=300", "AsynFLC with error feedback, by default top 10 %.", 0.0, "topk:ratio=0.1", "ef"
    ),
    "ca2fl": Preset(ca2fl, "buffer:size=10", "FedBuff corrected by cached deltas of all clients (Wang et al. 2024)."),
    "fadas": Preset(fadas, "buffer:size=5", "FedBuff with delay-adaptive AMSGrad at the server (Wang et al. 2024)."),
    "orthofl": Preset(orthofl, "every", "Clients keep their weights and add orthogonal shifts (OrthoFL 2025)."),
    "orthofl_released": Preset(orthofl_released, "every", "OrthoFL by its authors' released code."),
    "orthofl_no_average": Preset(orthofl_no_average, "every", "OrthoFL without its moving average."),
    "orthofl_pairwise": Preset(orthofl_pairwise, "every", "OrthoFL with changes projected pairwise."),
    "dc_asgd": Preset(dc_asgd, "every", "ASGD with deltas compensated for delay (Zheng et al. 2017)."),
    "dc_asgd_a": Preset(dc_asgd_a, "every", "DC-ASGD with a strength adapted to the deltas (Zheng et al. 2017)."),
    "orthograd": Preset(orthograd, "every", "ASGD that does not undo what others changed (AsyncManifold 2025)."),
    "orthopos": Preset(orthopos, "every", "Towards the client's model, undoing nothing (AsyncManifold 2025)."),
    "orthostrict": Preset(orthostrict, "every", "ASGD orthogonal to what others changed (AsyncManifold 2025)."),
    "orthodyn": Preset(orthodyn, "every", "OrthoGrad first, later OrthoPos (AsyncManifold 2025)."),
    "fedmrur": Preset(
        fedmrur, "cohort", "Hyperbolic proximal term, lengthened mean (An et al. 2023).", 0.01, client=fedmrur_client
    ),
    "floco": Preset(floco, "cohort", "Clients train a simplex of models (Grinwald et al. 2025).", client=floco_client),
    "asynccurve": Preset(
        asynccurve,
        "every",
        "Steps along curves that clients learn (AsyncManifold 2025).",
        0.01,
        client=curve_training,
        optimizer="adam",
        lr=0.001,
    ),
    "fedmedian": Preset(fedmedian, "buffer:size=5", "Coordinate-wise median of K deltas (Yin et al. 2018)."),
    "trimmed_mean": Preset(trimmed_mean, "buffer:size=5", "Mean of K deltas without extremes (Yin et al. 2018)."),
    "krum": Preset(krum, "buffer:size=5", "The delta with the nearest neighbours (Blanchard et al. 2017)."),
}

# Every server rule by its own name.
SERVERS: dict[str, Callable[..., ServerAlgorithm]] = {p.server.__name__: p.server for p in METHODS.values()}
