"""The measurements for a new device, within some minutes: a page, tables and a profile.

    python experiments/benchmarks/accelerator.py --minutes 30
    python experiments/benchmarks/accelerator.py --smoke             # a minute on a CPU: does it run
    python experiments/benchmarks/accelerator.py --parts oracle rates

It measures the device that JAX uses by default. Each part has a share of the time; unused time goes to the next parts.
With ``--parts`` the sections of the other parts stay on an existing page. Measurements for which there was no time are
listed on the page. The first measurement of every part is always made, and no measurement is interrupted, so it may end
late. Exit code 1: the engine disagrees with the oracle, or a measurement failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerator_parts as parts
import jax
from accelerator_parts import SMOKE, Item, Row, Size
from common import hardware, write_table

from fedjax_async.results import table

# part -> (title, its items, weight of its share of the time)
PARTS: dict[str, tuple[str, Callable[[Size], Iterator[Item]], float]] = {
    "oracle": ("Engine against oracle", parts.oracle, 1.0),
    "rates": ("Client updates per second", parts.rates, 3.0),
    "lowerings": ("Lowerings of the convolution under vmap", parts.lowerings, 1.0),
    "widths": ("Width of a wave", parts.widths, 1.0),
    "sweeps": ("Sweeps", parts.sweeps, 1.5),
    "populations": ("Populations", parts.populations, 1.0),
    "memory": ("Memory", parts.memory, 0.5),
    "choices": ("Choices of the engine", parts.choices, 2.0),
    "profile": ("Profile of a run", parts.profile, 1.0),
}


def measured(items: Iterator[Item], until: float) -> tuple[list[Row], list[str], list[str]]:
    """Rows of the first item and of those begun before ``until`` (``time.monotonic``), names left out, failures."""
    rows: list[Row] = []
    left, failed = [], []
    for k, (name, call) in enumerate(items):
        if k > 0 and time.monotonic() >= until:
            left.append(name)
            continue
        try:
            found = call()
        except (ValueError, MemoryError, RuntimeError) as error:  # the next items may still work on this device
            failed.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        rows += found
        print(*found, sep="\n", flush=True)
    return rows, left, failed


def section(name: str, rows: list[Row], left: list[str], failed: list[str]) -> str:
    """The section of a part on the page, in Markdown."""
    title, items, _ = PARTS[name]
    about = str(getattr(items, "func", items).__doc__).partition("\n")[0]
    shown = [{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    lines = [f"## {title}", about, table(shown, style="markdown") if shown else "Nothing was measured."]
    lines += ["Left out for lack of time: " + "; ".join(left) + "."] if left else []
    lines += ["Failed: " + "; ".join(failed)] if failed else []
    return "\n\n".join(line.strip() for line in lines)


def sections_of(page: Path) -> dict[str, str]:
    """The sections of a page by title; none if there is no page."""
    _, *found = page.read_text(encoding="utf-8").split("\n## ") if page.exists() else [""]
    return {text.partition("\n")[0]: f"## {text.strip()}" for text in found}


def run(chosen: list[str], size: Size, minutes: float, out: Path, note: str) -> int:
    """Measure, and write the page after each part; returns the exit code."""
    began, share = time.monotonic(), 0.0
    total = sum(PARTS[name][2] for name in chosen)
    page = out / "README.md"
    sections = sections_of(page)
    bad = 0
    for name in chosen:
        title, items, weight = PARTS[name]
        share += weight / total
        call: Any = partial(items, folder=out / "profile") if name == "profile" else items
        rows, left, failed = measured(call(size), began + 60 * minutes * share)
        bad += len(failed) + sum(not row.get("ok", True) for row in rows)
        if rows:
            write_table(rows, out / f"{name}.csv")
        sections[title] = section(name, rows, left, failed)
        spent = (time.monotonic() - began) / 60
        head = f"{hardware()}; JAX {jax.__version__}, backend {jax.default_backend()}, {len(jax.devices())} device(s)"
        what = f" --parts {' '.join(chosen)}" if set(chosen) != set(PARTS) else ""
        limits = f"`python experiments/benchmarks/accelerator.py{what}`, {minutes:g} minutes allowed, {spent:.1f} used."
        top = ["# Measurements of a device", head + ".", f"{limits} {note}".strip()]
        ordered = [sections[title] for title, *_ in PARTS.values() if title in sections]
        page.write_text("\n\n".join([*top, *ordered]) + "\n", encoding="utf-8")
    print(f"\nwritten to {out}: README.md, tables, and for TensorBoard or Perfetto profile/")
    return 1 if bad else 0


def main() -> int:
    """Parse, measure, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all parts together [30]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--models", nargs="+", choices=Size.models, default=list(Size.models), metavar="MODEL")
    parser.add_argument("--out", type=Path, help="folder [results/accelerator_DEVICE beside this file]")
    parser.add_argument("--note", default="", help="a sentence for the page, such as other load on the machine")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; the page goes here unless --out is given")
    a = parser.parse_args()
    if not a.minutes > 0:
        parser.error(f"--minutes {a.minutes}: must be positive")
    device = re.sub(r"[^a-z0-9]+", "_", re.split("[,;]", hardware())[0].lower()).strip("_")
    out = a.out or (Path() if a.smoke else Path(__file__).parent / "results") / f"accelerator_{device}"
    out.mkdir(parents=True, exist_ok=True)
    return run(a.parts, SMOKE if a.smoke else Size(models=tuple(a.models)), a.minutes, out, a.note)


if __name__ == "__main__":
    sys.exit(main())
