"""The contract of every entry of ``SERVERS``."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings
from fedjax_async.base import factories, tree
from fedjax_async.config import prepare
from fedjax_async.server import SERVERS, STALENESS, closed, mean
from fedjax_async.server.scaffold import Change
from fedjax_async.types import Arrival, Facts, Request
from tests.refusals import refusals
from tests.server.made_up import CLIENTS, closing, random_uploads, received, stacked, start_params, uploading


def options(name):
    return factories.options_of(SERVERS[name])


# Rules that send each client weights of its own.
PERSONAL = {"adpsgd", "orthofl", "orthofl_no_average", "orthofl_pairwise", "orthofl_released", "quafl", "ringleader"}
AT_ONCE = {"adpsgd", "orthofl_no_average"}  # rules that move at every arrival, even if it closes no step
MADE = {name: factory(**({"per": "tensor"} if "per" in options(name) else {})) for name, factory in SERVERS.items()}
RECEIVE = {name: jax.jit(received(server)) for name, server in MADE.items()}


def mixed(params):
    """One leaf in bfloat16 and one in float32, of one shape."""
    kernel, _ = params["layer"]
    return {"half": kernel.astype(jnp.bfloat16), "full": kernel}


PARAMS = mixed(start_params())


def arrivals_for(name, uploads, regions=False):
    arrivals = stacked(uploads)
    arrivals = arrivals._replace(upload=mixed(arrivals.upload), start=mixed(arrivals.start))
    return uploading(name, arrivals, regions=regions)


def types(value):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), jax.eval_shape(lambda: value))


def traced_options(factory):
    return {name: p for name, p in factories.options_of(factory).items() if factories.is_traced(p)}


@pytest.mark.parametrize("factory", [*SERVERS.values(), *STALENESS.values()])
def test_factories_take_keywords_with_defaults_numbers_to_trace_or_choices_and_say_what_they_do(factory):
    parameters, traced = inspect.signature(factory).parameters, traced_options(factory)
    assert list(factories.options_of(factory)) == list(parameters)
    assert all(p.default is not p.empty and p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert factories.summary(factory).endswith(".")
    for option, parameter in factories.options_of(factory).items():
        kinds = (int, float, type(None)) if option in traced else parameter.annotation
        assert isinstance(parameter.default, kinds), option


@pytest.mark.parametrize("name", SERVERS)
def test_state_keeps_its_types_and_dispatch_sends_the_current_params(name):
    """The types include weak types. Types in and out are equal, so the second call is not traced again."""
    server = MADE[name]
    arrivals = arrivals_for(name, closing(random_uploads(0, 3, rejected=0.0), at=[1, 2]))
    state, memory = server.init(PARAMS)
    first = types((state, memory))
    traced = []  # programs so far, after each call; a test below calls the same program, in any order
    for i, moved in enumerate([False, True, True]):
        last = server.params(state)
        state, memory, info = RECEIVE[name](state, memory, tree.gather(arrivals, i))
        traced.append(RECEIVE[name]._cache_size())
        message, after = server.dispatch(state, memory, Request())
        assert types((state, memory)) == first == types((state, after)) and types(message.params) == types(PARAMS)
        phase = {"correction_phase": ((), "int32")} if name in ("orthodyn", "asynccurve") else {}
        assert info.weight > 0 and (info.weight.shape, str(info.weight.dtype)) == ((), "float32")
        assert {column: (leaf.shape, str(leaf.dtype)) for column, leaf in info.columns.items()} == phase
        if name not in PERSONAL:
            jax.tree.map(np.testing.assert_array_equal, message.params, server.params(state))
        assert np.any(server.params(state)["full"] != last["full"]) == (moved or name in AT_ONCE)
    assert traced == [1, 1, 1]
    # and where every arrival closes a step
    before = jax.eval_shape(lambda: server.init(PARAMS, Facts(CLIENTS, every_closes=True)))
    arrival = tree.gather(arrivals, 0)
    assert jax.eval_shape(lambda given: closed(server, *server.receive(*given, arrival)[:2]), before) == before


SUMMING = ["fedbuff", "fednova", "asynfl", "ca2fl", "mifa", "area", "malenia", "feddyn", "quafl", "scaffold"]


@pytest.mark.parametrize("name", SUMMING)
def test_a_long_step_in_half_precision_is_as_long_as_in_full(name):
    """A sum of 600 ones in bfloat16 is 256."""
    count, server = 600, SERVERS[name]()
    facts, client = Facts(count), jnp.arange(count, dtype=jnp.int32)

    def sent(dtype):
        start, ones = {"w": jnp.zeros(1, dtype)}, {"w": jnp.ones(1, dtype)}
        upload = Change(ones, ones) if name == "scaffold" else ones
        zero, real = jnp.int32(0), jnp.float32(1.0)
        state, row = server.init(start, facts)

        def one(state, client):
            given = Arrival(upload, start, zero, real, client, real, client == count - 1, zero + 1)
            return server.receive(state, row, given)[:2]

        state, rows = jax.lax.scan(one, state, client)
        message, _ = server.dispatch(*closed(server, state, tree.gather(rows, 0)), Request())
        return jax.tree.leaves((server.params(state), message))

    for half, full in zip(jax.jit(sent, static_argnums=0)(jnp.bfloat16), jax.jit(sent, static_argnums=0)(jnp.float32)):
        np.testing.assert_allclose(np.asarray(half, np.float32), full, rtol=0.01)


def test_scaffolds_control_variate_adds_up_small_changes_in_half_precision():
    """A sum of many steps of 1 / N is far from N / N in bfloat16."""
    server, start, one, real = SERVERS["scaffold"](), {"w": jnp.zeros(1, jnp.bfloat16)}, jnp.int32(1), jnp.float32(1.0)
    upload = Change(start, {"w": jnp.ones(1, jnp.bfloat16)})

    def stepped(state, _):
        given = Arrival(upload, start, one, real, 0 * one, real, jnp.bool_(True), one)
        return closed(server, *server.receive(state, (), given)[:2])[0], None

    state, _ = jax.jit(lambda: jax.lax.scan(stepped, server.init(start, Facts(1000))[0], None, 1000))()
    control = server.dispatch(state, (), Request())[0].extra["w"]
    assert control.dtype == jnp.bfloat16 and abs(float(control[0]) - 1.0) < 0.01


@pytest.mark.parametrize("name", ["fadas", "fedadam", "fedyogi"])
def test_squares_of_small_deltas_are_not_lost_in_float16(name):
    """That of 0.001, times 1 - b2, is below float16; without it FADAS divides by zero."""
    server, real, whole = SERVERS[name](server_lr=0.01), jnp.float32(1.0), jnp.int32(0)

    @functools.partial(jax.jit, static_argnums=0)
    def stepped(dtype):
        start, delta = {"w": jnp.zeros(3, dtype)}, {"w": jnp.asarray([1e-3, -1e-3, 0.0], dtype)}
        state, row = server.init(start, Facts(1, True))
        given = Arrival(delta, start, whole, real, whole, real, jnp.bool_(True), whole + 1)
        return server.params(closed(server, *server.receive(state, row, given)[:2])[0])["w"]

    np.testing.assert_allclose(np.asarray(stepped(jnp.float16), np.float32), stepped(jnp.float32), rtol=0.01)


# Options that need others: all are given but ``exponent``, then, where there is one, all but those of the hinge.
NEEDS = {"staleness": "hinge", "phases": "orthograd+asgd+orthopos", "regions": 0.5}
GIVEN = [(name, "hinge") for name in SERVERS] + [(n, "polynomial") for n in SERVERS if "staleness" in options(n)]
WHOLE = {"server_lr", "mixing", "exponent", "slope", "threshold", "clip", "overstale_after", "overstale"}
KINDS = {"traced": jnp.float32, "traced whole": jnp.int32, "whole": int}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "staleness"), GIVEN)
def test_numbers_of_any_kind_leave_the_types_of_the_state_alone(name, staleness, kind):
    """A sweep's float32 rate does not turn bfloat16 state into float32; a command's ``fedasync:mixing=1`` is an int."""
    factory = SERVERS[name]
    needs = {key: value for key, value in NEEDS.items() if key in factories.options_of(factory)}
    without = {"exponent"} if staleness == "hinge" else {"slope", "threshold"}
    fixed = needs if staleness == "hinge" else {key: value for key, value in needs.items() if key != "staleness"}
    arrival = tree.gather(arrivals_for(name, random_uploads(0, 1), "regions" in fixed), 0)
    values = {key: p.default for key, p in traced_options(factory).items() if key not in without}
    values |= {key: 1 for key, value in values.items() if value is None or kind != "traced"}
    if kind == "whole":
        values = {key: values[key] for key in values.keys() & WHOLE}

    def before_and_after(values):
        server = factory(**fixed, **values)
        given = server.init(PARAMS)
        return given, received(server)(*given, arrival)[:2]

    given = values if kind == "whole" else {key: KINDS[kind](value) for key, value in values.items()}
    shapes = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    traced = (lambda: before_and_after(given),) if kind == "whole" else (before_and_after, given)
    before, after = shapes(jax.eval_shape(*traced))
    assert values and after == before


INFINITE = float("inf")
# Values out of the range of an option, in every rule that has it; a number is never a text, a truth value or NaN.
RANGES = {
    "server_lr eps alpha level age_weight bound": [0, -1.0, INFINITE, None],
    "mixing lowest": [0, -1.0, INFINITE, None, 1.5],
    "b1 b2 momentum decay": [-0.1, 1.0],
    "fraction swa spread regions beta": [-0.1, 1.5],
    "second_fraction overstale": [-0.1, 0.25],
    "likeness_weight power floor rate tolerated initial exponent slope threshold overstale_after": [-0.1],
    "strength": [-0.1, None],
    "clip radius": [0, -1.0, INFINITE],
    "trim": [-0.1, 0.6, None],
    "byzantine": [-1, 1.5, None],
    "select": [0, 1.5, None, 2**31],
    "size window": [0, 2.0, None],
    "cycle overwrite": [0, 2.5, 2**31],  # compared with counts of int32
    "vertices bends signal": [0, 2.5],
}
OUT_OF_RANGE = {field: values for fields, values in RANGES.items() for field in fields.split()}


@pytest.mark.parametrize("name", SERVERS)
def test_bad_numbers_are_refused_by_name(name):
    numbers = traced_options(SERVERS[name]).keys() | (OUT_OF_RANGE.keys() & factories.options_of(SERVERS[name]).keys())
    for field in sorted(numbers):
        for value in ["some", True, float("nan"), *OUT_OF_RANGE[field]]:
            with pytest.raises(ValueError, match=rf"^{field} = .*: must be ") as error:
                SERVERS[name](**{field: value})
            assert repr(value) in str(error.value) and "\n" not in str(error.value), (field, value)


WEIGHTING = [name for name in SERVERS if "weighting" in options(name)]
WEIGHTS = [
    ("polinomial", {}, "^staleness = 'polinomial': unknown; did you mean 'polynomial'"),
    ("constant", {"exponent": 1.0}, "^exponent = 1.0: must be left out: staleness weight 'constant'"),
    ("polynomial", {"slope": 1.0}, "^slope = 1.0: must be left out"),
    ("hinge", {"exponent": 1.0}, "^exponent = 1.0: must be left out"),
    ("hinge", {"slope": 0}, "^slope = 0: must be a finite number > 0"),
    ("hinge", {"threshold": -1}, "^threshold = -1: must be a finite number >= 0"),
]
test_bad_choices_are_refused = refusals(
    *((name, {"weighting": "size"}, "^weighting = 'size': must be ") for name in WEIGHTING),
    *((name, {"overstale": 0.5}, "^overstale = 0.5: must be left out: it needs overstale_after$") for name in SERVERS),
    *(
        ("fedavg", {"overstale_after": 3, "overstale": v}, "^overstale = ")
        for v in (-0.1, 1.5, float("nan"), "some", True)
    ),
    ("orthodyn", {"phases": "orthograd"}, r"^phases = 'orthograd': must be two or three names joined by \+"),
    ("orthodyn", {"phases": "orthograd+orthopoz"}, "^phases = 'orthopoz': unknown; did you mean 'orthopos'"),
    ("orthodyn", {"switch": "steps"}, "^switch = 'steps': unknown"),
    ("orthodyn", {"second_fraction": 0.2}, "^second_fraction = 0.2: must be left out: it needs three phases"),
    ("orthodyn", {"per": "layers"}, "^per = 'layers': unknown; did you mean 'layer'"),
    ("orthodyn", {"phases": "asgd+asgd+asgd+asgd"}, "phases = 'asgd+asgd+asgd+asgd': must be "),
    ("asynccurve", {"dominance": "some"}, "^dominance = 'some': must be "),
    ("adpsgd", {"pairing": "star"}, "^pairing = 'star': unknown"),
    ("asynccurve", {"momentum_on": "some"}, "^momentum_on = 'some': must be "),
    ("asynccurve", {"warm": "some"}, "^warm = 'some': must be "),
    ("fedmrur", {"reaggregate": "some"}, "^reaggregate = 'some': must be "),
    *(("mean", {"divisor": value}, "^divisor = ") for value in (0, -3, "n", INFINITE)),
    *((rule, {"staleness": name} | given, says) for rule in ("fedasync", "fedbuff") for name, given, says in WEIGHTS),
    by=lambda name, given: (SERVERS | {"mean": mean})[name](**given),
)


TRAFFIC = {  # as many times the bytes (up, down) of FedAvg's messages
    "scaffold": (2, 2),
    "asynccurve:correction=orthograd": (2, 2),
    "asynccurve:correction=orthograd,warm=off": (2, 1),
    "asynccurve:correction=orthograd,warm=off,curve=cubic": (3, 1),
    "asynccurve:correction=orthograd,curve=chain,bends=4": (5, 2),
    "floco:vertices=4": (4, 4),
}


@pytest.mark.parametrize("method", TRAFFIC)
def test_messages_of_several_trees_are_as_many_times_as_long(method):
    def traffic(method):
        found = prepare(Settings(method=method, model="logistic", clients=5, updates=4, timing="every")).traffic
        return np.array([found.up, found.down])

    np.testing.assert_array_equal(traffic(method), TRAFFIC[method] * traffic("fedavg"))
