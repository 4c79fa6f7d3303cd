"""The contract of every entry of ``SERVERS``."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings
from fedjax_async.base import factories, tree
from fedjax_async.config import prepare
from fedjax_async.server import SERVERS, STALENESS, closed, mean, staleness_weight
from fedjax_async.types import Facts, Request
from tests.server.made_up import CLIENTS, closing, flat, random_uploads, received, stacked, start_params, uploading

STEPPING = [name for name, factory in SERVERS.items() if "server_lr" in factories.options_of(factory)]
MIXING = [name for name, factory in SERVERS.items() if "mixing" in factories.options_of(factory)]
# Rules that send each client weights of its own.
PERSONAL = {"orthofl", "orthofl_no_average", "orthofl_pairwise", "orthofl_released"}
PER_TENSOR = {name for name, factory in SERVERS.items() if "per" in factories.options_of(factory)}
MADE = {name: factory(**({"per": "tensor"} if name in PER_TENSOR else {})) for name, factory in SERVERS.items()}


RECEIVE = {name: jax.jit(received(server)) for name, server in MADE.items()}


def mixed(params):
    """One leaf in bfloat16, the others in float32."""
    kernel, bias = params["layer"]
    return {**params, "layer": [kernel.astype(jnp.bfloat16), bias]}


def arrivals_for(name, uploads):
    arrivals = stacked(uploads)
    return uploading(name, arrivals._replace(upload=mixed(arrivals.upload), start=mixed(arrivals.start)))


def types(value):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), jax.eval_shape(lambda: value))


@pytest.mark.parametrize("factory", [*SERVERS.values(), *STALENESS.values()])
def test_factories_take_keywords_with_defaults_and_say_what_they_do(factory):
    parameters = inspect.signature(factory).parameters
    assert list(factories.options_of(factory)) == list(parameters)
    assert all(p.default is not p.empty and p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert factories.summary(factory).endswith(".")


@pytest.mark.parametrize("name", SERVERS)
def test_state_keeps_its_types_and_dispatch_sends_the_current_params(name):
    """The types include weak types. Types in and out are equal, so the second call is not traced again."""
    server, params = MADE[name], mixed(start_params())
    arrivals = arrivals_for(name, closing(random_uploads(0, 3, rejected=0.0), at=[1, 2]))
    state, memory = server.init(params)
    first = types((state, memory))
    traced = []  # programs so far, after each call; a test below calls the same program, in any order
    for i, moved in enumerate([False, True, True]):
        last = server.params(state)
        state, memory, info = RECEIVE[name](state, memory, tree.gather(arrivals, i))
        traced.append(RECEIVE[name]._cache_size())
        message, after = server.dispatch(state, memory, Request())
        assert types((state, memory)) == first == types((state, after)) and types(message.params) == types(params)
        phase = {"correction_phase": ((), "int32")} if name in ("orthodyn", "asynccurve") else {}
        assert info.weight > 0 and (info.weight.shape, str(info.weight.dtype)) == ((), "float32")
        assert {column: (leaf.shape, str(leaf.dtype)) for column, leaf in info.columns.items()} == phase
        if name not in PERSONAL:
            jax.tree.map(np.testing.assert_array_equal, message.params, server.params(state))
        assert np.any(flat(server.params(state)) != flat(last)) == (moved or name == "orthofl_no_average")
    assert traced == [1, 1, 1]


@pytest.mark.parametrize("name", SERVERS)
def test_state_keeps_its_types_where_every_arrival_closes(name):
    server, arrival = SERVERS[name](), tree.gather(arrivals_for(name, random_uploads(0, 1)), 0)
    facts = Facts(CLIENTS, every_closes=True)
    before = jax.eval_shape(lambda: server.init(mixed(start_params()), facts))
    after = jax.eval_shape(lambda given: closed(server, *server.receive(*given, arrival)[:2]), before)
    assert after == before


def traced_options(factory):
    return {name: p for name, p in factories.options_of(factory).items() if factories.is_traced(p)}


@pytest.mark.parametrize("name", SERVERS)
def test_options_are_numbers_to_trace_or_static_choices(name):
    traced = traced_options(SERVERS[name])
    for option, parameter in factories.options_of(SERVERS[name]).items():
        kinds = (int, float, type(None)) if option in traced else parameter.annotation
        assert isinstance(parameter.default, kinds), option


# Options that need others: all are given but ``exponent``, then all but those of the hinge.
NEEDS = {"staleness": "hinge", "phases": "orthograd+asgd+orthopos"}
WITHOUT = {"exponent"}, {"slope", "threshold"}
WHOLE = {"server_lr", "mixing", "exponent", "slope", "threshold", "clip", "overstale_after", "overstale"}
KINDS = {"traced": jnp.float32, "traced whole": jnp.int32, "whole": int}


@pytest.mark.parametrize("without", WITHOUT, ids=["hinge", "polynomial"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SERVERS)
def test_numbers_of_any_kind_leave_the_types_of_the_state_alone(name, kind, without):
    """A sweep's float32 rate does not turn bfloat16 state into float32; a command's ``fedasync:mixing=1`` is an int."""
    factory = SERVERS[name]
    needs = {key: value for key, value in NEEDS.items() if key in factories.options_of(factory)}
    fixed = needs if "exponent" in without else {key: value for key, value in needs.items() if key != "staleness"}
    arrival = tree.gather(arrivals_for(name, random_uploads(0, 1)), 0)
    values = {key: p.default for key, p in traced_options(factory).items() if key not in without}
    values |= {key: 1 for key, value in values.items() if value is None or kind != "traced"}
    if kind == "whole":
        values = {key: values[key] for key in values.keys() & WHOLE}

    def before_and_after(values):
        server = factory(**fixed, **values)
        given = server.init(mixed(start_params()))
        return given, received(server)(*given, arrival)[:2]

    if kind == "whole":
        before, after = jax.eval_shape(lambda: before_and_after(values))
    else:
        before, after = jax.eval_shape(before_and_after, {key: KINDS[kind](value) for key, value in values.items()})
    assert values and jax.tree.map(lambda s: (s.shape, s.dtype), (after,)) == jax.tree.map(
        lambda s: (s.shape, s.dtype), (before,)
    )


# A rule of each file, and the ones whose steps are of another kind.
EAGER = {factory.__module__: name for name, factory in SERVERS.items()}.values()


@pytest.mark.parametrize("name", EAGER)
def test_compiled_or_not_is_the_same(name):
    server, params = MADE[name], mixed(start_params())
    arrivals = arrivals_for(name, closing(random_uploads(1, 3), at=[0, 2]))

    def ending(receive):
        state, memory = server.init(params)
        for i in range(3):
            state, memory, info = receive(state, memory, tree.gather(arrivals, i))
        return state, memory, info

    def same(a, b):
        tolerance = {"rtol": 2e-2, "atol": 1e-2} if a.dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
        if name == "asynccurve":  # the rotation of all leaves together carries bfloat16's rounding to the others
            tolerance = {"rtol": max(tolerance["rtol"], 1e-3), "atol": max(tolerance["atol"], 1e-5)}
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), **tolerance)

    with jax.disable_jit():
        plain = ending(received(server))
    jax.tree.map(same, ending(RECEIVE[name]), plain)


ANY, AT_LEAST_0, BELOW_1 = [0, -1.0, float("nan"), float("inf"), "fast", None, True], [-0.1, float("nan")], [-0.1, 1.0]
BAD = [
    *[("fedavg", "server_lr", value) for value in ANY],
    *[(name, "server_lr", -1.0) for name in STEPPING],
    *[("fedasync", "mixing", value) for value in ANY],
    *[(name, "mixing", 1.5) for name in MIXING],
    *[("fadas", field, value) for field in ("b1", "b2") for value in BELOW_1],
    *[("fadas", "tolerated", value) for value in [*AT_LEAST_0, "some"]],
    *[("fedavgm", "momentum", value) for value in [*BELOW_1, "much", float("nan")]],
    *[(name, field, value) for name in ("fedadam", "fedyogi") for field in ("b1", "b2") for value in BELOW_1],
    *[("fedadam", "eps", value) for value in ANY],
    *[(name, "eps", -1.0) for name in ("fedadagrad", "fedyogi", "dc_asgd_a")],
    *[(name, "strength", value) for name in ("dc_asgd", "dc_asgd_a") for value in [*AT_LEAST_0, "strong", None, True]],
    *[(name, "decay", value) for name in ("dc_asgd_a", "orthodyn") for value in [*BELOW_1, None]],
    *[("orthodyn", "fraction", value) for value in (-0.1, 1.5, float("nan"), None, "half", True)],
    *[("orthodyn", "second_fraction", value) for value in (-0.1, 0.25, "half")],
    *[("orthodyn", "phases", value) for value in ("orthograd", "asgd+asgd+asgd+asgd")],
    *[("fedadagrad", "initial", value) for value in AT_LEAST_0],
    *[("asynccurve", "lowest", value) for value in [*ANY, 1.5]],
    *[("asynccurve", field, value) for field in ("momentum", "decay") for value in BELOW_1],
    *[
        ("asynccurve", field, value)
        for field in ("swa", "fraction")
        for value in (-0.1, 1.5, float("nan"), "half", True)
    ],
    *[("asynccurve", field, value) for field in ("cycle", "overwrite") for value in (0, 2.5, "ten", True)],
    *[("asynccurve", field, "some") for field in ("dominance", "momentum_on", "warm")],
    *[("floco", "vertices", value) for value in (0, 2.5, "ten", True)],
    *[("floco", "spread", value) for value in (-0.1, 1.5, float("nan"), "half", True)],
    ("fedmrur", "reaggregate", "some"),
    *[(name, "exponent", value) for name in ("fedasync", "fedbuff") for value in [*AT_LEAST_0, "half"]],
    *[(name, "weighting", "size") for name in SERVERS if "weighting" in factories.options_of(SERVERS[name])],
    *[("trimmed_mean", "trim", value) for value in (-0.1, 0.6, float("nan"), None, "half", True)],
    *[("krum", "byzantine", value) for value in (-1, 1.5, float("nan"), None, "one", True)],
    *[("krum", "select", value) for value in (0, 1.5, float("nan"), None, "one", True)],
    *[("fedmedian", "size", value) for value in (0, 2.0, None, "ten", True)],
    *[(name, "size", 0) for name in ("trimmed_mean", "krum")],
    *[("fedavg", "clip", value) for value in (0, float("inf"), "some", True)],
    *[("fedavg", "overstale_after", value) for value in (float("nan"), "some", True)],
    *[(name, field, -1.0) for name in SERVERS for field in ("clip", "overstale_after")],
]


@pytest.mark.parametrize(("name", "field", "value"), BAD, ids=[f"{n}-{f}-{v}" for n, f, v in BAD])
def test_bad_hyperparameters_are_refused_by_name(name, field, value):
    with pytest.raises(ValueError, match=rf"^{field} = .*: must be ") as error:
        SERVERS[name](**{field: value})
    assert repr(value) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polinomial", {}, "staleness = 'polinomial': unknown; did you mean 'polynomial'?"),
        ("constant", {"exponent": 1.0}, "exponent = 1.0: must be left out: staleness weight 'constant'"),
        ("polynomial", {"slope": 1.0}, "slope = 1.0: must be left out"),
        ("hinge", {"exponent": 1.0}, "exponent = 1.0: must be left out"),
        ("hinge", {"slope": 0}, "slope = 0: must be a finite number > 0"),
        ("hinge", {"threshold": -1}, "threshold = -1: must be a finite number >= 0"),
    ],
)
def test_bad_staleness_weights_are_refused(name, options, message):
    for factory in (SERVERS["fedasync"], SERVERS["fedbuff"]):
        with pytest.raises(ValueError) as error:
            factory(staleness=name, **options)
        assert str(error.value).startswith(message)
    with pytest.raises(ValueError):
        staleness_weight(name, **options)


@pytest.mark.parametrize("value", [0, -3, "n", float("inf")])
def test_a_bad_divisor_is_refused(value):
    with pytest.raises(ValueError, match=r"^divisor = "):
        mean(divisor=value)


@pytest.mark.parametrize("name", SERVERS)
def test_overstale_needs_a_limit(name):
    with pytest.raises(ValueError, match=r"^overstale = 0.5: must be left out: it needs overstale_after$"):
        SERVERS[name](overstale=0.5)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "some", True])
def test_overstale_must_be_a_share(value):
    with pytest.raises(ValueError, match=r"^overstale = "):
        SERVERS["fedavg"](overstale_after=3, overstale=value)


TRAFFIC = {  # as many times the bytes (up, down) of FedAvg's messages
    "scaffold": (2, 2),
    "asynccurve:correction=orthograd": (2, 2),
    "asynccurve:correction=orthograd,warm=off": (2, 1),
    "floco:vertices=4": (4, 4),
}


@pytest.mark.parametrize("method", TRAFFIC)
def test_messages_of_several_trees_are_as_many_times_as_long(method):
    def traffic(method):
        found = prepare(Settings(method=method, model="logistic", clients=5, updates=4, timing="every")).traffic
        return np.array([found.up, found.down])

    np.testing.assert_array_equal(traffic(method), TRAFFIC[method] * traffic("fedavg"))
