"""Large models: batches and copies that fit the memory, half-precision slots, rematerialisation, data on disk."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from fedjax_async import Settings, named
from fedjax_async.clock import Until, plan
from fedjax_async.config import execute, prepare
from fedjax_async.data import open_folder, write_folder
from fedjax_async.engine import default_width, devices, programs, run_waves
from fedjax_async.engine.devices import parse_size
from fedjax_async.models import MODELS, cross_entropy, rematerialised
from fedjax_async.types import Model, Request, Schedule
from tests.engine.problem import case, changed, close, data, stack_of

BASE = Settings(dataset="synthetic", model="logistic", clients=20, method="fedbuff", delay="exponential",
                steps=3, updates=40, eval_updates=20)  # fmt: skip


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


def test_a_limit_that_one_job_exceeds_is_refused_with_the_number():
    with pytest.raises(ValueError, match=r"memory_limit = 1000: must be at least \d{7,} bytes"):
        run(memory_limit="1KB")


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "4 parsecs", "0", "1e3e3"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="memory_limit = "):
        parse_size("memory_limit", text)


@pytest.mark.slow
def test_half_precision_slots_round_the_start_models_only():
    full, half = (run(batching="vmap", slots=slots) for slots in ("full", "bfloat16"))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(full.params), jax.tree.leaves(half.params)))
    assert 0 < gap < 0.02
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(half.params))
    np.testing.assert_array_equal(full.updates["client"], half.updates["client"])


def test_half_precision_slots_take_half_the_memory():
    e = prepare(dataclasses.replace(BASE, slots="bfloat16"))
    message = jax.eval_shape(lambda p: e.components.rule(e.components.hyper).dispatch(
        *e.components.rule(e.components.hyper).init(p), Request())[0], e.params)  # fmt: skip
    assert {leaf.dtype for leaf in jax.tree.leaves(message.params)} == {jnp.dtype(jnp.bfloat16)}


def test_the_engine_with_half_precision_slots_equals_the_oracle():
    want = run(method="fedasync", slots="bfloat16", engine="reference")
    close(run(method="fedasync", slots="bfloat16", batching="loop").params, want.params, 1e-5)


def test_half_precision_slots_are_for_models_in_full_precision():
    def init(key):
        return {"w": jnp.zeros((60, 10), jnp.bfloat16), "b": jnp.zeros((1, 10))}

    half = Model(init, lambda params, x, key=None: x @ params["w"].astype(x.dtype) + params["b"], cross_entropy)
    with pytest.raises(ValueError, match="slots = 'bfloat16': must be full: the model has parameters in bfloat16"):
        prepare(dataclasses.replace(BASE, model=named("half", half), slots="bfloat16"))


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
    assert np.isfinite(run(**many, clients=1_000_000, batch_size=8, lanes=1).evaluations["loss"]).all()


@pytest.mark.float64
def test_a_schedule_made_by_hand_has_no_corrupt_jobs():
    made = plan("every", "constant", num_clients=5, local_steps=1, until=Until(updates=4))
    fields = made._asdict()
    by_hand = Schedule(**{k: fields[k] for k in list(fields)[:12]})
    given = case("fedasync")
    points = given.points._replace(position=np.array([0, 4]), time=np.array([0.0, 1.0]))
    out = run_waves(*given._replace(schedule=by_hand, points=points))
    assert out.records["accepted"].all()


def test_programs_are_forgotten_before_there_are_too_many(monkeypatch):
    """XLA ends the process if Linux allows it no further memory maps."""
    forgotten = []
    monkeypatch.setattr(jax, "clear_caches", lambda: forgotten.append(True))
    monkeypatch.setattr(programs, "MOST_MAPS", 10**6)
    programs.shed()
    assert not forgotten
    monkeypatch.setattr(programs, "MOST_MAPS", 10)
    programs.shed()
    assert forgotten


@pytest.mark.parametrize(("limit", "width"), [(None, 256), (2**32, 128), (2**40, 1024)])
def test_on_an_accelerator_the_default_width_follows_from_its_memory(monkeypatch, limit, width):
    class Device:
        def memory_stats(self):
            return None if limit is None else {"bytes_limit": limit}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert default_width({"w": np.zeros(2**18, np.float32)}) == width  # 1 MiB of parameters; a job needs 8 times that


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
