"""The jobs of a batch on devices of two processes: the same result as on one. ``test_worlds.py`` has one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from fedjax_async import Settings, cli
from fedjax_async.config import prepare
from fedjax_async.engine import run_peer_waves, run_waves
from tests.engine.problem import case, changed, near, noisy_client, personal
from tests.engine.test_peers import FRAGMENTS, halves, peer_case

FLAGS = os.environ["XLA_FLAGS"]  # XLA flags of the commands that tests start


def environment(flags, devices):
    flags = f"{flags} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def outcomes(devices):
    """Params, losses and upload norms of a few cases on so many devices."""
    kept = personal("cohort:size=4", updates=20)
    many = case("fedasync", "every", "exponential:mean=1", sizes=tuple(range(1, 24, 2)), updates=60)
    many, sizes = changed(many, client=noisy_client()), (5, 3, 8, 2, 6, 4, 7, 9, 1, 3, 2, 5)
    gossip = peer_case(halves(), FRAGMENTS, sizes=sizes, horizon=6.0, faults="corrupt:probability=0.1")
    found = {}
    for name, run, given, batching, max_width in (
        ("memory", run_waves, kept, "vmap", 8),
        ("fedasync", run_waves, many, "loop", 16),
        ("peers", run_peer_waves, gossip, "vmap", 8),
        ("peers in a loop", run_peer_waves, gossip, "loop", 8),
    ):
        outcome = run(*given, devices=devices, batching=batching, max_width=max_width)
        found |= {f"{name} {i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(outcome.params))}
        found |= {f"{name} loss": outcome.scores["loss"], f"{name} norm": outcome.records["upload_norm"]}
    return found


def program(out, coordinator, rank):
    """What one of two processes does."""
    jax.distributed.initialize(coordinator, 2, int(rank))
    jax.config.update("jax_enable_x64", True)
    np.savez(out, **outcomes(2))


@pytest.mark.slow
def test_devices_that_train_for_a_while_do_not_lock_each_other_out():
    """A real model on more devices than cores. It hung if the server step started before all devices had trained."""
    command = "run --quiet --model mlp --clients 32 --delay exponential --updates 40 --devices 8"
    flags = f"{FLAGS} --xla_cpu_collective_call_terminate_timeout_seconds=40"
    command = [sys.executable, "-m", "fedjax_async", *command.split()]
    subprocess.run(command, env=environment(flags, 8), check=True, timeout=400)


@pytest.mark.slow
def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    outs = [tmp_path / f"rank{rank}.npz" for rank in (0, 1)]
    flags = FLAGS.replace("level=1", "level=0")  # these programs compile for seconds and run only briefly
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.test_devices", str(out), coordinator, str(rank)],
            env=environment(flags, 1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    for process in started:
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


if __name__ == "__main__":
    program(*sys.argv[1:])
