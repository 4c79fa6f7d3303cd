"""The contract of every entry of ``SERVERS``."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import registry, tree
from fedjax_async.server import SERVERS, STALENESS, closed, known, mean, staleness_weight
from fedjax_async.types import Facts, Request
from tests.server.made_up import closing, flat, random_uploads, receive_all, received, stacked, start_params, uploading
from tests.server.textbook_memory import CLIENTS

STEPPING = [name for name, factory in SERVERS.items() if "server_lr" in registry.options_of(factory)]
MIXING = [name for name, factory in SERVERS.items() if "mixing" in registry.options_of(factory)]
COUNTING = [name for name, factory in SERVERS.items() if "num_clients" in registry.options_of(factory)]
# Rules that send each client weights of its own.
PERSONAL = {"orthofl", "orthofl_no_average", "orthofl_pairwise", "orthofl_released"}
PER_TENSOR = {name for name, factory in SERVERS.items() if "per" in registry.options_of(factory)}
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
    assert list(registry.options_of(factory)) == list(parameters)
    assert all(p.default is not inspect.Parameter.empty for p in parameters.values())
    assert registry.summary(factory).endswith(".")


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
    server = known(server, Facts(CLIENTS, every_closes=True))
    before = jax.eval_shape(lambda: server.init(mixed(start_params())))
    after = jax.eval_shape(lambda given: closed(server, *server.receive(*given, arrival)[:2]), before)
    assert after == before


@pytest.mark.parametrize("name", SERVERS)
def test_traced_hyperparameters_leave_the_types_alone(name):
    """A sweep's float32 learning rate, momentum or other option does not turn bfloat16 state into float32."""
    given = registry.options_of(SERVERS[name]).items()
    options = {k: p.default for k, p in given if registry.is_traced(p) and p.default is not None}
    options |= {"clip": 1.0, "overstale_after": 3.0, "overstale": 0.5}
    arrival = tree.gather(arrivals_for(name, random_uploads(0, 1)), 0)

    def before_and_after(options):
        server = SERVERS[name](**options)
        given = server.init(mixed(start_params()))
        return given, received(server)(*given, arrival)[:2]

    before, after = jax.eval_shape(before_and_after, {key: jnp.float32(value) for key, value in options.items()})
    assert options and jax.tree.map(lambda s: (s.shape, s.dtype), after) == jax.tree.map(
        lambda s: (s.shape, s.dtype), before
    )


# Every option that is annotated Traced: a neutral value and one that matters.
TRACED = {
    "server_lr": (1.0, 0.3), "mixing": (0.6, 0.2), "momentum": (0.9, 0.5), "b1": (0.9, 0.5), "b2": (0.99, 0.9),
    "eps": (1e-3, 1e-2), "initial": (1e-6, 0.1), "exponent": (0.5, 2.0), "slope": (10.0, 1.0), "threshold": (4.0, 1.0),
    "trim": (0.2, 0.4), "tolerated": (3.0, 20.0), "byzantine": (1.0, 0.0), "select": (1.0, 3.0),
    "strength": (0.2, 0.05), "decay": (0.5, 0.2), "fraction": (0.9, 0.3), "second_fraction": (0.5, 0.8),
    "lowest": (0.9, 0.2), "swa": (1.0, 0.0), "spread": (0.0, 1.0),
    "alpha": (0.5, 0.1), "clip": (1e6, 1.5), "overstale_after": (5.0, 0.0), "overstale": (0.9, 0.1),
}  # fmt: skip
NEEDS = {
    "overstale": {"overstale_after": 4.0},
    "slope": {"staleness": "hinge"},
    "threshold": {"staleness": "hinge"},
    "second_fraction": {"phases": "orthograd+asgd+orthopos"},
}


def traced_options(factory):
    return [name for name, p in registry.options_of(factory).items() if registry.is_traced(p)]


@pytest.mark.parametrize("name", SERVERS)
def test_options_are_numbers_to_trace_or_static_choices(name):
    for option, parameter in registry.options_of(SERVERS[name]).items():
        if option in traced_options(SERVERS[name]):
            assert option in TRACED and (parameter.default is None or isinstance(parameter.default, (int, float)))
        else:
            assert isinstance(parameter.default, parameter.annotation)


@pytest.mark.float64
@pytest.mark.parametrize("name", SERVERS)
def test_a_sweep_over_any_option_equals_separate_runs(name):
    """A stack of runs, each with another option changed; ``exponent`` is not an option of the hinge.

    ``test_rules.py`` shows that numbers do the same as tracers: both equal NumPy.
    """
    factory = SERVERS[name]
    needed = [item for option in traced_options(factory) for item in NEEDS.get(option, {}).items()]
    fixed = {key: value for key, value in needed if key not in TRACED}
    neutral = {option: TRACED[option][0] for option in traced_options(factory) if option != "exponent"}
    settings = [neutral, *[neutral | {option: TRACED[option][1]} for option in neutral]]
    params, arrivals = start_params(), stacked(random_uploads(11, 24))

    def play(options):
        _, path, weights = receive_all(factory(**fixed, **options), params, uploading(name, arrivals))
        return path["scale"], weights

    alone = jax.jit(play)
    numbers = {option: np.array([given[option] for given in settings]) for option in neutral}
    paths, weights = jax.jit(jax.vmap(play))(numbers)
    for path, weight, given in zip(paths, weights, settings):
        expected, effective = alone(given)
        np.testing.assert_allclose(path, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(weight, effective, rtol=1e-9)
    changed = np.abs(paths[1:] - paths[:1]).max(axis=1) > 1e-6
    # FedDyn's h grows with alpha and is divided by it: at the server it cancels, at the clients it does not.
    # FLOCO's spread moves the vertices, but the centroid starts at the same params
    assert dict(zip(neutral, changed)) == {option: option not in ("alpha", "spread") for option in neutral}


@pytest.mark.parametrize("name", SERVERS)
def test_traced_whole_numbers_serve_as_well(name):
    plain = tree.gather(arrivals_for(name, random_uploads(0, 1)), 0)

    def receive(options, fixed):
        server = SERVERS[name](**options, **fixed)
        given = server.init(start_params())
        whole = uploading(name, plain._replace(upload=start_params(), start=start_params()))
        return given, received(server)(*given, whole)[:2]

    for option in traced_options(SERVERS[name]):
        fixed = NEEDS.get(option, {})
        before, after = jax.eval_shape(lambda o, f=fixed: receive(o, f), {option: jnp.int32(1)})
        assert jax.tree.map(lambda s: (s.shape, s.dtype), after) == jax.tree.map(lambda s: (s.shape, s.dtype), before)


@pytest.mark.parametrize("name", SERVERS)
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {"server_lr": 1}) for name in STEPPING],
        *[(name, {"mixing": 1, "exponent": 1}) for name in MIXING],
        ("fedbuff", {"staleness": "hinge", "slope": 10, "threshold": 4}),
        ("asgd", {"clip": 1, "overstale_after": 3, "overstale": 1}),
    ],
)
def test_whole_numbers_serve_as_well(name, options):
    """``fedasync:mixing=1`` on the command line is an int."""
    arrival = tree.gather(arrivals_for(name, random_uploads(0, 1)), 0)

    def before_and_after():
        server = SERVERS[name](**options)
        given = server.init(mixed(start_params()))
        return given, received(server)(*given, arrival)[:2]

    before, after = jax.eval_shape(before_and_after)
    assert before == after


ANY, AT_LEAST_0, BELOW_1 = [0, -1.0, float("nan"), float("inf"), "fast", None, True], [-0.1, float("nan")], [-0.1, 1.0]
BAD = [
    *[(name, "server_lr", value) for name in STEPPING for value in ANY],
    *[(name, "mixing", value) for name in MIXING for value in [*ANY, 1.5]],
    *[(name, "num_clients", value) for name in COUNTING for value in (0, 2.0, None, True)],
    *[("fadas", field, value) for field in ("b1", "b2") for value in BELOW_1],
    *[("fadas", "tolerated", value) for value in [*AT_LEAST_0, "some"]],
    *[("fedavgm", "momentum", value) for value in [*BELOW_1, "much", float("nan")]],
    *[(name, field, value) for name in ("fedadam", "fedyogi") for field in ("b1", "b2") for value in BELOW_1],
    *[(name, "eps", value) for name in ("fedadagrad", "fedadam", "fedyogi", "dc_asgd_a") for value in ANY],
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
    *[(name, "weighting", "size") for name in SERVERS if "weighting" in registry.options_of(SERVERS[name])],
    *[("trimmed_mean", "trim", value) for value in (-0.1, 0.6, float("nan"), None, "half", True)],
    *[("krum", "byzantine", value) for value in (-1, 1.5, float("nan"), None, "one", True)],
    *[("krum", "select", value) for value in (0, 1.5, float("nan"), None, "one", True)],
    *[(name, "size", value) for name in ("fedmedian", "trimmed_mean", "krum") for value in (0, 2.0, None, "ten", True)],
    *[(name, "clip", value) for name in SERVERS for value in (0, -1.0, float("inf"), "some", True)],
    *[(name, "overstale_after", value) for name in SERVERS for value in (-1, float("nan"), "some", True)],
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
def test_overstale_must_be_a_share_and_needs_a_limit(name):
    with pytest.raises(ValueError, match=r"^overstale = 0.5: must be left out: it needs overstale_after$"):
        SERVERS[name](overstale=0.5)
    for value in (-0.1, 1.5, float("nan"), "some", True):
        with pytest.raises(ValueError, match=r"^overstale = "):
            SERVERS[name](overstale_after=3, overstale=value)


@pytest.mark.parametrize("name", SERVERS)
def test_unknown_and_positional_options_are_refused(name):
    for arguments, options in (((), {"lr": 1.0}), ((), {"guards": None}), ((1.0,), {})):
        with pytest.raises(TypeError):
            SERVERS[name](*arguments, **options)
