"""An empty figure with plain axes; colours, units of axes; picture files with the same bytes each time.

Pictures are :class:`matplotlib.figure.Figure` objects that notebooks show: no pyplot, no global state, no display.
matplotlib comes with the extra ``plot`` and is imported only when a picture is made.
"""

from __future__ import annotations

import functools
import io
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_async.base import check, disk, lazy
from fedjax_async.results.claim import require_writable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

# Okabe and Ito (2008): distinct for any kind of colour vision; ordered by contrast on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[object, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))  # when the colours are used up
INK, FAINT, GRID = "#333333", "#8A8A8A", "#E6E6E6"
AMOUNTS = {"update": "client updates applied", "step": "server steps", "event": "events of the nodes"}
TIMES = ((172_800.0, 86_400.0, "days"), (10_800.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
SIZES = ((2e9, 1e9, "GB"), (2e6, 1e6, "MB"), (0.0, 1e3, "kB"))
JOULES = ((2e6, 1e6, "MJ"), (2e3, 1e3, "kJ"), (0.0, 1.0, "J"))
SCALED = {
    "time": (TIMES, "virtual time"),
    "bytes": (SIZES, "sent, both directions"),
    "bytes_between": (SIZES, "sent between the nodes"),
    "bytes_up": (SIZES, "sent by the clients"),
    "values_bytes_up": (SIZES, "values sent by the clients"),
    "energy": (JOULES, "energy"),
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
UNMARKED = 8  # lines without markers; the following ones have markers, so that their shape differs too
SHOWN = 96.0  # pixels an inch in a notebook: screens with more show the picture sharper, not larger
PAPER_TEXT = 8  # points
LABEL = 36  # characters in one line of an axis label
MARGIN = 4  # characters that a name in a legend loses at a time, until its longest line fits
ROW = 0.02  # inches of a legend's row for each point of its text
# Metadata left out of each kind of file, because it differs between two savings of the same figure.
UNDATED: dict[str, dict[str, object]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    ".svg": {"Date": None, "Creator": None},
}


# Inches: IEEE's column and page width; those of other publishers differ by a few per cent.
WIDTHS = {"column": 3.5, "page": 7.16}
FORMATS = tuple(ending.removeprefix(".") for ending in UNDATED)
AXES = ("time", "update", "step", "bytes", "energy")  # what curves may be drawn against


@dataclass(frozen=True)
class Drawing:
    """How pictures are drawn and saved.

    ``formats``: one or more of ``png``, ``pdf`` and ``svg``. ``width``: ``column`` or ``page`` of a paper (3.5 and 7.16
    inches); None for the screen. ``title``: text above the picture; None for no title. ``x``: what curves are drawn
    against: virtual ``time``, ``update`` (client updates), ``step`` (server steps), ``bytes`` or ``energy``.
    """

    formats: tuple[str, ...] = ("png",)
    width: str | None = None
    title: str | None = None
    x: str = "time"

    def __post_init__(self) -> None:
        listed = "a tuple of formats, such as ('png', 'pdf')"
        check.require(isinstance(self.formats, (tuple, list)), "format", self.formats, listed)
        check.require(len(self.formats) > 0, "format", self.formats, "at least one of " + ", ".join(FORMATS))
        for each in self.formats:
            check.one_of("format", each, FORMATS)
        check.optional(check.one_of, "width", self.width, allowed=WIDTHS)
        check.one_of("x", self.x, AXES)


SCREEN = Drawing()


def require_matplotlib(without: str = "") -> type[Figure]:
    """The class of figures; ``ValueError`` where matplotlib is missing. ``without``: what leaves the pictures out."""
    lazy.optional("matplotlib.figure", f"pictures, which {without} leaves out" if without else "pictures")
    return picture_class()


def new(width: float, height: float, drawing: Drawing = SCREEN) -> tuple[Figure, Axes]:
    """An empty figure of ``width`` x ``height`` inches with one plain pair of axes; ``drawing`` may set the width.

    A narrower figure also becomes less high, by a third at most.
    """
    figure = empty(width, height, drawing)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
        axes.spines[side].set_linewidth(0.8)
    axes.tick_params(colors=INK, labelsize=9, length=3, width=0.8, color=FAINT)
    axes.set_axisbelow(True)
    return figure, axes


def empty(width: float, height: float, drawing: Drawing = SCREEN) -> Figure:
    """A figure as in :func:`new`, without axes."""
    if drawing.width is not None:
        given, width = width, WIDTHS[drawing.width]
        height *= min(max(width / given, 2 / 3), 1.0)
    return require_matplotlib()(figsize=(width, height), dpi=200, facecolor="white", layout="constrained")


def verbatim(texts: Sequence[str]) -> list[str]:
    """Texts that matplotlib draws as they are: what is between two ``$`` is not taken for a formula."""
    return [text.replace("$", r"\$") for text in texts]


def _formulas(text: str) -> str:
    """A text of the user's, with its formulas; what is between two ``$`` and is no formula is drawn as it is."""
    from matplotlib.mathtext import MathTextParser  # noqa: PLC0415 (an extra)

    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return verbatim([text])[0]
    return text


def finish(figure: Figure, drawing: Drawing) -> Figure:
    """Set the title and, for a paper's width, text sizes of at most 8 points; call it when everything is drawn."""
    from matplotlib.text import Text  # noqa: PLC0415

    words = "" if drawing.title is None else _formulas(drawing.title)
    title = None if drawing.title is None else figure.suptitle(words, fontsize=10, color=INK)
    if drawing.width is not None:
        for axes in figure.axes:
            axes.tick_params(labelsize=PAPER_TEXT - 1)
        for text in figure.findobj(Text):
            text.set_fontsize(min(float(text.get_fontsize()), PAPER_TEXT))
    length = 0 if title is None else len(title.get_text())
    while title is not None and length > 1 and title.get_window_extent().width > figure.bbox.width:
        length = int(0.95 * length)
        title.set_text(textwrap.fill(words, length))
    if title is not None and "\n" in title.get_text():
        more = title.get_text().count("\n")
        figure.set_figheight(figure.get_figheight() + ROW * float(title.get_fontsize()) * more)
    return figure


def mark(axes: Axes, artist: object, **about: object) -> None:
    """Let the HTML report show this part of a picture (``html_figures.interactive``).

    ``about``: what the page adds, in plotly's words: its ``name`` in the legend, and the text over it. Besides these,
    ``dash`` is the line style of matplotlib, and ``only`` are the indices of some patches of a collection.
    """
    axes.figure.__dict__.setdefault("marked", []).append((artist, about))


def marked(figure: Figure) -> list[tuple[object, dict[str, Any]]]:
    """The marked parts of a figure, in the order of drawing, and what the page adds to each."""
    return list(figure.__dict__.get("marked", []))


def note(axes: Axes, *lines: str) -> str:
    """What a picture leaves out, for the line above it and for the page; the lines that are not empty, joined."""
    found = "\n".join(filter(None, lines))
    axes.figure.__dict__["note"] = found.replace("\n", "; ")
    return found


def note_of(figure: Figure) -> str:
    """What the picture leaves out; empty if it is nothing."""
    return str(figure.__dict__.get("note", ""))


def legend_below(
    figure: Figure, lines: Sequence[Artist], names: Sequence[str], drawing: Drawing, columns: int, **style: Any
) -> Legend:
    """A legend below the axes, with at most so many ``columns`` as fit into the figure.

    Of every row more the figure becomes higher. A name that alone is wider than the figure takes several lines. Names
    are drawn as they are (:func:`verbatim`).
    ``style``: other options of a legend.
    """
    style = {"fontsize": 9, **style, "loc": "outside lower center", "frameon": False}
    if drawing.width is not None:
        style["fontsize"] = min(style["fontsize"], PAPER_TEXT)
    few, length = min(columns, len(names)), max(map(len, names))
    while True:
        shown = [textwrap.fill(name, length) for name in names]
        legend = figure.legend(lines, verbatim(shown), ncols=few, **style)
        if legend.get_window_extent().width <= figure.bbox.width or length <= MARGIN:
            break
        legend.remove()
        few, length = (few - 1, length) if few > 1 else (1, length - MARGIN)
        few = -(-len(names) // -(-len(names) // few))  # as many rows, but columns of nearly the same length
    rows = -(-len(names) // few) + sum(name.count("\n") for name in shown) - -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + ROW * style["fontsize"] * rows)
    return legend


def line_style(index: int) -> tuple[str, object]:
    """Colour and dash pattern of the ``index``-th line; the first 28 are different."""
    return PALETTE[index % len(PALETTE)], DASHES[index // len(PALETTE) % len(DASHES)]


def marker(index: int) -> str:
    """The marker on the ``index``-th line; none for the first eight."""
    return "" if index < UNMARKED else MARKERS[(index - UNMARKED) % len(MARKERS)]


def label(axes: Axes, x: str, y: str) -> None:
    """Label both axes; a long label of the y axis takes several lines."""
    axes.set_xlabel(x, fontsize=10, color=INK)
    axes.set_ylabel("\n".join(textwrap.fill(line, LABEL) for line in y.split("\n")), fontsize=10, color=INK)


def _scale(largest: float, scales: Sequence[tuple[float, float, str]]) -> tuple[float, str]:
    """Size and name of the unit that suits numbers up to ``largest``."""
    return next((size, unit) for least, size, unit in scales if largest >= least)


def axis(unit: str, largest: float) -> tuple[float, str]:
    """Divisor and label of an axis in a unit of ``metrics.UNITS``, for numbers up to ``largest``."""
    if unit in AMOUNTS:
        return 1.0, AMOUNTS[unit]
    scales, title = SCALED[unit]
    size, name = _scale(largest, scales)
    return size, f"{title} ({name})"


def require_picture(field: str, path: str | Path) -> None:
    """``ValueError`` unless :func:`save_figure` can write ``path``; call it before the long work."""
    require_matplotlib()
    path = check.path(field, path)
    check.one_of("file ending", path.suffix, UNDATED)
    require_writable(field, path)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write PNG, PDF or SVG, by the path's ending; returns the path. The same figure gives the same bytes."""
    from matplotlib import rc_context  # noqa: PLC0415

    path = check.path("path", path)
    check.one_of("file ending", path.suffix, UNDATED)
    stream = io.BytesIO()
    # matplotlib chooses the limits now: those of a diverged loss may exceed the largest float
    with rc_context({"svg.hashsalt": "fedjax_async"}), np.errstate(over="ignore", invalid="ignore"):
        figure.savefig(stream, format=path.suffix[1:], metadata=UNDATED[path.suffix])
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, stream.getvalue())
    return path


def save_formats(figure: Figure, path: Path, drawing: Drawing) -> None:
    """Write the figure in every format of ``drawing``; ``path`` has no file ending."""
    for ending in drawing.formats:
        save_figure(figure, path.parent / f"{path.name}.{ending}")


def curve_stem(name: str, drawing: Drawing) -> str:
    """The name of a curve's file, without its ending: those against time have the plain name.

    >>> curve_stem("accuracy", SCREEN), curve_stem("accuracy", Drawing(x="bytes"))
    ('accuracy', 'accuracy_bytes')
    """
    return name if drawing.x == SCREEN.x else f"{name}_{drawing.x}"


def remove_pictures(folder: Path, names: Iterable[str]) -> None:
    """Remove pictures of other results, in every format and against every axis; ``names`` have no file ending."""
    for name in names:
        for stem in (name, *(f"{name}_{x}" for x in AXES)):
            for ending in FORMATS:
                (folder / f"{stem}.{ending}").unlink(missing_ok=True)


# --- in a notebook ------------------------------------------------------------------------------------


@functools.cache
def picture_class() -> type[Figure]:
    """The class, which is called ``Figure`` too; ``ImportError`` where matplotlib is missing."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    return type("Figure", (Figure,), {"__module__": __name__, "__doc__": Figure.__doc__, "_repr_png_": _png})


def _png(figure: Figure) -> tuple[bytes, dict[str, int]] | None:
    """The bytes of a PNG and the size in pixels at which a notebook shows it.

    IPython calls it for the last value of a cell. After ``%matplotlib inline`` figures have the formats that the user
    chose there, and this is None, so that a picture is never shown twice.
    """
    if _has_formats(type(figure).__bases__[0]):
        return None
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    width, height = figure.get_size_inches()
    return stream.getvalue(), {"width": round(SHOWN * width), "height": round(SHOWN * height)}


def _has_formats(kind: type) -> bool:
    """Whether the notebook shows objects of this kind in some format by a function of its own."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    formatters = {} if shell is None else shell.display_formatter.formatters
    return any(kind in formatter.type_printers for formatter in formatters.values())


def __getattr__(name: str) -> type[Figure]:
    """``Figure`` as an attribute of this module, where pickle looks for it."""
    if name != "Figure":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return picture_class()
