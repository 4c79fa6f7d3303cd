"""Large models: batches and copies that fit the memory, half-precision slots, rematerialisation, data on disk."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from fedjax_async import Settings, named
from fedjax_async.config import execute, prepare
from fedjax_async.data import open_folder, write_folder
from fedjax_async.engine import default_width, devices, programs, run_waves
from fedjax_async.models import MODELS, cross_entropy, rematerialised
from fedjax_async.types import Model, Request
from tests.engine.problem import case, changed, close, data, stack_of
from tests.refusals import refusals

BASE = Settings(dataset="synthetic", model="logistic", clients=20, method="fedbuff", delay="exponential",
                steps=3, updates=40, eval_updates=20)  # fmt: skip


FAILED = jax.errors.JaxRuntimeError
HALF = {"slots": "bfloat16"}


@functools.cache
def run(**changes):
    return execute(prepare(dataclasses.replace(BASE, **changes)))


def stacked(**changes):
    e = prepare(dataclasses.replace(BASE, **changes))
    given = e.components, e.schedule, e.params, e.key, e.points
    return stack_of(given, max_width=e.settings.max_width, batching=e.settings.batching, lanes=1)


def test_a_memory_limit_shortens_batches_and_changes_nothing_else():
    options = {"batching": "loop", "max_width": 8}
    whole = run(**options, lanes=1)
    tight = run(**options, lanes=1, memory_limit=str(stacked(**options).num_bytes - 1))
    assert max(tight.counters["widths"]) < max(whole.counters["widths"])
    assert tight.counters["batches"] > whole.counters["batches"]
    close(tight.params, whole.params, 1e-5)


def test_half_precision_slots_round_the_start_models_only_and_equal_the_oracle():
    given = {"method": "fedasync", "batching": "loop"}
    full, half, want = (
        run(**given | how) for how in ({}, HALF, HALF | {"engine": "reference", "batching": BASE.batching})
    )
    close(half.params, want.params, 1e-5)
    gaps = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (full.params, half.params)), strict=True)]
    assert 0 < max(gaps) < 0.02
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(half.params))
    e = prepare(dataclasses.replace(BASE, **HALF))
    rule = e.components.rule(e.components.hyper)
    message = jax.eval_shape(lambda p: rule.dispatch(*rule.init(p), Request())[0], e.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(message.params)} == {jnp.dtype(jnp.bfloat16)}


def half_model():
    def init(key):
        return {"w": jnp.zeros((60, 10), jnp.bfloat16), "b": jnp.zeros((1, 10))}

    return named("half", Model(init, lambda p, x, key=None: x @ p["w"].astype(x.dtype) + p["b"], cross_entropy))


SIZES = ["", "GB", "-1GB", "4 parsecs", "0", "1e3e3"]
test_memory_that_cannot_be_kept_to_is_refused = refusals(
    (lambda: run(memory_limit="1KB"), r"memory_limit = 1000: must be at least \d{7,} bytes"),
    *((lambda text=text: devices.parse_size("memory_limit", text), "memory_limit = ") for text in SIZES),
    (
        lambda: prepare(dataclasses.replace(BASE, model=half_model(), **HALF)),
        "slots = 'bfloat16': must be full: the model has parameters in bfloat16",
    ),
    (lambda: devices.make_mesh(1000), "devices = 1000"),
)


def test_rematerialisation_keeps_less_for_the_backward_pass(capsys):
    """Counts what JAX saves. XLA on a CPU merges the recomputation with the forward pass; accelerators do not."""
    shape = (28, 28, 1)
    model = MODELS["cnn"](input_shape=shape, num_classes=10)
    shapes, x = jax.eval_shape(model.init, jax.random.key(0)), jnp.ones((8, *shape))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    def kept(one):
        print_saved_residuals(lambda p: jnp.sum(one.apply(p, x)), params)
        shapes = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
        sizes = [np.prod([int(n) for n in text[text.index("[") + 1 : -1].split(",") if n]) for text in shapes]
        return sum(sizes)

    assert kept(rematerialised(model)) < 0.6 * kept(model)


@pytest.mark.float64
def test_streamed_data_equal_data_in_memory(tmp_path):
    given = case("fedbuff", "buffer:size=2")
    on_disk = open_folder(write_folder(tmp_path / "clients", data()), decode=data().decode)
    assert on_disk.streamed
    have = run_waves(*changed(given, data=on_disk), max_width=3)
    close(have.params, run_waves(*given).params, 1e-12)


def test_nothing_on_the_device_grows_with_the_population():
    """With ten clients in flight, the tables for a thousand and for a million clients have the same size."""
    many = {"dataset": "population:features=16", "model": "logistic", "method": "fedasync@every:concurrency=10"}
    few, more = (stacked(**many, clients=clients, batch_size=8).num_bytes for clients in (1000, 1_000_000))
    assert few == more
    found = run(**many, clients=1_000_000, batch_size=8, lanes=1, updates=20)
    assert np.isfinite(found.evaluations["loss"]).all()


def test_programs_are_forgotten_before_there_are_too_many(monkeypatch):
    """XLA ends the process if Linux allows it no further memory maps."""
    forgotten = []
    monkeypatch.setattr(jax, "clear_caches", lambda: forgotten.append(most))
    for most in (10**6, 10):
        monkeypatch.setattr(programs, "MOST_MAPS", most)
        programs.shed()
    assert forgotten == [10]


@pytest.mark.parametrize(("limit", "width"), [(None, 256), (2**32, 128), (2**40, 1024)])
def test_on_an_accelerator_the_default_width_follows_from_its_memory(monkeypatch, limit, width):
    stats = None if limit is None else {"bytes_limit": limit}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert default_width({"w": np.zeros(2**18, np.float32)}) == width  # 1 MiB of parameters; a job needs 8 times that


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (FAILED("RESOURCE_EXHAUSTED: Out of memory.\nmore"), MemoryError, "device memory: exhausted (RESOURCE_"),
        (MemoryError("Unable to allocate 7 TiB"), MemoryError, "memory: exhausted (Unable to allocate 7 TiB); fewer"),
        (MemoryError(), MemoryError, "memory: exhausted (no reason given); fewer updates"),
        (FAILED("INTERNAL: broken"), FAILED, "INTERNAL: broken"),
    ],
)
def test_what_lowers_the_need_of_memory_is_said_once(error, kind, says):
    with pytest.raises(kind) as raised, devices.naming_remedies(), devices.naming_remedies():
        raise error
    said = str(raised.value)
    assert said.startswith(says) and said.count("max_width") == (kind is MemoryError) and "\n" not in said


def test_a_model_fits_if_four_copies_do(monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: 1600)
    devices.require_fits("mlp", jax.ShapeDtypeStruct((100,), jnp.float32))
    with pytest.raises(ValueError, match=r"^model = 'mlp': must be of at most a quarter"):
        devices.require_fits("mlp", jax.ShapeDtypeStruct((101,), jnp.float32))
