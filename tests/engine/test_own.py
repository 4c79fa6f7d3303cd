"""The evaluation of each client's own model equals one by hand, in both engines and in stacks."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import simulate
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.components import facts_of, rule_of
from fedjax_async.engine.evaluation import owners
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack import layout_of, make_member, make_stack, shape_of
from fedjax_async.local import job_key, local_training, run_job
from fedjax_async.server import closed
from fedjax_async.types import Arrival, ClientData, Info, Message, Request, ServerAlgorithm
from tests.engine.problem import MODEL, case, close, data

PRIVATE = MODEL._replace(private=lambda path: path[0] == "output")
CLIENT = local_training(PRIVATE, optimizer=optax.sgd(0.1, momentum=0.5), batch_size=4)


def with_test_rows(who, sizes):
    """The data with ``sizes[i]`` test rows for client i."""
    size = np.array(sizes, np.int32)
    offset = (np.cumsum(size) - size).astype(np.int32)
    return who._replace(test_order=np.arange(size.sum(), dtype=np.int32), test_offset=offset, test_size=size)


def problem(rule, timing="buffer:size=2", private=True, **options):
    """A case whose clients have 4, 3, 4, 0 and 4 test rows."""
    given = case(rule, timing, "exponential:mean=1", **options)
    components = given.components._replace(data=with_test_rows(data(), [4, 3, 4, 0, 4]))
    return given._replace(components=components._replace(model=PRIVATE, client=CLIENT) if private else components)


def own_models_by_hand(given):
    """Each client's own model at the end of a run, one event at a time; every upload must be applied."""
    components, schedule, params, key, _ = given
    rule, client, who = rule_of(components.server, {}, facts_of(schedule)), components.client, components.data
    dispatch, receive, close = jax.jit(rule.dispatch), jax.jit(rule.receive), jax.jit(lambda *kept: closed(rule, *kept))
    train = jax.jit(lambda *given: run_job(client, *given))
    x, y, order = jnp.asarray(who.x), jnp.asarray(who.y), jnp.asarray(who.order)
    state, row = rule.init(params)
    memory, kept, sent, messages = [row] * 5, [client.init(params)] * 5, 0, {}

    def request(i, time, version):
        return Request(jnp.int32(i), jnp.float64(time), jnp.int32(version), jnp.int32(1), jnp.float64(who.size[i]))

    for e in range(len(schedule.job) + 1):
        while sent < len(schedule.client) and schedule.dispatched_after[sent] == e:
            i = schedule.client[sent]
            asked = request(i, schedule.dispatch_time[sent], schedule.version[sent])
            message, memory[i] = dispatch(state, memory[i], asked)
            messages[sent] = message._replace(version=jnp.int32(schedule.version[sent]))
            sent += 1
        if e == len(schedule.job):
            break
        j = schedule.job[e]
        i, message, steps = schedule.client[j], messages.pop(j), jnp.int32(schedule.local_steps[j])
        part = ClientData(x, y, order, jnp.int32(who.offset[i]), jnp.int32(who.size[i]))
        chance = job_key(key, jnp.int32(i), jnp.int32(schedule.number[j]))
        upload, kept[i] = train(chance, message, kept[i], part, steps)
        arrival = Arrival(
            upload, message.params, jnp.int32(schedule.staleness[e]), jnp.float64(who.size[i]), jnp.int32(i),
            jnp.float64(schedule.time[e]), jnp.bool_(schedule.closes[e]), steps, message.extra,
        )  # fmt: skip
        state, memory[i], _ = receive(state, memory[i], arrival)
        if schedule.closes[e]:
            state, memory[i] = close(state, memory[i])
    models = []
    for i in range(5):
        message, _ = dispatch(state, memory[i], request(i, schedule.time[-1], schedule.closes.sum()))
        models.append(message.params if client.own is None else client.own(message, kept[i]))
    return models


def scores_by_hand(models, who):
    """(accuracy, loss) of each model on its client's own test rows, in NumPy."""
    found = []
    for model, offset, size in zip(models, who.test_offset, who.test_size):
        rows = who.test_order[offset : offset + size]
        x, y = who.test_x[rows], who.test_y[rows]
        w = jax.tree.map(np.asarray, model)
        logits = np.tanh(x @ w["hidden"]["kernel"]) @ w["output"]["kernel"] + w["output"]["bias"]
        loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(size), y]
        found.append((np.mean(logits.argmax(1) == y), np.mean(loss)) if size else (np.nan, np.nan))
    return np.array(found).T


@pytest.mark.slow_cases("fedbuff-buffer:size=2-True")
@pytest.mark.float64
@pytest.mark.parametrize(
    ("rule", "timing", "private"),
    [
        ("fedbuff", "buffer:size=2", True),
        ("orthofl", "every", False),
        pytest.param("orthofl", "every", True, marks=pytest.mark.slow),
    ],
)
def test_own_models_equal_those_by_hand(rule, timing, private):
    given = problem(rule, timing, private)
    out = run_waves(*given, per_client=True)
    accuracy, loss = scores_by_hand(own_models_by_hand(given), given.components.data)
    np.testing.assert_allclose(out.scores["client_own_loss"][-1], loss, rtol=1e-9)
    np.testing.assert_allclose(out.scores["client_own_accuracy"][-1], accuracy, rtol=1e-12)
    assert np.isnan(loss[3]) and not np.allclose(loss, out.scores["client_loss"][-1], rtol=1e-3, equal_nan=True)
    np.testing.assert_allclose(out.scores["client_own_loss"][0], out.scores["client_loss"][0], rtol=1e-9)


def ways():
    """Each rule under two timings, each timing with one batching; the other combinations are marked slow."""
    timings = ["every", "buffer:size=3", "cohort:size=4", "window:length=0.7"]
    for (i, rule), (j, timing), (k, batching) in product(
        enumerate(["fedbuff", "orthofl"]), enumerate(timings), enumerate(["vmap", "loop"])
    ):
        yield pytest.param(rule, timing, batching, marks=[] if (i + j) % 2 == 0 and j // 2 == k else [pytest.mark.slow])


@pytest.mark.slow_cases("fedbuff-every-vmap", "orthofl-buffer:size=3-vmap")
@pytest.mark.float64
@pytest.mark.parametrize(("rule", "timing", "batching"), list(ways()))
def test_engine_equals_oracle_and_the_run_is_unchanged(rule, timing, batching):
    given = problem(rule, timing, faults="drop:probability=0.3")
    want = run_reference(*given, per_client=True)
    assert len(want.in_vain) > 0, "some uploads of clients that keep state must be lost"
    have = run_waves(*given, per_client=True, batching=batching)
    assert have.scores.keys() == want.scores.keys()
    assert have.scores["client_own_loss"].shape == (len(given.points.time), 5)
    for name, values in want.scores.items():
        np.testing.assert_allclose(have.scores[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
    plain = run_waves(*given, batching=batching)
    jax.tree.map(np.testing.assert_array_equal, (have.params, have.records), (plain.params, plain.records))


@pytest.mark.float64
@pytest.mark.parametrize("batching", [pytest.param("vmap", marks=pytest.mark.slow), "loop"])
def test_a_stack_of_two_runs_each_as_alone(batching):
    cases = [problem("orthofl", faults="drop:probability=0.3"), problem("orthofl", seed=4, updates=17)]
    components = cases[0].components._replace(data=with_test_rows(data(), [2, 0, 5, 3, 1]))
    cases[1] = cases[1]._replace(components=components)
    members = [make_member(*one) for one in cases]
    made = layout_of(members, batching=batching)
    stack = make_stack(members, made, shape_of(made), per_client=True)
    for have, one in zip(run_stack(stack), cases, strict=True):
        want = run_reference(*one, per_client=True)
        close(have.params, want.params, 1e-9)
        for name, values in want.scores.items():
            np.testing.assert_allclose(have.scores[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("engine", [run_waves, run_reference])
def test_the_request_says_when_and_for_whom(engine):
    """The message encodes its request in the model's weights; the loss of the own model is that number."""

    def init(params):
        return params, jnp.zeros(())

    def dispatch(state, memory, request):
        number = request.client + 10 * request.version + 1000 * request.local_steps
        asked = number.astype(memory.dtype) + 1e5 * request.weight + 1e-3 * request.time.astype(memory.dtype)
        return Message(jax.tree.map(lambda w: jnp.full_like(w, asked), state)), memory + 1

    def receive(state, memory, arrival):
        return state, memory, Info(arrival.weight)

    with jax.enable_x64(True):
        rule = ServerAlgorithm(init, receive, dispatch, lambda state: state)
        given = problem(rule, private=False)
        model = MODEL._replace(
            apply=lambda params, x, key=None: jnp.full((len(x), 3), params["output"]["bias"][0]),
            loss=lambda outputs, y: outputs[:, 0],
        )
        out = engine(*given._replace(components=given.components._replace(model=model)), per_client=True)
        schedule, points, size = given.schedule, given.points, given.components.data.size
        for row, position, time in zip(out.scores["client_own_loss"], points.position, points.time):
            for i in (0, 1, 2, 4):
                steps = schedule.local_steps[schedule.client == i][0]
                want = i + 10 * schedule.closes[:position].sum() + 1000 * steps + 1e5 * size[i] + 1e-3 * time
                np.testing.assert_allclose(row[i], want, rtol=1e-12)


@pytest.mark.slow_cases("run_waves")
@pytest.mark.parametrize("engine", [run_waves, run_reference])
def test_where_models_cannot_differ_there_are_no_own_columns(engine):
    out = engine(*problem("fedbuff", private=False), per_client=True)
    assert {"client_loss", "client_accuracy"} == {name for name in out.scores if name.startswith("client_")}
    assert not [name for name in engine(*problem("orthofl")).scores if name.startswith("client_")]


@pytest.mark.slow_cases("fedavg-False-full")
@pytest.mark.parametrize(("method", "own", "slots"), [
    ("fedavg", False, "full"), ("orthofl", True, "bfloat16"),
    pytest.param("fedavg", False, "bfloat16", marks=pytest.mark.slow),
    pytest.param("orthofl", True, "full", marks=pytest.mark.slow),
])  # fmt: skip
def test_simulated_runs_have_them_by_name(method, own, slots):
    run = simulate(
        method=method, model="logistic", clients=4, updates=8, steps=2, batch_size=8, partition="iid",
        test_fraction=0.2, per_client=True, eval_updates=4, slots=slots,
    )  # fmt: skip
    names = {"loss", "accuracy"} | ({"own_loss", "own_accuracy"} if own else set())
    assert set(run.per_client) == names
    for name in names:
        assert run.per_client[name].shape == (3, 4) and np.isfinite(run.per_client[name]).all()


def test_test_parts_may_lie_in_any_order_and_leave_rows_out():
    who = data((3, 4))._replace(
        test_order=np.arange(20, dtype=np.int32)[::-1].copy(),
        test_offset=np.array([12, 2], np.int32),
        test_size=np.array([3, 4], np.int32),
    )
    want = np.full(20, 2)
    want[who.test_order[12:15]], want[who.test_order[2:6]] = 0, 1
    np.testing.assert_array_equal(owners(who), want)
