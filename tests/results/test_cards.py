"""What notebooks show of results, data frames, and folders read back."""

from __future__ import annotations

import re
import sys
import types
from itertools import product
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from fedjax_async import compare, results, sweep
from fedjax_async.config import sweeping
from fedjax_async.results import Comparison, card, frame, load
from fedjax_async.results.cards import MOST_SETTINGS, changed
from fedjax_async.results.store import save
from tests.refusals import refusals
from tests.results.made_up import make_run, of_group

SMALL = {"model": "logistic", "clients": 4, "updates": 6, "steps": 2}


def parsed(found: object) -> ElementTree.Element:
    """The card of a result, which must be whole HTML without scripts."""
    text = found._repr_html_()
    assert text == card(found) and "<script" not in text and len(text) < 20_000
    return ElementTree.fromstring(text)


def texts(page: ElementTree.Element) -> str:
    return " ".join(page.itertext())


@pytest.fixture
def compared(monkeypatch):
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    return compare({"A <b>": "fedasync:mixing=0.4", "fedavg": "fedavg"}, seeds=2, progress=False, **SMALL)


def test_the_card_of_a_run():
    page = parsed(make_run(method="a&b")._replace(counters={"updates": 1100}))
    for says in ("Run: a&b", "accuracy, mean of last tenth (%) 70", "1,100", "method = a&b"):
        assert says in texts(page)
    (line,) = page.iter("polyline")
    assert len(line.attrib["points"].split()) == 3
    assert "loss, mean of last tenth" in texts(parsed(make_run([np.nan, np.nan])))


def test_the_card_of_a_comparison_and_its_repr(compared):
    page = parsed(compared)
    assert "Comparison: 2 methods, 2 seed(s)" in texts(page) and "A <b>" in texts(page) and "clients = 4" in texts(page)
    assert "method =" not in texts(page) and len(list(page.iter("polyline"))) == 2
    assert repr(compared).splitlines()[0] == "<Comparison of 2 methods:" and "fedavg: <Run: fedavg" in repr(compared)
    assert isinstance(compared, dict) and isinstance(compared, Comparison) and compared == dict(compared)
    is_run = lambda node: hasattr(node, "counters")  # noqa: E731
    assert len(jax.tree.leaves(compared, is_leaf=is_run)) == 4
    assert jax.tree.map(lambda run: run, compared, is_leaf=is_run) == compared
    without_a_line = card({"fine": [make_run()], "diverged": [make_run([float("nan")] * 3)]})
    assert without_a_line.count("<polyline") == 1 and "diverged" in without_a_line


def test_the_card_of_a_comparison_with_unequal_seeds_says_how_many():
    assert "2 methods, 1 to 2 seed(s)" in card({"a": [make_run()] * 2, "b": [make_run()]})


def test_the_card_of_a_sweep_and_its_repr(tmp_path, monkeypatch, engine):
    found = sweep(SMALL, {"lr": [0.02, 0.1]}, seeds=2, out=tmp_path, progress=False)
    assert repr(found) == f"<Sweep: 4 runs of lr, seed, in {tmp_path}>"
    page = parsed(found)
    assert "Sweep: 4 runs in" in texts(page) and len(list(page.iter("tr"))) == 3
    monkeypatch.setattr(results.cards, "MOST_RUNS", 3)
    assert len(list(parsed(found).iter("tr"))) == 0
    kept = sweep(SMALL, {"lr": [0.02]}, progress=False)
    assert repr(kept) == "<Sweep: 1 runs of lr>" and "Sweep: 1 runs" in texts(parsed(kept))


def test_settings_that_are_defaults_or_of_the_execution_are_left_out():
    given = {"lr": 0.5, "seed": 0, "delay": "rpi", "lanes": 3, "files": {"a": 1}, "timing": None}
    assert changed(given) == {"lr": 0.5}
    many = make_run()._replace(settings={f"own_{k}": k for k in range(MOST_SETTINGS + 5)})
    assert texts(parsed(many)).count("own_") == MOST_SETTINGS and "; ..." in texts(parsed(many))


test_other_objects_have_no_card = refusals((3, "runs = "), ([make_run()], "runs = "), ({}, "runs = "), by=card)
test_other_objects_have_no_frame = refusals(
    (make_run(), "rows", "table = 'rows'"), (3, "results = 3: must be a Run"), by=frame
)


def test_folders_are_read_back_as_what_they_hold(tmp_path, compared, engine):
    for name, seeds in compared.items():
        for seed, run in enumerate(seeds):
            save(run, tmp_path / "two" / "runs" / re.sub(r"\W+", "_", name) / f"seed_{seed}")
    (tmp_path / "two" / "labels.json").write_text('{"A_b_": "A <b>"}')
    found = load(tmp_path / "two")
    assert isinstance(found, Comparison) and set(found) == set(compared) and len(found["fedavg"]) == 2
    sweep(SMALL, {"lr": [0.02, 0.1]}, out=tmp_path / "swept", progress=False)
    assert len(load(tmp_path / "swept").points) == 2
    with pytest.raises(ValueError, match="must hold a saved run"):
        load(tmp_path)


def test_data_frames_have_the_rows_of_all_runs(compared, monkeypatch, engine):
    made = types.ModuleType("pandas")
    made.DataFrame = dict
    made.concat = lambda frames, ignore_index: list(frames)
    monkeypatch.setitem(sys.modules, "pandas", made)
    run = compared["fedavg"][1]
    np.testing.assert_array_equal(frame(run)["loss"], run.evaluations["loss"])
    assert list(frame(run, "updates")) == list(run.updates)
    rows = frame(compared)
    assert [(each["method"], each["seed"]) for each in rows] == list(product(("A <b>", "fedavg"), (0, 1)))
    found = frame(sweep(SMALL, {"lr": [0.02, 0.1]}, progress=False))
    assert [each["run"] for each in found] == ["lr=0.02", "lr=0.1"] and "accuracy" in found[0]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises((ValueError, ImportError), match="pandas"):
        frame(run)
