"""Input checks: accepted values, refused values, and the messages."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.base import check

NAN, INF = float("nan"), float("inf")
POSITIVE, NON_NEGATIVE = "a finite number > 0", "a finite number >= 0"
UNIT, BELOW = "between 0.0 and 1.0", "at least 0 and below 1"


def unit(field, value):
    check.in_range(field, value, 0.0, 1.0)


@pytest.mark.parametrize(
    ("function", "good", "bad", "allowed"),
    [
        (
            check.positive,
            [1, 0.5, 1e-300, np.float32(2), np.int64(3)],
            [0, -1, INF, np.int64(0)],
            POSITIVE,
        ),
        (check.non_negative, [0, 0.0, 3, np.float64(1)], [-1e-9, INF, np.float32(-1), -5], NON_NEGATIVE),
        (unit, [0, 1, 0.5, np.float32(1)], [1.0001, -0.1, INF, np.float32(2)], UNIT),
        (check.below_one, [0, 0.999, Fraction(1, 2)], [1, 1.0, -0.1, INF, np.float64(1)], BELOW),
    ],
)
def test_numbers(function, good, bad, allowed):
    for value in [*good, jnp.ones(3), lambda count: 0.1]:
        function("lr", value)
    for value in [*bad, NAN, -INF, "0.5", "fast", None, True, np.float32("nan"), [0.5], {}, 1j, np.bool_(True)]:
        with pytest.raises(ValueError) as error:
            function("lr", value)
        assert str(error.value) == f"lr = {value!r}: must be {allowed}"


@pytest.mark.parametrize("function", [check.positive, check.non_negative, unit, check.below_one])
def test_tracers_pass(function):
    def traced(value):
        function("lr", value)
        return value

    assert jax.jit(traced)(-5.0) == -5.0


def test_whole_numbers():
    for value in (1, 7, 10**12, np.int32(3)):
        check.whole("clients", value)
    check.whole("seed", 0, low=0)
    check.whole("seed", 5, low=0, high=5)
    for value in (0, -1, 1.5, 4.0, "3", None, True, NAN, INF, [3], np.array([1, 2])):
        with pytest.raises(ValueError, match=r"^clients = .*: must be a whole number >= 1$"):
            check.whole("clients", value)
    with pytest.raises(ValueError, match=r"^seed = 6: must be a whole number from 0 to 5$"):
        check.whole("seed", 6, low=0, high=5)


def test_choices():
    check.one_of("weighting", "uniform", ("uniform", "examples"))
    with pytest.raises(ValueError, match=r"^weighting = 'size': must be one of uniform, examples$"):
        check.one_of("weighting", "size", (name for name in ("uniform", "examples")))
    with pytest.raises(ValueError, match=r"^weighting = array"):
        check.one_of("weighting", np.array([1, 2]), ["uniform"])


def test_require():
    check.require(True, "x", 1, "anything")
    with pytest.raises(ValueError, match=r"^x = \[1\]: must be empty$"):
        check.require(False, "x", [1], "empty")


def test_a_message_has_no_memory_addresses():
    assert check.shown(object()) == "<object object>"
    assert " at 0x" not in check.shown(lambda: None)
