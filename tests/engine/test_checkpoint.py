"""Checkpoints: exact resume in one process, refusal of what is foreign, damaged or cannot be written."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_async.engine import checkpoint, run_waves
from fedjax_async.engine.checkpoint import Keeper, Snapshot, completed
from tests.engine.problem import case, client
from tests.engine.test_contract import carrying, remembering

ROOT = Path(__file__).resolve().parents[2]


class Killed(Exception):
    """What the progress bar raises in place of a kill."""


def killer(at):
    def progress(done, total, **status):
        if done >= at:
            raise Killed

    return progress


def problem():
    given = case(remembering(), "buffer:size=2", "exponential:mean=1", updates=40)
    return given._replace(pieces=given.pieces._replace(client=carrying(client())))


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_a_resumed_run_is_identical_bit_for_bit(tmp_path, batching):
    given = problem()
    want = run_waves(*given, batching=batching)
    identity = {"settings": {"lr": 0.1}}
    for at in (3, 11, 12, 30, 39):
        with pytest.raises(Killed):
            run_waves(*given, batching=batching, keeper=Keeper(tmp_path, 5, identity), progress=killer(at))
    assert len(completed(tmp_path)) == 2
    restored = Keeper(tmp_path, 5, identity).restore()
    assert restored.groups > 0 and len(restored.scores) > 1, "there must be something to go on from"
    have = run_waves(*given, batching=batching, keeper=Keeper(tmp_path, 5, identity))
    for a, b in zip(jax.tree.leaves((want.params, want.scores, want.records)),
                    jax.tree.leaves((have.params, have.scores, have.records)), strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, at updates 5 and 10."""
    keeper = Keeper(tmp_path, 5, {"settings": {"lr": 0.1}})
    for position in (5, 10):
        leaves = [np.arange(position, dtype=np.float32), np.array(True), np.ones((2, 3), np.int32)]
        keeper.save(position, Snapshot(position, leaves, {(0, 0): {"loss": np.float32(position)}}))
    return tmp_path


def again(folder, **settings):
    return Keeper(folder, 5, {"settings": {"lr": 0.1} | settings}).restore()


def test_the_newest_checkpoint_comes_back_as_it_was(saved):
    assert completed(saved) == [5, 10]
    snapshot = again(saved)
    assert snapshot.groups == 10 and snapshot.scores[0, 0]["loss"] == 10
    assert [leaf.dtype for leaf in snapshot.leaves] == [np.float32, np.bool_, np.int32]
    np.testing.assert_array_equal(snapshot.leaves[0], np.arange(10, dtype=np.float32))
    assert Keeper(saved / "nothing", 5, {}).restore() is None


def test_another_configuration_is_refused_and_named(saved):
    with pytest.raises(ValueError, match=r"lr = 0\.2, saved 0\.1"):
        again(saved, lr=0.2)
    assert again(saved) is not None


def test_other_software_is_refused_and_named(saved, monkeypatch):
    real = checkpoint.surroundings()
    monkeypatch.setattr(checkpoint, "surroundings", lambda: real | {"jax": "0.0.1"})
    with pytest.raises(ValueError, match=r"jax = '0\.0\.1'"):
        again(saved)


def test_a_truncated_checkpoint_is_refused_and_the_one_before_is_intact(saved):
    files = sorted(
        (path for path in (saved / "10" / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    for path in files[-3:]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"10.*damaged.*go on from update 5") as error:
        again(saved)
    assert "\n" not in str(error.value)
    shutil.rmtree(saved / "10")
    assert again(saved).groups == 5


READ = """
import asyncio, logging, sys
from pathlib import Path
from types import SimpleNamespace
from fedjax_async.engine.checkpoint import Keeper
logging.basicConfig()
try:
    Keeper(Path(sys.argv[1]), 5, {"settings": {"lr": 0.1}}).restore()
except ValueError as error:
    print(error, file=sys.stderr)
closed = asyncio.new_event_loop()
closed.close()
try:  # what tensorstore's threads do sooner or later
    closed.call_soon_threadsafe(print)
except RuntimeError as error:
    trace = error.__traceback__.tb_next
    sys.unraisablehook(SimpleNamespace(exc_type=RuntimeError, exc_value=error, exc_traceback=trace))
class Real:
    def __del__(self):
        raise KeyError("real")
Real()
for text in ("1 [tensorstore_spec='{}']", "something else"):
    logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=ValueError(text))
"""


def test_what_tensorstore_says_after_its_error_is_not_printed(saved):
    """The rest is: an exception of another kind, a task that failed for another reason."""
    (saved / "10" / "state" / "manifest.ocdbt").write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", READ, saved], capture_output=True, text=True, check=False, cwd=ROOT)
    first, *rest = done.stderr.splitlines()
    assert first.startswith("checkpoint = ") and "go on from update 5" in first
    assert "Event loop is closed" not in done.stderr and done.stderr.count("Traceback") == 1
    assert rest[0].startswith("Exception ignored in") and rest[-3] == "KeyError: 'real'"
    assert rest[-2:] == ["ERROR:asyncio:Task exception was never retrieved", "ValueError: something else"]


def test_an_edited_checkpoint_is_refused(saved):
    about = saved / "10" / "about" / "metadata"
    about.write_text(about.read_text().replace("fedjax_async checkpoint 1", "something else"))
    with pytest.raises(ValueError, match="damaged or foreign"):
        again(saved)
    about.write_text("{")
    with pytest.raises(ValueError, match="damaged or foreign"):
        again(saved)


def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_is_intact(saved, monkeypatch):
    import orbax.checkpoint as ocp

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    keeper = Keeper(saved, 5, {"settings": {"lr": 0.1}})
    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*earlier checkpoints are intact"):
        keeper.save(15, Snapshot(15, [np.ones(3)], {}))
    assert completed(saved) == [5, 10] and again(saved).groups == 10


def test_an_unfinished_write_is_not_a_checkpoint(saved):
    shutil.copytree(saved / "10", saved / "15.orbax-checkpoint-tmp-1")
    assert completed(saved) == [5, 10] and again(saved).groups == 10
