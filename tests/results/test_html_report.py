"""The HTML report: its numbers are those of tables and files, its text is escaped, it says what it leaves out."""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from fedjax_async import cli
from fedjax_async.clock import Outcome
from fedjax_async.results import figure, html_figures, html_report, metrics, redraw, spread, store, write_report
from fedjax_async.results.html_folders import read, table, table_of
from fedjax_async.results.measured import curve_columns
from fedjax_async.types import Run
from tests.results.folders import rows as read_rows
from tests.results.made_up import make_run, make_schedule
from tests.results.page import NASTY, array, columns, content, content_of, save_comparison, save_sweep, seeded, traces
from tests.told import refusal

UNEQUAL = [[0.0, 3.0, 6.0], [0.0, 3.1, 11.0], [0.0, 5.0, 12.0]]
SCORES = [[0.1, 0.4, 0.7], [0.1, 0.6, 0.5], [0.1, 0.3, 0.65]]


def counted(runs: list[Run], **counters: object) -> list[Run]:
    """The same runs; the first one has these counters too."""
    return [runs[0]._replace(counters=runs[0].counters | counters), *runs[1:]]


LOST = [[math.nan] * 3] * 2
COMPARISONS = {
    "one seed": ({"fedavg": seeded(SCORES[:1]), "fedasync": seeded(SCORES[1:2], "fedasync")}, {}),
    "three seeds": ({"fedavg": seeded(SCORES), "fedbuff@every": seeded(SCORES[::-1], "fedbuff@every")}, {}),
    "unequal times, another baseline, a missed target, rejected uploads and no clients left": (
        {
            "fedavg": counted(seeded(SCORES, times=UNEQUAL), ended_early="ended after 11 of 99 updates"),
            "a": counted(seeded(SCORES, "a"), updates=3, rejected=3),
        },
        {"target": 0.66, "baseline": "a"},
    ),
    "no classes": ({"fedavg": seeded(LOST), "fedasync": seeded(LOST, "fedasync")}, {}),
}


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charts of single runs and the curves against every axis take most of the time of a page."""
    monkeypatch.setattr(html_report, "MOST_DETAILS", 2)
    monkeypatch.setattr(html_report, "AXES", ("time", "bytes"))


def number(text: str) -> float | str | None:
    """A CSV cell as in the JSON of the page."""
    try:
        return None if text == "" or math.isnan(float(text)) else float(text)
    except ValueError:
        return text


def check_table(shown: dict[str, object], path: Path) -> None:
    """A table of the page has all numbers and strings of the CSV file."""
    found = columns(shown)
    rows = read_rows(path)
    assert list(found) and sorted(found) == sorted(rows[0])
    for name, cells in found.items():
        assert cells == [number(row[name]) for row in rows], name


def check_curves(page: dict, groups: dict[str, list[Path]]) -> None:
    """Curves have the numbers of evaluations.csv and of ``mean_curve``; ``groups``: name -> folder of each seed."""
    loaded = {folder: store.load(folder) for folder in chain(*groups.values())}
    tables = {folder: read_rows(folder / "evaluations.csv") for folder in loaded}
    for metric, figures in page["curves"]["figures"].items():
        factor = 100.0 if metric == "accuracy" else 1.0
        for unit in figures:
            means, seeds = traces(page, metric, unit, "mean"), iter(traces(page, metric, unit, "seed"))
            assert [each["name"] for each in means] == list(groups)
            for mean, folders in zip(means, groups.values(), strict=True):
                runs = [loaded[folder] for folder in folders]
                curve = metrics.mean_curve(runs, unit, metric, factor, metrics.FINAL if len(runs) > 1 else "last")
                assert mean["line"]["shape"] == ("hv" if curve.steps else "linear")
                size, _ = figure.axis(unit, curve.at[-1])
                for part, values in (("x", curve.at / size), ("y", curve.mean), ("customdata", curve.std)):
                    np.testing.assert_array_equal(array(mean[part]), values)
                for folder in folders if len(folders) > 1 else []:
                    seed = next(seeds)
                    shown = np.array([float(row[metric]) for row in tables[folder]], np.float32).astype(np.float64)
                    np.testing.assert_array_equal(array(seed["y"]), factor * shown)
                    if unit != "bytes":
                        at = [float(row[unit]) for row in tables[folder]]
                        np.testing.assert_array_equal(array(seed["x"]) * size, at)
            assert next(seeds, None) is None


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_has_the_numbers_of_its_files(name, tmp_path, monkeypatch):
    if name == "three seeds":
        monkeypatch.setattr(html_report, "AXES", figure.AXES)
    runs, options = COMPARISONS[name]
    folder = save_comparison(tmp_path / "three", runs, **options)
    page = content(folder)
    (source,) = page["sources"]
    assert (source["kind"], source["notes"]) == ("comparison", [])
    note = source["tables"][0]["note"]
    assert note.startswith("Times are to the accuracy in the column target (%).") == (name != "no classes")
    check_table(source["tables"][0], folder / "comparison.csv")
    assert len(source["tables"]) == 1 + (len(runs["fedavg"]) > 2)
    for shown in source["tables"][1:]:
        check_table(shown, folder / "pairs.csv")
    paths = {m: [folder / "runs" / m.replace("@", "_") / f"seed_{k}" for k in range(len(runs[m]))] for m in runs}
    check_curves(page, paths)
    assert list(page["curves"]["figures"]) == (["loss"] if name == "no classes" else ["accuracy", "loss"])
    shown = columns(page["runs"])
    assert shown["method"] == [m for m in runs for _ in runs[m]]
    assert shown["seed"] == [run.settings["seed"] for seeds in runs.values() for run in seeds]


def test_a_sweep_has_the_numbers_of_its_files(tmp_path):
    folder, points = save_sweep(tmp_path / "mixing", target=0.4)
    page = content(folder)
    (source,) = page["sources"]
    assert [each["title"] for each in source["tables"]] == ["Best settings", "Settings"]
    check_table(source["tables"][0], folder / "best.csv")
    check_table(source["tables"][1], folder / "settings.csv")
    assert any(note.startswith("WARNING: the test set chose") for note in source["notes"])
    shown = columns(page["runs"])
    rows = {row["run"]: row for row in read_rows(folder / "runs.csv")}
    assert set(rows[points[0].name]) <= set(shown) and "time_to_target" in shown
    assert sorted(shown["run"]) == sorted(rows)
    for name, cells in shown.items():
        if name != "setting":
            assert cells == [number(rows[run][name]) for run in shown["run"]], name
    assert shown["setting"][0] == "mixing=0.9"  # the best first
    best = {name: [folder / "runs" / p.name for p in points if p.values["method.mixing"] == v]
            for name, v in (("mixing=0.9", 0.9), ("mixing=0.2", 0.2))}  # fmt: skip
    check_curves(page, best)
    assert set(columns(source["differing"])) == {"run", "method", "seed"}


def test_a_sweep_that_is_not_finished(tmp_path):
    folder, points = save_sweep(tmp_path / "mixing", finished=3)
    source = read(folder)
    assert "1 of 4 runs are not finished and left out." in source.notes
    names = sorted(member.name for members in source.groups.values() for member in members)
    assert names == sorted(point.name for point in points[:3])
    (folder / "settings.csv").unlink()
    (folder / "runs.csv").write_text("run,bytes_up\nother,3\n")
    source = read(folder)
    assert any("these are new" in note for note in source.notes)
    assert len(source.tables[0]["rows"]) == 2


def test_tables_of_other_runs_are_not_shown_and_runs_that_are_not_in_the_table_are_named(tmp_path):
    runs = COMPARISONS["three seeds"][0]
    folder = save_comparison(tmp_path, runs)
    saved = (folder / "comparison.csv").read_text()
    for other in (saved.replace("fedavg,", "fedavg,1"), ""):
        (folder / "comparison.csv").write_text(other)
        source = read(folder)
        assert source.notes == ["comparison.csv is missing or of other runs: this table is new."]
        assert sorted(map(str, columns(source.tables[0])["method"])) == sorted(runs)
    (folder / "comparison.csv").write_text(saved)
    store.save(seeded(SCORES[:1], "krum")[0], folder / "runs" / "krum" / "seed_0")
    assert read(folder).notes == ["comparison.csv does not list these finished runs: krum."]
    (folder / "comparison.csv").unlink()
    assert read(folder).notes == ["The methods have different finished seeds, so no table compares them."]


def test_of_a_folder_of_results_all_that_are_inside_are_shown(tmp_path):
    top = tmp_path / "runs"
    one, other = top / "a" / "one", top / "deep" / "er" / "one"
    store.save(make_run(), one)
    store.save(make_run([0.1, 0.9]), other)
    save_comparison(top / "three", {"fedavg": seeded(SCORES[:1]), "asgd": seeded(SCORES[:1], "asgd")})
    save_sweep(top / "mixing")
    (top / "unfinished" / "checkpoints").mkdir(parents=True)
    (top / "planned").mkdir()
    (top / "planned" / "sweep.json").write_text("{}")
    page = content(top, one)  # what is found twice is shown once
    assert (page["title"], page["about"]) == ("runs, one", "8 runs in 4 folders")
    kinds = {source["name"]: source["kind"] for source in page["sources"]}
    assert kinds == {str(one): "run", str(other): "run", "mixing": "sweep", "three": "comparison"}
    folders = [str(one), str(other), *["mixing"] * 4, *["three"] * 2]  # equal last names: the whole path
    assert columns(page["runs"])["folder"] == folders
    names = [each["name"] for each in traces(page, "accuracy", "time", "mean")]
    assert names[1:3] == [f"{other}: fedasync:mixing=0.6", "mixing: mixing=0.9"]
    assert len(page["details"]["runs"]) == 2 and page["details"]["note"] == "2 of 8 runs, the first seeds first."
    assert "must hold a finished run, comparison or sweep, or folders with some" in refusal(content, top / "unfinished")


def bars_of(run: Run, most: int = 99) -> dict[str, dict]:
    """Name -> the bars of a run's Gantt chart."""
    shown = html_figures.schedule(run, most).figure["data"]
    return {each["name"]: each for each in shown if each["type"] == "bar"}


def test_a_gantt_chart_has_every_job_with_its_outcome_and_staleness():
    run = make_run()
    outcome = run.schedule.outcome.copy()
    outcome[outcome == Outcome.UNDER_WAY] = Outcome.CRASHED
    run = run._replace(schedule=run.schedule._replace(outcome=outcome))
    schedule, bars = run.schedule, bars_of(run)
    rejected = schedule.job[~run.updates["accepted"]]
    applied = np.setdiff1d(schedule.job, rejected)
    crashed = np.flatnonzero(outcome == Outcome.CRASHED)
    assert set(bars) == {"applied", "rejected", "crashed"}
    for name, jobs in (("applied", applied), ("rejected", rejected), ("crashed", crashed)):
        np.testing.assert_array_equal(array(bars[name]["base"]), schedule.dispatch_time[jobs])
        np.testing.assert_array_equal(array(bars[name]["y"]).round(), schedule.client[jobs])
        about = [schedule.client[jobs], schedule.dispatch_time[jobs], schedule.upload_time[jobs]]
        np.testing.assert_array_equal(array(bars[name]["customdata"])[:, [0, 4, 5]], np.transpose(about))
    staleness = dict(zip(schedule.job.tolist(), schedule.staleness.tolist(), strict=True))
    assert list(array(bars["applied"]["customdata"])[:, 7]) == [staleness[job] for job in applied]
    assert len(set(bars["applied"]["marker"]["color"])) == len({staleness[job] for job in applied})
    shown = html_figures.schedule(run, 99)
    steps = next(each for each in shown.figure["data"] if each["name"] == "server steps")
    np.testing.assert_allclose(array(steps["x"])[::3], np.unique(schedule.time[schedule.closes]))
    axis = shown.figure["layout"]["yaxis"]
    assert shown.note == "" and steps["visible"] == "legendonly"
    assert axis["ticktext"] == ["0", "1", "2"] and axis["range"][0] > axis["range"][1]


def test_jobs_that_never_upload_end_when_they_are_given_up_or_at_the_end():
    run = make_run()
    upload, freed = run.schedule.upload_time.copy(), run.schedule.freed_time.copy()
    upload[:2], freed[:2] = np.inf, (0.5, np.inf)
    run = run._replace(schedule=run.schedule._replace(upload_time=upload, freed_time=freed))
    ends = np.concatenate([array(bars["customdata"])[:, 5] for bars in bars_of(run).values()])
    assert np.isfinite(ends).all() and 0.5 in ends and 12.0 in ends


def test_long_schedules_many_clients_seeds_and_rows_are_cut_and_a_note_says_so():
    schedule = make_schedule(num_clients=60, jobs=10)
    run = make_run()._replace(schedule=schedule, updates={"accepted": np.ones(len(schedule.job), bool)})
    assert 40 <= sum(len(array(each["base"])) for each in bars_of(run, 50).values()) <= 50
    note = html_figures.schedule(run, 50).note
    assert re.fullmatch(r"40 of 60 clients, the first [\d.]+ of 600 seconds", note)
    run = make_run()
    counts = html_figures.clients(run._replace(schedule=run.schedule._replace(num_clients=1000)))[0]
    y = array(counts.figure["data"][0]["y"])
    assert len(y) == 400 and y[-1] == np.bincount(run.updates["client"][run.updates["accepted"]]).max()
    assert counts.note == "400 of 1,000 clients, evenly spread."
    runs = {"a": seeded([[0.1, 0.5]] * 5), "b": seeded([[0.1, 0.5]] * 5)}
    lines = [each["meta"] for each in html_figures.curves(runs, "time", "accuracy", 20, 3)["data"]]
    assert [meta["seed"] for meta in lines if meta["part"] == "seed"] == ["0", "1", "2"] * 2
    shown = table("t", "a\n" + "1\n" * 1500)
    assert (len(shown["rows"]), shown["note"]) == (1000, "The first 1,000 of 1,500 rows.")


def test_clients_with_and_without_scores(tmp_path):
    spread = {f"client_accuracy{ending}": np.full(3, 0.5) for ending in ("", "_std", "_worst")}
    scores = {"accuracy": np.float32([[0.1, 0.2, 0.3], [0, 0, 0], [0.75, np.nan, 0.25]])}
    run = make_run()._replace(per_client={})
    with_scores = run._replace(per_client=scores, evaluations=run.evaluations | spread)
    details = content(store.save(with_scores, tmp_path / "with"), store.save(run, tmp_path / "without"))["details"]
    assert details["note"] == ""
    for shown, count in zip(details["runs"], (4, 3), strict=True):
        titles = [each["title"] for each in shown["figures"]]
        assert titles[0] == "Schedule" and titles[-2] == "updates per client" and titles[-1].startswith("staleness")
        assert (len(titles), len(shown["notes"])) == (count, 1)
    accuracy, counts, staleness = html_figures.clients(with_scores)
    (line,) = accuracy.figure["data"]
    assert array(line["y"]).tolist() == [25.0, 75.0] and list(array(line["hovertext"])) == ["2", "0"]
    updates, found = with_scores.updates, np.zeros(3)
    for each in counts.figure["data"]:
        found[array(each["hovertext"]).astype(int)] += array(each["y"])
    np.testing.assert_array_equal(found, np.bincount(updates["client"]))
    assert array(counts.figure["data"][1]["y"]).sum() == np.sum(~updates["accepted"]) == 1
    shares = array(staleness.figure["data"][0]["customdata"])[:, 2]
    np.testing.assert_allclose(shares, 100 * np.bincount(updates["staleness"]) / len(updates["client"]))


def test_a_run_without_any_update_or_with_nothing_but_rejected_ones(tmp_path):
    run, schedule = make_run(), make_schedule(jobs=1)
    rejected = run._replace(updates=run.updates | {"accepted": np.zeros(len(run.schedule.job), bool)})
    kept = {name: getattr(schedule, name)[:0] for name in ("job", "time", "closes", "step")}
    outcome = np.full(len(schedule.client), Outcome.UNDER_WAY, np.int8)
    scores = run.evaluations | dict.fromkeys(("accuracy", "loss"), np.full(3, np.nan, np.float32))
    empty = run._replace(
        updates={name: column[:0] for name, column in run.updates.items()},
        schedule=schedule._replace(**kept, outcome=outcome),
        evaluations=scores,
    )
    page = content(store.save(rejected, tmp_path / "rejected"), store.save(empty, tmp_path / "empty"))
    for shown, bars in zip(page["details"]["runs"], (["rejected", "under way"], ["under way"]), strict=True):
        gantt = shown["figures"][0]["figure"]["data"]
        assert [each["name"] for each in gantt if each["type"] == "bar"] == bars
    assert shown["figures"][-1]["title"] == "updates per client"


def test_nothing_in_names_and_settings_becomes_html_and_the_page_loads_nothing(tmp_path):
    run = make_run(method=NASTY)
    folder = store.save(run._replace(settings=run.settings | {NASTY: NASTY, "list": [NASTY]}), tmp_path / "nasty")
    path, again = (write_report([folder], tmp_path / name) for name in ("a.html", "b.html"))
    text, page = path.read_text(encoding="utf-8"), content_of(path)
    assert again.read_bytes() == path.read_bytes() and page == content(folder)
    assert "<img" not in text[: text.index("plotly.js v")] and "onerror" in text
    assert text.count("</script>") == 3 and "\u2028" not in text[: text.index("plotly.js v")]
    assert columns(page["runs"])["method"] == [NASTY]  # the script writes it with textContent
    assert NASTY in page["sources"][0]["common"]
    for shown in chain(*(figures.values() for figures in page["curves"]["figures"].values())):
        for each in shown["data"]:  # plotly interprets tags in names
            assert "<" not in each["name"] and "img" not in (each.get("hovertemplate") or "")
    script = text[text.rindex("<script>") :]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    own = html_report.PAGE.read_text()
    assert "default-src 'none'" in own and not re.search(r"https?://|src=|href=", own)


@pytest.mark.slow
def test_a_large_comparison_stays_below_10_mb(tmp_path, monkeypatch):
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    schedule = make_schedule(num_clients=40, jobs=50)
    job = schedule.job
    updates = {"client": schedule.client[job], "staleness": schedule.staleness, "accepted": np.ones(len(job), bool)}
    times = [np.linspace(0.0, 1e3, 400)] * 4
    runs = {}
    for name in (f"fedasync:mixing={method}" for method in range(30)):
        made = seeded(rng.uniform(0.1, 0.9, (4, 400)).tolist(), name, times)
        runs[name] = [each._replace(schedule=schedule, updates=updates) for each in made]
    path = write_report([save_comparison(tmp_path / "large", runs)], tmp_path / "page.html")
    page = content_of(path)
    assert path.stat().st_size < 10e6
    assert page["details"]["note"] == "24 of 120 runs, the first seeds first."
    assert page["curves"]["notes"][0] == "Curves: the first 28 of 30 of large."
    assert page["curves"]["notes"][1].startswith("Long curves: ")
    finals = columns(page["sources"][0]["tables"][0])["accuracy, mean of last tenth (%)"]
    assert all(array(mean["y"])[-1] in finals for mean in traces(page, "accuracy", "time", "mean")[:2])


def test_cells_of_a_csv_file():
    header = "name,x,x std,y,y std,y reached,ends low,ends high,lr\n"
    shown = table("t", header + "a,1.5,0.25,nan,nan,2,0.5,1.25,0.001\n" + "1,nan,,3.0,1.0,,,,\n")
    assert [column["name"] for column in shown["columns"]] == ["name", "x", "y", "ends", "lr"]
    first, second = shown["rows"]
    assert [cell[0] for cell in first] == ["a", "1.50 ± 0.25", "2 reached", "[0.50, 1.25]", "0.001"]
    assert [cell[0] for cell in second] == ["1", "-", "3.00 ± 1.00", "-", "-"]
    costs = {"time to target (s)": spread([0.04, 0.05]), "sent (MB)": spread([0.0004, 0.0004])}
    assert [cell[0] for cell in table_of("", [costs])["rows"][0]] == ["0.045 ± 0.007", "0.00040 ± 0.00000"]
    assert first[2] == ["2 reached", None, None, 2]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(html_report, "content", lambda folders: {})
    for name in ("one", "two"):
        store.save(make_run(), tmp_path / name)
    for words in (["one"], ["one", "two"], ["one", "two", "--out", "new/both.html"]):
        assert cli.main(["report", *words]) == 0
    found = {str(path) for path in Path().rglob("*.html")}
    assert found == {"one/report.html", "report.html", "new/both.html"}
    assert "written: new/both.html" in capsys.readouterr().out
    assert store.require_room("one", store.load("one").settings)  # the page does not change what the folder is


def test_validation_scores_are_in_table_picture_and_page(tmp_path):
    held_out = {"validation_accuracy": np.array([0.1, 0.3, 0.6]), "validation_loss": np.array([3.0, 2.0, 1.0])}
    runs = {
        name: [run._replace(evaluations=run.evaluations | held_out) for run in seeded(SCORES, name)]
        for name in ("fedavg", "fedasync")
    }
    folder = save_comparison(tmp_path / "three", runs)
    rows = read_rows(folder / "comparison.csv")
    found = [float(row["validation accuracy, mean of last tenth (%)"]) for row in rows]
    assert found == pytest.approx([60.0, 60.0]) and "validation loss" not in ",".join(rows[0])
    assert curve_columns(runs, "accuracy") == {"validation_accuracy": ["fedavg", "fedasync"]}
    page = content(folder)
    assert [array(each["y"])[-1] for each in traces(page, "validation_accuracy", "time", "mean")] == found


def test_tables_that_were_made_again_with_other_options_are_shown(tmp_path):
    differ = {
        name: seeded([[0.1, 0.5, last + 0.01 * seed] for seed in range(3)], name)
        for name, last in (("asgd", 0.6), ("fedavg", 0.4))
    }
    folders = save_sweep(tmp_path / "mixing")[0], save_comparison(tmp_path / "three", differ)
    for folder in folders:
        redraw(folder, plots=False, final="best", target=0.4)
    sources = [read(folder) for folder in folders]
    for source, title in zip(sources, ("Best settings", "Methods"), strict=True):
        shown = columns(source.tables[0])
        assert source.tables[0]["title"] == title and "accuracy, best (%)" in shown
        assert not any("new" in note for note in source.notes)
    assert "time to 40 % (s)" in columns(sources[0].tables[1])
    assert set(columns(sources[1].tables[0])["target (%)"]) == {40.0}
