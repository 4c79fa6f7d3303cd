"""Results of runs: folders, metrics, tables, pictures, a progress bar; sweeps and comparisons that can be continued.

Start with :func:`simulate` and :func:`compare` (``simulation.py``) and :func:`sweep` (``sweeps.py``), which all train
with ``run`` (``running.py``). Order of reading:

1. one run: ``metrics.py``, ``measured.py``, ``tables.py``; its folder: ``files.py``, ``store.py``, ``provenance.py``
   (with what it was computed, against this process); pictures: ``figure.py``, ``curves.py``,
   ``timeline.py`` (what charts of a schedule share), ``plots.py``, ``peer_gantt.py``, ``landscape.py``;
2. several methods and seeds: ``compared.py`` (their names), ``significance.py`` (intervals, tests),
   ``comparisons.py``, ``worlds.py`` (what readers must know), ``clients.py``, ``latex.py`` (tables
   for papers), ``beside.py`` (labels and commands in folders);
3. ``runs.py``: tables and pictures of runs and comparisons; ``running.py``: train runs, read finished ones, continue
   (``begun.py``); ``claim.py`` locks folders; ``progress.py`` is the bar; ``callbacks.py`` (own functions, the best
   model) and ``streams.py`` (CSV, TensorBoard, Weights & Biases) get the evaluations during a run;
4. ``explaining.py`` (:func:`explain`: which arrivals moved the loss of a run) and its picture, ``swings.py``;
   ``privacy.py``: epsilon of a run with noise; ``reading.py`` reads folders back (:func:`load`), ``cards.py`` shows
   results in notebooks, ``redrawing.py`` makes tables and pictures again (:func:`redraw`);
5. many runs: ``sweeps.py``, ``sweep_folder.py``, ``sweep_table.py``, ``tuning.py`` (which settings are chosen),
   ``heat_map.py``, ``sweep_report.py``; jobs on clusters: ``cluster.py``;
6. an HTML page about all of these: ``html_report.py`` (:func:`write_report`), ``html_folders.py``, ``html_figures.py``
   (the same pictures, with text over their parts).
"""

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.results.cards import card as card
from fedjax_async.results.compared import Comparison as Comparison
from fedjax_async.results.comparisons import comparison as comparison
from fedjax_async.results.curves import accuracy_curve as accuracy_curve, loss_curve as loss_curve
from fedjax_async.results.explaining import Explanation as Explanation, explain as explain
from fedjax_async.results.figure import Drawing as Drawing, save_figure as save_figure
from fedjax_async.results.html_report import write_report as write_report
from fedjax_async.results.landscape import path_picture as path_picture, plane_picture as plane_picture
from fedjax_async.results.metrics import (Spread as Spread, area as area,
    final_accuracy as final_accuracy, final_value as final_value, relative_time as relative_time, spread as spread,
    to_target as to_target)
from fedjax_async.results.peer_gantt import age_histogram as age_histogram, peer_gantt as peer_gantt
from fedjax_async.results.plots import gantt as gantt, staleness_histogram as staleness_histogram
from fedjax_async.results.privacy import Guarantee as Guarantee, guarantees as guarantees
from fedjax_async.results.progress import ProgressBar as ProgressBar, bar as bar
from fedjax_async.results.provenance import versions as versions
from fedjax_async.results.reading import frame as frame, load as load
from fedjax_async.results.redrawing import redraw as redraw
from fedjax_async.results.runs import write_comparison as write_comparison, write_run as write_run
from fedjax_async.results.significance import holm as holm, interval as interval, paired as paired
from fedjax_async.results.store import save as save
from fedjax_async.results.sweep_report import write_sweep as write_sweep
from fedjax_async.results.sweeps import Sweep as Sweep, collect as collect, sweep as sweep
from fedjax_async.results.tables import mean_std as mean_std, table as table, write as write
from fedjax_async.results.tuning import Tuning as Tuning, choose as choose

lazy.set_all(__name__)
