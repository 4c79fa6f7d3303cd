"""Strict mode for every test: no silent broadcasting, no silent promotion, no warnings.

``filterwarnings`` in pyproject.toml turns warnings into errors. A float64 test puts its body
into ``with jax.enable_x64(True):``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

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

# Tracing makes millions of short-lived objects and few cycles, so a rarer search for cycles saves time.
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def commands_compile_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that compares a command's numbers with this process's, bit for bit, or starts only short commands."""
    monkeypatch.setenv("XLA_FLAGS", HERE)


# A process with more of either at the end of a test file drops its compiled programs, which takes seconds.
SHARE = 4  # 1/SHARE of the memory; two processes, their commands and the kernel's file cache need the rest
MOST_MAPS = 40_000  # memory maps; Linux allows 65,530, and XLA ends a process that needs more
PROCESS = Path("/proc/self")  # where Linux shows the memory of a process


def holds_too_much() -> bool:
    """Whether this process should drop its compiled programs; False where the system does not show its memory."""
    if not PROCESS.exists():
        return False
    pages = int((PROCESS / "statm").read_text().split()[1])
    maps = (PROCESS / "maps").read_bytes().count(b"\n")
    return SHARE * pages > os.sysconf("SC_PHYS_PAGES") or maps > MOST_MAPS


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


SLOW_CASES = Path(__file__).with_name("slow_cases.txt")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of ``slow_cases.txt`` slow; a line that names no case is an error."""
    lines = SLOW_CASES.read_text(encoding="utf-8").splitlines()
    slow = {f"tests/{line}" for line in lines if not line.startswith("#")}
    found = {item.nodeid: item for item in items}
    for name in slow & found.keys():
        found[name].add_marker(pytest.mark.slow)
    files = {name.partition("::")[0] for name in found}
    missing = sorted(name for name in slow - found.keys() if name.partition("::")[0] in files)
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"{SLOW_CASES.name} names cases that do not exist: {', '.join(missing)}")


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
    """Show how many pairs of values the drawn worlds have covered (``test_worlds.py``)."""
    passed = [report.user_properties for report in terminalreporter.getreports("passed") if report.when == "call"]
    found = [one for given in passed for name, text in given if name == "worlds" for one in json.loads(text)]
    if found:
        from tests.worlds import all_pairs, pairs

        worlds, refusals = ([thing for one in found for thing in one[name]] for name in ("worlds", "refusals"))
        line = f"{len(pairs(worlds))} pairs of values of {all_pairs()} covered today, {len(refusals)} refused"
        terminalreporter.write_line(f"{len(worlds)} worlds: {line}")
