"""The class of all pictures: figures of matplotlib that a notebook shows. It is made with the first picture."""

from __future__ import annotations

import functools
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 96.0  # pixels an inch in a notebook: screens with more show the picture sharper, not larger


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
