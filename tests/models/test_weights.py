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


def _file(folder, content):
    path = folder / "m.safetensors"
    path.write_bytes(content)
    return path


def test_what_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^extension of the file of weights = '\.h5': .*\.npz"):
        read_arrays(tmp_path / "w.h5")
    with pytest.raises(ValueError, match=r"^weights = '.*w\.npz': must be a file, but there is none$"):
        read_arrays(tmp_path / "w.npz")
    with pytest.raises(ValueError, match=r"^extension of the file of weights = '\.pt'"):
        write_arrays(tmp_path / "w.pt", ARRAYS)
    with pytest.raises(ValueError, match=r"^array x = 'complex64': must be F64, "):
        write_arrays(tmp_path / "w.safetensors", {"x": np.zeros(2, np.complex64)})
    (tmp_path / "objects.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"^objects\.npz = a damaged file: must be an \.npz archive"):
        read_arrays(tmp_path / "objects.npz")
    deep = b"[" * 100_000
    with pytest.raises(ValueError, match=r"^m\.safetensors = a header of 100000 bytes: must be JSON"):
        models.read_safetensors(_file(tmp_path, len(deep).to_bytes(8, "little") + deep))
    like = {"w": jnp.zeros((2, 3))}
    for arrays, found in (({"w": np.zeros(6)}, r"\(6,\): must be \(2, 3\)"), ({}, "'none': must be ")):
        with pytest.raises(ValueError, match=rf"^shape of w in mine = {found}"):
            filled(like, arrays, "mine")
    assert filled(like, {"w": np.ones((2, 3))}, "mine")["w"].dtype == jnp.float32
