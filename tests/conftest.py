"""Strict mode for every test: no silent broadcasting, no silent promotion, no warnings.

``filterwarnings`` in pyproject.toml turns warnings into errors. A float64 test puts its body
into ``with jax.enable_x64(True):``.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# Most of the suite's time is compilation. LLVM's part is the least at level 0, where tests train small models; commands
# that tests start train longer, and level 1 pays. XLA's former emitters compile in half the time of the new ones (of
# which alone JAX 0.12 knows). Cut into 32 pieces for as many threads, a small program takes a quarter more, and many
# more maps of memory. XLA reads its flags once, when it starts.
FORMER = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
WHOLE = f" --xla_cpu_parallel_codegen_split_count=1{FORMER}"
HERE, COMMANDS = (f"--xla_backend_optimization_level={level}{WHOLE}" for level in (0, 1))
if os.environ.get("XLA_FLAGS", COMMANDS) == COMMANDS:
    os.environ["XLA_FLAGS"] = HERE
    jax.devices()
    os.environ["XLA_FLAGS"] = COMMANDS

# Tracing makes millions of short-lived objects and few cycles: looking for those less often saves a part of the time.
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def commands_compile_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that compares a command's numbers with this process's, bit for bit, or whose command runs briefly."""
    monkeypatch.setenv("XLA_FLAGS", HERE)


# A process that holds more of either at the end of a test file lets go of its compiled programs, which takes seconds.
SHARE = 6  # of the machine's memory: two processes, their commands and the kernel's files have a place beside
MOST_MAPS = 40_000  # components of memory; Linux allows 65,530, and XLA ends the process that asks for more
PROCESS = Path("/proc/self")  # where Linux says what a process holds


def holds_too_much() -> bool:
    """Whether compiled programs should go; never where the system does not say."""
    if not PROCESS.exists():
        return False
    pages = int((PROCESS / "statm").read_text().split()[1])
    maps = (PROCESS / "maps").read_bytes().count(b"\n")
    return SHARE * pages > os.sysconf("SC_PHYS_PAGES") or maps > MOST_MAPS


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go() -> Iterator[None]:
    """Compiled programs stay for the life of a process, 4.5 GB of them by the end of the suite."""
    yield
    if holds_too_much():
        jax.clear_caches()
        gc.collect()
        # else glibc keeps what is free, the process stays as large, and every later file lets go again
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


SLOW_CASES = Path(__file__).with_name("slow_cases.txt")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
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
        raise pytest.UsageError(f"{SLOW_CASES.name} names cases that are not there: {', '.join(missing)}")


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs in pytest's own cache: most of the suite's time is XLA's.

    Shared by xdist workers and, through the environment, by the commands that tests start.
    ``pytest --cache-clear`` empties it.
    """
    if not hasattr(config, "cache"):  # pytest -p no:cacheprovider: nor in the user's own folder
        jax.config.update("jax_enable_compilation_cache", False)
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        return
    options = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.01,  # small programs too: they are most of the time
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
