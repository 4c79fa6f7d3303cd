"""Comparisons train as sweeps do: the same numbers and programs; killed ones go on and lose little."""

from __future__ import annotations

from itertools import chain

import jax
import numpy as np
import pytest

from fedjax_async import compare, simulate, sweep
from fedjax_async.config import sweeping
from fedjax_async.engine.checkpoint import completed
from fedjax_async.results.store import CHECKPOINTS
from tests.results.folders import Killed, contents, ends_the_same
from tests.results.made_up import of_group
from tests.told import same

SMALL = {"model": "logistic", "clients": 4, "updates": 12, "eval_updates": 6, "steps": 2, "delay": "exponential"}
SERVED = ["fedasync", "fedbuff@buffer:size=3"]
SEEDS = 3  # one stack on two lanes
STEP = 24  # writes between two of the kills in a test


def started(monkeypatch, calls, train=sweeping.execute_group):
    """Keep the runs of each stack that is trained."""

    def execute_group(experiments, group, **options):
        calls.extend([(str(experiments[i].method), experiments[i].seed) for i in stack] for stack in group.stacks)
        train(experiments, group, **options)

    monkeypatch.setattr(sweeping, "execute_group", execute_group)


def killed(folder, at, seeds=SEEDS, **given):
    """Start a comparison and kill it once ``at`` updates of all runs are done."""

    def kill(done, total, **status):
        if done >= at:
            raise Killed

    with pytest.raises(Killed):
        compare(SERVED, seeds=seeds, out=folder, progress=kill, **SMALL | given)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The runs of a comparison that nothing ended, and their folder."""
    folder = tmp_path_factory.mktemp("whole")
    return compare(SERVED, seeds=SEEDS, out=folder, plots=False, progress=False, **SMALL), folder


def test_the_runs_are_those_of_the_sweep_bit_for_bit(compared):
    points = [{"method": method} for method in SERVED]
    found = sweep(SMALL, points=points, seeds=SEEDS, progress=False)
    for run, swept in zip(chain(*compared[0].values()), found.runs, strict=True):
        same((run.params, run.evaluations, run.updates), (swept.params, swept.evaluations, swept.updates))
        assert run.settings == swept.settings


def test_beside_nodes_a_part_is_held_out_for_tests_as_in_the_sweep(made_at_once):
    runs = compare(["fedasync", "dpsgd"], progress=False, **SMALL)
    points = [{"method": "fedasync", "test_fraction": 0.2}, {"method": "dpsgd"}]
    found = sweep(SMALL, points=points, seeds=1, progress=False)
    assert [run.settings for (run,) in runs.values()] == [run.settings for run in found.runs]


def test_callbacks_train_one_run_after_the_other_to_the_same_numbers(compared, monkeypatch):
    calls, seen = [], []
    started(monkeypatch, calls)
    callbacks = [lambda evaluation: seen.append(evaluation.run)]
    in_turn = compare(SERVED, seeds=SEEDS, progress=False, callbacks=callbacks, **SMALL)
    assert calls == [[(name, seed)] for seed in range(SEEDS) for name in SERVED]
    assert seen == sorted(seen, key=seen.index), "the evaluations of a run come together"
    same(in_turn[SERVED[0]][1].params, simulate(method=SERVED[0], seed=1, **SMALL).params)
    for run, alone in zip(chain(*compared[0].values()), chain(*in_turn.values()), strict=True):
        np.testing.assert_allclose(run.evaluations["loss"], alone.evaluations["loss"], rtol=1e-6)


@pytest.mark.parametrize("given", [{"checkpoint": 4}, {"lanes": 2}])
def test_settings_of_single_runs_train_one_run_after_the_other(tmp_path, monkeypatch, given):
    calls = []
    started(monkeypatch, calls, train=of_group)
    compare(SERVED, seeds=2, out=tmp_path, plots=False, progress=False, **SMALL | given)
    assert calls == [[(name, seed)] for seed in (0, 1) for name in SERVED]


def test_runs_that_are_too_large_for_half_of_the_memory_are_trained_all_the_same(monkeypatch):
    calls = []
    started(monkeypatch, calls, train=of_group)
    monkeypatch.setattr(sweeping, "default_limit", lambda: 1000)
    compare(SERVED, seeds=2, progress=False, **SMALL)
    assert calls == [[(name, seed)] for name in SERVED for seed in (0, 1)]


def test_no_more_programs_than_one_run_after_the_other_and_none_for_other_numbers():
    seen = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(details.get("fun_name", "")))

    def programs(**given):  # of so many clients that no program is there from an earlier run
        seen.clear()
        compare(SERVED[:1], seeds=SEEDS, progress=False, **SMALL | given)
        return sorted(name for name in seen if name in names)

    names = [f"jit({name})" for name in ("start", "train", "receive", "evaluate")]  # all runs share ``buffers``
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        in_turn, together = programs(clients=17, lanes=2), programs(clients=19)
        again = programs(clients=19, lr=0.2)
        one, other = (programs(clients=19, compress=f"topk:ratio={ratio}") for ratio in (0.3, 0.2))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert together == in_turn and set(together) == set(names) and again == []
    assert {"jit(train)"} <= {*one} & {*other} and "jit(evaluate)" not in other, "other clients are scored by the same"


def test_killed_within_a_stack_it_loses_no_more_than_a_run(tmp_path, compared):
    cut = tmp_path / "cut"
    killed(cut, 20)
    kept = [max(completed(stack)) for stack in (cut / CHECKPOINTS).iterdir() if stack.is_dir()]
    kept += [SMALL["updates"] for _ in cut.glob("runs/*/*/manifest.json")]  # of a stack that was finished
    assert 20 - sum(kept) <= SMALL["updates"]
    compare(SERVED, seeds=SEEDS, out=cut, plots=False, progress=False, **SMALL)
    assert contents(cut) == contents(compared[1]) and not (cut / CHECKPOINTS).exists()


@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, STEP))])
def test_killed_at_any_write_it_goes_on_and_ends_the_same(tmp_path, first):
    def start(folder):
        compare(SERVED, seeds=SEEDS, out=folder, plots=False, progress=False, **SMALL)

    ends_the_same(start, tmp_path, least=45, first=first, step=STEP)


def test_what_was_finished_before_is_read_and_not_trained_with_its_stack(tmp_path, monkeypatch, capsys):
    calls = []
    started(monkeypatch, calls, train=of_group)
    compare(SERVED, seeds=2, out=tmp_path, plots=False, progress=False, **SMALL)
    calls.clear()
    runs = compare([*SERVED, "asgd"], seeds=3, out=tmp_path, plots=False, progress=False, **SMALL)
    assert sorted(calls) == [[("asgd", 0), ("asgd", 1), ("asgd", 2)], [("fedasync", 2)], [(SERVED[1], 2)]]
    assert capsys.readouterr().out.count("was read") == 4
    assert [[run.settings["seed"] for run in runs[name]] for name in runs] == [[0, 1, 2]] * 3


def test_another_comparison_keeps_the_checkpoints_of_a_killed_one(tmp_path, compared):
    killed(tmp_path, 50)  # in the second group
    kept = set((tmp_path / CHECKPOINTS).rglob("*.npz"))
    compare(["fedasync:mixing=0.3"], out=tmp_path, plots=False, progress=False, **SMALL)
    assert kept and set((tmp_path / CHECKPOINTS).rglob("*.npz")) == kept
    compare(SERVED, seeds=SEEDS, out=tmp_path, plots=False, progress=False, **SMALL)
    assert not (tmp_path / CHECKPOINTS).exists()
    assert contents(compared[1]).items() <= contents(tmp_path).items()


def test_a_comparison_that_took_checkpoints_of_each_run_goes_on_from_them(tmp_path):
    compare(SERVED, seeds=2, out=tmp_path / "whole", plots=False, progress=False, checkpoint=4, **SMALL)
    killed(tmp_path / "cut", 32, seeds=2, checkpoint=4)
    assert len(set(tmp_path.glob("cut/runs/*/*/checkpoints"))) == 1 and list(tmp_path.rglob("checkpoints/*.npz"))
    compare(SERVED, seeds=2, out=tmp_path / "cut", plots=False, progress=False, checkpoint=4, **SMALL)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
