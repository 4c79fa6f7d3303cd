"""The settings as keyword parameters: the same names, types and defaults as the fields of ``Settings``."""

import inspect

import numpy as np
import pytest

from fedjax_async import Settings, compare, simulate, sweep
from fedjax_async.config import keywords
from fedjax_async.config.concerns import without_effect
from fedjax_async.config.objects import KINDS
from fedjax_async.config.settings import DEFAULTS

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 4, "dataset": "fashion_mnist_6k"}
FIELDS = Settings.__dataclass_fields__
TAKEN = {
    simulate: (keywords.OfRuns, {*FIELDS, "data"}),
    compare: (keywords.OfComparisons, {*FIELDS, "data"} - {"method"}),
    sweep: (keywords.OfSweeps, {*FIELDS} - {*without_effect("sweep")}),
}


@pytest.mark.parametrize("function", TAKEN)
def test_the_typed_keywords_are_the_settings(function):
    kinds, names = TAKEN[function]
    assert set(kinds.__annotations__) == names
    for name in names - {"data"}:
        kind = kinds.__annotations__[name].__forward_arg__
        wanted = str(FIELDS[name].type)
        assert set(wanted.split(" | ")) <= set(kind.split(" | ")), name
        assert kind == wanted or name in KINDS, name


@pytest.mark.parametrize("function", TAKEN)
def test_a_notebook_completes_settings_with_their_defaults(function):
    found = inspect.signature(function).parameters
    _, names = TAKEN[function]
    assert names <= set(found)
    assert {name: found[name].default for name in names - {"data"}} == {
        name: DEFAULTS[name] for name in names - {"data"}
    }
    assert not any(p.kind is p.VAR_KEYWORD for p in found.values())


@pytest.mark.parametrize("base", [SMALL, Settings(**SMALL)], ids=["mapping", "Settings"])
def test_keywords_change_the_base_of_a_sweep(base):
    found = sweep(base, {"lr": [0.1]}, updates=2, delay="constant")
    alone = simulate(**SMALL | {"lr": 0.1, "updates": 2, "delay": "constant"})
    np.testing.assert_array_equal(found.run(0).updates["arrival_time"], alone.updates["arrival_time"])
    assert found.settings[0].updates == 2


def test_a_sweep_may_be_given_by_keywords_alone():
    assert [run.counters["updates"] for run in sweep(grid={"lr": [0.1]}, **SMALL).runs] == [4]


def test_progress_means_the_same_everywhere(capfd):
    for call, total in (
        (lambda progress: simulate(**SMALL, progress=progress), 4),
        (lambda progress: compare(["fedasync", "fedasync:mixing=0.3"], **SMALL, progress=progress), 8),
        (lambda progress: sweep(SMALL, {"lr": [0.1, 0.2]}, progress=progress), 8),
    ):
        seen = []
        call(lambda done, of, *, time, staleness, accuracy, seen=seen: seen.append((done, of)))
        assert seen[-1] == (total, total)
        assert seen == sorted(seen)
        assert capfd.readouterr().err == ""
        call(True)
        assert "updates" in capfd.readouterr().err
        call(False)
        assert capfd.readouterr().err == ""


def test_settings_are_shown_by_what_is_not_the_default():
    given = Settings(**SMALL, method="fedbuff:server_lr=0.3@buffer:size=2", lr=0.05)
    assert repr(given) == (
        "Settings(method='fedbuff:server_lr=0.3@buffer:size=2', clients=4, model='logistic', lr=0.05, steps=1, "
        "updates=4)"
    )
    written = Settings(
        method="fedbuff:server_lr=0.3@buffer:size=2", clients=4, model="logistic", lr=0.05, steps=1, updates=4
    )
    assert written == given
