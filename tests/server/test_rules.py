"""Each server rule against its plain NumPy loop, and the identities among rules, in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import registry
from fedjax_async.server import (
    SERVERS,
    asgd,
    ca2fl,
    discount,
    fedasync,
    fedavg,
    fedbuff,
    guard_rails,
    mean,
    rule,
    scale_by,
)
from fedjax_async.server.aggregate import Buffer
from fedjax_async.server.rule import RuleState, known
from fedjax_async.types import Arrival, Facts
from tests.server import textbook, textbook_curve, textbook_delay, textbook_memory
from tests.server.made_up import (
    CLIENTS,
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

corrected = textbook_delay.corrected
GROUPS = {"whole": textbook_memory.WHOLE, "layer": textbook_memory.LAYERS, "tensor": textbook_memory.TENSORS}
PHASES = "orthograd+asgd+orthopos"

# name in SERVERS, its options, the textbook's version
CASES = [
    ("fedavg", {}, textbook.averaging(textbook.add(), by_examples=True)),
    ("fedavgm", {}, textbook.averaging(*textbook.momentum(), by_examples=True)),
    ("fedadagrad", {}, textbook.averaging(*textbook.adagrad(), by_examples=True)),
    ("fedadam", {}, textbook.averaging(*textbook.adam(), by_examples=True)),
    ("fedyogi", {}, textbook.averaging(*textbook.yogi(), by_examples=True)),
    ("fedasync", {}, textbook.mixing()),
    ("fedasync", {"staleness": "constant"}, textbook.mixing(s=textbook.constant)),
    ("fedasync", {"staleness": "hinge"}, textbook.mixing(s=textbook.hinge)),
    ("asgd", {}, textbook.averaging(textbook.add())),
    ("asynfl", {}, textbook.over_all(CLIENTS)),
    ("fedbuff", {}, textbook.averaging(textbook.add(0.7), s=textbook.polynomial)),
    ("ca2fl", {}, textbook_memory.ca2fl(0.3)),
    ("fadas", {}, textbook_memory.fadas(0.001, adaptation="scaled")),
    ("fadas", {"adaptation": "inverse"}, textbook_memory.fadas(0.001)),
    ("fadas", {"adaptation": "off"}, textbook_memory.fadas(0.001, adaptation="off")),
    ("orthofl", {}, textbook_memory.orthofl()),
    ("orthofl", {"reference": "shared"}, textbook_memory.orthofl(first_counts_whole=True)),
    ("orthofl_no_average", {}, textbook_memory.handed_on(textbook_memory.LAYERS)),
    ("orthofl_no_average", {"per": "tensor"}, textbook_memory.handed_on(textbook_memory.TENSORS)),
    ("orthofl_no_average", {"per": "whole"}, textbook_memory.handed_on(textbook_memory.WHOLE)),
    ("orthofl_pairwise", {}, textbook_memory.orthofl()),
    ("orthofl_released", {}, textbook_memory.orthofl_released()),
    ("fednova", {}, textbook_memory.fednova()),
    ("feddyn", {"alpha": 0.5}, textbook_memory.feddyn(0.5)),
    ("scaffold", {}, textbook.averaging(textbook.add())),
    ("fedmedian", {"size": 16}, textbook.robust(textbook.median)),
    ("trimmed_mean", {"size": 16}, textbook.robust(textbook.trimmed_mean)),
    ("krum", {"size": 16}, textbook.robust(textbook.krum)),
    ("dc_asgd", {}, corrected(textbook_delay.dc_asgd())),
    ("dc_asgd_a", {"strength": 0.2}, corrected(textbook_delay.dc_asgd_a(0.2))),
    *[
        (name, {"per": per}, corrected(textbook_delay.ortho(*numbers, groups)))
        for name, numbers in {"orthograd": (0, 0), "orthopos": (1, 0), "orthostrict": (0, 1)}.items()
        for per, groups in GROUPS.items()
    ],
    ("orthodyn", {"fraction": 0.9, "decay": 0.5}, corrected(textbook_delay.orthodyn((0.9,), decay=0.5))),
    ("orthodyn", {}, corrected(textbook_delay.orthodyn())),
    ("orthodyn", {"switch": "share", "fraction": 0.3}, corrected(textbook_delay.orthodyn((0.3,), share=True))),
    (
        "orthodyn",
        {"phases": PHASES, "fraction": 0.9, "decay": 0.5},
        corrected(textbook_delay.orthodyn((0.9, 0.45), PHASES.split("+"), 0.5)),
    ),
    (
        "orthodyn",
        {"phases": PHASES, "switch": "share", "fraction": 0.2, "per": "layer"},
        corrected(textbook_delay.orthodyn((0.2, 0.6), PHASES.split("+"), groups=textbook_memory.LAYERS, share=True)),
    ),
    ("floco", {}, textbook.averaging(textbook.add(), by_examples=True)),
    (
        "fedmrur",
        {"weighting": "examples"},
        textbook.averaging(textbook.add(), by_examples=True)._replace(combine=textbook_curve.reaggregated),
    ),
    ("fedmrur", {"reaggregate": False}, textbook.averaging(textbook.add())),
    ("asynccurve", {}, textbook_curve.asynccurve()),
    (
        "asynccurve",
        {"cycle": 3, "swa": 0.3, "overwrite": 6, "momentum": 0.5, "dominance": False, "control": "none"},
        textbook_curve.asynccurve(swa=0.3, momentum=0.5, cycle=3, overwrite=6, dominance=False, control="none"),
    ),
    (
        "asynccurve",
        {"step": "geodesic", "momentum": 0.5, "momentum_on": "space", "correction": "orthopos", "per": "tensor"},
        textbook_curve.asynccurve(
            momentum=0.5,
            correct=textbook_delay.ortho(1, 0, textbook_memory.TENSORS),
            step="geodesic",
            momentum_on="space",
        ),
    ),
    (
        "asynccurve",
        {"step": "line", "warm": "off", "switch": "share", "fraction": 0.3},
        textbook_curve.asynccurve(step="line", correct=textbook_delay.orthodyn((0.3,), share=True)),
    ),
]


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options", "book"), CASES, ids=[f"{n}-{[*o.values()]}" for n, o, _ in CASES])
def test_rule_equals_its_numpy_loop(name, options, book):
    uploads = random_uploads(sum(map(ord, name)))
    params = start_params()
    _, path, weights = run(SERVERS[name], params, uploads, **options)
    expected, effective = textbook.play(flat(params), uploads, book)
    np.testing.assert_allclose(path, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(weights, effective, rtol=1e-12)
    assert len(np.unique(expected[:, 0])) > 10


# Every numeric option with two values each, which a sweep vmaps over, and the textbook's version of one of the two.
SWEEPS = [
    ("fedavg", {"weighting": "uniform", "server_lr": [1.0, 0.3]}, lambda lr: textbook.averaging(textbook.add(lr))),
    (
        "fedavgm",
        {"weighting": "uniform", "server_lr": [0.5, 0.3], "momentum": [0.9, 0.1]},
        lambda *values: textbook.averaging(*textbook.momentum(*values)),
    ),
    (
        "fedadagrad",
        {"weighting": "uniform", "server_lr": [0.1, 0.3], "eps": [1e-3, 0.5], "initial": [0.0, 0.1]},
        lambda *values: textbook.averaging(*textbook.adagrad(*values)),
    ),
    (
        "fedadam",
        {"weighting": "uniform", "server_lr": [0.1, 0.3], "b1": [0.9, 0.5], "b2": [0.99, 0.9], "eps": [1e-3, 0.1]},
        lambda *values: textbook.averaging(*textbook.adam(*values)),
    ),
    (
        "fedyogi",
        {"weighting": "uniform", "server_lr": [0.1, 0.3], "b1": [0.9, 0.5], "b2": [0.99, 0.9], "eps": [1e-3, 0.1]},
        lambda *values: textbook.averaging(*textbook.yogi(*values)),
    ),
    (
        "fedasync",
        {"mixing": [0.6, 1.0], "exponent": [0.0, 2.0]},
        lambda a, p: textbook.mixing(a, lambda tau: textbook.polynomial(tau, p)),
    ),
    (
        "fedasync",
        {"staleness": "hinge", "mixing": [0.6, 0.2], "slope": [10.0, 1.0], "threshold": [4.0, 0.0]},
        lambda a, slope, b: textbook.mixing(a, lambda tau: textbook.hinge(tau, slope, b)),
    ),
    ("asgd", {"server_lr": [1.0, 0.3]}, lambda lr: textbook.averaging(textbook.add(lr))),
    (
        "fedbuff",
        {"server_lr": [1.0, 0.3], "exponent": [0.0, 2.0]},
        lambda lr, p: textbook.averaging(textbook.add(lr), s=lambda tau: textbook.polynomial(tau, p)),
    ),
    (
        "fedbuff",
        {"staleness": "hinge", "server_lr": [1.0, 0.3], "slope": [10.0, 1.0], "threshold": [4.0, 0.0]},
        lambda lr, slope, b: textbook.averaging(textbook.add(lr), s=lambda tau: textbook.hinge(tau, slope, b)),
    ),
    ("asynfl", {"server_lr": [1.0, 0.3]}, lambda lr: textbook.over_all(CLIENTS, lr)),
    ("ca2fl", {"server_lr": [1.0, 0.3]}, textbook_memory.ca2fl),
    (
        "fadas",
        {
            **{"adaptation": "inverse", "server_lr": [0.3, 0.1], "b1": [0.9, 0.5], "b2": [0.99, 0.9]},
            **{"eps": [1e-8, 0.1], "tolerated": [1.0, 6.0]},
        },
        lambda *values: textbook_memory.fadas(*values[:4], tolerated=values[4]),
    ),
    *[
        (
            name,
            {**fixed, "mixing": [0.6, 1.0], "exponent": [0.0, 2.0]},
            lambda a, p, first=first: textbook_memory.orthofl(a, lambda tau: textbook.polynomial(tau, p), first),
        )
        for name, fixed, first in [
            ("orthofl", {"per": "layer", "reference": "average"}, False),
            ("orthofl", {"reference": "shared"}, True),
            ("orthofl_pairwise", {"per": "tensor"}, False),
        ]
    ],
    (
        "orthofl_released",
        {"mixing": [0.6, 1.0], "exponent": [0.0, 2.0]},
        lambda a, p: textbook_memory.orthofl_released(a, lambda tau: textbook.polynomial(tau, p)),
    ),
    ("fednova", {"server_lr": [1.0, 0.3]}, textbook_memory.fednova),
    ("fednova", {"weighting": "uniform", "server_lr": [1.0, 0.3]}, lambda lr: textbook_memory.fednova(lr, False)),
    ("feddyn", {"alpha": [0.5, 0.1]}, textbook_memory.feddyn),
    ("scaffold", {"server_lr": [1.0, 0.3]}, lambda lr: textbook.averaging(textbook.add(lr))),
    (
        "fedmedian",
        {"size": 16, "server_lr": [1.0, 0.3], "exponent": [0.0, 2.0]},
        lambda lr, p: textbook.robust(textbook.median, lr, lambda tau: textbook.polynomial(tau, p)),
    ),
    (
        "trimmed_mean",
        {"size": 16, "trim": [0.3, 0.2], "server_lr": [1.0, 0.3], "exponent": [0.0, 2.0]},
        lambda trim, lr, p: textbook.robust(
            lambda d: textbook.trimmed_mean(d, trim), lr, lambda tau: textbook.polynomial(tau, p)
        ),
    ),
    (
        "krum",
        {"size": 16, "byzantine": [0.0, 1.0], "select": [3.0, 2.0], "server_lr": [1.0, 0.3], "exponent": [0.0, 2.0]},
        lambda f, m, lr, p: textbook.robust(
            lambda d: textbook.krum(d, int(f), int(m)), lr, lambda tau: textbook.polynomial(tau, p)
        ),
    ),
    (
        "dc_asgd",
        {"strength": [0.04, 0.2], "server_lr": [1.0, 0.3]},
        lambda lam, lr: corrected(textbook_delay.dc_asgd(lam), lr),
    ),
    (
        "dc_asgd_a",
        {"strength": [0.2, 0.1], "decay": [0.95, 0.5], "eps": [1e-7, 0.1], "server_lr": [1.0, 0.3]},
        lambda lam, m, eps, lr: corrected(textbook_delay.dc_asgd_a(lam, m, eps), lr),
    ),
    ("orthograd", {"server_lr": [1.0, 0.3]}, lambda lr: corrected(textbook_delay.ortho(0, 0), lr)),
    ("orthopos", {"server_lr": [1.0, 0.3]}, lambda lr: corrected(textbook_delay.ortho(1, 0), lr)),
    ("orthostrict", {"server_lr": [1.0, 0.3]}, lambda lr: corrected(textbook_delay.ortho(0, 1), lr)),
    *[
        (
            "orthodyn",
            {"switch": switch, "phases": PHASES, "decay": [0.5, 0.2], **fractions, "server_lr": [1.0, 0.3]},
            lambda m, f, g, lr, share=switch == "share": corrected(
                textbook_delay.orthodyn((f, g), PHASES.split("+"), m, share=share), lr
            ),
        )
        for switch, fractions in [
            ("norm", {"fraction": [0.9, 0.7], "second_fraction": [0.8, 0.5]}),
            ("share", {"fraction": [0.3, 0.5], "second_fraction": [0.6, 0.9]}),
        ]
    ],
    (
        "floco",
        {"weighting": "uniform", "vertices": 3, "server_lr": [1.0, 0.3], "spread": [0.0, 1.0]},
        lambda lr, spread: textbook.averaging(textbook.add(lr)),
    ),
    (
        "fedmrur",
        {"server_lr": [1.0, 0.3]},
        lambda lr: textbook.averaging(textbook.add(lr))._replace(combine=textbook_curve.reaggregated),
    ),
    (
        "asynccurve",
        {
            "cycle": 4,
            "server_lr": [0.6, 1.0],
            "lowest": [0.2, 1.0],
            "swa": [0.5, 0.2],
            "momentum": [0.5, 0.2],
            "fraction": [0.9, 0.7],
            "decay": [0.5, 0.2],
        },
        lambda lr, lowest, swa, momentum, fraction, decay: textbook_curve.asynccurve(
            lr, lowest, swa, momentum, textbook_delay.orthodyn((fraction,), decay=decay), cycle=4
        ),
    ),
]
BOOKS = {name: (options, book) for name, options, book in reversed(CASES)}  # the first case of each rule
DISCOUNT, GUARDS = set(registry.options_of(discount)), set(registry.options_of(guard_rails))


def test_every_rule_and_every_option_has_a_textbook_version():
    assert {name for name, _, _ in CASES} == set(SERVERS)
    for name, factory in SERVERS.items():
        swept = {key for other, options, _ in SWEEPS + CASES if other == name for key in options}
        own = set(registry.options_of(factory))
        assert own - DISCOUNT - GUARDS <= swept and own >= GUARDS
        assert not own & DISCOUNT or (own >= DISCOUNT and "exponent" in swept)
    assert {key for _, options, _ in SWEEPS for key in options} >= DISCOUNT


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options", "book"), SWEEPS, ids=[f"{n}-{'-'.join(o)}" for n, o, _ in SWEEPS])
def test_hyperparameters_may_be_traced(name, options, book):
    fixed = {key: value for key, value in options.items() if not isinstance(value, list)}
    swept = {key: value for key, value in options.items() if isinstance(value, list)}
    uploads = random_uploads(12, 30)
    params, arrivals = start_params(), stacked(uploads)

    @jax.jit
    @jax.vmap
    def sweep(values):
        _, path, weights = receive_all(SERVERS[name](**fixed, **values), params, uploading(name, arrivals))
        return path, weights

    paths, weights = sweep({key: jnp.asarray(value) for key, value in swept.items()})
    for i, values in enumerate(zip(*swept.values())):
        expected, effective = textbook.play(flat(params), uploads, book(*values))
        np.testing.assert_allclose(flat(paths)[i], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(weights[i], effective, rtol=1e-12)


@pytest.mark.float64
@pytest.mark.parametrize("name", SERVERS)
def test_a_run_whose_every_arrival_closes_may_say_so_once(name):
    uploads = closing(random_uploads(7))
    state, path, weights = run(SERVERS[name], start_params(), uploads)
    always, always_path, always_weights = run(SERVERS[name], start_params(), uploads, always_closes=True)
    np.testing.assert_allclose(always_path, path, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(always_weights, weights)
    states = (without_accumulated(always), without_accumulated(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), *states)


def without_accumulated(state):
    """The state without ``accumulated``, which is empty after a close, and () if every arrival closes."""

    def emptied(part):
        return part._replace(accumulated=()) if isinstance(part, RuleState) else part

    return jax.tree.map(emptied, state, is_leaf=lambda part: isinstance(part, RuleState))


GUARDED = {
    "clipped": {"clip": 2.5, "overstale_after": np.inf, "overstale": 0.0},
    "fresh": {"clip": np.inf, "overstale_after": 6, "overstale": 0.0},
    "both": {"clip": 2.0, "overstale_after": 4, "overstale": 0.1},
}


@pytest.mark.float64
@pytest.mark.parametrize("guards", GUARDED.values(), ids=GUARDED)
@pytest.mark.parametrize("name", SERVERS)
def test_guard_rails_equal_their_numpy_loop(name, guards):
    options, book = BOOKS[name]
    uploads = random_uploads(31)
    params = start_params()
    _, path, weights = run(SERVERS[name], params, uploads, **options, **guards)
    expected, effective = textbook.play(flat(params), uploads, book, textbook.Guards(**guards))
    np.testing.assert_allclose(path, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(weights, effective, rtol=1e-12)
    unguarded, _ = textbook.play(flat(params), uploads, book)
    assert np.abs(expected - unguarded).max() > 1e-4


@pytest.mark.float64
@pytest.mark.parametrize(
    ("name", "always_closes"),
    # orthofl_released counts staleness itself, see its guard rails above
    [*[(name, False) for name in SERVERS if name != "orthofl_released"], ("fedadam", True), ("krum", True)],
)
def test_a_step_of_too_stale_uploads_changes_nothing(name, always_closes):
    good = closing(random_uploads(3, 4, rejected=0.0, most_stale=5))
    bad = [u._replace(staleness=5 + i) for i, u in enumerate(closing(random_uploads(4, 5, rejected=0.0)))]
    options = BOOKS[name][0] | {"clip": np.inf, "overstale_after": 4, "overstale": 0.0}
    before, path, _ = run(SERVERS[name], start_params(), good, always_closes=always_closes, **options)
    after, _, weights = run(SERVERS[name], start_params(), good + bad, always_closes=always_closes, **options)
    jax.tree.map(np.testing.assert_array_equal, counted(after), counted(before))
    np.testing.assert_array_equal(weights[len(good) :], 0.0)
    assert np.abs(path[-1] - path[0]).min() > 0


def counted(state):
    """The state without the buffer rows beyond its count, which are undefined."""
    inner = getattr(state, "accumulated", None)
    return state._replace(accumulated=inner[1]) if isinstance(inner, Buffer) else state


@pytest.mark.float64
@pytest.mark.parametrize("always_closes", [False, True])
@pytest.mark.parametrize("name", SERVERS)
def test_a_step_with_none_accepted_changes_nothing(name, always_closes):
    good = closing(random_uploads(3, 4, rejected=0.0))
    bad = closing(random_uploads(4, 5, rejected=1.0))
    before, path, _ = run(SERVERS[name], start_params(), good, always_closes=always_closes)
    after, _, weights = run(SERVERS[name], start_params(), good + bad, always_closes=always_closes)
    jax.tree.map(np.testing.assert_array_equal, counted(after), counted(before))
    np.testing.assert_array_equal(weights[len(good) :], 0.0)
    assert np.abs(path[-1] - path[0]).min() > 0


@pytest.mark.float64
@pytest.mark.parametrize("name", [name for name in SERVERS if name != "orthofl_no_average"])  # never accumulates
def test_a_rejected_arrival_adds_nothing_but_still_closes(name):
    first, second, third = closing(random_uploads(5, 3, rejected=0.0), at=[])
    lost = random_uploads(6, 1, rejected=1.0)[0]
    with_lost = closing([first, lost, second, lost, third], at=[3, 4])
    _, path, _ = run(SERVERS[name], start_params(), with_lost)
    _, plain, _ = run(SERVERS[name], start_params(), closing([first, second, third], at=[1, 2]))
    np.testing.assert_allclose(path[[3, 4]], plain[[1, 2]], rtol=1e-12)
    np.testing.assert_array_equal(path[2], flat(start_params()))
    assert np.abs(path[4] - path[3]).min() > 0 and np.abs(path[3] - path[2]).min() > 0


OPTAX = {
    "fedavgm": optax.sgd(1.0, momentum=0.9),
    "fedadagrad": optax.adagrad(0.03, initial_accumulator_value=1e-6, eps=1e-3),
    "fedadam": optax.adam(0.01, b1=0.9, b2=0.99, eps=1e-3),
    "fedyogi": optax.yogi(0.01, b1=0.9, b2=0.99, eps=1e-3),
}


@pytest.mark.parametrize("name", OPTAX)
def test_server_optimisers_are_optax_on_the_averaged_delta(name):
    groups = [random_uploads(seed, 4, rejected=0.0) for seed in range(8)]
    uploads = closing([u for group in groups for u in group], at=range(3, 32, 4))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        _, path, _ = run(SERVERS[name], start_params(), uploads)
        params = jnp.asarray(flat(start_params()))
        state, update = OPTAX[name].init(params), jax.jit(OPTAX[name].update)
        for i, group in enumerate(groups):
            average = np.average([u.delta for u in group], axis=0, weights=[u.examples for u in group])
            updates, state = update(jnp.asarray(-average), state, params)
            params = params + updates
            np.testing.assert_allclose(path[4 * i + 3], params, rtol=1e-9, atol=1e-12)


def lion():
    return rule(optimizer=optax.lion(0.25, weight_decay=0.0))


@pytest.mark.float64
def test_any_optax_optimiser_serves_as_a_rule():
    """Lion's steps have the size of the learning rate, whatever the deltas."""
    _, path, _ = run(lion, start_params(), closing(random_uploads(1, 6, rejected=0.0)))
    np.testing.assert_allclose(np.abs(np.diff(path, axis=0)), 0.25, rtol=1e-12)


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
    np.testing.assert_allclose(mixed, end(asgd, weighted, server_lr=1.0), rtol=1e-9, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, a=st.floats(0.01, 1.0))
def test_fedasync_stays_between_the_server_and_the_clients(seed, a):
    uploads = random_uploads(seed, 12)
    models = np.array([flat(start_params()), *(u.start + u.delta for u in uploads if u.examples)])
    mixed = end(fedasync, uploads, mixing=a, staleness="constant")
    assert np.all(mixed >= models.min(axis=0) - 1e-12) and np.all(mixed <= models.max(axis=0) + 1e-12)


@pytest.mark.float64
def test_fedasync_with_full_mixing_takes_over_the_clients_model():
    uploads = closing(random_uploads(2, 10, rejected=0.0))
    _, path, _ = run(fedasync, start_params(), uploads, mixing=1.0, staleness="constant")
    np.testing.assert_allclose(path, [u.start + u.delta for u in uploads], rtol=1e-12, atol=1e-14)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_fedbuff_over_all_clients_without_staleness_is_uniform_fedavg(seed, lr):
    uploads = closing(random_uploads(seed, 12, rejected=0.0), at=range(3, 12, 4))
    expected = end(fedavg, uploads, weighting="uniform", server_lr=lr)
    constant = end(fedbuff, uploads, staleness="constant", server_lr=lr)
    fresh = end(fedbuff, [u._replace(staleness=0) for u in uploads], server_lr=lr)
    np.testing.assert_allclose(constant, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fresh, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_ca2fl_whose_buffer_holds_every_client_is_uniform_fedavg(seed, lr):
    """The caches cancel: ``h + mean(Delta_i - h_i) = mean Delta_i``."""
    uploads = closing(random_uploads(seed, 3 * CLIENTS, rejected=0.0), at=range(CLIENTS - 1, 3 * CLIENTS, CLIENTS))
    expected = end(fedavg, uploads, weighting="uniform", server_lr=lr)
    np.testing.assert_allclose(end(ca2fl, uploads, server_lr=lr), expected, atol=1e-10)
    assert np.abs(end(ca2fl, uploads, clients=CLIENTS + 1, server_lr=lr) - expected).max() > 1e-4 * lr


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_asgd_is_fedbuff_with_a_buffer_of_one_and_no_staleness_weight(seed, lr):
    uploads = closing(random_uploads(seed, 12))
    buffered = end(fedbuff, uploads, staleness="constant", server_lr=lr)
    np.testing.assert_allclose(end(asgd, uploads, server_lr=lr), buffered, rtol=1e-9, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, data=st.data())
def test_a_round_knows_no_order_and_no_unit_of_weight(seed, data):
    uploads = random_uploads(seed, 8)
    shuffled = [u._replace(examples=u.examples * 2.5) for u in data.draw(st.permutations(uploads))]
    for factory in (fedavg, fedbuff):
        ends = [end(factory, closing(some, at=[7])) for some in (uploads, shuffled)]
        np.testing.assert_allclose(ends[0], ends[1], rtol=1e-9, atol=1e-12)


def seventeenths(*, server_lr):
    return rule(optimizer=optax.sgd(server_lr), aggregate=mean(divisor=17))


@pytest.mark.float64
def test_a_divisor_replaces_the_sum_of_weights():
    uploads = closing(random_uploads(8, 8, rejected=0.5), at=[7])
    assert 0 < sum(u.examples > 0 for u in uploads) < 8
    expected = flat(start_params()) + 3 * sum(u.delta for u in uploads) / 17
    np.testing.assert_allclose(end(seventeenths, uploads, server_lr=3), expected, rtol=1e-12)


def by_client():
    return rule(scale_by(lambda arrival: 1.0 / (arrival.client.astype(float) + 2.0)), optimizer=optax.sgd(1.0))


@pytest.mark.float64
def test_recorded_weights_times_deltas_rebuild_the_run():
    """With every arrival closing, ``x_E = x_0 + sum_e weight_e Delta_e`` for additive rules."""
    uploads = closing(random_uploads(9, 30))
    _, path, weights = run(by_client, start_params(), uploads)
    deltas = np.array([u.delta for u in uploads])
    np.testing.assert_allclose(path[-1], flat(start_params()) + weights @ deltas, rtol=1e-9, atol=1e-12)
    assert set(np.round(1 / weights[weights > 0])) == set(range(2, 9))


@pytest.mark.parametrize("name", SERVERS)
def test_an_integer_number_of_examples_is_as_good_as_a_float(name):
    rule = SERVERS[name]()
    state, memory = rule.init(jnp.zeros(3))
    given = [
        Arrival(jnp.ones(3), jnp.zeros(3), jnp.int32(2), weight, jnp.int32(0), 1.0, jnp.bool_(True))
        for weight in (jnp.float32(7), jnp.int32(7), 7)
    ]
    each = [received(rule)(state, memory, uploading(name, arrival)) for arrival in given]
    assert each[0][2].weight > 0.3
    if name == "fedasync":
        np.testing.assert_allclose(rule.params(each[0][0]), 0.6 / np.sqrt(3), rtol=1e-6)
    for other in each[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, each[0])
        assert [leaf.dtype for leaf in jax.tree.leaves(other)] == [leaf.dtype for leaf in jax.tree.leaves(each[0])]


@pytest.mark.parametrize("name", SERVERS)
def test_a_function_that_given_would_make_anew_is_not_replaced_alone(name):
    """The run takes its functions from ``given``, so a function that was replaced before would have no effect."""
    rule = SERVERS[name]()
    if rule.given is None:
        return

    @functools.wraps(rule.receive)
    def replaced(*arguments):
        raise AssertionError("never called")

    for facts in (Facts(10), Facts(10, True, 50, 50, 10)):
        known(known(rule, facts), facts)  # an unchanged rule passes, also with facts given before
        with pytest.raises(ValueError, match=r"^rule.receive = '.*': must be replaced together with given"):
            known(rule._replace(receive=replaced), facts)
    assert known(rule._replace(receive=replaced, given=None), Facts(10)).receive is replaced
    free = rule._replace(given=lambda facts: rule._replace(receive=replaced))
    assert known(free, Facts(10)).receive is replaced  # a user's own ``given`` may change anything
