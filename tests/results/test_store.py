"""A saved run is loaded bit for bit, the same run gives the same files, and damage is detected."""

from __future__ import annotations

import errno
import json
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
from fedjax_async.config import named, sweeping
from fedjax_async.results import files, load, save, store, versions
from fedjax_async.results.store import MANIFEST, counters_in
from tests.results.folders import contents
from tests.results.made_up import make_run
from tests.results.test_claim import never


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_a_run_comes_back_exactly(tmp_path):
    run = make_run()
    back = load(save(run, tmp_path / "a" / "run"))
    assert_same(run.evaluations, back.evaluations)
    assert_same(run.updates, back.updates)
    for table in (back.evaluations, back.updates):
        with pytest.raises(KeyError, match=r"'energy': must be one of .*; runs with the setting energy have it"):
            table["energy"]
    assert_same(run.per_client, back.per_client)
    assert_same(store.flatten(run.params), store.flatten(back.params))
    assert back.params.keys() == run.params.keys() and back.params["conv"].keys() == run.params["conv"].keys()
    arrays = run.schedule._asdict()
    for number in ("num_clients", "exhausted"):
        assert getattr(back.schedule, number) == arrays.pop(number)
    assert_same(arrays, {name: getattr(back.schedule, name) for name in arrays})
    assert back.settings == {"method": "fedasync:mixing=0.6", "seed": 0, "time": 12.0, "limit": None, "sizes": [8, 4]}
    assert back.counters == {"waves": 4, "mean_width": 2.75, "ratio": None}


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path):
    first = save(make_run(), tmp_path / "first")
    assert contents(save(load(first), tmp_path / "second")) == contents(first)


def test_the_same_run_gives_the_same_bytes_at_any_time(tmp_path, monkeypatch):
    first = save(make_run(), tmp_path / "first")
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    second = save(make_run(), tmp_path / "second")
    assert contents(first) == contents(second)
    for name in ("params.npz", "per_client.npz", "schedule.npz"):
        with zipfile.ZipFile(first / name) as archive:
            assert {entry.date_time for entry in archive.infolist()} == {disk.EPOCH}


def test_the_files_are_what_other_tools_read(tmp_path):
    folder = save(make_run(), tmp_path / "run")
    assert sorted(contents(folder)) == sorted([*store.FILES, store.SCHEDULE, MANIFEST])
    lines = (folder / "evaluations.csv").read_text().splitlines()
    assert lines[0] == "time,update,step,loss,accuracy,bytes_up,bytes_down"
    assert lines[1].startswith("0.0,0,0,") and lines[1].endswith(",0.1,0,300")
    assert ",nan," in (folder / "updates.csv").read_text()
    with np.load(folder / "params.npz", allow_pickle=False) as archive:
        assert sorted(archive.files) == ["conv/bias", "conv/kernel", "dense"]
    assert json.loads((folder / "settings.json").read_text())["limit"] is None


SAVED = (*store.FILES, store.SCHEDULE)


@pytest.mark.parametrize(
    ("name", "says"),
    [*((name, f"{name} is missing") for name in SAVED), *((name, name) for name in (*SAVED, MANIFEST))],
)
def test_a_truncated_or_missing_file_is_named(tmp_path, name, says):
    path = save(make_run(), tmp_path / "run") / name
    content = path.read_bytes()
    path.unlink()
    if "missing" not in says:
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "run")


@pytest.mark.parametrize(("content", "says"), [
    *((content, "must hold a saved run") for content in (
        "[]", "{}", '{"format": "another 3"}', '{"format": "fedjax_async run 1", "sha256": {}}')),
    ("", r"no manifest\.json"), (None, "no such folder"),
])  # fmt: skip
def test_folders_that_hold_no_saved_run(tmp_path, content, says):
    if content:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "nothing" if content is None else tmp_path)


def test_another_configuration_is_not_overwritten_by_accident(tmp_path):
    folder = save(make_run(), tmp_path / "run")
    before = contents(folder)
    other = make_run(method="fedbuff")
    differs = "same settings .*, but it holds another run: method = 'fedbuff', saved 'fedasync:mixing=0.6'$"
    with pytest.raises(ValueError, match=differs):
        save(other, folder)
    assert contents(folder) == before
    save(make_run(accuracy=[0.1, 0.2, 0.3]), folder)  # the same settings again
    assert load(folder).evaluations["accuracy"][-1] == np.float32(0.3)
    save(other, folder, overwrite=True)
    assert load(folder).settings["method"] == "fedbuff"


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="must be empty"):
        save(make_run(), tmp_path)
    assert sorted(contents(tmp_path)) == ["thesis.tex"]
    with pytest.raises(ValueError, match="not a file"):
        save(make_run(), tmp_path / "thesis.tex")
    save(make_run(), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_what_a_killed_process_left_is_no_obstacle(tmp_path):
    (tmp_path / ".settings.json.1234.tmp").write_text("half")
    assert store.require_room(tmp_path, {}) == tmp_path
    (tmp_path / store.CHECKPOINTS).mkdir()
    (tmp_path / store.CHECKPOINTS / ".settings.json.1234.tmp").write_text("half")
    assert store.require_room(tmp_path, {}) == tmp_path
    (tmp_path / store.CHECKPOINTS / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="must be empty"):
        store.require_room(tmp_path, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / store.CHECKPOINTS).write_text("a file")
    with pytest.raises(ValueError, match="must be empty"):
        store.require_room(tmp_path / "other", {})
    save(make_run(), tmp_path, overwrite=True)
    assert not any(disk.is_leftover(path) for path in tmp_path.iterdir())


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
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*store.FILES, store.SCHEDULE} - {"params.npz"}
    with pytest.raises(ValueError, match=r"it has no manifest.json"):
        load(tmp_path / "run")
    monkeypatch.undo()
    assert_same(store.flatten(load(save(error.value.run, tmp_path / "run")).params), run.params)


def test_a_full_disk_before_the_first_file(tmp_path, monkeypatch):
    fill(monkeypatch, 0)
    monkeypatch.setattr(store, "save_schedule", lambda path, schedule: disk.write(path, b"columns"))
    with pytest.raises(store.NotSaved, match=r"settings.json.*schedule.npz cannot be written .*; written: nothing$"):
        save(make_run(), tmp_path / "run")


def test_parameter_trees_of_other_shapes():
    bare = np.arange(3.0)
    assert store.unflatten(store.flatten(bare)) is bare
    assert list(store.flatten([bare, {"a": (bare,)}])) == ["0", "1/a/0"]
    assert store.unflatten(store.flatten({"params": bare})) == {"params": bare}
    with pytest.raises(ValueError, match="parameter name = 'a/b'"):
        store.flatten({"a/b": bare})


@settings(max_examples=40)
@given(
    st.sampled_from([np.float64, np.float32, np.float16, np.int32, np.int64, np.bool_]).flatmap(
        lambda dtype: hnp.arrays(dtype, st.integers(0, 6))
    )
)
def test_csv_columns_are_exact(column):
    other = np.arange(column.size)
    content = files.csv_bytes({"b": column, "a": other})
    back = files.csv_columns(content, {"a": other.dtype.str, "b": column.dtype.str})
    assert list(back) == ["b", "a"] and back["b"].dtype == column.dtype
    np.testing.assert_array_equal(back["b"], column)


def test_ragged_columns_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        files.csv_bytes({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="one-dimensional"):
        files.csv_bytes({"a": np.zeros((2, 2))})


def test_objects_in_settings_are_written_by_name_never_by_address():
    written = json.loads(files.json_bytes({"f": make_run, "p": os.curdir, "o": object(), "x": jnp.float32(jnp.inf)}))
    assert written["f"].endswith("made_up.make_run") and written["o"] == "builtins.object"
    assert written["x"] is None


def test_versions_name_packages_and_device_but_no_host():
    found = versions()
    assert {"python", "jax", "jaxlib", "flax", "optax", "numpy", "fedjax-async", "revision", "backend"} <= set(found)
    assert found["numpy"] == np.__version__
    assert os.uname().nodename not in json.dumps(found)


def test_counters_of_earlier_versions_are_read_in_the_words_of_today():
    kept = b'{"rejected": 5, "dropped_stale": 3, "num_bytes": 64}'
    found = counters_in(kept, {"accepted": np.array([True, False, False])})
    assert found == {"rejected": 2, "dropped_stale": 3, "device_memory_bytes": 64}
    assert counters_in(b'{"rejected": 2, "dropped_stale": 0}', {}) == {"rejected": 2, "dropped_stale": 0}


def test_probes_of_any_name_come_back(tmp_path):
    tables = {
        name: {column: np.arange(3.0) for column in ("loss", "per/client: 50%")} for name in ("a/b", "a:b", "a%2Fb")
    }
    store.save(make_run()._replace(probes=tables), tmp_path)
    read = store.load(tmp_path).probes
    assert {name: list(table) for name, table in read.items()} == {name: list(table) for name, table in tables.items()}


def test_names_of_parameters_that_no_file_can_have_are_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "execute", never)
    plain = models.make("logistic", num_classes=10, input_shape=(28, 28, 1))

    def apply(params, x, key=None):
        return plain.apply(params["w/1"], x)

    odd = plain._replace(init=lambda key: {"w/1": plain.init(key)}, apply=apply)
    with pytest.raises(ValueError, match="parameter name = 'w/1'"):
        simulate(model=named("odd", odd), clients=3, updates=3, steps=1, out=tmp_path / "run", plots=False)
