"""What the engine's programs become on an H100, on a machine without one: XLA compiles them for a described card.

    python experiments/benchmarks/gpu_programs.py                     # all cases, with CUDA graphs: some minutes
    python experiments/benchmarks/gpu_programs.py fedbuff sweep --loops
    python experiments/benchmarks/gpu_programs.py fedbuff --no-graphs --out counts.csv

It needs the GPU compiler, 1.4 GB but no GPU, driver or CUDA toolkit, in an environment of its own:

    python3.13 -m venv gpu
    gpu/bin/pip install 'jax==0.11.2' 'jax-cuda12-plugin==0.11.2' nvidia-cuda-nvcc-cu12 && gpu/bin/pip install -e .

A run is planned and executed as on a GPU, but each program gives zeros in place of results, and is noted with what it
was given. So calls and passes of loops are those of a real run; only a policy sees no losses. Then each program is
compiled for the card of ``h100.txtpb``, and ``gpu_listing.py``, where the words are explained, counts what the run
would issue. A loop of unknown length must have a name (``base.tree.loop``) and a line in ``gpu_passes.py``, or this
ends with an error. Not counted: the program that makes the parameters, and what the host does between calls. A branch
counts as its longest case. No time follows: kernels of a microsecond and of a millisecond count alike.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_listing
import jax
import numpy as np
from common import save_table
from gpu_listing import Counts, Row
from gpu_passes import PASSES
from jax.experimental.topologies import get_topology_desc

from fedjax_async import data, named, simulate, sweep
from fedjax_async.engine import compiling, defaults, devices, peer_programs, programs, scoring

HERE = Path(__file__).parent
MEMORY = 60 * 2**30  # bytes that JAX would use of the card's
MLP = {
    "model": "mlp:hidden=64",
    "clients": 100,
    "steps": 10,
    "batch_size": 32,
    "lr": 0.05,
    "partition": "iid",
    "delay": "constant:mean=10",
}
LENET, SPREAD = {"model": "lenet5"}, {"delay": "lognormal:mean=60,sigma=0.5"}
# settings; "examples" of a client, "shape" of an input and "runs" side by side are not settings
CASES: dict[str, dict[str, Any]] = {
    "fedbuff": {"method": "fedbuff:server_lr=1@buffer:size=3", "batch_size": 128, "updates": 2472, "examples": 600},
    "fedasync": {"method": "fedasync", "updates": 2000},
    "fedasync_lognormal": {"method": "fedasync", "updates": 2000, **SPREAD},
    "orthofl": {"method": "orthofl", "updates": 1000},
    "scaffold": {"method": "scaffold", "updates": 1000},
    "lenet5": {"method": "fedasync", "updates": 1000, **LENET},
    "lenet5_10_clients": {"method": "fedasync", "updates": 200, "clients": 10, "examples": 600, **LENET},
    "resnet18": {"method": "fedasync", "model": "resnet18", "updates": 100, "clients": 10, "max_width": 8,
                 "shape": (32, 32, 3)},
    "sweep": {"method": "fedbuff@buffer:size=3", "clients": 10, "updates": 100, "runs": 64},
    "pushcen": {"method": "pushcen", "clients": 40, "updates": 177, **SPREAD},
    "oort": {"method": "fedasync@every:concurrency=20", "policy": "oort", "updates": 400},
    "uniform": {"method": "fedasync@every:concurrency=20", "policy": "uniform", "updates": 400},
}  # fmt: skip


# --- a run whose programs give zeros ---------------------------------------------------------------
class Noted:
    """In place of a jitted function: notes each call and returns zeros; while another is traced, traces this one."""

    def __init__(self, notes: Notes, function: Callable[..., Any], arguments: dict[str, Any]) -> None:

        self.notes, self.function, self.arguments = notes, function, arguments
        self.plain = jax.jit(function)
        self.results: dict[Any, Any] = {}

    def __call__(self, *given: Any) -> Any:

        leaves, structure = jax.tree.flatten(given)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self.plain(*given)
        shapes = tuple((np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves)
        key = self.function, structure, shapes
        if key not in self.notes.zeros:
            made = jax.eval_shape(self.plain, *given)
            self.notes.zeros[key] = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), made)
            self.notes.programs[key] = self, jax.tree.map(jax.typeof, given)
        self.notes.called(key, self.function.__name__, given)
        return self.notes.zeros[key]

    def lower(self, *given: Any) -> Noted:
        """As for a jitted function; nothing is compiled yet."""

        self.out_info = jax.eval_shape(self.plain, *given)
        return self

    def compile(self) -> Noted:
        """As for a lowered function."""
        return self

    def memory_analysis(self) -> None:
        """As for a compiled function, on a backend that does not tell."""


class Notes:
    """All programs that a run called, and how often; loops by (program, name)."""

    def __init__(self) -> None:
        self.zeros: dict[Any, Any] = {}
        self.programs: dict[Any, tuple[Noted, Any]] = {}  # with the shapes of the arguments
        self.calls: dict[Any, int] = defaultdict(int)
        self.passes: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def called(self, key: Any, program: str, given: Any) -> None:
        """Note a call, and the passes of its loops as far as they follow from the arguments."""
        self.calls[key] += 1
        for (name, loop), rule in PASSES.items():
            if name == program and not isinstance(rule, int):
                try:
                    self.passes[key][loop] += rule(given)
                except (AttributeError, TypeError):  # another program of this name, without this loop
                    self.passes[key].pop(loop, None)

    def jitted(self, function: Callable[..., Any], *, once: bool = False, **arguments: Any) -> Noted:
        """In place of ``compiling.jitted``."""
        del once
        return Noted(self, function, arguments)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, the engine plans, and its programs are written, as for a GPU."""

    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(jax, "default_backend", lambda: "gpu"))
        for module in (devices, defaults):
            changes.enter_context(mock.patch.object(module, "device_memory", lambda: MEMORY))
        yield


def noted_run(case: dict[str, Any]) -> Notes:
    """Execute a case with zeros for results; call it inside :func:`as_on_a_gpu`."""

    notes, given, rng = Notes(), MLP | case, np.random.default_rng(0)
    examples, shape, runs = given.pop("examples", 64), given.pop("shape", (28, 28, 1)), given.pop("runs", 1)
    count = examples * given["clients"]
    x, y = rng.integers(0, 256, (count, *shape)).astype(np.uint8), rng.integers(0, 10, count).astype(np.int32)
    decode = lambda x: x.astype("float32") / 255.0  # noqa: E731
    made = data.Dataset("made up", x, y, x[:1000], y[:1000], decode, 10)
    given["dataset"] = named("made_up", made)
    modules = programs, scoring, peer_programs
    cached = [each for module in modules for each in vars(module).values()]
    with ExitStack() as changes:
        for each in cached:
            if hasattr(each, "cache_clear"):
                each.cache_clear()  # of what was compiled before, and then of what gave zeros
                changes.callback(each.cache_clear)
        for module in modules:
            changes.enter_context(mock.patch.object(module, "jitted", notes.jitted))
        if runs > 1:
            sweep(given, {"lr": [0.05]}, seeds=runs, progress=False)
        else:
            simulate(**given)
    return notes


# --- compiling for the card -----------------------------------------------------------------------
def compiled_for(card: Any, program: Noted, shapes: Any, options: dict[str, Any], dump: Path) -> dict[str, Any]:
    """A program compiled for the card: its listing, bytes of temporary memory, seconds of compilation."""

    there = jax.sharding.SingleDeviceSharding(card)
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), shapes)
    begun, before = time.perf_counter(), set(dump.iterdir())
    made = jax.jit(program.function, compiler_options=options, **program.arguments).lower(*given).compile()
    seconds, files = time.perf_counter() - begun, sorted(set(dump.iterdir()) - before)

    def text(ending: str) -> str:
        return next((file.read_text() for file in files if file.name.endswith(ending)), "")

    sequence = text(".thunk_sequence_after_thunk_passes.txt") or text(".thunk_sequence.txt")
    module = text("gpu_after_optimizations.txt")
    return {
        "thunks": gpu_listing.thunks_of(sequence),
        "loops": gpu_listing.loops_of(module),
        "traffic": gpu_listing.traffic_of(module),
        "names": gpu_listing.names_of(text(".thunk_metadata.txt")),
        "temporary": made.memory_analysis().temp_size_in_bytes,
        "seconds": seconds,
    }


def report(name: str, notes: Notes, card: Any, options: dict[str, Any], dump: Path) -> tuple[list[dict[str, Any]], Any]:
    """A row per program and one of the whole run; and the loops of each program."""
    rows, details, whole, calls, seconds = [], [], Counts(), 0, 0.0
    for key, (program, shapes) in notes.programs.items():
        passes, times = notes.passes[key], notes.calls[key]
        about = program.function.__name__

        def known(loop: str, reached: float, about: str = about, passes: Mapping[str, float] = passes) -> float:
            rule = PASSES.get((about, loop))
            if isinstance(rule, int):
                return rule * reached
            if loop not in passes:
                raise ValueError(f"the loop {loop!r} of {about} has no line in PASSES that fits its arguments")
            return passes[loop]

        made = compiled_for(card, program, shapes, options, dump)
        total, loops = gpu_listing.count(made["thunks"], made["loops"], made["names"], known, times)
        rows.append(row_of(name, about, times, total, made["temporary"] / 2**20, made["seconds"], card.device_kind))
        details.append((about, loops))
        whole, calls, seconds = whole.plus(total), calls + times, seconds + made["seconds"]
    most = max(row["temporary (MiB)"] for row in rows)
    return [*rows, row_of(name, "whole run", calls, whole, most, seconds, card.device_kind)], details


def row_of(
    case: str, program: str, calls: int, total: Counts, temporary: float, seconds: float, card: str
) -> dict[str, Any]:
    """One line of the table."""
    return {
        "case": case,
        "program": program,
        "calls": calls,
        "launches": round(total.launches),
        "of these in graphs": round(total.in_graphs),
        "graphs": round(total.graphs),
        "answers": round(total.answers),
        "temporary (MiB)": round(temporary, 1),
        "compiled (s)": round(seconds, 1),
        "card": card,
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """Rows in columns; numbers to the right."""
    cells = [list(rows[0]), *([f"{v:,}" if isinstance(v, int | float) else v for v in row.values()] for row in rows)]
    wide = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(line, wide))).rstrip()
        for line in cells
    )


def summary(rows: list[dict[str, Any]], details: list[tuple[str, list[Row]]], case: dict[str, Any]) -> str:
    """Launches of what a run repeats, and what the host issues for each update."""
    each = {"local steps": "a local step", "finish": "finishing half a batch"}
    said = []
    for loop, name in each.items():
        found = {row.each.launches for _, loops in details for row in loops if row.loop == loop and row.passes}
        said += [f"{name} {' or '.join(f'{n:g}' for n in sorted(found))} launches"] if found else []
    ranks = sum(row.passes for _, found in details for row in found if row.loop == "ranks")
    launches = sum(row["launches"] for row in rows if row["program"] in ("receive", "write"))
    kind = "a rank" if ranks else "an arrival"
    said += [f"{kind}, with messages and server step, {launches / (ranks or case['updates']):.1f}"]
    tested = [row for row in rows if row["program"] in ("evaluate", "evaluate_runs", "own")]
    calls = sum(row["calls"] for row in tested)
    said += [f"an evaluation {sum(row['launches'] for row in tested) / calls:.0f}"] if calls else []
    whole, updates = rows[-1], case["updates"] * case.get("runs", 1)
    host = whole["launches"] - whole["of these in graphs"] + whole["graphs"] + whole["answers"] + whole["calls"]
    return (
        f"{'; '.join(said)}. An update: {whole['launches'] / updates:.1f} launches, {host / updates:.2f} operations of "
        f"the host, {whole['answers'] / updates:.2f} of them answers"
    )


def detail(about: str, loops: list[Row]) -> str:
    """The loops of a program, each with the launches of one pass."""
    return "\n".join(
        f"  {about}: {'  ' * row.depth}{row.loop[-60:]}, {row.passes:,.0f} passes of {row.each.launches:g} launches"
        for row in loops
    )


def save(table: list[dict[str, Any]], path: Path | None) -> None:
    """Keep the table as a CSV file, if there is a path."""
    if path is not None:
        save_table(table, path)


def main() -> None:
    """Compile and count the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--loops", action="store_true", help="list the loops of every program")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    parser.add_argument("--target", type=Path, default=HERE / "h100.txtpb", help="the card, as XLA's text proto")
    parser.add_argument("--smoke", action="store_true", help="only the calls of a small run; needs no GPU compiler")
    parser.add_argument("--dump", type=Path, help="keep XLA's listings here")
    parser.add_argument("--out", type=Path, help="a CSV file for the table")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")  # of runs without results: every upload rejected, and such
    if chosen.smoke:
        with as_on_a_gpu():
            notes = noted_run({"method": "fedbuff@buffer:size=3", "clients": 6, "updates": 12, "examples": 8})
        calls = {program.function.__name__: notes.calls[key] for key, (program, _) in notes.programs.items()}
        table = [{"program": name, "calls": times, "card": "none"} for name, times in calls.items()]
        print(shown(table))
        save(table, chosen.out)
        return
    if unknown := set(chosen.names) - CASES.keys():
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as scratch:
        dump = chosen.dump or Path(scratch)
        dump.mkdir(parents=True, exist_ok=True)
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"  # XLA reads it when it starts, below
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)

        card = get_topology_desc(platform="cuda", target_config=chosen.target.read_text(), topology="1x1x1").devices[0]
        options = dict(compiling.CUDA)
        if chosen.no_graphs:
            options["xla_gpu_enable_command_buffer"] = ""
        table = []
        for name in chosen.names or CASES:
            with as_on_a_gpu():
                rows, loops = report(name, noted_run(CASES[name]), card, options, dump)
            print(f"\n{shown(rows)}\n{summary(rows, loops, MLP | CASES[name])}", flush=True)
            if chosen.loops:
                print("\n".join(detail(about, inner) for about, inner in loops if inner))
            table += rows
    save(table, chosen.out)


if __name__ == "__main__":
    main()
