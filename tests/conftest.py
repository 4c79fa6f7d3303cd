"""Strict mode for every test: no silent broadcasting, no silent promotion, no warnings.

``filterwarnings`` in pyproject.toml turns warnings into errors. A test marked ``float64`` runs with 64-bit numbers.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import jax
import pytest

import tests.contexts  # noqa: F401

if TYPE_CHECKING:
    from tests.results.sweep_engine import Engine

# Most of the suite's time is compilation. Optimisation level 0 compiles fastest and suits the small models of the
# tests. The commands that tests start train longer, so level 1 pays for them. XLA's former emitters compile in half the
# time of the new ones; JAX 0.12 has only the new ones. Splitting a small program for 32 threads takes a quarter more
# time and many more memory maps. XLA reads its flags once, when it starts.
FORMER = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
WHOLE = f" --xla_cpu_parallel_codegen_split_count=1{FORMER}"
HERE, COMMANDS = (f"--xla_backend_optimization_level={level}{WHOLE}" for level in (0, 1))
if os.environ.get("XLA_FLAGS", COMMANDS) == COMMANDS:
    os.environ["XLA_FLAGS"] = HERE
    jax.devices()
    os.environ["XLA_FLAGS"] = COMMANDS

# Files of tests that need a package which is no part of the extra ``test``: without it they are not collected, and the
# summary names them.
NEED = {"torch": ["models/test_torch_modules.py"]}
MISSING = {package: files for package, files in NEED.items() if find_spec(package) is None}
collect_ignore = [file for files in MISSING.values() for file in files]

# Files whose tests take long begin first, so that at the end no process waits for another one's last test.
LONG = {"test_notebooks.py", "test_worlds.py"}

# Tracing makes millions of short-lived objects and few cycles, so a rarer search for cycles saves time.
gc.set_threshold(50_000, 20, 50)

# Lowering is 5 % quicker if an operation keeps its own line only, without the calls that led to it.
jax.config.update("jax_include_full_tracebacks_in_locations", False)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("local", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def commands_compile_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that compares a command's numbers with this process's, bit for bit, or starts only short commands."""
    monkeypatch.setenv("XLA_FLAGS", HERE)


@pytest.fixture
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names and plugins that a test registers are forgotten after it."""
    from fedjax_async.base import registry
    from fedjax_async.config import plugins

    monkeypatch.setattr(registry, "ADDED", {})
    monkeypatch.setattr(plugins, "LOADED", {})
    registry.forget()
    yield
    registry.forget()


@pytest.fixture
def made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is a made-up one of its settings, and pictures are not drawn."""
    from tests.results.made_up import of_group

    monkeypatch.setattr("fedjax_async.config.sweeping.execute_group", of_group)
    pictures_are_blank(monkeypatch)


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of runs and comparisons are files without a picture."""
    pictures_are_blank(monkeypatch)


def pictures_are_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    blank = Figure()
    for name in ("accuracy_curve", "loss_curve", "measured_curve", "gantt", "staleness_histogram"):
        monkeypatch.setattr(f"fedjax_async.results.runs.{name}", lambda *given, **options: blank)
    monkeypatch.setattr(Figure, "savefig", lambda figure, stream, **options: stream.write(b"drawn"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine for sweeps that returns made-up runs."""
    from tests.results import sweep_engine

    return sweep_engine.use(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def saving_is_fast() -> Iterator[None]:
    """Nothing waits for the disk (``test_disk.py`` checks that the package would), and git is asked only once."""
    from fedjax_async.results import provenance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)
        patch.setattr(provenance, "revision", functools.cache(provenance.revision))
        yield


PROCESS = Path("/proc/self")  # where Linux shows the memory of a process
NEEDED = 3 * 2**30  # bytes of memory of a test process and the commands that it starts


@pytest.hookimpl(tryfirst=True)  # before xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite on all cores, and paths that are given in this process, unless ``-n`` says otherwise."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and "PYTEST_XDIST_WORKER" not in os.environ
    if whole and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses, config.option.dist = "auto", "worksteal"


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many processes as there are cores and memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if PROCESS.exists() else cores * NEEDED
    return max(1, min(cores, memory // NEEDED))


# A process with more of either at the end of a test file drops its compiled programs, which takes seconds.
SHARE = 2  # 1/SHARE of a process's part of the memory; their commands and the kernel's file cache need the rest
MOST_MAPS = 40_000  # memory maps; Linux allows 65,530, and XLA ends a process that needs more


def holds_too_much() -> bool:
    """Whether this process should drop its compiled programs; False where the system does not show its memory."""
    if not PROCESS.exists():
        return False
    pages = int((PROCESS / "statm").read_text().split()[1])
    maps = (PROCESS / "maps").read_bytes().count(b"\n")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return SHARE * processes * pages > os.sysconf("SC_PHYS_PAGES") or maps > MOST_MAPS


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go() -> Iterator[None]:
    """Drop compiled programs: otherwise they stay until the process ends, 4.5 GB of them at the end of the suite."""
    yield
    if holds_too_much():
        jax.clear_caches()
        gc.collect()
        # without this, glibc keeps the free memory, and every later test file would drop the programs again
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """Run a test that is marked ``float64`` with 64-bit numbers; its fixtures are made without."""
    with jax.enable_x64(True) if pyfuncitem.get_closest_marker("float64") else nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first; cases that a marker ``slow_cases`` names are slow, and a name of no case is an error."""
    absent: dict[str, set[str]] = {}
    for item in items:
        if (marker := item.get_closest_marker("slow_cases")) is not None:
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            absent.setdefault(test, set(marker.args)).discard(case)
            if case in marker.args:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONG)
    wrong = [f"{test}[{case}]" for test, cases in absent.items() for case in sorted(cases)]
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_cases names cases that do not exist: {', '.join(wrong)}")


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests, which stay, from later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs in pytest's own cache, because most of the suite's time is compilation.

    xdist workers share the cache and, through the environment, so do the commands that tests start.
    ``pytest --cache-clear`` empties it.
    """
    if not hasattr(config, "cache"):  # pytest -p no:cacheprovider: do not use the user's own cache either
        jax.config.update("jax_enable_compilation_cache", False)
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        return
    options = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.01,  # small programs too: together they take most of the time
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files that were not collected, and show how many pairs of values the drawn worlds have covered."""
    for package, files in MISSING.items():
        terminalreporter.write_line(f"not run without {package} (pip install {package}): {', '.join(files)}")
    passed = [report.user_properties for report in terminalreporter.getreports("passed") if report.when == "call"]
    found = [one for given in passed for name, text in given if name == "worlds" for one in json.loads(text)]
    if found:
        from tests.draws import all_pairs, pairs

        worlds, refusals = ([thing for one in found for thing in one[name]] for name in ("worlds", "refusals"))
        line = f"{len(pairs(worlds))} pairs of kinds of values of {all_pairs()} covered today, {len(refusals)} refused"
        terminalreporter.write_line(f"{len(worlds)} worlds: {line}")
