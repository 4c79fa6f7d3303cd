"""Every public function that draws: nothing is cut off at any width, and a notebook shows the picture once."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core import pylabtools
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedjax_async import results
from fedjax_async.results import Drawing, clients, heat_map, peer_gantt, swings
from fedjax_async.results.figure import WIDTHS
from fedjax_async.results.sweep_table import swept_runs
from tests.results.made_up import make_run, make_schedule
from tests.results.test_plots import PLAN
from tests.results.test_same_numbers import RUNS as MEASURED
from tests.results.test_sweep_report import a_sweep

LONG = "fedbuff:server_lr=0.3,staleness=polynomial,exponent=0.5+swa:start=0.5@buffer:size=10,concurrency=100"
TITLE = "A long title: 100 clients, Dirichlet 0.1, lognormal delays, Fashion-MNIST, 2,000 updates, five seeds each"
S = np.linspace(0.0, 1.0, 5)


def arrivals(clients_: int, first: int = 0) -> dict[str, np.ndarray]:
    """Sixty made-up arrivals of so many clients, with numbers from ``first`` on."""
    dice = np.random.default_rng(0)
    client = first + dice.permutation(60) % clients_
    change, accuracy = dice.normal(size=60), dice.random(60)
    at = np.arange(60)
    return {"client": client, "change": change, "accuracy": accuracy, "time": 1.0 + at, "step": at}


def compared(*names: str):
    return {name: [make_run([0.1, 0.3 + 0.01 * i, 0.5 + 0.02 * i])] for i, name in enumerate(names)}


def plane(drawing):
    models = {name: (float(i), 0.0, 1.0) for i, name in enumerate("ABC")}
    paths = {f"{name}, a curve of low loss": (S, S) for name in ("A to B", "B to C", "A to C")}
    return results.plane_picture(S, S, np.add.outer(S, S), models, paths, drawing=drawing)


def a_map(drawing, **grid):
    maps = heat_map.cells(swept_runs(a_sweep(grid, seeds=2)), "accuracy")
    return heat_map.heat_map(maps, "accuracy", drawing=drawing)


def map_of_one(drawing, row, *names, title=""):
    values = np.full((1, len(names)), 30.0)
    map_ = heat_map.Cells(("row", [row]), ("column", [*names]), values, np.full_like(values, np.nan), title)
    return heat_map.heat_map([map_], "accuracy", drawing=drawing)


SIZE_5, SIZE_3 = "fedbuff@buffer:size=5", [f"fedbuff:server_lr={k}@buffer:size=3" for k in range(2)]
DRAWN = {
    "accuracy_curve": lambda d: results.accuracy_curve(compared("fedavg", "fedasync"), drawing=d),
    "ten methods": lambda d: results.accuracy_curve(compared(*(f"method {i}" for i in range(10))), drawing=d),
    "long names": lambda d: results.accuracy_curve(compared("fedavg", LONG, LONG[:45]), drawing=d),
    "loss_curve": lambda d: results.loss_curve(compared("fedavg"), drawing=d),
    "gantt": lambda d: results.gantt(make_schedule(), drawing=d),
    "staleness_histogram": lambda d: results.staleness_histogram(make_run(), drawing=d),
    "peer_gantt": lambda d: peer_gantt(PLAN, until=8, drawing=d),
    "age_histogram": lambda d: results.age_histogram(PLAN, drawing=d),
    "path_picture": lambda d: results.path_picture({"A to B": (S, S), f"A to C, {LONG}": (S, S)}, drawing=d),
    "plane_picture": plane,
    "clients": lambda d: clients.distribution(MEASURED, drawing=d),
    "heat map": lambda d: a_map(d, clients=[4, 8], lr=[0.3, 0.1, 0.2]),
    "facets": lambda d: a_map(d, method=["asgd", SIZE_5], lr=[0.3, 0.1, 0.2, 0.4], delay=["rpi", "lognormal"]),
    "long names below": lambda d: map_of_one(d, 0.1, *SIZE_3),
    "explained": lambda d: swings.swings(arrivals(30), (2.3, 0.1), "validation", drawing=d),
    "large numbers": lambda d: swings.swings(arrivals(30, 10_000), (2.3, 0.1), "validation", drawing=d),
    "one client": lambda d: swings.swings(arrivals(1), (2.3, 0.1), "test", drawing=d),
}
on_screen = functools.cache(lambda name: DRAWN[name](Drawing()))
FUNCTIONS = {name for name in results.__all__ if name.endswith(("_curve", "gantt", "histogram", "_picture"))}


def cut_off(figure) -> list[str]:
    """The texts that reach beyond the figure; ticks outside the limits of an axis are not drawn."""
    figure.draw_without_rendering()
    ticks = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    found = []
    for text in set(figure.findobj(Text)) - ticks:
        box = text.get_window_extent()
        inside = min(box.x0, box.y0) >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        found += [] if inside or not text.get_text() or not text.get_visible() else [text.get_text()]
    return found


ON_SCREEN = ("long names", "peer_gantt", "plane_picture", "explained", "large numbers", "facets", "long names below")


@pytest.mark.parametrize(
    ("name", "width"),
    [*((name, "column") for name in DRAWN), *((name, None) for name in ON_SCREEN), ("long names below", "page")],
)
def test_no_text_is_cut_off(name, width):
    title = TITLE if width == "column" else None
    figure = on_screen(name) if width is None else DRAWN[name](Drawing(width=width, title=title))
    assert cut_off(figure) == []
    for axes in figure.axes[:-1] if name == "facets" else ():  # numbers fit their cells
        whole, boxes = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
        assert max(box.width for box in boxes) < whole.width / 4
        assert max(box.height for box in boxes) < whole.height / 2
    if width is not None:
        assert figure.get_figwidth() == {"column": 3.5, "page": 7.16}[width]
        assert max(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) <= 8
    assert set(DRAWN) >= FUNCTIONS, "every public function that draws is tested"


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_the_legend_of_an_explanation_has_every_coloured_client(width):
    figure = DRAWN["explained"](Drawing(width=width))
    (legend,) = figure.legends
    coloured = {line.get_color() for line in figure.axes[1].get_lines()} & set(results.figure.PALETTE)
    names = [text.get_text() for text in legend.get_texts()]
    assert {line.get_color() for line in legend.get_lines()} - {results.figure.FAINT} == coloured
    assert len(names) == 7 and names[-1] == "others"
    axes = figure.axes[0].get_window_extent()
    assert axes.height > 0.25 * figure.bbox.height  # the legend's rows are not taken from the axes


@pytest.fixture(params=["plain", "inline"])
def notebook(request):
    """The formatter of a notebook's outputs, as it is at first and after ``%matplotlib inline``."""
    found = DisplayFormatter()
    if request.param == "inline":
        select_figure_formats(SimpleNamespace(display_formatter=found), {"png"})
    return found


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_notebook_shows_a_picture_once(notebook, name, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, stream, **options: stream.write(b"\x89PNG"))
    monkeypatch.setattr(pylabtools, "print_figure", lambda figure, *given, **options: b"\x89PNG")
    data, _ = notebook.format(on_screen(name))
    assert [kind for kind in data if kind.startswith("image/")] == ["image/png"]
    assert Gcf.get_all_fig_managers() == []  # pyplot, whose figures the inline backend shows too, has none


def test_a_shown_picture_is_a_png_that_can_be_copied():
    figure = copy.deepcopy(on_screen("loss_curve"))
    png, shown = figure._repr_png_()
    assert png.startswith(b"\x89PNG") and min(shown.values()) > 300
    assert shown["width"] / shown["height"] == pytest.approx(figure.get_figwidth() / figure.get_figheight(), rel=0.01)


@pytest.mark.parametrize("end", ["", " and so much more that it stands in a legend below the axes"])
def test_a_name_with_dollar_signs_is_no_formula(end):
    """Between two of them matplotlib would take it for one, and fail if it is none."""
    results.accuracy_curve({f"5 $x_{{ $ each{end}": [make_run()], "fedavg": [make_run()]}).draw_without_rendering()
    if not end:
        map_of_one(Drawing(), "$x_{ $", "$y_{ $", title="$z_{ $").draw_without_rendering()


@pytest.mark.parametrize(("title", "shown"), [("$\\alpha$ = 1", "$\\alpha$ = 1"), ("a $x_{ $", r"a \$x_{ \$")])
def test_a_title_may_have_formulas_and_need_not(title, shown):
    figure = results.accuracy_curve({"fedavg": [make_run()]}, drawing=Drawing(title=title))
    figure.draw_without_rendering()
    assert figure.get_suptitle() == shown
