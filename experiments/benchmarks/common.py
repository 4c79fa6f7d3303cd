"""Shared by the benchmarks: the hardware's name, interleaved timing, a printed table that is also a CSV file."""

from __future__ import annotations

import csv
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


def hardware() -> str:
    """Device and host, for example ``"Intel(R) Xeon(R) Processor, 2 cores"``; an accelerator's kind comes first."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    host = f"{cpu}, {cores} cores"
    device = jax.devices()[0]
    return host if device.platform == "cpu" else f"{device.device_kind}; {host}"


def machine() -> str:
    """The hardware, and the version of JAX."""
    return f"{hardware()}, JAX {jax.__version__}"


def both_clocks() -> np.ndarray:
    """Elapsed seconds, and processor seconds of this process with all its threads; float64[2]."""
    return np.array([time.perf_counter(), time.process_time()])


def interleave(
    calls: Mapping[Any, Callable[[], Any]],
    repeats: int = 10,
    *,
    before: Callable[[], Any] | None = None,
    clock: Callable[[], Any] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of each call in each repeat; every repeat calls all of them, in an order that rotates.

    Compare medians, or two calls of the same repeat: a disturbance of the machine then affects all calls equally. The
    first call of each compiles and is not timed; ``before`` is called ahead of every timed call and is not timed. A
    call's time includes waiting for its result (``jax.block_until_ready``). On a busy machine use
    ``clock=time.process_time``, the processor time of all threads of this process.
    """
    names = list(calls)
    for name in names:
        jax.block_until_ready(calls[name]())
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        shift = turn % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            if before is not None:
                jax.block_until_ready(before())
            start = clock()
            jax.block_until_ready(calls[name]())
            seconds[name].append(clock() - start)
    return seconds


def peak_memory() -> float:
    """The peak memory of this process, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def one_process(script: str, *options: object) -> dict[str, Any]:
    """Run ``script --one OPTIONS`` in a separate process; print and return the row that it prints as JSON."""
    command = [sys.executable, script, "--one", *(str(option) for option in options)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, Any] = json.loads(answer.splitlines()[-1])
    print(row, flush=True)
    return row


def write_table(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Print rows as an aligned table, floats with four significant digits, and write them (:func:`save_table`)."""
    save_table(rows, path)
    columns = list(rows[0])
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    print(f"\n{hardware()}, jax {jax.__version__}; written to {path}")


def save_table(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write rows as CSV, floats in full, with a column naming the hardware.

    Columns are those of the first row. The file gets its name only when complete. ``ValueError`` for no rows.
    """
    if not rows:
        raise ValueError("rows = []: must be at least one row")
    columns = list(rows[0])
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(target.suffix + ".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, "hardware", "jax"])
        writer.writeheader()
        writer.writerows({**row, "hardware": hardware(), "jax": jax.__version__} for row in rows)
    part.replace(target)
