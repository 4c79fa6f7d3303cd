"""The command ``data``: data sets listed, fetched, verified and imported, device traces imported."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fedjax_async.base.check import require


def list_data(arguments: argparse.Namespace) -> None:
    """Print every data set and its state on this machine."""
    from fedjax_async.data import list_datasets  # noqa: PLC0415 (needs JAX, as below)
    from fedjax_async.results import table  # noqa: PLC0415

    print(table([entry._asdict() for entry in list_datasets(arguments.data_dir)]), end="")


def fetch_data(arguments: argparse.Namespace) -> None:
    """Fetch the named data sets."""
    from fedjax_async.data import fetch  # noqa: PLC0415

    for name in arguments.names:
        fetch(name, arguments.data_dir, source=arguments.source, progress=print)


def verify_data(arguments: argparse.Namespace) -> None:
    """Check the hashes of the named data sets; ``ValueError`` if any differs."""
    from fedjax_async.data import verify  # noqa: PLC0415

    failed = 0
    for name in arguments.names:
        for item in verify(name, arguments.data_dir):
            failed += not item.ok
            print(
                f"{name}: {item.what}: {'ok' if item.ok else f'WRONG (expected {item.expected}, found {item.found})'}"
            )
    if failed:
        raise ValueError(f"{failed} hashes differ: fetch the data again with `fedjax-async data fetch NAME`")


def import_data(arguments: argparse.Namespace) -> None:
    """Write a data set to a new folder, divided by clients, and print how to use it."""
    from fedjax_async.base import grammar, registry  # noqa: PLC0415
    from fedjax_async.data import DATASETS, check_data, federate, write_folder  # noqa: PLC0415
    from fedjax_async.data.decode import DECODERS  # noqa: PLC0415
    from fedjax_async.types import FederatedData  # noqa: PLC0415

    out = Path(arguments.out)
    require(not out.exists(), "out", str(out), "a folder that does not exist yet")
    found = registry.spec("dataset", DATASETS, arguments.dataset).make()
    if isinstance(found, FederatedData):
        for name in ("partition", "clients", "test_fraction"):
            given = getattr(arguments, name)
            require(given is None, name, given, f"left out: the clients of {found.name} have examples of their own")
    else:
        owned = getattr(found, "groups", ()) is not None
        require(owned or arguments.partition is not None, "partition", None, "given: the data have no natural owners")
        partition = arguments.partition or "natural"
        found = federate(found, partition, arguments.clients, arguments.seed, arguments.test_fraction)
    data = check_data(found)
    allowed = "one whose decoder data.decode has: in Python data.write_folder, then data.open_folder(DIR, decode=...)"
    require(data.decode in DECODERS.values(), "dataset", arguments.dataset, allowed)
    write_folder(out, data)
    tests = "of each client" if data.test_order is not None else "for all clients"
    classes = "" if data.num_classes is None else f", {data.num_classes} classes"
    print(
        f"{data.name}: {len(data.size)} clients, {data.size.sum()} examples of {data.x.dtype}{list(data.x.shape[1:])}"
        f"{classes}, {len(data.test_x)} test examples {tests}"
    )
    dataset = shlex.quote(f"folder:path={grammar.quoted(str(out))}")
    print(f"run: fedjax-async run --dataset {dataset} --clients {len(data.size)}")


def import_fedscale(arguments: argparse.Namespace) -> None:
    """Write the tables of FedScale's traces, and print how to use them."""
    from fedjax_async.clock import fedscale  # noqa: PLC0415

    options = {"clients": arguments.clients, "batch_size": arguments.batch_size}
    flags = fedscale.write_tables(arguments.out, capacity=arguments.capacity, behaviour=arguments.behaviour, **options)
    print(f"tables in {arguments.out}")
    print(f"use: {flags}")
