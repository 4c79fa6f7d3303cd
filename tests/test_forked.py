"""Forked programs: processes of their own, with output, errors and exit codes."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests import forked

PROGRAM = f"""
import os, sys
imported = set({forked.PRELOADED}) <= set(sys.modules)
from jax._src import xla_bridge
started = xla_bridge.backends_are_initialized()
import jax
print(__name__, sys.argv[1:], os.getcwd(), os.getpid(), imported, started, jax.device_count())
sys.exit(int(sys.argv[1]))
"""


def program(folder, text):
    (folder / "program.py").write_text(text)
    return str(folder / "program.py")


def test_a_program_is_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=3")
    done = forked.python([program(tmp_path, PROGRAM), "3", "b"], cwd=tmp_path)
    name, *_, pid, imported, started, devices = done.stdout.split()
    assert done.returncode == 3 and done.stderr == "" and f"['3', 'b'] {tmp_path} {pid} " in done.stdout
    assert (name, imported, started, devices) == ("__main__", "True", "False", "3") and int(pid) != os.getpid()


@pytest.mark.parametrize(
    ("code", "returncode", "error"),
    [
        ("print(1)", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import os; os.write(2, b'below Python')", 0, "below Python"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ],
)
def test_how_it_ends(tmp_path, code, returncode, error):
    done = forked.python([program(tmp_path, code)], cwd=tmp_path)
    assert done.returncode == returncode and (error in done.stderr if error else not done.stderr)


def test_one_that_hangs_is_killed(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        forked.python([program(tmp_path, "import time; time.sleep(60)")], cwd=tmp_path, timeout=0.1)
