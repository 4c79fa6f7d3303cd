"""The command line ``fedjax-async``: run, resume, compare, sweep, report, explain, and the others in ``flags.py``.

Start with :func:`main` (``entry.py``); then read ``flags.py`` (all commands and flags), ``runs.py`` (single runs,
comparisons), ``planned.py`` (``plan``), ``sweep_file.py`` and ``sweep.py``, ``saved_flags.py`` and ``saved.py``
(``report``, ``explain``, ``privacy`` and ``export``), ``landscape_flags.py`` and ``landscape.py``, ``listing.py``
(``list``), ``data_flags.py`` and ``data.py``. Flags are parsed and missing data sets are reported without NumPy and
JAX; the module of a command is imported when the command starts.
"""

from fedjax_async.base import lazy
from fedjax_async.cli.entry import main as main
from fedjax_async.cli.flags import parser as parser

lazy.set_all(__name__)
