"""Comparisons train as sweeps do: the same numbers and programs; killed ones go on and lose little."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import Settings, compare, simulate, sweep
from fedjax_async.config import sweeping
from fedjax_async.engine.checkpoint import completed
from fedjax_async.results.store import CHECKPOINTS
from tests.results.folders import Killed, contents, ends_the_same
from tests.results.made_up import of_group

SMALL = {"model": "logistic", "clients": 4, "updates": 12, "eval_updates": 6, "steps": 2, "delay": "exponential"}
SERVED = ["fedasync", "fedbuff@buffer:size=3"]
SEEDS = 3  # one stack on two lanes
STEP = 24  # writes between two of the kills in a test


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    for table in ("evaluations", "updates"):
        for name, column in getattr(a, table).items():
            np.testing.assert_array_equal(column, getattr(b, table)[name], err_msg=name)
    assert a.settings == b.settings


def started(monkeypatch, calls, train=sweeping.execute_group):
    """Keep the names of the runs of each group that is trained."""

    def execute_group(experiments, group, **options):
        calls.append([(str(experiments[i].method), experiments[i].seed) for i in group.members])
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


@pytest.fixture
def whole(compared):
    return compared[1]


def are_those_of_the_sweep(runs, points):
    found = sweep(SMALL, points=points, seeds=len(runs[SERVED[0]]), progress=False)
    swept = {(point.settings.method, point.settings.seed): run for point, run in zip(found.points, found.runs)}
    for method in runs:
        for seed, run in enumerate(runs[method]):
            equal(run, swept[method, seed])


def test_the_runs_are_those_of_the_sweep_bit_for_bit(compared):
    are_those_of_the_sweep(compared[0], [{"method": method} for method in SERVED])


def test_beside_nodes_they_are_those_of_the_sweep_too():
    """Nodes bring ``test_fraction`` to a comparison."""
    runs = compare([SERVED[0], "dpsgd"], seeds=1, progress=False, **SMALL)
    are_those_of_the_sweep(runs, [{"method": SERVED[0], "test_fraction": 0.2}, {"method": "dpsgd"}])


def test_the_runs_are_those_in_turn_to_rounding(compared):
    in_turn = compare(SERVED, seeds=SEEDS, progress=False, callbacks=[lambda evaluation: None], **SMALL)
    for method in SERVED:
        for run, alone in zip(compared[0][method], in_turn[method], strict=True):
            np.testing.assert_allclose(run.evaluations["loss"], alone.evaluations["loss"], rtol=1e-6)


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


def test_killed_within_a_stack_it_loses_no_more_than_a_run(tmp_path, whole):
    cut = tmp_path / "cut"
    killed(cut, 20)
    kept = [max(completed(stack)) for stack in (cut / CHECKPOINTS).iterdir() if stack.is_dir()]
    kept += [SMALL["updates"] for _ in cut.glob("runs/*/*/manifest.json")]  # of a stack that was finished
    assert 20 - sum(kept) <= SMALL["updates"]
    compare(SERVED, seeds=SEEDS, out=cut, plots=False, progress=False, **SMALL)
    assert contents(cut) == contents(whole) and not (cut / CHECKPOINTS).exists()


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


def test_another_comparison_keeps_the_checkpoints_of_a_killed_one(tmp_path, whole):
    killed(tmp_path / "cut", 50)  # in the second group
    kept = sorted(path for path in (tmp_path / "cut" / CHECKPOINTS).rglob("*.npz"))
    compare(["fedasync:mixing=0.3"], out=tmp_path / "cut", plots=False, progress=False, **SMALL)
    assert kept and sorted((tmp_path / "cut" / CHECKPOINTS).rglob("*.npz")) == kept
    compare(SERVED, seeds=SEEDS, out=tmp_path / "cut", plots=False, progress=False, **SMALL)
    assert not (tmp_path / "cut" / CHECKPOINTS).exists()
    for path, found in contents(whole).items():
        assert found == (tmp_path / "cut" / path).read_bytes(), path


@pytest.mark.parametrize("given", [{"checkpoint": 4}, {"lanes": 2}, {"callbacks": [lambda evaluation: None]}])
def test_settings_of_single_runs_and_callbacks_train_one_run_after_the_other(tmp_path, monkeypatch, given):
    calls, seen = [], []
    alone = simulate(method=SERVED[0], seed=1, **SMALL | {name: given[name] for name in given if name == "lanes"})
    started(monkeypatch, calls)
    if "callbacks" in given:
        given = {"callbacks": [lambda evaluation: seen.append(evaluation.run)]}
    runs = compare(SERVED, seeds=2, out=tmp_path, plots=False, progress=False, **SMALL | given)
    assert calls == [[(name, seed)] for seed in (0, 1) for name in SERVED]
    assert seen == sorted(seen, key=seen.index), "the evaluations of a run come together"
    jax.tree.map(np.testing.assert_array_equal, runs[SERVED[0]][1].params, alone.params)


def test_a_comparison_that_took_checkpoints_of_each_run_goes_on_from_them(tmp_path):
    compare(SERVED, seeds=2, out=tmp_path / "whole", plots=False, progress=False, checkpoint=4, **SMALL)
    killed(tmp_path / "cut", 32, seeds=2, checkpoint=4)
    assert len(set(tmp_path.glob("cut/runs/*/*/checkpoints"))) == 1 and list(tmp_path.rglob("checkpoints/*.npz"))
    compare(SERVED, seeds=2, out=tmp_path / "cut", plots=False, progress=False, checkpoint=4, **SMALL)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_runs_that_are_too_large_for_half_of_the_memory_are_trained_all_the_same(monkeypatch):
    expected = compare(SERVED, seeds=2, progress=False, lanes=2, **SMALL)
    monkeypatch.setattr(sweeping, "default_limit", lambda: 1000)
    (group, _) = sweeping.plan_groups([Settings(method=name, seed=s, **SMALL) for name in SERVED for s in (0, 1)])
    assert group.stacks == ((0,), (1,)) and group.lanes == 1
    for name, runs in compare(SERVED, seeds=2, progress=False, **SMALL).items():
        for run, want in zip(runs, expected[name], strict=True):
            np.testing.assert_allclose(run.evaluations["loss"], want.evaluations["loss"], rtol=1e-6)
