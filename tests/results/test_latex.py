"""LaTeX tables: their grammar, what is marked in them, and the choice of columns."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedjax_async import cli
from fedjax_async.results import sweep, write_comparison, write_sweep
from fedjax_async.results.latex import NO_TESTS, PairedTests, escaped, latex, p_values, require_columns, short_name
from fedjax_async.results.metrics import spread
from fedjax_async.results.significance import interval
from fedjax_async.results.timeline import staleness_of
from tests.cli.called import refused
from tests.results.folders import rows as csv_rows
from tests.results.made_up import make_run
from tests.results.page import seeded

SPECIAL = re.compile(r"(?<!\\)[&%#_^~]")
ACCURACY = "accuracy, mean of last tenth (%)"


def parsed(text: str) -> list[list[str]]:
    """The cells of a table, the header first; checks all that can make LaTeX fail."""
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    begin = re.fullmatch(r"\\begin\{tabular\}\{(l*r*)\}", lines[0])
    assert begin and lines[1] == r"\toprule" and lines[3] == r"\midrule"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    grid = []
    for line in (lines[2], *lines[4:-2]):
        assert line.endswith(r" \\") and not line.startswith(("[", "*"))
        cells = re.split(r"(?<!\\) & ", line.removesuffix(r" \\"))
        assert len(cells) == len(begin[1])
        for cell in cells:
            tokens = re.findall(r"\\[a-zA-Z]+|\\.|[{}$]", cell)
            assert tokens.count("$") % 2 == 0
            for part in [cell, *cell.split("$")[1::2], *cell.split("$")[::2]]:  # braces close within a formula
                depth = 0
                for token in re.findall(r"\\.|[{}]", part):
                    depth += {"{": 1, "}": -1}.get(token, 0)
                    assert depth >= 0
                assert depth == 0, part
            assert not any(SPECIAL.search(plain) for plain in re.sub(r"(?<!\\)\$[^$]*\$", "", cell).split("\n")), cell
        grid.append(cells)
    return grid


def seeds_of(name: str, *accuracies: float):
    return seeded([[0.1, accuracy] for accuracy in accuracies], name)


RUNS = {
    "Ours [a_b]": seeds_of("fedasync", 0.70, 0.72, 0.71, 0.73),
    "50 % & $x^2$~\\{}": seeds_of("fedavg", 0.69, 0.725, 0.70, 0.72),
    "far": seeds_of("asgd", 0.50, 0.52, 0.51, 0.53),
}


def test_the_grammar_of_a_table_with_hard_names(tmp_path):
    write_comparison(RUNS, tmp_path, plots=False)
    text = (tmp_path / "comparison.tex").read_text()
    header, *body = parsed(text)
    assert header[0] == "method" and r"accuracy, mean of last tenth (\%)" in header
    assert [row[0] for row in body] == list(map(escaped, RUNS)) and body[0][0] == r"Ours {[}a\_b{]}"
    assert body[1][0] == r"50 \% \& \$x\textasciicircum{}2\$\textasciitilde{}\textbackslash{}\{\}"
    assert len(csv_rows(tmp_path / "comparison.csv")[0]) > len(header), "the other tables have everything"
    assert "% mean and sample standard deviation over 4 seeds\n" in text and "% target: " in text


def test_the_best_mean_is_bold_and_those_not_significantly_worse_have_a_dagger(tmp_path):
    write_comparison(RUNS, tmp_path, plots=False, columns=["accuracy", "staleness"])
    text = (tmp_path / "comparison.tex").read_text()
    header, *body = parsed(text)
    assert header[1:] == [r"accuracy, mean of last tenth (\%)", "staleness"]
    assert [row[1] for row in body] == [
        r"$\mathbf{71.50 \pm 1.29}$", r"$70.88 \pm 1.65^{\dagger}$", r"$51.50 \pm 1.29$",
    ]  # fmt: skip
    assert "% bold: the best" in text and "paired t test, Holm's correction, p >= 0.05)\n" in text
    pairs = csv_rows(tmp_path / "pairs.csv")
    assert [float(row["p (t, Holm)"]) >= 0.05 for row in pairs] == [True, False, False]
    want = [np.mean([staleness_of(run).mean() for run in seeds]) for seeds in RUNS.values()]
    assert min(want) > 0 and [row[2] for row in body] == [rf"${mean:.2f} \pm 0.00$" for mean in want]
    np.testing.assert_allclose([float(row["staleness"]) for row in csv_rows(tmp_path / "comparison.csv")], want)
    assert "staleness" not in (tmp_path / "comparison.md").read_text()


def test_two_seeds_have_no_tests_equal_means_no_best_and_missing_columns_a_comment(tmp_path):
    few = {name: seeds[:2] for name, seeds in RUNS.items()}
    write_comparison(few, tmp_path, plots=False)
    text = (tmp_path / "comparison.tex").read_text()
    assert "dagger" not in text and r"\mathbf" in text
    equal = {"a": RUNS["far"], "b": RUNS["far"]}
    write_comparison(equal, tmp_path, plots=False, columns=["energy", "time", "accuracy"])
    text = (tmp_path / "comparison.tex").read_text()
    assert "bold" not in text and "dagger" not in text and "% no such column here: energy\n" in text
    assert parsed(text)[0] == ["method", "time to target (s)", r"accuracy, mean of last tenth (\%)"]


def test_a_smaller_loss_or_cost_is_better_and_counts_have_no_best():
    columns = {"loss, last": (2.0, 1.0, 3.0), "sent (MB)": (9.0, np.nan, 8.0), "updates": (5.0, 3, 7.0)}
    rows = [
        {"method": method} | {name: spread([values[k]]) for name, values in columns.items()}
        for k, method in enumerate("abc")
    ]
    rows[1] |= {"updates": 3, "ended": "1 of 2"}
    header, *body = parsed(latex(rows, ["method"], ["loss"], final="last"))
    assert header == ["method", "loss, last", "sent (MB)", "updates", "ended"]
    assert [row[1:] for row in body] == [
        ["$2.0000$", "$9.0$", "$5$", "--"],
        [r"$\mathbf{1.0000}$", "--", "3", "1 of 2"],
        ["$3.0000$", r"$\mathbf{8.0}$", "$7$", "--"],
    ]


def test_rows_without_a_test_and_of_fewer_seeds_are_said():
    rows = [{"method": str(k), ACCURACY: spread([value] * (4 - k))} for k, value in enumerate((60.0, 50.0, 10.0))]
    text = latex(rows, ["method"], ["accuracy"], tests=PairedTests(ACCURACY, {frozenset((0, 1)): 0.3}))
    assert ["dagger" in row[1] for row in parsed(text)[1:]] == [False, True, False]
    assert "p >= 0.05); rows without a test have none\n" in text and "over 2 to 4 seeds\n" in text


def test_rows_of_different_worlds_are_not_compared():
    rows = [{"method": str(k), ACCURACY: spread([value] * 3)} for k, value in enumerate((50.0, 60.0, 10.0, 20.0))]
    tests = PairedTests(
        ACCURACY,
        p_values([{"where": "w", "first": "c", "second": "d", "p (t, Holm)": 0.3}], ["a", "b", ("w", "c"), ("w", "d")]),
    )
    text = latex(rows, ["method"], ["accuracy"], worlds=["v", "v", "w", "w"], tests=tests)
    assert ["mathbf" in row[1] for row in parsed(text)[1:]] == [False, True, False, True]
    assert ["dagger" in row[1] for row in parsed(text)[1:]] == [False, False, True, False]
    assert "within each world" in text
    assert r"\mathbf" not in latex(rows[:1], ["method"], ["accuracy"], tests=NO_TESTS)


def test_intervals_and_infinities():
    wide = interval([1e308, -1e308, 1e308])
    text = latex([{"m": "a", "95% interval (t)": interval([1.0, 2.0]), "other": wide}], ["m"], [])
    assert parsed(text)[1][1] == "$[-4.8531, 7.8531]$" and "inf" not in text.replace(r"\infty", "")


def test_short_names():
    titles = ("accuracy, last (%)", "95% interval (t)", "relative to fedavg, x", "MB to 70 %", "energy (kJ)")
    assert list(map(short_name, titles)) == ["accuracy", "interval", "relative", "bytes", "energy"]
    assert short_name("stopped early") == "stopped_early"


def test_wrong_columns_are_refused_before_anything_is_written(tmp_path, capsys):
    for wrong, says in (
        ("time", "columns = 'time': must be a list of different names"),
        ([], "columns = .*: must be a list"),
        (["time", "time"], "must be a list of different names"),
        ([3], "must be a list of different names"),
        (["speed"], "columns = 'speed': must be among accuracy, interval, time, relative"),
    ):
        with pytest.raises(ValueError, match=says):
            write_comparison(RUNS, tmp_path / "new", plots=False, columns=wrong)
    with pytest.raises(ValueError, match="columns = 'acuracy': unknown; did you mean 'accuracy'"):
        require_columns(["acuracy"])
    words = ("compare", "fedasync", "--model", "logistic", "--out", str(tmp_path / "new"))
    assert "columns = 'tme': unknown; did you mean 'time'" in refused(capsys, *words, "--columns", "accuracy,tme")
    assert "must be different names" in refused(capsys, *words, "--columns", "time,time")
    assert not (tmp_path / "new").exists()


BASE = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6}


def test_the_settings_and_the_chosen_settings_of_a_sweep(tmp_path, engine):
    grid = {"method": {"A_1": "fedasync", "B": "asgd"}, "clients": [4, 5], "lr": [0.02, 0.1]}
    found = sweep(BASE, grid, seeds=3, progress=False)
    write_sweep(found, tmp_path, plots=False, columns=["accuracy", "staleness"], target=0.15)
    header, *body = parsed((tmp_path / "settings.tex").read_text())
    assert header == ["method", "clients", "lr", r"accuracy, mean of last tenth (\%)", "staleness"]
    assert [row[:2] for row in body[::2]] == [[r"A\_1", "4"], [r"A\_1", "5"], ["B", "4"], ["B", "5"]]
    header, *body = parsed((tmp_path / "best.tex").read_text())
    assert header[:3] == ["method", "clients", "lr"]
    assert [row[:3] for row in body] == [[name, n, "0.1"] for n in "45" for name in (r"A\_1", "B")]


def test_the_command_of_a_sweep_takes_columns(tmp_path, engine):
    file = tmp_path / "s.toml"
    file.write_text('base = {model = "logistic", clients = 4, steps = 1, updates = 6}\ngrid.lr = [0.02, 0.1]\n')
    words = ["sweep", str(file), "--out", str(tmp_path / "out"), "--no-plots", "--quiet", "--columns", "loss,accuracy"]
    assert cli.main(words) == 0
    header, *body = parsed((tmp_path / "out" / "settings.tex").read_text())
    assert header == ["lr", "loss, mean of last tenth", r"accuracy, mean of last tenth (\%)"]
    assert [r"\mathbf" in row[2] for row in body] == [False, True]


def test_the_distance_between_nodes_models_has_no_best(tmp_path):
    """The largest would be bold: as of all columns that are no losses, errors or costs."""
    runs = {name: [make_run()] for name in ("near", "far")}
    for distance, (run,) in zip((1.0, 2.0), runs.values()):
        run.evaluations.update(consensus=np.full(3, distance), lost_mass=np.full(3, distance))
    write_comparison(runs, tmp_path, plots=False, columns=["consensus", "lost_mass"])
    assert "mathbf" not in (tmp_path / "comparison.tex").read_text()
