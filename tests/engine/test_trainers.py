"""The host threads of the lanes end with the run, also with one that fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fedjax_async.clock import Policy
from fedjax_async.engine import growing_stack, run_waves, trainers
from fedjax_async.engine.adaptive import WavesExecutor
from tests.engine.problem import case
from tests.engine.test_adaptive import DELAY, EVERY, adaptive
from tests.engine.test_checkpoint import Killed, killer

LANES = {"batching": "loop", "max_width": 1, "lanes": 2}
TIMING = "buffer:size=2,concurrency=4"


@pytest.fixture
def pools(monkeypatch):
    """The pools of threads that are made; kept here, because a pool that is collected ends its threads, too."""
    made = []

    def pool(threads):
        made.append(ThreadPoolExecutor(threads))
        return made[-1]

    monkeypatch.setattr(trainers, "ThreadPoolExecutor", pool)
    return made


def all_ended(pools):
    for pool in pools:
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(int)
    return len(pools)


def test_the_threads_end_with_the_run(pools):
    run_waves(*case("fedbuff", TIMING, DELAY), **LANES)
    assert all_ended(pools) == 1


def test_the_threads_end_with_a_run_that_fails(pools):
    with pytest.raises(Killed):
        run_waves(*case("fedbuff", TIMING, DELAY), progress=killer(4), **LANES)
    assert all_ended(pools) == 1


def test_the_threads_end_with_an_adaptive_run_and_whenever_its_tables_grow(pools, monkeypatch):
    monkeypatch.setattr(growing_stack, "LEAST", 2)
    adaptive(WavesExecutor, case("fedbuff", TIMING, DELAY, every=EVERY), TIMING, Policy(), under_way=1, **LANES)
    assert all_ended(pools) > 1
