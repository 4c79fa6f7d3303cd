"""Mutation check: put one fault at a time into the package and see whether a test of the default suite fails.

    python -m tests.mutations --seed 0 --faults 60 --out faults.csv      # about a minute a fault
    python -m tests.mutations --faults 20 --only fedjax_async/local/training.py --list      # judges nothing

Each fault (``mutation_operators.py``) is put into a copy of the checkout, where the test files that cover the source
file run until one test fails. That test must pass without the fault. Lint and types are not asked: a fault is to be
found by what the program does. A fault that no test finds survives; it needs a test, or an entry in ``EXCLUDED`` with
the reason why it changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.mutation_operators import ROOT, Fault, choose, excluded, faults_in, mutated, sources

COPIED = ("fedjax_async", "tests", "notebooks", "experiments", "pyproject.toml", "README.md", "CITATION.cff")
SURVIVE = 0.05  # the share of faults that may survive
WHOLE_RUNS = {"peers": ("engine",), "engine": ("config",)}  # rooms whose tests run what a room is part of
LIMIT = 600.0  # seconds a fault
HANGS = 200  # seconds a test
RARE = 0.05  # a name in more than 1 / RARE test files says little about what they test
STAGES = (4, 12)  # test files of the first call of pytest and of the second; the others follow in a third
GENERAL = ("tests/engine/test_oracle.py", "tests/test_worlds.py", "tests/server/test_contract.py")
NOT_RUN = {"test_mutations", "test_layering"}  # these read the text of the package
DAY = "20270301"  # of the draws of tests/test_worlds.py, so that the verdict does not depend on the day


@cache
def words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def covering(path: str, root: Path = ROOT) -> list[str]:
    """Test files for a source file: those of a like name; those that name what it defines; its folder's; general ones.

    Of those that name what it defines, its folder's come first, and then those with rare names.
    """
    tests = sorted(test for test in (root / "tests").rglob("test_*.py") if test.stem not in NOT_RUN)
    module, folder = root / path, path.split("/")[1]
    defined = (getattr(node, "name", "") for node in ast.parse(module.read_text(encoding="utf-8")).body)
    names = {module.stem, *(name for name in defined if name and not name.startswith("_"))} - {"__init__"}
    usual = {name: sum(name in words(test) for test in tests) for name in names}
    score = {test: sum(1 / usual[name] for name in names if name in words(test)) for test in tests}
    alike = {test: len({*module.stem.split("_")} & {*test.stem.split("_")}) for test in tests}
    first = sorted(
        (test for test in tests if test.parent.name == folder and alike[test]), key=lambda test: -alike[test]
    )
    named = sorted(
        (test for test in tests if score[test] >= RARE), key=lambda test: (test.parent.name != folder, -score[test])
    )
    near = [test for room in (folder, *WHOLE_RUNS.get(folder, ())) for test in tests if test.parent.name == room]
    files = [*first, *named, *near, *(root / name for name in GENERAL)]
    return list(dict.fromkeys(str(file.relative_to(root)) for file in files))


def make_copy(folder: Path) -> Path:
    """A copy of the checkout; its compiled programs are those of the checkout, or most of the time is compilation."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    (programs := ROOT / ".pytest_cache" / "d" / "xla").mkdir(parents=True, exist_ok=True)
    (folder / ".pytest_cache" / "d").mkdir(parents=True)
    (folder / ".pytest_cache" / "d" / "xla").symlink_to(programs)
    return folder


def failing(folder: Path, arguments: list[str], seconds: float) -> str | None:
    """The first test that fails in a copy, or a test file that cannot be imported; None if all pass, or time is up."""
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-rfE", "--tb=no", "-o", f"faulthandler_timeout={HANGS}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "CI": "1", "WORLDS": DAY}
    process = subprocess.Popen(
        [*command, *arguments], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode in (0, 5):  # 5: all tests of these files are slow
        return None
    summary = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", out, re.MULTILINE)
    begun = re.findall(r"^(tests/\S+?\.py::.+?)(?: (?:PASSED|FAILED|ERROR).*)?$", out, re.MULTILINE)
    return (summary or begun[-1:] or ["pytest"])[0].strip()  # without a summary, the process ended in a test: a hang


@contextmanager
def put(fault: Fault, folder: Path) -> Iterator[None]:
    """A copy with the fault, as long as the block runs."""
    file = folder / fault.path
    source = file.read_text(encoding="utf-8")

    def write(content: str) -> None:
        file.write_text(content, encoding="utf-8")
        for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):  # perhaps of the same second and length
            old.unlink()

    write(mutated(source, fault))
    try:
        yield
    finally:
        write(source)


class Judge:
    """Finds the test that catches a fault; remembers which tests pass without a fault."""

    def __init__(self) -> None:
        self.passes: dict[str, bool] = {}

    def __call__(self, fault: Fault, folder: Path) -> str | None:
        """The test that fails with the fault and passes without it; None if the fault survives."""
        end, files = time.monotonic() + LIMIT, covering(fault.path, folder)
        for low, high in zip((0, *STAGES), (*STAGES, len(files))):
            while files[low:high] and (left := end - time.monotonic()) > 0:
                broken = [f"--deselect={test}" for test, passes in self.passes.items() if not passes]
                with put(fault, folder):
                    by = failing(folder, [*files[low:high], *broken], left)
                if by is None or self.passes.get(by) is False:
                    break
                if self._pass(by, folder):
                    return by
        return None

    def _pass(self, test: str, folder: Path) -> bool:
        if test not in self.passes:
            arguments = [test] if "::" in test else [test, "--collect-only"]
            self.passes[test] = failing(folder, arguments, LIMIT) is None
            if not self.passes[test]:
                print(f"{test} fails without a fault, too", file=sys.stderr, flush=True)
        return self.passes[test]


COLUMNS = ["path", "line", "kind", "function", "before", "after", "verdict", "by", "seconds"]


def earlier(out: Path | None) -> dict[tuple[str, ...], list[str]]:
    """The rows of an earlier call by fault, without the survivors: a new test may catch them."""
    if out is None or not out.exists():
        return {}
    rows = list(csv.reader(out.open(newline="", encoding="utf-8")))[1:]
    return {tuple(row[:6]): row for row in rows if row[6] == "caught"}


def main() -> int:
    """Choose faults, judge them, print and write the verdicts; returns 1 if more than 5 % survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="PATH", help="source files")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV; caught faults in it are not judged again")
    a = parser.parse_args()
    found = [f for path in a.only or sources() for f in faults_in((ROOT / path).read_text(encoding="utf-8"), path)]
    chosen = choose([fault for fault in found if not excluded(fault)], a.seed, a.faults)
    if a.list:
        for fault in chosen:
            print(f"{fault.path}:{fault.line} {fault.kind}: {fault.before} -> {fault.after}")
        return 0
    rows, copies, judge = earlier(a.out), queue.Queue[Path](), Judge()

    def judged(fault: Fault) -> list[str]:
        if fault.name not in rows:
            folder, begin = copies.get(), time.monotonic()
            by = judge(fault, folder)
            copies.put(folder)
            seconds = f"{time.monotonic() - begin:.0f}"
            rows[fault.name] = [*fault.name, "survived" if by is None else "caught", by or "", seconds]
        return rows[fault.name]

    survived = 0
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(a.processes) as pool:
        for number in range(a.processes):
            copies.put(make_copy(Path(place) / str(number)))
        for path, line, kind, _, before, after, verdict, by, _ in pool.map(judged, chosen):
            survived += verdict == "survived"
            print(f"{verdict} {path}:{line} {kind}: {before} -> {after}  {by}", flush=True)
            if a.out is not None:
                with a.out.open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows([COLUMNS, *list(rows.values())])
    print(f"{len(chosen)} of {len(found)} faults: {len(chosen) - survived} caught, {survived} survived")
    return int(survived > SURVIVE * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
