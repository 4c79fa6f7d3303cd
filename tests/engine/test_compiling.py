"""XLA's options for the engine's programs on a CUDA GPU."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from fedjax_async.engine import compiling, peer_programs, programs


def device_of(platform_version):
    return SimpleNamespace(client=SimpleNamespace(platform_version=platform_version))


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(compiling.jax, "devices", lambda: [device_of("PJRT C API\ncuda 13000")])
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_xla_knows_every_option_by_name_and_accepts_its_value():
    assert jax.jit(lambda x: x + 1, compiler_options=dict(compiling.CUDA))(1) == 2


def test_a_cpu_and_other_accelerators_compile_with_jax_s_own_options(monkeypatch):
    assert compiling.options() == {}
    monkeypatch.setattr(compiling.jax, "devices", lambda: [device_of("rocm 60000")])
    assert compiling.options() == {}


@pytest.mark.usefixtures("on_cuda")
def test_a_cuda_gpu_puts_loops_into_graphs_and_fixes_the_kernels():
    found = compiling.options()
    assert {"WHILE", "CONDITIONAL", "CUBLASLT"} <= set(found["xla_gpu_enable_command_buffer"].split(","))
    assert (found["xla_gpu_graph_min_graph_size"], found["xla_gpu_autotune_level"]) == (1, 0)


@pytest.mark.usefixtures("on_cuda")
def test_an_option_that_xla_flags_names_is_left_to_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_force_host_platform_device_count=2")
    assert set(compiling.CUDA) - set(compiling.options()) == {"xla_gpu_enable_command_buffer"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm_int4=true")  # another option, of a longer name
    assert compiling.options() == compiling.CUDA


@pytest.mark.parametrize("module", [programs, peer_programs], ids=["server", "nodes"])
def test_every_program_of_the_engine_is_compiled_with_the_options(module):
    calls = [node.func for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call)]
    assert not any(isinstance(f, ast.Attribute) and f.attr == "jit" for f in calls)
    assert sum(isinstance(f, ast.Name) and f.id == "jitted" for f in calls) >= 7
