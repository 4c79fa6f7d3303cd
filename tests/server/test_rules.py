"""Each server rule against its plain NumPy loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.base import factories
from fedjax_async.geometry import family
from fedjax_async.server import SERVERS, discount, guard_rails
from tests.server import made_up, textbook
from tests.server.books import BOOKS
from tests.server.made_up import CLIENTS, arrival, closing, flat, random_uploads, received, run, start_params

# Options of the rules that are compared under every guard rail; the others have their defaults.
RULES = {name: {} for name in SERVERS} | {
    "quafl": {"size": 4},
    "orthofl_no_average": {"per": "whole"},
    "feddyn": {"alpha": 0.5},
    "fedmedian": {"size": 16},
    "trimmed_mean": {"size": 16},
    "krum": {"size": 16},
    "dc_asgd_a": {"strength": 0.2},
    "orthograd": {"per": "layer"},
    "orthopos": {"per": "tensor"},
    "orthostrict": {"per": "whole"},
    "orthodyn": {"fraction": 0.9, "decay": 0.5},
    "fedmrur": {"weighting": "examples"},
}
GUARDS = textbook.Guards._fields
GUARDED = [
    textbook.Guards(),
    textbook.Guards(clip=2.5),
    textbook.Guards(overstale_after=6),
    textbook.Guards(clip=2.0, overstale_after=4, overstale=0.1),
]
KEYS = jax.random.split(made_up.KEY, made_up.LENGTH)


def book_of(name, options):
    return BOOKS[name](**options, **({"keys": KEYS} if name == "adpsgd" else {}))


def swept(name, uploads, fixed, values):
    """Params [V, E, D] and weights [V, E] of a sweep over the columns of ``values``, in one program."""
    inner = family(fixed.get("curve", "quadratic"), fixed.get("bends")).inner
    arrivals = made_up.uploading(name, made_up.stacked(uploads), inner, "regions" in fixed)

    @jax.jit
    @jax.vmap
    def sweep(values):
        _, path, weights = made_up.receive_all(SERVERS[name](**fixed, **values), start_params(), arrivals)
        return path, weights

    path, weights = sweep({key: jnp.asarray(column, float) for key, column in values.items()})
    return flat(path), weights


UNIFORM, LR, EXPONENT = {"weighting": "uniform"}, {"server_lr": [1.0, 0.3]}, {"exponent": [0.0, 2.0]}
MIXING, HINGE = {"mixing": [0.6, 1.0]}, {"staleness": "hinge", "slope": [10.0, 1.0], "threshold": [4.0, 0.0]}
MOMENTS = {"server_lr": [0.1, 0.3], "b1": [0.9, 0.5], "b2": [0.99, 0.9], "eps": [1e-3, 0.1]}
OF_PORT = {"likeness_weight": [1.0, 0.0], "age_weight": [3.0, 0.5], "bound": [10.0, 2.0]}
OF_FADAS = MOMENTS | {"server_lr": [0.3, 0.1], "eps": [1e-8, 0.1], "tolerated": [1.0, 6.0]}
PHASES, SHARE = {"phases": "orthograd+asgd+orthopos"}, {"switch": "share"}
OF_CURVE = {"server_lr": [0.6, 1.0], "lowest": [0.2, 1.0], "swa": [0.5, 0.2], "momentum": [0.5, 0.2]}
OF_CHAIN = {"cycle": 3, "swa": 0.3, "overwrite": 6, "momentum": 0.5, "dominance": False, "control": "none", "bends": 3}
IN_SPACE = {"step": "geodesic", "momentum": 0.5, "momentum_on": "space", "correction": "orthopos", "per": "tensor"}
# Every numeric option with two values each, which a sweep vmaps over, and every choice of the others.
SWEEPS = [
    ("fedavg", UNIFORM | LR),
    ("fedavgm", {"server_lr": [0.5, 0.3], "momentum": [0.9, 0.1]}),
    ("fedadagrad", {"server_lr": [0.1, 0.3], "eps": [1e-3, 0.5], "initial": [0.0, 0.1]}),
    *((name, MOMENTS) for name in ("fedadam", "fedyogi")),
    ("fedasync", MIXING | EXPONENT),
    *((name, LR) for name in ("asgd", "asynfl", "ca2fl", "adpsgd", "malenia", "ringleader", "fedvarp", "scaffold")),
    ("delay_adaptive_asgd", {"tolerated": [5.0, 0.0]} | LR),
    ("delay_adaptive_asgd", {"late": "drop", "tolerated": [7.0, 3.0]} | LR),
    *((name, columns | LR) for name in ("fedbuff", "pisces") for columns in (EXPONENT, HINGE)),
    ("fedcompass", LR | EXPONENT),
    ("port", LR | OF_PORT),
    ("fedstaleweight", {"window": 2} | LR),
    ("fedstale", LR | {"beta": [0.0, 0.7]}),
    ("mifa", LR | {"wait": True}),
    ("ace", LR | {"wait": False}),
    ("fadas", {"adaptation": "inverse"} | OF_FADAS),
    ("fadas", {"adaptation": "off", "server_lr": [0.001, 0.1]}),
    ("orthofl", {"per": "layer", "reference": "average"} | MIXING | EXPONENT),
    ("orthofl", {"reference": "shared"} | MIXING | EXPONENT),
    ("orthofl_pairwise", {"per": "tensor"} | MIXING | EXPONENT),
    ("orthofl_released", MIXING | EXPONENT),
    ("fednova", LR),
    ("fednova", UNIFORM | LR),
    ("feddyn", {"alpha": [0.5, 0.1]}),
    ("fedmedian", {"size": 16} | LR | EXPONENT),
    ("trimmed_mean", {"size": 16, "trim": [0.3, 0.2]} | LR | EXPONENT),
    ("krum", {"size": 16, "byzantine": [0.0, 1.0], "select": [3.0, 2.0]} | LR | EXPONENT),
    ("dc_asgd", {"strength": [0.04, 0.2]} | LR),
    ("dc_asgd_a", {"strength": [0.2, 0.1], "decay": [0.95, 0.5], "eps": [1e-7, 0.1]} | LR),
    ("orthograd", LR),
    ("orthopos", {"per": "tensor"} | LR),
    ("orthostrict", {"per": "whole"} | LR),
    ("orthodyn", LR),
    (
        "orthodyn",
        PHASES | {"switch": "norm", "fraction": [0.9, 0.7], "second_fraction": [0.8, 0.5], "decay": [0.5, 0.2]} | LR,
    ),
    ("orthodyn", PHASES | SHARE | {"fraction": [0.3, 0.5], "second_fraction": [0.6, 0.9], "decay": [0.5, 0.2]} | LR),
    # the second fraction by its default
    ("orthodyn", PHASES | {"fraction": 0.9, "decay": 0.5} | LR),
    ("orthodyn", PHASES | SHARE | {"fraction": 0.2, "per": "layer"} | LR),
    ("floco", UNIFORM | {"vertices": 3} | LR | {"spread": [0.0, 1.0]}),
    ("floco", UNIFORM | {"regions": 0.5, "signal": 7, "radius": [0.3, 1.0]} | LR),
    ("fedmrur", {"weighting": "examples"} | LR),
    ("fedmrur", {"reaggregate": False} | LR),
    ("asynccurve", LR),
    ("asynccurve", {"cycle": 4, "curve": "cubic"} | OF_CURVE | {"fraction": [0.9, 0.7], "decay": [0.5, 0.2]}),
    ("asynccurve", OF_CHAIN | {"curve": "chain", "weighting": "examples"} | LR),
    ("asynccurve", IN_SPACE | LR),
    ("asynccurve", {"step": "line", "warm": "off", "correction": "fedasync", "dominance": False} | LR),
    ("asynccurve", {"step": "line", "warm": "off", "fraction": 0.3, "weighting": "examples"} | SHARE | LR),
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
    same = {key: value for key, value in RULES[name].items() if key not in numbers}
    return fixed == same and all(numbers[key] is not None for key in traced)


ALONE = [sweep for sweep in SWEEPS if not is_of_the_rule(*sweep)]


def rows(fixed, traced):
    """The options of each run of a sweep."""
    return [fixed | dict(zip(traced, values)) for values in zip(*traced.values())]


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
    options, uploads, numbers = RULES[name], random_uploads(31), numbers_of(name)
    fixed = {key: value for key, value in options.items() if key not in numbers}
    given = {key: value for key, value in options.items() if key in numbers}
    runs = [(given, guards) for guards in GUARDED]
    for columns in (sweep[1] for sweep in SWEEPS if sweep[0] == name and sweep not in ALONE):
        runs += [(row, GUARDED[0]) for row in rows({}, split(columns)[1])]
    books = [(book_of(name, fixed | row), guards) for row, guards in runs]
    table = [row | guards._asdict() for row, guards in runs]
    columns = {key: [row.get(key, numbers[key]) for row in table] for row in table for key in row}
    plain, *others = equal(*swept(name, uploads, fixed, columns), books, uploads)
    assert len(np.unique(plain[:, 0])) > 10
    assert all(np.abs(path - plain).max() > 1e-4 for path in others[: len(GUARDED) - 1])


@pytest.mark.float64
@pytest.mark.parametrize(("name", "options"), ALONE, ids=[f"{n}-{'-'.join(o)}" for n, o in ALONE])
def test_options_are_those_of_the_numpy_loop_and_numbers_may_be_traced(name, options):
    (fixed, traced), uploads = split(options), random_uploads(12, 30)
    books = [(book_of(name, row),) for row in rows(fixed, traced)]
    equal(*swept(name, uploads, fixed, traced), books, uploads)


CORRECTIONS = ["orthograd", "orthopos", "orthostrict"]
# A rule of each file, and those with an option that is None by default and then a number.
WITH_NONE = [n for n in SERVERS if any(p.default is None for key, p in factories.options_of(SERVERS[n]).items()
             if key not in GUARDS)]  # fmt: skip
CLOSING = sorted({*{factory.__module__: name for name, factory in SERVERS.items()}.values(), *WITH_NONE})


@pytest.mark.float64
@pytest.mark.parametrize("name", CLOSING)
def test_a_run_whose_every_arrival_closes_may_say_so_once(name):
    uploads = closing(random_uploads(7))
    _, path, weights = run(SERVERS[name], start_params(), uploads, always_closes=True, **RULES[name])
    expected, effective = textbook.play(flat(start_params()), uploads, book_of(name, RULES[name]))
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
ELSEWHERE = {"pairing"}  # in ``test_messages.py``: who averages with whom leaves the mean of the models alone


def test_every_rule_and_every_option_has_a_textbook_version():
    assert set(GUARDS) == set(factories.options_of(guard_rails))
    assert set(RULES) == set(BOOKS) == set(SERVERS)
    for name, factory in SERVERS.items():
        tried = {*RULES[name], *(key for other, options, *_ in SWEEPS + WEIGHTED if other == name for key in options)}
        own = set(factories.options_of(factory))
        assert own - DISCOUNT - ELSEWHERE - {*GUARDS} <= tried and own >= {*GUARDS}
        assert not own & DISCOUNT or (own >= DISCOUNT and "exponent" in tried)
    assert {key for _, options in SWEEPS for key in options} >= DISCOUNT
    # only the sweep of orthograd leaves it out
    assert len({factories.options_of(SERVERS[name])["per"].default for name in CORRECTIONS}) == 1
