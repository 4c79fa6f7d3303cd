"""The kit for a new device: its page names what was left out, what failed and what disagrees."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "experiments" / "benchmarks"


@pytest.fixture
def kit(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accelerator

    yield accelerator
    for name in ("accelerator", "accelerator_parts", "common", "conv", "population", "sweep", "throughput"):
        if name not in before:
            sys.modules.pop(name, None)


def test_time_is_split_by_what_runs(kit):
    """Two threads train at once and the server overlaps with them; events without a program count as host time."""

    def event(module, begin, duration):
        return {"ph": "X", "ts": begin, "dur": duration, "args": {"hlo_module": module} if module else {}}

    events = [event("jit_train", 0, 30), event("jit_train", 10, 30), event("jit_train", 12, 5)]
    events += [event("jit_receive", 35, 15), event("jit_evaluate", 60, 10), event("", 0, 100), {"ph": "M"}]
    assert kit.parts.covered([]) == 0
    found = kit.parts.shares(events, wall=100.0)
    assert list(found.values()) == pytest.approx([40, 10, 10, 40])
    rng = np.random.default_rng(0)
    spans = [(low, low + length) for low, length in rng.integers(0, 50, (30, 2)).tolist()]
    assert kit.parts.covered(spans) == len({t for low, high in spans for t in range(low, high)})


def test_what_did_not_fit_or_failed_is_named(kit, tmp_path, monkeypatch):
    def broken():
        raise ValueError("width = 0: must be positive")

    def items(size):
        """Made up."""
        yield "first", lambda: time.sleep(0.02) or [{"a": 1.0}]
        yield "second", lambda: pytest.fail("the time was over")

    def others(size):
        """Made up too."""
        yield "broken", broken
        yield "far", lambda: [{"distance": 2.0, "allowed": 1e-4, "ok": False}]

    monkeypatch.setattr(kit, "PARTS", {"one": ("One", items, 1.0), "two": ("Two", others, 1e6)})
    assert kit.run(["one"], kit.SMOKE, 0.01 / 60, tmp_path, "") == 0
    page = (tmp_path / "README.md").read_text()
    assert "Left out for lack of time: second." in page and (tmp_path / "one.csv").exists()
    assert kit.run(["two"], kit.SMOKE, 1.0, tmp_path, "Busy.") == 1
    page = (tmp_path / "README.md").read_text()
    assert page.index("second.") < page.index("## Two"), "the section of the part that was not run again stays"
    assert "Failed: broken: ValueError: width = 0" in page and "Busy." in page and "False" in page
