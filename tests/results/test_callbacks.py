"""Callbacks at evaluations: they change no number, end a run at their evaluation, and work after a kill."""

from __future__ import annotations

import functools
import json
import math
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedjax_async import Settings, Stop, compare, resume, simulate, sweep
from fedjax_async.cli import main
from fedjax_async.config import prepare
from fedjax_async.config.watching import Judge, Watch
from fedjax_async.data.decode import FASHION_MNIST_MEAN, FASHION_MNIST_STD
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.results import load, write_sweep
from tests.refusals import refusals
from tests.results.folders import contents, killed_run
from tests.told import same

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 24, "eval_updates": 2, "lr": 0.05}
# uploads of unequal size, some are dropped by the server: their bytes are known only after training
UNEVEN = {"method": "fedbuff:server_lr=1@buffer:size=2", "compress": "topk:ratio=0.1", "timeout": 200.0, "late": "drop"}


@functools.cache
def whole(**changes):
    return simulate(**SMALL | changes)


def is_start_of(short, full):
    """Bit for bit, except ``step_changed``: the last step may be cut off."""
    for table in ("evaluations", "updates", "per_client"):
        have, want = getattr(short, table), getattr(full, table)
        assert list(have) == list(want)
        for name in set(have) - {"step_changed"}:
            np.testing.assert_array_equal(have[name], want[name][: len(have[name])], err_msg=name)
    assert len(short.updates["client"]) == short.counters["updates"] == short.evaluations["update"][-1]
    assert len(short.schedule.job) == short.counters["updates"]


def accuracy(params):
    """The accuracy of logistic regression on the test set, in float64 NumPy."""
    x, y = fashion_mnist_6k().test_x, fashion_mnist_6k().test_y
    kernel, bias = (np.asarray(leaf, np.float64) for leaf in sorted(jax.tree.leaves(params), key=np.ndim)[::-1])
    pixels = (x.reshape(len(x), -1) / 255.0 - FASHION_MNIST_MEAN) / FASHION_MNIST_STD
    return np.mean(np.argmax(pixels @ kernel + bias, -1) == y)


def test_callbacks_change_no_number(tmp_path):
    want, seen = whole(engine="waves"), []

    def look(evaluation):
        seen.append(evaluation)
        for value in evaluation.scores.values():
            if np.ndim(value):
                value[...] = 0

    have = simulate(**SMALL, engine="waves", out=tmp_path, plots=False, callbacks=[look], stream="csv", keep_best=True)
    same((have.params, have.evaluations, have.updates), (want.params, want.evaluations, want.updates))
    assert have.settings == want.settings and have.stopped is None
    assert [e.number for e in seen] == list(range(13)) and [e.last for e in seen] == [False] * 12 + [True]
    for name in ("time", "update", "step"):
        assert [getattr(e, name) for e in seen] == want.evaluations[name].tolist()
    assert [e.scores["loss"] for e in seen] == want.evaluations["loss"].tolist()
    best = int(np.argmax(want.evaluations["accuracy"]))
    assert have.best.evaluation == best and have.best.by == "test accuracy"
    assert accuracy(have.best.params) == pytest.approx(want.evaluations["accuracy"][best], abs=2e-3)
    same(load(tmp_path).best.params, have.best.params)
    stored = np.load(tmp_path / "best.npz")
    assert set(stored) == set(np.load(tmp_path / "params.npz"))
    lines = (tmp_path / "stream.csv").read_text().splitlines()
    assert lines[0] == "evaluation,time,update,step,accuracy,loss" and len(lines) == 14


@pytest.mark.parametrize(("rule", "engines", "changes"), [
    ("patience", ["waves"], {}), ("stop_at", ["waves", "reference"], UNEVEN),
], ids=["patience", "uneven"])  # fmt: skip
def test_a_stopped_run_is_the_start_of_the_whole_one_in_both_engines(rule, engines, changes):
    """The target is the lowest of the four highest accuracies."""
    runs = []
    for engine in engines:
        full = whole(engine=engine, **changes)
        reached = full.evaluations["accuracy"]
        target = float(np.sort(reached)[-4])
        given = {"stop_at": target} if rule == "stop_at" else {"patience": 2}
        run = simulate(**SMALL | changes, engine=engine, **given)
        runs.append(run)
        is_start_of(run, full)
        row = len(run.evaluations["time"]) - 1
        assert (run.stopped.by, run.stopped.evaluation) == (rule, row)
        assert accuracy(run.params) == pytest.approx(reached[row], abs=2e-3)
        if rule == "stop_at":
            assert row == np.flatnonzero(reached >= target)[0] and f"reached {target:g}" in run.stopped.why
            assert run.counters["trained_in_vain"] > 0 and run.counters["dropped_late"] > 0
        assert run.settings == {**full.settings, **given}
    for name in set.intersection(*(set(run.counters) for run in runs)) - {"waves", "mean_width"}:
        assert runs[0].counters[name] == runs[-1].counters[name], name
    same(runs[0].schedule, runs[-1].schedule)


def test_what_comes_after_the_stop_ends_no_run():
    """Without the stop, a corrupt upload raises an error in this run."""
    given = {**SMALL, "faults": "corrupt:probability=0.1", "on_bad": "raise", "seed": 3, "engine": "reference"}
    schedule = prepare(Settings(**given)).schedule
    first = int(np.flatnonzero(schedule.corrupt[schedule.job])[0])
    assert 2 <= first < 20, "choose another seed"
    with pytest.raises(ValueError, match="uploads rejected"):
        simulate(**given)
    run = simulate(**given, callbacks=[lambda e: Stop("enough") if e.update >= first - 1 else None])
    assert run.counters["updates"] <= first and run.counters["rejected"] == 0


@functools.cache
def experiment(**changes):
    return prepare(Settings(**SMALL | changes))


SCORES = st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.9, math.nan]), min_size=13, max_size=13)


@settings(max_examples=60)
@given(SCORES, st.integers(1, 5), st.sampled_from([0.25, 0.5, 0.9]), st.booleans())
@example([0.1] * 3 + [0.2] * 3 + [0.3] * 2 + [0.5] * 5, 4, 0.9, False)  # out of patience at the last row
def test_the_rules_are_those_of_their_definition(values, patience, target, validated):
    """Each row is checked with the whole column up to it, also if the validation part decides."""
    watch = Watch(experiment(patience=patience, stop_at=target), keep_best=True)
    column = {"validation_accuracy" if validated else "accuracy": values}
    table = {"accuracy": [0.95] * 13, "loss": [1.0] * 13} | column
    seen, kept, best = np.array(values, np.float32), None, -1
    for row in range(13):
        verdict = watch.observer.observe(row, {n: np.float32(v[row]) for n, v in table.items()}, False)
        kept = row if verdict.keep else kept
        best = -1 if np.isnan(seen[: row + 1]).all() else int(np.nanargmax(seen[: row + 1]))
        ends = seen[row] >= target or row - best >= patience
        assert verdict.stop == (ends and row < 12), "the last row ends the run anyway"
        if ends:
            break
    assert kept == (None if best < 0 else best)


def test_patience_does_not_end_a_run_between_two_server_steps():
    """Each server step is evaluated many times; the model before the first one ended the run, untrained."""
    given = SMALL | {"eval_updates": None, "eval_time": 0.1, "updates": 6, "delay": "constant:mean=1"}
    run = simulate(**given, method="asgd@cohort:size=2", patience=2, engine="reference")
    assert run.counters["updates"] >= 4


def careless(evaluation):
    return 1 / 0


def talkative(evaluation):
    return "stop"


def untrained(options):
    with mock.patch("fedjax_async.config.sweeping.execute", None):
        simulate(**SMALL | options)


test_bad_callbacks_are_refused_before_the_training = refusals(
    ({"stop_at": 90.0}, "stop_at = 90.0: must be an accuracy in (0, 1]"),
    ({"callbacks": print}, "callbacks = .*must be a list of functions"),
    ({"callbacks": [3]}, "callbacks = 3: must be functions"),
    ({"stream": "cvs"}, "stream = 'cvs': unknown; did you mean 'csv'"),
    ({"stream": "csv"}, "stream = 'csv': must be left out without a folder (out)"),
    ({"keep_best": 1}, "keep_best = 1: must be True or False"),
    by=untrained,
)
test_errors_in_a_callback_name_it = refusals(
    (careless, "callback .*careless, evaluation 0 of fedasync: ZeroDivisionError"),
    (talkative, "return of callback .*talkative = 'stop': must be None, or Stop"),
    by=lambda callback: simulate(**SMALL, callbacks=[callback]),
)


def test_without_class_labels_the_loss_counts():
    of_numbers = experiment(dataset="quadratic", model="linear", stop_at=0.5)
    observer = Watch(of_numbers, keep_best=True).observer
    verdicts = [observer.observe(row, {"loss": np.float32(loss)}, False) for row, loss in enumerate((2, 0.7, 0.9, 0.5))]
    assert [(verdict.keep, verdict.stop) for verdict in verdicts] == [(1, 0), (1, 0), (0, 0), (1, 1)]
    assert Judge(of_numbers.components.data).name({}) == "test loss"


@pytest.mark.parametrize("checkpoint", [4, None])
def test_a_killed_run_ends_with_the_same_files(tmp_path, checkpoint, capsys):
    watching = {"stream": "csv", "keep_best": True}
    simulate(**SMALL, checkpoint=checkpoint, **watching, out=tmp_path / "whole", plots=False)
    killed_run(tmp_path / "cut", 14, **SMALL, checkpoint=checkpoint, **watching)
    file = tmp_path / "cut" / "stream.csv"
    begun = file.read_bytes()
    assert begun and (tmp_path / "whole" / "stream.csv").read_bytes().startswith(begun)
    file.write_bytes(begun[:-5])  # half a line, as after a loss of power
    capsys.readouterr()
    resume(tmp_path / "cut", plots=False)  # streams and keep_best are restored
    assert (
        "goes on from update" if checkpoint else "cut: has no checkpoint, and begins anew"
    ) in capsys.readouterr().out
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_functions_are_given_again_and_see_earlier_evaluations_again(tmp_path):
    seen = []

    def stop_at_ten(evaluation):
        seen.append((evaluation.number, evaluation.again))
        return Stop("ten") if evaluation.number == 10 else None

    killed_run(tmp_path, 14, **SMALL, checkpoint=4, callbacks=[stop_at_ten])
    with pytest.raises(ValueError, match=r"callbacks = \[\]: must be the functions that the run began with, .*stop_at"):
        resume(tmp_path, plots=False)
    seen.clear()
    run = resume(tmp_path, plots=False, callbacks=[stop_at_ten])
    assert [number for number, _ in seen] == list(range(11)) and seen[0][1] and not seen[-1][1]
    assert run.stopped.why == "ten" and run.stopped.by.endswith("stop_at_ten")
    is_start_of(run, whole(checkpoint=None))


def test_a_finished_run_is_another_only_for_those_that_stop_it(tmp_path, monkeypatch, capsys):
    def quiet(evaluation):
        return None

    def early(evaluation):
        return Stop("early") if evaluation.number >= 3 else None

    given = {**SMALL, "out": tmp_path, "plots": False}
    simulate(**given, keep_best=True)

    def is_read(**watching):
        with monkeypatch.context() as patch:
            patch.setattr("fedjax_async.config.sweeping.execute", lambda *args, **options: 1 / 0)
            try:
                return simulate(**given, **watching)
            except ZeroDivisionError:
                return None

    assert is_read() and is_read(keep_best=True) and is_read(callbacks=[quiet]) and is_read(stream="csv")
    assert len((tmp_path / "stream.csv").read_text().splitlines()) == 14, "a finished run is streamed too"
    assert is_read(callbacks=[early]) is None
    stopped = simulate(**given, callbacks=[early], stream="csv")
    assert stopped.stopped.evaluation == 3 and len((tmp_path / "stream.csv").read_text().splitlines()) == 5
    assert json.loads((tmp_path / "stopped.json").read_text())["why"] == "early"
    assert not (tmp_path / "best.npz").exists(), "the best model was that of another run"
    assert is_read() is is_read(callbacks=[quiet]) is is_read(callbacks=[early], keep_best=True) is None
    assert is_read(callbacks=[early]).stopped == stopped.stopped
    again = simulate(**given)
    assert again.stopped is None and not (tmp_path / "stopped.json").exists()
    with pytest.raises(ValueError, match="same settings"):
        simulate(**given, patience=3)


@pytest.mark.parametrize("setting", [{"per_client": True}, {}, {"method": "dpsgd"}])
def test_a_run_that_is_read_has_the_stream_that_it_had(tmp_path, setting):
    given = {"dataset": "quadratic:clients=3", "model": "linear", "test_fraction": 0.5, "validation_fraction": 0.2}
    given |= {"clients": 3, "steps": 1, "updates": 6, "eval_updates": 3, "delay": "constant:mean=10"} | setting
    before = None
    for _ in range(2):
        simulate(**given, engine="reference", stream="csv", out=tmp_path, plots=False)
        stream = (tmp_path / "stream.csv").read_bytes()
        assert stream and before in (None, stream)
        before = stream


def test_a_comparison_marks_what_stopped(tmp_path):
    seen, given = [], Settings(**SMALL, patience=1)
    options = {"seeds": 2, "stream": "csv", "progress": False, "callbacks": [lambda e: seen.append(e.run)]}
    runs = compare(["fedasync"], given, out=tmp_path, plots=False, **options)["fedasync"]
    assert set(seen) == {"fedasync seed 0", "fedasync seed 1"}
    stopped = sum(run.stopped is not None for run in runs)
    assert stopped and f"{stopped} of 2" in (tmp_path / "comparison.md").read_text()
    for seed, run in enumerate(runs):
        lines = (tmp_path / "runs" / "fedasync" / f"seed_{seed}" / "stream.csv").read_text().splitlines()
        assert len(lines) == 1 + len(run.evaluations["time"])


def test_each_run_of_a_stack_stops_by_itself_is_marked_and_streamed_again(tmp_path):
    given, grid = {**SMALL, "patience": 1}, {"lr": [0.02, 0.05, 0.2]}
    options = {"progress": False, "lanes": 2}  # one stack: its batches are shared out
    write_sweep(sweep(given, grid, out=tmp_path, stream="csv", **options), plots=False)
    table = (tmp_path / "runs.csv").read_text()
    assert "stopped_by" in table and "patience" in table
    assert "stopped early" in (tmp_path / "settings.csv").read_text()
    before = {path: path.read_bytes() for path in tmp_path.glob("runs/*/stream.csv")}
    assert len(before) == 3
    for path in before:
        path.unlink()
    found = sweep(given, grid, out=tmp_path, stream="csv", keep_best=True, **options)
    assert {path: path.read_bytes() for path in before} == before
    assert len({len(run.evaluations["time"]) for run in found.runs}) > 1, "the runs must not all stop together"
    for run, want in zip(found.runs, sweep(SMALL, grid, **options).runs, strict=True):
        is_start_of(run, want)
        assert accuracy(run.params) == pytest.approx(run.evaluations["accuracy"][-1], abs=2e-3)
        assert run.best.value == run.evaluations["accuracy"].max(), "they are trained again for their best model"
    for path in before:  # killed before it was saved, then replaced by another sweep with the same names
        (path.parent / "manifest.json").unlink()
        (path.parent / "wandb.json").touch()
    other = sweep({**SMALL, "stop_at": 0.15}, grid, out=tmp_path, overwrite=True, **options)
    assert other.run(0).stopped.by == "stop_at"
    assert not any(path.exists() or (path.parent / "wandb.json").exists() for path in before)


def test_the_command_line(tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = ["run", *flags, "--quiet", "--patience=1", "--stream=csv", "--keep-best", "--out", str(tmp_path)]
    assert main([*command, "--no-plots"]) == 0
    said = capsys.readouterr().out
    assert "stopped by patience at evaluation" in said and "best model: test accuracy" in said
    assert {"stream.csv", "best.npz", "stopped.json"} <= set(contents(tmp_path))
    assert load(tmp_path).settings["patience"] == 1 and "stop_at" not in load(tmp_path).settings
    assert main(["run", *flags, "--stream=csv,tensorbord", "--out", str(tmp_path)]) == 2
    assert "did you mean 'tensorboard'" in capsys.readouterr().err
