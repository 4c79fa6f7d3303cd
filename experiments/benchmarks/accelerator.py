"""What a card can do: a queue of measurements, in order of worth, within some minutes.

    python experiments/benchmarks/accelerator.py                                   # the queue, and what is known of it
    python experiments/benchmarks/accelerator.py --queue --minutes 9 --out FOLDER
    python experiments/benchmarks/accelerator.py --queue --only "MLP-64" --known experiments/benchmarks/results
    python experiments/benchmarks/accelerator.py --queue --smoke --minutes 5       # on a CPU: does it run

It measures the device that JAX uses by default and needs no data beside the package's. Each measurement is a process of
its own with its own XLA flags. Several are prepared and compiled side by side, then one at a time is timed, at most two
minutes long. Measurements that ``--known`` has for this device and these sources are skipped, and those for which there
was no time are listed. FOLDER gets ``queue.csv``, a row as soon as it is measured, and ``queue.md``, the same for
reading. Without PyTorch its rows are left out. Exit code 1: something failed, or disagrees with the oracle.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the card

import jax
from accelerator_parts import Measurement, Row, bits
from accelerator_queue import measurements
from common import hardware

from fedjax_async.results import table

HERE = Path(__file__).resolve().parent
COLUMNS = ("measurement", "quantity", "value", "least", "most", "card", "sources", "hardware", "jax", "time", "ok")
LONGEST = 120.0  # seconds that a measurement may be timed
PREPARING = 100.0  # seconds that measurements may take to compile, side by side
MEASURED = ("clock", "compress", "config", "data", "engine", "geometry", "local", "models", "peers", "server")


def sources() -> str:
    """A digest of the code whose speed is measured, and of the measurements."""
    package = HERE.parents[1] / "fedjax_async"
    paths = [path for folder in MEASURED for path in sorted((package / folder).rglob("*.py"))]
    total = hashlib.sha256()
    for path in (*paths, HERE / "accelerator_parts.py", HERE / "accelerator_queue.py"):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def card() -> str:
    """The device's kind; of a CPU the processor's name."""
    return hardware().partition(";" if ";" in hardware() else ",")[0]


def known(folder: Path | None, card: str, digest: str) -> set[str]:
    """The measurements that a folder, or folders in it, has for this card and these sources, and that were right."""
    right = {}
    for path in sorted(folder.rglob("queue.csv")) if folder is not None else []:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["card"] == card and r["sources"] == digest]
        right |= {r["measurement"]: r.get("ok") != "False" for r in rows}
    return {name for name in right if right[name]}


class Process:
    """A measurement in a process of its own: prepared as soon as it starts, timed when it is told."""

    def __init__(self, one: Measurement, smoke: bool) -> None:
        self.measurement = one
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed in stop)
        self._lines: SimpleQueue[str] = SimpleQueue()
        own = dict(one.environment)
        if "XLA_FLAGS" in own:
            own["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {own['XLA_FLAGS']}".strip()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--one", one.name, *(["--smoke"] if smoke else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
            env=os.environ | own,
        )
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def line(self, until: float) -> str | None:
        """The next line that it prints, ``""`` at its end; None if there is none by ``until`` (``time.monotonic``)."""
        try:
            return self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return None

    def go(self) -> None:
        """Let it be timed."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def why(self) -> str:
        """The last line of what it complained about."""
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {self._process.returncode}"

    def stop(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


def measure_one(one: Measurement, smoke: bool) -> None:
    """In the process of a measurement: prepare, say so, wait, measure, print the rows as JSON."""
    steps = one.make(smoke)
    next(steps)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        next(steps)
    except StopIteration as end:
        print(json.dumps(end.value), flush=True)


class Results:
    """The rows so far, in ``queue.csv`` and ``queue.md`` of a folder."""

    def __init__(self, folder: Path, card: str, digest: str) -> None:
        self._folder, self._same = (
            folder,
            {"card": card, "sources": digest, "hardware": hardware(), "jax": jax.__version__},
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.bad = folder / "queue.csv", 0
        if not self._path.exists():
            self._path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def add(self, name: str, rows: Sequence[Row]) -> None:
        """Keep and print the rows of a measurement."""
        now = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            for row in rows:
                writer.writerow({"measurement": name} | row | self._same | now)
                self.bad += not row.get("ok", True)
                spread = f" ({row['least']:.4g} to {row['most']:.4g})" if "least" in row else ""
                print(f"{name}: {row['quantity']} {row['value']:.4g}{spread}", flush=True)

    def page(self, left: Sequence[str], failed: Sequence[str]) -> None:
        """Write ``queue.md``."""
        with self._path.open(encoding="utf-8", newline="") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
        shown = [{name: _short(row[name]) for name in COLUMNS[:5]} for row in rows]
        lines = [f"# {self._same['hardware']}, JAX {self._same['jax']}", f"Sources {self._same['sources']}."]
        lines += [table(shown, style="markdown")] if shown else []
        lines += ["No time was left for: " + "; ".join(left) + "."] if left else []
        lines += ["Failed: " + "; ".join(failed) + "."] if failed else []
        (self._folder / "queue.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def run(chosen: Sequence[Measurement], results: Results, minutes: float, smoke: bool, together: int) -> int:
    """Measure until the time is over; returns the exit code."""
    end = time.monotonic() + 60 * minutes
    preparing, longest = (math.inf, math.inf) if smoke else (PREPARING, LONGEST)  # there is no card to give back
    left, failed, waiting = [], [], list(chosen)
    while waiting and time.monotonic() < end:
        group, waiting = waiting[:together], waiting[together:]
        processes = [Process(one, smoke) for one in group]
        by = min(end, time.monotonic() + preparing)
        ready = {p.measurement.name: p.line(by) for p in processes}
        for process in processes:
            name, said = process.measurement.name, ready[process.measurement.name]
            if said != "ready":
                late = f"not compiled after {preparing:g} s" if time.monotonic() < end else "the time was over"
                failed.append(f"{name}: {late if said is None else process.why()}")
            elif time.monotonic() + process.measurement.seconds * (not smoke) > end:
                left.append(name)
            else:
                process.go()
                found = process.line(min(end, time.monotonic() + longest))
                if found and found.startswith("["):
                    results.add(name, json.loads(found))
                else:
                    failed.append(f"{name}: {'ended after its time' if found is None else process.why()}")
            process.stop()
            results.page(left + [one.name for one in waiting], failed)
    left += [one.name for one in waiting]
    results.page(left, failed)
    print(*(f"failed: {one}" for one in failed), *(f"no time was left for: {one}" for one in left), sep="\n")
    return 1 if failed or results.bad else 0


def main() -> int:
    """Parse, measure, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", action="store_true", help="measure; without it the queue is listed")
    parser.add_argument("--minutes", type=float, default=30.0, help="when to stop [30]")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="measurements whose names have one of these texts")
    parser.add_argument("--known", type=Path, metavar="FOLDER", help="skip what is measured there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results [./queue]")
    parser.add_argument("--together", type=int, default=8, metavar="N", help="prepared side by side [8]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--bits", metavar="NAME", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if not (a.minutes > 0 and a.together > 0):
        parser.error(f"--minutes {a.minutes} --together {a.together}: must be positive")
    if a.bits:
        print(bits(a.bits, a.smoke))
        return 0
    every = measurements()
    if a.one:
        measure_one(next(one for one in every if one.name == a.one), a.smoke)
        return 0
    name, digest = card(), sources() + ("-smoke" if a.smoke else "")
    there = known(a.known, name, digest)
    chosen = [one for one in every if a.only is None or any(text in one.name for text in a.only)]
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: its rows are left out")
    count = sum(one.name in there for one in chosen)
    print(f"{name}, sources {digest}: {len(chosen)} measurements, {count} of them known")
    if not a.queue:
        for one in chosen:
            print(f"{one.seconds:5.0f} s  {one.name}{'  (known)' if one.name in there else ''}")
        return 0
    results = Results(a.out or Path("queue"), name, digest)
    return run([one for one in chosen if one.name not in there], results, a.minutes, a.smoke, a.together)


if __name__ == "__main__":
    sys.exit(main())
