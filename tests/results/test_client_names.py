"""Names of clients reach tables, pictures and pages as plain text, also from a saved folder; numbers stay."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedjax_async import data, simulate
from fedjax_async.data import Dataset, federate, open_folder, write_folder
from fedjax_async.data.looks import DataWarning
from fedjax_async.results import explaining, load, plots, save, write_comparison
from fedjax_async.results.client_names import LONGEST, label, with_names
from fedjax_async.results.clients import MOST_NAMED, worst_rows, write_clients_of_run
from fedjax_async.results.html_figures import clients, schedule
from fedjax_async.results.swings import swings
from tests.refusals import refusals
from tests.results.folders import contents, rows
from tests.results.made_up import make_run

HOSTILE = ("<b>North</b>|shop", "007", "A $clinic$ with a *long*\nname of several words")
SHORT = ["<b>North</b>|shop", "007 (1)", "A $clinic$ with a *… (2)"]
X, Y = np.zeros((6, 2), np.float32), np.arange(6, dtype=np.int32) % 2
OWNERS = np.int32([2, 0, 0, 2, 3, 3])  # nobody has number 1
OWNED = Dataset("own", X, Y, X, Y, groups=OWNERS, group_names=("a", "b", "c", "d"))


def named_run():
    spread = {f"client_accuracy{ending}": np.full(3, 0.5) for ending in ("", "_std", "_worst")}
    scores = {"accuracy": np.float32([[0.5, 0.25, 0.75]] * 3)}
    run = make_run()
    return run._replace(client_names=HOSTILE, per_client=scores, evaluations=run.evaluations | spread)


def test_a_csv_column_names_the_clients_of_a_run_and_of_its_folder(tmp_path):
    shops = [("007", "Ost", "7")[k % 3] for k in range(36)]
    lines = [f"{shop},{k % 5}.5,{k % 3},{'train' if k % 4 else 'test'}" for k, shop in enumerate(shops)]
    (tmp_path / "v.csv").write_text("\n".join(["shop,x,kind,part", *lines]))
    dataset = f"csv:path={tmp_path / 'v.csv'},x=x,y=kind,client=shop,split=part"
    options = {"model": "logistic", "clients": 3, "updates": 2, "steps": 1, "per_client": True, "engine": "reference"}
    run = simulate(dataset=dataset, out=tmp_path / "run", plots=False, **options)
    assert run.client_names == load(tmp_path / "run").client_names == ("Ost", "7", "007")  # by their first training row
    table = rows(tmp_path / "run" / "clients.csv")
    assert [(row["client"], row["client_name"]) for row in table] == [("0", "Ost"), ("1", "7"), ("2", "007")]
    with pytest.warns(DataWarning, match="its 3 owners are dealt to 2 clients"):
        assert federate(data.load(dataset), "natural", 2).client_names is None  # two owners share a client


def test_only_natural_clients_with_one_owner_have_its_name():
    assert federate(OWNED, "natural").client_names == ("a", "c", "d")
    assert federate(OWNED, "natural", test_fraction=0.5).client_names == ("a", "c", "d")
    with pytest.warns(DataWarning, match="its 3 owners are dealt to 2 clients"):
        assert federate(OWNED, "natural", 2).client_names is None
    assert federate(OWNED, "iid", 3).client_names is None
    numbers = OWNED._replace(group_names=("0", "-", "1", "2"))
    assert federate(numbers, "natural").client_names is None  # they say no more than the clients' numbers


def test_a_folder_of_clients_keeps_their_names(tmp_path):
    kept = write_folder(tmp_path / "all", federate(OWNED, "natural"))
    assert open_folder(kept).client_names == ["a", "c", "d"]
    assert data.load(f"folder:path={kept}").deal(2, 0).client_names == ["a", "c"]
    path = write_folder(tmp_path / "none", federate(OWNED, "iid", 2))
    assert "client_names" not in json.loads((path / "metadata.json").read_text())


test_wrong_owners_and_names_are_refused = refusals(
    ({"group_names": ("a",)}, "group_names = '1 names': must be at least 4"),
    ({"group_names": ("a", "b", "c", "\ud800")}, "UTF-8"),
    ({"groups": OWNED.groups - 1}, "^own.groups, smallest = -1: must be at least 0, an index of group_names"),
    (
        {"groups": np.array([0, np.nan, np.nan, 1, 1, 0]), "group_names": None},
        r"^own.groups\[1\] = 'nan': must be an owner",
    ),
    by=lambda changes: federate(OWNED._replace(**changes), "natural"),
)


def test_a_run_without_names_has_the_same_files_as_ever(tmp_path):
    updates = make_run().updates
    for run in (make_run()._replace(client_names=None), named_run(), make_run()):
        folder = save(run, tmp_path, overwrite=True)
        assert load(folder).client_names == run.client_names
        assert ("client_names.json" in contents(folder)) == (run.client_names is not None)
        assert list(load(folder).updates) == list(updates)
        if run.client_names is not None:
            shown = [" ".join(HOSTILE[client].split()) for client in updates["client"]]
            assert [row["client_name"] for row in rows(folder / "updates.csv")] == shown
    assert list(with_names(make_run(), updates)) == list(updates)
    found = with_names(named_run(), updates)
    assert list(found)[:3] == ["client", "client_name", "job"]
    assert found["client_name"].tolist() == [HOSTILE[client] for client in updates["client"]]


def test_tables_of_clients_have_names_that_are_no_markup(tmp_path):
    write_clients_of_run(named_run(), tmp_path)
    assert [row["client_name"] for row in rows(tmp_path / "clients.csv")] == list(HOSTILE)
    cells = [line.split(" | ")[:2] for line in (tmp_path / "clients.md").read_text().splitlines()[-3:]]
    assert [[cell.strip("| ") for cell in line] for line in cells] == [
        ["1", "007"],
        ["0", r"&lt;b&gt;North&lt;/b&gt;\|shop"],
        ["2", r"A \$clinic\$ with a \*long\* name of several words"],
    ]
    write_clients_of_run(named_run()._replace(client_names=("a\rb", "c", "d")), tmp_path)
    assert [row["client_name"] for row in rows(tmp_path / "clients.csv")] == ["a\rb", "c", "d"]


def scored(*scores, **changes):
    """A run with the accuracies of its clients at each evaluation."""
    return named_run()._replace(per_client={"accuracy": np.float32(scores)}, **changes)


def test_the_worst_clients_come_first_and_one_without_tests_last():
    lost = scored([0.5, 0.4, np.nan], [0.6, np.nan, np.nan])  # the second diverges, the third has no tests
    assert [row["client"] for row in worst_rows({"a": [lost]})] == [1, 0, 2]
    many = scored(np.arange(99.0)[::-1], client_names=[f"c{i}" for i in range(99)])
    assert [row["client"] for row in worst_rows({"a": [many]})] == list(range(98, 98 - MOST_NAMED, -1))
    others = scored([0.5, 0.4, 0.3], client_names=HOSTILE[::-1])  # other clients have these numbers
    assert worst_rows({"a": [lost], "b": [others]}) == []


def test_a_comparison_names_its_clients_too(tmp_path):
    """Means over two seeds: with method b client 2 is the worst, on average over the methods client 0."""
    runs = {
        "a": [scored([0.1, 0.5, 0.9]), scored([0.3, 0.5, 0.9])],
        "b": [scored([0.4, 0.9, 0.3]), scored([0.4, 0.9, 0.3])],
        "lost": [scored([0.4, 0.9, 0.3], [0.4, np.nan, 0.3])] * 2,
    }
    write_comparison(runs, tmp_path, plots=False)
    names = [" ".join(name.split()) for name in HOSTILE]
    worst = [f"client {client} ({names[client]})" for client in (0, 2, 1)]
    assert [row["worst client"] for row in rows(tmp_path / "clients.csv")] == worst
    del runs["lost"]
    found = worst_rows(runs)
    assert [row["client"] for row in found] == [0, 2, 1]
    np.testing.assert_allclose([row["a, accuracy (%)"] for row in found], [20, 90, 50], rtol=1e-6)
    shown = (tmp_path / "clients.md").read_text()
    assert "Final values: mean of last tenth.\n" in shown and "worst first, at the last evaluation:\n" in shown


def test_pictures_show_short_names_as_they_are():
    run = named_run()
    ticks = [tick.get_text() for tick in plots.gantt(run).axes[0].get_yticklabels()]  # a run brings its names
    assert ticks == [text.replace("$", r"\$") for text in SHORT] and max(map(len, SHORT)) == LONGEST
    assert [label(["", "x\x1b"], client) for client in (0, 1)] == ["(0)", "x\ufffd"]
    arrivals = {name: run.updates[name] for name in ("client", "step")} | {"time": run.updates["arrival_time"]}
    arrivals |= dict.fromkeys(("change", "loss", "accuracy"), np.linspace(0.1, 0.5, len(arrivals["step"])))
    legend = swings(arrivals, (1.0, 0.1), "test", names=run.client_names).legends[0]
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(f"client {text}" for text in ticks)


def test_the_page_shows_short_names_without_html():
    escaped = [SHORT[0].replace("<", "&lt;").replace(">", "&gt;"), *SHORT[1:]]
    chart = schedule(named_run(), 100).figure
    assert chart["layout"]["yaxis"]["ticktext"] == escaped
    bars = [trace for trace in chart["data"] if trace["type"] == "bar"]
    assert {name for trace in bars for name in trace["hovertext"]} == set(escaped)
    assert all(trace["hovertemplate"].startswith("client %{hovertext}, job") for trace in bars)
    accuracy = clients(named_run())[0].figure
    assert accuracy["data"][0]["hovertext"] == [escaped[client] for client in (1, 0, 2)]  # from the worst to the best


def test_an_explanation_names_clients():
    arrivals = {name: np.array([0, 2]) for name in ("client", "staleness")}
    arrivals |= {name: np.array([-0.5, 0.25]) for name in ("change", "first_order", "class_0")}
    found = explaining.Explanation(arrivals, (1.0, 0.1), (4,), "test", 0.0, client_names=HOSTILE)
    assert [row["client_name"] for row in explaining.client_rows(found)] == [" ".join(HOSTILE[2].split()), HOSTILE[0]]
    assert explaining.class_rows(found)[0]["lowered most by"] == f"client 0 ({HOSTILE[0]})"
