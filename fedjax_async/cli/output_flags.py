"""The flags of results, and their help texts: tables, pictures, folders, streams."""

from __future__ import annotations

import argparse

from fedjax_async.cli.parsing import NO_PLOTS, folder, whole


def add_comparison(parser: argparse.ArgumentParser, baseline: str | None, seeds: int = 1) -> None:
    """Add ``--seeds``, ``--baseline``, ``--target``, ``--final`` and ``--columns``."""
    usual = baseline or "the first fedavg, else the first"
    parser.add_argument("--seeds", type=whole, default=seeds, metavar="N", help=f"number of seeds [{seeds}]")
    parser.add_argument(
        "--baseline",
        default=baseline,
        metavar="METHOD",
        help=f"method (or its label) to which times are relative [{usual}]",
    )
    parser.add_argument(
        "--target",
        default="95%",
        metavar="ACCURACY",
        help="measure the time to this test accuracy (without a server: of the nodes' own models on their own tests): "
        "a value such as 0.7, a METHOD or label (its final accuracy), or a percentage of the lowest final accuracy, "
        "which changes with the methods [95%%]",
    )
    add_final(parser)
    add_columns(parser, "comparison.tex")


def add_columns(parser: argparse.ArgumentParser, table: str) -> None:
    """Add ``--columns``."""
    parser.add_argument(
        "--columns",
        type=names_in,
        metavar="NAMES",
        help=f"columns of {table} (LaTeX) by short names, such as accuracy,interval,time,relative,updates,"
        "bytes,energy; the other tables have all [all]",
    )


def add_final(parser: argparse.ArgumentParser, usual: str = "", *, optional: bool = False) -> None:
    """Add ``--final``; ``usual``: the text of its default, if it is not fixed.

    ``optional``: a flag that is not given is None.
    """
    parser.add_argument(
        "--final",
        default=None if optional or usual else "tail",
        metavar="WAY",
        help="final accuracy in tables and pictures: last, best, tail (mean of the last tenth of the evaluations) or "
        f"tail:K (mean of the last K) [{usual or 'tail'}]",
    )


def names_in(text: str) -> tuple[str, ...]:
    """The type of ``--format``, ``--columns`` and ``--stream``: names joined by commas."""
    names = tuple(text.split(","))
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"must be different names, not {text}")
    return names


def add_drawing(parser: argparse.ArgumentParser, *, formats: bool = True, curves: bool = False) -> None:
    """Add ``--format``, ``--width`` and ``--title``, and ``--x`` for ``curves``."""
    group = parser.add_argument_group("pictures")
    if formats:
        text = "png, pdf or svg; several joined by commas [png]"
        group.add_argument("--format", type=names_in, default=("png",), metavar="FORMAT", help=text)
    text = "column or page of a paper (3.5 or 7.16 inches) [for the screen]"
    group.add_argument("--width", metavar="column|page", help=text)
    group.add_argument("--title", metavar="TEXT", help="title above the pictures [none]")
    if curves:
        text = "draw curves against time, update, step (of the server), bytes or, with --energy, energy [time]"
        group.add_argument("--x", metavar="AXIS", help=text)


def add_outputs(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the flags of the output folder, of progress, streams and pictures."""
    group = parser.add_argument_group("output")
    usual = f"{default}, or {default}_2, ... where that holds other results" if default else "none: only print"
    group.add_argument("--out", type=folder, metavar="DIR", help=f"folder for the results [{usual}]")
    parser.set_defaults(usual_out=default)
    group.add_argument("--overwrite", action="store_true", help="replace results of other settings in DIR")
    group.add_argument(
        "--again", action="store_true", help="train again, also if DIR has the finished run, or input files changed"
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar; off a terminal, no line a minute")
    group.add_argument("--no-plots", **NO_PLOTS)
    add_watching(group)
    add_drawing(parser, curves=True)


def add_watching(parser: argparse._ActionsContainer) -> None:
    """Add ``--stream`` and ``--keep-best``."""
    parser.add_argument(
        "--stream",
        type=names_in,
        default=(),
        metavar="NAME",
        help="write each evaluation as soon as it is computed: csv (into stream.csv), tensorboard or wandb; several "
        "joined by commas [none]",
    )
    parser.add_argument(
        "--keep-best",
        action="store_true",
        help="also keep the best model, in best.npz: by validation accuracy if there is a validation part, else by "
        "test accuracy",
    )
