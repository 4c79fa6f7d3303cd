"""Tables and curves of runs without a server say whose accuracy they show."""

from __future__ import annotations

import pytest

from fedjax_async.clock import Until
from fedjax_async.peers import plan_peers
from fedjax_async.results import accuracy_curve, loss_curve, write_comparison
from fedjax_async.results.worlds import note_on_nodes
from tests.results.made_up import make_run

SERVED = make_run()
PLAN = plan_peers("push_sum", "constant", num_clients=3, local_steps=1, until=Until(updates=6))
ALONE = SERVED._replace(schedule=PLAN)


@pytest.mark.parametrize(
    ("runs", "label", "line"),
    [
        ({"a": [SERVED]}, "test accuracy (%)", ""),
        ({"a": [ALONE]}, "test accuracy (%)\nof nodes' own models", "accuracy (without a server): mean"),
        (
            {"a": [SERVED], "b": [ALONE]},
            "test accuracy (%)\n(without a server: nodes' own models)",
            "accuracy of b (without a server): mean",
        ),
    ],
)
def test_axes_and_tables_name_the_nodes_own_models(tmp_path, runs, label, line):
    # a long label is broken into lines
    assert accuracy_curve(runs).axes[0].get_ylabel().split() == label.split()
    assert loss_curve(runs).axes[0].get_ylabel().split() == label.replace("accuracy (%)", "loss").split()
    text = write_comparison(runs, tmp_path, plots=False)
    assert note_on_nodes(runs).startswith(line) and bool(note_on_nodes(runs)) == bool(line)
    for shown in (text, (tmp_path / "comparison.md").read_text(), (tmp_path / "comparison.tex").read_text()):
        assert line in shown and ("without a server" in shown) == bool(line)
