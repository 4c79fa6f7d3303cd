"""Delay-corrected rules: identities, the switch of OrthoDyn in a run, running statistics, overflow, sweeps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import Settings, geometry
from fedjax_async.config import execute, execute_group, plan_groups, prepare
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.server import (
    SERVERS,
    asgd,
    clip_by_norm,
    dc_asgd,
    delay_corrected,
    fedasync,
    orthodyn,
    orthograd,
    orthopos,
    orthostrict,
    rule,
)
from fedjax_async.types import Arrival
from tests.engine.problem import case, close
from tests.server.made_up import D, closing, flat, random_uploads, received, run, stacked, start_params
from tests.server.textbook import Upload

NAMES = ["dc_asgd", "dc_asgd_a", "orthograd", "orthopos", "orthostrict", "orthodyn"]
seeds = st.integers(0, 2**31)


def with_correction(*, correction: str = "asgd", server_lr=1.0):
    return rule(delay_corrected(geometry.CORRECTIONS[correction]()), optimizer=optax.sgd(server_lr))


def end(factory, uploads, **options):
    """Params [D] after the last of ``uploads``, from ``start_params()``."""
    return run(factory, start_params(), uploads, **options)[1][-1]


# --- identities -------------------------------------------------------------------------------


@pytest.mark.float64
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(seed=seeds)
def test_without_drift_every_rule_is_asgd(name, seed):
    """All clients of the first server step started from its params; the fourth arrival closes it."""
    start = flat(start_params())
    uploads = [u._replace(start=start) for u in closing(random_uploads(seed, 4, rejected=0.2), at=[3])]
    np.testing.assert_allclose(end(SERVERS[name], uploads), end(asgd, uploads), rtol=1e-12, atol=1e-14)


@pytest.mark.float64
@pytest.mark.parametrize("name", NAMES)
def test_a_zero_delta_moves_nothing(name):
    first, *others = closing(random_uploads(1, 6, rejected=0.0))
    uploads = [first, *(u._replace(delta=np.zeros(D)) for u in others)]
    _, path, weights = run(SERVERS[name], start_params(), uploads)
    np.testing.assert_array_equal(path, np.broadcast_to(path[0], path.shape))
    assert np.all(weights == 1.0)  # still accepted


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 1.0))
def test_orthostrict_moves_orthogonally_to_the_drift(seed, lr):
    (upload,) = closing(random_uploads(seed, 1, rejected=0.0))
    start = flat(start_params())
    step = end(orthostrict, [upload], server_lr=lr) - start
    assert np.linalg.norm(step) > 0 and abs(step @ (start - upload.start)) < 1e-12


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 1.0))
def test_orthograd_and_orthopos_never_undo_the_drift(seed, lr):
    """OrthoGrad's step never points back along the drift; OrthoPos's does only if it ends at the client's model."""
    (upload,) = closing(random_uploads(seed, 1, rejected=0.0))
    start = flat(start_params())
    drift = start - upload.start
    assert (end(orthograd, [upload], server_lr=lr) - start) @ drift > -1e-12
    moved = end(orthopos, [upload], server_lr=lr)
    if upload.delta @ drift > 0:
        mixed = end(fedasync, [upload], mixing=lr, staleness="constant")
        np.testing.assert_allclose(moved, mixed, atol=1e-11)
    else:
        assert abs((moved - start) @ drift) < 1e-11


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_dc_asgd_without_strength_is_asgd(seed, lr):
    uploads = random_uploads(seed, 12)
    corrected = end(dc_asgd, uploads, strength=0.0, server_lr=lr)
    # two programs may fuse the sums differently
    np.testing.assert_allclose(corrected, end(asgd, uploads, server_lr=lr), rtol=1e-14, atol=1e-14)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, a=st.floats(0.01, 1.0))
def test_the_correction_of_fedasync_is_fedasync(seed, a):
    """``x + a (Delta - b) = (1 - a) x + a x_i``, several arrivals a step and rejected ones included."""
    uploads = random_uploads(seed, 20)
    want = end(fedasync, uploads, mixing=a, staleness="constant")
    np.testing.assert_allclose(end(with_correction, uploads, correction="fedasync", server_lr=a), want, atol=1e-11)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, a=st.floats(0.01, 0.99), k=st.integers(1, 12))
def test_the_correction_of_fedasync_from_one_dispatch_gives_the_sum_of_eq_7(seed, a, k):
    """``x_k = x_0 + sum_i a (1 - a)^(k - i) Delta_i`` when all k clients started from x_0."""
    start = flat(start_params())
    uploads = [u._replace(start=start) for u in closing(random_uploads(seed, k, rejected=0.0))]
    want = start + sum(a * (1 - a) ** (k - i) * u.delta for i, u in enumerate(uploads, start=1))
    np.testing.assert_allclose(end(with_correction, uploads, correction="fedasync", server_lr=a), want, atol=1e-11)


@pytest.mark.slow_cases("orthograd")
@pytest.mark.float64
@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_averages_deltas_that_are_corrected_one_by_one(name):
    """Each is corrected as by a rule of its own, from the same params and with the memory so far."""
    options = {"strength": 0.2} if name == "dc_asgd_a" else {}
    uploads = closing(random_uploads(3, 5, rejected=0.0), at=[4])
    start = flat(start_params())
    correction = geometry.CORRECTIONS[name](**options)
    state, total = correction.init(jnp.asarray(start)), 0.0
    for u in uploads:
        one, state = correction.correct(jnp.asarray(u.delta), jnp.asarray(start - u.start), state)
        total = total + np.asarray(one)
    have = end(SERVERS[name], uploads, **options)
    np.testing.assert_allclose(have, start + total / 5, rtol=1e-10)
    assert np.abs(have - end(asgd, uploads)).max() > 1e-3


def clipped_first(*, limit):
    return rule(clip_by_norm(limit), delay_corrected(geometry.dc_asgd(strength=0.2)), optimizer=optax.sgd(1.0))


@pytest.mark.float64
def test_a_clipped_delta_may_be_corrected_too():
    uploads = closing(random_uploads(4, 8, rejected=0.0))
    short = [u._replace(delta=u.delta * min(1.0, 2.0 / np.linalg.norm(u.delta))) for u in uploads]
    want = end(dc_asgd, short, strength=0.2)
    np.testing.assert_allclose(end(clipped_first, uploads, limit=2.0), want, rtol=1e-10)


# --- rejected arrivals and running statistics -------------------------------------------------


@pytest.mark.parametrize("name", ["dc_asgd", "dc_asgd_a"])
@pytest.mark.parametrize("options", [{}, {"clip": 5.0}], ids=["unlimited", "clipped"])
def test_a_delta_whose_square_overflows_is_rejected(name, options):
    good = closing(random_uploads(5, 6, rejected=0.0))
    huge = Upload(np.full(D, 1e30), good[0].start, 0, 4.0, True)
    before = run(SERVERS[name], start_params(), good, **options)
    after = run(SERVERS[name], start_params(), [*good, huge], **options)
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    np.testing.assert_array_equal(after[2], [*before[2], 0.0])
    assert np.isfinite(after[1]).all()


@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_become_the_clients_and_have_no_part_in_the_correction(name):
    def params_of(weights, statistic):
        return {"params": {"w": jnp.asarray(weights)}, "batch_stats": {"var": jnp.full(2, statistic)}}

    @jax.jit
    def after_two(first, second):
        state, memory = server.init(params_of([0.0, 1.0], 1.0))
        for weights, start, statistic in (([1.0, -2.0], [0.5, 0.0], first), ([0.3, 0.4], [0.0, -1.0], second)):
            upload = params_of(weights, statistic - 1.0)  # every client started from the statistics 1
            one = jnp.ones(())
            arrival = Arrival(upload, params_of(start, 1.0), jnp.int32(1), one, jnp.int32(0), one, jnp.bool_(True))
            state, memory, _ = received(server)(state, memory, arrival)
        return server.params(state)

    with jax.enable_x64(True):
        server = SERVERS[name]()
        small, large = after_two(2.0, 3.0), after_two(2e6, 3e6)
        np.testing.assert_allclose(small["batch_stats"]["var"], 3.0, rtol=1e-12)
        np.testing.assert_allclose(large["batch_stats"]["var"], 3e6, rtol=1e-12)
        np.testing.assert_array_equal(small["params"]["w"], large["params"]["w"])
        assert not jax.tree.leaves(server.init(params_of([0.0], 1.0))[0].transforms) or name in (
            "dc_asgd_a",
            "orthodyn",
        )


# --- OrthoDyn ---------------------------------------------------------------------------------


@pytest.mark.float64
def test_orthodyn_switches_after_a_share_of_the_run():
    """The first 30 % of the arrivals as in OrthoGrad, the others as in OrthoPos, in both engines and with a buffer."""
    for timing in ("every", "buffer:size=3"):
        given = case(orthodyn(switch="share", fraction=0.3), timing, updates=20)
        want, have = run_reference(*given), run_waves(*given)
        close(have.params, want.params, 1e-9)
        for each in (want, have):
            np.testing.assert_array_equal(each.records["correction_phase"], [0] * 6 + [1] * 14)
        if timing != "every":
            continue  # the effect of the phases does not depend on when steps close
        never = run_reference(*case(orthograd(), timing, updates=20)).params
        always = run_reference(*case(orthopos(), timing, updates=20)).params
        for other in (never, always):
            assert np.abs(want.params["output"]["kernel"] - other["output"]["kernel"]).max() > 1e-6
        for fraction, other in ((1.0, never), (0.0, always)):
            edge = run_reference(*case(orthodyn(switch="share", fraction=fraction), timing, updates=20))
            close(edge.params, other, 1e-12)


def test_a_rejected_arrival_leaves_the_phase_as_it_was():
    """Its delta of zeros would halve the average."""
    first, second = closing(random_uploads(5, 2, rejected=0.0))
    state, memory = (server := orthodyn(fraction=0.9)).init(start_params())
    step, seen = jax.jit(received(server)), []
    for one in (first, second._replace(delta=np.zeros(D), examples=0.0), second._replace(delta=0.1 * second.delta)):
        state, memory, info = step(state, memory, jax.tree.map(lambda leaf: leaf[0], stacked([one])))
        seen.append(int(info.columns["correction_phase"]))
    assert seen == [0, 0, 1]


def test_without_the_facts_of_a_run_a_share_never_passes():
    server = orthodyn(switch="share", fraction=0.0)
    state, memory = server.init(jnp.zeros(3))
    arrival = Arrival(
        jnp.ones(3), -jnp.ones(3), jnp.int32(1), jnp.ones(()), jnp.int32(0), jnp.ones(()), jnp.bool_(True)
    )
    state, _, _ = received(server)(state, memory, arrival)
    np.testing.assert_array_equal(server.params(state), 1.0)  # OrthoGrad's step; OrthoPos would end at 0


@pytest.mark.float64
@pytest.mark.parametrize(("switch", "fractions"), [("norm", (0.5, 0.25)), ("share", (0.5, 0.75))])
def test_the_second_fraction_has_a_default(switch, fractions):
    uploads = [u._replace(delta=u.delta * 0.9**i) for i, u in enumerate(random_uploads(8))]
    options = {"switch": switch, "phases": "orthograd+asgd+orthopos", "decay": 0.5, "server_lr": 0.3}
    have = end(orthodyn, uploads, **options)
    first, second = fractions
    given = end(orthodyn, uploads, **options, fraction=first, second_fraction=second)
    np.testing.assert_allclose(have, given, rtol=1e-12)
    for other in (options | {"phases": "orthograd+asgd"}, options | {"phases": "orthograd+orthopos"}):
        assert np.abs(end(orthodyn, uploads, **other) - have).max() > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switch": "steps"}, "switch = 'steps': unknown"),
        ({"phases": "orthograd+orthopoz"}, "phases = 'orthopoz': unknown; did you mean 'orthopos'"),
        ({"phases": "orthograd"}, "phases = 'orthograd': must be two or three names joined by +"),
        ({"second_fraction": 0.2}, "second_fraction = 0.2: must be left out: it needs three phases"),
        ({"per": "layers"}, "per = 'layers': unknown; did you mean 'layer'"),
    ],
)
def test_choices_are_checked(options, message):
    with pytest.raises(ValueError) as error:
        orthodyn(**options)
    assert str(error.value).startswith(message)


# --- by name ----------------------------------------------------------------------------------


@pytest.mark.slow_cases("dc_asgd_a-strength-values1")
@pytest.mark.float64
@pytest.mark.parametrize(
    ("method", "path", "values"),
    [
        pytest.param("dc_asgd", "strength", [0.04, 1.0, 5.0], marks=pytest.mark.slow),
        ("dc_asgd_a", "strength", [0.5, 2.0, 5.0]),
        pytest.param("orthodyn:switch=share", "fraction", [0.2, 0.5, 0.8], marks=pytest.mark.slow),
    ],
)
def test_a_sweep_over_an_option_compiles_once(method, path, values):
    base = Settings(model="logistic", clients=5, delay="exponential", updates=30, steps=3, compute="float64")
    join = "," if ":" in method else ":"
    runs = [dataclasses.replace(base, method=f"{method}{join}{path}={value}") for value in values]
    compiled: list[str] = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(details.get("fun_name", "")))

    groups = plan_groups(runs)
    found = {}
    jax.monitoring.register_event_duration_secs_listener(listen)
    for group in groups:
        execute_group(runs, group, on_finished=found.__setitem__)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert len(groups) == 1
    assert len([name for name in compiled if "receive" in name]) <= 1
    for i, one in enumerate(runs):
        close(found[i].params, execute(prepare(one)).params, 1e-9)
    assert len({run.evaluations["loss"][-1] for run in found.values()}) == len(values)
