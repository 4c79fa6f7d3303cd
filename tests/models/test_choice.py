"""The choice of a lowering: the table that comes with the package, and measuring once."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.models import LOWERINGS, Conv, ConvPool, choice, default_lowering
from fedjax_async.models.choice import ConvShape, MeasuredShape, candidates, distance, fastest
from fedjax_async.notices import RunWarning

SHAPE = ConvShape((3, 3), (1, 1), (5, 5), (2, 3))


def test_the_table_names_lowerings_that_were_candidates():
    rows = choice.table()
    assert {row.backend for row in rows} >= {"cpu"} and len({row[:2] for row in rows}) == len(rows)
    for row in rows:
        assert row.lowering in candidates(row.shape, row.backend)
        found = default_lowering(
            (*row.shape.kernel, *row.shape.channels),
            strides=row.shape.strides,
            outputs=row.shape.outputs,
            backend=row.backend,
        )
        assert found == row.lowering


def test_the_nearest_measured_shape_decides(monkeypatch):
    near, far = SHAPE._replace(outputs=(8, 8)), SHAPE._replace(outputs=(64, 64))
    strided, other = near._replace(strides=(2, 2)), far
    rows = (
        MeasuredShape("cpu", far, "im2col"),
        MeasuredShape("cpu", near, "lax"),
        MeasuredShape("gpu", other, "winograd"),
        MeasuredShape("cpu", strided, "tiled"),
    )
    monkeypatch.setattr(choice, "table", lambda: rows)

    def chosen(size, strides=(1, 1), backend="cpu", kernel=(3, 3)):
        return default_lowering((*kernel, 2, 3), outputs=(size, size), strides=strides, backend=backend)

    assert [chosen(size) for size in (4, 16, 30, 100)] == ["lax", "lax", "im2col", "im2col"]
    assert chosen(4, strides=(2, 2)) == "tiled" and chosen(4, backend="gpu") == "winograd"
    # nothing measured: the rule
    assert chosen(4, backend="tpu") == "im2col" and chosen(4, kernel=(5, 5)) == "tiled"
    assert distance(near, near) == 0 and distance(near, far) == pytest.approx(2 * np.log(8))


def test_the_usual_lowering_stays_where_little_is_gained():
    assert fastest({"im2col": 1.0, "winograd": 0.97}, "im2col") == "im2col"
    assert fastest({"im2col": 1.0, "winograd": 0.9}, "im2col") == "winograd"
    assert fastest({"lax": 2.0, "winograd": 3.0}, "im2col") == "lax"


def test_lenet5_keeps_its_lowering():
    """Results stay bitwise as before; only the second layer of the wide LeNet has another lowering."""
    for channels, sizes in (((1, 6), (28, 24)), ((6, 16), (10, 8)), ((3, 6), (28,)), ((3, 32), (28,))):
        for size in sizes:
            assert default_lowering((5, 5, *channels), outputs=(size, size), backend="cpu") == "tiled"
    assert default_lowering((5, 5, 32, 64), outputs=(10, 10), backend="cpu") == "winograd_tiled"


def test_the_lowering_where_the_outputs_are_not_known_or_the_kernels_are_of_groups():
    assert default_lowering((5, 5, 32, 64), backend="cpu") == "tiled"
    assert default_lowering((3, 3, 32, 64), backend="cpu") == "im2col"
    assert default_lowering((5, 5, 1, 6), backend="gpu") in LOWERINGS
    assert default_lowering((5, 5, 1, 6), groups=2) == "lax"
    assert default_lowering((3, 3, 1, 6), groups=6, depthwise=True) == "taps"


def test_auto_measures_once_and_remembers(monkeypatch, tmp_path):
    """It works inside a traced function too; a second process reads the file; after damage it measures again."""
    calls = []

    def slow(shape):
        calls.append(shape)
        assert float(jnp.ones(())) == 1.0  # not traced
        return {"im2col": 1.0, "winograd": 0.5}

    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    monkeypatch.setattr(choice, "measured", slow)
    monkeypatch.setattr(choice, "_chosen", {})
    x = jnp.ones((1, 5, 5, 2))
    made = [Conv(3, lowering=name) for name in ("auto", "winograd")]
    params = made[0].init(jax.random.key(0), x)
    outs = [jax.jit(one.apply)(params, x) for one in made]
    np.testing.assert_array_equal(*outs)
    assert calls == [SHAPE]
    (path,) = (tmp_path / "lowerings").iterdir()
    assert list(json.loads(path.read_text()).values()) == ["winograd"]
    for content, count in ((path.read_text(), 1), ("{", 2), ('["x"]', 3)):
        path.write_text(content)
        monkeypatch.setattr(choice, "_chosen", {})
        jax.eval_shape(made[0].apply, params, x)
        assert len(calls) == count
    # a convolution without padding, here in ConvPool, has fewer outputs
    jax.eval_shape(lambda: ConvPool(3, 3, "VALID", lowering="auto").init(jax.random.key(0), x))
    assert calls[-1].outputs == (3, 3)


def test_a_folder_that_cannot_be_written_is_said_and_no_error(monkeypatch, tmp_path):
    (tmp_path / "lowerings").write_text("a file where the folder should be")
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    monkeypatch.setattr(choice, "measured", lambda shape: {"tiled": 1.0})
    monkeypatch.setattr(choice, "_chosen", {})
    with pytest.warns(RunWarning, match="measured lowerings are not kept"):
        assert choice.measured_lowering((3, 3, 2, 3), (1, 1), (5, 5)) == "tiled"


def test_measuring_takes_each_candidate(monkeypatch, tmp_path):
    """A real measurement while a function is traced."""
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    monkeypatch.setattr(choice, "_chosen", {})
    found = []

    def spy(times, usual):
        found.append(times)
        return fastest(times, usual)

    monkeypatch.setattr(choice, "fastest", spy)
    jax.eval_shape(lambda x: choice.measured_lowering((3, 3, 2, 3), (1, 1), (2, 2)) and x, jnp.ones(()))
    (times,) = found
    assert list(times) == candidates(SHAPE, "cpu") and all(0 < t < 60_000 for t in times.values())
    assert set(times) <= set(LOWERINGS) and "lax" not in times


def test_auto_is_an_option_of_the_models():
    choice.check_lowering("auto")
    choice.check_lowering(None)
