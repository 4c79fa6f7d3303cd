"""Local steps of a job, by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedjax_async.local import local_steps
from tests.refusals import refusals

SIZE = np.array([100, 96, 10, 1])


@pytest.mark.parametrize(("options", "expected"), [
    ({"epochs": 1}, [4, 3, 1, 1]), ({"epochs": 2}, [8, 6, 2, 2]), ({"epochs": 1.5}, [6, 5, 2, 2]),
    ({"epochs": 0.25}, [1, 1, 1, 1]), ({"epochs": 0.5}, [2, 2, 1, 1]), ({"epochs": 1e-9}, [1, 1, 1, 1]),
    ({"steps": 7}, [7, 7, 7, 7]),
])  # fmt: skip
def test_steps_by_hand(options, expected):
    found = local_steps(SIZE, batch_size=32, **options)
    assert found.tolist() == expected and found.dtype == np.int32


@given(
    size=st.lists(st.integers(1, 70_000), min_size=1, max_size=5),
    batch_size=st.integers(1, 300),
    hundredths=st.integers(1, 2000),
)
@example(size=[100, 3200], batch_size=1, hundredths=7)
@example(size=[10, 20, 100], batch_size=1, hundredths=110)
def test_steps_are_exact_for_decimal_epochs(size, batch_size, hundredths):
    """Also where binary floats are inexact: 0.07 of 100 batches are 7 steps."""
    found = local_steps(np.array(size), batch_size=batch_size, epochs=hundredths / 100)
    whole, part = divmod(Fraction(hundredths, 100), 1)
    for n, steps in zip(size, found):
        per_epoch = -(-n // batch_size)
        assert steps == whole * per_epoch + math.ceil(part * per_epoch)


test_bad_steps_are_refused = refusals(
    ({}, "^epochs = None, steps = None: give exactly one"),
    ({"epochs": 1, "steps": 1}, "^epochs = 1, steps = 1: give exactly one"),
    ({"epochs": 0}, "^epochs = 0: must be a finite number > 0"), ({"epochs": -1.0}, "^epochs = -1.0: must be"),
    ({"epochs": float("nan")}, "^epochs = nan: must be"), ({"epochs": float("inf")}, "^epochs = inf: must be"),
    ({"epochs": 1e10}, "^epochs = 10000000000.0: must be fewer than"),
    ({"epochs": "two"}, "^epochs = 'two': must be"),
    ({"steps": 0}, "^steps = 0: must be a whole number from 1 to"),
    ({"steps": 1.5}, "^steps = 1.5: must be a whole number from 1 to"),
    ({"epochs": 1, "batch_size": 0}, "^batch_size = 0: must be a whole number >= 1"),
    by=lambda options: local_steps(SIZE, **{"batch_size": 32, **options}),
)  # fmt: skip
