"""The progress bar: its text, and when it is hidden."""

from __future__ import annotations

import io
import math
import re
import sys
import time
import types

import pytest

from fedjax_async.results import bar, progress


def test_a_forced_bar_shows_time_rate_staleness_and_accuracy():
    stream = io.StringIO()
    shown = bar(200, True, label="fedasync", file=stream)
    shown.report(50, 200, time=90.0, staleness=math.nan, accuracy=math.nan)
    shown.report(200, 200, time=4000.0, staleness=3.25, accuracy=0.712)
    shown.close()
    last = stream.getvalue().rstrip("\n").split("\r")[-1]
    for part in ("fedasync", "200/200", "updates/s", "t=1h06m40s", "staleness 3.2", "accuracy 71.2%"):
        assert part in last
    assert "nan" not in stream.getvalue()


def test_what_rounds_to_a_minute_is_one():
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
    stream = io.StringIO()
    with progress.planning_bar(2, True, file=stream) as part:
        for index in range(2):
            report = part(index)
            for share in (0.2, 0.5, 0.4, 0.9):  # never goes back
                report(share)
                time.sleep(0.12)
    shown = re.findall(r"planning +(\d+)% .*?\[(\d\d:\d\d) so far, (\S+) left\]", stream.getvalue())
    shares = [int(share) for share, _, _ in shown]
    assert len(shares) >= 4 and shares == sorted(shares) and shares[-1] <= 95
    assert stream.getvalue().split("\r")[-1].strip() == "" or stream.getvalue().endswith("\r")
    silent = io.StringIO()
    for enabled in (False, None):  # None: not a terminal
        with progress.planning_bar(1, enabled, file=silent) as part:
            part(0)(0.5)
    assert silent.getvalue() == ""


def test_where_nobody_watches_a_line_comes_at_intervals(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = bar(400, label="fedavg seed 0", file=stream)
    for second in range(0, 190, 10):
        now[0] = second
        shown.report(second, 400, time=60.0 * second, staleness=1.5, accuracy=0.5)
    shown.close()
    assert stream.getvalue().splitlines() == [
        "fedavg seed 0: 60 of 400 updates, t=1h00m00s, staleness 1.5, accuracy 50.0%; 1m00s, about 5m40s left",
        "fedavg seed 0: 120 of 400 updates, t=2h00m00s, staleness 1.5, accuracy 50.0%; 2m00s, about 4m40s left",
        "fedavg seed 0: 180 of 400 updates, t=3h00m00s, staleness 1.5, accuracy 50.0%; 3m00s, about 3m40s left",
    ]
    silent = io.StringIO()
    shown = bar(400, False, file=silent)
    now[0] = 1000.0
    shown.report(10, 400, time=1.0, staleness=1.0, accuracy=0.5)
    assert silent.getvalue() == ""


def test_a_notebook_shows_a_bar_by_default_unless_the_environment_forbids_it(monkeypatch):
    shell = types.SimpleNamespace(config={"IPKernelApp": {}}, display_formatter=None)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=progress.tqdm))
    stream = io.StringIO()
    shown = bar(10, file=stream)
    shown.report(10, 10, time=1.0, staleness=0.0, accuracy=0.5)
    shown.close()
    assert "10/10" in stream.getvalue()
    shell.config = {}  # IPython in a terminal: the stream decides
    assert not progress._in_notebook()


def test_the_time_left_of_a_run_that_goes_on_counts_new_updates_only(monkeypatch):
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    shown = bar(10_000, label="fedbuff", file=stream)
    for now[0], done in ((0.0, 9000), (60.0, 9100)):
        shown.report(done, 10_000, time=1.0, staleness=math.nan, accuracy=math.nan)
    assert stream.getvalue().endswith("1m00s, about 9m00s left\n")
