"""Runs with unused uploads, or in which no upload was accepted: one line, a column, an exit code."""

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
    """Standard output, and the warnings on standard error, of a command that ends with ``code``."""
    assert cli.main(arguments) == code
    done = capsys.readouterr()
    lines = done.err.splitlines()
    assert all(line.startswith("fedjax-async: warning: ") for line in lines)
    return done.out, [line.removeprefix("fedjax-async: warning: ") for line in lines]


def test_a_run_says_which_uploads_were_unused_and_ends_with_3_if_all_were_rejected(capsys, tmp_path):
    out, (unused, rejected) = said(capsys, 3, *RUN, *BUFFERED, "--updates", "6", *NONE, "--out", str(tmp_path))
    assert "after 4 updates, 1 server steps, " in out and "; 2 uploads unused" in out
    assert "6 rejected" in out and "saved in" in out
    assert unused.startswith("2 uploads came for a server step that was not complete at the end")
    assert rejected.startswith("EVERY UPLOAD WAS REJECTED")
    assert rejected.endswith("6 larger than norm_limit (raise norm_limit, or lower the learning rate)")
    counters = json.loads((tmp_path / "counters.json").read_text())
    assert [counters[name] for name in ("updates", "unused", "server_steps", "rejected")] == [4, 2, 1, 6]
    assert [row["used"] for row in rows(tmp_path / "updates.csv")] == ["True"] * 4 + ["False"] * 2
    assert load(tmp_path).updates["used"].tolist() == [True] * 4 + [False] * 2
    assert cli.main(["plan", *SMALL[:-1], *BUFFERED, "--updates", "6"]) == 0
    assert "4 updates, 1 server steps; 2 uploads unused\n" in capsys.readouterr().out


def test_a_comparison_counts_unused_and_rejected_uploads(capsys, tmp_path):
    command = ("compare", "fedbuff@buffer:size=4", "fedasync", *SMALL, "--updates", "6", *NONE, "--out", str(tmp_path))
    _, (unused, rejected) = said(capsys, 3, *command, "--no-plots")
    assert "fedbuff@buffer:size=4 seed 0: 2 uploads came" in unused
    assert "fedbuff@buffer:size=4 seed 0, fedasync seed 0: EVERY UPLOAD" in rejected
    first, second = rows(tmp_path / "comparison.csv")
    columns = ("updates", "unused", "rejected", "runs with all rejected")
    assert [float(first[name]) for name in columns] == [4, 2, 6, 1]
    assert [float(second[name]) for name in columns] == [6, 0, 6, 1]


def test_a_sweep_counts_the_runs_that_accepted_nothing(capsys, tmp_path):
    file, out = tmp_path / "limits.toml", tmp_path / "out"
    base = 'model = "logistic"\nclients = 4\nsteps = 1\nupdates = 6\nmethod = "fedbuff@buffer:size=4"\n'
    file.write_text(f"[base]\n{base}[grid]\nnorm_limit = [1e-9, 1e9]\n")
    _, (unused, rejected) = said(capsys, 3, "sweep", str(file), "--out", str(out), "--quiet", "--no-plots")
    assert "norm_limit=1e-09, norm_limit=1000000000.0: 4 uploads in all came" in unused
    assert rejected.startswith("norm_limit=1e-09: EVERY UPLOAD")
    columns = ("all_rejected", "updates", "unused", "rejected")
    assert [[row[name] for name in columns] for row in rows(out / "runs.csv")] == [[*"1426"], [*"0420"]]
    assert [row["runs with all rejected"] for row in rows(out / "settings.csv")] == ["1", "0"]


def test_a_run_without_clients_left_says_so_in_every_place(capsys, tmp_path):
    gone = ("--availability", "leaves:share=1,by=500", "--updates", "900")
    out, (line,) = said(capsys, 0, *RUN, *gone, "--out", str(tmp_path / "run"))
    text = json.loads((tmp_path / "run" / "counters.json").read_text())["ended_early"]
    assert line == text and re.match(r"ended after \d+ of 900 updates because no client could train after", text)
    assert f"after {text.split()[2]} updates" in out
    assert said(capsys, 0, "plan", *SMALL[:-1], *gone)[1] == [text]
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert f"The run {text}." in (tmp_path / "page.html").read_text(encoding="utf-8")
