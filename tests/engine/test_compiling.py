"""The engine's programs: XLA's options for them, and how few of them there are."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.monitoring
import numpy as np
import pytest

from fedjax_async import Settings, models
from fedjax_async.config import prepare, problem
from fedjax_async.engine import compiling, peer_programs, programs, run_waves
from fedjax_async.server import fedasync, fedbuff
from tests.engine.problem import carrying, case, changed, client, same


def on(monkeypatch, platform, flags=""):
    client = SimpleNamespace(platform_version=f"PJRT C API\n{platform}")
    monkeypatch.setattr(compiling.jax, "devices", lambda: [SimpleNamespace(client=client)])
    monkeypatch.setenv("XLA_FLAGS", flags)


def test_xla_knows_every_option_by_name_and_accepts_its_value():
    assert jax.jit(lambda x: x + 1, compiler_options=dict(compiling.CUDA))(1) == 2


def test_a_cpu_and_other_accelerators_compile_with_jax_s_own_options_but_for_what_runs_once_on_a_cpu(monkeypatch):
    assert compiling.options() == {}
    monkeypatch.delenv("XLA_FLAGS")
    assert compiling.options(once=True) == {"xla_backend_optimization_level": 1}
    on(monkeypatch, "rocm 60000")
    assert compiling.options() == {}


def test_a_cuda_gpu_puts_loops_into_graphs_and_fixes_the_kernels_unless_xla_flags_name_the_option(monkeypatch):
    on(monkeypatch, "cuda 13000", "--xla_gpu_enable_triton_gemm_int4=true")  # another option, of a longer name
    found = compiling.options()
    assert found == compiling.CUDA and compiling.options(once=True) == {}
    assert {"WHILE", "CONDITIONAL", "CUBLASLT"} <= set(found["xla_gpu_enable_command_buffer"].split(","))
    assert (found["xla_gpu_graph_min_graph_size"], found["xla_gpu_autotune_level"]) == (1, 0)
    on(monkeypatch, "cuda 13000", "--xla_gpu_enable_command_buffer= --xla_force_host_platform_device_count=2")
    assert set(compiling.CUDA) - set(compiling.options()) == {"xla_gpu_enable_command_buffer"}


def test_parameters_are_the_same_to_the_last_bit_however_far_their_program_is_optimised():
    model = models.make("logistic", num_classes=10, input_shape=(28, 28, 1))
    found = [
        jax.jit(model.init, compiler_options={"xla_backend_optimization_level": level})(jax.random.key(0))
        for level in (compiling.ONCE_ON_A_CPU["xla_backend_optimization_level"], 3)  # 3 is XLA's default
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("given", [{"method": "fedavg"}, {"method": "pushcen"}, {"method": "asgd", "policy": "oort"}])
def test_runs_start_with_a_program_of_such_options(given, monkeypatch):
    """The other tests have XLA_FLAGS that name the level, and so no options."""
    monkeypatch.delenv("XLA_FLAGS")
    problem.initial.cache_clear()
    timing = "every:concurrency=3" if "policy" in given else None
    params = prepare(Settings(model="logistic", clients=20, **given, updates=20, timing=timing)).params
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    problem.initial.cache_clear()


@pytest.mark.parametrize(("module", "at_least"), [(programs, 7), (peer_programs, 4)], ids=["server", "nodes"])
def test_every_program_of_the_engine_is_compiled_with_the_options(module, at_least):
    calls = [node.func for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call)]
    assert not any(isinstance(f, ast.Attribute) and f.attr == "jit" for f in calls)
    assert sum(isinstance(f, ast.Name) and f.id == "jitted" for f in calls) >= at_least


@pytest.fixture
def compilations(monkeypatch):
    """Names of the programs that JAX reports as compiled since the start of the test."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(details.get("fun_name", event)))

    monkeypatch.setattr(programs, "MOST_MAPS", 10**6)  # else the run may begin by forgetting all programs
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow_cases("fedbuff-buffer:size=3-lognormal:sigma=1-vmap")
@pytest.mark.parametrize(
    ("rule", "timing", "delay", "batching"),
    [(fedasync, "every", "exponential", "loop"), (fedbuff, "buffer:size=3", "lognormal:sigma=1", "vmap")],
)
def test_few_programs_and_none_for_a_second_run(compilations, rule, timing, delay, batching):
    given = case(rule(), timing, delay, updates=60, sizes=tuple(range(1, 41, 2)))
    given = changed(given, client=carrying.__wrapped__(client()))  # which no other test has
    jax.block_until_ready(given.params)
    compilations.clear()
    out = run_waves(*given, batching=batching)
    assert 0 < len(compilations) <= 12, compilations
    assert out.counters["programs"] <= (12 if batching == "vmap" else 5)
    compilations.clear()
    again = run_waves(*given, batching=batching)
    assert compilations == []
    same(out.params, again.params)
