"""The flags of ``export`` and what its help teaches."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fedjax_async.cli.parsing import whole

EXPORT_EPILOG = """names:
  own    conv1/kernel [kh, kw, in, out], fc1/kernel [in, out]: what other runs, JAX and flax read
  torch  conv1.weight [out, in, kh, kw], fc1.weight [out, in], norm.running_mean: the state_dict of a PyTorch module
         with the same layers. The inputs of a dense layer behind a convolution are in PyTorch's order, channels first.

examples:
  fedjax-async run --model lenet5 --out runs/lenet
  fedjax-async export runs/lenet --to lenet.safetensors --names torch --rename conv1=0,conv2=3,fc1=7,fc2=9,output=11
  fedjax-async run --model lenet5 --initial runs/lenet --method fedbuff --out runs/further

In PyTorch: module.load_state_dict(safetensors.torch.load_file("lenet.safetensors")). Without a server the mean of the
nodes' models is written, or with --node one of them.
"""


def add_export(sub: argparse.ArgumentParser, folder: Callable[[str], str], file: Callable[[str], str]) -> None:
    """Add the flags of ``export``; ``folder`` and ``file``: the types of names."""
    sub.epilog, sub.formatter_class = EXPORT_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("folder", type=folder, metavar="RUN", help="the --out of a run")
    text = "the file, ending in .safetensors or .npz"
    sub.add_argument("--to", type=file, required=True, metavar="FILE", help=text)
    sub.add_argument("--names", default="own", metavar="NAMES", help="names and layouts: own or torch [own]")
    text = "layers that have another name there, LAYER=NAME, several joined by commas [the same]"
    sub.add_argument("--rename", metavar="PAIRS", help=text)
    sub.add_argument("--best", action="store_true", help="the best model (--keep-best of run), not the last one")
    text = "without a server: the model of this node, from 0 [the mean of all]"
    sub.add_argument("--node", type=whole, metavar="N", help=text)
    sub.add_argument("--overwrite", action="store_true", help="replace the file")
