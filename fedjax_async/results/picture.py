"""The class of all pictures; imported with matplotlib, when the first one is made."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

SHOWN = 96.0  # pixels an inch in a notebook: screens with more show the picture sharper, not larger


class Picture(Figure):
    """A figure that a notebook shows where it is the last value of a cell, without ``%matplotlib inline``.

    With that command, matplotlib's own output takes precedence, so that the picture is never shown twice.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The bytes of a PNG and the size at which it is shown, in pixels."""
        stream = io.BytesIO()
        self.savefig(stream, format="png", metadata={"Software": None})
        width, height = self.get_size_inches()
        return stream.getvalue(), {"width": round(SHOWN * width), "height": round(SHOWN * height)}
