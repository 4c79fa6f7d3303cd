"""Out-of-memory errors of device or host name settings that need less; all other errors are unchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_async.engine import devices


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nmore"), "device memory: exhausted (RESOURCE_"),
        (MemoryError("Unable to allocate 7 TiB"), "memory: exhausted (Unable to allocate 7 TiB); fewer updates"),
        (MemoryError(), "memory: exhausted (no reason given); fewer updates"),
    ],
)
def test_what_lowers_the_need_is_said_once(error, says):
    with pytest.raises(MemoryError) as raised, devices.naming_remedies(), devices.naming_remedies():
        raise error
    said = str(raised.value)
    assert said.startswith(says) and said.count("max_width") == 1 and "\n" not in said


def test_other_errors_of_the_device_are_not_renamed():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), devices.naming_remedies():
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")


def test_a_model_fits_if_four_copies_do(monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: 1600)
    devices.require_fits("mlp", jax.ShapeDtypeStruct((100,), jnp.float32))
    with pytest.raises(ValueError, match=r"^model = 'mlp': must be of at most a quarter"):
        devices.require_fits("mlp", jax.ShapeDtypeStruct((101,), jnp.float32))
