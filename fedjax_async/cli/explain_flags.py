"""The flags of ``explain`` and what its help teaches."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fedjax_async.cli.parsing import whole

EXPLAIN_EPILOG = """what it does:
  1. Trains the run once more, with a probe on every arrival that measures the loss F of validation (or test) examples
     before it and after it. The run ends with the same parameters; the command says if it does not.
  2. Attributes the change of F to the arrivals. One that moves the server's model from x to x' alone caused
     F(x') - F(x); to first order that is <grad F(x), x' - x>. Arrivals that share a server step divide its change.
     All changes together are that of the whole run.

files in DIR: arrivals.csv (a row an arrival), tables by client, by staleness and by class (clients, staleness and
classes, .csv and .md), and the picture swings.png: above the accuracy, in the colour of the client whose arrival
changed it, below what each client did to the loss so far. A second call with the same examples reads arrivals.csv.

examples:
  fedjax-async run --method fedasync --validation-fraction 0.1 --out runs/skewed
  fedjax-async explain runs/skewed
  fedjax-async explain runs/skewed --part test --examples 5000 --out explained/test

Runs without a server have no server steps, and are refused. The time grows with the examples: with 1000, an arrival
costs about as much as 100 local steps of batch 32.
"""


def add_explain(sub: argparse.ArgumentParser, folder: Callable[[str], str]) -> None:
    """Add the flags of ``explain``, without those of pictures; ``folder``: the type of a folder's name."""
    sub.epilog, sub.formatter_class = EXPLAIN_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("folder", type=folder, metavar="RUN", help="the --out of a run")
    sub.add_argument("--out", type=folder, metavar="DIR", help="folder for tables and the picture [RUN/explain]")
    text = "replace the explanation of another run, or of other examples, in DIR"
    sub.add_argument("--overwrite", action="store_true", help=text)
    text = "part of the data: validation or test [validation if the run has such a part]"
    sub.add_argument("--part", metavar="PART", help=text)
    text = "examples, spread evenly over the part; time grows with them [1000]"
    sub.add_argument("--examples", type=whole, default=1000, metavar="N", help=text)
    sub.add_argument("--quiet", action="store_true", help="no progress bar")
