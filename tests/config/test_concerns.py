"""Where settings have an effect, and their roles in sweeps: every setting has both, and others are refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_async import Settings, data
from fedjax_async.config import concerns, trajectory
from fedjax_async.config.clients import client_of
from fedjax_async.config.concerns import CONCERNS, HINTS, REFUSALS, without_effect
from fedjax_async.config.fields import setting
from fedjax_async.config.methods import method_of
from fedjax_async.config.paths import FIELDS
from fedjax_async.config.problem import data_of
from fedjax_async.config.resolving import resolved, settings_from
from fedjax_async.config.roles import ROLES, roles_of, usual_role
from fedjax_async.config.settings import DEFAULTS, given_in
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.results.explaining import _plain
from fedjax_async.types import ClientAlgorithm
from tests.told import refusal

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


def test_settings_beside_a_client_object_are_refused_without_simulate_too():
    for name in ("lr", "remat", "fine_tune"):
        asked = settings({name: GIVEN[name], "client": CLIENT})
        with pytest.raises(ValueError, match=f"^{name} = .*: must be left out: the client algorithm"):
            client_of(SimpleNamespace(), asked, 2, method_of("fedasync"))


def test_explain_leaves_out_what_does_not_change_the_run():
    for name in [name for name in without_effect("explain") if name in without_effect("nodes")]:
        plain = _plain(settings({name: GIVEN[name], "test_fraction": 0.2}), 4)
        assert given_in(plain).keys() == {"updates", "model", "test_fraction", "eval_updates"}
    stopping = settings({"eval_updates": 2, "patience": 2, "per_client": True})
    assert _plain(stopping, 4) == dataclasses.replace(stopping, per_client=DEFAULTS["per_client"])


def test_a_field_with_a_use_that_does_not_exist_is_refused(monkeypatch):
    group = dataclasses.make_dataclass("Group", [("mine", int, setting(1, "about", "tuned", without="swep"))])
    monkeypatch.setitem(concerns.GROUPS, "mine", group)
    with pytest.raises(ValueError, match=r"without of mine = \['swep'\]: must be of"):
        concerns._read()


# --- roles of swept settings --------------------------------------------------------------------

USUAL = {
    "tuned": ["lr", "batch_size", "epochs", "optimizer", "optimizer.momentum", "decay.steps", "method.mixing",
              "timing.size", "max_staleness"],
    "compared": ["method", "timing", "compress", "compress.ratio", "client", "engine"],
    "world": ["dataset", "partition", "partition.alpha", "clients", "delay", "delay.sigma", "faults.drop.probability",
              "availability", "model", "time", "updates", "eval_time", "test_fraction"],
    "seed": ["seed"],
}  # fmt: skip


def test_usual_roles():
    for role, paths in USUAL.items():
        assert {path: usual_role(path) for path in paths} == dict.fromkeys(paths, role)
    assert {usual_role(name) for name in FIELDS} == set(ROLES)
    assert [name for name in FIELDS if usual_role(name) == "seed"] == ["seed"]


def test_given_roles_replace_the_usual_ones():
    paths = ["method", "method.mixing", "delay", "seed"]
    given = {"method.mixing": "compared", "delay": "tuned", "seed": "seed"}
    assert roles_of(paths, given) == dict(zip(paths, ("compared", "compared", "tuned", "seed")))
    assert roles_of(paths) == roles_of(paths, {}) and list(roles_of(paths)) == paths


@pytest.mark.parametrize(("given", "says"), [
    ({"lr": "tune"}, r"roles\['lr'\] = 'tune': must be one of tuned, compared, world, seed"),
    ({"epochs": "tuned"}, "roles = 'epochs': must be a setting that is swept: lr, seed"),
    ({"lr": "seed"}, r"roles\['lr'\] = 'seed': must be seed for the setting seed, and another role for other"),
    ({"seed": "world"}, r"roles\['seed'\] = 'world': must be seed for the setting seed"),
    ({"lr": 3}, r"roles\['lr'\] = 3: must be one of tuned"),
])  # fmt: skip
def test_bad_roles(given, says):
    with pytest.raises(ValueError, match=says):
        roles_of(["lr", "seed"], given)
