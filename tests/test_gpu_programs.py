"""The benchmarks for a new device: what a GPU would execute, by a stored listing, and the queue of measurements."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.base import tree
from tests.experiment import EXPERIMENTS, module

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


def counted(module=MODULE):
    of_sequence = listing.thunks_of(SEQUENCE), listing.loops_of(module), listing.names_of(METADATA)
    return listing.count(*of_sequence, lambda name, times: {"arrivals": 5.0}[name], calls=2)


def test_launches_answers_and_graphs_of_a_stored_listing():
    """Two calls: 2 x 2 launches outside; 5 passes of 2 (the longer branch) + 1, and of 3 passes of 1, plus tests."""
    total, rows = counted()
    inner = 5 * 3 * 1 + (5 * 3 + 5) * 1  # its body and, in a graph, its condition
    assert total == (2 * 2 + 5 * (2 + 1) + (5 + 2) + inner, 5 + inner, 5, 5 + (5 + 2))
    assert [(row.loop, row.depth, row.passes) for row in rows] == [
        ("arrivals", 0, 5), ("jit(f)/loop:arrivals/while/body/while", 1, 15),
    ]  # fmt: skip
    # a loop of unknown length must have a name
    with pytest.raises(ValueError, match=r"without a name, at 'jit\(f\)/loop:arrivals/while/body/while'"):
        counted(MODULE.replace(LENGTH, ""))


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


# --- the kit for a new device -------------------------------------------------------------------------


@pytest.fixture
def kit(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "benchmarks"))
    import accelerator

    yield accelerator
    for name in ("accelerator", "accelerator_parts", "accelerator_queue", "common", "conv", "population", "throughput"):
        if name not in before:
            sys.modules.pop(name, None)


def test_time_is_split_by_what_runs(kit):
    """Two threads train at once and the server overlaps with them; events without a program count as host time."""
    import accelerator_parts as parts

    def event(module, begin, duration):
        return {"ph": "X", "ts": begin, "dur": duration, "args": {"hlo_module": module} if module else {}}

    events = [event("jit_train", 0, 30), event("jit_train", 10, 30), event("jit_train", 12, 5)]
    events += [event("jit_receive", 35, 15), event("jit_evaluate", 60, 10), event("", 0, 100), {"ph": "M"}]
    assert parts.covered([]) == 0
    found = parts.shares(events, wall=100.0)
    assert list(found.values()) == pytest.approx([40, 10, 10, 40])
    rng = np.random.default_rng(0)
    spans = [(low, low + length) for low, length in rng.integers(0, 50, (30, 2)).tolist()]
    assert parts.covered(spans) == len({t for low, high in spans for t in range(low, high)})


class Made:
    """A process of the queue that prints ``Made.prints`` of its measurement."""

    prints: dict

    def __init__(self, one, smoke):
        self.measurement, self.lines = one, ["ready", *Made.prints[one.name]]

    def line(self, until):
        return self.lines.pop(0)

    def why(self):
        return "ValueError: width = 0"

    def go(self):
        pass

    stop = go


@pytest.fixture
def queue(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "Process", Made)

    def run(prints, minutes=1.0):
        """Exit code, rows and page of a queue whose measurements are made up: {name: what its process prints}."""
        Made.prints, results = prints, kit.Results(tmp_path, "a card", "0123")
        code = kit.run(
            [kit.Measurement(name, 30.0, None) for name in prints], results, minutes, smoke=False, together=2
        )
        rows = (tmp_path / "queue.csv").read_text().splitlines()[1:]
        return code, rows, (tmp_path / "queue.md").read_text()

    return run


def printed(value, **more):
    return [json.dumps([{"quantity": "updates / s", "value": value} | more])]


def test_what_is_measured_is_kept_by_card_and_sources(kit, queue, tmp_path):
    code, rows, page = queue({"a": printed(1.5), "b": printed(2.0, least=1.0, most=3.0)})
    assert code == 0 and len(rows) == 2 and "1.5" in page
    assert rows[1].startswith("b,updates / s,2.0,1.0,3.0,a card,0123,")
    assert kit.known(tmp_path, "a card", "0123") == {"a", "b"}
    assert not kit.known(tmp_path, "another", "0123") | kit.known(tmp_path, "a card", "4567") | kit.known(None, "", "")
    assert queue({"c": printed(2.0, ok=False)})[0] == 1
    assert kit.known(tmp_path, "a card", "0123") == {"a", "b"}, "what disagrees is measured again"
    assert queue({"c": printed(2.0, ok=True)})[0] == 0
    assert kit.known(tmp_path, "a card", "0123") == {"a", "b", "c"}
    every = kit.measurements()
    assert len({one.name for one in every}) == len(every) and max(one.seconds for one in every) <= kit.LONGEST


def test_smallest_sizes_are_no_measurements_of_the_card(kit, monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(kit, "run", lambda chosen, results, *_: folders.append(results._same["sources"]) or 0)
    for more in ([], ["--smoke"]):
        monkeypatch.setattr(sys, "argv", ["accelerator", "--queue", "--out", str(tmp_path), *more])
        assert kit.main() == 0
    assert folders == [kit.sources(), f"{kit.sources()}-smoke"]


@pytest.mark.parametrize(
    ("prints", "minutes", "word"),
    [
        ([""], 1.0, "Failed: a: ValueError: width = 0."),  # an error while it is timed
        ([None], 1.0, "Failed: a: ended after its time."),
        (printed(1.0), 1e-9, "No time was left for: a."),
        (printed(1.0), 0.4, "No time was left for: a."),  # it would take 30 seconds
        (printed(2.0, ok=False), 1.0, "2"),  # it disagrees with the oracle
    ],
)
def test_what_failed_or_did_not_fit_is_named(queue, prints, minutes, word):
    code, _, page = queue({"a": prints}, minutes)
    assert word in page and code == ("No time" not in word)
