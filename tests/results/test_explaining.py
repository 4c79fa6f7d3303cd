"""Explaining a run: changes telescope, tables add up, a folder with results is read, bad input is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import cli, simulate
from fedjax_async.base.notices import RunWarning
from fedjax_async.config import Settings, prepare
from fedjax_async.results import Drawing, load, store
from fedjax_async.results.explaining import Explanation, _digest, class_rows, client_rows, explain, staleness_rows
from fedjax_async.results.swings import _owners
from fedjax_async.types import Stopped
from tests.results.folders import contents
from tests.results.made_up import make_run
from tests.results.test_plots import PLAN, run_of

BASE = {"model": "logistic", "clients": 4, "updates": 8, "steps": 2, "validation_fraction": 0.1, "lr": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("runs")
    with pytest.warns(RunWarning, match="2 uploads came for a server step that was not complete"):
        simulate(**BASE, method="fedbuff@buffer:size=3", out=top / "shared", plots=False)
    store.save(run_of(PLAN)._replace(settings={"method": "independent"}), top / "peers")
    return top


def loss_of(data, params, rows):
    """The mean loss of the softmax regression, in NumPy."""
    leaves = {path[-1].key: np.asarray(leaf, float) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    x = np.asarray(data.decode(data.x[rows]), float).reshape(len(rows), -1)
    out = x @ leaves["kernel"] + leaves["bias"]
    out -= out.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(out).sum(axis=1)) - out[np.arange(len(rows)), data.y[rows]]))


@pytest.mark.slow
def test_a_run_in_memory_telescopes_to_the_change_of_its_loss():
    said = []
    run = simulate(**BASE, method="fedasync")
    found = explain(run, examples=100, say=said.append)
    assert said == ["run: does not keep the models between its arrivals; training it once more with a probe"]
    assert found.part == "validation" and sum(found.class_sizes) == 100 and found.drift < 1e-6
    a, data = found.arrivals, prepare(Settings(**BASE)).components.data
    spans = zip(data.validation_offset, data.validation_size)
    order = np.concatenate([data.validation_order[offset : offset + size] for offset, size in spans])
    rows = order[np.linspace(0, len(order), 100, endpoint=False).astype(int)]
    assert a["loss"][-1] == pytest.approx(loss_of(data, run.params, rows), rel=1e-5)
    np.testing.assert_allclose(np.diff([found.start[0], *a["loss"]]), a["change"], atol=1e-6)
    np.testing.assert_allclose(sum(a[f"class_{c}"] for c in range(10)), a["change"], atol=1e-12)
    for name in ("client", "staleness"):
        np.testing.assert_array_equal(a[name], run.updates[name])


def test_a_folder_gets_tables_and_a_picture_and_is_read_the_next_time(folder, capsys):
    one = folder / "shared"
    assert cli.main(("explain", str(one), "--quiet", "--examples", "50")) == 0
    printed, said = capsys.readouterr().out, []
    assert "training it once more with a probe" in printed
    assert "6 of 8 arrivals moved the model and changed it by" in printed
    names = {f"{name}.{ending}" for name in ("clients", "staleness", "classes") for ending in ("csv", "md")}
    names |= {"arrivals.csv", "explained.json", "swings.png"}
    assert set(contents(one / "explain")) == names
    before = contents(one / "explain")["swings.png"]
    drawing = Drawing(formats=("png", "svg"), width="column")
    kept = explain(one, examples=50, out=one / "explain", say=said.append, drawing=drawing)
    assert len(said) == 1 and "which were read" in said[0]
    assert contents(one / "explain")["swings.png"] != before, "drawn again, as narrow as asked for"
    assert set(contents(one / "explain")) == names | {"swings.svg"}
    a = kept.arrivals
    assert a["change"][:6].any() and not a["change"][6:].any()  # the third buffer never fills
    assert a["change"].sum() == pytest.approx(a["loss"][-1] - kept.start[0], abs=1e-6)
    assert load(one).params  # the run's own files are unchanged
    with pytest.raises(ValueError, match=r"out = .*without the explanation of another run or of other examples"):
        explain(one, examples=20, out=one / "explain", say=said.append)
    rows = client_rows(kept)
    assert sum(row["change of loss"] for row in rows) == pytest.approx(a["change"].sum())
    assert [row["up"] for row in rows] == sorted((row["up"] for row in rows), reverse=True)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("peers", {}, "run .*peers = 'independent': must be one with a server"),
    ("missing", {}, "there is no such folder"),
    (".", {}, r"has no manifest.json; the runs in it are .*peers"),
    ("shared", {"part": "train"}, "part = 'train': must be one of validation, test"),
    ("shared", {"examples": 0}, "examples = 0"),
])  # fmt: skip
def test_what_cannot_be_explained_is_refused(folder, name, options, message):
    with pytest.raises(ValueError, match=message):
        explain(folder / name, **options)


def test_a_run_whose_uploads_were_all_rejected_is_explained_on_the_test_set_and_has_not_drifted():
    given = {"dataset": "quadratic:clients=3", "model": "linear", "clients": 3, "steps": 1, "updates": 2}
    with pytest.warns(RunWarning, match="EVERY UPLOAD WAS REJECTED"):
        run = simulate(**given, norm_limit=1e-12, engine="reference")
    found = explain(run, say=lambda line: None)
    assert found.part == "test" and found.drift == 0 and not found.arrivals["change"].any()
    with pytest.raises(ValueError, match="part = 'validation': must be 'test'"):
        explain(run, part="validation", say=pytest.fail)


MADE_UP = Explanation(
    {
        "client": np.array([0, 1, 0, 2]),
        "time": np.arange(1.0, 5.0),
        "step": np.array([0, 1, 1, 2]),
        "staleness": np.array([0, 3, 40, 3]),
        "change": np.array([-1.0, 0.5, -2.0, 0.25]),
        "first_order": np.array([-1.5, 0.5, -2.5, 0.0]),
        "class_0": np.array([-0.5, 1.0, -2.0, 0.25]),
        "class_1": np.array([-0.5, -0.5, 0.0, 0.0]),
    },
    start=(3.0, 0.1), class_sizes=(3, 1), part="test", drift=0.0,
)  # fmt: skip


def test_rows_add_up_and_a_shared_step_belongs_to_who_moved_it_most():
    clients = client_rows(MADE_UP)
    assert [row["client"] for row in clients] == [1, 2, 0]
    last = {"client": 0, "arrivals": 2, "change of loss": -3.0, "up": 0.0, "down": -3.0, "first order": -4.0}
    last |= {"largest rise": 0.0, "mean staleness": 20, "most up": "-", "most down": "class 0"}
    assert clients[-1] == last
    stale = staleness_rows(MADE_UP)
    assert [(row["staleness"], row["arrivals"]) for row in stale] == [("0", 1), ("2 to 3", 2), ("32 to 40", 1)]
    assert stale[1]["change an arrival"] == 0.375 and stale[1]["largest rise"] == 0.5
    first, second = class_rows(MADE_UP)
    assert (first["change of loss"], first["up"], first["down"]) == (-1.25, 1.25, -2.5)
    assert first["of its own mean"] == pytest.approx(-1.25 * 4 / 3)
    assert (first["raised most by"], first["lowered most by"]) == ("client 1", "client 0")
    assert (second["raised most by"], second["of its own mean"]) == ("-", -4.0)
    a = MADE_UP.arrivals
    assert _owners(a["step"], a["client"], a["change"]).tolist() == [0, 0, 0, 2]


def test_a_run_in_memory_that_was_stopped_is_another_than_the_whole_one():
    """Else the folder of its explanation would be read for the whole run, and hold arrivals up to the stop."""
    run = make_run()
    assert _digest(run, None) != _digest(run._replace(stopped=Stopped("callback f", "enough", 1)), None)
