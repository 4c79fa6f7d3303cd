"""Whether the engine equals the oracle in a drawn world; also a program, for the worlds on several devices:

python -m tests.judge DAY FOLDER, which prints the worlds as JSON, and fails as the test does.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from fedjax_async import Settings, simulate, sweep
from fedjax_async.base.notices import AllRejected, RunWarning
from fedjax_async.config import prepare, sweeping
from fedjax_async.engine import peer_programs, programs, scoring
from tests.draws import EIGHT, PROGRAMS, Drawn, kept
from tests.engine.problem import on_an_accelerator
from tests.worlds import ACCELERATOR, World, engine_of, settings_of


class Ended(Exception):
    """Raised to end a run on its way."""


def resumed(settings, folder, line):
    """The run, ended by force on its way and continued from its checkpoint; to the last bit as one that was not."""
    kept = settings | {"checkpoint": 5, "plots": False}
    whole, cut = simulate(**kept, out=folder / "whole"), kept | {"out": folder / "cut"}

    def end(done, of, **status):
        if done >= 10:
            raise Ended

    with suppress(Ended):
        simulate(**cut, progress=end)
    found = simulate(**cut)
    for ours, theirs in zip(*(jax.tree.leaves((run.params, run.evaluations, run.updates)) for run in (found, whole))):
        np.testing.assert_array_equal(ours, theirs, err_msg=f"resumed, to the last bit: {line}")
    return found


def swept(runs):
    """Each run as the last of three that differ in their rate, in stacks of two that share programs.

    So the last stack has fewer runs than the programs where a program has an odd number of worlds.
    """
    default = {field.name: field.default for field in fields(Settings)}
    full = [default | run for run in runs]
    apart = {name for name in default for run in full if run[name] is not full[0][name] and run[name] != full[0][name]}
    points = [{name: run[name] for name in apart} | {"lr": rate} for run in full for rate in (0.05, 0.03, run["lr"])]
    with mock.patch.object(sweeping, "CPU_STACK", 2):
        return list(sweep(runs[0], points=points, lanes=1, progress=False).runs)[2::3]


def close(have, want, start, line):
    """Assert that two models are equal up to a share of the distance that the model has moved; returns the distance."""
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (have, want, start)]
    apart, moved = (np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(leaves[1], leaves[k]))) for k in (0, 2))
    assert apart <= 1e-9 * moved + 1e-12, f"{apart} of {moved}: {line}"
    return moved


@contextmanager
def programs_of_their_own():
    """Inside, no program is shared with runs before or after: programs do not say for which backend they were made."""
    modules = programs, scoring, peer_programs
    caches = [each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")]
    with ExitStack() as after:
        for each in caches:
            each.cache_clear()
            after.callback(each.cache_clear)
        yield


def as_drawn(world: World) -> Any:
    """Inside, the engine runs on what the world asks for."""
    return on_an_accelerator() if world["batching"] == ACCELERATOR else nullcontext()


def compare(world: World, have: Any, folder: Path, line: str) -> float:
    """Assert that the engine equals the oracle in a world; ``line`` says how to draw it again.

    ``have``: its run by the engine, or None.

    Returns how far the model has moved: where it has not, the comparison shows little. Infinity where it cannot, since
    every upload is rejected.
    """
    settings = settings_of(world)
    start = prepare(Settings(**settings)).params
    want = simulate(**settings, engine="reference")
    engine = settings | engine_of(world)
    if have is None:
        with as_drawn(world):
            have = resumed(engine, folder, line) if world["run"] == "resumed" else simulate(**engine)
    for table in ("evaluations", "updates"):
        for name, column in getattr(want, table).items():
            np.testing.assert_allclose(getattr(have, table)[name], column, rtol=1e-8, atol=1e-10, err_msg=line)
    moved = close(have.params, want.params, start, line)
    return moved if np.any(want.updates["accepted"]) else math.inf


def judge(day: int, number: int, drawn: Drawn, folder: Path) -> dict[str, Any]:
    """Compare the worlds of a program of a day; returns them, and the refusals, each one line."""
    test = f"the_engine_equals_the_oracle[{number}]"
    if number >= PROGRAMS - EIGHT:
        test = "the_engine_on_eight_devices_equals_the_oracle"
    command = f"WORLDS={day} python -m pytest 'tests/test_worlds.py::test_{test}'"
    apart = any(world["batching"] == ACCELERATOR for world in drawn.worlds)
    with jax.enable_x64(True), warnings.catch_warnings(), programs_of_their_own() if apart else nullcontext():
        for expected in (RunWarning, AllRejected):
            warnings.simplefilter("ignore", expected)
        for why in drawn.refusals:
            assert "\n" not in why and len(why) < 600, f"{command} # {why!r}"
        moved, worlds = [], drawn.worlds
        have: list[Any] = [None] * len(worlds)
        if worlds[0]["run"] == "swept":
            with as_drawn(worlds[0]):
                have = swept([settings_of(world) | engine_of(world) for world in worlds])
        for k, world in enumerate(worlds):
            line = f"{command} # { ({axis: value for axis, value in world.items() if value is not None}) }"
            try:
                moved.append(compare(world, have[k], folder / str(k), line))
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {line}") from error
    assert max(moved) > 1e-4, f"no model moves: {command} # {drawn.worlds[0]}"
    return drawn._asdict()


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    warnings.simplefilter("error")
    day, worlds = int(sys.argv[1]), kept(int(sys.argv[1]), Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as made:
        folders = {number: Path(made) / str(number) for number in range(PROGRAMS - EIGHT, PROGRAMS)}
        print(json.dumps([judge(day, number, worlds[number], folder) for number, folder in folders.items()]))
