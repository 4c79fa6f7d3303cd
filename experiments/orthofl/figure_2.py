"""Figure 2: two clients with disjoint halves of the classes; how the fast one's updates undo the slow one's.

    python experiments/orthofl/figure_2.py --scale laptop

FedAsync (mixing 0.6, exponent 0.5) and OrthoFL in the same scenario, LeNet-5; a job of the fast client takes 10 s, of
the slow one 30, 60 or 100 s. ``figure_2.png`` shows accuracy after every update: it jumps when the slow client arrives
and falls with the fast client's next updates. ``figure_2_weights_METHOD.png`` shows how each update changes the weights
into the neurons of the last hidden layer, for the slowest client. Finished runs are kept under ``OUT/runs``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from study import METHODS, TASKS, known_runs, missing, options, parse, report, setting_of

from fedjax_async import Method, results, simulate
from fedjax_async.config.methods import method as method_of
from fedjax_async.results.figure import new, save_figure
from fedjax_async.results.store import MANIFEST
from fedjax_async.server import closed
from fedjax_async.types import Run, ServerAlgorithm

FAST = 10.0
SLOW = (30.0, 60.0, 100.0)
UPDATES = {"smoke": 12, "laptop": 44, "paper": 110}
NEURON = "neuron "  # prefix of the columns with the recorded changes
WATCHED = {"smoke": "output", "mnist": "fc2"}  # the last hidden layer; logistic regression has none


def watched(spec: str, layer: str) -> Method:
    """The method, which also records the mean change of the weights into each neuron of ``layer`` at every update."""
    usual = method_of(spec)

    def recording(rule: ServerAlgorithm) -> ServerAlgorithm:
        def receive(state: Any, row: Any, arrival: Any) -> Any:
            after, row, info = rule.receive(state, row, arrival)
            after, row = closed(rule, after, row)  # every arrival closes its step
            old, new = (rule.params(each)[layer]["kernel"] for each in (state, after))
            change = (new - old).mean(axis=0)
            return after, row, info._replace(columns={f"{NEURON}{i}": change[i] for i in range(len(change))})

        return rule._replace(receive=receive, close=None)

    return usual._replace(rule=recording(usual.rule.make()))


def two_clients(task: str, given: argparse.Namespace, method: str, slow: float) -> Run:
    """One run, evaluated after every update; loaded if one of the same settings is finished."""
    setting, _ = setting_of(TASKS[task], given.scale)
    setting |= {"clients": 2, "partition": "halves", "method": METHODS[method], "updates": UPDATES[given.scale]}
    of_settings = known_runs.key(setting | {"seconds": [FAST, slow], "watched": WATCHED[task]})
    folder = given.out / "runs" / f"method={method},slow={slow:g},{of_settings}"
    if not (folder / MANIFEST).exists():
        setting["method"] = watched(METHODS[method], WATCHED[task])
        with tempfile.TemporaryDirectory() as place:
            table = Path(place) / "delays.csv"
            table.write_text(f"client,mean,std\n0,{FAST},0\n1,{slow},0\n", encoding="utf-8")
            run = simulate(**setting | {"delay": f"csv:path={table}"}, eval_updates=1)
        results.save(run, folder, overwrite=True)
    return results.load(folder)


def swing(run: Run, slow: int = 1) -> tuple[float, float]:
    """Mean accuracy in percent right after the slow client's updates, and right before its next ones."""
    accuracy = 100 * run.evaluations["accuracy"]
    arrivals = 1 + np.flatnonzero(run.updates["client"] == slow)
    after, before = accuracy[arrivals], accuracy[arrivals - 1]
    return float(np.mean(after)), float(np.mean(before[1:])) if len(before) > 1 else float(before[0])


def draw(runs: dict[tuple[str, float], Run], path: Path) -> None:
    """Draw the accuracy after every update, one line per run."""
    figure, axes = new(8.0, 4.0)
    for (method, slow), run in runs.items():
        style = {"fedasync": "-", "orthofl": "--"}[method]
        axes.plot(run.evaluations["update"], 100 * run.evaluations["accuracy"], style, label=f"{method}, {slow:g} s")
    axes.set_xlabel("updates")
    axes.set_ylabel("test accuracy (%)")
    axes.legend(frameon=False, ncols=2)
    save_figure(figure, path)


def draw_weights(run: Run, title: str, path: Path) -> None:
    """Draw one row per neuron, one column per update: red where its weights grow, blue where they shrink."""
    figure, axes = new(8.0, 4.0)
    change = np.stack([column for name, column in run.updates.items() if name.startswith(NEURON)])
    neurons, updates = change.shape
    most = float(np.abs(change).max())
    place: dict[str, Any] = {
        "extent": (0.5, updates + 0.5, neurons + 0.5, 0.5),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    image = axes.imshow(change, cmap="RdBu_r", vmin=-most, vmax=most, **place)
    slow = 1 + np.flatnonzero(run.updates["client"] == 1)
    axes.plot(slow, np.full(len(slow), 1.02), "kv", markersize=4, clip_on=False, transform=axes.get_xaxis_transform())
    axes.set_xlabel("updates (marked: the slow client's)")
    axes.set_ylabel("neuron of the last hidden layer")
    axes.set_title(title, pad=12)
    figure.colorbar(image, ax=axes, label="mean change of its weights")
    save_figure(figure, path)


def main() -> None:
    """Run, draw and write."""
    given = parse(options(__doc__, "figure_2"))
    task = "smoke" if given.scale == "smoke" else "mnist"
    rows: list[dict[str, Any]] = []
    runs = {}
    reason = missing(task, given.scale)
    for slow in SLOW if reason is None else ():
        for method in ("fedasync", "orthofl"):
            run = two_clients(task, given, method, slow)
            runs[method, slow] = run
            after, before = swing(run)
            rows.append({
                "task": task,
                "method": method,
                "slow client (s)": slow,
                "after its update (%)": after,
                "before its next (%)": before,
                "fall (points)": after - before,
            })  # fmt: skip
    if runs:
        draw(runs, given.out / "figure_2.png")
        for method in ("fedasync", "orthofl"):
            title = f"{method}, clients of {FAST:g} s and {max(SLOW):g} s"
            draw_weights(runs[method, max(SLOW)], title, given.out / f"figure_2_weights_{method}.png")
    report(rows or [{"task": task, "method": "not run"}], given)


if __name__ == "__main__":
    main()
