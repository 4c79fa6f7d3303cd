"""Grids: the number, order and names of runs, and what cannot be used."""

import json
import math
import re
import tomllib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import grammar
from fedjax_async.config import Settings
from fedjax_async.config.grid import LONGEST_NAME, expand, labels, point_name, setting_title, swept
from fedjax_async.config.paths import FIELDS, changed, checked, flat, value_of, values_of
from fedjax_async.config.settings import as_dict, fields_of
from fedjax_async.engine.peer_points import GLOBAL_TESTS
from fedjax_async.peers import EXCHANGES, TOPOLOGIES
from tests.refusals import refusals
from tests.told import refusal

BASE = Settings(updates=9)

# path -> values that may be swept, each list without two equal values
AXES = {
    "lr": st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4, unique=True),
    "batch_size": st.lists(st.integers(1, 512), min_size=1, max_size=4, unique=True),
    "delay": st.lists(st.sampled_from(["rpi", "lognormal:mean=60,sigma=0.5", "constant"]), min_size=1, unique=True),
    "per_client": st.lists(st.booleans(), min_size=1, unique=True),
    "method.mixing": st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4, unique=True),
    "method.staleness": st.lists(st.sampled_from(["hinge", "polynomial", "constant"]), min_size=1, unique=True),
    "partition.alpha": st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3, unique=True),
    "timing.concurrency": st.lists(st.integers(1, 10), min_size=1, max_size=3, unique=True),
}  # fmt: skip
GRIDS = st.lists(st.sampled_from(list(AXES)), min_size=1, max_size=3, unique=True).flatmap(
    lambda paths: st.fixed_dictionaries({path: AXES[path] for path in paths})
)


@settings(max_examples=40)
@given(GRIDS, st.integers(1, 3))
def test_a_grid_is_the_product_in_the_order_of_counting_with_names_that_fit_a_file_system(grid, seeds):
    points = expand(BASE, grid, seeds=seeds)
    sizes, touched = [*map(len, grid.values()), seeds], {path.partition(".")[0] for path in (*grid, "seed")}
    assert len(points) == len({point.name.lower() for point in points}) == math.prod(sizes)
    for point, index in zip(points, np.ndindex(*sizes)):  # the last axis varies fastest
        expected = {path: values[i] for (path, values), i in zip(grid.items(), index)} | {"seed": index[-1]}
        assert point.values == expected and list(point.values) == [*grid, "seed"]
        assert {path: value_of(point.settings, path) for path in expected} == expected
        after = as_dict(point.settings)
        assert {name for name, value in as_dict(BASE).items() if after[name] != value} <= touched
        assert re.fullmatch(r"(?!\.)[\w.=,@~+%-]+", point.name) and len(point.name) <= LONGEST_NAME


TEXTS = st.text(max_size=20) | st.text(max_size=20).map(lambda text: text * 10)
VALUES = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False))


@settings(max_examples=50)
@given(st.tuples(VALUES, VALUES), st.tuples(VALUES, VALUES))
def test_names_are_injective(one, other):
    def comparable(values):  # a setting has one type, so 1, 1.0 and "1" are never compared
        return tuple(value if isinstance(value, str) else grammar.option_text("x", value) for value in values)

    short = {"a": "a", "b": "b"}
    names = [point_name(dict(zip("ab", values)), short) for values in (one, other)]
    assert (names[0] == names[1]) == (comparable(one) == comparable(other))
    assert all(len(name) <= LONGEST_NAME and "/" not in name and name.isascii() for name in names)


@settings(max_examples=30)
@given(GRIDS, st.booleans())
def test_a_grid_comes_back_from_toml(grid, quoted):
    named = {f'"{path}"' if quoted else path: json.dumps(values) for path, values in grid.items()}  # also TOML
    lines = [f"{path} = {values}" for path, values in named.items()]
    table = tomllib.loads("[grid]\n" + "\n".join(lines))["grid"]
    assert set(flat(table)) == set(grid)
    found, expected = expand(BASE, table), expand(BASE, grid)
    # TOML groups the options of one name: this may change the order of the axes, but nothing else
    assert sorted(point.settings.__repr__() for point in found) == sorted(p.settings.__repr__() for p in expected)
    if list(flat(table)) == list(grid):
        assert found == expected


def fields(field, *given, **options):
    """One field of each of the settings of a grid."""
    return [getattr(point.settings, field) for point in expand(*given, **options)]


def test_a_path_with_a_comma_is_swept_and_shown():
    paths = ["a,b.csv", "c.csv"]
    points = expand({"updates": 9, "delay": "csv:path='d,e.csv',family=gamma"}, {"delay.path": paths})
    wanted = [f"csv:path={path},family=gamma" for path in ('"a,b.csv"', "c.csv")]
    assert [point.settings.delay for point in points] == wanted
    shown = [values_of(point.settings, ["delay", "delay.path"]) for point in points]
    assert shown == [{"delay": "csv:family=gamma", "delay.path": path} for path in paths]


def test_points_stand_beside_the_grid_and_may_be_small_grids():
    points = expand(
        {"updates": 9, "clients": 5},
        {"method.mixing": [0.4, 0.8]},
        points=[{"method": "fedavg"}, {"method": "fedbuff", "timing": {"size": [2, 4]}}, {}],
        seeds=[3, 1],
    )
    names = ["mixing=0.4,", "mixing=0.8,", "method=fedavg,", "method=fedbuff,size=2,", "method=fedbuff,size=4,", ""]
    assert [point.name for point in points[::2]] == [f"{name}seed=3" for name in names]
    assert [point.settings.seed for point in points] == [3, 1] * 6
    assert {point.settings.clients for point in points} == {5}
    assert points[6].settings.timing == "buffer:size=2"  # the method's own timing, edited
    assert swept(points) == ["method.mixing", "method", "timing.size", "seed"]
    assert setting_title(points[6].values, labels(swept(points))) == "method=fedbuff, size=2"


def test_seeds_arrays_and_options_of_a_policy_that_a_method_brings_are_swept():
    assert fields("seed", Settings(updates=1, seed=5), seeds=3) == [5, 6, 7]
    assert [p.name for p in expand(BASE, {"seed": [2, 4]})] == ["seed=2", "seed=4"]
    points = expand(BASE, {"lr": np.linspace(0.1, 0.3, 3), "batch_size": np.arange(1, 3)})
    assert [type(value) for value in points[0].values.values()] == [float, int] and len(points) == 6
    pisces = fields_of(Settings(method="pisces", updates=4))
    assert changed(pisces, {"policy.recent": 3})["policy"] == "pisces:recent=3"


LONG = "fedbuff:server_lr=0.5@buffer:size={},concurrency=8"
DECORATED = "fedbuff:server_lr=0.5,staleness=constant@buffer:size=5,concurrency=8"


@pytest.mark.parametrize(("base", "grid", "changed"), [
    # the timing that counts is the one that changes
    ({"method": "fedbuff"}, {"timing.size": 7}, {"method": "fedbuff", "timing": "buffer:size=7"}),
    ({"method": "fedbuff", "timing": "cohort"}, {"timing.size": 7}, {"method": "fedbuff", "timing": "cohort:size=7"}),
    ({"method": LONG.format(5), "timing": "cohort"}, {"timing.size": 7},
     {"method": LONG.format(7), "timing": "cohort"}),
    ({"method": "fedbuff@cohort"}, {"method.server_lr": 0.5}, {"method": "fedbuff:server_lr=0.5@cohort"}),
    # a base need not be a whole run
    ({"delay.mean": 60, "delay": "constant"}, {"lr": 1}, {"delay": "constant:mean=60", "lr": 1.0}),
    # one of several joined models is reached by its name
    ({"faults": "drop:probability=0.1"}, {"faults.probability": 0.5}, {"faults": "drop:probability=0.5"}),
    # none is None, but not where it is a value: rows called none were the published constants
    ({"batching": "none"}, {"lr": 0.1}, {"batching": None}),
    ({"epochs": 2}, {"test_fraction": "none"}, {"test_fraction": None}),
    ({}, {"normalise": "none"}, {"normalise": "none"}), ({}, {"compress": "none"}, {"compress": None}),
])  # fmt: skip
def test_what_a_grid_changes(base, grid, changed):
    (point,) = expand({"updates": 9} | base, {path: [value] for path, value in grid.items()})
    found = {name: getattr(point.settings, name) for name in changed}
    assert found == changed and [*map(type, found.values())] == [*map(type, changed.values())]


def test_options_belong_to_the_name_that_is_swept_with_them():
    grid = {"partition.alpha": [0.1, 1.0], "partition": ["dirichlet", "dirichlet_balanced"]}
    names = [f"{name}:alpha={alpha}" for alpha in (0.1, 1.0) for name in ("dirichlet", "dirichlet_balanced")]
    assert fields("partition", BASE, grid) == names
    assert fields("updates", {"method": "fedbuff", "timing": "buffer:size=2"}, {"updates": [5, 10]}) == [5, 10]


def test_one_of_several_joined_models_is_reached_by_its_name():
    base = {"updates": 9, "faults": "drop:probability=0.1+duplicate:probability=0.05"}
    points = expand(base, {"faults.drop.probability": [0.0, 0.2], "faults.duplicate.probability": [0.3]})
    wanted = [f"drop:probability={p}+duplicate:probability=0.3" for p in (0.0, 0.2)]
    assert [point.settings.faults for point in points] == wanted
    assert points[1].name == "faults.drop.probability=0.2,faults.duplicate.probability=0.3"
    assert value_of(points[1].settings, "faults.duplicate.probability") == 0.3
    assert value_of(points[1].settings, "faults.late.extra") is None is value_of(BASE, "faults.probability")
    for path in ("faults.probability", "faults.late.probability"):
        says = f"setting = '{path}': must be faults.drop.probability or faults.duplicate.probability"
        assert says in refusal(expand, base, {path: [0.1]})
    assert "did you mean 'faults.drop.probability'?" in refusal(expand, base, {"probability": [0.1]})
    twice = {"updates": 9, "faults": "drop+drop"}
    assert "of models that are different" in refusal(expand, twice, {"faults.drop.probability": [0.5]})


def test_a_spec_is_shown_without_the_options_beside_it():
    (point,) = expand(
        {"updates": 9, "method": DECORATED},
        {"method.server_lr": [0.1], "timing.size": [2], "faults": ["drop:probability=0.5+late:extra=3"]},
    )
    shown = {
        **{"method": "fedbuff:staleness=constant@buffer:concurrency=8", "faults": "drop:probability=0.5+late"},
        **{"method.server_lr": 0.1, "timing.size": 2, "faults.late.extra": 3, "network": None},
    }
    assert values_of(point.settings, shown) == shown


def test_none_is_named_and_refused_where_it_is_something_of_the_method():
    """The rows called compress=none were compressed."""
    points = expand({"updates": 5, "epochs": 2}, {"test_fraction": ["none", 0.2]})
    assert [point.name for point in points] == ["test_fraction=none", "test_fraction=0.2"]
    says = refusal(expand, {"updates": 5, "method": "asynflc"}, {"compress": ["none", "topk"]})
    assert says.startswith("compress = 'none': must be left out, since none is the method's own, s")
    assert refusal(expand, {"updates": 5, "compress": "none"}, {"method": ["fedasync", "asynflc"]}) == says


NAMES = {"exchange": EXCHANGES, "global_tests": GLOBAL_TESTS, "topology": TOPOLOGIES}
NAMES |= {"normalise": ["none", "published", "training"]}


@pytest.mark.parametrize("field", NAMES)
def test_no_name_is_taken_for_none(field):
    assert fields(field, {"updates": 5}, {field: list(NAMES[field])}) == list(NAMES[field])


def test_short_names_only_where_they_are_clear():
    assert labels(["delay.mean", "timing.mean"]) == {"delay.mean": "delay.mean", "timing.mean": "timing.mean"}
    assert labels(["decay.steps"]) == {"decay.steps": "decay.steps"}  # there is a setting called steps
    points = expand(BASE, {"delay": ["constant"], "delay.mean": [1, 2], "decay": ["cosine"], "decay.steps": [9]})
    assert points[0].name == "delay=constant,mean=1,decay=cosine,decay.steps=9"


def test_every_setting_can_be_swept():
    """Any field, with its own default or a value of its type."""
    given = {"int": 3, "float": 0.5, "str": "x", "bool": True}
    for name, field in FIELDS.items():
        value = field.default if field.default is not None else given[str(field.type).split(" ")[0]]
        assert checked(name, value, as_dict(BASE)) == value
        assert changed(as_dict(BASE), {name: value})[name] == value


test_bad_grids_are_one_line = refusals(
    ({"batchsize": [1]}, "setting = 'batchsize': unknown; did you mean 'batch_size'?"),
    ({"mixing": [1]}, "did you mean 'method.mixing'?"),
    ({"methd.mixing": [1]}, "did you mean 'method.mixing'?"),
    ({"method.mixin": [1]}, "fedasync has no option 'mixin'; did you mean 'method.mixing'?"),
    ({"keep_best": [1]}, "keep_best: is not a setting of a run but a flag of the command, --keep-best"),
    ({"qqqq": [1]}, "the nearest names are"),
    ({"method": ["fedavg"], "method.mixing": [1]}, "fedavg has no option 'mixing'"),
    ({"lr.x": [1]}, "setting = 'lr.x': must be a setting or SPEC.OPTION"),
    ({"method.swa.start": [1]}, "this part, fedasync+swa: method = 'fedasync' has no 'swa'"),
    ({"method.mixing.x": [1]}, "'method.mixing.x': must be method.fedasync.x"),
    ({"method.fedasync.mixing.x": [1]}, "must be a setting or SPEC.OPTION"),
    ({"network.up": [1]}, "network = None: must be given, to set its"),
    ({"policy.recent": [3]}, "policy = None: must be given, to set its option recent"),
    ({"method": ["pisces"], "method.recent": [3]}, "pisces has no option 'recent'; did you mean 'policy.recent'"),
    ({"lr": ["fast"]}, "lr = 'fast': must be a number"),
    ({"batch_size": [40.0]}, "batch_size = 40.0: must be a whole number"),
    ({"clients": [True]}, "clients = True: must be a whole number"),
    ({"per_client": [1]}, "per_client = 1: must be true or false"),
    ({"model": [5]}, "model = 5: must be a text"),
    ({"clients": ["none"]}, "clients = 'none': must be a whole number"),
    ({"method.staleness": ["a@b"]}, "a text without '@'"),
    ({"method.mixing": [[0.1]]}, "method.mixing = [0.1]: must be a number"),
    ({"lr": []}, "lr = []: must be at least one value"),
    ({"lr": [0.1, 0.2, 0.1]}, "different from each other"),
    ({"lr": [-1.0]}, "lr = -1.0: must be a finite number > 0"),
    ({}, "grid = {}: must be at least one setting with its values"),
    ({"method": {"mixing": [0.1]}, "method.mixing": [0.2]}, "'method.mixing': must be given once"),
    ({"lr": range(1, 1001), "batch_size": range(1, 1001)}, "1000000 runs': must be at most 100000"),
    ([1, 2], "must be a mapping"),
    by=lambda grid: expand(BASE, grid),
)

# base, grid, points, seeds
test_bad_points_seeds_and_bases = refusals(
    *((BASE, {"lr": [0.1]}, None, seeds, f"seeds = {seeds!r}") for seeds in (0, "4", [])),
    (BASE, {"lr": [0.1]}, None, [1, 1], "different"),
    (BASE, {"lr": [0.1]}, None, 1.5, "1.5"),
    (BASE, {"seed": [0, 1]}, None, 2, "seeds = 2: must be left out"),
    (BASE, {"lr": [0.1]}, [{"method": "fedasync", "lr": 0.1}], "'lr=0.1', 'method=fedasync,lr=0.1': must be diff"),
    (BASE, None, [{"model": "A"}, {"model": "a"}], "must be different"),  # the same folder on some file systems
    (BASE, None, ["fedavg"], "must be a mapping"),
    (None, {"lr": [0.1]}, "base = None"),
    ({}, {"lr": [0.1]}, "give at least one"),
    (BASE, "grid = None"),
    by=lambda *given: expand(**dict(zip(("base", "grid", "points", "seeds"), given))),
)
