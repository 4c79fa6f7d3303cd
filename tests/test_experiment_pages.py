"""The pages of the experiments: numbers of tables are those of the CSV files named, sentences those of the runs."""

from __future__ import annotations

import csv
import re
from collections import Counter

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedjax_async.server import METHODS
from tests.experiment import EXPERIMENTS, comparing, module

pages = module("", "pages")


@pytest.mark.parametrize("paper", pages.PAGES)
def test_every_number_of_a_table_stands_in_its_csv(paper):
    checked, wrong = pages.numbers(paper)
    assert not wrong and checked > 100


def test_every_row_of_a_table_and_every_spread_is_one_of_its_csv():
    for found, least in ((pages.rows_of_csvs, 300), (pages.spreads, 120)):
        checked, wrong = found(pages.RENAMED)
        assert not wrong and checked > least


@pytest.mark.parametrize("paper", pages.LOOSE)
def test_every_number_of_a_cell_stands_in_a_row_of_its_csv(paper):
    checked, wrong = pages.loosely(paper)
    assert not wrong and checked >= {"benchmarks": 1500, "vector_fields": 120, "robustness": 77, "privacy": 49}[paper]


@pytest.mark.parametrize("paper", [*pages.PAGES, pages.RENAMED])
def test_every_file_that_a_page_names_exists_and_every_result_is_named(paper):
    """Curves of runs that no table has yet are named by the plan, on the experiments' front page."""
    text, plan = ((EXPERIMENTS / page).read_text(encoding="utf-8") for page in (f"{paper}/README.md", "README.md"))
    named = set(re.findall(r"\((results/[^)]+)\)", text))
    planned = set(re.findall(rf"\({paper}/(results/[^)]+)\)", plan))
    planned |= {name.replace("_curves.csv", "_clients.csv") for name in planned}  # if its script keeps clients
    kept = {path.relative_to(EXPERIMENTS / paper).as_posix() for path in (EXPERIMENTS / paper / "results").rglob("*.*")}
    assert named <= kept <= named | planned


@pytest.mark.parametrize("paper", ["orthofl", "asynfl", "asynccurve", "pushcen", "vector_fields"])
def test_a_page_says_how_to_repeat_each_of_its_tables(paper):
    """Hardware and JAX are those of the files; every table has a command, and reviewers' questions have answers."""
    text = (EXPERIMENTS / paper / "README.md").read_text(encoding="utf-8").partition("## To repeat it")[2]
    asked = ("Data", "Seeds", "Settings", "Environment", "Expected numbers", "Tolerance")
    assert re.findall(r"^- (.*?):", text, re.MULTILINE) == [*asked]
    found = set()
    for line in re.findall(r"^\| `.*", text, re.MULTILINE):
        command, files, _, _, hardware, jax, _ = pages.cells_of(line)
        names = pages.LINK.findall(files)
        assert (EXPERIMENTS / paper / command.strip("`").split()[0]).is_file() and names
        rows = pages.read(paper, names)
        known = {row["hardware"] for row in rows if row.get("hardware")}
        short = {each.replace("(R)", "").replace(" Processor", "").replace(" 80GB HBM3", "") for each in known}
        assert hardware == "; ".join(sorted(short)) and {jax} == {row["jax"] for row in rows if row.get("jax")}
        found |= set(names)
    tables = {f"results/{path.name}" for path in (EXPERIMENTS / paper / "results").glob("*.csv")}
    assert found == {name for name in tables if not name.endswith(("_curves.csv", "_clients.csv"))}


def test_the_end_after_250_epochs_fits_its_client():
    """A number with an exponent is not to be read without it."""
    rows = pages.read("asynccurve", ["results/figure_2_laptop.csv"])
    (row,) = (row for row in rows if (row["local epochs"], row["part"]) == ("250", "train"))
    text = " ".join((EXPERIMENTS / "asynccurve" / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"After 250 epochs the client's end has a loss of ([\d.]+) on its own data, .* at ([\d.]+):", text)
    assert f"{float(row['loss at end']):.5f}" == said[1] and f"{float(row['loss at start']):.2f}" == said[2]


# --- the numbered sentences of the comparison -----------------------------------------------------------

COMPARISON, LESSONS = (EXPERIMENTS / paper / "results" for paper in ("comparison", "lessons"))
BLOCKS = ("devices, logistic", "devices, mlp", "lognormal, logistic", "lognormal, mlp")


@pytest.fixture(scope="module")
def files():
    yield from comparing("lessons", "ablation", "bound", "learned")


@pytest.fixture(scope="module")
def committed(files):
    """The rows of the committed runs by block, the best first."""
    found = {}
    for row in files.summary.method_rows(files.kept.read(COMPARISON, "small")):
        found.setdefault(f"{row['world']}, {row['task']}", []).append(row)
    assert tuple(sorted(found)) == BLOCKS
    return found


@pytest.fixture(scope="module")
def score(committed):
    return {(block, row["method"]): row["score"].mean for block, rows in committed.items() for row in rows}


def in_rounds(row):
    return str(METHODS[row["method"]].timing).startswith("cohort")


def test_sentence_1_the_best_asynchronous_method_is_ahead_of_all_rounds(committed):
    """And not by chance of the seeds: more than both deviations."""
    for rows in committed.values():
        best, rounds = rows[0]["score"], next(row["score"] for row in rows if in_rounds(row))
        assert not in_rounds(rows[0]) and abs(best.mean - rounds.mean) > best.std + rounds.std


def test_sentences_2_to_4_asgd_is_among_the_first_orthofl_and_ace(committed, score):
    """Corrections of delays gain little; OrthoFL is good with plain SGD, ACE with ten clients and not a hundred."""
    places = sorted([row["method"] for row in rows].index("asgd") + 1 for rows in committed.values())
    assert places[2] <= 5
    for name in BLOCKS[1::2]:
        for method in ("dc_asgd", "dc_asgd_a", "delay_adaptive_asgd"):
            assert score[name, method] - score[name, "asgd"] < 0.5
        plain = [row["method"] for row in committed[name] if METHODS[row["method"]].optimizer == "sgd"]
        assert {"orthofl", "orthofl_released"} <= {*plain[:3]}
    assert committed["devices, logistic"][0]["method"] == "ace"
    assert score["lognormal, mlp", "asgd"] - score["lognormal, mlp", "ace"] > 10


def test_sentence_5_rounds_need_the_fewest_bytes_where_they_are_in_time(committed):
    fewest = {}
    for name, rows in committed.items():
        reached = [row for row in rows if not hasattr(row["sent to target (MB)"], "reached")]
        fewest[name] = min(reached, key=lambda row: row["sent to target (MB)"].mean)["method"]
        assert name != "lognormal, mlp" or not any(in_rounds(row) for row in reached)
    assert fewest.pop("lognormal, mlp") == "pisces" and {*fewest.values()} == {"fedavgm", "mifa"}


def test_what_is_committed_is_small_and_of_methods_that_exist(files):
    """Equal points of a method are one run."""
    found = files.kept.read(COMPARISON, "small")
    assert sum(path.stat().st_size for path in COMPARISON.glob("*.csv")) < 2_000_000
    assert {run.method for run in found.runs} <= {*METHODS}
    tried = Counter(row[:3] for row in found.tried)
    assert {*tried.values()} <= {3, 4}
    assert {run.seed for run in found.runs} == {0, 1, 2, 3} and len(found.runs) == 4 * len(tried)


# --- those of the lessons -------------------------------------------------------------------------------


def rows_of(name, folder=LESSONS):
    with (folder / f"small_{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def mean(cell):
    return float(cell.partition(" ± ")[0])


def p_of(row):
    return float(row["p (Holm)"].lstrip("<"))


@pytest.fixture(scope="module")
def pair():
    return {(row["without"], row["with"]): row for row in rows_of("pairs")}


@pytest.fixture(scope="module")
def part():
    return {row["part"]: row for row in rows_of("ablation")}


def test_the_tables_are_made_of_the_committed_runs(files):
    """And the descent begins at the runs of the comparison."""
    found = files.kept.read(LESSONS, "small_ablation")
    assert not found.refused and len(found.runs) == 4 * 5 * len(files.ablation.CONFIGURATIONS)
    assert {*Counter(row[:3] for row in found.tried).values()} == {8}
    of_machine = {"scale", "hardware", "jax"}
    for name, rows in (("ablation", files.ablation.part_rows), ("pairs", files.ablation.pair_rows)):
        known = [{k: v for k, v in row.items() if k not in of_machine} for row in rows_of(name)]
        assert [{k: str(v) for k, v in row.items()} for row in rows(found.runs)] == known
    unseen = files.kept.read(LESSONS, "small_unseen")
    runs = files.learned.with_best(unseen)
    (row,) = files.effects.rows(runs, {"best tuned": [("best tuned", "learned, frozen")]}, "frozen against")
    assert row["effect"] == rows_of("learned")[0]["effect"] and {run.seed for run in unseen.runs} == {*range(5)}
    asgd = [run for run in files.kept.read(files.bound.COMMITTED, "small").runs if run.method == "asgd"]
    finals = {(*run[:2], run.seed): files.summary.final(run.scores) for run in asgd}
    begun = [row for row in rows_of("bound") if row["weights"] == files.bound.START]
    assert len(begun) == 12
    for row in begun:
        unit, off = (1, 0.01) if row["task"] == "logistic" else (100, 0.1)
        found = finals[row["world"], row["task"], int(row["seed"])] * unit
        assert float(row["score"]) == pytest.approx(found, abs=off)


def test_sentence_1_scaffold_is_the_part_that_matters(part, pair):
    good = [name for name, row in part.items() if p_of(row) < 0.05 and mean(row["effect"]) > 0]
    row = part["SCAFFOLD"]
    assert good == ["SCAFFOLD"] and row["blocks better"] == "2" and mean(row["effect"]) == 0.71
    for base in ("arrivals", "buffer"):
        row = pair[base, f"{base}, scaffold"]
        assert all(0.3 <= mean(row[block]) <= 0.65 for block in BLOCKS[::2])
        assert 1.75 <= mean(row["lognormal, mlp"]) < 2.55
        assert round(p_of(row), 2) == (0.08 if base == "arrivals" else 0.0)
    ranks = [row["configuration"] for row in rows_of("configurations")]
    assert {*ranks[:2]} == {"arrivals, scaffold", "buffer, scaffold"}
    order = [row["method"] for row in rows_of("ranks", COMPARISON)]
    assert order.index("scaffold") > len(order) / 2


def test_sentence_2_a_memory_that_corrects_and_one_that_replaces(pair):
    for base in ("arrivals", "buffer"):
        assert 0.4 <= mean(pair[base, f"{base}, memory"]["devices, logistic"]) <= 0.55
    assert all(p_of(pair[base, f"{base}, memory"]) < 0.05 for base in ("buffer", "rounds"))
    row = pair["arrivals", "arrivals, last deltas"]
    assert mean(row["devices, logistic"]) > 0.5
    assert (mean(row["lognormal, logistic"]), mean(row["lognormal, mlp"])) == (-0.41, -3.32)


def test_sentence_3_staleness_weights_cost_something(part, pair):
    assert mean(part["staleness weights"]["effect"]) == -0.31 and p_of(part["staleness weights"]) < 0.05
    assert all(row["blocks better"] == "0" for row in pair.values() if row["part"] == "staleness weights")
    found = []
    for row in rows_of("bound"):
        if row["world"] == "devices" and row["weights"] == "by staleness":
            table = [(k, float(value)) for k, value in enumerate(row["values"].split()) if value != "-"]
            found.append(float(spearmanr(*zip(*table, strict=True))[0]))
    assert len(found) == 6 and [round(end, 2) for end in (min(found), max(found))] == [0.06, 0.75]


def test_sentence_4_parts_without_an_effect(part, pair):
    for name in ("buffer of five", "delay correction", "Oort", "power of choice", "Adam at the server"):
        assert p_of(part[name]) > 0.05
    orthogonal, oort = pair["buffer", "buffer, orthogonal"], part["Oort"]
    assert p_of(orthogonal) < 0.05 and mean(orthogonal["effect"]) < 0
    assert all(round(mean(oort[block]), 1) in (1.4, 1.5) for block in BLOCKS[1::2])
    assert (oort["blocks better"], oort["blocks worse"]) == ("1", "1")


def test_sentence_5_rates_come_before_weights(files):
    score = {(row["world"], row["task"], row["weights"]): float(row["score"]) for row in rows_of("families")}
    start = files.bound.START
    ends = [score["devices", "mlp", name] for name in (start, *files.bound.FAMILIES)]
    np.testing.assert_allclose([*np.diff(ends), ends[-1] - ends[0]], [1.6, 2.2, 1.8, 5.6], atol=0.05)
    gains = [score["lognormal", task, "by staleness"] - score["lognormal", task, start] for task in files.bound.TASKS]
    np.testing.assert_allclose(gains, [-0.1, 0.5], atol=0.05)


def test_sentence_6_rules_that_change_the_delta_are_ahead_of_weights():
    behind = {row["method"]: row for row in rows_of("distances")}
    released = behind["orthofl_released"]
    assert [mean(released[f"{block}, by staleness"]) for block in BLOCKS[1::2]] == [-0.68, -2.01]
    ahead = [name for name, row in behind.items() if mean(row["devices, logistic, by staleness"]) < 0]
    assert ahead == ["ace"]


def test_sentence_7_the_learned_rule_does_not_win():
    best, tuned, asgd, *_ = rows_of("learned")
    against = [row["frozen against"] for row in (best, tuned, asgd)]
    assert against == ["best tuned", "learned, rates tuned", "asgd"] and "learned" not in METHODS
    assert p_of(best) < 0.05 and best["blocks worse"] == "4" and p_of(asgd) < 0.05 and mean(asgd["effect"]) < 0
    places = [name for name in best if name.startswith(("devices", "sessions"))]
    assert all(-12 < mean(best[place]) < -3.5 for place in places) and mean(tuned["devices, motion"]) == -9.87
    rows = {row["configuration"]: row for row in rows_of("unseen")}
    own, other = (rows[name] for name in ("learned, rates tuned", "asgd"))
    assert all(abs(float(own[place]) - float(other[place])) < float(other[f"{place} std"]) for place in places)
