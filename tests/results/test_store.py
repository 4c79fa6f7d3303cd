"""A saved run is loaded bit for bit, the same run gives the same files, and damage is detected."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedjax_async import models, simulate
from fedjax_async.base import disk
from fedjax_async.config import Settings, named, sweeping
from fedjax_async.config.grid import expand
from fedjax_async.results import explain, files, load, save, store
from fedjax_async.results.store import MANIFEST, counters_in
from fedjax_async.results.sweep_report import write_tables
from fedjax_async.results.sweep_table import swept_run
from tests.results.folders import contents
from tests.results.made_up import make_run
from tests.results.test_claim import never
from tests.told import refusal

SAVED = (*store.FILES, store.SCHEDULE)


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_a_run_comes_back_exactly_also_with_probes_of_any_name(tmp_path):
    table = {column: np.arange(3.0) for column in ("loss", "per/client: 50%")}
    run = make_run()._replace(probes=dict.fromkeys(("a/b", "a:b", "a%2Fb"), table))
    back = load(save(run, tmp_path / "a" / "run"))
    for one, other in ((run.evaluations, back.evaluations), (run.updates, back.updates)):
        assert_same(one, other)
        with pytest.raises(KeyError, match=r"'energy': must be one of .*; runs with the setting energy have it"):
            other["energy"]
    assert_same(run.per_client, back.per_client)
    assert_same(store.flatten(run.params), store.flatten(back.params))
    assert list(back.probes) == list(run.probes)
    for one in back.probes.values():
        assert_same(table, one)
    assert back.params.keys() == run.params.keys() and back.params["conv"].keys() == run.params["conv"].keys()
    arrays = run.schedule._asdict()
    for number in ("num_clients", "exhausted"):
        assert getattr(back.schedule, number) == arrays.pop(number)
    assert_same(arrays, {name: getattr(back.schedule, name) for name in arrays})
    assert back.settings == {"method": "fedasync:mixing=0.6", "seed": 0, "time": 12.0, "limit": None, "sizes": [8, 4]}
    assert back.counters == {"waves": 4, "mean_width": 2.75, "ratio": None}
    assert contents(save(back, tmp_path / "second")) == contents(tmp_path / "a" / "run")


def test_the_files_are_what_other_tools_read_and_the_same_at_any_time(tmp_path, monkeypatch):
    folder = save(make_run(), tmp_path / "run")
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    assert contents(save(make_run(), tmp_path / "second")) == contents(folder)
    for name in ("params.npz", "per_client.npz", "schedule.npz"):
        with zipfile.ZipFile(folder / name) as archive:
            assert {entry.date_time for entry in archive.infolist()} == {disk.EPOCH}
    assert sorted(contents(folder)) == sorted([*SAVED, MANIFEST])
    lines = (folder / "evaluations.csv").read_text().splitlines()
    assert lines[0] == "time,update,step,loss,accuracy,bytes_up,bytes_down"
    assert lines[1].startswith("0.0,0,0,") and lines[1].endswith(",0.1,0,300")
    assert ",nan," in (folder / "updates.csv").read_text()
    with np.load(folder / "params.npz", allow_pickle=False) as archive:
        assert sorted(archive.files) == ["conv/bias", "conv/kernel", "dense"]
    assert json.loads((folder / "settings.json").read_text())["limit"] is None


OTHER_FILES = ("[]", "{}", '{"format": "another 3"}', '{"format": "fedjax_async run 1", "sha256": {}}')


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((name, None, f"{name} is missing") for name in SAVED),
        *((name, "half", name) for name in (*SAVED, MANIFEST)),
        *((MANIFEST, text, "must hold a saved run") for text in OTHER_FILES),
        (MANIFEST, None, "no manifest.json"),
    ],
)
def test_a_damaged_or_missing_file_is_named(tmp_path, name, content, says):
    path = save(make_run(), tmp_path) / name
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.unlink()
    if content is not None:
        path.write_bytes(half if content == "half" else content.encode())
    assert says in refusal(load, tmp_path)
    assert "no such folder" in refusal(load, tmp_path / "none")


def test_another_configuration_is_not_overwritten_by_accident(tmp_path):
    folder = save(make_run(), tmp_path / "run")
    before, other = contents(folder), make_run(method="fedbuff")
    differs = "same settings .*, but it holds another run: method = 'fedbuff', saved 'fedasync:mixing=0.6'$"
    with pytest.raises(ValueError, match=differs):
        save(other, folder)
    assert contents(folder) == before
    save(make_run(accuracy=[0.1, 0.2, 0.3]), folder)  # the same settings again
    assert load(folder).evaluations["accuracy"][-1] == np.float32(0.3)
    save(other, folder, overwrite=True)
    assert load(folder).settings["method"] == "fedbuff"


def test_other_things_are_left_alone_and_what_a_killed_process_left_is_no_obstacle(tmp_path):
    def refused(folder, message="must be empty"):
        with pytest.raises(ValueError, match=message):
            store.require_room(folder, {})

    (tmp_path / ".settings.json.1234.tmp").write_text("half")
    assert store.require_room(tmp_path, {}) == tmp_path
    (tmp_path / store.CHECKPOINTS).mkdir()
    (tmp_path / store.CHECKPOINTS / ".settings.json.1234.tmp").write_text("half")
    assert store.require_room(tmp_path, {}) == tmp_path
    mine = tmp_path / store.CHECKPOINTS / "thesis.tex"
    mine.write_text("mine")
    refused(tmp_path)
    refused(mine.parent)
    refused(mine, "not a file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / store.CHECKPOINTS).write_text("a file")
    refused(tmp_path / "other")
    save(make_run(), tmp_path, overwrite=True)
    assert not any(disk.is_leftover(path) for path in tmp_path.iterdir())
    save(make_run(), mine.parent, overwrite=True)
    assert mine.read_text() == "mine"


def fill(monkeypatch, room):
    """Let the disk have free space for so many bytes of each run."""
    write = disk.write

    def limited(path, content):
        nonlocal room
        if len(content) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        room -= len(content)
        write(path, content)

    monkeypatch.setattr(disk, "write", limited)


def test_a_full_disk_keeps_the_small_files_names_the_others_and_leaves_the_run_in_memory(tmp_path, monkeypatch):
    run = make_run()._replace(params={"kernel": np.zeros(100_000, np.float32)})
    fill(monkeypatch, 100_000)
    message = (
        r"^folder = '.*/run': the run is not saved, because params.npz cannot be written \(No space left on device\)"
    )
    with pytest.raises(store.NotSaved, match=f"{message}; written: .*evaluations.csv.*schedule.npz$") as error:
        save(run, tmp_path / "run")
    assert error.value.run is run
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*SAVED} - {"params.npz"}
    assert "it has no manifest.json" in refusal(load, tmp_path / "run")
    monkeypatch.undo()
    assert_same(store.flatten(load(save(error.value.run, tmp_path / "run")).params), run.params)


def test_a_full_disk_before_the_first_file(tmp_path, monkeypatch):
    fill(monkeypatch, 0)
    monkeypatch.setattr(store, "save_schedule", lambda path, schedule: disk.write(path, b"columns"))
    with pytest.raises(store.NotSaved, match=r"settings.json.*schedule.npz cannot be written .*; written: nothing$"):
        save(make_run(), tmp_path / "run")


def test_parameter_trees_of_other_shapes_and_names(tmp_path, monkeypatch):
    bare = np.arange(3.0)
    assert store.nested(store.flatten(bare)) is bare
    assert list(store.flatten([bare, {"a": (bare,)}])) == ["0", "1/a/0"]
    assert store.nested(store.flatten({"params": bare})) == {"params": bare}
    assert "parameter name = 'a/b'" in refusal(store.flatten, {"a/b": bare})
    monkeypatch.setattr(sweeping, "execute", never)  # a run is refused before the training
    plain = models.make("logistic", num_classes=10, input_shape=(28, 28, 1))
    apply = lambda params, x, key=None: plain.apply(params["w/1"], x)  # noqa: E731
    odd = plain._replace(init=lambda key: {"w/1": plain.init(key)}, apply=apply)
    with pytest.raises(ValueError, match="parameter name = 'w/1'"):
        simulate(model=named("odd", odd), clients=3, updates=3, steps=1, out=tmp_path / "run", plots=False)


TYPES = st.sampled_from([np.float64, np.float32, np.float16, np.int32, np.int64, np.bool_])


@settings(max_examples=40)
@given(TYPES.flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 6))))
def test_csv_columns_are_exact(column):
    other = np.arange(column.size)
    content = files.csv_bytes({"b": column, "a": other})
    back = files.csv_columns(content, {"a": other.dtype.str, "b": column.dtype.str})
    assert list(back) == ["b", "a"] and back["b"].dtype == column.dtype
    np.testing.assert_array_equal(back["b"], column)


@pytest.mark.parametrize(
    ("shapes", "says"), [({"a": (2,), "b": (3,)}, "equally long"), ({"a": (2, 2)}, "one-dimensional")]
)
def test_ragged_columns_are_refused(shapes, says):
    with pytest.raises(ValueError, match=says):
        files.csv_bytes({name: np.zeros(shape) for name, shape in shapes.items()})


def test_objects_in_settings_are_written_by_name_never_by_address():
    written = json.loads(files.json_bytes({"f": make_run, "p": os.curdir, "o": object(), "x": jnp.float32(jnp.inf)}))
    assert written["f"].endswith("made_up.make_run") and written["o"] == "builtins.object"
    assert written["x"] is None


def test_counters_of_earlier_versions_are_read_in_the_words_of_today():
    kept = b'{"rejected": 5, "dropped_stale": 3, "num_bytes": 64}'
    found = counters_in(kept, {"accepted": np.array([True, False, False])})
    assert found == {"rejected": 2, "dropped_stale": 3, "device_memory_bytes": 64}
    assert counters_in(b'{"rejected": 2, "dropped_stale": 0}', {}) == {"rejected": 2, "dropped_stale": 0}


# --- runs whose targets are numbers: no file has an accuracy, which would be NaN throughout ---------------

REGRESSION = {
    **{"dataset": "quadratic:clients=3", "model": "linear", "steps": 1, "updates": 6, "eval_updates": 3},
    **{"delay": "constant:mean=10", "clients": 3, "test_fraction": 0.5, "validation_fraction": 0.2},
}


def columns(folder):
    """The columns of each CSV file of a folder, by file; none holds an accuracy."""
    found = {}
    for path in folder.rglob("*.csv"):
        with path.open(newline="") as lines:
            found[path.name] = next(csv.reader(lines))
    assert found and not any("accuracy" in name for names in found.values() for name in names)
    return found


@pytest.mark.parametrize("settings", [{"method": "fedasync", "per_client": True}, {"method": "dpsgd"}])
def test_a_runs_files_and_its_explanation_have_no_accuracy_and_its_tables_read_back(tmp_path, settings):
    out = tmp_path / "run"
    run = simulate(**REGRESSION | settings, engine="reference", out=out, plots=False, stream="csv")
    assert {"evaluations.csv", "stream.csv", "clients.csv"} <= set(columns(tmp_path))
    again = load(out)
    assert set(again.evaluations) == set(run.evaluations)
    for name, values in run.evaluations.items():
        np.testing.assert_array_equal(again.evaluations[name], values)
        assert again.evaluations[name].dtype == np.asarray(values).dtype
    assert np.isnan(again.evaluations["accuracy"]).all()  # in Python the column is always there
    if settings["method"] == "fedasync":
        for _ in range(2):  # the second call reads what the first one wrote
            explained = explain(out, out=tmp_path / "why", say=str)
            assert np.isnan(explained.arrivals["accuracy"]).all() and "arrivals.csv" in columns(tmp_path)


def test_a_sweeps_tables_have_no_accuracy(tmp_path):
    point = expand(Settings(**REGRESSION), {"lr": [0.01]})[0]
    write_tables([swept_run(point, make_run([math.nan, math.nan]))], tmp_path)
    assert "tail_loss" in columns(tmp_path)["runs.csv"]


def test_only_accuracies_that_are_missing_throughout_are_left_out():
    nothing, some = [math.nan, math.nan], [math.nan, 0.5]
    names = ("global_accuracy", "client_own_accuracy_worst", "top5", "my_accuracy", "smallest_mass")
    given = {"accuracy": some} | dict.fromkeys(names, nothing)
    assert list(files.applicable(given)) == ["accuracy", "top5", "my_accuracy", "smallest_mass"]


def test_files_written_with_the_column_are_read_as_before():
    types = {"loss": "<f4", "accuracy": "<f4", "top": "<f8"}
    old, new = (files.csv_columns(text, types) for text in (b"accuracy,loss\nnan,1.5\n", b"loss\n1.5\n"))
    for name in ("loss", "accuracy"):
        np.testing.assert_array_equal(old[name], new[name])
        assert old[name].dtype == new[name].dtype == np.float32
    assert "top" not in new
