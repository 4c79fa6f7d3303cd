"""One call writes all files of a run or a comparison, with the same bytes each time."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from fedjax_async import compare
from fedjax_async.engine.client_scores import client_columns
from fedjax_async.results import Drawing, load, write_comparison, write_run
from tests.results.folders import contents
from tests.results.made_up import make_run

PICTURES = {"accuracy.png", "staleness.png", "gantt.png"}


def test_the_pictures_of_a_run(tmp_path):
    assert set(contents(write_run(make_run(), tmp_path))) > PICTURES


def test_a_run_without_pictures_or_without_classes(tmp_path):
    assert not any(name.endswith(".png") for name in contents(write_run(make_run(), tmp_path / "a", plots=False)))
    names = set(contents(write_run(make_run([math.nan, math.nan]), tmp_path / "b")))
    assert "loss.png" in names and "accuracy.png" not in names


@pytest.mark.parametrize("value", [math.inf, 1e300])
def test_the_losses_of_diverged_runs_raise_no_warning(tmp_path, value):
    """Warnings are errors here; ``interval`` and ``pairs`` see differences of such losses too."""

    def diverged(sign):
        run = make_run([math.nan] * 4)
        loss = np.array([2.0, sign * 1.0, value, sign * value if value < math.inf else value])
        evaluations = {"loss": loss, "client_loss": loss, "client_loss_std": loss, "client_loss_worst": loss}
        return run._replace(evaluations={**run.evaluations, **evaluations})

    runs = [diverged(sign) for sign in (1, -1, 1)]
    for way in ("t", "bootstrap"):
        options = {"final": "last", "interval": way, "plots": way == "t"}
        text = write_comparison({"one": runs, "two": runs[::-1]}, tmp_path / "both", **options)
    assert "loss, last" in text and (tmp_path / "both" / "loss.png").is_file()
    assert write_run(runs[0], tmp_path / "run").is_dir()
    scores = client_columns({"loss": np.array([[1.0, value, 2.0], [value, value, value]])})
    assert scores["client_loss"][1] == value and not np.isfinite(scores["client_loss_std"][0])


def test_pictures_in_other_formats(tmp_path):
    drawing = Drawing(("pdf", "svg"), "column", "Two methods")
    names = set(contents(write_run(make_run(), tmp_path / "a", drawing=drawing)))
    assert {f"{name}.{ending}" for name in ("accuracy", "staleness", "gantt") for ending in drawing.formats} <= names
    assert not any(name.endswith(".png") for name in names)
    assert b"Two methods" in (tmp_path / "a" / "accuracy.svg").read_bytes()
    write_comparison({"fedavg": [make_run()]}, tmp_path / "b", drawing=drawing)
    assert set(contents(tmp_path / "b")) == {"comparison.csv", "comparison.md", "accuracy.pdf", "accuracy.svg"}


def test_data_is_safe_where_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install"):
        write_run(make_run(), tmp_path / "run")
    assert load(tmp_path / "run").settings["seed"] == 0


def test_a_comparison(tmp_path):
    runs = {"fedavg": [make_run([0.1, 0.4]), make_run([0.1, 0.5])], "fedasync": [make_run([0.1, 0.6])] * 2}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".comparison.md.1234.tmp").write_text("half")  # from a killed process
    text = write_comparison(runs, tmp_path / "a")
    assert set(contents(tmp_path / "a")) == {"comparison.csv", "comparison.md", "accuracy.png"}
    assert "45.00 ± 7.07" in text and "45.00 ± 7.07" in (tmp_path / "a" / "comparison.md").read_text()
    target = "target: 42.75 ± 6.72 % (95 % of the lowest final accuracy among these methods; with others it may differ"
    for shown in (text, (tmp_path / "a" / "comparison.md").read_text()):  # a header: other methods may change the times
        assert shown.startswith(target) and shown.index("--target fixes it)") < shown.index("time to target (s)")
    assert float((tmp_path / "a" / "comparison.csv").read_text().splitlines()[1].split(",")[-2]) == pytest.approx(42.75)
    assert "target: 50.00 ± 0.00 % (as asked for)" in write_comparison(runs, tmp_path / "c", plots=False, target=0.5)
    text = write_comparison(runs, tmp_path / "c", plots=False, target="fedasync")
    assert "target: 60.00 ± 0.00 % (the final accuracy of fedasync)" in text and "0 of 2 reached" in text
    write_comparison(runs, tmp_path / "b", plots=False, baseline="fedasync")
    assert "relative to fedasync" in (tmp_path / "b" / "comparison.csv").read_text()
    assert not (tmp_path / "b" / "accuracy.png").exists()


@pytest.mark.parametrize(
    ("name", "found"), [("sweep.json", "a sweep"), ("settings.json", "a run"), ("thesis.tex", "other files")]
)
def test_a_comparison_takes_no_folder_of_something_else(tmp_path, name, found):
    (tmp_path / name).write_text("{}")
    small = {"model": "logistic", "clients": 4, "updates": 4, "out": tmp_path}
    with pytest.raises(ValueError, match=f"must be empty or hold a comparison, but it holds {found}"):
        compare(["fedasync"], **small)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [name]
