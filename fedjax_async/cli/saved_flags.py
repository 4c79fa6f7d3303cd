"""The flags of commands about saved results, and their help texts: ``redraw``, ``explain``, ``privacy``, ``export``."""

from __future__ import annotations

import argparse

from fedjax_async.cli.output_flags import add_columns, add_final
from fedjax_async.cli.parsing import NO_PLOTS, file, folder, real, whole

REDRAW_EPILOG = """what it does:
  Makes the tables and pictures in DIR again from the saved runs, and trains nothing. Options that are not given have
  their defaults, whatever the command that trained was given. Files of the same names are replaced.

examples:
  fedjax-async redraw runs/three --x bytes --format pdf --width column
  fedjax-async redraw runs/three --target 0.8 --final last --columns accuracy,time,updates
  fedjax-async redraw runs/mixing --final best --no-plots
  fedjax-async redraw runs/one --x update

Of a comparison the methods in comparison.csv are compared, or all without that file. A run has no table of methods: of
the options it takes --final and those of pictures.
"""


def add_redraw(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``redraw``, without those of pictures."""
    sub.epilog, sub.formatter_class = REDRAW_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("folder", type=folder, metavar="DIR", help="the --out of a run, a comparison or a sweep")
    text = "of a comparison: method or label to which times are relative [the first fedavg, else the first]"
    sub.add_argument("--baseline", metavar="METHOD", help=text)
    text = "accuracy to reach; of a comparison also a METHOD or label, or a percentage [95%% for a comparison]"
    sub.add_argument("--target", metavar="ACCURACY", help=text)
    add_final(sub, optional=True)
    add_columns(sub, "comparison.tex, settings.tex or best.tex")
    sub.add_argument("--no-plots", **NO_PLOTS)


EXPLAIN_EPILOG = """what it does:
  1. Trains the run again and measures the loss F of validation (or test) examples before and after every arrival. The
     run ends with the same parameters; the command prints a note if it does not.
  2. Attributes the change of F to the arrivals. An arrival that alone moves the server's model from x to x' changes F
     by F(x') - F(x), to first order <grad F(x), x' - x>. Arrivals of the same server step divide its change. The
     changes of all arrivals sum to the change of the whole run.

files in DIR: arrivals.csv (one row per arrival), tables by client, by staleness and by class (clients, staleness and
classes, .csv and .md), and the picture swings.png. Its upper panel shows the accuracy, in the colour of the client that
changed it; the lower panel the change of the loss by each client so far. A second call with the same examples reads
arrivals.csv.

examples:
  fedjax-async run --method fedasync --validation-fraction 0.1 --out runs/skewed
  fedjax-async explain runs/skewed
  fedjax-async explain runs/skewed --part test --examples 5000 --out explained/test

Runs without a server are refused, since they have no server steps. Time grows with the examples: with 1000, an arrival
costs about as much as 100 local steps of batch 32.
"""


def add_explain(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``explain``, without those of pictures."""
    sub.epilog, sub.formatter_class = EXPLAIN_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("folder", type=folder, metavar="RUN", help="the --out of a run")
    sub.add_argument(
        "--out", type=folder, metavar="DIR", help="folder for tables and the picture [RUN/explain, _2, ...]"
    )
    text = "replace the explanation of another run, or of other examples, in DIR"
    sub.add_argument("--overwrite", action="store_true", help=text)
    text = "part of the data: validation or test [validation if the run has such a part]"
    sub.add_argument("--part", metavar="PART", help=text)
    text = "examples, spread evenly over the part; time grows with them [1000]"
    sub.add_argument("--examples", type=whole, default=1000, metavar="N", help=text)
    sub.add_argument("--quiet", action="store_true", help="no progress bar")


PRIVACY_EPILOG = """what it prints (needs the package dp-accounting):
  The largest epsilon of a client, from the participations and weights that the run recorded: the client's uploads
  compose as Gaussian mechanisms. Rounds of a uniform cohort also get a bound by sampling. For DP-SGD, the epsilon of an
  example. It prints "none", and why, if no bound is known: without noise, with rejected uploads, or if the run stopped
  early.

example:
  fedjax-async run --method fedbuff@buffer:size=10 --clients 50 --privacy dp:clip=0.5,noise=1 --out runs/private
  fedjax-async privacy runs/private --delta 1e-5
"""


def add_privacy(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``privacy``."""
    sub.epilog, sub.formatter_class = PRIVACY_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("folders", type=folder, nargs="+", metavar="RUN", help="the --out of a run with --privacy")
    text = "delta, above 0 and below 1 [n^-1.1 for n clients or examples]"
    sub.add_argument("--delta", type=real, metavar="X", help=text)


EXPORT_EPILOG = """names:
  own    conv1/kernel [kh, kw, in, out], fc1/kernel [in, out]: what other runs, JAX and flax read
  torch  conv1.weight [out, in, kh, kw], fc1.weight [out, in], norm.running_mean: the state_dict of a PyTorch module
         with the same layers. The inputs of a dense layer behind a convolution are in PyTorch's order, channels first.

examples:
  fedjax-async run --model lenet5 --out runs/lenet
  fedjax-async export runs/lenet --to lenet.safetensors --names torch --rename conv1=0,conv2=3,fc1=7,fc2=9,output=11
  fedjax-async run --model lenet5 --initial runs/lenet --method fedbuff --out runs/further
  fedjax-async run --model lenet5 --initial lenet.safetensors --initial-rename conv1=0,conv2=3,fc1=7,fc2=9,output=11

In PyTorch: module.load_state_dict(safetensors.torch.load_file("lenet.safetensors")). Without a server the mean of the
nodes' models is written, or with --node one of them. With a server, layers that stay with their clients (--personal)
are written with their initial weights: a run does not keep those of the clients.
"""


def add_export(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``export``."""
    sub.epilog, sub.formatter_class = EXPORT_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("folder", type=folder, metavar="RUN", help="the --out of a run")
    text = "the file, ending in .safetensors or .npz"
    sub.add_argument("--to", type=file, required=True, metavar="FILE", help=text)
    sub.add_argument("--names", default="own", metavar="NAMES", help="names and layouts: own or torch [own]")
    text = "with --names torch: layers with another name in PyTorch, LAYER=NAME, several joined by commas"
    sub.add_argument("--rename", metavar="PAIRS", help=text)
    sub.add_argument("--best", action="store_true", help="the best model (run --keep-best), not the last one")
    text = "without a server: the model of this node, from 0 [the mean of all]"
    sub.add_argument("--node", type=whole, metavar="N", help=text)
    sub.add_argument("--overwrite", action="store_true", help="replace the file")
