"""What comes out of runs: folders, metrics, tables, pictures, a progress bar.

Start with :func:`write_run` (``report.py``) for one run and :func:`sweep` (``sweeps.py``) for many. ``store.py``
writes and reads the folder of a run, ``metrics.py`` and ``tables.py`` compare runs, ``plots.py`` and ``figure.py``
draw, ``resume.py``, ``claim.py`` and ``cluster.py`` go on with unfinished work and share it among processes.
"""

from fedjax_async.results.figure import save_figure
from fedjax_async.results.metrics import area, best_accuracy, final_accuracy, relative_time, to_target
from fedjax_async.results.plots import accuracy_curve, loss_curve, staleness_histogram
from fedjax_async.results.progress import Progress, bar
from fedjax_async.results.provenance import versions
from fedjax_async.results.report import write_comparison, write_run
from fedjax_async.results.store import load, save
from fedjax_async.results.sweep_report import write_sweep
from fedjax_async.results.sweeps import Sweep, collect, sweep
from fedjax_async.results.tables import Spread, comparison, mean_std, spread, table, write
from fedjax_async.results.timeline import gantt

__all__ = [
    "Progress",
    "Spread",
    "Sweep",
    "accuracy_curve",
    "area",
    "bar",
    "best_accuracy",
    "collect",
    "comparison",
    "final_accuracy",
    "gantt",
    "load",
    "loss_curve",
    "mean_std",
    "relative_time",
    "save",
    "save_figure",
    "spread",
    "staleness_histogram",
    "sweep",
    "table",
    "to_target",
    "versions",
    "write",
    "write_comparison",
    "write_run",
    "write_sweep",
]
