"""Each server rule against its plain NumPy loop, and the identities among rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import factories
from fedjax_async.geometry import family
from fedjax_async.server import (
    SERVERS,
    asgd,
    ca2fl,
    discount,
    fedasync,
    fedavg,
    fedbuff,
    guard_rails,
)
from fedjax_async.server.adpsgd import _PAIR, PAIRINGS
from fedjax_async.types import Arrival
from tests.geometry.textbook import polygon
from tests.server import textbook, textbook_loops, textbook_weights
from tests.server.made_up import (
    CLIENTS,
    KEY,
    LENGTH,
    D,
    arrival,
    closing,
    flat,
    random_uploads,
    receive_all,
    received,
    run,
    stacked,
    start_params,
    uploading,
)
from tests.server.textbook import Rule, Upload, add, robust
from tests.server.textbook_loops import LAYERS, TENSORS, WHOLE, Corrected, ortho, orthodyn

PHASES = "orthograd+asgd+orthopos"


def averaging(lr=1.0, **options):
    return Rule(add(lr), **options)


def moments(rule):
    """The rule by its name in the textbook, of numbers."""
    return lambda *numbers: Rule(*rule(*numbers), by_examples=True)


def later(p):
    """The polynomial discount of this exponent."""
    return lambda tau: textbook.polynomial(tau, p)


def curving(lr, lowest, swa, momentum, fraction, decay):
    return textbook_loops.asynccurve(lr, lowest, swa, momentum, orthodyn((fraction,), decay=decay), cycle=4, inner=2)


def pairs(lr=1.0):
    """AD-PSGD with the neighbours that the rule draws: those of the pairing, as ``test_adpsgd.py`` shows."""
    keys = jax.random.split(KEY, LENGTH)

    @functools.cache
    def drawn(e, node):
        key = jax.random.fold_in(keys[e], _PAIR)
        return int(PAIRINGS["complete"](key, jnp.int32(node), CLIENTS))

    return textbook_loops.adpsgd(lr, drawn)


def reaggregated(lr=1.0, **options):
    return averaging(lr, combine=textbook_loops.reaggregated, **options)


# Each name in SERVERS: options, mostly none, and the textbook's version.
RULES = {
    "fedavg": ({}, averaging(by_examples=True)),
    "fedavgm": ({}, Rule(*textbook.momentum(), by_examples=True)),
    "fedadagrad": ({}, Rule(*textbook.adagrad(), by_examples=True)),
    "fedadam": ({}, Rule(*textbook.adam(), by_examples=True)),
    "fedyogi": ({}, Rule(*textbook.yogi(), by_examples=True)),
    "fedasync": ({}, textbook.mixing()),
    "asgd": ({}, averaging()),
    "delay_adaptive_asgd": ({}, textbook_loops.delay_adaptive(CLIENTS)),
    "asynfl": ({}, textbook.over_all(CLIENTS)),
    "fedbuff": ({}, averaging(0.7, s=textbook.polynomial)),
    "pisces": ({}, averaging(s=textbook.polynomial, by_examples=True)),
    "fedcompass": ({}, textbook.over_all(CLIENTS, 0.9, textbook.polynomial)),
    "ca2fl": ({}, textbook_loops.ca2fl(0.3)),
    "malenia": ({}, textbook_loops.malenia()),
    "area": ({}, textbook_loops.area()),
    "port": ({}, textbook_loops.port()),
    "fedstaleweight": ({}, textbook_weights.fedstaleweight()),
    "quafl": ({"size": 4}, textbook_loops.quafl(4)),
    "ringleader": ({}, textbook_loops.ringleader()),
    "fedvarp": ({}, textbook_loops.ca2fl()),
    "fedstale": ({}, textbook_loops.ca2fl(1.0, 0.5)),
    "mifa": ({}, textbook_loops.mifa()),
    "ace": ({}, textbook_loops.mifa(wait=True)),
    "fadas": ({}, textbook_loops.fadas(0.001, adaptation="scaled")),
    "adpsgd": ({}, pairs()),
    "orthofl": ({}, textbook_loops.orthofl()),
    "orthofl_no_average": ({"per": "whole"}, textbook_loops.handed_on(WHOLE)),
    "orthofl_pairwise": ({}, textbook_loops.orthofl()),
    "orthofl_released": ({}, textbook_loops.orthofl_released()),
    "fednova": ({}, textbook_loops.fednova()),
    "feddyn": ({"alpha": 0.5}, textbook_loops.feddyn(0.5)),
    "scaffold": ({}, averaging()),
    "fedmedian": ({"size": 16}, robust(textbook.median)),
    "trimmed_mean": ({"size": 16}, robust(textbook.trimmed_mean)),
    "krum": ({"size": 16}, robust(textbook.krum)),
    "dc_asgd": ({}, Corrected(textbook_loops.dc_asgd())),
    "dc_asgd_a": ({"strength": 0.2}, Corrected(textbook_loops.dc_asgd_a(0.2))),
    "orthograd": ({"per": "layer"}, Corrected(ortho(0, 0, LAYERS))),
    "orthopos": ({"per": "tensor"}, Corrected(ortho(1, 0, TENSORS))),
    "orthostrict": ({"per": "whole"}, Corrected(ortho(0, 1, WHOLE))),
    "orthodyn": ({"fraction": 0.9, "decay": 0.5}, Corrected(orthodyn((0.9,), decay=0.5))),
    "floco": ({}, averaging(by_examples=True)),
    "fedmrur": ({"weighting": "examples"}, reaggregated(by_examples=True)),
    "asynccurve": ({}, textbook_loops.asynccurve()),
}
GUARDS = textbook.Guards._fields
GUARDED = [
    textbook.Guards(),
    textbook.Guards(clip=2.5),
    textbook.Guards(overstale_after=6),
    textbook.Guards(clip=2.0, overstale_after=4, overstale=0.1),
]


def swept(name, uploads, fixed, values):
    """Params [V, E, D] and weights [V, E] of a sweep over the columns of ``values``, in one program."""
    inner = family(fixed.get("curve", "quadratic"), fixed.get("bends")).inner
    arrivals = uploading(name, stacked(uploads), inner, "regions" in fixed)

    @jax.jit
    @jax.vmap
    def sweep(values):
        _, path, weights = receive_all(SERVERS[name](**fixed, **values), start_params(), arrivals)
        return path, weights

    path, weights = sweep({key: jnp.asarray(column, float) for key, column in values.items()})
    return flat(path), weights


UNIFORM, LR, EXPONENT = {"weighting": "uniform"}, {"server_lr": [1.0, 0.3]}, {"exponent": [0.0, 2.0]}
MIXING, HINGE = {"mixing": [0.6, 1.0]}, {"staleness": "hinge", "slope": [10.0, 1.0], "threshold": [4.0, 0.0]}
MOMENTS = {"server_lr": [0.1, 0.3], "b1": [0.9, 0.5], "b2": [0.99, 0.9], "eps": [1e-3, 0.1]}
SWITCHES = {
    "norm": {"fraction": [0.9, 0.7], "second_fraction": [0.8, 0.5]},
    "share": {"fraction": [0.3, 0.5], "second_fraction": [0.6, 0.9]},
}
# Every numeric option with two values each, which a sweep vmaps over, and the textbook's version of one of the two;
# every choice of the others.
SWEEPS = [
    ("fedavg", UNIFORM | LR, averaging),
    ("fedavgm", {"server_lr": [0.5, 0.3], "momentum": [0.9, 0.1]}, moments(textbook.momentum)),
    ("fedadagrad", {"server_lr": [0.1, 0.3], "eps": [1e-3, 0.5], "initial": [0.0, 0.1]}, moments(textbook.adagrad)),
    ("fedadam", MOMENTS, moments(textbook.adam)),
    ("fedyogi", MOMENTS, moments(textbook.yogi)),
    ("fedasync", MIXING | EXPONENT, lambda a, p: textbook.mixing(a, later(p))),
    ("asgd", LR, averaging),
    (
        "delay_adaptive_asgd",
        {"tolerated": [5.0, 0.0]} | LR,
        textbook_loops.delay_adaptive,
    ),
    (
        "delay_adaptive_asgd",
        {"late": "drop", "tolerated": [7.0, 3.0]} | LR,
        lambda limit, lr: textbook_loops.delay_adaptive(limit, lr, drop=True),
    ),
    ("fedbuff", LR | EXPONENT, lambda lr, p: averaging(lr, s=later(p))),
    ("fedbuff", HINGE | LR, lambda slope, b, lr: averaging(lr, s=lambda tau: textbook.hinge(tau, slope, b))),
    ("pisces", LR | EXPONENT, lambda lr, p: averaging(lr, s=later(p), by_examples=True)),
    (
        "pisces",
        HINGE | LR,
        lambda slope, b, lr: averaging(lr, s=lambda tau: textbook.hinge(tau, slope, b), by_examples=True),
    ),
    ("asynfl", LR, lambda lr: textbook.over_all(CLIENTS, lr)),
    ("fedcompass", LR | EXPONENT, lambda lr, p: textbook.over_all(CLIENTS, lr, later(p))),
    ("ca2fl", LR, textbook_loops.ca2fl),
    ("adpsgd", LR, pairs),
    ("malenia", LR, textbook_loops.malenia),
    ("ringleader", LR, textbook_loops.ringleader),
    (
        "port",
        LR | {"likeness_weight": [1.0, 0.0], "age_weight": [3.0, 0.5], "bound": [10.0, 2.0]},
        textbook_loops.port,
    ),
    ("fedstaleweight", {"window": 2} | LR, lambda lr: textbook_weights.fedstaleweight(lr, 2)),
    ("fedvarp", LR, textbook_loops.ca2fl),
    ("fedstale", LR | {"beta": [0.0, 0.7]}, textbook_loops.ca2fl),
    ("mifa", LR | {"wait": True}, lambda lr: textbook_loops.mifa(lr, wait=True)),
    ("ace", LR | {"wait": False}, textbook_loops.mifa),
    (
        "fadas",
        {"adaptation": "inverse"} | MOMENTS | {"server_lr": [0.3, 0.1], "eps": [1e-8, 0.1], "tolerated": [1.0, 6.0]},
        lambda *values: textbook_loops.fadas(*values[:4], tolerated=values[4]),
    ),
    *[
        (name, fixed | MIXING | EXPONENT, lambda a, p, first=first: textbook_loops.orthofl(a, later(p), first))
        for name, fixed, first in [
            ("orthofl", {"per": "layer", "reference": "average"}, False),
            ("orthofl", {"reference": "shared"}, True),
            ("orthofl_pairwise", {"per": "tensor"}, False),
        ]
    ],
    ("orthofl_released", MIXING | EXPONENT, lambda a, p: textbook_loops.orthofl_released(a, later(p))),
    ("fednova", LR, textbook_loops.fednova),
    ("fednova", UNIFORM | LR, lambda lr: textbook_loops.fednova(lr, False)),
    ("feddyn", {"alpha": [0.5, 0.1]}, textbook_loops.feddyn),
    ("scaffold", LR, averaging),
    ("fedmedian", {"size": 16} | LR | EXPONENT, lambda lr, p: robust(textbook.median, lr, later(p))),
    (
        "trimmed_mean",
        {"size": 16, "trim": [0.3, 0.2]} | LR | EXPONENT,
        lambda trim, lr, p: robust(lambda d: textbook.trimmed_mean(d, trim), lr, later(p)),
    ),
    (
        "krum",
        {"size": 16, "byzantine": [0.0, 1.0], "select": [3.0, 2.0]} | LR | EXPONENT,
        lambda f, m, lr, p: robust(lambda d: textbook.krum(d, int(f), int(m)), lr, later(p)),
    ),
    ("dc_asgd", {"strength": [0.04, 0.2]} | LR, lambda lam, lr: Corrected(textbook_loops.dc_asgd(lam), lr)),
    (
        "dc_asgd_a",
        {"strength": [0.2, 0.1], "decay": [0.95, 0.5], "eps": [1e-7, 0.1]} | LR,
        lambda lam, m, eps, lr: Corrected(textbook_loops.dc_asgd_a(lam, m, eps), lr),
    ),
    ("orthograd", LR, lambda lr: Corrected(ortho(0, 0), lr)),
    ("orthopos", {"per": "tensor"} | LR, lambda lr: Corrected(ortho(1, 0, TENSORS), lr)),
    ("orthostrict", {"per": "whole"} | LR, lambda lr: Corrected(ortho(0, 1, WHOLE), lr)),
    *[
        (
            "orthodyn",
            {"switch": switch, "phases": PHASES, "decay": [0.5, 0.2]} | SWITCHES[switch] | LR,
            lambda m, f, g, lr, share=switch == "share": Corrected(
                orthodyn((f, g), PHASES.split("+"), m, share=share), lr
            ),
        )
        for switch in SWITCHES
    ],
    ("floco", UNIFORM | {"vertices": 3} | LR | {"spread": [0.0, 1.0]}, lambda lr, spread: averaging(lr)),
    ("floco", UNIFORM | {"regions": 0.5, "signal": 7, "radius": [0.3, 1.0]} | LR, lambda radius, lr: averaging(lr)),
    ("fedmrur", {"weighting": "examples"} | LR, functools.partial(reaggregated, by_examples=True)),
    (
        "asynccurve",
        {
            "cycle": 4,
            "curve": "cubic",
            "server_lr": [0.6, 1.0],
            "lowest": [0.2, 1.0],
            "swa": [0.5, 0.2],
            "momentum": [0.5, 0.2],
        }
        | {"fraction": [0.9, 0.7], "decay": [0.5, 0.2]},
        curving,
    ),
    ("fadas", {"adaptation": "off", "server_lr": [0.001, 0.1]}, lambda lr: textbook_loops.fadas(lr, adaptation="off")),
    ("orthodyn", LR, lambda lr: Corrected(orthodyn(), lr)),
    (
        "orthodyn",  # the second fraction by its default, here and below
        {"phases": PHASES, "fraction": 0.9, "decay": 0.5} | LR,
        lambda lr: Corrected(orthodyn((0.9, 0.45), PHASES.split("+"), 0.5), lr),
    ),
    (
        "orthodyn",
        {"phases": PHASES, "switch": "share", "fraction": 0.2, "per": "layer"} | LR,
        lambda lr: Corrected(orthodyn((0.2, 0.6), PHASES.split("+"), groups=LAYERS, share=True), lr),
    ),
    ("fedmrur", {"reaggregate": False} | LR, averaging),
    (
        "asynccurve",
        {"cycle": 3, "swa": 0.3, "overwrite": 6, "momentum": 0.5, "dominance": False, "control": "none"}
        | {"curve": "chain", "bends": 3}
        | LR,
        lambda lr: textbook_loops.asynccurve(
            lr, swa=0.3, momentum=0.5, cycle=3, overwrite=6, dominance=False, control="none", curve=polygon, inner=3
        ),
    ),
    (
        "asynccurve",
        {"step": "geodesic", "momentum": 0.5, "momentum_on": "space", "correction": "orthopos", "per": "tensor"} | LR,
        lambda lr: textbook_loops.asynccurve(
            lr, momentum=0.5, correct=ortho(1, 0, TENSORS), step="geodesic", momentum_on="space"
        ),
    ),
    (
        "asynccurve",
        {"step": "line", "warm": "off", "switch": "share", "fraction": 0.3, "weighting": "examples"} | LR,
        lambda lr: textbook_loops.asynccurve(lr, step="line", correct=orthodyn((0.3,), share=True), by_examples=True),
    ),
    ("asynccurve", LR, textbook_loops.asynccurve),
]


def split(options):
    """The fixed options, and the columns of those that are traced."""
    traced = {key: value for key, value in options.items() if isinstance(value, list)}
    return {key: options[key] for key in options.keys() - traced.keys()}, traced


# what an option is by its default None
BY_DEFAULT = {"exponent": 0.5, "tolerated": CLIENTS}


def numbers_of(name):
    """The values of the options that may be traced, by default, as far as these are numbers."""
    traced = {key: p.default for key, p in factories.options_of(SERVERS[name]).items() if factories.is_traced(p)}
    return {key: BY_DEFAULT.get(key) if value is None else value for key, value in traced.items()}


def is_of_the_rule(name, options):
    """Whether a sweep can be run together with the rule's defaults: it fixes the same, and the defaults are numbers."""
    (fixed, traced), numbers = split(options), numbers_of(name)
    same = {key: value for key, value in RULES[name][0].items() if key not in numbers}
    return fixed == same and all(numbers[key] is not None for key in traced)


ALONE = [sweep for sweep in SWEEPS if not is_of_the_rule(*sweep[:2])]


def equal(paths, weights, books, uploads):
    """Compare with the textbook's rules, (rule, guards) each; return the textbook's paths."""
    expected = [textbook.play(flat(start_params()), uploads, *book) for book in books]
    for have, weight, (path, effective) in zip(paths, weights, expected, strict=True):
        np.testing.assert_allclose(have, path, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weight, effective, rtol=1e-12)
    return [path for path, _ in expected]


@pytest.mark.float64
@pytest.mark.parametrize("name", SERVERS)
def test_a_rule_its_guard_rails_and_its_numbers_equal_its_numpy_loop(name):
    """One program: the defaults under every guard, then the sweeps over numbers that leave other options alone."""
    (options, book), uploads, numbers = RULES[name], random_uploads(31), numbers_of(name)
    given = {key: value for key, value in options.items() if key in numbers}
    books, rows = [(book, guards) for guards in GUARDED], [given | guards._asdict() for guards in GUARDED]
    for columns, of in (sweep[1:] for sweep in SWEEPS if sweep[0] == name and sweep not in ALONE):
        traced = split(columns)[1]
        books += [(of(*values), GUARDED[0]) for values in zip(*traced.values())]
        rows += [GUARDED[0]._asdict() | dict(zip(traced, values)) for values in zip(*traced.values())]
    columns = {key: [row.get(key, numbers[key]) for row in rows] for row in rows for key in row}
    fixed = {key: value for key, value in options.items() if key not in numbers}
    plain, *others = equal(*swept(name, uploads, fixed, columns), books, uploads)
    assert len(np.unique(plain[:, 0])) > 10
    assert all(np.abs(path - plain).max() > 1e-4 for path in others[: len(GUARDED) - 1])


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options", "book"), ALONE, ids=[f"{n}-{'-'.join(o)}" for n, o, _ in ALONE])
def test_options_are_those_of_the_numpy_loop_and_numbers_may_be_traced(name, options, book):
    (fixed, traced), uploads = split(options), random_uploads(12, 30)
    books = [(book(*values),) for values in zip(*traced.values())]
    equal(*swept(name, uploads, fixed, traced), books, uploads)


CORRECTIONS = ["orthograd", "orthopos", "orthostrict"]
# A rule of each file, and those with an option that is None by default and then a number.
WITH_NONE = [n for n in SERVERS if any(p.default is None for key, p in factories.options_of(SERVERS[n]).items()
             if key not in GUARDS)]  # fmt: skip
CLOSING = sorted({*{factory.__module__: name for name, factory in SERVERS.items()}.values(), *WITH_NONE})


@pytest.mark.float64
@pytest.mark.parametrize("name", CLOSING)
def test_a_run_whose_every_arrival_closes_may_say_so_once(name):
    (options, book), uploads = RULES[name], closing(random_uploads(7))
    _, path, weights = run(SERVERS[name], start_params(), uploads, always_closes=True, **options)
    expected, effective = textbook.play(flat(start_params()), uploads, book)
    np.testing.assert_allclose(path, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(weights, effective, rtol=1e-12)


OPTIMISERS = ["fedavgm", "fedadagrad", "fedadam", "fedyogi"]
WEIGHTED = [
    *((name, {"weighting": kind}, weight) for name in OPTIMISERS for kind, weight in (("uniform", 1), ("examples", 7))),
    ("fedcompass", {"staleness": "hinge", "slope": 3.0, "threshold": 2.0}, textbook.hinge(6, 3.0, 2.0)),
    ("fedasync", {"staleness": "hinge", "slope": 3.0, "threshold": 2.0}, 0.6 * textbook.hinge(6, 3.0, 2.0)),
]


@pytest.mark.parametrize(("name", "options", "weight"), WEIGHTED)
def test_choices_of_a_weight_give_it(name, options, weight):
    """What the weight does is that of the loops above."""
    rule = SERVERS[name](**options)
    given = arrival(jnp.ones(3), jnp.zeros(3), 6, weight=7.0)
    np.testing.assert_allclose(received(rule)(*rule.init(jnp.zeros(3)), given)[2].weight, weight, rtol=1e-6)


DISCOUNT = set(factories.options_of(discount))
ELSEWHERE = {"pairing"}  # in ``test_adpsgd.py``: who averages with whom leaves the mean of the models alone


def test_every_rule_and_every_option_has_a_textbook_version():
    assert set(GUARDS) == set(factories.options_of(guard_rails))
    assert set(RULES) == set(SERVERS)
    for name, factory in SERVERS.items():
        tried = {*RULES[name][0], *(key for other, options, _ in SWEEPS + WEIGHTED if other == name for key in options)}
        own = set(factories.options_of(factory))
        assert own - DISCOUNT - ELSEWHERE - {*GUARDS} <= tried and own >= {*GUARDS}
        assert not own & DISCOUNT or (own >= DISCOUNT and "exponent" in tried)
    assert {key for _, options, _ in SWEEPS for key in options} >= DISCOUNT
    # only the sweep of orthograd leaves it out
    assert len({factories.options_of(SERVERS[name])["per"].default for name in CORRECTIONS}) == 1


# --- identities --------------------------------------------------------------------------------

seeds = st.integers(0, 2**31)


def end(factory, uploads, **options):
    """Params [D] at the end of a run from ``start_params()``."""
    return run(factory, start_params(), uploads, **options)[1][-1]


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, a=st.floats(0.01, 0.99), k=st.integers(1, 12))
def test_fedasync_from_one_dispatch_is_asgd_with_geometric_weights(seed, a, k):
    """``x_k = x_0 + sum_i a (1 - a)^(k - i) Delta_i`` when all k clients started from x_0."""
    uploads = [u._replace(start=flat(start_params())) for u in closing(random_uploads(seed, k, rejected=0.0))]
    weighted = [u._replace(delta=a * (1 - a) ** (k - i) * u.delta) for i, u in enumerate(uploads, start=1)]
    mixed = end(fedasync, uploads, mixing=a, staleness="constant")
    np.testing.assert_allclose(mixed, end(asgd, weighted, server_lr=1.0), rtol=1e-10, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_fedbuff_over_all_clients_without_staleness_is_uniform_fedavg(seed, lr):
    uploads = closing(random_uploads(seed, 12, rejected=0.0), at=range(3, 12, 4))
    expected = end(fedavg, uploads, weighting="uniform", server_lr=lr)
    constant = end(fedbuff, uploads, staleness="constant", server_lr=lr)
    fresh = end(fedbuff, [u._replace(staleness=0) for u in uploads], server_lr=lr)
    np.testing.assert_allclose(constant, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(fresh, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_ca2fl_whose_buffer_holds_every_client_is_uniform_fedavg(seed, lr):
    """The caches cancel: ``h + mean(Delta_i - h_i) = mean Delta_i``."""
    uploads = closing(random_uploads(seed, 3 * CLIENTS, rejected=0.0), at=range(CLIENTS - 1, 3 * CLIENTS, CLIENTS))
    expected = end(fedavg, uploads, weighting="uniform", server_lr=lr)
    np.testing.assert_allclose(end(ca2fl, uploads, server_lr=lr), expected, atol=1e-10)
    assert np.abs(end(ca2fl, uploads, clients=CLIENTS + 1, server_lr=lr) - expected).max() > 1e-4 * lr


@pytest.mark.parametrize("weight", [jnp.int32(7), 7])
@pytest.mark.parametrize("name", ["fedasync", "fedavg", "orthofl_released", "fednova", "dc_asgd", "krum"])
def test_an_integer_number_of_examples_is_as_good_as_a_float(name, weight):
    """One rule of each way to weigh uploads."""
    rule = SERVERS[name]()

    def after(weight):
        number = jnp.int32
        arrival = Arrival(jnp.ones(3), jnp.zeros(3), number(2), weight, number(0), 1.0, jnp.bool_(True), number(2))
        return received(rule)(*rule.init(jnp.zeros(3)), arrival)

    have, want = after(weight), after(jnp.float32(7))
    assert want[2].weight > 0.3
    jax.tree.map(np.testing.assert_array_equal, have, want)
    assert [leaf.dtype for leaf in jax.tree.leaves(have)] == [leaf.dtype for leaf in jax.tree.leaves(want)]


@pytest.mark.parametrize(("name", "options"), [("dc_asgd", {}), ("dc_asgd_a", {"clip": 5.0})])
def test_a_delta_whose_square_overflows_is_rejected(name, options):
    good = closing(random_uploads(5, 6, rejected=0.0))
    huge = Upload(np.full(D, 1e30), good[0].start, 0, 4.0, True)
    before = run(SERVERS[name], start_params(), good, **options)
    after = run(SERVERS[name], start_params(), [*good, huge], **options)
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    np.testing.assert_array_equal(after[2], [*before[2], 0.0])
    assert np.isfinite(after[1]).all()
