"""AsyncCurve and FLOCO in runs: faults, compressed uploads, other training orders, sweeps, and resumed runs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from fedjax_async import Settings
from fedjax_async.compress import topk
from fedjax_async.config import execute, prepare
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.local import FEEDBACKS, OPTIMIZERS, curve_training
from fedjax_async.server import METHODS
from fedjax_async.types import ClientData, Message, Request
from tests.config.test_sweeping import equal, swept
from tests.engine.problem import MODEL, case, client_of, close
from tests.engine.test_checkpoint import Killed, killer

FAULTS = "drop:probability=0.1+duplicate:probability=0.05+corrupt:probability=0.1"
OTHERS = ["buffer:size=2,concurrency=4", "window:length=0.7", "cohort:size=4", "participation:length=1"]
slow = pytest.mark.slow


def agree(given, batching, **options):
    want = run_reference(*given)
    have = run_waves(*given, max_width=4, batching=batching, **options)
    close(have.params, want.params, 1e-8)
    for name, values in want.records.items():
        np.testing.assert_allclose(have.records[name], values, rtol=1e-8, atol=1e-11, err_msg=name)
    return want


def faulty(rule, timing="every"):
    """A run with faults and top-10 % uploads with error feedback; call it inside ``jax.enable_x64``."""
    given = case(rule, timing, "exponential:mean=1", faults=FAULTS)
    return given._replace(components=given.components._replace(client=compressed(rule)))


@functools.cache
def compressed(rule):
    given = case(rule)
    client, server, data = client_of(rule), given.components.server, given.components.data
    part = ClientData(data.x, data.y, data.order, data.offset[0], data.size[0])

    def upload(params):
        message, _ = server.dispatch(*server.init(params), Request())
        work = client.begin(jax.random.key(0), message, client.init(params), part)
        return client.finish(work, message, client.init(params))[0]

    like = jax.eval_shape(upload, given.params)
    return FEEDBACKS["ef"](client, topk(ratio=0.1), per="whole", like=like)


@pytest.mark.slow_cases("adam-loop")
@pytest.mark.float64
@pytest.mark.parametrize("batching", ["loop", pytest.param("vmap", marks=slow)])
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sam:base=adam", marks=slow)])
def test_engine_equals_oracle_where_the_control_point_is_trained_after_the_end(optimizer, batching):
    base = {"adam": OPTIMIZERS["adam"](0.1), "sam:base=adam": OPTIMIZERS["sam"](0.1, base="adam")}[optimizer]
    client = curve_training(
        MODEL, optimizer=base, batch_size=4, proximal=0.1, order="after", control_epochs=2, control_lr=0.05
    )
    given = case("asynccurve", "every", "exponential:mean=1", epochs=1.5, updates=12)
    agree(given._replace(components=given.components._replace(client=client)), batching)


@pytest.mark.float64
@pytest.mark.parametrize("rule", ["asynccurve", pytest.param("floco", marks=slow)])
def test_a_resumed_run_is_identical_bit_for_bit(tmp_path, rule):
    options = {"batching": "loop", "max_width": 4}
    given = faulty(rule)  # its programs are already compiled for the comparison with the oracle
    want = run_waves(*given, **options)
    for at in (6, 12):
        with pytest.raises(Killed):
            run_waves(*given, **options, keeper=Keeper(tmp_path, 4, {}), progress=killer(at))
    assert Keeper(tmp_path, 4, {}).restore().turns > 0
    have = run_waves(*given, **options, keeper=Keeper(tmp_path, 4, {}))
    for a, b in zip(jax.tree.leaves((want.params, want.scores)), jax.tree.leaves((have.params, have.scores))):
        np.testing.assert_array_equal(a, b)


@slow
@pytest.mark.parametrize("method", ["asynccurve", "floco"])
def test_a_sweep_shares_programs_and_changes_no_result(method):
    base = Settings(method=method, model="logistic", clients=5, delay="exponential", updates=12, steps=3)
    options = {"asynccurve": "control_lr=0.001,swa=0.5", "floco": "server_lr=0.5"}[method]
    settings = [base, dataclasses.replace(base, lr=0.02), dataclasses.replace(base, method=f"{method}:{options}")]
    groups, runs = swept(settings)
    assert len(groups) == 1
    for one, run in zip(settings, runs):
        equal(run, execute(prepare(one)))


def test_the_methods_own_optimiser_and_rate_hold_unless_others_are_given():
    base = Settings(method="asynccurve", model="logistic", clients=5, delay="exponential", updates=5)
    filled = prepare(base).settings
    assert (filled.optimizer, filled.lr) == ("adam", 0.001)
    other = prepare(dataclasses.replace(base, optimizer="sam:base=adam", lr=0.1)).settings
    assert (other.optimizer, other.lr) == ("sam:base=adam", 0.1)
    plain = prepare(dataclasses.replace(base, method="fedavg")).settings
    assert (plain.optimizer, plain.lr) == ("sgd", 0.01) == (METHODS["fedavg"].optimizer, METHODS["fedavg"].lr)
    with pytest.raises(ValueError, match=r"^optimizer = .*Adam.*warm=off"):
        prepare(dataclasses.replace(base, optimizer="sgd"))
    assert Message(()).local_steps == ()  # no leaf, so it is neither sent nor stored in a slot
