"""Runs with unused uploads, or in which no upload was accepted: one line, a column, an exit code."""

from __future__ import annotations

import json
import re

from fedjax_async import cli
from fedjax_async.results import load
from tests.results.folders import rows

SMALL = ("--model", "logistic", "--clients", "4", "--steps", "1", "--quiet")
RUN = ("run", *SMALL, "--no-plots")
BUFFERED = ("--method", "fedbuff@buffer:size=4")
NONE = ("--norm-limit", "1e-9")  # no upload is accepted


def said(capsys, code, *arguments):
    """Standard output, and the only line on standard error, of a command that ends with ``code``."""
    assert cli.main(arguments) == code
    done = capsys.readouterr()
    (line,) = done.err.splitlines()
    assert line.startswith("fedjax-async: warning: ")
    return done.out, line.removeprefix("fedjax-async: warning: ")


def test_uploads_of_an_incomplete_server_step_are_not_counted_as_updates(capsys, tmp_path):
    out, line = said(capsys, 0, *RUN, *BUFFERED, "--updates", "6", "--out", str(tmp_path))
    assert "after 4 updates, 1 server steps, " in out and "; 2 uploads unused" in out
    assert line.startswith("2 uploads came for a server step that was not complete at the end")
    counters = json.loads((tmp_path / "counters.json").read_text())
    assert (counters["updates"], counters["unused"], counters["server_steps"]) == (4, 2, 1)
    assert [row["used"] for row in rows(tmp_path / "updates.csv")] == ["True"] * 4 + ["False"] * 2
    assert load(tmp_path).updates["used"].tolist() == [True] * 4 + [False] * 2
    assert cli.main(["plan", *SMALL[:-1], *BUFFERED, "--updates", "6"]) == 0
    assert "4 updates, 1 server steps; 2 uploads unused\n" in capsys.readouterr().out


def test_a_run_in_which_every_upload_was_rejected_ends_with_3(capsys, tmp_path):
    out, line = said(capsys, 3, *RUN, *BUFFERED, "--updates", "4", *NONE, "--out", str(tmp_path))
    assert "4 rejected" in out and "saved in" in out and line.startswith("EVERY UPLOAD WAS REJECTED")
    assert line.endswith("4 larger than norm_limit (raise norm_limit, or lower the learning rate)")
    assert load(tmp_path).counters["rejected"] == 4


def test_a_comparison_counts_unused_and_rejected_uploads(capsys, tmp_path):
    command = ("compare", "fedbuff@buffer:size=4", "fedasync", *SMALL, "--updates", "6", *NONE, "--out", str(tmp_path))
    assert cli.main((*command, "--no-plots")) == 3
    unused, rejected = capsys.readouterr().err.splitlines()
    assert "fedbuff@buffer:size=4 seed 0: 2 uploads came" in unused
    assert "fedbuff@buffer:size=4 seed 0, fedasync seed 0: EVERY UPLOAD" in rejected
    first, second = rows(tmp_path / "comparison.csv")
    columns = ("updates", "unused", "rejected", "runs with all rejected")
    assert [float(first[name]) for name in columns] == [4, 2, 6, 1]
    assert [float(second[name]) for name in columns] == [6, 0, 6, 1]


def test_a_sweep_counts_the_runs_that_accepted_nothing(capsys, tmp_path):
    file = tmp_path / "limits.toml"
    base = 'model = "logistic"\nclients = 4\nsteps = 1\nupdates = 6\nmethod = "fedbuff@buffer:size=4"\n'
    file.write_text(f"[base]\n{base}[grid]\nnorm_limit = [1e-9, 1e9]\n")
    out = tmp_path / "out"
    assert cli.main(["sweep", str(file), "--out", str(out), "--quiet", "--no-plots"]) == 3
    unused, rejected = capsys.readouterr().err.splitlines()
    assert "norm_limit=1e-09, norm_limit=1000000000.0: 4 uploads came" in unused
    assert rejected.startswith("fedjax-async: warning: norm_limit=1e-09: EVERY UPLOAD")
    assert [row["all_rejected"] for row in rows(out / "runs.csv")] == ["1", "0"]
    assert [(row["updates"], row["unused"], row["rejected"]) for row in rows(out / "runs.csv")] == [
        ("4", "2", "6"),
        ("4", "2", "0"),
    ]
    assert [row["runs with all rejected"] for row in rows(out / "settings.csv")] == ["1", "0"]


def test_a_run_without_clients_left_says_so_in_every_place(capsys, tmp_path):
    gone = ("--availability", "leaves:share=1,by=500", "--updates", "900")
    out, line = said(capsys, 0, *RUN, *gone, "--out", str(tmp_path / "run"))
    text = json.loads((tmp_path / "run" / "counters.json").read_text())["ended_early"]
    assert line == text and re.match(r"ended after \d+ of 900 updates because no client could train after", text)
    assert f"after {text.split()[2]} updates" in out
    assert said(capsys, 0, "plan", *SMALL[:-1], *gone)[1] == text
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert f"The run {text}." in (tmp_path / "page.html").read_text(encoding="utf-8")
