"""The choice of a lowering: the table that comes with the package."""

import numpy as np
import pytest

from fedjax_async.models import LOWERINGS, choice, default_lowering
from fedjax_async.models.choice import ConvShape, MeasuredShape, distance

SHAPE = ConvShape((3, 3), (1, 1), (5, 5), (2, 3))


def test_the_table_names_lowerings_that_were_candidates():
    rows = choice.table()
    assert {row.backend for row in rows} >= {"cpu"} and len({row[:2] for row in rows}) == len(rows)
    for row in rows:
        assert row.lowering in LOWERINGS
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


def test_a_lowering_is_an_option_of_the_models():
    choice.check_lowering("winograd")
    choice.check_lowering(None)
    with pytest.raises(ValueError, match="lowering = 'winogrd': unknown"):
        choice.check_lowering("winogrd")
