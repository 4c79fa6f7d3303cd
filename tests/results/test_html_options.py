"""The HTML report with another final value, interval or target than the folders' own tables."""

from __future__ import annotations

import pytest

from fedjax_async import cli
from fedjax_async.results import write_report
from tests.results.page import columns, content_of, save_comparison, save_sweep, seeded

RUNS = {
    name: seeded([[0.1, 0.5, last + 0.01 * seed] for seed in range(3)], name)
    for name, last in (("asgd", 0.6), ("fedavg", 0.4))
}


def test_tables_are_made_anew_with_other_options(tmp_path):
    sweep_of, _ = save_sweep(tmp_path / "mixing")
    three = save_comparison(tmp_path / "three", RUNS)
    options = {"final": "best", "interval": "bootstrap", "target": 0.4}
    page = content_of(write_report([sweep_of, three], tmp_path / "page.html", **options))
    for source, title in zip(page["sources"], ("Best settings", "Methods"), strict=True):
        shown = columns(source["tables"][0])
        assert source["tables"][0]["title"] == title and "accuracy, best (%)" in shown
        assert any("interval (bootstrap)" in name for name in shown)
        assert not any("new" in note for note in source["notes"])
    assert "time to 40 % (s)" in columns(page["sources"][0]["tables"][1])
    assert set(columns(page["sources"][1]["tables"][0])["target (%)"]) == {40.0}
    assert "accuracy, mean of last tenth (%)" in (sweep_of / "settings.csv").read_text(), "the folder is left alone"
    for wrong, says in (
        ({"target": "95%"}, "target = '95%': must be an accuracy in \\(0, 1\\] for a sweep"),
        ({"final": "first"}, "final = 'first': must be last"),
        ({"interval": "normal"}, "interval = 'normal': must be one of t, bootstrap"),
    ):
        with pytest.raises(ValueError, match=says):
            write_report([sweep_of], tmp_path / "other.html", **wrong)
    alone = next(three.glob("runs/asgd/*"))
    with pytest.raises(ValueError, match=r"target = 0\.5: must be left out: only comparisons and sweeps"):
        write_report([alone], tmp_path / "other.html", target=0.5)
    assert not (tmp_path / "other.html").exists()


def test_the_command_takes_them(tmp_path):
    folder, _ = save_sweep(tmp_path / "mixing")
    flags = ("--final", "tail:2", "--interval", "bootstrap", "--target", "0.3")
    assert cli.main(("report", str(folder), *flags)) == 0
    shown = columns(content_of(folder / "report.html")["sources"][0]["tables"][0])
    assert {"accuracy, mean of last 2 (%)", "time to 30 % (s)"} <= set(shown)
