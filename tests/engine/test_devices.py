"""The jobs of a batch on devices of two processes: the same result as on one. ``test_worlds.py`` has one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_async import Settings, cli
from fedjax_async.config import prepare
from fedjax_async.engine.devices import make_mesh
from tests.engine.on_devices import outcomes
from tests.engine.problem import near

FLAGS = os.environ["XLA_FLAGS"]  # XLA flags of the commands that tests start
HERE = FLAGS.replace("level=1", "level=0")  # these programs compile for seconds and run only briefly
PROGRAM = Path(__file__).parent / "on_devices.py"


def start(out, devices, *distributed, local):
    flags = f"{HERE} --xla_force_host_platform_device_count={local}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), str(out), str(devices), *map(str, distributed)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_devices_that_train_for_a_while_do_not_lock_each_other_out():
    """A real model on more devices than cores. It hung if the server step started before all devices had trained."""
    command = "run --quiet --model mlp --clients 32 --delay exponential --updates 40 --devices 8"
    flags = FLAGS + " --xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=40"
    subprocess.run(
        [sys.executable, "-m", "fedjax_async", *command.split()],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=400,
    )


@pytest.mark.slow
def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    outs = [tmp_path / f"rank{rank}.npz" for rank in (0, 1)]
    for process in [start(out, 2, coordinator, 2, rank, local=1) for rank, out in enumerate(outs)]:
        text, _ = process.communicate(timeout=500)
        assert process.returncode == 0, text[-3000:]
    with jax.enable_x64(True):
        want = outcomes(1)
    for out in outs:
        with np.load(out) as have:
            assert len(want) == 20
            near(have, want, rtol=1e-11)
            assert all(np.abs(values).max() > 0 for values in want.values())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError(), "JAX found no device"),
        (RuntimeError("Unable to initialize backend 'x': no. (set JAX_PLATFORMS='')\nmore"), "Unable .* 'x': no."),
    ],
)
def test_a_backend_that_is_not_here_is_one_line_before_any_work(monkeypatch, capsys, error, reason):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    said = rf"JAX_PLATFORMS = .*: must be a backend that works on this machine, such as cpu \({reason}\)$"
    for settings in ({}, {"method": "dpsgd"}):
        with pytest.raises(ValueError, match=f"^{said}"):
            prepare(Settings(updates=4, **settings))
    for command in ("run", "plan", "compare fedavg", "run --method dpsgd"):
        assert cli.main(command.split()) == 2
        assert re.search(f"^fedjax-async: error: {said}", capsys.readouterr().err)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="devices = 1000"):
        make_mesh(1000)
