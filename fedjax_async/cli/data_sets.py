"""What ``data list``, ``data fetch`` and ``data verify`` do."""

from __future__ import annotations

import argparse

from fedjax_async.data import fetch, list_datasets, verify
from fedjax_async.results import table


def list_all(arguments: argparse.Namespace) -> None:
    """Every data set and its state on this machine."""
    print(table([entry._asdict() for entry in list_datasets(arguments.data_dir)]), end="")


def fetch_each(arguments: argparse.Namespace) -> None:
    """Fetch the named data sets, one after the other."""
    for name in arguments.names:
        fetch(name, arguments.data_dir, source=arguments.source, progress=print)


def verify_each(arguments: argparse.Namespace) -> None:
    """Compare the hashes of the named data sets; ``ValueError`` if any differs."""
    failed = 0
    for name in arguments.names:
        for item in verify(name, arguments.data_dir):
            failed += not item.ok
            print(
                f"{name}: {item.what}: {'ok' if item.ok else f'WRONG (expected {item.expected}, found {item.found})'}"
            )
    if failed:
        raise ValueError(f"{failed} hashes differ: fetch the data again with `fedjax-async data fetch NAME`")
