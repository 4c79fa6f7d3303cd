"""Files of weights: written and read here and by the safetensors library; bad ones are refused in one line."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fedjax_async import models
from fedjax_async.models.safetensors import safetensors_bytes
from fedjax_async.models.weights import filled, read_arrays, write_arrays

ARRAYS = {
    "conv/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array(7, np.int64),
    "double": np.array([0.1, -2.0]),
    "empty": np.zeros((0, 2), np.float32),
    "half": np.array([1.5, -2], np.float16),
    "mask": np.array([True, False]),
}


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_what_is_written_is_read(tmp_path, ending):
    arrays = ARRAYS | {"brain": np.array([1.5, 3], ml_dtypes.bfloat16)}
    path = write_arrays(tmp_path / f"w.{ending}", arrays)
    found = read_arrays(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
    again = write_arrays(tmp_path / f"again.{ending}", dict(reversed(arrays.items())))
    assert ending == "npz" or again.read_bytes() == path.read_bytes()


def test_the_library_of_safetensors_reads_ours_and_we_read_its(tmp_path):
    content = safetensors_bytes(ARRAYS, {"format": "pt"})
    for found in (safetensors.numpy.load(content), dict(models.read_safetensors(_file(tmp_path, content)))):
        assert set(found) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
    theirs = models.read_safetensors(_file(tmp_path, safetensors.numpy.save(ARRAYS)))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(theirs[name], array)
    with safetensors.safe_open(_file(tmp_path, content), "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def _file(folder, content, name="m.safetensors"):
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: read_arrays(folder / "w.h5"), r"^extension of the file of weights = '\.h5': .*\.npz"),
        (lambda folder: read_arrays(folder / "w.npz"), r"^weights = '.*w\.npz': must be a file, but there is none$"),
        (lambda folder: write_arrays(folder / "w.pt", ARRAYS), r"^extension of the file of weights = '\.pt'"),
        (
            lambda folder: write_arrays(folder / "w.safetensors", {"x": np.zeros(2, np.complex64)}),
            r"^array x = 'complex64': must be F64, ",
        ),
        (lambda folder: read_arrays(_file(folder, b"PK", "o.npz")), r"^o\.npz = a damaged file: must be an \.npz arch"),
        (
            lambda folder: models.read_safetensors(_file(folder, (100_000).to_bytes(8, "little") + b"[" * 100_000)),
            r"^m\.safetensors = a header of 100000 bytes: must be JSON",
        ),
        (
            lambda _: filled({"w": np.zeros((2, 3))}, {"w": np.zeros(6)}, "mine"),
            r"^shape of w in mine = \(6,\): must be",
        ),
        (lambda _: filled({"w": np.zeros((2, 3))}, {}, "mine"), "^shape of w in mine = 'none': must be "),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_arrays_get_the_dtype_of_the_params():
    assert filled({"w": jnp.zeros((2, 3))}, {"w": np.ones((2, 3))}, "mine")["w"].dtype == jnp.float32
