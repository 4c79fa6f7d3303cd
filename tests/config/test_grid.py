"""Grids: the number, order and names of runs, and what cannot be used."""

from __future__ import annotations

import json
import math
import re
import tomllib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import grammar, registry
from fedjax_async.config import Settings
from fedjax_async.config.grid import LONGEST_NAME, expand, labels, point_name, setting_title, swept
from fedjax_async.config.paths import FIELDS, changed, checked, flat, value_of, values_of
from fedjax_async.config.settings import as_dict, fields_of
from fedjax_async.engine.peer_points import GLOBAL_TESTS
from fedjax_async.peers import EXCHANGES, TOPOLOGIES
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


# --- expanded runs -------------------------------------------------------------------------------


@settings(max_examples=30)
@given(GRIDS, st.integers(1, 3))
def test_a_grid_is_the_product_in_the_order_of_counting(grid, seeds):
    points = expand(BASE, grid, seeds=seeds)
    sizes = [*map(len, grid.values()), seeds]
    assert len(points) == math.prod(sizes)
    for place, index in enumerate(np.ndindex(*sizes)):  # the last axis varies fastest
        expected = {path: values[i] for (path, values), i in zip(grid.items(), index)} | {"seed": index[-1]}
        assert points[place].values == expected
        assert list(points[place].values) == [*grid, "seed"]
        for path, value in expected.items():
            assert value_of(points[place].settings, path) == value


@settings(max_examples=30)
@given(GRIDS)
def test_only_what_is_swept_differs_from_the_base(grid):
    touched = {path.partition(".")[0] for path in grid}
    for point in expand(BASE, grid):
        after = as_dict(point.settings)
        assert {name for name, value in as_dict(BASE).items() if after[name] != value} <= touched


@settings(max_examples=30)
@given(GRIDS)
def test_names_are_different_and_fit_for_a_file_system(grid):
    names = [point.name for point in expand(BASE, grid, seeds=2)]
    assert len({name.lower() for name in names}) == len(names)
    assert all(re.fullmatch(r"[\w.=,@~+%-]+", name) and len(name) <= LONGEST_NAME for name in names)
    assert not any(name.startswith(".") for name in names)


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


OPTIONS = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.sampled_from(["a,b.csv", "a, 'b'.csv"])
)


@given(st.sampled_from(["momentum", "b_1"]), OPTIONS)
def test_an_option_reads_back(key, value):
    for spec in ("sgd", "sgd:momentum=0.5", "sgd:a=1,b_1=x,momentum=2", "sgd:a='x,y',b_1=3"):
        part = registry.read("optimizer", spec)
        again = registry.read("optimizer", str(part.put(key, grammar.option_text(key, value))))
        assert again.name == "sgd" and again.options == part.options | {key: value}


def test_a_path_with_a_comma_is_swept_and_shown():
    paths = ["a,b.csv", "c.csv"]
    base = {"updates": 9, "delay": "csv:path='d,e.csv',family=gamma"}
    points = expand(base, {"delay.path": paths})
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
    assert [point.name for point in points[::2]] == [
        "mixing=0.4,seed=3",
        "mixing=0.8,seed=3",
        "method=fedavg,seed=3",
        "method=fedbuff,size=2,seed=3",
        "method=fedbuff,size=4,seed=3",
        "seed=3",
    ]
    assert [point.settings.seed for point in points] == [3, 1] * 6
    assert {point.settings.clients for point in points} == {5}
    assert points[6].settings.timing == "buffer:size=2"  # the method's own timing, edited
    assert swept(points) == ["method.mixing", "method", "timing.size", "seed"]
    assert setting_title(points[6].values, labels(swept(points))) == "method=fedbuff, size=2"


def test_seeds_count_from_the_base():
    assert [p.settings.seed for p in expand(Settings(updates=1, seed=5), seeds=3)] == [5, 6, 7]
    assert [p.name for p in expand(BASE, {"seed": [2, 4]})] == ["seed=2", "seed=4"]


def test_the_timing_that_counts_is_the_one_that_changes():
    def after(**base):
        (point,) = expand(Settings(updates=9, **base), {"timing.size": [7]})
        return point.settings.method, point.settings.timing

    assert after(method="fedbuff") == ("fedbuff", "buffer:size=7")
    assert after(method="fedbuff", timing="cohort") == ("fedbuff", "cohort:size=7")
    assert after(method="fedbuff:server_lr=0.5@buffer:size=5,concurrency=8", timing="cohort") == (
        "fedbuff:server_lr=0.5@buffer:size=7,concurrency=8",
        "cohort",
    )
    (point,) = expand(Settings(updates=9, method="fedbuff@cohort"), {"method.server_lr": [0.5]})
    assert point.settings.method == "fedbuff:server_lr=0.5@cohort"


def test_options_belong_to_the_name_that_is_swept_with_them():
    points = expand(BASE, {"partition.alpha": [0.1, 1.0], "partition": ["dirichlet", "dirichlet_balanced"]})
    names = [f"{name}:alpha={alpha}" for alpha in (0.1, 1.0) for name in ("dirichlet", "dirichlet_balanced")]
    assert [point.settings.partition for point in points] == names


def test_one_of_several_joined_models_is_reached_by_its_name():
    base = {"updates": 9, "faults": "drop:probability=0.1+duplicate:probability=0.05"}
    points = expand(base, {"faults.drop.probability": [0.0, 0.2], "faults.duplicate.probability": [0.3]})
    assert [point.settings.faults for point in points] == [
        "drop:probability=0.0+duplicate:probability=0.3",
        "drop:probability=0.2+duplicate:probability=0.3",
    ]
    assert points[1].name == "faults.drop.probability=0.2,faults.duplicate.probability=0.3"
    assert value_of(points[1].settings, "faults.duplicate.probability") == 0.3
    assert value_of(points[1].settings, "faults.late.extra") is None is value_of(BASE, "faults.probability")
    for path in ("faults.probability", "faults.late.probability"):
        says = f"setting = '{path}': must be faults.drop.probability or faults.duplicate.probability"
        with pytest.raises(ValueError, match=re.escape(says)):
            expand(base, {path: [0.1]})
    with pytest.raises(ValueError, match=re.escape("did you mean 'faults.drop.probability'?")):
        expand(base, {"probability": [0.1]})
    (point,) = expand({"updates": 9, "faults": "drop:probability=0.1"}, {"faults.probability": [0.5]})
    assert point.settings.faults == "drop:probability=0.5"
    with pytest.raises(ValueError, match="of models that are different"):
        expand({"updates": 9, "faults": "drop+drop"}, {"faults.drop.probability": [0.5]})


def test_a_spec_is_shown_without_the_options_beside_it():
    (point,) = expand(
        {"updates": 9, "method": "fedbuff:server_lr=0.5,staleness=constant@buffer:size=5,concurrency=8"},
        {"method.server_lr": [0.1], "timing.size": [2], "faults": ["drop:probability=0.5+late:extra=3"]},
    )
    paths = ["method", "faults", "method.server_lr", "timing.size", "faults.late.extra", "network"]
    assert values_of(point.settings, paths) == {
        "method": "fedbuff:staleness=constant@buffer:concurrency=8",
        "faults": "drop:probability=0.5+late",
        "method.server_lr": 0.1,
        "timing.size": 2,
        "faults.late.extra": 3,
        "network": None,
    }


def test_a_base_need_not_be_a_whole_run():
    points = expand({"method": "fedbuff", "timing": "buffer:size=2"}, {"updates": [5, 10]})
    assert [point.settings.updates for point in points] == [5, 10]
    (point,) = expand({"updates": 5, "delay.mean": 60, "delay": "constant"}, {"lr": [1]})
    assert point.settings.delay == "constant:mean=60"
    assert point.settings.lr == 1.0 and isinstance(point.settings.lr, float)


def test_none_can_be_written():
    points = expand({"updates": 5, "epochs": 2}, {"test_fraction": ["none", 0.2]})
    assert [point.settings.test_fraction for point in points] == [None, 0.2]
    assert [point.name for point in points] == ["test_fraction=none", "test_fraction=0.2"]


def test_none_is_a_value_of_the_setting_that_has_it():
    """It stood for None, which is the published constants: two of the three were one run."""
    points = expand({"updates": 5}, {"normalise": ["none", "published", "training"]})
    assert [point.settings.normalise for point in points] == ["none", "published", "training"]
    assert expand({"updates": 5, "batching": "none"}, {"lr": [0.1]})[0].settings.batching is None


def test_none_is_refused_where_it_is_something_of_the_method():
    """The rows called compress=none were compressed."""
    with pytest.raises(ValueError, match=r"^compress = 'none': must be left out, since none is the method's own, s"):
        expand({"updates": 5, "method": "asynflc"}, {"compress": ["none", "topk"]})
    assert expand({"updates": 5}, {"compress": ["none", "topk"]})[0].settings.compress is None


@pytest.mark.parametrize(
    ("field", "names"), {"exchange": EXCHANGES, "global_tests": GLOBAL_TESTS, "topology": TOPOLOGIES}.items()
)
def test_no_name_is_taken_for_none(field, names):
    points = expand({"updates": 5}, {field: list(names)})
    assert [getattr(point.settings, field) for point in points] == list(names)


def test_numpy_axes():
    points = expand(BASE, {"lr": np.linspace(0.1, 0.3, 3), "batch_size": np.arange(1, 3)})
    assert [type(value) for value in points[0].values.values()] == [float, int]
    assert len(points) == 6


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


# --- what cannot be used ----------------------------------------------------------------------------

BAD = {
    "an unknown setting": ({"batchsize": [1]}, "setting = 'batchsize': unknown; did you mean 'batch_size'?"),
    "an option without its spec": ({"mixing": [1]}, "did you mean 'method.mixing'?"),
    "an unknown spec": ({"methd.mixing": [1]}, "did you mean 'method.mixing'?"),
    "an unknown option": ({"method.mixin": [1]}, "fedasync has no option 'mixin'; did you mean 'method.mixing'?"),
    "a flag": ({"keep_best": [1]}, "keep_best: is not a setting of a run but a flag of the command, --keep-best"),
    "nothing like it": ({"qqqq": [1]}, "the nearest names are"),
    "an option of another name": ({"method": ["fedavg"], "method.mixing": [1]}, "fedavg has no option 'mixing'"),
    "an option of a number": ({"lr.x": [1]}, "setting = 'lr.x': must be a setting or SPEC.OPTION"),
    "a part that the method lacks": ({"method.swa.start": [1]},
         "this part, fedasync+swa: method = 'fedasync' has no 'swa'"),
    "an option of an option": ({"method.mixing.x": [1]}, "'method.mixing.x': must be method.fedasync.x"),
    "too many dots": ({"method.fedasync.mixing.x": [1]}, "must be a setting or SPEC.OPTION"),
    "an option of a setting that is not given": ({"network.up": [1]}, "network = None: must be given, to set its"),
    "a text for a number": ({"lr": ["fast"]}, "lr = 'fast': must be a number"),
    "a fraction for a whole number": ({"batch_size": [40.0]}, "batch_size = 40.0: must be a whole number"),
    "a truth value for a number": ({"clients": [True]}, "clients = True: must be a whole number"),
    "a number for a truth value": ({"per_client": [1]}, "per_client = 1: must be true or false"),
    "a number for a name": ({"model": [5]}, "model = 5: must be a text"),
    "none where something must be": ({"clients": ["none"]}, "clients = 'none': must be a whole number"),
    "an option with an @": ({"method.staleness": ["a@b"]}, "a text without '@'"),
    "a list in a list": ({"method.mixing": [[0.1]]}, "method.mixing = [0.1]: must be a number"),
    "no values": ({"lr": []}, "lr = []: must be at least one value"),
    "a value twice": ({"lr": [0.1, 0.2, 0.1]}, "different from each other"),
    "out of range": ({"lr": [-1.0]}, "lr = -1.0: must be a finite number > 0"),
    "an empty grid": ({}, "grid = {}: must be at least one setting with its values"),
    "a path twice": ({"method": {"mixing": [0.1]}, "method.mixing": [0.2]}, "'method.mixing': must be given once"),
    "far too many": ({"lr": range(1, 1001), "batch_size": range(1, 1001)}, "1000000 runs': must be at most 100000"),
    "no grid": ([1, 2], "must be a mapping"),
}  # fmt: skip


@pytest.mark.parametrize(("grid", "says"), BAD.values(), ids=BAD)
def test_bad_grids_are_one_line(grid, says):
    assert says in refusal(expand, BASE, grid)


WRONG = [
    *[((BASE, {"lr": [0.1]}, None, seeds), says) for seeds, says in (
        (0, "seeds = 0"), ("4", "seeds = '4'"), ([], "seeds = []"), ([1, 1], "different"), (1.5, "1.5"))],
    ((BASE, {"seed": [0, 1]}, None, 2), "seeds = 2: must be left out"),
    ((BASE, {"lr": [0.1]}, [{"method": "fedasync", "lr": 0.1}]),
     "'lr=0.1', 'method=fedasync,lr=0.1': must be different"),
    ((BASE, None, [{"model": "A"}, {"model": "a"}]), "must be different"),  # the same folder on some file systems
    ((BASE, None, ["fedavg"]), "must be a mapping"), ((None, {"lr": [0.1]}), "base = None"),
    (({}, {"lr": [0.1]}), "give at least one"), ((BASE,), "grid = None"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), WRONG, ids=range(len(WRONG)))
def test_bad_points_seeds_and_bases(given, says):
    assert says in refusal(expand, **dict(zip(("base", "grid", "points", "seeds"), given)))


def test_options_of_the_policy_that_a_method_brings_are_swept():
    pisces = fields_of(Settings(method="pisces", updates=4))
    assert changed(pisces, {"policy.recent": 3})["policy"] == "pisces:recent=3"
    with pytest.raises(ValueError, match=r"pisces has no option 'recent'; did you mean 'policy\.recent'"):
        changed(pisces, {"method.recent": 3})
    with pytest.raises(ValueError, match="policy = None: must be given, to set its option recent"):
        changed(fields_of(BASE), {"policy.recent": 3})
