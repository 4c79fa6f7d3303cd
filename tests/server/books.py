"""The textbook's version of each rule in ``SERVERS``, of the same options."""

import functools

import jax
import jax.numpy as jnp

from fedjax_async.server.adpsgd import _PAIR, PAIRINGS
from tests.server import textbook
from tests.server import textbook_curves as curves
from tests.server import textbook_loops as loops
from tests.server.textbook import Rule


def optimised(optimiser):
    """Rules of an optimiser."""
    names = {"server_lr": "lr", "momentum": "beta"}

    def made(weighting="examples", **options):
        move, state = optimiser(**{names.get(key, key): value for key, value in options.items()})
        return Rule(move=move, state=state, weighting=weighting)

    return made


def pairs(pairing="complete", *, keys, **options):
    """AD-PSGD with the neighbours that the rule draws: those of the pairing, as ``test_messages.py`` shows."""

    @functools.cache
    def drawn(e, node):
        return int(PAIRINGS[pairing](jax.random.fold_in(keys[e], _PAIR), jnp.int32(node), textbook.CLIENTS))

    return loops.ADPSGD(drawn=drawn, **options)


def orthofl(reference="average", **options):
    return loops.OrthoFLShared(**{"per": "layer"} | options) if reference == "shared" else loops.OrthoFL(**options)


def by_default(rule, **options):
    """A rule with other defaults."""
    return lambda **given: rule(**options | given)


BOOKS = {
    "fedavg": by_default(Rule, weighting="examples"),
    "fedavgm": optimised(textbook.momentum),
    "fedadagrad": optimised(textbook.adagrad),
    "fedadam": optimised(textbook.adam),
    "fedyogi": optimised(textbook.yogi),
    "fedasync": textbook.FedAsync,
    "asgd": Rule,
    "delay_adaptive_asgd": loops.DelayAdaptive,
    "asynfl": textbook.OverAll,
    "fedbuff": by_default(Rule, server_lr=0.7, staleness="polynomial"),
    "pisces": by_default(Rule, staleness="polynomial", weighting="examples"),
    "fedcompass": by_default(textbook.OverAll, server_lr=0.9, staleness="polynomial"),
    "ca2fl": by_default(loops.CA2FL, server_lr=0.3),
    "malenia": loops.Malenia,
    "area": loops.Area,
    "port": loops.Port,
    "fedstaleweight": loops.FedStaleWeight,
    "quafl": loops.QuAFL,
    "ringleader": loops.Ringleader,
    "fedvarp": loops.CA2FL,
    "fedstale": by_default(loops.CA2FL, beta=0.5),
    "mifa": loops.MIFA,
    "ace": by_default(loops.MIFA, wait=True),
    "fadas": by_default(loops.FADAS, server_lr=0.001, adaptation="scaled"),
    "adpsgd": pairs,
    "orthofl": orthofl,
    "orthofl_no_average": loops.HandedOn,
    "orthofl_pairwise": by_default(loops.OrthoFL, pairwise=True),
    "orthofl_released": loops.OrthoFLReleased,
    "fednova": loops.FedNova,
    "feddyn": loops.FedDyn,
    "scaffold": Rule,
    "fedmedian": textbook.Median,
    "trimmed_mean": textbook.TrimmedMean,
    "krum": textbook.Krum,
    "dc_asgd": curves.DCASGD,
    "dc_asgd_a": curves.DCASGDa,
    "orthograd": curves.Ortho,
    "orthopos": by_default(curves.Ortho, alpha=1.0),
    "orthostrict": by_default(curves.Ortho, theta=1.0),
    "orthodyn": curves.OrthoDyn,
    "floco": by_default(Rule, weighting="examples"),
    "fedmrur": curves.FedMRUR,
    "asynccurve": curves.AsyncCurve,
}
