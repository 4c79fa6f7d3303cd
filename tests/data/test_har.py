"""Human activities: hostile pickles, windows, filters, natural clients."""

from __future__ import annotations

import gzip
import pickletools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base.home import arrays_folder
from fedjax_async.data import federate, fetch, load, verify
from fedjax_async.data.arrays import write_cache
from fedjax_async.data.har import CHANNELS, channels, from_recordings, read_frames, windows
from fedjax_async.data.published import SOURCES
from tests.data.small_har import Call, Name, frame, made, pickled, recording, small_har
from tests.data.small_mnist import published_as, tar_bytes
from tests.refusals import refusals
from tests.told import refusal


def test_frames_come_back_column_by_column():
    given = {"a": np.array([1.5, 2.5]), "b": np.array([0.0, -1.0]), "c": np.array([7, 8]), "d": np.array([1, 0])}
    (found,) = read_frames(pickled({4: [frame(given)]}))[4]
    assert set(found) == set(given)
    for name, column in given.items():
        np.testing.assert_array_equal(found[name], column)
        assert found[name].dtype == column.dtype
    assert read_frames(b"\x80\x02}J\x01\0\0\0]s.") == {1: []}  # SETITEM, which pickles of one person have


@pytest.mark.parametrize(
    "hostile",
    [
        b"cposix\nmkdir\n(V{}\ntR.",
        b"\x80\x02cposix\nmkdir\nX{:4}{}\x85R.",
        b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93X{:4}{}\x85R.",
        b"(V{}\niposix\nmkdir\n.",  # an instance
        b"(cposix\nmkdir\nV{}\no.",  # an object
        b"\x80\x02cposix\nmkdir\nX{:4}{}\x85\x81.",  # a new object
        b"\x80\x02X\x0b\0\0\0posix mkdir(X{:4}{}tR.",  # a name as text
        b"P{}\n.",  # persistent
        b"\x80\x02\x82\x01.",  # an extension
    ],
)
def test_nothing_named_by_a_pickle_is_called(tmp_path, hostile):
    target = tmp_path / "made"
    text = str(target).encode()
    hostile = hostile.replace(b"{:4}", struct.pack("<I", len(text))).replace(b"{}", text)
    list(pickletools.genops(hostile))  # well-formed
    assert refusal(read_frames, hostile).startswith("pickle = ") and not target.exists()


def frame_of(values):
    """A frame with one block of unsupported values."""
    whole = frame({"a": np.zeros(1)})
    (axes, items, names, rest) = whole.state["_data"].state
    block = rest["0.14.1"]["blocks"][0] | {"values": values}
    manager = whole.state["_data"]._replace(state=(axes, items, names, {"0.14.1": {"axes": axes, "blocks": [block]}}))
    return whole._replace(state={"_data": manager})


TYPES = r"^pickle = .an array of .*: must be one of f8, i8, O8"
test_other_names_other_uses_and_arrays_of_other_types_are_refused = refusals(
    (Call(Name("__builtin__", "eval"), ("1",)), "^pickle = "),
    (Call(Name("__builtin__", "getattr"), ("text", "upper")), "^pickle = "),
    (Call(Name("numpy", "load"), ("file", None, True)), "^pickle = "),
    (Call(Name("pandas.core.frame", "read_pickle"), ("file",)), "^pickle = "),
    (Call(Name("numpy", "ndarray"), ((10**9,), "f8")), "^pickle = "),
    (Name("numpy", "ndarray"), "^pickle = "),
    ([1, None], "^pickle = "),
    (made(Name("pandas.core.frame", "DataFrame"), {"_data": 1}), "^pickle = "),
    (frame_of(np.ones(2, np.float32)), TYPES),
    (frame_of(np.ones(2, complex)), TYPES),
    (frame_of(np.array(["text"])), TYPES),
    by=lambda hostile: read_frames(pickled({1: [frame({"a": np.ones(3), "label": np.arange(3)}), hostile]})),
)


@given(data=st.binary(max_size=80))
def test_any_bytes_are_frames_or_a_value_error(data):
    with pytest.raises(ValueError):
        read_frames(data)


@given(runs=st.lists(st.tuples(st.integers(-1, 12).filter(bool), st.integers(1, 400)), min_size=1, max_size=6))
def test_windows_lie_in_one_activity_and_overlap_by_half(runs):
    labels = np.repeat(*map(np.array, zip(*runs)))
    found = list(windows(labels))
    for start, label in found:
        assert start + 128 <= len(labels)
        assert set(labels[start : start + 128]) == {label + 1}
    merged: list[list[int]] = []  # neighbours of one label are one stretch
    for label, length in runs:
        if merged and merged[-1][0] == label:
            merged[-1][1] += length
        else:
            merged.append([label, length])
    assert len(found) == sum((n - 128) // 64 + 1 for label, n in merged if 1 <= label <= 6 and n >= 128)


@pytest.mark.parametrize(("hertz", "total", "body"), [(0.0, 1.0, 0.0), (0.02, 1.0, 0.0), (2.0, 1.0, 1.0)])
def test_filters_split_slow_from_fast_and_drop_no_signal(hertz, total, body):
    time = np.arange(6000) / 50
    wave = np.cos(2 * np.pi * hertz * time + 0.3) / (1 if hertz else np.cos(0.3))
    x = channels(np.stack([wave, -wave, 0 * wave] * 2, axis=1))
    assert (x.dtype, x.shape) == (np.float32, (6000, 9))
    middle = slice(2000, 4000)
    for first, gain in ((0, total), (3, body), (6, total)):
        np.testing.assert_allclose(x[middle, first], gain * wave[middle], atol=0.04)
        np.testing.assert_allclose(x[middle, first + 1], -gain * wave[middle], atol=0.04)
        assert np.all(x[:, first + 2] == 0)


def test_the_nine_signals_are_in_the_order_of_orthofls_code():
    """Total acceleration, body acceleration, rotation; at rest the total is gravity and the body's is zero."""
    assert list(CHANNELS) == [f"{name} {axis}" for name in ("total_acc", "body_acc", "body_gyro") for axis in "xyz"]
    x = channels(np.tile([0.9, -0.3, 0.2, 0.1, 0.4, -0.5], (600, 1)))
    np.testing.assert_allclose(x[300], [0.9, -0.3, 0.2, 0, 0, 0, 0.1, 0.4, -0.5], atol=2e-4)


def test_spikes_and_the_highest_frequencies_are_noise():
    raw = np.zeros((1000, 6))
    raw[500] = 3.0  # one sample: the median of three is none of it
    assert np.all(channels(raw) == 0)
    # 12.5 Hz passes both the median filter and the low-pass
    raw[::4], raw[1::4], raw[2::4], raw[3::4] = 1.0, 1.0, -1.0, -1.0
    assert np.abs(channels(raw)[400:600, :3]).max() > 0.9


def test_people_are_split_as_in_the_original_data_set():
    arrays = from_recordings({"HAPT.pkl": small_har()})
    assert arrays.x.shape == (5, 128, 9)
    assert arrays.y.tolist() == [4, 4, 0, 1, 3]
    assert arrays.groups.tolist() == [1, 1, 1, 3, 3]
    assert arrays.test_y.tolist() == [5, 5]
    signals = channels(np.stack([recording(np.zeros(470), 1)[f"{s}-{a}"] for s in ("acc", "gyro") for a in "xyz"], 1))
    np.testing.assert_array_equal(arrays.x[1], signals[84:212])


@pytest.fixture
def small(monkeypatch):
    """Replace HAR by 5 + 2 windows of three made-up people."""
    files = {"HAPT.pkl": small_har()}
    arrays = from_recordings(files)
    monkeypatch.setitem(SOURCES, "har", published_as("har", arrays, files))
    return arrays


def test_people_are_natural_clients(small, tmp_path):
    package = tar_bytes({"package/res/HAPT.pkl.gz": gzip.compress(small_har())}, "w:gz")
    (tmp_path / "p.tar.gz").write_bytes(package)
    fetch("har", tmp_path, tmp_path / "p.tar.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays", "p.tar.gz"]  # no TFDS folder
    rows = verify("har", tmp_path)
    assert rows[-1].what == "arrays/groups" and all(row.ok for row in rows)
    clients = federate(load("har", tmp_path), "natural")
    assert clients.size.tolist() == [3, 2] and (clients.x.dtype, clients.num_classes) == (np.float32, 6)


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("groups", None, r"missing': must be int32 \(5,\)"),
        ("groups", np.zeros(4, np.int32), r"int32 \(4,\)': must be int32 \(5,\)"),
        ("x", np.zeros((5, 128, 6), np.float32), r"float32 \(5, 128, 6\)': must be .*128, 9\)"),
        ("test_x", np.zeros((2, 128, 9)), r"float64 \(2, 128, 9\)': must be float32 \(2, 128, 9\)"),
        ("test_y", np.zeros(2), r"float64 \(2,\)': must be int32 \(2,\)"),
    ],
)
def test_a_damaged_cache_is_refused_by_its_file(small, tmp_path, field, array, message):
    write_cache(small._replace(**{field: array}), arrays_folder("har", "1.0.0", tmp_path))
    with pytest.raises(ValueError, match=rf"{field}\.npy = '{message}; run: fedjax-async data fetch har$"):
        load("har", tmp_path)
