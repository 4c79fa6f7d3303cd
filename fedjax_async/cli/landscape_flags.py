"""The flags of ``landscape`` and the text of its help."""

from __future__ import annotations

import argparse

from fedjax_async.cli.parsing import folder, real, whole

LANDSCAPE_EPILOG = """what it does:
  1. For each pair of runs, the loss along the straight line between their models (linear mode connectivity), and along
     a quadratic Bezier curve with a control point that Adam learns, so that the loss on the curve is low.
  2. The barrier of each path: how far the loss rises above the line between its values at both ends. No barrier on
     the line means that the two models lie in one valley; no barrier on the curve, that a bent valley connects them.
  3. The loss on a grid in the plane through three models: of three runs, or of two and the curve's control point.

files in DIR: barriers.csv, paths.csv, plane.csv, and the pictures paths.png and plane.png. Lengths and coordinates
are distances in the space of all parameters.

examples:
  fedjax-async run --method fedasync --seed 0 --out runs/a
  fedjax-async run --method fedasync --seed 1 --out runs/b
  fedjax-async landscape runs/a runs/b --out landscapes/ab
  fedjax-async landscape runs/a runs/b --part train --client 3 --out landscapes/client_3

The runs must have the same model; data and settings are those of RUN_A. Two runs that differ only in the seed often
have a barrier on the line and none on the curve. For a model with running statistics (BatchNorm), these are
interpolated between the ends, which may raise the loss between them.
"""


def add_landscape(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``landscape``, without those of pictures."""
    sub.epilog, sub.formatter_class = LANDSCAPE_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument(
        "folders",
        type=folder,
        nargs="+",
        metavar="RUN",
        help="two or three folders of runs, RUN_A RUN_B [RUN_C]; those of a comparison are DIR/runs/METHOD/seed_K",
    )
    sub.add_argument(
        "--out", type=folder, metavar="DIR", help="folder for tables and pictures [landscape, landscape_2, ...]"
    )
    sub.add_argument("--overwrite", action="store_true", help="replace the files of another landscape in DIR")
    sub.add_argument("--best", action="store_true", help="use the best models (run --keep-best), not the last ones")
    group = sub.add_argument_group("what is measured")
    text = "part of the data: test, train or validation [test]"
    group.add_argument("--part", default="test", metavar="PART", help=text)
    group.add_argument("--client", type=whole, metavar="N", help="only the examples of this client, from 0 [all]")
    text = "examples, spread evenly over the part; time grows with them [1000]"
    group.add_argument("--examples", type=whole, default=1000, metavar="N", help=text)
    text = "points of the plane in each direction: N x N models are evaluated [25]"
    group.add_argument("--grid", type=whole, default=25, metavar="N", help=text)
    group.add_argument("--points", type=whole, default=31, metavar="N", help="points along each path [31]")
    group = sub.add_argument_group("the learned curve")
    text = "steps of Adam, each on 100 training examples of all clients; 0: no curve [500]"
    group.add_argument("--steps", type=whole, default=500, metavar="N", help=text)
    group.add_argument("--lr", type=real, default=1e-3, metavar="X", help="learning rate of Adam [0.001]")
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="seed that draws these examples [0]")
