"""Checkpoints: exact resume; clear errors for files of other runs, damaged files and failed writes."""

from __future__ import annotations

import errno
import json
from functools import partial

import jax
import numpy as np
import pytest

from fedjax_async import resume, simulate
from fedjax_async.base import disk
from fedjax_async.base.notices import RunWarning
from fedjax_async.engine import checkpoint, run_waves
from fedjax_async.engine.checkpoint import Keeper, Snapshot, completed
from tests.engine.problem import Killed, killer, personal, same


@pytest.mark.float64
def test_a_resumed_run_is_identical_bit_for_bit(tmp_path):
    given, keeper = personal("buffer:size=2", updates=40), partial(Keeper, tmp_path, 5, {"settings": {"lr": 0.1}})
    want = run_waves(*given)
    for at in (3, 11, 12, 30, 39):
        with pytest.raises(Killed):
            run_waves(*given, keeper=keeper(), progress=killer(at))
    assert len(completed(tmp_path)) == 2
    restored = keeper().restore()
    assert restored.turns > 0 and len(restored.scores) > 1, "there must be a checkpoint to resume from"
    have = run_waves(*given, keeper=keeper())
    same((want.params, want.scores, want.records), (have.params, have.scores, have.records))


OF_SERVER, OF_POLICY = (
    {"method": "fedbuff+swa@buffer:size=3"},
    {"policy": "oort", "timing": "buffer:size=2,concurrency=2"},
)


def killed(folder, given):
    """A run, killed after its third checkpoint."""

    def interrupted(done, total, **status):
        if done >= 6:
            raise KeyboardInterrupt

    world = {"dataset": "quadratic", "model": "linear", "clients": 3, "steps": 1, "updates": 12, "eval_updates": 6}
    with pytest.raises(KeyboardInterrupt):
        simulate(**given | world, checkpoint=2, out=folder, plots=False, progress=interrupted)
    return folder / "checkpoints" / f"{completed(folder / 'checkpoints')[-1]}.npz"


def rewritten(path, change):
    """The file with arrays and a text that ``change`` has changed."""
    arrays = disk.read_npz(path)
    about = json.loads(arrays["about"].tobytes())
    change(arrays, about)
    disk.write(path, disk.npz_bytes(arrays | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}))


@pytest.mark.parametrize(
    ("given", "recorded"),
    [(OF_SERVER, True), ({"method": "dpsgd"}, False)],
    ids=["server", "nodes of an older version"],
)
def test_a_run_resumes_only_in_its_own_mode_of_64_bits(tmp_path, monkeypatch, given, recorded):
    """The mode is recorded; checkpoints that do not say it show it in the dtypes of their arrays."""
    if not recorded:
        monkeypatch.setattr(checkpoint, "numerics", dict)
    killed(tmp_path, given)
    said = "has numbers of float32 and this process float64: set JAX_ENABLE_X64 as when the run began"
    said = "its JAX settings differ: jax_enable_x64 = True, saved False" if recorded else said
    refused = pytest.raises(ValueError, match=f"^checkpoint = '.*': must be of this run, but .*{said}")
    with jax.enable_x64(True), refused:
        resume(tmp_path, plots=False)
    assert resume(tmp_path, plots=False).counters["updates"] == 12


@pytest.mark.parametrize("given", [OF_SERVER, OF_POLICY], ids=["server", "policy"])
def test_a_checkpoint_with_another_number_of_arrays_is_refused(tmp_path, given):
    """As one of a version in which a rule's state had no total of server steps."""

    def lacking(arrays, about):
        del arrays["leaf 00000004"], about["sha256"]["leaf 00000004"]

    rewritten(killed(tmp_path, given), lacking)
    with pytest.raises(ValueError, match=r"must be of a version with the same state, but it has .* arrays and this"):
        resume(tmp_path, plots=False)


def test_a_checkpoint_is_due_after_so_many_updates_or_seconds(tmp_path):
    by_updates, by_seconds = Keeper(tmp_path, 5, {}), Keeper(tmp_path, 5, {}, seconds=0.0)
    assert [by_updates.due(position) for position in (0, 1, 4, 5)] == [False, False, False, True]
    assert [by_seconds.due(position) for position in (0, 1)] == [False, True]
    by_seconds.save(1, Snapshot(1, [], {}))
    assert not by_seconds.due(1) and by_seconds.due(2)


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


def equal_bytes(have, want):
    for a, b in zip(have, want, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_the_newest_checkpoint_comes_back_as_it_was(saved):
    assert completed(saved) == [5, 10]
    snapshot = again(saved)
    assert snapshot.turns == 10 and snapshot.scores[0, 0]["loss"] == 10
    assert Keeper(saved / "nothing", 5, {}).restore() is None
    leaves = [np.array(3, np.int64), np.array([[1.5, np.nan]], jax.numpy.bfloat16), np.zeros((0, 4)), np.array(False)]
    Keeper(saved, 1, {}).save(11, Snapshot(1, leaves, {}))
    equal_bytes(Keeper(saved, 1, {}).restore().leaves, leaves)


def test_many_leaves_keep_their_order():
    names = list(checkpoint._named(Snapshot(1, [np.zeros(0)] * 10_002, {})))
    assert sorted(names) == names


def test_another_configuration_or_software_is_refused_and_named(saved, monkeypatch):
    with pytest.raises(ValueError, match=r"lr = 0\.2, saved 0\.1"):
        again(saved, lr=0.2)
    assert again(saved) is not None
    real = checkpoint.surroundings()
    monkeypatch.setattr(checkpoint, "surroundings", lambda: real | {"jax": "0.0.1"})
    with pytest.raises(ValueError, match=r"jax = '0\.0\.1'"):
        again(saved)


def test_a_checkpoint_of_a_version_that_did_not_record_jax_s_settings_is_continued_with_a_line(saved):
    def older(arrays, about):
        del about["identity"][checkpoint.NUMBERS], about["identity"]["rounding"]

    rewritten(saved / "10.npz", older)
    with pytest.warns(RunWarning, match="goes on from a checkpoint of an older version, with today's rules"):
        assert again(saved).turns == 10


def test_the_newest_two_are_kept_and_nothing_of_a_killed_write(saved):
    (saved / ".15.npz.1.tmp").write_bytes((saved / "10.npz").read_bytes())
    (saved / ".20.npz.1.tmp").write_bytes(b"PK")
    assert completed(saved) == [5, 10] and again(saved).turns == 10
    Keeper(saved, 5, {"settings": {"lr": 0.1}}).save(15, Snapshot(15, [np.ones(3)], {}))
    assert sorted(path.name for path in saved.iterdir()) == ["10.npz", "15.npz"]


def test_a_changed_byte_anywhere_is_found_or_does_no_harm(saved):
    path = saved / "10.npz"
    want, content = again(saved), path.read_bytes()
    keeper, found = Keeper(saved, 5, {"settings": {"lr": 0.1}}), 0
    for place in range(0, len(content), 2):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place // 2 % 8)]) + content[place + 1 :])
        try:
            have = keeper.restore()
        except ValueError as error:
            found += 1
            assert "damaged or of another format" in str(error) and "\n" not in str(error)
        else:
            assert have.turns == want.turns and have.scores == want.scores, place
            equal_bytes(have.leaves, want.leaves)
    assert found > len(content) / 4


def cut_off(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def with_about(about):
    """The file with another text about the checkpoint."""
    return lambda path: disk.write(
        path, disk.npz_bytes(disk.read_npz(path) | {"about": np.frombuffer(about, np.uint8)})
    )


def with_arrays(change):
    return lambda path: disk.write(path, disk.npz_bytes(change(disk.read_npz(path))))


OTHERS = {
    **{f"cut off at {share}": cut_off(share) for share in (0, 0.01, 0.5, 0.999)},
    "another kind": lambda path: rewritten(path, lambda arrays, about: about.update(format="something else")),
    "half a text": with_about(b"{"),
    "another text": with_about(b"[]"),
    "no text": with_about(b"\xff"),
    "changed": with_arrays(lambda arrays: arrays | {"leaf 0000": np.zeros(10, np.float32)}),
    "no leaves": with_arrays(lambda arrays: {"about": arrays["about"]}),
    "another file": with_arrays(lambda arrays: {"a": np.ones(3)}),
}


@pytest.mark.parametrize("damage", OTHERS.values(), ids=OTHERS)
def test_what_is_damaged_or_of_others_is_refused_and_the_one_before_is_intact(saved, damage):
    damage(saved / "10.npz")
    said = r"10\.npz.*damaged or of another format.*remove that file to go on from update 5"
    with pytest.raises(ValueError, match=said) as error:
        again(saved)
    assert "\n" not in str(error.value)
    (saved / "10.npz").unlink()
    assert again(saved).turns == 5


def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_is_intact(saved, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    keeper = Keeper(saved, 5, {"settings": {"lr": 0.1}})
    monkeypatch.setattr("fedjax_async.base.disk.os.fsync", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*earlier checkpoints are intact"):
        keeper.save(15, Snapshot(15, [np.ones(3)], {}))
    assert sorted(path.name for path in saved.iterdir()) == ["10.npz", "5.npz"] and again(saved).turns == 10
    monkeypatch.undo()
    assert keeper.due(15), "the write is tried again"
