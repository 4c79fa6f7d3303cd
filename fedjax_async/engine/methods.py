"""Methods by name: a server rule joined with its usual timing and local objective."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fedjax_async import check, registry
from fedjax_async.engine.pieces import Hyper, ServerFamily, split_options
from fedjax_async.server import SERVERS
from fedjax_async.types import ServerAlgorithm


class Preset(NamedTuple):
    """An entry of ``METHODS``: a rule of ``SERVERS``, a timing spec, a proximal weight, what happens to uploads."""

    server: str
    timing: str
    about: str
    proximal: float = 0.0
    compress: str | None = None
    feedback: str | None = None


class Method(NamedTuple):
    """What a run needs to know of a method; build one to run a rule of your own.

    ``timing`` is a spec such as ``"every"`` or ``"buffer:size=10"``. ``server`` may be a function of
    ``hyper`` that returns the rule: runs that differ in those numbers then share compiled programs. ``compress`` and
    ``feedback`` hold where the settings of those names are left open.
    """

    server: ServerAlgorithm | ServerFamily
    timing: str = "every"
    proximal: float = 0.0
    hyper: Mapping[str, float] = {}
    compress: str | None = None
    feedback: str | None = None


METHODS: dict[str, Preset] = {
    "fedavg": Preset("fedavg", "cohort", "Synchronous rounds, mean of the deltas (McMahan et al. 2017)."),
    "fedprox": Preset("fedavg", "cohort", "FedAvg with a proximal local objective (Li et al. 2020).", 0.01),
    "fedavgm": Preset("fedavgm", "cohort", "FedAvg with server momentum (Hsu et al. 2019)."),
    "fedadagrad": Preset("fedadagrad", "cohort", "FedAvg with Adagrad at the server (Reddi et al. 2021)."),
    "fedadam": Preset("fedadam", "cohort", "FedAvg with Adam at the server (Reddi et al. 2021)."),
    "fedyogi": Preset("fedyogi", "cohort", "FedAvg with Yogi at the server (Reddi et al. 2021)."),
    "fedasync": Preset("fedasync", "every", "Each arriving model is mixed in by its staleness (Xie et al. 2019)."),
    "asgd": Preset("asgd", "every", "Each arriving delta is added, however stale."),
    "fedbuff": Preset("fedbuff", "buffer:size=3", "Mean of K staleness-weighted deltas (Nguyen et al. 2022)."),
    "asynfl": Preset("asynfl", "window:length=300", "Sum of who finished in a window, over all clients (AsynFL 2025)."),
    "asynflc": Preset(
        "asynfl", "window:length=300", "AsynFL with compressed uploads, by default signs.", 0.0, "sign", "off"
    ),
    "asynflc_ef": Preset(
        "asynfl", "window:length=300", "AsynFLC with error feedback, by default top 10 %.", 0.0, "topk:ratio=0.1", "ef"
    ),
    "ca2fl": Preset("ca2fl", "buffer:size=3", "FedBuff corrected by cached deltas of all clients (Wang et al. 2024)."),
    "fadas": Preset("fadas", "buffer:size=3", "FedBuff with delay-adaptive AMSGrad at the server (Wang et al. 2024)."),
    "orthofl": Preset("orthofl", "every", "Clients keep their weights and take orthogonal shifts over (OrthoFL 2025)."),
    "orthofl_no_average": Preset("orthofl_no_average", "every", "OrthoFL without its moving average."),
    "orthofl_pairwise": Preset("orthofl_pairwise", "every", "OrthoFL with changes projected pairwise."),
    "fedmedian": Preset("fedmedian", "buffer:size=5", "Coordinate-wise median of K deltas (Yin et al. 2018)."),
    "trimmed_mean": Preset("trimmed_mean", "buffer:size=5", "Mean of K deltas without extremes (Yin et al. 2018)."),
    "krum": Preset("krum", "buffer:size=5", "The deltas with the nearest neighbours (Blanchard et al. 2017)."),
}


def method_options(name: str) -> dict[str, Any]:
    """Option -> default of a method: those of its server rule, and ``proximal``."""
    preset = registry.find("method", METHODS, name)
    rule = {key: parameter.default for key, parameter in registry.options_of(SERVERS[preset.server]).items()}
    return rule | {"proximal": preset.proximal}


def preset_of(spec: str) -> Preset:
    """The entry of ``METHODS`` that a spec names."""
    name, _ = registry.parse_spec("method", spec.partition("@")[0])
    preset: Preset = registry.find("method", METHODS, name)
    return preset


@lru_cache(maxsize=64)
def _family(name: str, static: tuple[tuple[str, Any], ...], traced: tuple[str, ...]) -> ServerFamily:
    """The rule of ``SERVERS`` as a function of its traced options."""

    def server(hyper: Hyper) -> ServerAlgorithm:
        return SERVERS[name](**dict(static), **{option: hyper[f"server.{option}"] for option in traced})

    return server


def method(spec: str, num_clients: int | None = None) -> Method:
    """The method of a spec such as ``"fedasync:mixing=0.8"`` or ``"fedbuff@buffer:size=5"``.

    ``num_clients`` goes to rules that take it, unless the spec says otherwise.

    Options are those of the server rule, and ``proximal``, the weight mu of the local term
    ``(mu/2) ||w - w_0||^2``. What follows an ``@`` is the timing, instead of the method's usual one.

    >>> method("fedprox").timing, method("fedprox:proximal=0.1@every").timing
    ('cohort', 'every')
    """
    rule, _, timing = spec.partition("@")
    name, options = registry.parse_spec("method", rule)
    preset = registry.find("method", METHODS, name)
    proximal = options.pop("proximal", preset.proximal)
    check.non_negative("proximal", proximal)
    check.require("@" not in spec or bool(timing), "method", spec, "METHOD or METHOD@TIMING")
    known = method_options(name)
    for key in options:
        registry.find(f"option of {name}", known, key)
    if num_clients is not None and "num_clients" in known:
        given = options.setdefault("num_clients", num_clients)
        check.require(given == num_clients, f"num_clients of {name}", given, f"{num_clients}, as in the run")
    SERVERS[preset.server](**options)  # checks their ranges
    static, traced = split_options(SERVERS[preset.server], options)
    server = _family(preset.server, static, tuple(traced))
    hyper = {f"server.{option}": value for option, value in traced.items()}
    return Method(server, timing or preset.timing, proximal, hyper, preset.compress, preset.feedback)
