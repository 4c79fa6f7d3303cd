"""Streams to TensorBoard and Weights & Biases, with small stand-ins for both packages."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from fedjax_async.results.streams import STREAMS, written_events
from fedjax_async.types import Evaluation


def evaluation(number, again=False):
    scores = {"accuracy": np.float32(number / 10), "loss": np.float32(1), "client_accuracy": np.zeros(3)}
    return Evaluation(
        "mine", number, 10.0 * number, 2 * number, number, scores, {"lr": 0.1, "limit": np.inf}, False, again
    )


def streamed(name, folder, numbers, again=0, complete=True):
    """Stream the evaluations of these numbers; those below ``again`` are of an earlier process."""
    stream = STREAMS[name](folder, "mine")
    for number in numbers:
        stream(evaluation(number, again=number < again))
    stream.close(complete)


@pytest.fixture
def tensorboard(monkeypatch):
    """A writer that keeps its events in memory, by folder, and a loader that reads them back."""
    events: dict[str, list[tuple[str, float, int, float]]] = {}

    class Writer:
        def __init__(self, folder):
            self.events = events.setdefault(folder, [])
            path(folder).mkdir(parents=True, exist_ok=True)
            (path(folder) / "one.tfevents").touch()

        def add_scalar(self, tag, data, step, *, wall_time):
            self.events.append((tag, data, step, wall_time))

        def flush(self):
            pass

        close = flush

    class EventFileLoader:
        def __init__(self, file):
            self.events = events[str(path(file).parent)]

        def Load(self):
            made = [SimpleNamespace(step=s, wall_time=w, HasField=lambda name: True) for _, _, s, w in self.events]
            return [SimpleNamespace(step=0, wall_time=1.7e9, HasField=lambda name: False), *made]

    from pathlib import Path as path

    for name, content in (
        ("tensorboard", {}),
        ("tensorboard.summary", {"Writer": Writer}),
        ("tensorboard.backend", {}),
        ("tensorboard.backend.event_processing", {}),
        ("tensorboard.backend.event_processing.event_file_loader", {"EventFileLoader": EventFileLoader}),
    ):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return events


def test_tensorboard_gets_each_evaluation_once(tmp_path, tensorboard):
    for begin, end in ((0, 3), (0, 2), (1, 5)):  # begun, killed, continued from two checkpoints
        streamed("tensorboard", tmp_path, range(begin, end))
    want = [
        (tag, value, 2 * n, 10.0 * n)
        for n in range(5)
        for tag, value in (("accuracy", np.float32(n / 10)), ("loss", 1))
    ]
    assert tensorboard[str(tmp_path / "tensorboard")] == want


class Offline:
    """The part of Weights & Biases that the stream needs; ``runs``: arguments of each ``init``, and what was logged."""

    def __init__(self):
        self.runs = []

    def init(self, **given):
        run = SimpleNamespace(id=given["id"] or f"id{len(self.runs)}", given=given, rows={}, code=None)
        run.log = lambda row, step: run.rows.__setitem__(step, row)
        run.finish = lambda exit_code: setattr(run, "code", exit_code)
        self.runs.append(run)
        return run


def test_weights_and_biases_gets_each_evaluation_once(tmp_path, monkeypatch):
    offline = Offline()
    monkeypatch.setitem(sys.modules, "wandb", offline)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    streamed("wandb", tmp_path, range(3), complete=False)  # killed
    streamed("wandb", tmp_path, range(5), again=2)  # continued
    streamed("wandb", tmp_path, range(5), again=5)  # read
    first, second = offline.runs
    assert list(first.rows) == [0, 1, 2] and list(second.rows) == [3, 4] and (first.code, second.code) == (1, 0)
    assert first.given["id"] is None and second.given["id"] == first.id and second.given["resume"] == "allow"
    assert first.given["project"] == "fedjax-async" and first.given["name"] == "mine"
    assert first.given["config"] == {"lr": 0.1, "limit": None} and first.given["reinit"] == "create_new"
    row = second.rows[4]
    assert row == {"time": 40.0, "update": 8, "server_step": 4, "accuracy": pytest.approx(0.4), "loss": 1.0}
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": "id0", "evaluations": 5}


@pytest.mark.slow
def test_tensorboards_own_writer_and_loader(tmp_path):
    assert importlib.util.find_spec("tensorboard") is not None, "this test needs it: pip install '.[tensorboard]'"
    for end in (2, 4):
        streamed("tensorboard", tmp_path, range(end))
    assert written_events(tmp_path / "tensorboard") == {(2 * n, 10.0 * n) for n in range(4)}


@pytest.mark.parametrize("written", [3, None], ids=["the first bytes", "nothing"])
def test_a_full_disk_names_the_stream(tmp_path, monkeypatch, written):
    def write(file, content):
        if written is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match=r"No space left on device: '.*/stream.csv'$"):
        STREAMS["csv"](tmp_path, "mine")(evaluation(0))


def test_lines_of_another_run_are_replaced(tmp_path):
    """Lines that differ are removed, and so are further lines of a longer run."""

    def written(count, shift=0):
        stream = STREAMS["csv"](tmp_path, "mine")
        for number in range(count):
            stream(evaluation(number)._replace(time=10.0 * number + shift * (number > 1)))
        stream.close(True)
        return (tmp_path / "stream.csv").read_text().splitlines()

    long = written(5)
    assert long[:3] == ["evaluation,time,update,step,accuracy,loss", "0,0.0,0,0,0.0,1.0", "1,10.0,2,1,0.1,1.0"]
    other = written(4, shift=1)
    assert other[:3] == long[:3] and other[3].startswith("2,21.0,") and len(other) == 5
    assert written(5) == long
