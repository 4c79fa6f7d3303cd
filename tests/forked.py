"""Python programs and kernels of notebooks that tests start: processes forked from one that has imported the package.

So they do not import JAX, flax and the package again, which takes two seconds. Each program has its own environment
variables (such as XLA's flags), working folder, arguments, standard output and standard error.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

PRELOADED = [
    "jax", "optax", "flax.linen", "networkx", "matplotlib.pyplot", "fedjax_async.config", "fedjax_async.engine.run",
    "fedjax_async.engine.peer_run", "fedjax_async.results.simulation", "fedjax_async.results.sweeps",
    "fedjax_async.theory", "tests.contexts", "ipykernel.kernelapp",
]  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


def python(arguments: Sequence[str], *, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT ...`` as ``subprocess.run`` with captured output does."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("stdout", "stderr")]
        process = start(arguments, cwd, *map(str, places))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*arguments], timeout)
        output, error = (place.read_text(encoding="utf-8") if place.exists() else "" for place in places)
        return subprocess.CompletedProcess([*arguments], process.exitcode, output, error)


def start(
    arguments: Sequence[str], cwd: Path, stdout: str = os.devnull, stderr: str = os.devnull
) -> multiprocessing.process.BaseProcess:
    """Start ``python SCRIPT ...``; its output goes to the files of these names."""
    process = CONTEXT.Process(target=_run, args=([*arguments], str(cwd), dict(os.environ), stdout, stderr))
    process.start()
    return process


class Kernel:
    """A forked ``python -m ipykernel_launcher ...``, with the part of ``subprocess.Popen`` that Jupyter's client uses.

    It stands in for ``jupyter_client.provisioning.local_provisioner.launch_kernel``.
    """

    stdin = stdout = stderr = None

    def __init__(self, command: Sequence[str], *, cwd: str, env: dict[str, str], **_: object) -> None:
        arguments = [*command[command.index("ipykernel_launcher") :]]
        self._process = CONTEXT.Process(target=_serve, args=(arguments, cwd, env))
        self._process.start()
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # its group is killed in the end
            time.sleep(0.01)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    import matplotlib

    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    matplotlib.rc_file(matplotlib.matplotlib_fname())  # another one in this environment
    sys.argv, sys.path[0] = arguments, cwd
    runpy.run_module("ipykernel_launcher", run_name="__main__")


def _run(arguments: list[str], cwd: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    for place, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", buffering=1, closefd=False) for n in (1, 2))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    try:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for other threads of the program
