"""The data sets that need no network, and their decoded inputs."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.data import decode, digits, fashion_mnist_6k
from fedjax_async.data.embedded import FILE, first_of_each_class, read_digits, write_fashion_mnist_6k


def test_the_embedded_set_is_the_one_that_was_verified():
    """It was taken from files with the published hashes of Fashion-MNIST."""
    data = fashion_mnist_6k()
    assert (data.x.shape, data.test_x.shape) == ((5000, 28, 28), (1000, 28, 28))
    assert (data.x.dtype, data.y.dtype) == (np.uint8, np.int32)
    digest = hashlib.sha256(data.x.tobytes() + data.y.tobytes() + data.test_x.tobytes() + data.test_y.tobytes())
    assert digest.hexdigest() == "e5322c7ba3d21de688f8d850228e3dc922deca406b7c780713bdb25f91d20bed"
    with np.load(FILE, allow_pickle=False) as file:
        assert "MIT License" in str(file["licence"])
    assert FILE.stat().st_size < 2_700_000


def test_the_embedded_file_is_written_the_same_twice(tmp_path):
    data = fashion_mnist_6k()
    for name in ("a.npz", "b.npz"):
        write_fashion_mnist_6k(data, tmp_path / name)  # 500 and 100 a class is all there is: the same set
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with np.load(tmp_path / "a.npz") as file:
        np.testing.assert_array_equal(file["x"], data.x)
        np.testing.assert_array_equal(file["test_y"], data.test_y)


def test_first_of_each_class():
    labels = np.array([2, 0, 2, 2, 0, 1, 1, 1, 0])
    assert first_of_each_class(labels, 2).tolist() == [0, 1, 2, 4, 5, 6]


def test_digits_from_a_file(tmp_path):
    rows = np.arange(10 * 65).reshape(10, 65) % 17
    rows[:, 64] = np.arange(10)
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))
    data = read_digits(path)
    assert data.test_y.tolist() == [4, 9]
    assert data.y.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    np.testing.assert_array_equal(data.x[4], rows[5, :64].reshape(8, 8))


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="scikit-learn = not installed: needed for dataset = 'digits'"):
        digits()


@pytest.mark.parametrize(
    ("function", "shape", "mean", "std"),
    [
        (decode.mnist, (4, 28, 28), 0.1307, 0.3081),
        (decode.fashion_mnist, (4, 28, 28), 0.2860, 0.3530),
        (decode.cifar10, (4, 32, 32, 3), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        (decode.unit_images, (4, 5, 6), 0.0, 1.0),
        (decode.unit_images, (4, 5, 6, 3), 0.0, 1.0),
        (decode.digits, (2, 8, 8), 0.3058 * 16 / 255, 0.3764 * 16 / 255),
    ],
)
def test_image_decoders_against_numpy(function, shape, mean, std):
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    expected = ((x if x.ndim == 4 else x[..., None]) / 255.0 - np.array(mean)) / np.array(std)
    (out,) = jax.jit(jax.vmap(function))(jnp.asarray(x)[None])
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_decoders_are_the_same_object_every_time():
    """Otherwise every load would compile all programs again."""
    assert fashion_mnist_6k().decode is fashion_mnist_6k().decode
    assert hash(decode.mnist) == hash(decode.mnist)
