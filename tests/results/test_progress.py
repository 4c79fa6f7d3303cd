"""What is shown during a run: the progress bar, and streams to TensorBoard and Weights & Biases, with stand-ins."""

from __future__ import annotations

import collections
import errno
import functools
import importlib.util
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_async.results import bar, progress
from fedjax_async.results.streams import STREAMS, written_events
from fedjax_async.types import Evaluation


def reported(*reports: tuple[int, float, float, float], **options: object) -> str:
    """The text of a bar after these reports: updates, virtual time, staleness, accuracy."""
    stream = io.StringIO()
    shown = bar(200, file=stream, **options)
    for done, time, staleness, accuracy in reports:
        shown.report(done, 200, time=time, staleness=staleness, accuracy=accuracy)
    shown.close()
    return stream.getvalue()


def test_a_forced_bar_shows_time_rate_staleness_and_accuracy():
    text = reported((50, 90.0, math.nan, math.nan), (200, 4000.0, 3.25, 0.712), enabled=True, label="fedasync")
    for part in ("fedasync", "200/200", "updates/s", "t=1h06m40s", "staleness 3.2", "accuracy 71.2%"):
        assert part in text.rstrip("\n").split("\r")[-1]
    assert "nan" not in text
    # what rounds to a minute is one
    assert [progress.clock_text(seconds) for seconds in (59.94, 59.97, 60.0)] == ["59.9s", "1m00s", "1m00s"]


@pytest.mark.parametrize("enabled", [None, False, True])
def test_a_bar_goes_to_standard_error_and_off_a_terminal_only_if_forced(enabled, capsys):
    shown = bar(10, enabled)
    shown.report(10, 10, time=1.0, staleness=0.0, accuracy=0.5)
    shown.close()
    captured = capsys.readouterr()
    assert captured.out == "" and ("10/10" in captured.err if enabled else captured.err == "")


def test_the_bar_of_planning_shows_an_estimate_and_goes_away(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "tqdm", functools.partial(progress.tqdm, mininterval=0.0))
    stream, silent = io.StringIO(), io.StringIO()
    for enabled, file in ((True, stream), (False, silent), (None, silent)):  # None: not a terminal
        with progress.planning_bar(2, enabled, file=file) as part:
            for index in range(2):
                report = part(index)
                for share in (0.2, 0.5, 0.4, 0.9):  # never goes back
                    report(share)
    shown = re.findall(r"planning +(\d+)% .*?\[(\d\d:\d\d) so far, (\S+) left\]", stream.getvalue())
    shares = [int(share) for share, _, _ in shown]
    assert len(set(shares)) >= 4 and shares == sorted(shares) and shares[-1] <= 95
    assert stream.getvalue().split("\r")[-1].strip() == "" or stream.getvalue().endswith("\r")
    assert silent.getvalue() == ""


def test_where_nobody_watches_a_line_comes_at_intervals(monkeypatch):
    """The time left of a run that goes on counts new updates only."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])

    def lines(reports, **options):
        now[0] = 0.0
        stream = io.StringIO()
        shown = bar(400, file=stream, **options)
        for now[0], done, staleness in reports:
            shown.report(done, 400, time=60.0 * now[0], staleness=staleness, accuracy=0.5)
        shown.close()
        return stream.getvalue().splitlines()

    begun, gone_on = [(second, second, 1.5) for second in range(0, 190, 10)], [(0, 300, math.nan), (60, 310, math.nan)]
    assert lines(begun, label="fedavg seed 0") == [
        "fedavg seed 0: 60 of 400 updates, t=1h00m00s, staleness 1.5, accuracy 50.0%; 1m00s, about 5m40s left",
        "fedavg seed 0: 120 of 400 updates, t=2h00m00s, staleness 1.5, accuracy 50.0%; 2m00s, about 4m40s left",
        "fedavg seed 0: 180 of 400 updates, t=3h00m00s, staleness 1.5, accuracy 50.0%; 3m00s, about 3m40s left",
    ]
    assert lines(gone_on) == ["progress: 310 of 400 updates, t=1h00m00s, accuracy 50.0%; 1m00s, about 9m00s left"]
    assert lines(begun, enabled=False) == []
    several = lines(begun, label="3 runs", several=True)  # the time and accuracy of one of them would mislead
    assert several[0] == "3 runs: 60 of 400 updates; 1m00s, about 5m40s left"


def test_a_notebook_shows_a_bar_by_default_unless_the_environment_forbids_it(monkeypatch):
    shell = SimpleNamespace(config={"IPKernelApp": {}}, display_formatter=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=progress.tqdm))
    assert "200/200" in reported((200, 1.0, 0.0, 0.5))
    shell.config = {}  # IPython in a terminal: the stream decides
    assert not progress._in_notebook()


# --- streams ------------------------------------------------------------------------------------------


def evaluation(number, again=False, late=0.0):
    scores = {"accuracy": np.float32(number / 10), "loss": np.float32(1), "client_accuracy": np.zeros(3)}
    settings = {"lr": 0.1, "limit": np.inf}
    return Evaluation("mine", number, 10.0 * number + late, 2 * number, number, scores, settings, False, again)


def streamed(name, folder, numbers, again=0, complete=True, late=0.0):
    """Stream the evaluations of these numbers; those below ``again`` are of an earlier process."""
    stream = STREAMS[name](folder, "mine")
    for number in numbers:
        stream(evaluation(number, number < again, late * (number > 1)))
    stream.close(complete)


def test_tensorboard_gets_each_evaluation_once(tmp_path, monkeypatch):
    events = collections.defaultdict(list)  # folder -> what was written there

    def writer(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "one.tfevents").touch()

        def add_scalar(tag, data, step, *, wall_time):
            events[folder].append((tag, data, step, wall_time))

        return SimpleNamespace(add_scalar=add_scalar, flush=lambda: None, close=lambda: None)

    def loader(file):
        begin = SimpleNamespace(step=0, wall_time=1.7e9, HasField=lambda name: False)
        made = [SimpleNamespace(step=s, wall_time=w, HasField=bool) for _, _, s, w in events[str(Path(file).parent)]]
        return SimpleNamespace(Load=lambda: [begin, *made])

    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tensorboard.summary", SimpleNamespace(Writer=writer))
    module = "tensorboard.backend.event_processing.event_file_loader"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(EventFileLoader=loader))
    for begin, end in ((0, 3), (0, 2), (1, 5)):  # begun, killed, continued from two checkpoints
        streamed("tensorboard", tmp_path, range(begin, end))
    scores = [("accuracy", n, np.float32(n / 10)) for n in range(5)] + [("loss", n, 1) for n in range(5)]
    want = [(tag, value, 2 * n, 10.0 * n) for tag, n, value in sorted(scores, key=lambda score: score[1])]
    assert events == {str(tmp_path / "tensorboard"): want}


@pytest.mark.slow
def test_tensorboards_own_writer_and_loader(tmp_path):
    assert importlib.util.find_spec("tensorboard") is not None, "this test needs it: pip install '.[tensorboard]'"
    for end in (2, 4):
        streamed("tensorboard", tmp_path, range(end))
    assert written_events(tmp_path / "tensorboard") == {(2 * n, 10.0 * n) for n in range(4)}


def test_weights_and_biases_gets_each_evaluation_once(tmp_path, monkeypatch):
    runs = []

    def init(**given):
        run = SimpleNamespace(id=given["id"] or f"id{len(runs)}", given=given, rows={}, code=None)
        run.log = lambda row, step: run.rows.__setitem__(step, row)
        run.finish = lambda exit_code: setattr(run, "code", exit_code)
        runs.append(run)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    streamed("wandb", tmp_path, range(3), complete=False)  # killed
    streamed("wandb", tmp_path, range(5), again=2)  # continued
    streamed("wandb", tmp_path, range(5), again=5)  # read
    first, second = runs
    assert list(first.rows) == [0, 1, 2] and list(second.rows) == [3, 4] and (first.code, second.code) == (1, 0)
    assert first.given["id"] is None and second.given["id"] == first.id and second.given["resume"] == "allow"
    assert first.given["project"] == "fedjax-async" and first.given["name"] == "mine"
    assert first.given["config"] == {"lr": 0.1, "limit": None} and first.given["reinit"] == "create_new"
    row = {"time": 40.0, "update": 8, "server_step": 4, "accuracy": pytest.approx(0.4), "loss": 1.0}
    assert second.rows[4] == row
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": "id0", "evaluations": 5}


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

    def written(count, late=0.0):
        streamed("csv", tmp_path, range(count), late=late)
        return (tmp_path / "stream.csv").read_text().splitlines()

    long, other = written(5), written(4, late=1.0)
    assert long[:3] == ["evaluation,time,update,step,accuracy,loss", "0,0.0,0,0,0.0,1.0", "1,10.0,2,1,0.1,1.0"]
    assert other[:3] == long[:3] and other[3].startswith("2,21.0,") and len(other) == 5
    assert written(5) == long
