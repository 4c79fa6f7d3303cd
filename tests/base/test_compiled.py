"""Compiled programs on disk: damaged or foreign entries do no harm, the size is limited, JAX's settings win."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from fedjax_async import keep_compiled
from fedjax_async.base.compiled import LARGEST, MINIMUM, UNFINISHED, Entries
from fedjax_async.base.notices import RunWarning
from tests.bare_user import a_bare_user

ROOT = Path(__file__).resolve().parent.parent.parent


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_a_broken_or_foreign_entry_counts_as_missing_and_is_replaced(tmp_path):
    here, there = Entries(tmp_path, "here"), Entries(tmp_path, "there")
    there.put("key", b"their program")
    assert here.get("key") is None
    there.file("key").replace(here.file("key"))
    assert here.get("key") is None and not list(tmp_path.iterdir())
    here.put("key", b"program")
    file = here.file("key")
    sound = file.read_bytes()
    for damaged in (
        flipped(sound, len(sound) - 1), flipped(sound, 30), sound[:-3], sound + b"x", b"", b"something else"
    ):  # fmt: skip
        file.write_bytes(damaged)
        assert here.get("key") is None and not file.exists()
    for value in (b"program", b"another"):
        here.put("key", value)
        assert here.get("key") == value and list(tmp_path.iterdir()) == [file]
    gone = Entries(tmp_path / "gone", "here")
    gone.put("key", b"program")
    assert gone.get("key") is None


def test_the_least_recently_used_go(tmp_path):
    entries, left = Entries(tmp_path, "here", limit=3000), tmp_path / f"left{UNFINISHED}"
    left.write_bytes(bytes(900))  # by a killed process
    (tmp_path / "notes.txt").write_bytes(bytes(10_000))  # of the user
    os.utime(left, (0, 0))
    for age, name in enumerate("ab", 1):
        entries.put(name, bytes(800))
        os.utime(entries.file(name), (age, age))
    assert entries.get("a")  # now the most recently used
    entries.put("c", bytes(800))
    assert not left.exists()
    entries.put("d", bytes(800))
    assert [name for name in "abcd" if entries.get(name)] == ["a", "c", "d"]
    entries.put("too large", bytes(3000))
    assert entries.get("too large") is None and entries.get("a") and (tmp_path / "notes.txt").exists()


def test_many_at_the_same_time(tmp_path):
    """Threads in place of processes: none reads half an entry, and none fails when another removes one."""

    def work(seed):
        entries, rng = Entries(tmp_path, "here", limit=20_000), np.random.default_rng(seed)
        for _ in range(150):
            key = int(rng.integers(12))
            value = bytes([key]) * (1000 + 200 * key)
            assert entries.get(str(key)) in (None, value)
            entries.put(str(key), value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    Entries(tmp_path, "here", limit=20_000).shorten()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))


@pytest.fixture
def no_cache_yet(monkeypatch):
    """JAX in its initial state, without a cache."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_compilation_cache_max_size", MINIMUM)
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv(MINIMUM.upper(), raising=False)
    for name, value in zip(names, (None, True, -1, 1.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_what_was_set_wins(no_cache_yet, tmp_path, monkeypatch):
    for name, value in (
        ("jax_compilation_cache_dir", str(tmp_path / "theirs")),
        ("jax_enable_compilation_cache", False),
        ("jax_compilation_cache_max_size", 0),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        assert keep_compiled(tmp_path / "ours") is None
        jax.config.update(name, before)
    assert not list(tmp_path.iterdir()) and getattr(jax.config, MINIMUM) == 1.0
    monkeypatch.setenv(MINIMUM.upper(), "1.0")
    jax.config.update("jax_compilation_cache_max_size", 5000)
    assert keep_compiled(tmp_path / "ours") == tmp_path / "ours"
    assert getattr(jax.config, MINIMUM) == 1.0 and compilation_cache._cache.limit == 5000


def test_a_folder_that_cannot_be_trusted_or_written(no_cache_yet, tmp_path, monkeypatch):
    def refused(folder, why):
        with pytest.warns(RunWarning, match=f"^compiled programs are not kept for later runs: {why}$"):
            assert keep_compiled(folder) is None

    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r".*/file cannot be made \(File exists\)")
    refused(tmp_path / "file" / "below", r".*/file/below cannot be made \(Not a directory\)")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(tmp_path / "open", "other users can write .*/open")
    (tmp_path / "closed").mkdir()
    for call, answer, why in (
        ("access", False, "cannot be written"),  # as for all users but root
        ("geteuid", 12345, "belongs to another user"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, lambda *_, answer=answer: answer)
            refused(tmp_path / "closed", f".*/closed {why}")
    monkeypatch.delenv("FEDJAX_ASYNC_DATA", raising=False)
    for home in (None, tmp_path / "nothing"):
        a_bare_user(monkeypatch, home)
        refused(None, "this user has no home directory; FEDJAX_ASYNC_DATA=FOLDER names another place")
    assert not (tmp_path / "nothing").exists()


def compiled_again(x):
    """The result of a program that is compiled again, and whether an entry was used."""
    hits = []
    listen = lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    out = np.asarray(jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0) * 0.3)(x))
    jax.monitoring.unregister_event_listener(listen)
    return out.tolist(), bool(hits)


def test_a_program_is_taken_from_the_folder(no_cache_yet, tmp_path, recwarn):
    """With the same result, also if entries are damaged, or are intact but useless to JAX."""
    x, folder = jnp.asarray(np.random.default_rng(0).normal(size=(40, 30)), jnp.float32), tmp_path / "new" / "folder"
    alone, _ = compiled_again(x)
    assert keep_compiled(folder) == folder
    assert getattr(jax.config, MINIMUM) == 0.1 and compilation_cache._cache.limit == LARGEST
    jax.config.update(MINIMUM, 0)
    assert [compiled_again(x), compiled_again(x)] == [(alone, False), (alone, True)]
    for entry in folder.iterdir():
        entry.write_bytes(entry.read_bytes()[:-5])
    assert [compiled_again(x), compiled_again(x)] == [(alone, False), (alone, True)], "broken entries are written anew"
    ours, keys = compilation_cache._cache, []
    put, ours.put = ours.put, lambda key, value: (keys.append(key), put(key, b"no program"))[1]
    for entry in folder.iterdir():
        entry.unlink()
    compiled_again(x)
    ours.put = put
    assert keys and ours.get(keys[0]) == b"no program"
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        assert compiled_again(x) == (alone, False)
    assert compiled_again(x) == (alone, True), "useless entries are written anew"


PROGRAM = """
import sys, fedjax_async
fedjax_async.clock.DELAYS
import fedjax_async.config, fedjax_async.engine
assert "jax" not in sys.modules  # for a room
fedjax_async.config.grid.expand  # a module of a room
fedjax_async.models.is_module(3)
assert "torch" not in sys.modules
from fedjax_async import *
sweep, Settings(updates=1)

import jax
from pathlib import Path
from fedjax_async.cli import main

before = dict(jax.config.values)
simulate(dataset="synthetic", model="logistic", clients=3, updates=4, engine="reference")
assert jax.config.values == before and not Path("home/compiled").exists(), "the library changes nothing"
assert main("run --dataset synthetic --model logistic --clients 2 --updates 2 --engine reference --quiet".split()) == 0
"""


@pytest.mark.usefixtures("commands_compile_as_here")
def test_a_fresh_process_imports_late_and_only_the_command_line_keeps_programs(tmp_path):
    """In the folder of the data sets; a run from Python keeps none."""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"FEDJAX_ASYNC_DATA": "home", "PYTHONPATH": str(ROOT), MINIMUM.upper(): "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "home" / "compiled").glob("*.program"))
