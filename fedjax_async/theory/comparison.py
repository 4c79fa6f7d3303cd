"""Table II of the AsynFLC paper: the rates that ten analyses claim, as functions, and their assumptions, as data.

All hidden constants are 1, and the initial gap is left out, as in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedjax_async.base import check
from fedjax_async.theory.rates import Quantity, as_reals, check_each, require_admissible


class Setting(NamedTuple):
    """The arguments of the rates: numbers, or arrays that broadcast."""

    server_steps: Quantity  # T, server steps
    local_steps: Quantity  # K
    clients: Quantity  # n
    participants: Quantity  # m <= n, of one server step
    variance: Quantity  # sigma^2
    heterogeneity: Quantity  # sigma_g^2
    squared_gradient: Quantity  # G^2 >= ||grad||^2
    tau_max: Quantity
    tau_avgm: Quantity  # the larger of tau_avgm0 and tau_avgm1
    tau_c: Quantity  # the largest delay that Li et al. (2024) accept


class Analysis(NamedTuple):
    """One analysis: its rate, what it covers, and which assumptions it does not need."""

    source: str
    formula: str
    rate: Callable[[Setting], Quantity]
    non_iid: bool = True
    quantization: bool = False
    sparsification: bool = False
    error_feedback: bool = False
    unbounded_gradient: bool = False
    nonuniform_participation: bool = False


def _fedbuff(s: Setting) -> Quantity:
    late = s.tau_max**2 * (s.variance + s.heterogeneity + s.squared_gradient) / s.server_steps
    return s.variance / (s.server_steps * s.local_steps) ** 0.5 + late


def _unbounded(s: Setting) -> Quantity:
    both = s.variance + s.heterogeneity
    return both / s.server_steps**0.5 + s.tau_max**2 * both / s.server_steps


def _private(s: Setting) -> Quantity:
    late = s.tau_c**2 * (s.variance + s.squared_gradient) / s.server_steps
    return (s.variance + s.heterogeneity) / s.server_steps**0.5 + late


def _relaying(s: Setting) -> Quantity:
    return s.variance / (s.server_steps * s.clients) ** 0.5 + s.tau_max**2 * s.squared_gradient / s.server_steps


def _cached(s: Setting) -> Quantity:
    spread = s.variance + s.local_steps**0.5 * s.heterogeneity
    return spread / (s.server_steps * s.local_steps * s.participants) ** 0.5 + s.tau_max * s.tau_avgm / s.server_steps


def _speedup(s: Setting) -> Quantity:
    return (s.variance + s.squared_gradient) / (s.server_steps * s.clients) ** 0.5 + s.tau_max**2 / s.server_steps


def _asynfl(s: Setting) -> Quantity:
    return s.variance / (s.server_steps * s.local_steps * s.clients) ** 0.5 + s.tau_max * s.tau_avgm / s.server_steps


def _asynflc(s: Setting) -> Quantity:
    return s.tau_max * s.variance / (s.local_steps * s.server_steps ** (2 / 3))


def _asynflc_ef(s: Setting) -> Quantity:
    return s.variance / (s.server_steps * s.local_steps * s.clients) ** 0.5 + s.tau_max**2 / s.server_steps


_CACHED = "(s2 + sqrt(K) sg2)/sqrt(TKm) + tau_max tau_avgm/T"
_ALL = {"unbounded_gradient": True, "nonuniform_participation": True}

# The paper's own three rows are as printed. AsynFL and AsynFLC-EF leave out the factors of their last terms in
# Corollaries 1 and 4 (K n sg2, and the compression factor). AsynFLC is Corollary 2; its theorem lacks a term (see
# ``rates``). The text of the paper gives the rows of 2024 with sqrt(K) sg2/sqrt(Tm) instead, sqrt(K) times more. It
# also calls tau_max tau_avgm/T better than tau_max/T, but it is only better than tau_max^2/T.
TABLE_2: dict[str, Analysis] = {
    "fedbuff": Analysis("Nguyen et al., AISTATS 2022", "s2/sqrt(TK) + tau_max^2 (s2 + sg2 + G2)/T", _fedbuff),
    "fedbuff_unbounded": Analysis(
        "Toghani and Uribe, Allerton 2022", "(s2 + sg2)/sqrt(T) + tau_max^2 (s2 + sg2)/T", _unbounded,
        unbounded_gradient=True,
    ),
    "multi_stage_private": Analysis(
        "Li et al., TPAMI 2024", "(s2 + sg2)/sqrt(T) + tau_c^2 (s2 + G2)/T", _private
    ),
    "mobile_relaying": Analysis(
        "Bian and Xu, TVT 2024", "s2/sqrt(Tn) + tau_max^2 G2/T", _relaying, non_iid=False, quantization=True
    ),
    "ca2fl": Analysis("Wang et al., ICLR 2024", _CACHED, _cached, unbounded_gradient=True),
    "fadas": Analysis("Wang et al., ICML 2024", _CACHED, _cached, unbounded_gradient=True),
    "linear_speedup": Analysis("Wang et al., TMC 2025", "(s2 + G2)/sqrt(Tn) + tau_max^2/T", _speedup),
    "asynfl": Analysis("Yang et al. 2025, Corollary 1", "s2/sqrt(TKn) + tau_max tau_avgm/T", _asynfl, **_ALL),
    "asynflc": Analysis(
        "Yang et al. 2025, Corollary 2 (IID)", "tau_max s2/(K T^(2/3))", _asynflc,
        quantization=True, sparsification=True, **_ALL,
    ),
    "asynflc_ef": Analysis(
        "Yang et al. 2025, Corollary 4", "s2/sqrt(TKn) + tau_max^2/T", _asynflc_ef,
        quantization=True, sparsification=True, error_feedback=True, **_ALL,
    ),
}  # fmt: skip


def compare(setting: Setting) -> dict[str, Quantity]:
    """The rate of every row of ``TABLE_2`` in one setting, by the row's name.

    >>> rates = compare(Setting(10**6, 5, 100, 10, 1.0, 1.0, 1.0, 10, 8, 10))
    >>> rates["asynfl"] < rates["ca2fl"] < rates["fedbuff_unbounded"]
    True
    """
    for field in ("server_steps", "local_steps", "clients", "participants"):
        check_each(check.positive, field, getattr(setting, field))
    for field in ("variance", "heterogeneity", "squared_gradient", "tau_max", "tau_avgm", "tau_c"):
        check_each(check.non_negative, field, getattr(setting, field))
    require_admissible("participants", setting.participants, setting.clients, "the number of clients")
    reals = as_reals(setting)
    return {name: row.rate(reals) for name, row in TABLE_2.items()}
