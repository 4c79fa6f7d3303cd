"""The command ``privacy``: the epsilon of saved runs."""

from __future__ import annotations

import argparse

from fedjax_async.results.privacy import guarantees


def privacy(arguments: argparse.Namespace) -> None:
    """Print what each folder's run guarantees."""
    for folder in arguments.folders:
        for one in guarantees(folder, delta=arguments.delta):
            bound = "epsilon: none" if one.epsilon is None else f"epsilon = {one.epsilon:.4g}"
            worst = "" if one.client is None else f"; client {one.client}, {one.participations} times"
            print(f"{folder}: {one.unit}: {bound} at delta = {one.delta:.3g} ({one.neighbours}{worst}): {one.how}")
