"""Where settings have an effect: keywords, roles in sweeps, and refusals of what the run would ignore."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Method, Settings, Spec, compare, data, local, models, server, simulate, sweep, types
from fedjax_async.base.method import LOCAL
from fedjax_async.config import concerns, keywords, prepare, trajectory
from fedjax_async.config.clients import client_of
from fedjax_async.config.concerns import CONCERNS, HINTS, REFUSALS, without_effect
from fedjax_async.config.fields import setting
from fedjax_async.config.methods import method_of
from fedjax_async.config.objects import KINDS
from fedjax_async.config.paths import FIELDS
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import resolved, settings_from, settings_in_comparison
from fedjax_async.config.roles import ROLES, roles_of, usual_role
from fedjax_async.config.settings import DEFAULTS, as_dict, given_in
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.results.explaining import _plain
from fedjax_async.types import ClientAlgorithm, Model
from tests.refusals import refusals
from tests.told import is_refused, refusal

GIVEN = {
    "timing": "every", "topology": "ring", "exchange": "push_sum", "timeout": 9.0, "late": "drop", "max_staleness": 3,
    "augment": "flip", "personal": "output", "ditto": 0.1, "normalise": "training",
    "attack": "sign_flip", "privacy": "dp",
    "test_fraction": 0.2, "optimizer": "adam", "lr": 0.5, "decay": "cosine", "feedback": "ef", "compress_per": "layer",
    "server_steps": 3, "eval_time": 5.0, "eval_updates": 2, "eval_steps": 2, "eval_at": "1", "eval_examples": 9,
    "stop_at": 0.5, "patience": 2, "per_client": True, "global_tests": "ends", "metrics": "macro_f1",
    "train_loss": True, "train_examples": 9, "fine_tune": 1, "energy": "flat", "engine": "reference",
    "max_width": 2, "lanes": 2, "batching": "vmap", "devices": 1, "memory_limit": "1GB", "slots": "bfloat16",
    "policy": "uniform",
    "remat": True, "checkpoint": 2, "on_bad": "raise",
}  # fmt: skip
BESIDE = {"late": {"timeout": 9.0}}  # settings that another setting needs
CLIENT = ClientAlgorithm(*[lambda *args: None] * 4)  # never called
X, Y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
DEALT = data.from_arrays(clients=[(X, Y), (X, Y)], test=(X, Y))


def settings(given, **common):
    return Settings(**{"updates": 4, "model": "logistic", **common, **given})


USES = {
    "server": lambda given: resolved(settings(given)),
    "nodes": lambda given: resolved(settings(given, method="pushcen")),
    "reference": lambda given: settings(given, engine="reference"),
    "sweep": lambda given: plan_groups([settings(given)]), "trajectory": lambda given: trajectory(settings(given)),
    "own_client": lambda given: settings_from(None, {"updates": 4, "client": CLIENT, **given}),
    "adaptive": lambda given: resolved(settings(given, policy="uniform")),
    "dealt": lambda given: data_of(settings({**given, "dataset": DEALT})),
}  # fmt: skip
REFUSED = [(use, name) for use in USES for name in without_effect(use)]


def test_every_setting_is_in_a_group_and_keeps_its_place():
    assert list(CONCERNS) == [field.name for field in dataclasses.fields(Settings)]
    assert {concern.role for concern in CONCERNS.values()} == set(ROLES)
    assert set(REFUSALS) == set(USES)
    assert all(name in without_effect(use) for name, use in HINTS), "a hint for what is never refused"


@pytest.mark.parametrize(("use", "name"), REFUSED)
def test_a_setting_without_effect_is_refused(use, name):
    given = {**BESIDE.get(name, {}), name: GIVEN[name]}
    says = REFUSALS[use].format(method="pushcen" if use == "nodes" else "fedasync") + HINTS.get((name, use), "")
    first = next(one for one in without_effect(use) if one in given)  # in the order of the table: timeout before late
    assert refusal(USES[use], given) == f"{first} = {given[first]!r}: must be left out{says}"


@pytest.mark.parametrize("name", ["lr", "remat", "fine_tune"])
def test_settings_beside_a_client_object_are_refused_without_simulate_too(name):
    asked = settings({name: GIVEN[name], "client": CLIENT})
    says = refusal(client_of, SimpleNamespace(), asked, 2, method_of("fedasync"))
    assert says.startswith(f"{name} = ") and ": must be left out: the client algorithm" in says


def test_explain_leaves_out_what_does_not_change_the_run():
    for name in [name for name in without_effect("explain") if name in without_effect("nodes")]:
        plain = _plain(settings({name: GIVEN[name], "test_fraction": 0.2}), 4)
        assert given_in(plain).keys() == {"updates", "model", "test_fraction", "eval_updates"}
    stopping = settings({"eval_updates": 2, "patience": 2, "per_client": True})
    assert _plain(stopping, 4) == dataclasses.replace(stopping, per_client=DEFAULTS["per_client"])


def test_a_field_with_a_use_that_does_not_exist_is_refused(monkeypatch):
    group = dataclasses.make_dataclass("Group", [("mine", int, setting(1, "about", "tuned", without="swep"))])
    monkeypatch.setitem(concerns.GROUPS, "mine", group)
    is_refused(r"without of mine = \['swep'\]: must be of", concerns._read)


USUAL = {
    "tuned": ["lr", "batch_size", "epochs", "optimizer", "optimizer.momentum", "decay.steps", "method.mixing",
              "timing.size", "max_staleness"],
    "compared": ["method", "timing", "compress", "compress.ratio", "client", "engine"],
    "world": ["dataset", "partition", "partition.alpha", "clients", "delay", "delay.sigma", "faults.drop.probability",
              "availability", "model", "time", "updates", "eval_time", "test_fraction"],
    "seed": ["seed"],
}  # fmt: skip


def test_roles_are_the_usual_ones_unless_they_are_given():
    for role, paths in USUAL.items():
        assert {path: usual_role(path) for path in paths} == dict.fromkeys(paths, role)
    assert {usual_role(name) for name in FIELDS} == set(ROLES)
    assert [name for name in FIELDS if usual_role(name) == "seed"] == ["seed"]
    paths = ["method", "method.mixing", "delay", "seed"]
    given = {"method.mixing": "compared", "delay": "tuned", "seed": "seed"}
    assert roles_of(paths, given) == dict(zip(paths, ("compared", "compared", "tuned", "seed")))
    assert roles_of(paths) == roles_of(paths, {}) and list(roles_of(paths)) == paths


test_bad_roles = refusals(
    ({"lr": "tune"}, r"^roles\['lr'\] = 'tune': must be one of tuned, compared, world, seed"),
    ({"epochs": "tuned"}, "^roles = 'epochs': must be a setting that is swept: lr, seed"),
    ({"lr": "seed"}, r"^roles\['lr'\] = 'seed': must be seed for the setting seed, and another role for other"),
    ({"seed": "world"}, r"^roles\['seed'\] = 'world': must be seed for the setting seed"),
    ({"lr": 3}, r"^roles\['lr'\] = 3: must be one of tuned"),
    by=lambda given: roles_of(["lr", "seed"], given),
)


SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 4, "dataset": "fashion_mnist_6k"}
TAKEN = {
    simulate: (keywords.OfRuns, {*FIELDS, "data"}),
    compare: (keywords.OfComparisons, {*FIELDS, "data"} - {"method"}),
    sweep: (keywords.OfSweeps, {*FIELDS} - {*without_effect("sweep")}),
}


@pytest.mark.parametrize("function", TAKEN)
def test_the_typed_keywords_are_the_settings_with_their_defaults(function):
    kinds, names = TAKEN[function]
    assert set(kinds.__annotations__) == names
    found = inspect.signature(function).parameters
    assert names <= set(found) and not any(p.kind is p.VAR_KEYWORD for p in found.values())
    for name in names - {"data"}:
        kind, wanted = kinds.__annotations__[name].__forward_arg__, str(FIELDS[name].type)
        assert set(wanted.split(" | ")) <= set(kind.split(" | ")), name
        assert kind == wanted or name in KINDS, name
        assert found[name].default == DEFAULTS[name], name


@pytest.mark.parametrize("base", [SMALL, Settings(**SMALL)], ids=["mapping", "Settings"])
def test_keywords_change_the_base_of_a_sweep(base):
    found = sweep(base, {"lr": [0.1]}, updates=2, delay="constant")
    alone = simulate(**SMALL | {"lr": 0.1, "updates": 2, "delay": "constant"})
    np.testing.assert_array_equal(found.run(0).updates["arrival_time"], alone.updates["arrival_time"])
    assert found.settings[0].updates == 2


@pytest.mark.parametrize(("call", "total"), [
    (lambda progress: simulate(**SMALL, progress=progress), 4),
    (lambda progress: compare(["fedasync", "fedasync:mixing=0.3"], **SMALL, progress=progress), 8),
    (lambda progress: sweep(grid={"lr": [0.1, 0.2]}, **SMALL, progress=progress), 8),
], ids=["simulate", "compare", "sweep"])  # fmt: skip
def test_progress_means_the_same_everywhere(capfd, call, total):
    seen = []
    call(lambda done, of, *, time, staleness, accuracy: seen.append((done, of)))
    assert seen[-1] == (total, total) and seen == sorted(seen)
    assert capfd.readouterr().err == ""
    call(True)
    assert "updates" in capfd.readouterr().err
    call(False)
    assert capfd.readouterr().err == ""


def test_settings_are_shown_by_what_is_not_the_default():
    given = Settings(**SMALL, method="fedbuff:server_lr=0.3@buffer:size=2", lr=0.05)
    written = {"method": "fedbuff:server_lr=0.3@buffer:size=2", "clients": 4, "model": "logistic", "lr": 0.05}
    written |= {"steps": 1, "updates": 4}
    assert repr(given) == f"Settings({', '.join(f'{name}={value!r}' for name, value in written.items())})"
    assert Settings(**written) == given


TAKING = {"model": "logistic", "clients": 5, "steps": 1, "batch_size": 8, "eval_examples": 40, "updates": 10}
RULE = server.fedbuff()


def mean_loss(outputs, y):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def linear(loss=optax.softmax_cross_entropy_with_integer_labels):
    def apply(params, x, key=None):
        return x.reshape(x.shape[0], -1) @ params["w"]

    return Model(lambda key: {"w": jnp.zeros((784, 10))}, apply, loss)


def client_of_model(model):
    ready = models.decoded(model, lambda x: x.astype(jnp.float32) / 255)
    return local.local_training(ready, optimizer=optax.sgd(0.1), batch_size=8)


def only_lr(model, *, lr):
    return local.local_training(model, optimizer=optax.sgd(lr))


WRONG = [
    *[("proximal", value) for value in (-1, -1e-9, float("nan"), float("inf"), "0.1", True, None, [0.1])],
    *[("lr", value) for value in (0, -0.1, float("nan"), float("inf"), "0.1", True, None)],
    *[("optimizer", value) for value in (3, None, True)], *[("timing", value) for value in (3, ("every",))],
    *[("compress", value) for value in (3, True)], *[("feedback", value) for value in (3, "nope", True)],
    *[("client", value) for value in (3, "sgd")],
    *[("client", Spec(local.local_training, **{name: 0})) for name in (*LOCAL[2:4], "scale")],
    *[("plain_sgd", value) for value in ("no", 1, None)], *[("rule", value) for value in (3, None, "fedavg")],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_every_field_of_a_method_is_checked(field, value):
    made = Method(**{"rule": RULE, "timing": "buffer:size=5", field: value})
    is_refused(rf"^method\.{field} = ", lambda: prepare(Settings(**TAKING, method=made)))


def own_client(**settings):
    return {"client": client_of_model(linear()), **settings}


test_what_would_be_ignored_is_refused = refusals(
    *(({field: value}, rf"^{field} = .*: must be True or False") for field in ("remat", "per_client")
      for value in ("no", "", 1, None)),
    # a timing beside the method's own
    *(({"method": "fedbuff@buffer:size=5", "timing": timing},
       r"^timing = .*: must be left out: the method brings its own, buffer:size=5$")
      for timing in ("every", "window:length=3", lambda scenario: None)),
    # a client object, or a factory, beside what it ignores
    (own_client(optimizer="adam", method="scaffold"), "^optimizer = .*client"),
    (own_client(compute="bfloat16"), "^compute = 'bfloat16': must be float32 or float64: the client algorithm"),
    (own_client(method="fedprox"), "^proximal = .*client"),
    (own_client(method="fedbuff:proximal=0.3"), "^proximal = .*client"),
    (own_client(method=Method(RULE, proximal=0.1)), "^proximal = .*client"),
    (own_client(method=Method(RULE, client=Spec(server.feddyn_client, alpha=0.5))),
     r"^method = .*: must leave out the option alpha: the client algorithm"),
    ({"method": Method(RULE, proximal=0.2, client=only_lr)}, "^proximal = .*client"),
    # a loss that is a mean
    ({"model": linear(), "client": client_of_model(linear(mean_loss))},
     r"^client\.step.*shape of model\.loss = \[\]: must be \[8\]: one loss"),
    by=lambda settings: prepare(Settings(**TAKING | settings)),
)  # fmt: skip


def fair(*, gain: types.Traced = 0.5):
    return server.fedasync(mixing=0.1 + gain)


@pytest.mark.parametrize("method", [
    Method(RULE, proximal=jnp.float32(0.1), timing="buffer:size=5"),
    Spec(server.fedasync, mixing=0.3), Method(server.fedasync), Method(Spec(fair, gain=0)),
    Method(RULE, client=only_lr),
])  # fmt: skip
def test_what_a_method_may_hold_passes(method):
    prepare(Settings(**TAKING, lr=0.3, method=method))


def test_even_the_usual_value_is_refused_where_it_was_given():
    is_refused(r"^lr = 0\.01: must be left out", settings_from, None, {**TAKING, **own_client(), "lr": 0.01})
    assert as_dict(settings_from(None, {**TAKING, **own_client()}))["lr"] is None


test_a_correction_is_a_function = refusals(
    *((option, f"^{option} = 3: must be ") for option in ("correct", "scale")),
    by=lambda option: local.local_training(linear(), optimizer=optax.sgd(0.1), **{option: 3}),
)


def test_a_comparison_gives_its_timing_to_the_methods_without_one():
    methods = ("fedbuff", "fedbuff@buffer:size=5")
    given = [settings_in_comparison(Settings(**TAKING, timing="buffer:size=2"), method, methods) for method in methods]
    assert [one.timing for one in given] == ["buffer:size=2", None]
    assert [int(prepare(one).schedule.closes.sum()) for one in given] == [5, 2]
