"""Training all methods in all blocks of a scale, in several processes, and continuing where a killed process stopped.

What is finished of a method in a block is in ``OUT/parts/BLOCK/METHOD_*.csv``. ``OUT/definition.json`` says what was
asked; a folder of another definition is refused.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import kept
import spaces
import training
from scenes import SCALES, Block, blocks

from fedjax_async.base import check, disk, registry
from fedjax_async.config import plugins
from fedjax_async.results import files

DEFINITION = "definition.json"
# By the system's name of the processor: its programs use the instructions that all such processors of ten years have,
# and neither approximations nor kernels of matrix products that differ between them. oneDNN, which sums XLA's larger
# matrix products, looks at the processor by itself.
AVX2 = {
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2 --xla_cpu_enable_platform_dependent_math=false",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
ALIKE = {"x86_64": AVX2, "AMD64": AVX2}


class Asked(NamedTuple):
    """A method in a block, and the folder of all results."""

    method: str
    block: Block
    folder: Path
    plugin: str = ""  # the file that registers the method, if it is not of the package

    def results(self) -> kept.Results:
        """Train it."""
        search = added(self.plugin)[self.method] if self.plugin else None
        return training.run(self.method, self.block, search)


class Part(Protocol):
    """What :func:`train_all` trains: a method in a block, or anything with a name, a block and a folder of its own."""

    method: str
    block: Block
    folder: Path  # of all results

    def results(self) -> kept.Results:
        """Train it."""


def place_of(part: Part) -> Path:
    """The folder of a part's files."""
    return part.folder / "parts" / part.block.name


def is_finished(part: Part) -> bool:
    """Whether the results of a part are there; the file that is written last counts."""
    return (place_of(part) / f"{part.method}_refused.csv").is_file()


def added(plugin: str) -> dict[str, Mapping[str, spaces.Range]]:
    """The methods that a plugin's file registers, each with the ranges of the file's ``SEARCH``; loads the file."""
    plugins.load_plugin(plugin)
    path = str(Path(plugin).resolve())
    (module,) = [one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == path]
    names = [name for name in registry.ADDED.get("method", {}) if name in spaces.methods()]
    if not names:
        raise ValueError(f"add = {plugin!r}: must register a method with a server")
    search, known = dict(getattr(module, "SEARCH", {})), spaces.methods()
    able = sorted({option for name in names for option in spaces.numbers_of(known[name])})
    for option, factors in search.items():
        allowed = f"an option of {', '.join(names)} with a default above 0: {', '.join(able)}"
        check.require(option in able, "SEARCH", option, allowed)
        pair = isinstance(factors, tuple) and len(factors) == 2 and all(map(check.is_real, factors))
        allowed = "two factors of its default, (low, high) with 0 < low < high"
        check.require(pair and 0 < factors[0] < factors[1], f"SEARCH[{option!r}]", factors, allowed)
    return dict.fromkeys(names, search)


def definition(scale: str, plugin: str = "") -> dict[str, object]:
    """What the results of a folder depend on beside the package: settings, points, seeds, and a plugin's code."""
    how = SCALES[scale]
    found: dict[str, object] = {"scale": scale, "seeds": how.seeds, "points": how.points, "knobs": how.knobs}
    for block in blocks(scale):
        try:
            found[block.name] = block.settings()
        except ValueError as error:
            found[block.name] = str(error)
    return found | ({"plugin": digest(plugin)} if plugin else {})


def digest(plugin: str) -> str:
    """Eight hexadecimal digits that stand for the content of a plugin and of the files beside it that it imports.

    The plugin must have been loaded (:func:`added`).
    """
    here = Path(plugin).resolve()
    loaded = {Path(file).resolve() for one in list(sys.modules.values()) if (file := getattr(one, "__file__", None))}
    content = hashlib.sha256(here.read_bytes())
    for path in sorted(path for path in loaded - {here} if path.parent == here.parent and path.suffix == ".py"):
        content.update(path.read_bytes())
    return content.hexdigest()[:8]


def begin(folder: Path, about: Mapping[str, object]) -> None:
    """Write the definition of the folder's results; ``ValueError`` if it holds those of another one."""
    path, content = folder / DEFINITION, files.json_bytes(about)
    if path.is_file() and path.read_bytes() != content:
        raise ValueError(f"out = {str(folder)!r}: must be empty or hold the same comparison; {DEFINITION} differs")
    folder.mkdir(parents=True, exist_ok=True)
    disk.write(path, content)


def usual_processes() -> int:
    """One per core; on an accelerator none beside this one, whose memory one process takes."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len(cores) if jax.default_backend() == "cpu" else 0


def train(asked: Part) -> Part:
    """Train one part and write its results."""
    kept.write(place_of(asked), asked.method, asked.results())
    return asked


def train_all(all_asked: Sequence[Part], processes: int, *, quiet: bool = False) -> kept.Results:
    """The results of everything, in this order; what is finished is read, the rest trained.

    ``processes``: how many train at a time; 0: this process does, one part after the other.
    """
    left = [asked for asked in all_asked if not is_finished(asked)]
    if left:
        print(f"{len(all_asked) - len(left)} of {len(all_asked)} parts are finished", file=sys.stderr, flush=True)
    for number, asked in enumerate(_trained(left, processes), 1):
        if not quiet:
            why = "".join(f": does not run: {one.why}" for one in kept.read(place_of(asked), asked.method).refused)
            print(f"{number} of {len(left)}: {asked.block.name}, {asked.method}{why}", file=sys.stderr, flush=True)
    return kept.joined([kept.read(place_of(asked), asked.method) for asked in all_asked])


def _trained(left: Sequence[Part], processes: int) -> Iterator[Part]:
    """The parts as they end."""
    if not left or not processes:
        yield from map(train, left)
        return
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(left)), mp_context=start, initializer=_begin) as pool:
        for done in as_completed([pool.submit(train, asked) for asked in left]):
            yield done.result()


def _begin() -> None:
    """Keep a worker on one core and its programs to the same instructions everywhere; end it with its parent.

    So neither the number of workers nor the width of a processor's vectors changes the order of sums.
    """
    alike = ALIKE.get(platform.machine(), {})
    flags = f"{os.environ.get('XLA_FLAGS', '')} {alike.get('XLA_FLAGS', '')}".strip()
    os.environ |= alike | {"XLA_FLAGS": flags}
    if hasattr(os, "sched_setaffinity"):
        index = multiprocessing.current_process()._identity[0] - 1
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
