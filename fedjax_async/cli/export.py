"""The command ``export``: the model of a saved run as a file of weights."""

from __future__ import annotations

import argparse

from fedjax_async import check
from fedjax_async.models import read_arrays
from fedjax_async.results.exporting import export


def exported(arguments: argparse.Namespace) -> None:
    """Write the file, and print its arrays."""
    path = export(
        arguments.folder,
        arguments.to,
        names=arguments.names,
        modules=_pairs(arguments.rename),
        best=arguments.best,
        node=arguments.node,
        overwrite=arguments.overwrite,
    )
    arrays = read_arrays(path)
    for name, array in arrays.items():
        print(f"{name:<40} {array.dtype.name:<10} {list(array.shape)}")
    print(f"written: {path}, {sum(array.size for array in arrays.values()):,} numbers")


def _pairs(given: str | None) -> dict[str, str] | None:
    """``conv1=features.0,fc1=classifier`` -> the names of layers there by ours."""
    if given is None:
        return None
    pairs = [part.partition("=")[::2] for part in given.split(",")]
    check.require(all(all(pair) for pair in pairs), "rename", given, "LAYER=NAME, several joined by commas")
    return dict(pairs)
