"""The flags of ``data``: list, fetch and verify data sets; import data and device traces from other tools' files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fedjax_async.base import home
from fedjax_async.cli.parsing import folder, real, whole

Action = Callable[[argparse.Namespace], None]
EXPORT = """\
FedScale's traces are pickles, which this program never reads. If you trust the file, convert it to JSON first:
  python -c 'import json, pickle, sys; t = pickle.load(sys.stdin.buffer); \\
    print(json.dumps({str(k): v for k, v in t.items()}, default=float))' < client_device_capacity > capacity.json
"""


def add_data(
    data: argparse.ArgumentParser,
    later: Callable[[str, str], Action],
    add_plugins: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the actions; ``later(module, name)``: the action ``name`` of a module that is imported when it runs."""

    def verify(arguments: argparse.Namespace) -> None:
        home.require_fetched(arguments.names, arguments.data_dir)
        later("data", "verify_data")(arguments)

    actions = data.add_subparsers(dest="data_command", required=True, metavar="ACTION")

    def action(name: str, about: str, act: Action, **options: Any) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=about, description=about, **options)
        sub.set_defaults(action=act)
        return sub

    of_names = [
        action(
            "list", "list the data sets, their sources and whether they are on this machine", later("data", "list_data")
        ),
        action("fetch", "fetch data sets and check their hashes", later("data", "fetch_data")),
        action("verify", "check the hashes of data sets that were fetched", verify),
    ]
    for sub in of_names:
        text = "folder of the data sets [FEDJAX_ASYNC_DATA or a cache]"
        sub.add_argument("--data-dir", type=folder, metavar="DIR", help=text)
    for sub in of_names[1:]:
        sub.add_argument("names", nargs="+", metavar="NAME", help="such as mnist or har; `data list` shows all")
    of_names[1].add_argument("--source", metavar="PATH", help="read this folder or archive instead of downloading")

    about = "convert a data set, such as files of LEAF, TFF, Hugging Face or Flower, to a folder divided by clients"
    imported = action("import", about, later("data", "import_data"))
    text = "data set and options, e.g. leaf:task=femnist,path=DIR; `fedjax-async list datasets --options` shows all"
    imported.add_argument("dataset", metavar="DATASET", help=text)
    imported.add_argument(
        "--out", type=folder, required=True, metavar="DIR", help="new folder; use it as --dataset folder:path=DIR"
    )
    imported.add_argument("--partition", metavar="NAME", help="how examples are divided among clients [natural owners]")
    imported.add_argument("--clients", type=whole, metavar="N", help="number of clients [one for each natural owner]")
    text = "fraction of each client's examples kept for its own test [the data set's]"
    imported.add_argument("--test-fraction", type=real, metavar="X", help=text)
    imported.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the partition [0]")
    add_plugins(imported)

    about = "convert FedScale's device traces to tables of delays, links and availability"
    raw = argparse.RawDescriptionHelpFormatter
    traces = action("fedscale", about, later("data", "import_fedscale"), epilog=EXPORT, formatter_class=raw)
    traces.add_argument(
        "--capacity", metavar="FILE", help="JSON of client_device_capacity; gives delay.csv and network.csv"
    )
    traces.add_argument("--behaviour", metavar="FILE", help="JSON of client_behave_trace; gives availability.csv")
    traces.add_argument("--out", type=folder, required=True, metavar="DIR", help="folder for the tables")
    traces.add_argument("--clients", type=whole, metavar="N", help="only the first N devices [all]")
    traces.add_argument("--batch-size", type=whole, default=32, metavar="N", help="examples per local step [32]")
