"""The normal form of settings: what is one setting and what is another, and that a refusal names both values."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import cli
from fedjax_async.base import identity, inputs
from fedjax_async.base.fingerprints import fingerprint
from fedjax_async.cli.flags import RUN_BASE, settings_of
from fedjax_async.config import Settings
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.results import store
from fedjax_async.results.files import json_bytes
from tests.told import refusal

FLOATS = [field.name for field in dataclasses.fields(Settings) if str(field.type).startswith("float")]
WHOLE = [field.name for field in dataclasses.fields(Settings) if str(field.type).startswith("int")]


def given(name, value):
    """Settings with one value, in a run that has an end."""
    return Settings(**({"updates": 9} | {name: value}))


@pytest.mark.parametrize("name", FLOATS)
def test_an_int_and_an_equal_float_are_one_setting(name):
    shares = ("test_fraction", "validation_fraction")
    if name in shares:
        with pytest.raises(ValueError, match=f"{name} = 1"):
            given(name, 1)
        return
    forms = [3, 3.0, np.int64(3), np.float32(3), np.float64(3), np.array(3), jnp.int32(3), jnp.float32(3)]
    texts = {json.dumps(as_dict(given(name, value))) for value in forms}
    assert len(texts) == 1 and type(getattr(given(name, 3), name)) is float


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_pythons(name):
    assert type(getattr(given(name, np.int64(3)), name)) is int


CHECKED = [name for name in FLOATS + WHOLE if Settings.__dataclass_fields__[name].metadata["requires"] is not None]


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("wrong", [True, "2", [1], math.nan, -1, 10**400], ids=lambda value: f"{value}"[:9])
def test_what_is_no_number_for_a_setting_is_refused_by_its_name(name, wrong):
    assert refusal(given, name, wrong).startswith(f"{name} = ")


@pytest.mark.parametrize("name", CHECKED)
def test_whole_numbers_are_no_floats_and_floats_are_finite(name):
    assert refusal(given, name, 3.0 if name in WHOLE else math.inf).startswith(f"{name} = ")


def test_texts_paths_and_booleans_have_one_form():
    one = Settings(updates=9, initial=pathlib.Path("runs/one"), method=np.str_("asgd"), train_loss=np.True_)
    assert as_dict(one) == as_dict(Settings(updates=9, initial="runs/one", method="asgd", train_loss=True))
    assert [type(one.initial), type(one.method), type(one.train_loss)] == [str, str, bool]
    with pytest.raises(ValueError, match="train_loss = 1: must be True or False"):
        Settings(updates=9, train_loss=1)


SAME = [
    (1800, 1800.0),
    ("lognormal:sigma=1,mean=2", "lognormal:mean=2.0, sigma=1.0"),
    ("fedbuff:server-lr=0.50+swa:start=.5@buffer:size=5", "fedbuff:server_lr=0.5+swa:start=0.5@buffer:size=5"),
    ("cohort:all=True", "cohort:all=true"),
    ("100,500", "100.0, 5e2"),
    ("late:extra=1e+2,factor=3+drop", "late:factor=3,extra=100+drop"),
    ("late:extra=1e+22,factor=3", "late:factor=3,extra=1E22"),
    ((1, 2), [1.0, 2.0]),
    ({"a": None}, {}),
    (None, None),
]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        *((one, other, "") for one, other in [*SAME, *(pair[::-1] for pair in SAME)]),
        (1, True, "x = True, saved 1"),
        (0, False, "x = False, saved 0"),
        (0, None, "x = None, saved 0"),
        ("1", 1, "x = 1, saved '1'"),
        (2**53, 2**53 + 1, "x = 9007199254740993, saved 9007199254740992"),
        ("a:b=9007199254740993", "a:b=9007199254740992", "x = 'a:b=9007199254740992', saved 'a:b=9007199254740993'"),
        (0.1, float(np.float32(0.1)), "x = 0.10000000149011612, saved 0.1"),
        ("csv:path=a/1.0", "csv:path=a/1", "x = 'csv:path=a/1', saved 'csv:path=a/1.0'"),
        ("a+b", "b+a", "x = 'b+a', saved 'a+b'"),
        ([1], [1, 2], "x = [1, 2], saved [1]"),
    ],
)
def test_what_is_not_the_same_is_told_with_both_values(one, other, told):
    assert identity.difference({"x": one}, {"x": other}) == told


def test_code_and_files_are_told_by_name():
    saved = {"method": "mine", "own": {"method": {"mine": "a" * 32}}, "files": {"delay": "damaged"}}
    assert identity.difference(saved, saved | {"own": {"method": {"mine": "b" * 32}}}) == (
        f"code of method 'mine' = {'b' * 12}, saved {'a' * 12}"
    )
    with pytest.raises(ValueError, match="files: must be digests of the input files"):
        from_dict({"updates": 9, "delay": "rpi", "files": {"delay": "damaged"}})


def test_python_and_the_command_line_mean_the_same_run(tmp_path):
    (tmp_path / "settings.json").write_bytes(json_bytes(as_dict(Settings(clients=3, time=1800, lr=1))))

    def typed(*flags):
        return as_dict(settings_of(cli.parser().parse_args(["run", "--clients", "3", *flags]), RUN_BASE))

    assert store.require_room(tmp_path, typed("--time", "1800", "--lr", "1.0")) == tmp_path
    with pytest.raises(ValueError, match=r"it holds another run: time = 1801\.0, saved 1800\.0$"):
        store.require_room(tmp_path, typed("--time", "1801", "--lr", "1"))


def test_a_folder_of_an_older_version_with_an_int_is_the_same_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    wanted = as_dict(Settings(time=1800, lr=1))
    older = wanted | {"time": 1800, "lr": 1}
    (tmp_path / "checkpoints" / "settings.json").write_text(json.dumps(older))
    assert store.require_room(tmp_path, wanted) == tmp_path
    Keeper(tmp_path / "kept", 1, {"settings": older}).save(1, Snapshot(1, [], {}))
    assert Keeper(tmp_path / "kept", 1, {"settings": wanted}).restore().turns == 1


# --- digests ----------------------------------------------------------------------------------------


def test_a_digest_is_of_the_content(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"same"), two.write_bytes(b"same")
    found = inputs.digest(one)
    assert found == inputs.digest(two) and len(found) == 64
    one.write_bytes(b"other")
    assert inputs.digest(one) != found


def settled(path, content):
    """Write a file, and make it look as if it had been written an hour ago."""
    path.write_bytes(content)
    os.utime(path, ns=(time.time_ns() - 3_600 * 10**9,) * 2)


def test_a_large_file_is_read_once_even_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(inputs, "LARGE", 4)
    monkeypatch.setattr(inputs, "SETTLED", -(10**9))  # the time of its status cannot be set
    reads = []
    real = inputs.hashlib.file_digest
    monkeypatch.setattr(inputs.hashlib, "file_digest", lambda *given: reads.append(1) or real(*given))
    settled(tmp_path / "large", b"content")
    found = inputs.digest(tmp_path / "large")
    assert inputs.digest(tmp_path / "large") == found and len(reads) == 1
    monkeypatch.setattr(inputs, "_known", {})  # another process
    assert inputs.digest(tmp_path / "large") == found and len(reads) == 1
    settled(tmp_path / "large", b"another")
    assert inputs.digest(tmp_path / "large") != found and len(reads) == 2
    for damaged in (b"[]", b"{", json.dumps({str(tmp_path / "large"): [[], 3]}).encode()):
        (tmp_path / "data" / "digests.json").write_bytes(damaged)
        monkeypatch.setattr(inputs, "_known", {})
        assert inputs.digest(tmp_path / "large") != found


def test_without_a_place_to_remember_digests_they_are_computed(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path / "file"))  # no folder can be made there
    monkeypatch.setattr(inputs, "LARGE", 4)
    monkeypatch.setattr(inputs, "SETTLED", -(10**9))
    settled(tmp_path / "large", b"content")
    assert len(inputs.digest(tmp_path / "large")) == 64


def test_many_files_are_listed_as_one(tmp_path):
    for number in range(inputs.MOST_LISTED + 1):
        (tmp_path / f"{number:02}").write_bytes(b"x")
    paths = sorted(tmp_path.iterdir())
    assert len(inputs.listed(paths[1:])) == inputs.MOST_LISTED
    ((path, found),) = inputs.listed(paths)
    paths[3].write_bytes(b"y")
    assert path == str(tmp_path) and inputs.listed(paths)[0][1] != found


def test_a_mapped_file_counts_by_its_content_and_a_part_of_it_by_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "LARGEST_HASHED", 4)
    values = np.arange(12, dtype=np.int32)
    for name in ("one", "moved"):
        np.save(tmp_path / f"{name}.npy", values)
    one, moved = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("one", "moved"))
    assert fingerprint(one) == fingerprint(moved) != fingerprint(one.reshape(3, 4))
    parts = [one[:6], one[6:], one[::2], one[::-1]]
    assert len({fingerprint(part) for part in [one, *parts]}) == 5
    np.save(tmp_path / "moved.npy", values[::-1])
    assert fingerprint(np.load(tmp_path / "moved.npy", mmap_mode="r")) != fingerprint(one)
