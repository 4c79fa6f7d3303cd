"""The benchmark that counts what a GPU would execute: its reader, on a stored listing, and the names of loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_async.base import tree
from tests.experiment import module

listing, programs = (module("benchmarks", name) for name in ("gpu_listing", "gpu_programs"))

# A loop of unknown length with a branch and, in a graph, a loop of three passes; the columns are XLA's, shortened.
SEQUENCE = """\
001: kCopy  [source | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink ]
condition:
    003: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
  body:
    004: kConditional [source | next=007 (1)]
      false_branch:
        005: kCopy [source | sink] kCopy
      true_branch:
        006: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
        007: kGemm [prev=006 (1) | sink] cublas
    008: kCommandBuffer [prev=004 (1) | sink]
        009: kCustomKernel [source | next=010 (1)] loop_select_fusion grid: [1, 1, 1]
        010: kWhile [prev=009 (1) | sink ]
condition:
            011: kCustomKernel [source | sink] wrapped_compare.1 grid: [1, 1, 1]
          body:
            012: kCustomKernel [source | sink] loop_add_fusion.1 grid: [1, 1, 1]
013: kCustomKernel [prev=002 (1) | sink] loop_add_fusion.2 grid: [1, 1, 1]
"""
METADATA = 'thunk_info {\n  profile_annotation: "while.9"\n  thunk_id: 2\n}\n'
METADATA += 'thunk_info {\n  profile_annotation: "while.1"\n  thunk_id: 10\n}\n'
LOOP = '  %{} = (s32[]) while(%tuple), condition=%c, body=%b, metadata={{op_name="jit(f)/{}/while"}}{}\n'
LENGTH = ', backend_config={"known_trip_count":{"n":"3"}}'
MODULE = LOOP.format("while.9", "vmap(loop:arrivals)", "") + LOOP.format("while.1", "loop:arrivals/while/body", LENGTH)


def counted(module=MODULE, passes=lambda name, times: {"arrivals": 5.0}[name]):
    return listing.count(
        listing.thunks_of(SEQUENCE), listing.loops_of(module), listing.names_of(METADATA), passes, calls=2
    )


def test_launches_answers_and_graphs_of_a_stored_listing():
    """Two calls: 2 x 2 launches outside; 5 passes of 2 (the longer branch) + 1, and of 3 passes of 1, plus tests."""
    total, rows = counted()
    inner = 5 * 3 * 1 + (5 * 3 + 5) * 1  # its body and, in a graph, its condition
    assert total == (2 * 2 + 5 * (2 + 1) + (5 + 2) + inner, 5 + inner, 5, 5 + (5 + 2))
    assert [(row.loop, row.depth, row.passes) for row in rows] == [
        ("arrivals", 0, 5), ("jit(f)/loop:arrivals/while/body/while", 1, 15),
    ]  # fmt: skip


def test_a_loop_of_unknown_length_must_have_a_name():
    nameless = MODULE.replace(LENGTH, "")
    with pytest.raises(ValueError, match=r"without a name, at 'jit\(f\)/loop:arrivals/while/body/while'"):
        counted(nameless)


BODY = """\
%b (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %arg = (s32[], f32[4,8]{1,0}) parameter(0)
  %fusion = bf16[8]{0} fusion(%arg#1), kind=kInput, calls=%fused
  %product = (f32[4,4]{1,0}, s8[33554432]{0}) custom-call(%arg#1, %arg#1), custom_call_target="__cublas$gemm"
  %view = f32[16]{0} bitcast(%product#0)
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%arg#0, %arg#1)
}

"""


def test_the_traffic_of_a_pass_is_what_its_kernels_read_and_write():
    """Without the workspace of cuBLAS, and without what moves nothing."""
    assert listing.traffic_of(BODY + MODULE) == (4 * 32 + 2 * 8) + (2 * 4 * 32 + 4 * 16)
    assert listing.traffic_of("ENTRY %main (x: f32[]) -> f32[] {\n}\n") == 0


@pytest.fixture
def calls_in_locations():
    """Locations of operations as outside of the tests."""
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    yield
    jax.config.update("jax_include_full_tracebacks_in_locations", False)


@pytest.mark.usefixtures("calls_in_locations")
def test_a_loop_is_named_in_the_program():
    def summed(last):
        return tree.loop("arrivals", 0, last, lambda k, total: total + k, jnp.int32(0))

    lowered = jax.jit(jax.vmap(summed)).lower(jnp.arange(3, dtype=jnp.int32))
    places = [line for line in lowered.as_text(debug_info=True).splitlines() if "loop:arrivals" in line]
    assert any("while" in place for place in places)


@pytest.mark.filterwarnings("ignore::fedjax_async.base.notices.RunWarning")  # a run without results
def test_every_pass_follows_from_the_arguments_of_a_call():
    with programs.as_on_a_gpu():
        notes = programs.noted_run({"method": "fedbuff@buffer:size=3", "clients": 6, "updates": 12, "examples": 8})
    found = {}
    for key, (program, _) in notes.programs.items():
        for loop, passes in notes.passes[key].items():
            name = program.function.__name__, loop
            found[name] = found.get(name, 0) + passes
    assert found["receive", "arrivals"] == 12
    assert found["train", "local steps"] == 10 * found["train", "finish"] / 2 > 0
