"""A folder is made, checked and locked before the work, for one process at a time, even if that process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedjax_async.base import disk
from fedjax_async.config import Settings, prepare, sweeping
from fedjax_async.config.grid import expand
from fedjax_async.results import claim, cluster, save, store, sweep_folder, sweeps
from fedjax_async.results.claim import claimed, require_writable
from fedjax_async.results.simulation import compare, run_alone
from tests import forked
from tests.results.made_up import make_run, of_group
from tests.told import refusal

SMALL = Settings(model="logistic", clients=4, updates=6, steps=2)
# Even root cannot write there.
BAD = {
    "below a device": lambda home: Path(os.devnull) / "x",
    "below a file": lambda home: home / "file" / "new",
    "a file": lambda home: home / "file",
    "a long name": lambda home: home / "new" / ("x" * 300),
    "a long path": lambda home: home.joinpath(*["new" * 40] * 100),
    "where the system forbids it": lambda home: Path("/proc/nope/x"),
    "a link to itself": lambda home: home / "loop",
}


def never(*arguments, **options):
    pytest.fail("the folder should have been looked at first")


@contextlib.contextmanager
def elsewhere(folder, shared=False):
    """Claim the folder in another thread; ``ValueError`` if it does not get it."""
    held = contextlib.ExitStack()
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(held.enter_context, claimed(folder, shared=shared)).result()
            yield
        finally:
            pool.submit(held.close).result()


def taken(folder, says="in use", shared=False):
    """Assert that another thread does not get the folder."""
    with pytest.raises(ValueError, match=says), elsewhere(folder, shared=shared):
        never()


def hold(folder, ready):
    """Claim a folder until this process is killed."""
    with claimed(folder):
        ready.set()
        time.sleep(600)


def refused(folder, call):
    says = refusal(call)
    assert says.startswith(f"folder = {str(folder)!r}") and ": must be a folder" in says
    return says


@pytest.mark.parametrize("place", BAD.values(), ids=BAD)
def test_a_bad_place_of_a_folder_or_a_file_is_one_line(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    bad = place(tmp_path)
    assert refused(bad, claimed(bad).__enter__).endswith(("must be a folder, not a file", ")"))
    says = refusal(require_writable, "gantt", bad / "gantt.png")
    assert says.startswith(f"gantt = {str(bad / 'gantt.png')!r}") and "must be a file that can be written" in says
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}  # nothing is left behind


def test_a_file_is_proven_without_a_trace(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file' is not a folder" in refusal(require_writable, "gantt", tmp_path / "file" / "gantt.png")
    assert "Is a directory" in refusal(require_writable, "gantt", tmp_path)
    require_writable("gantt", tmp_path / "deep" / "gantt.png")
    require_writable("gantt", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_there_but_cannot_be_written(tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(disk, "write", fail)
    says = refused(tmp_path / "a" / "b", claimed(tmp_path / "a" / "b").__enter__)
    assert os.strerror(errno.ENOSPC) in says and list(tmp_path.iterdir()) == []


def test_a_run_folder_of_a_comparison_that_cannot_be_written_is_found_first(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_async.results.running.run", never)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "asgd").write_text("a file")
    place = tmp_path / "runs" / "asgd" / "seed_0"
    refused(place, lambda: compare(["fedasync", "asgd"], SMALL, out=tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "asgd"]


def test_new_folders_that_stay_empty_are_removed(tmp_path):
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path / "a" / "b"):
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [disk.LOCK]
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    for folder in (tmp_path / "a" / "b", tmp_path / "a"):
        with claimed(folder):
            pass
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]  # it was there before
    with claimed(tmp_path / "b" / "c"):
        (tmp_path / "b" / "c" / "file").touch()
    assert [path.name for path in (tmp_path / "b" / "c").iterdir()] == ["file"]


def test_a_claim_within_a_claim_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claimed("a"), claimed(None):
        with claimed(tmp_path / "a"), claimed("./b/../a"):
            pass
        assert Path("a", disk.LOCK).exists()
        taken("a")
    assert list(tmp_path.iterdir()) == []
    with claimed(None):
        assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_left_is_no_obstacle_and_no_result(tmp_path):
    (tmp_path / disk.LOCK).write_text("process 1234 on another machine")
    assert store.require_room(tmp_path, {}) == tmp_path
    assert sweep_folder.require_room(tmp_path, []) == tmp_path
    with claimed(tmp_path):
        save(make_run(), tmp_path)
        assert (tmp_path / disk.LOCK).exists()  # it is not removed with the temporary files
    assert {path.name for path in tmp_path.iterdir()} == {*store.FILES, store.SCHEDULE, store.MANIFEST}
    assert disk.LOCK not in (tmp_path / store.MANIFEST).read_text()


def test_a_folder_in_use_is_refused_until_its_process_is_killed(tmp_path, monkeypatch):
    folder, ready = tmp_path / "run", forked.CONTEXT.Event()
    process = forked.CONTEXT.Process(target=hold, args=(folder, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    monkeypatch.setattr(sweeping, "execute_group", never)
    says = refusal(run_alone, prepare(SMALL), folder)
    assert says.startswith(
        f"folder = {str(folder)!r}: must be free, but the folder is in use by process {process.pid} "
    )
    process.kill()
    process.join()
    assert [path.name for path in folder.iterdir()] == [disk.LOCK]  # the killed process could not remove it
    monkeypatch.setattr(sweeping, "execute_group", of_group)
    run_alone(prepare(SMALL), folder, plots=False)
    assert (folder / store.MANIFEST).is_file() and not (folder / disk.LOCK).exists()


def test_a_comparison_has_its_folder_and_that_of_the_run_under_way(tmp_path, monkeypatch):
    places = [tmp_path, tmp_path / "runs" / "fedasync" / "seed_0"]
    seen = []

    def execute(*arguments, **options):
        for place in places:
            taken(place, f"in use by process {os.getpid()} on")
            seen.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "execute", execute)
    with pytest.raises(KeyboardInterrupt):
        compare(["fedasync"], SMALL, out=tmp_path, checkpoint=4)  # in turn
    assert seen == places
    with elsewhere(places[1]), pytest.raises(ValueError, match="in use"):  # another process uses a run folder inside
        compare(["asgd", "fedasync"], SMALL, out=tmp_path)
    assert seen == places


@pytest.mark.slow
def test_threads_take_turns_however_fast_they_come_and_go(tmp_path):
    """The lock file is removed each time; no thread may hold a lock on a removed file."""
    inside, most, stop = [], [], time.monotonic() + 2

    def work(number):
        while time.monotonic() < stop:
            try:
                with claimed(tmp_path):
                    inside.append(number)
                    most.append(len(inside))
                    inside.remove(number)
            except ValueError as error:
                assert "in use" in str(error)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert set(most) == {1} and len(most) > 10 and list(tmp_path.iterdir()) == []


def test_a_lock_that_its_owner_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    open_, opened = os.open, []

    def meanwhile(path, *arguments):
        number = open_(path, *arguments)
        if Path(path).name == disk.LOCK:
            opened.append(path)
            if len(opened) == 1:
                os.unlink(path)
        return number

    monkeypatch.setattr(claim.os, "open", meanwhile)
    with claimed(tmp_path):
        assert len(opened) == 2 and (tmp_path / disk.LOCK).exists()
        taken(tmp_path)


def test_a_shared_folder_is_free_after_the_last(tmp_path):
    with claimed(tmp_path, shared=True):
        with elsewhere(tmp_path, shared=True):
            taken(tmp_path, "in use by jobs of its sweep")
        assert (tmp_path / disk.LOCK).exists()
        taken(tmp_path, f"the newest is process {os.getpid()} on")
    with claimed(tmp_path):
        taken(tmp_path, "in use by process", shared=True)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_a_folder_is_still_proven(tmp_path, monkeypatch):
    def unknown(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for flock in (SimpleNamespace(flock=unknown, LOCK_EX=2, LOCK_SH=1, LOCK_NB=4), None):  # a file system; a platform
        monkeypatch.setattr(claim, "fcntl", flock)
        with claimed(tmp_path / "a"), elsewhere(tmp_path / "a"):
            pass
        assert list(tmp_path.iterdir()) == []
        refused(Path(os.devnull) / "x", claimed(Path(os.devnull) / "x").__enter__)


def test_a_sweep_has_its_folder(tmp_path, monkeypatch, engine):
    def execute_group(*arguments, **options):
        taken(tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "execute_group", execute_group)
    with pytest.raises(KeyboardInterrupt):
        sweeps.sweep(Settings(updates=11), {"lr": [0.1]}, out=tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [sweep_folder.DEFINITION]


def test_jobs_share_the_folder_of_their_sweep_and_no_two_train_the_same(tmp_path, monkeypatch, engine):
    points = sweeps.resolved(expand({"updates": 11}, {"lr": [0.1, 0.2, 0.3, 0.4]}))  # stacks (0, 1), (2, 3)
    sweep_folder.begin(tmp_path, points)
    train = engine.execute_group

    def execute_group(*arguments, **options):
        with elsewhere(tmp_path, shared=True):  # another job
            pass
        taken(tmp_path)
        taken(sweep_folder.run_folder(tmp_path, points[0]))
        train(*arguments, **options)

    monkeypatch.setattr(engine, "execute_group", execute_group)
    assert cluster.train_members(str(tmp_path), "0,1", "", "") == "2 runs"
    with elsewhere(tmp_path, shared=True):
        again = {"lr": [0.1, 0.2, 0.3, 0.4]}
        assert "in use by jobs of its sweep" in refusal(sweeps.sweep, {"updates": 11}, again, out=tmp_path)
        with elsewhere(sweep_folder.run_folder(tmp_path, points[2])), pytest.raises(ValueError, match="in use"):
            cluster.train_members(str(tmp_path), "2,3", "", "")
    assert [each.lr for each in engine.trained] == [0.1, 0.2]
    assert not list(tmp_path.rglob(disk.LOCK))


def test_jobs_that_start_at_once_find_the_folder_free(tmp_path, monkeypatch, engine):
    results = []

    def start(calls):
        for call in calls:  # a job starts before the submission returns
            thread = threading.Thread(target=lambda given=call: results.append(cluster.train_members(*given)))
            thread.start()
            thread.join()
        return [(str(number), None) for number in range(len(calls))]

    monkeypatch.setitem(cluster.STARTS, "local", lambda folder, target: start)
    work = sweeps.plan_sweep(sweeps.resolved(expand({"updates": 11}, {"lr": [0.1, 0.2, 0.3]})))
    assert len(cluster.submit(work, tmp_path / "sweep", "local")) == 2
    assert results == ["2 runs", "1 runs"] and len(engine.trained) == 3
