"""Input checks: accepted values, refused values, and the messages."""

from __future__ import annotations

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.base import check
from tests.told import refusal

NAN, INF = float("nan"), float("inf")


def unit(field, value):
    check.in_range(field, value, 0.0, 1.0)


@pytest.mark.parametrize(("function", "good", "bad", "allowed"), [
    (check.positive, [1, 0.5, 1e-300, np.float32(2), np.int64(3)], [0, -1, INF, np.int64(0)], "a finite number > 0"),
    (check.non_negative, [0, 0.0, 3, np.float64(1)], [-1e-9, INF, np.float32(-1), -5], "a finite number >= 0"),
    (unit, [0, 1, 0.5, np.float32(1)], [1.0001, -0.1, INF, np.float32(2)], "between 0.0 and 1.0"),
    (check.below_one, [0, 0.999, Fraction(1, 2)], [1, 1.0, -0.1, INF, np.float64(1)], "at least 0 and below 1"),
])  # fmt: skip
def test_numbers(function, good, bad, allowed):
    for value in [*good, jnp.ones(3), lambda count: 0.1]:
        function("lr", value)
    jax.jit(lambda value: function("lr", value))(-5.0)  # tracers pass
    for value in [*bad, NAN, -INF, "0.5", "fast", None, True, np.float32("nan"), [0.5], {}, 1j, np.bool_(True)]:
        assert refusal(function, "lr", value) == f"lr = {value!r}: must be {allowed}"


def test_whole_numbers():
    for value in (1, 7, 10**12, np.int32(3)):
        check.whole("clients", value)
    check.whole("seed", 0, low=0)
    check.whole("seed", 5, low=0, high=5)
    for value in (0, -1, 1.5, 4.0, "3", None, True, NAN, INF, [3], np.array([1, 2])):
        assert re.search("^clients = .*: must be a whole number >= 1$", refusal(check.whole, "clients", value))
    assert refusal(check.whole, "seed", 6, low=0, high=5) == "seed = 6: must be a whole number from 0 to 5"


def test_choices_and_requirements():
    check.one_of("weighting", "uniform", ("uniform", "examples"))
    check.require(True, "x", 1, "anything")
    names = (name for name in ("uniform", "examples"))
    assert refusal(check.one_of, "weighting", "size", names) == "weighting = 'size': must be one of uniform, examples"
    assert refusal(check.one_of, "weighting", np.array([1, 2]), ["uniform"]).startswith("weighting = array")
    assert refusal(check.require, False, "x", [1], "empty") == "x = [1]: must be empty"


def test_a_message_has_no_memory_addresses():
    assert check.shown(object()) == "<object object>"
    assert " at 0x" not in check.shown(lambda: None)
