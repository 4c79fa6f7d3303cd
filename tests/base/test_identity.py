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


SHARES = ("test_fraction", "validation_fraction")
CHECKED = [name for name in FLOATS + WHOLE if Settings.__dataclass_fields__[name].metadata["requires"] is not None]


@pytest.mark.parametrize("name", [name for name in FLOATS + WHOLE if name not in SHARES])
def test_an_int_and_an_equal_float_are_one_setting_and_whole_numbers_are_pythons(name):
    kind, forms = int, [3, np.int64(3)]
    if name in FLOATS:
        kind, forms = float, [*forms, 3.0, *(make(3) for make in (np.float32, np.float64, np.array, jnp.int32))]
        forms.append(jnp.float32(3))
    texts = {json.dumps(as_dict(given(name, value))) for value in forms}
    assert len(texts) == 1 and {type(getattr(given(name, value), name)) for value in forms} == {kind}


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_no_number_for_a_setting_is_refused_by_its_name(name):
    """A whole number is no float, and a float is finite."""
    for wrong in (True, "2", [1], math.nan, -1, 10**400, 3.0 if name in WHOLE else math.inf):
        assert refusal(given, name, wrong).startswith(f"{name} = ")


def test_texts_paths_and_booleans_have_one_form():
    one = Settings(updates=9, initial=pathlib.Path("runs/one"), method=np.str_("asgd"), train_loss=np.True_)
    assert as_dict(one) == as_dict(Settings(updates=9, initial="runs/one", method="asgd", train_loss=True))
    assert [type(one.initial), type(one.method), type(one.train_loss)] == [str, str, bool]
    assert "train_loss = 1: must be True or False" in refusal(Settings, updates=9, train_loss=1)
    for name in SHARES:
        assert f"{name} = 1" in refusal(Settings, updates=9, **{name: 1})


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


OTHER = [
    (1, True), (0, False), (0, None), ("1", 1), (2**53, 2**53 + 1), ("a:b=9007199254740993", "a:b=9007199254740992"),
    (0.1, float(np.float32(0.1))), ("csv:path=a/1.0", "csv:path=a/1"), ("a+b", "b+a"), ([1], [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "same"), [*((pair, True) for pair in SAME), *((pair, False) for pair in OTHER)])
def test_what_is_not_the_same_is_told_with_both_values(values, same):
    for saved, asked in (values, values[::-1]):
        told = "" if same else f"x = {asked!r}, saved {saved!r}"
        assert identity.difference({"x": saved}, {"x": asked}) == told


def test_code_and_files_are_told_by_name():
    saved = {"method": "mine", "own": {"method": {"mine": "a" * 32}}, "files": {"delay": "damaged"}}
    assert identity.difference(saved, saved | {"own": {"method": {"mine": "b" * 32}}}) == (
        f"code of method 'mine' = {'b' * 12}, saved {'a' * 12}"
    )
    damaged = {"updates": 9, "delay": "rpi", "files": {"delay": "damaged"}}
    assert "files: must be digests of the input files" in refusal(from_dict, damaged)


def test_python_and_the_command_line_mean_the_same_run(tmp_path):
    (tmp_path / "settings.json").write_bytes(json_bytes(as_dict(Settings(clients=3, time=1800, lr=1))))

    def typed(*flags):
        return as_dict(settings_of(cli.parser().parse_args(["run", "--clients", "3", *flags]), RUN_BASE))

    assert store.require_room(tmp_path, typed("--time", "1800", "--lr", "1.0")) == tmp_path
    said = refusal(store.require_room, tmp_path, typed("--time", "1801", "--lr", "1"))
    assert said.endswith("it holds another run: time = 1801.0, saved 1800.0")


def test_a_folder_of_an_older_version_with_an_int_is_the_same_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    wanted = as_dict(Settings(time=1800, lr=1))
    older = wanted | {"time": 1800, "lr": 1}
    (tmp_path / "checkpoints" / "settings.json").write_text(json.dumps(older))
    assert store.require_room(tmp_path, wanted) == tmp_path
    Keeper(tmp_path / "kept", 1, {"settings": older}).save(1, Snapshot(1, [], {}))
    assert Keeper(tmp_path / "kept", 1, {"settings": wanted}).restore().turns == 1


# --- digests ----------------------------------------------------------------------------------------


def settled(path, content):
    """Write a file, and make it look as if it had been written an hour ago."""
    path.write_bytes(content)
    os.utime(path, ns=(time.time_ns() - 3_600 * 10**9,) * 2)


@pytest.mark.parametrize("large", [4, inputs.LARGE])
def test_a_digest_is_of_the_content_also_without_a_place_to_remember_it(tmp_path, monkeypatch, large):
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(one))  # no folder can be made there
    monkeypatch.setattr(inputs, "LARGE", large)
    monkeypatch.setattr(inputs, "SETTLED", -(10**9))
    for path in (one, two):
        settled(path, b"content")
    found = inputs.digest(one)
    assert found == inputs.digest(two) and len(found) == 64
    settled(one, b"another")
    assert inputs.digest(one) != found


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
