"""A run as a differentiable function: equal to the engine, and its derivatives to finite differences."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import simulate
from fedjax_async.clock import make_schedule
from fedjax_async.config import PerClient, PerExample, PerStaleness, Settings, trajectory
from fedjax_async.engine import EvaluationPoints, run_waves
from fedjax_async.engine.trajectory import make_trajectory
from fedjax_async.local import curve_training, local_training
from fedjax_async.server import SERVERS
from tests.engine import problem
from tests.refusals import refusals


def apply(params, x, key=None):
    return x.astype(params["kernel"].dtype) @ params["kernel"] + params["bias"][None]


# the output layer alone: the derivatives of a run are the largest programs of all
START = {"kernel": 0.5 * np.random.default_rng(1).normal(size=(problem.FEATURES, 3)), "bias": np.zeros(3)}
LINEAR = problem.MODEL._replace(init=lambda key: START, apply=apply)


def traced(case, name, option, **more):
    """The case with a linear model, and with the rule's ``option`` and the clients' rate as traced numbers."""

    def client(hyper):
        proximal = hyper.get("proximal", 0.0)
        return local_training(LINEAR, optimizer=optax.sgd(hyper["lr"]), batch_size=4, proximal=proximal)

    def server(hyper):
        return SERVERS[name](**{option: hyper[option]})

    case = problem.changed(case, rule=server, client=client, model=LINEAR, hyper={"lr": 0.1, option: 0.7} | more)
    return case._replace(params=jax.tree.map(jnp.asarray, START))


def function_of(case, **options):
    return make_trajectory(case.components, case.schedule, case.key, case.points, **options)


CASES = [("fedasync", "mixing", "every", 7), ("orthofl", "mixing", "every", 4),
         ("fedavg", "server_lr", "cohort:size=3,over_selection=1", 4)]  # fmt: skip


@pytest.mark.slow_cases("orthofl", "fedavg")
@pytest.mark.float64
@pytest.mark.parametrize("name, option, timing, segment", CASES, ids=[name for name, *_ in CASES])
def test_equal_to_the_engine_and_derivatives_to_finite_differences(name, option, timing, segment):
    case = traced(problem.case(name, timing, updates=14, epochs=1.0), name, option)
    f = function_of(case, segment=segment)
    expected = run_waves(*case)
    hyper = {key: jnp.asarray(value) for key, value in case.components.hyper.items()}

    def at(step):
        numbers = {key: value + step * slope for (key, value), slope in zip(hyper.items(), (0.3, -0.5))}
        params = jax.tree.map(lambda leaf: leaf + step * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), start)
        found = f(numbers, params)
        return found["loss"][-1] + found["loss"][1], found

    start, h = case.params, 1e-5
    value_and_slope = jax.jit(jax.value_and_grad(at, has_aux=True))
    (_, found), slope = value_and_slope(0.0)
    problem.close(found["params"], expected.params, 1e-12)
    np.testing.assert_allclose(found["loss"], expected.scores["loss"], rtol=1e-12)
    np.testing.assert_array_equal(found["accuracy"], expected.scores["accuracy"])
    differences = (value_and_slope(h)[0][0] - value_and_slope(-h)[0][0]) / (2 * h)
    assert abs(differences) > 1e-3
    np.testing.assert_allclose(slope, differences, rtol=1e-5)
    if name == "orthofl":  # forward mode too; it takes seconds to compile and is the same for all rules
        along = jax.jit(lambda step: jax.jvp(at, (step,), (1.0,))[1][0])(0.0)
        np.testing.assert_allclose(along, differences, rtol=1e-5)


def differs(loss, numbers, name, step, least=1e-4):
    """Assert that the slope of the loss along one of the numbers is that of finite differences, and not zero."""
    slope = loss(numbers)[1][name]
    low, high = (loss({**numbers, name: numbers[name] + way * step})[0] for way in (-1, 1))
    along = jnp.vdot(slope, step / jnp.linalg.norm(step)) if jnp.ndim(slope) else slope
    difference = (high - low) / (2 * jnp.linalg.norm(step))
    assert abs(difference) > least, name
    np.testing.assert_allclose(along, difference, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.float64
def test_a_run_of_asynccurve_has_the_gradient_that_finite_differences_give():
    """The last loss by the rates of end and control point, the proximal weight, the server's rate and gamma."""
    case = problem.case("asynccurve", updates=8, epochs=1.0)

    def client(hyper):
        options = {"proximal": hyper["proximal"], "control_lr": hyper["control_lr"], "gamma": hyper["gamma"]}
        return curve_training(problem.MODEL, optimizer=optax.adam(hyper["lr"]), batch_size=4, **options)

    def server(hyper):
        return SERVERS["asynccurve"](server_lr=hyper["server_lr"], swa=1.0)

    hyper = {"lr": 0.05, "control_lr": 0.1, "proximal": 0.2, "gamma": 0.8, "server_lr": 0.5}
    case = problem.changed(case, rule=server, client=client, hyper=hyper)
    f = function_of(case)
    loss = jax.jit(jax.value_and_grad(lambda hyper: f(hyper, case.params)["loss"][-1]))
    for name, number in hyper.items():
        differs(loss, {key: jnp.asarray(value) for key, value in hyper.items()}, name, jnp.asarray(1e-5 * number), 1e-6)


@pytest.mark.slow
@pytest.mark.float64
def test_a_value_a_client_a_staleness_or_an_example_is_that_of_its_arrivals():
    """Equal values act as one number. Their derivatives sum to that of the number, and only used values have one."""
    case = traced(problem.case("fedasync", updates=14, epochs=1.0), "fedasync", "mixing", proximal=0.3)
    f, s, who = function_of(case), case.schedule, case.components.data

    @partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def loss(numbers, of=PerExample):
        weights = {"example_weight": of(numbers["example_weight"])} if "example_weight" in numbers else {}
        return f({"lr": 0.1, **numbers, **weights}, case.params)["loss"][-1]

    plain = {"mixing": jnp.asarray(0.7), "proximal": jnp.asarray(0.3)}
    value, slope = loss(plain)
    for kind, count, used in [
        (PerClient, s.num_clients, np.unique(s.client[s.job])),
        (PerStaleness, int(s.staleness.max()) + 3, np.unique(s.staleness)),
    ]:
        same, slopes = loss(plain | {"mixing": kind(jnp.full(count, 0.7))})
        np.testing.assert_allclose(same, value, rtol=1e-13)
        np.testing.assert_allclose(slopes["mixing"].values.sum(), slope["mixing"], rtol=1e-10)
        assert np.flatnonzero(slopes["mixing"].values).tolist() == used.tolist()
    short = loss(plain | {"mixing": PerStaleness(jnp.array([0.7, 0.7]))})[1]["mixing"]
    np.testing.assert_allclose(short.values[1], slope["mixing"] - short.values[0], rtol=1e-10)

    weighted = plain | {"example_weight": jnp.ones(len(who.y))}
    same, slopes = loss(weighted)
    np.testing.assert_allclose(same, value, rtol=1e-13)
    differs(loss, weighted, "proximal", jnp.asarray(1e-5))
    differs(loss, weighted, "example_weight", 1e-5 * jnp.cos(jnp.arange(len(who.y), dtype=float)))
    of_clients = loss(plain | {"example_weight": jnp.ones(len(who.size))}, PerClient)[1]["example_weight"]
    owner = np.empty(len(who.y), int)
    owner[who.order] = np.repeat(np.arange(len(who.size)), who.size)
    np.testing.assert_allclose(of_clients, np.bincount(owner, slopes["example_weight"], len(who.size)), rtol=1e-9)


def test_from_settings_it_is_simulate():
    world = {"dataset": "synthetic", "model": "logistic", "clients": 3, "steps": 2, "validation_fraction": 0.1}
    settings = Settings(**world, method="fedasync", updates=6)
    f, hyper, params, times, _ = trajectory(settings, segment=4)  # the last segment has two arrivals
    found, run = jax.jit(f)(hyper, params), simulate(settings)
    problem.close(found["params"], run.params, 1e-5)
    np.testing.assert_array_equal(times, run.evaluations["time"])
    for name in ("loss", "validation_loss"):
        np.testing.assert_allclose(found[name], run.evaluations[name], rtol=1e-4)


SMALL = Settings(model="logistic", clients=3, updates=6)


def with_wrong(change):
    f, hyper, params, *_ = trajectory(SMALL)
    return f(change(hyper), params)


test_numbers_that_the_run_does_not_have_are_refused = refusals(
    (lambda h: h | {"typo": 1.0}, r"hyper = 'typo': unknown \(known: server.mixing, lr, example_weight\)"),
    (lambda h: {"lr": 0.1}, r"hyper = \['lr'\]: must be all numbers of the run, also server.mixing"),
    (lambda h: h | {"lr": [0.1, 0.2]}, r"hyper\['lr'\] = \[0.1, 0.2\]: must be one number, or PerClient"),
    (lambda h: h | {"lr": PerClient([0.1, 0.2])}, r"shape of PerClient of hyper\['lr'\] = \[2\]: must be \[3\]"),
    (lambda h: h | {"lr": PerStaleness(0.1)}, r"shape of PerStaleness of hyper\['lr'\] = \[\]"),
    (lambda h: h | {"lr": PerExample([0.1])}, r"hyper\['lr'\] = 'PerExample': must be PerClient"),
    by=with_wrong,
)


def test_scores_and_segments_that_there_are_not():
    f, hyper, params, *_ = trajectory(SMALL)
    with pytest.raises(KeyError, match=r"validation_loss.*must be one of loss, .* validation_fraction"):
        jax.eval_shape(f, hyper, params)["validation_loss"]
    with pytest.raises(ValueError, match="segment = 0"):
        trajectory(SMALL, segment=0)


@pytest.mark.slow
# nothing is sent after an arrival; two messages after the last but one only
@pytest.mark.parametrize("after", [[0, 0, 0], [0, 0, 1, 3, 3]], ids=["nothing sent", "two at once"])
def test_messages_that_are_not_due_change_nothing(after):
    case = problem.case("fedasync", "every", updates=14, epochs=1.0)
    count, jobs = len(after), np.arange(len(after))
    schedule = make_schedule(
        num_clients=case.schedule.num_clients, client=jobs, local_steps=3, dispatch_time=np.array(after, float),
        upload_time=jobs + 1.0, dispatched_after=after, job=jobs, time=jobs + 1.0, closes=True,
    )  # fmt: skip
    case = case._replace(schedule=schedule, points=EvaluationPoints(np.array([0, count]), np.array([0.0, count + 1.0])))
    hyper = {key: jnp.asarray(value) for key, value in case.components.hyper.items()}
    found, expected = function_of(case)(hyper, case.params), run_waves(*case)
    np.testing.assert_allclose(found["loss"], expected.scores["loss"], rtol=1e-5)
