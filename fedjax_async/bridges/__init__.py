"""To other programs: a run's model as a file with PyTorch's names, and a rule of this package inside Flower.

``exporting.py`` writes weights; ``models/state_dicts.py`` knows PyTorch's names and layouts, and ``initial`` reads such
files. ``flower.py`` makes a strategy of Flower from a method. Data in the formats of other programs are read by
``data/formats``, traces of devices by ``clock/fedscale.py``.
"""

from typing import TYPE_CHECKING

from fedjax_async.base import lazy

if TYPE_CHECKING:
    from fedjax_async.bridges.exporting import export as export
    from fedjax_async.bridges.flower import strategy as strategy

__getattr__, __dir__ = lazy.attach(__name__)
