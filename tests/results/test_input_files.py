"""Input files are part of a run by their content: a moved copy is the same file, a changed one is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedjax_async import cli, compare, resume, simulate, sweep
from fedjax_async.base import disk, factories, home, identity, inputs, notices
from fedjax_async.clock.energy import ENERGY
from fedjax_async.config import Settings, plugins, registries, sweeping
from fedjax_async.config.inputs import with_files
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import resolved
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.data import datasets, from_arrays, write_folder
from fedjax_async.data.arrays import Arrays, read_cache, write_cache
from fedjax_async.engine import checkpoint
from fedjax_async.models import weights
from fedjax_async.models.encoder import FILES
from fedjax_async.results import collect, store
from tests.data.layouts import h5_file, leaf_file, saved
from tests.models.tiny_encoder import BERT
from tests.results.folders import killed_run

CLIENTS = 3
SMALL = {"model": "logistic", "clients": CLIENTS, "updates": 4, "steps": 1}


def delays(folder, value=1):
    lines = "".join(f"{client},{value},0.1\n" for client in range(CLIENTS))
    (folder / "delays.csv").write_text("client,mean,std\n" + lines)
    return {"delay": f"csv:path={folder / 'delays.csv'}"}


def topology(folder, value=2):
    (folder / "graph.csv").write_text(f"source,target\n0,1\n1,2\n{value},0\n")
    return {"method": "dpsgd", "topology": f"csv:directed=true,path={folder / 'graph.csv'}"}


def initial(folder, value=1.0):
    weights.write_arrays(folder / "w.npz", {"kernel": np.full(3, value, np.float32)})
    return {"initial": str(folder / "w.npz")}


def folder_of_a_run(folder, value=1.0):
    (folder / "params.npz").write_bytes(disk.npz_bytes({"kernel": np.full(3, value)}))
    return {"initial": str(folder)}


def table(value):
    return pa.table({"image": [[float(i), 1.0] for i in range(6)], "label": [0, 1, 0, 1, 0, value]})


def parquet(folder, value=1):
    pq.write_table(table(value), folder / "rows.parquet")
    pq.write_table(table(0), folder / "held_out.parquet")
    return {"dataset": f"parquet:path={folder / 'rows.parquet'},test={folder / 'held_out.parquet'}"}


def rows(folder, value=1):
    lines = "".join(f"{i},{i % 2},{i % CLIENTS}\n" for i in range(6))
    (folder / "rows.csv").write_text(f"a,y,who\n{lines}9,{value},0\n")
    return {"dataset": f"csv:path={folder / 'rows.csv'},x=a,y=y,client=who", "test_fraction": 0.5}


def hugging_face(folder, value=1):
    shutil.rmtree(folder / "set", ignore_errors=True)
    saved(folder / "set", table(value))
    return {"dataset": f"hugging_face:path={folder / 'set'}", "test_fraction": 0.5}


def flower(folder, value=2):
    parquet(folder)
    (folder / "ids.json").write_text(f"[0, 1, 2, 0, 1, {value}]")
    return {"dataset": f"flower:partitions={folder / 'ids.json'},path={folder / 'rows.parquet'}", "test_fraction": 0.5}


def leaf(folder, value=1):
    users = {f"u{c}": {"x": [[1.0, 2.0], [0.0, 1.0]], "y": [0, value]} for c in range(CLIENTS)}
    leaf_file(folder / "users.json", users)
    return {"dataset": f"leaf:task=vectors,path={folder}", "test_fraction": 0.5}


def tff(folder, value=1):
    one = {"pixels": np.ones((2, 4, 4), np.float32), "label": np.array([0, value])}
    (folder / "h.h5").unlink(missing_ok=True)
    h5_file(folder / "h.h5", {f"c{c}": one for c in range(CLIENTS)})
    return {"dataset": f"tff:path={folder / 'h.h5'}", "test_fraction": 0.5}


def federation(folder, value=1):
    shutil.rmtree(folder / "clients", ignore_errors=True)
    x, y = np.ones((4, 2), np.float32), np.array([0, 1, 0, value], np.int32)
    write_folder(folder / "clients", from_arrays(clients=[(x, y)] * CLIENTS, test=(x, y)))
    return {"dataset": f"folder:path={folder / 'clients'}"}


def encoder(folder, value=2):
    (folder / "config.json").write_text(json.dumps(BERT | {"num_hidden_layers": value}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return {"model": f"minilm_lora:path={folder}"}


MADE = {
    ("delay", "csv"): delays,
    ("topology", "csv"): topology,
    ("dataset", "parquet"): parquet,
    ("dataset", "csv"): rows,
    ("dataset", "hugging_face"): hugging_face,
    ("dataset", "flower"): flower,
    ("dataset", "leaf"): leaf,
    ("dataset", "tff"): tff,
    ("dataset", "folder"): federation,
    ("model", "minilm_lora"): encoder,
    ("initial", "a file"): initial,
    ("initial", "the folder of a run"): folder_of_a_run,
}
READ_ONCE = {"cifar100", "tiny_imagenet"}  # runs read the prepared arrays


@pytest.mark.parametrize(("kind", "more"), [("dataset", READ_ONCE), ("model", set())])
def test_every_reader_of_a_path_is_in_the_table(kind, more):
    known = {name: factory for name, factory in registries.REGISTRIES[kind].items() if callable(factory)}
    taking = {name for name, factory in known.items() if "path" in factories.options_of(factory)}
    assert taking - more == {name for field, name in MADE if field == kind}


@pytest.mark.parametrize("kind", ["delay", "availability", "network", "energy", "partition", "topology"])
def test_the_others_need_no_reader_since_their_option_path_is_the_file(tmp_path, kind):
    (tmp_path / "a.csv").write_text("a,b\n")
    known = {**registries.REGISTRIES, "energy": ENERGY}[kind].items()
    names = [name for name, factory in known if "path" in factories.options_of(factory)]
    for name in names:
        found = getattr(with_files(Settings(updates=1, **{kind: f"{name}:path={tmp_path / 'a.csv'}"})), kind)
        assert found.files == ((str(tmp_path / "a.csv"), inputs.digest(tmp_path / "a.csv")),)
    assert names


def described(**changes):
    return json.loads(json.dumps(as_dict(resolved(Settings(**(SMALL | changes))))))


@pytest.mark.parametrize("key", MADE, ids=" ".join)
def test_a_moved_copy_is_the_same_file_and_a_changed_one_is_named(tmp_path, key):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (field, _), make = key, MADE[key]
    given = make(here)
    begun = described(**given)
    shutil.copytree(here, there)
    moved = given | {name: v.replace(str(here), str(there)) for name, v in given.items() if isinstance(v, str)}
    assert described(**moved)[field] != begun[field] and identity.difference(begun, described(**moved)) == ""

    assert from_dict(begun) == from_dict(described(**make(here)))
    found = identity.difference(begun, described(**make(here, 0)))
    assert found.startswith(f"content of {here}") and f"({field}) = " in found and ", saved " in found
    with pytest.raises(ValueError, match=f"^{field} = .*they have changed: content of {here}"):
        resolved(from_dict(begun))  # as resume, explain and landscape do
    assert identity.difference(begun, described(**moved)) == "", "the copy has not changed"


def test_swapped_files_are_another_run_and_those_beside_them_do_not_count(tmp_path):
    given = parquet(tmp_path)
    begun = described(**given)
    one, two, aside = tmp_path / "rows.parquet", tmp_path / "held_out.parquet", tmp_path / "aside"
    one.rename(aside), two.rename(one), aside.rename(two)
    assert f"content of {one} (dataset)" in identity.difference(begun, described(**given))
    begun = described(**hugging_face(tmp_path))
    (tmp_path / "set" / "cache-1.arrow").write_bytes(b"written by another program")
    (tmp_path / "set" / "README.md").write_text("notes")
    assert identity.difference(begun, described(dataset=begun["dataset"], test_fraction=0.5)) == ""


def test_a_file_that_changes_within_a_process_is_read_anew(tmp_path):
    for value, labels in ((1, 3), (0, 2)):
        spec = parquet(tmp_path, value) | {"partition": "iid"}
        assert data_of(resolved(Settings(**(SMALL | spec)))).y.sum() == labels


def test_prepared_arrays_and_files_of_a_pretrained_model_are_input_files(tmp_path, monkeypatch):
    one, two = np.zeros((2, 1), np.uint8), np.zeros(2, np.int32)
    arrays = Arrays(one, two, one, two)
    folder = write_cache(arrays, tmp_path / "mnist")
    for make in (lambda: read_cache(folder), lambda: datasets._keep(arrays, folder)):  # read, or just made
        with inputs.collected() as files:
            make()
        assert [file.name for file in files] == ["x.npy", "y.npy", "test_x.npy", "test_y.npy"]
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    kept = home.pretrained_folder("minilm", "0.1.0", tmp_path)
    kept.mkdir(parents=True)
    encoder(kept)
    spec = with_files(Settings(**(SMALL | {"model": "minilm_lora:rank=2"}))).model
    assert spec.pattern == "minilm_lora:rank=2" and [Path(path).name for path, _ in spec.files] == list(FILES)


@pytest.mark.usefixtures("nothing_stays_registered")
def test_a_factory_of_ones_own_has_input_files_too(tmp_path):
    (tmp_path / "a.txt").write_text("1")

    @plugins.register("delay", "mine_of_a_file")
    def mine(*, path: str):
        del path

    begun = described(delay=f"mine_of_a_file:path={tmp_path}")
    (tmp_path / "a.txt").write_text("2")
    found = identity.difference(begun, described(delay=begun["delay"]))
    assert f"content of {tmp_path / 'a.txt'} (delay)" in found


def small(folder, **changes):
    return SMALL | delays(folder) | changes


def as_by_an_older_version(folder):
    """Remove what older versions did not write."""
    for name, drop in (("settings.json", ["files"]), ("versions.json", list(checkpoint.numerics()))):
        content = json.loads((folder / name).read_bytes())
        kept = {key: value for key, value in content.items() if key not in drop}
        (folder / name).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in manifest["sha256"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_finished_run_is_not_read_after_its_input_changed_and_an_older_one_with_a_line(
    tmp_path, capsys, made_at_once
):
    out = tmp_path / "run"
    given = small(tmp_path) | {"out": out, "plots": False}
    first = simulate(**given)
    simulate(**given)
    assert "was read" in capsys.readouterr().out
    delays(tmp_path, 2)
    with pytest.raises(ValueError, match=rf"another run: content of {tmp_path}/delays.csv \(delay\) = \w+, saved \w+$"):
        simulate(**given)
    anew = simulate(**given, again=True)
    assert store.load(out).settings["files"] == anew.settings["files"] != first.settings["files"]
    as_by_an_older_version(out)
    capsys.readouterr()
    simulate(**given)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "was read" in printed
    assert f"whether {tmp_path}/delays.csv changed since is not known" in printed


def test_a_comparison_takes_no_method_after_the_delays_changed(tmp_path, made_at_once):
    out = tmp_path / "out"
    compare(["asgd"], **small(tmp_path), out=out, plots=False, progress=False)
    with pytest.raises(ValueError, match=r"content of .*delays.csv \(delay\)"):
        compare(["fedasync", "asgd"], **(SMALL | delays(tmp_path, 3)), out=out, plots=False, progress=False)
    assert not list(out.glob("runs/fedasync/*/manifest.json"))


def test_a_sweep_names_the_file_that_changed_and_is_collected_without_it(tmp_path, recwarn, engine):
    out, grid = tmp_path / "sweep", {"seed": [0, 1]}
    sweep(small(tmp_path), grid, out=out, progress=False)
    with pytest.raises(ValueError, match=r"another sweep: of .*, content of .*delays.csv"):
        sweep(SMALL | delays(tmp_path, 2), grid, out=out, progress=False)
    (tmp_path / "delays.csv").unlink()
    found, missing = collect(out)
    assert len(found.points) == 2 and not missing and not recwarn.list


def test_a_killed_run_does_not_go_on_after_its_labels_were_flipped(tmp_path, capsys, made_at_once):
    out, given = tmp_path / "run", SMALL | parquet(tmp_path) | {"partition": "iid"}
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "settings.json").write_text(json.dumps(described(**given, checkpoint=1)))
    parquet(tmp_path, 0)
    assert cli.main(["resume", str(out), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert f"content of {tmp_path}/rows.parquet (dataset)" in told and "--overwrite" in told and told.count("\n") == 1
    with pytest.raises(ValueError, match=r"another run: content of .*rows.parquet"):
        simulate(**given, checkpoint=1, out=out, plots=False)
    simulate(**given, checkpoint=1, out=out, plots=False, overwrite=True)
    assert store.load(out).settings == described(**given, checkpoint=1) and not (out / "checkpoints").exists()


def test_a_killed_run_that_is_begun_anew_is_not_said_to_go_on(tmp_path, capsys):
    killed_run(tmp_path / "run", 3, **small(tmp_path), checkpoint=1)
    given = small(tmp_path) | delays(tmp_path, 3)
    anew = simulate(**given, checkpoint=1, out=tmp_path / "run", plots=False, progress=False, again=True)
    assert "goes on" not in capsys.readouterr().out
    alone = simulate(**given, progress=False)
    np.testing.assert_array_equal(anew.evaluations["loss"], alone.evaluations["loss"])


def test_a_killed_run_goes_on_with_a_moved_copy(tmp_path):
    given = small(tmp_path)
    killed_run(tmp_path / "run", 3, **given, checkpoint=1)
    (tmp_path / "delays.csv").rename(tmp_path / "moved.csv")
    with pytest.raises(ValueError, match=r"delays\.csv"):
        resume(tmp_path / "run", plots=False)
    moved = given | {"delay": f"csv:path={tmp_path / 'moved.csv'}", "checkpoint": 1}
    at = []
    simulate(**moved, out=tmp_path / "run", plots=False, progress=lambda done, *_, **__: at.append(done))
    assert at[0] > 1, "it goes on from its checkpoint"


def test_an_older_checkpoint_is_read_with_a_line_and_a_changed_table_is_not_blamed_on_cores_alone(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "described", lambda fields: {})
        killed_run(tmp_path / "run", 3, **small(tmp_path), checkpoint=1)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    with pytest.warns(notices.RunWarning, match=r"whether .*delays\.csv changed since is not known") as said:
        resume(tmp_path / "again", plots=False)
    assert len(said) == 1
    (tmp_path / "delays.csv").write_text("client,mean,std\n0,1,0\n1,50,0\n2,2,0\n")
    with pytest.warns(notices.RunWarning, match="is not known"), pytest.raises(ValueError, match="batches") as error:
        resume(tmp_path / "run", plots=False)
    assert f"differ, or an input file has changed ({tmp_path}/delays.csv): " in str(error.value)


@pytest.mark.parametrize("path", ["missing.csv", "~nobody-here/x.csv", "{tmp}", "/dev/null"])
def test_a_path_that_is_no_file_is_left_to_its_reader(tmp_path, monkeypatch, path):
    monkeypatch.setattr(inputs, "below", lambda folder: pytest.fail(f"searches {folder}"))
    path = path.format(tmp=tmp_path)
    for changes in ({"delay": f"csv:path={path}"}, {"initial": path}, {"model": f"mlp:path={path}"}):
        assert with_files(Settings(**(SMALL | changes))) == Settings(**(SMALL | changes))


def test_a_file_that_cannot_be_read_is_left_to_its_reader(tmp_path):
    with mock.patch.object(inputs, "digest", side_effect=PermissionError(13, "Permission denied")):
        assert "files" not in described(**delays(tmp_path))


def test_checkpoints_of_a_stack_are_found_by_content(tmp_path):
    def folder(path, digest=None):
        described = {"delay": f"csv:path={path}", "lr": 0.1}
        if digest is not None:
            described["files"] = {"delay": {"spec": "csv:path=*", "sha256": [[path, digest]]}}
        return sweeping._checkpoints(tmp_path, [SimpleNamespace(described=described)], 1)

    assert folder("a", "1") == folder("b", "1") != folder("a", "2")
    older = folder("a")
    older.mkdir()
    assert folder("a", "1") == older != folder("b", "1"), "one that an older version left is used"
    folder("b", "1").mkdir()
    assert folder("a", "1") == folder("b", "1")
